"""Start a server, keep it running, stop it.

Owns what a server is as a whole: its sockets and directory, the order of stopping, what
`server.json` says. Which processes there are is `server.plan`, that they are started again is
`server.supervisor`, pids and exits are `server.children`, folders and locks are `server.rundir`;
the command line is `server.cli`.

The launcher keeps the public socket open, so that a gateway may be replaced: connections that come
meanwhile wait in the backlog. It keeps the agent's port too, which nobody else gets meanwhile.

Order of stopping: gateway (drains), workers, transfer, agent. The agent is last, so that what the
others recorded while they stopped is exported too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from server import children
from server.children import Child, explain_start_failure
from server.config import NO_AGENT_HTTP, Settings
from server.engine.loader import load_model_info
from server.errors import ServerError, StartError
from server.listening import (
    free_loopback_port,
    is_ready,
    listen,
    reachable_host,
    reserve_agent_port,
)
from server.models import is_fake
from server.plan import agent_config, plan_processes, pool_bytes
from server.process import AGENT, EXIT_START_ERROR
from server.rundir import RunDir, point_latest, write_private
from server.serve import DRAIN_S
from server.supervision import RestartPolicy
from server.supervisor import Member, ServerCrashedError, Supervisor
from server.wire.endpoints import LoopbackPorts

STATE_VERSION = 1
_POLL_S = 0.1
_REWRITE_S = 1.0  # until a state file that could not be written is tried again
_STOP_S = 10.0
_AGENT_STOP_S = 20.0
_STOP_ORDER = (("gateway",), ("prefill", "decode", "worker"), ("transfer",), (AGENT,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a running server tells others: printed by `up --json`, written to `server.json`.

    processes   the present process of each instance, with its state: starting, ready, ended (and
                soon replaced), stopped (by a signal), given_up; `recorded`: what it does is
    ready       it was ready once, and is not stopped
    """

    url: str
    agent_url: str | None
    model: str
    mode: str
    pid: int
    run_dir: str
    processes: list[dict[str, object]]
    settings: dict[str, object]
    started_at: float
    version: int = STATE_VERSION
    ready: bool = False
    stopped_at: float | None = None


