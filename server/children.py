"""Child processes of the launcher: spawn, watch, explain an exit, stop in bounded time.

Owns pids and log files; knows nothing of what the children do. Children run in process groups of
their own, so a Ctrl-C in the terminal reaches the launcher alone and the order of stopping is its.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.process import EXIT_START_ERROR

PROJECT_ROOT = Path(__file__).resolve().parent.parent
PROCESS_MODULE = "server.process"
"""Entry of every child, unless the launcher is told another."""
_POLL_S = 0.05
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Child:
    """One running or ended process. `log` holds its stdout and stderr."""

    instance: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.process.poll()

    def log_tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log; empty when there are none."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    @property
    def name(self) -> str:
        """Which process this is: `decode-0 (pid 7)`."""
        return f"{self.instance} (pid {self.pid})"

    def describe_exit(self) -> str:
        """How it ended, as a phrase: `decode-0 (pid 7) was killed by SIGKILL`."""
        code = self.exit_code
        if code is None:
            return f"{self.name} is running"
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} exited with code {code}"

    def take_stop_change(self) -> bool | None:
        """True: a signal stopped it, False: it continues; None: no change since the last call."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # it ended, and that was noticed
            return None
        return None if found is None else found.si_code == os.CLD_STOPPED


def spawn(
    *,
    instance: str,
    role: str,
    config: Path,
    log: Path,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    module: str = PROCESS_MODULE,
) -> Child:
    """Start `python -m MODULE` for `config` in a process group of its own."""
    paths = [str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(config), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=tuple(pass_fds),
            process_group=0,
        )
    return Child(instance, role, process, log)


def first_exited(children: Iterable[Child]) -> Child | None:
    """A child that is no longer running, in order of starting."""
    return next((child for child in children if child.exit_code is not None), None)


def stop(
    children: Sequence[Child], *, timeout_s: float, hurry: Callable[[], bool] = lambda: False
) -> list[Child]:
    """SIGTERM to all of `children`, then SIGKILL to those that still run after `timeout_s`.

    `hurry` is asked while waiting; once it is true, the rest is killed at once. Returns the
    children that had to be killed.
    """
    running = [child for child in children if child.exit_code is None]
    for child in running:
        child.process.send_signal(signal.SIGTERM)
        # A stopped process takes no SIGTERM before it continues.
        child.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    while running and time.monotonic() < deadline and not hurry():
        time.sleep(_POLL_S)
        running = [child for child in running if child.exit_code is None]
    kill(running)
    return running


def explain_start_failure(child: Child) -> str:
    """One line where the child left one, else how it ended and the end of its log."""
    tail = child.log_tail()
    if child.exit_code == EXIT_START_ERROR and tail and tail[-1].startswith("error: "):
        return f"{child.instance}: {tail[-1].removeprefix('error: ')}"
    return explain_crash(child)


def explain_crash(child: Child) -> str:
    """How `child` ended, and the last lines of its log."""
    quoted = "".join(f"\n  {line}" for line in child.log_tail())
    return f"{child.describe_exit()}; the end of {child.log}:{quoted or ' (empty)'}"


def wait(child: Child, *, timeout_s: float, hurry: Callable[[], bool]) -> int | None:
    """Exit code of `child`, which ends by itself; None when it still runs after `timeout_s` or once
    `hurry` is true."""
    deadline = time.monotonic() + timeout_s
    while child.exit_code is None and time.monotonic() < deadline and not hurry():
        time.sleep(_POLL_S)
    return child.exit_code


def kill(children: Iterable[Child]) -> None:
    """SIGKILL to those that still run, and wait for them."""
    running = [child for child in children if child.exit_code is None]
    for child in running:
        child.process.kill()
    for child in running:
        child.process.wait()
