"""How long somebody has not answered. Pure.

Owns the sum; knows nothing of who is asked or what follows. What counts is time in which this loop
went round: while it stood still (a long step, a stopped process) answers may lie unread, and that
is nobody's silence.
"""

from __future__ import annotations

MAX_LOOK_NS = 1_000_000_000
"""What one look at the clock adds at most."""


class Silence:
    """Nanoseconds of silence so far; 0 after each answer."""

    def __init__(self) -> None:
        self._ns = 0
        self._looked_ns: int | None = None

    def look(self, now_ns: int) -> int:
        """Count the time since the last look, and return the sum."""
        if self._looked_ns is not None:
            self._ns += min(max(0, now_ns - self._looked_ns), MAX_LOOK_NS)
        self._looked_ns = now_ns
        return self._ns

    def end(self) -> None:
        """There was an answer, or nobody is asked any more: counting begins with the next look."""
        self._ns = 0
        self._looked_ns = None
