"""Bringing a process's times to another host's clock. Pure.

Owns which estimate of an offset counts: the best that either side measured, else the wall-clock
anchors, whose error nobody knows. How round trips become estimates is `pdtrace.offsets`'.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pdtrace.assembly.collected import Process
from pdtrace.offsets import ClockOffsets


class Alignment(NamedTuple):
    """What to add to a process's monotonic times; `error_ns` is None where no bound is known."""

    offset_ns: int
    error_ns: int | None


SAME_CLOCK = Alignment(0, 0)


def align(
    process: Process,
    reference: Process,
    t_ns: int,
    *,
    own: Iterable[ClockOffsets] = (),
    theirs: Iterable[ClockOffsets] = (),
) -> Alignment:
    """The way from `process`'s clock at its time `t_ns` to `reference`'s.

    own     round trips measured on the process's host
    theirs  round trips measured on the reference's host
    """
    if process.clock_id == reference.clock_id:
        return SAME_CLOCK
    by_anchor = reference.anchor.to_monotonic_ns(process.anchor.to_wall_ns(0))
    best = Alignment(by_anchor, None)
    for clock in own:
        found = clock.at(reference.clock_id, t_ns)
        if found is not None:
            best = _better(best, Alignment(found.offset_ns, found.error_ns))
    for clock in theirs:
        found = clock.back(process.clock_id, t_ns)
        if found is not None:
            best = _better(best, Alignment(found.offset_ns, found.error_ns))
    return best


def _better(one: Alignment, other: Alignment) -> Alignment:
    if one.error_ns is None:
        return other
    return other if other.error_ns is not None and other.error_ns < one.error_ns else one
