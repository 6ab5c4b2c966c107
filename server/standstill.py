"""Pauses of this process as its loop comes upon them: each is told once, to whom it kept waiting.

Owns what was told already; `server.pauses` knows when the process stood still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.pauses import FLOOR_NS

Pause = tuple[int, int]
"""Begin and end, CLOCK_MONOTONIC nanoseconds."""

WAKING_NS = 30_000_000
"""Messages that lay in a socket while the process stood still come within this time."""


class Standstill:
    """Asked by the loop whenever it has gone on.

    pauses   those, with their begins and ends, that overlap a time; they may overlap each other
    """

    def __init__(self, pauses: Callable[[int, int], Sequence[Pause]], now_ns: int) -> None:
        self._pauses = pauses
        self._looked_ns = now_ns
        self._told_until_ns = now_ns
        self._latest: Pause | None = None

    def news(self, now_ns: int) -> Sequence[Pause]:
        """Pauses since the last call, in order, without what was told before. Asks nobody as long
        as the loop comes round in time."""
        since_ns, self._looked_ns = self._looked_ns, now_ns
        if now_ns - since_ns < FLOOR_NS:
            return ()
        told: list[Pause] = []
        for pause_ns, end_ns in sorted(self._pauses(since_ns, now_ns)):
            begin_ns = max(pause_ns, self._told_until_ns)
            if end_ns - begin_ns >= FLOOR_NS:
                told.append((begin_ns, end_ns))
                self._told_until_ns = end_ns
        if told:
            self._latest = told[-1]
        return told

    def before(self, arrived_ns: int) -> Pause | None:
        """The pause that kept a message waiting which has arrived just behind it; None if none."""
        if self._latest is None:
            return None
        begin_ns, end_ns = self._latest
        return self._latest if begin_ns <= arrived_ns <= end_ns + WAKING_NS else None
