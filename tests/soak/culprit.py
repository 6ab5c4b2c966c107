"""Does to a running server what `tests.soak.mischief` chose.

Owns signals, the way into processes, and that whoever was stopped goes on. A process that is gone
just then is no error: then this time nothing happens.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from server.errors import StartError
from server.injection.client import FaultClient
from server.injection.fault import Fault
from tests.soak.mischief import Crowd, Freeze, Inject, Kill, LeaveAll, Mischief, Terminate
from tests.support.aftermath import processes_of

ANSWER_S = 1.0


class Culprit:
    """tell    says a word to the load"""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._tell = tell
        self._stopped: list[tuple[float, int]] = []  # when to continue whom, a heap
        self.gateway_ends_s: list[float] = []
        """When a gateway was killed or told to stop."""

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
            case Freeze(instance, seconds):
                pid = self._signal(instance, signal.SIGSTOP)
                if pid is not None:
                    heapq.heappush(self._stopped, (time.monotonic() + seconds, pid))
            case Inject(fault):
                self._inject(fault)
            case LeaveAll():
                self._tell("drop")
            case Crowd(clients):
                self._tell(f"burst {clients}")

    def go_on(self, *, all_of_them: bool = False) -> None:
        """Continue those whose time is up, or all."""
        while self._stopped and (all_of_them or self._stopped[0][0] <= time.monotonic()):
            _, pid = heapq.heappop(self._stopped)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Nothing goes wrong from here on."""
        self.go_on(all_of_them=True)
        with contextlib.suppress(StartError), FaultClient(self._run_dir) as client:
            client.tell(clear=True, timeout_s=5.0)

    def _signal(self, instance: str, number: int) -> int | None:
        pid = next(p.pid for p in processes_of(self._run_dir) if p.instance == instance)
        if instance.startswith("gateway") and number != signal.SIGSTOP:
            self.gateway_ends_s.append(time.monotonic())
        try:
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)  # one that is stopped would not hear it
        except ProcessLookupError:
            return None
        return pid

    def _inject(self, fault: Fault) -> None:
        with contextlib.suppress(StartError), FaultClient(self._run_dir) as client:
            client.tell((fault,), timeout_s=ANSWER_S)
