"""Does to a running server what `tests.soak.mischief` chose.

Owns signals, the way into processes, and that whoever was stopped goes on. A process that is gone
just then is no error: then this time nothing happens.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from server.errors import StartError
from server.injection.client import FaultClient
from server.injection.fault import Fault, ShiftClock, Shrink
from tests.soak.mischief import (
    Crowd,
    Inject,
    Kill,
    LeaveAll,
    Mischief,
    SetClock,
    Stop,
    TakePages,
    Terminate,
)
from tests.support.present import processes_of

ANSWER_S = 1.0


class Culprit:
    """tell    says a word to the load"""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._tell = tell
        self._undo: list[tuple[float, int, Callable[[], object]]] = []  # when, what: a heap
        self._order = itertools.count()
        self.gateway_ends_s: list[float] = []
        """When a gateway was killed or told to stop."""
        self.wrong_clocks: set[int] = set()
        """Pids of the processes whose clock was set."""

    def instances(self) -> list[str]:
        """Who may be hit: every process but the launcher."""
        return [process.instance for process in processes_of(self._run_dir)]

    def do(self, mischief: Mischief) -> None:
        """Returns at once; `go_on` ends what has a duration."""
        match mischief:
            case Kill(instance):
                self._signal(instance, signal.SIGKILL)
            case Terminate(instance):
                self._signal(instance, signal.SIGTERM)
            case Stop(instance, seconds):
                pid = self._signal(instance, signal.SIGSTOP)
                if pid is not None:
                    self._later(seconds, partial(_send, pid, signal.SIGCONT))
            case Inject(fault):
                self._inject(fault)
            case SetClock(instance, by_s, lasts_s):
                pid = self._pid(instance)
                self.wrong_clocks.add(pid)
                self._inject(ShiftClock(at=instance, seconds=by_s))
                self._later(lasts_s, partial(_tell_to_stop, pid))
            case TakePages(instance, pages, lasts_s):
                self._inject(Shrink(at=instance, pages=pages))
                self._later(lasts_s, self._clear)
            case LeaveAll():
                self._tell("drop")
            case Crowd(clients):
                self._tell(f"burst {clients}")

    def go_on(self, *, all_of_it: bool = False) -> None:
        """Undo what has lasted long enough, or all."""
        while self._undo and (all_of_it or self._undo[0][0] <= time.monotonic()):
            heapq.heappop(self._undo)[-1]()

    def stop(self) -> None:
        """Nothing goes wrong from here on."""
        self.go_on(all_of_it=True)
        self._clear()

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + seconds, next(self._order), undo))

    def _pid(self, instance: str) -> int:
        return next(p.pid for p in processes_of(self._run_dir) if p.instance == instance)

    def _signal(self, instance: str, number: int) -> int | None:
        pid = self._pid(instance)
        if instance.startswith("gateway") and number != signal.SIGSTOP:
            self.gateway_ends_s.append(time.monotonic())
        if number == signal.SIGTERM:
            return pid if _tell_to_stop(pid) else None
        return pid if _send(pid, number) else None

    def _clear(self) -> None:
        with contextlib.suppress(StartError), FaultClient(self._run_dir) as client:
            client.tell(clear=True, timeout_s=5.0)

    def _inject(self, fault: Fault) -> None:
        with contextlib.suppress(StartError), FaultClient(self._run_dir) as client:
            client.tell((fault,), timeout_s=ANSWER_S)


def _tell_to_stop(pid: int) -> bool:
    # One that is stopped would not hear it.
    return _send(pid, signal.SIGTERM) and _send(pid, signal.SIGCONT)


def _send(pid: int, number: int) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
