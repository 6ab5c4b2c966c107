"""The processes of a running server: started, looked at, started again when they end.

Owns the link between a process and its life (`server.supervision`), and what an operator is told of
it; the order of stopping is `server.launch`. A process is started again with the same name,
endpoint and log, so that the others find it, and with another incarnation, so that they can tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server import children
from server.children import PROCESS_MODULE, Child, explain_crash
from server.config import ProcessConfig
from server.errors import ServerError
from server.plan import successor
from server.process import AGENT
from server.readiness import ReadyPipe
from server.rundir import RunDir, write_private
from server.supervision import (
    Life,
    Phase,
    RestartPolicy,
    became_ready,
    ended,
    is_due,
    started,
)

AGENT_POLICY = RestartPolicy(max_failures=None)
"""Serving does not depend on the agent: it may fail as often as it likes."""


class ServerCrashedError(ServerError):
    """A process ended and is not started again; the message has its last log lines."""

    code = "server_crashed"


@dataclass(slots=True)
class Member:
    """One instance: what its present process was told, that process, and its life so far.

    stopped     a signal (SIGSTOP) holds it: it neither serves nor ends
    last_exit   how the process before this one ended; None for the first
    """

    config: ProcessConfig
    child: Child
    pipe: ReadyPipe
    life: Life
    stopped: bool = False
    last_exit: str | None = None

    @property
    def state(self) -> str:
        """What `server.json` calls it."""
        return "stopped" if self.stopped else self.life.phase.value

    @property
    def recorded(self) -> bool | None:
        """Whether what it does is recorded; None for the agent, which serves no request."""
        if self.config.role == AGENT:
            return None
        return self.config.settings.record and not self.pipe.unrecorded


class Supervisor:
    """All processes of one server, in order of starting. Times are monotonic seconds.

    policy        of the serving processes; the agent has its own
    environment   added to each process's
    module        what the processes run: takes the arguments of `server.process`
    """

    def __init__(
        self, run_dir: RunDir, *, policy: RestartPolicy, environment: Mapping[str, str]
    ) -> None:
        self.members: list[Member] = []
        self.module = PROCESS_MODULE
        self._run_dir = run_dir
        self._policy = policy
        self._environment = environment

    @property
    def children(self) -> list[Child]:
        return [member.child for member in self.members]

    def start(self, config: ProcessConfig, now_s: float) -> None:
        """Start one more instance. Raises OSError when that is not possible."""
        child, pipe = self._spawn(config)
        self.members.append(Member(config, child, pipe, Life(since_s=now_s)))

    def look(self, now_s: float) -> list[str]:
        """Take note of what happened and start what is due; sentences for the operator.

        Raises ServerCrashedError for a process that ended and is not to be started again.
        """
        said: list[str] = []
        for member in self.members:
            said += self._look_at(member, now_s)
        return said

    def first_exited(self) -> Child | None:
        """A process that is no longer running, in order of starting."""
        return children.first_exited(self.children)

    def run_once_more(self, member: Member, config: ProcessConfig) -> Child:
        """Start `config` in place of an instance that ended and is left to itself from here on."""
        member.pipe.close()
        member.config = config
        member.child, member.pipe = self._spawn(config)
        return member.child

    def close(self) -> None:
        """Kill what still runs. Idempotent."""
        children.kill(self.children)
        for member in self.members:
            member.pipe.close()

    def _look_at(self, member: Member, now_s: float) -> list[str]:
        said: list[str] = []
        if member.life.phase is Phase.STARTING and member.pipe.is_ready():
            if member.life.restarts:
                took_s = now_s - member.life.since_s
                said.append(f"{member.child.name} is ready again, {took_s:.1f} s after its start")
            if member.pipe.unrecorded:
                said.append(
                    f"warning: {member.child.name} serves without being recorded, as no ring could "
                    f"be made: make room in {self._run_dir.path}, then `kill {member.child.pid}`"
                )
            member.life = became_ready(member.life, now_s)
        if member.life.phase is Phase.ENDED:
            if is_due(member.life, now_s):
                said += self._start_again(member, now_s)
        elif member.child.exit_code is not None:
            said.append(self._note_end(member, now_s))
        else:
            said += _note_stop(member)
        return said

    def _note_end(self, member: Member, now_s: float) -> str:
        member.stopped = False
        policy = AGENT_POLICY if member.config.role == AGENT else self._policy
        member.life = ended(member.life, now_s, policy, in_order=member.child.exit_code == 0)
        how = member.child.describe_exit()
        member.last_exit = how.removeprefix(f"{member.child.name} ")
        if member.config.pool_path is not None:  # a killed worker leaves it behind
            with contextlib.suppress(OSError):  # what is left goes when the server stops
                Path(member.config.pool_path).unlink(missing_ok=True)
        if member.life.phase is Phase.GIVEN_UP:
            raise ServerCrashedError(_explain_end(member))
        pause_s = (member.life.due_s or now_s) - now_s
        when = f"in {pause_s:.0f} s" if pause_s else "at once"
        return f"warning: {how}; it is started again {when} (log: {member.child.log})"

    def _start_again(self, member: Member, now_s: float) -> list[str]:
        config = successor(member.config)
        member.life = started(member.life, now_s)
        try:
            child, pipe = self._spawn(config)
        except OSError as error:  # no room for its configuration, no memory, no process
            policy = AGENT_POLICY if member.config.role == AGENT else self._policy
            member.life = ended(member.life, now_s, policy)
            if member.life.phase is Phase.GIVEN_UP:
                raise ServerCrashedError(
                    f"{config.instance} cannot be started again: {error.strerror}"
                ) from error
            return [f"warning: {config.instance} cannot be started again yet: {error.strerror}"]
        member.pipe.close()
        member.config, member.child, member.pipe = config, child, pipe
        return [f"{child.name} is starting in its place"]

    def _spawn(self, config: ProcessConfig) -> tuple[Child, ReadyPipe]:
        pipe = ReadyPipe()
        try:
            config = msgspec.structs.replace(config, ready_fd=pipe.write_fd)
            path = self._run_dir.config(config.instance)
            write_private(path, msgspec.json.encode(config))
            child = children.spawn(
                instance=config.instance,
                role=config.role,
                config=path,
                log=self._run_dir.log(config.instance),
                environment=self._environment,
                module=self.module,
                pass_fds=[fd for fd in (config.http_fd, config.ready_fd) if fd is not None],
            )
        except BaseException:
            pipe.close()
            raise
        pipe.close_writer()
        return child, pipe


def _note_stop(member: Member) -> list[str]:
    change = member.child.take_stop_change()
    if change is None or change == member.stopped:
        return []
    member.stopped = change
    if change:
        return [
            f"warning: {member.child.name} is stopped by a signal; it is left as it is, and used "
            f"again once it continues (kill -CONT {member.child.pid})"
        ]
    return [f"{member.child.name} continues"]


def _explain_end(member: Member) -> str:
    text = explain_crash(member.child)
    if member.life.failures > 1:
        return f"{member.life.failures} in a row were never ready; {text}"
    return text