@dataclass(slots=True)
class Launcher:
    """One server. `start`, `wait_until_ready`, `watch`, `stop`; `stop` is safe at any point."""

    settings: Settings
    run_dir: RunDir
    listener: socket.socket
    agent_port: socket.socket | None  # keeps the port; the agent listens on it
    model_name: str
    supervisor: Supervisor
    started_at: float = field(default_factory=time.time)
    _signals: int = 0
    _was_ready: bool = False
    _state_is_old: bool = False
    _rewrite_at_s: float = 0.0

    @classmethod
    def prepare(cls, settings: Settings, *, fresh: bool = False) -> Launcher:
        """Check everything that can be checked before a process starts.

        Raises StartError or ModelError: no such model, port taken, run directory in use, no room.
        """
        info = load_model_info(settings.model)
        needed = pool_bytes(settings)
        with contextlib.ExitStack() as unless_prepared:
            agent_port = reserve_agent_port(settings)
            if agent_port is not None:
                unless_prepared.callback(agent_port.close)
            listener = listen(settings.host, settings.port)
            unless_prepared.callback(listener.close)
            run_dir = RunDir.acquire(settings.run_path, fresh=fresh)
            unless_prepared.callback(run_dir.release)
            run_dir.place_pools(needed)
            unless_prepared.pop_all()
        model = settings.model
        settings = msgspec.structs.replace(
            settings,
            port=listener.getsockname()[1],
            run_dir=str(run_dir.path),
            model=model if model is None or is_fake(model) else str(Path(model).absolute()),
            served_name=settings.served_name or info.name,
            agent_port=NO_AGENT_HTTP if agent_port is None else agent_port.getsockname()[1],
        )
        supervisor = Supervisor(
            run_dir,
            policy=RestartPolicy(restart=settings.restart),
            environment=thread_limits(settings.threads),
        )
        return cls(
            settings, run_dir, listener, agent_port, settings.served_name or info.name, supervisor
        )

    @property
    def url(self) -> str:
        host = reachable_host(self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def agent_url(self) -> str | None:
        """Where the agent answers; None where it does not."""
        port = self.settings.agent_port
        return None if port == NO_AGENT_HTTP else f"http://127.0.0.1:{port}"

    @property
    def stop_requested(self) -> bool:
        return self._signals > 0

    def catch_signals(self) -> None:
        """SIGINT, SIGTERM and SIGHUP ask for a stop; a second one hurries it, see `stop`."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def start(self) -> None:
        """Spawn all processes. The gateway accepts connections from here on."""
        assert self.run_dir.pools is not None
        endpoint = self.run_dir.endpoint
        if self.settings.control == "tcp":
            endpoint = LoopbackPorts(free_loopback_port).endpoint
        plan = plan_processes(
            self.settings,
            endpoint=endpoint,
            pools=self.run_dir.pools,
            http_fd=self.listener.fileno(),
            free_port=free_loopback_port,
        )
        if self.settings.record:
            plan.insert(0, agent_config(self.settings, endpoint=endpoint))
        for config in plan:
            try:
                self.supervisor.start(config, time.monotonic())
            except OSError as error:
                raise StartError(
                    f"cannot start {config.instance} in {self.run_dir.path}: {error.strerror}. "
                    "Make room there, or choose another --run-dir"
                ) from error
        if not self.settings.restart:
            # While a copy stays open here, connections would be accepted after the gateway's death.
            self.listener.close()
        self._write_state()

    def wait_until_ready(self, *, timeout_s: float, progress: Callable[[float], None]) -> bool:
        """Wait until a generation is possible; False when a stop was asked for meanwhile.

        Raises StartError with the reason when a process ends or time is up: while nobody is served
        yet, whoever started the server must hear of it at once.
        """
        begin = time.monotonic()
        host = reachable_host(self.settings.host)
        while not self.stop_requested:
            exited = self.supervisor.first_exited()
            if exited is not None:
                raise StartError(explain_start_failure(exited))
            if is_ready(host, self.settings.port):
                self._was_ready = True
                self._look()
                self._write_state()
                return True
            waited = time.monotonic() - begin
            if waited > timeout_s:
                raise StartError(
                    f"not ready after {waited:.0f} s: see {self.run_dir.path / 'logs'}, "
                    "or wait longer with --start-timeout"
                )
            progress(waited)
            time.sleep(_POLL_S)
        return False

    def watch(self) -> None:
        """Keep every process running; return when a stop is asked for.

        Raises ServerCrashedError when a process ends and is not to be started again.
        """
        while not self.stop_requested:
            self._look()
            time.sleep(_POLL_S)

    def stop(self) -> list[Child]:
        """Stop every process in order, each within a bound. Returns those that had to be killed.

        Another signal meanwhile kills those that serve; the agent, which has their marks to
        export, is killed by the signal after it.
        """
        self.listener.close()  # the gateway's copy is the last: who comes after it is refused
        killed: list[Child] = []
        already = self._signals
        agent = self._agent()
        agent_was_gone = agent is not None and agent.child.exit_code is not None
        deadlines = self.settings.deadlines
        for roles in _STOP_ORDER:
            more = 1 if AGENT in roles else 0
            if "gateway" in roles:
                timeout_s = deadlines.drain_s + _STOP_S
            elif "transfer" in roles:
                timeout_s = _STOP_S
            else:
                timeout_s = (
                    _AGENT_STOP_S if AGENT in roles else deadlines.stop_s + DRAIN_S + _STOP_S
                )
            killed += children.stop(
                [child for child in self.supervisor.children if child.role in roles],
                timeout_s=timeout_s,
                hurry=lambda enough=already + more: self._signals > enough,
            )
        if agent is not None and agent.child not in killed:
            unfinished = agent_was_gone or agent.child.exit_code != 0
            if unfinished and self._was_ready:
                self._export_the_rest(agent, hurry=lambda: self._signals > already + 1)
        return killed

    def _export_the_rest(self, agent: Member, *, hurry: Callable[[], bool]) -> None:
        """The agent died and was not back, or not yet able to stop in order: let another one read
        what is left in the rings."""
        config = msgspec.structs.replace(agent.config, until_closed=True)
        try:
            last = self.supervisor.run_once_more(agent, config)
        except OSError as error:
            trouble = f"no agent can be started: {error.strerror}"
        else:
            if children.wait(last, timeout_s=_AGENT_STOP_S, hurry=hurry) == 0:
                return
            children.kill([last])
            trouble = last.describe_exit()
        _say(
            f"warning: {trouble}; what was not exported is in the rings: "
            f"pdtrace agent --rings {self.settings.rings_path} --out {self.run_dir.path} "
            "--until-closed"
        )

    def close(self) -> None:
        """Kill whatever still runs and release the run directory. Idempotent."""
        self.supervisor.close()
        self.listener.close()
        if self.agent_port is not None:
            self.agent_port.close()
        if self.supervisor.members:
            self._write_state(stopped_at=time.time())
        self.run_dir.release()

    def state(self, *, stopped_at: float | None = None) -> ServerState:
        """What `server.json` says; the API key is left out."""
        settings = msgspec.to_builtins(self.settings)
        settings["api_key"] = None if self.settings.api_key is None else "(set)"
        return ServerState(
            url=self.url,
            agent_url=self.agent_url,
            model=self.model_name,
            mode=self.settings.mode,
            pid=os.getpid(),
            run_dir=str(self.run_dir.path),
            processes=[_describe(member) for member in self.supervisor.members],
            settings=settings,
            started_at=self.started_at,
            ready=self._was_ready and stopped_at is None,
            stopped_at=stopped_at,
        )

    def _agent(self) -> Member | None:
        members = self.supervisor.members
        return next((member for member in members if member.config.role == AGENT), None)

    def _look(self) -> None:
        before = [member.state for member in self.supervisor.members]
        try:
            for sentence in self.supervisor.look(time.monotonic()):
                _say(sentence)
        finally:
            changed = before != [member.state for member in self.supervisor.members]
            if changed or (self._state_is_old and time.monotonic() >= self._rewrite_at_s):
                self._write_state()

    def _write_state(self, *, stopped_at: float | None = None) -> None:
        """A disk that is full costs who reads the file, not those who are served."""
        state = msgspec.to_builtins(self.state(stopped_at=stopped_at))
        temporary = self.run_dir.path / ".server.json"
        try:
            write_private(temporary, json.dumps(state, indent=2).encode() + b"\n")
            temporary.replace(self.run_dir.state_file)
        except OSError as error:
            if not self._state_is_old:
                _say(
                    f"warning: cannot write {self.run_dir.state_file}, which is out of date: "
                    f"{error.strerror}"
                )
            self._state_is_old = True
            self._rewrite_at_s = time.monotonic() + _REWRITE_S
        else:
            self._state_is_old = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1


def run_server(
    settings: Settings,
    *,
    fresh: bool,
    start_timeout_s: float,
    progress: Callable[[float], None],
    on_ready: Callable[[Launcher], None],
    latest: bool = False,
) -> int:
    """Run a server until it is stopped; the exit code of `python -m server up`.

    0 after a stop that was asked for, 1 when a process ended and is not started again, 2 when the
    server cannot start. The reason goes to stderr.
    """
    try:
        launcher = Launcher.prepare(settings, fresh=fresh)
    except (ServerError, ValueError) as error:  # ModelError is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return EXIT_START_ERROR
    exit_code = 0
    try:
        launcher.catch_signals()
        launcher.start()
        if launcher.wait_until_ready(timeout_s=start_timeout_s, progress=progress):
            if latest:  # not earlier: a failed start has nothing to show
                point_latest(launcher.run_dir.path)
            on_ready(launcher)
            launcher.watch()
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = EXIT_START_ERROR
    except ServerCrashedError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = 1
    finally:
        killed = launcher.stop()
        launcher.close()
    for child in killed:
        _say(f"warning: {child.instance} did not stop in time and was killed")
    if exit_code == 0:
        recorded = f"; recorded in {settings.run_dir}" if settings.record else ""
        _say(f"stopped{recorded}")
    return exit_code


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that keeps every numeric library of a process to `threads` threads."""
    count = str(threads)
    names = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")
    return {
        **{f"{name}_NUM_THREADS": count for name in names},
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _describe(member: Member) -> dict[str, object]:
    return {
        "instance": member.config.instance,
        "role": member.config.role,
        "pid": member.child.pid,
        "endpoint": member.config.endpoint,
        "log": str(member.child.log),
        "state": member.state,
        "incarnation": member.config.incarnation,
        "restarts": member.life.restarts,
        "last_exit": member.last_exit,
        "recorded": member.recorded,
    }


def _say(sentence: str) -> None:
    """To the operator, on stderr: that may be closed, or a file on a disk that is full."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)
