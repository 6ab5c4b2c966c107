"""What time it is: the one place of the gateway that reads a clock.

Owns the units; timers are the event loop's, which counts on the same clock. Knows nothing of what
is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtrace.clock import SYSTEM_CLOCK, Clock

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Now:
    """Instants on `CLOCK_MONOTONIC`, and seconds since the Unix epoch for what clients are told."""

    clock: Clock = SYSTEM_CLOCK

    def ns(self) -> int:
        """Nanoseconds on the monotonic clock."""
        return self.clock.monotonic_ns()

    def s(self) -> float:
        """Seconds on the monotonic clock."""
        return self.clock.monotonic_ns() / NS_PER_S

    def unix_s(self) -> int:
        """Whole seconds since the Unix epoch."""
        return self.clock.wall_ns() // NS_PER_S


SYSTEM_NOW = Now()
