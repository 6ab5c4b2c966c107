"""When this process stood still: stopped by a signal, frozen, or without a processor.

Owns the thread that notices and a short memory; knows nothing of what the process does. To the loop
a pause looks like a step, or work of its own, that took long. A thread that wakes late although the
process used no processor time meanwhile tells the two apart.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pdtrace.clock import SYSTEM_CLOCK, Clock

EVERY_NS = 100_000_000
FLOOR_NS = 200_000_000
"""A pause shorter than this is no pause: threads wake late when others compute."""
MAX_PAUSES = 32


def never_paused(_begin_ns: int, _end_ns: int) -> Sequence[tuple[int, int]]:
    """For a process that nobody watches."""
    return ()


class Pauses:
    """The latest pauses. One thread looks, another asks.

    cpu_ns   processor time that the process has used, nanoseconds
    """

    def __init__(
        self, clock: Clock = SYSTEM_CLOCK, cpu_ns: Callable[[], int] = time.process_time_ns
    ) -> None:
        self._now_ns = clock.monotonic_ns
        self._cpu_ns = cpu_ns
        self._past: deque[tuple[int, int]] = deque(maxlen=MAX_PAUSES)
        self._looked = (self._now_ns(), cpu_ns())

    def look(self) -> None:
        """Note the pause since the last look, if there was one. Meant for every EVERY_NS."""
        pause = self._latest()
        if pause is not None:
            self._past.append(pause)
        self._looked = (self._now_ns(), self._cpu_ns())

    def within(self, begin_ns: int, end_ns: int) -> tuple[tuple[int, int], ...]:
        """Pauses, begin and end each, that overlap the time from `begin_ns` to `end_ns`. They may
        overlap each other. The one that nobody has looked at yet is among them."""
        latest = self._latest()  # first: what is looked at from here on is among the past ones
        pauses = (*self._past, *(() if latest is None else (latest,)))
        return tuple(pause for pause in pauses if pause[0] < end_ns and pause[1] > begin_ns)

    def _latest(self) -> tuple[int, int] | None:
        then_ns, cpu_then_ns = self._looked
        now_ns = self._now_ns()
        late_ns = now_ns - then_ns - EVERY_NS
        if late_ns < FLOOR_NS:
            return None
        # What the process computed, beyond what fits before the look was due, was no pause.
        busy_ns = max(0, self._cpu_ns() - cpu_then_ns - EVERY_NS)
        paused_ns = late_ns - busy_ns
        return None if paused_ns < FLOOR_NS else (now_ns - paused_ns, now_ns)


class PauseThread:
    """Looks every EVERY_NS until `stop`."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Wait for the thread, at most `timeout_s`. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_NS / 1e9):
            self._pauses.look()
