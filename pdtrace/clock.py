"""Clocks, and the anchor that turns monotonic time into wall time. Knows nothing of other hosts.

Instants are `CLOCK_MONOTONIC` nanoseconds: all processes of one host share that clock, and it never
steps. Wall time appears only when spans are exported, through one anchor per process.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

ANCHOR_TRIES = 5


class Clock(Protocol):
    """Source of both times, in nanoseconds."""

    def monotonic_ns(self) -> int:
        """`CLOCK_MONOTONIC`; comparable between processes of one boot of one host."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may step."""
        ...


class SystemClock:
    """The operating system's clocks."""

    # Bound builtins rather than methods: the recorder calls monotonic_ns once per mark.
    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


SYSTEM_CLOCK = SystemClock()


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """One instant on both clocks, read together.

    error_ns  half of the time that reading the pair took: the pair is right to within this
    """

    monotonic_ns: int
    wall_ns: int
    error_ns: int = 0

    def to_wall_ns(self, monotonic_ns: int) -> int:
        """Nanoseconds since the Unix epoch at `monotonic_ns`."""
        return self.wall_ns + monotonic_ns - self.monotonic_ns

    def to_monotonic_ns(self, wall_ns: int) -> int:
        """`CLOCK_MONOTONIC` nanoseconds at `wall_ns`."""
        return self.monotonic_ns + wall_ns - self.wall_ns


def take_anchor(clock: Clock = SYSTEM_CLOCK) -> ClockAnchor:
    """Read both clocks a few times and keep the pair that was read fastest."""
    best: ClockAnchor | None = None
    for _ in range(ANCHOR_TRIES):
        before = clock.monotonic_ns()
        wall_ns = clock.wall_ns()
        after = clock.monotonic_ns()
        error_ns = (after - before + 1) // 2
        if best is None or error_ns < best.error_ns:
            best = ClockAnchor(
                monotonic_ns=before + (after - before) // 2, wall_ns=wall_ns, error_ns=error_ns
            )
    assert best is not None
    return best
