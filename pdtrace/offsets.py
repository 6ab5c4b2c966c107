"""How the clocks of other hosts differ from a process's own, from round trips. Pure.

Owns the estimate of an offset at an instant and the bound on its error; knows nothing of rings or
messages.
"""

from __future__ import annotations

from typing import NamedTuple

from pdtrace.ring.records import ClockRecord


class Offset(NamedTuple):
    """What to add to own CLOCK_MONOTONIC times to get the peer's, right to within `error_ns`."""

    offset_ns: int
    error_ns: int


class ClockOffsets:
    """The round trips of one process."""

    def add(self, sample: ClockRecord) -> None:
        """Takes in a round trip."""
        raise NotImplementedError

    def at(self, peer_clock_id: str, t_ns: int) -> Offset | None:
        """The offset to a host's clock at own time `t_ns`; None without a round trip to it."""
        raise NotImplementedError
