"""How often the trace is told what a request in a queue waits for. Pure.

Owns the rule; knows nothing of queues or marks. Who is in the way changes with every step and every
copy, and one record for each of hundreds that wait would take longer than the step itself: the head
of a queue is followed exactly, those behind it now and then.
"""

from __future__ import annotations

from typing import NamedTuple

from pdtrace.stages import WaitReason

EXACT_POSITIONS = 8
"""How many at the head of a queue have every change in the trace."""
AGAIN_NS = 100_000_000
NS_PER_MS = 1_000_000


class Said(NamedTuple):
    """What the trace was last told: where, why, and when (CLOCK_MONOTONIC nanoseconds)."""

    stage: str
    reason: WaitReason
    at_ns: int


def is_due(
    said: Said | None, stage: str, reason: WaitReason, position: int | None, at_ns: int
) -> bool:
    """Whether to tell the trace: a new reason at once; further back in the queue the same one every
    AGAIN_NS, or as many milliseconds as there are requests ahead."""
    if said is None or position is None or position < EXACT_POSITIONS:
        return True
    if said.reason is not reason or said.stage != stage:
        return True
    return at_ns - said.at_ns >= max(AGAIN_NS, position * NS_PER_MS)
