"""Interval algebra on integers: who owns which instant when intervals overlap.

Knows nothing of spans or stages. Intervals are half-open, [begin, end); they may be empty or
reversed (they own nothing then) and may reach outside of the range asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

Interval = tuple[int, int]
Painted = tuple[int, int, int | None]


def paint(intervals: Sequence[Interval], low: int, high: int) -> list[Painted]:
    """Give each instant of [low, high) to the first interval of the sequence that covers it.

    Returns (begin, end, index of the owner or None), without gaps, neighbours of one owner
    merged; empty if high <= low. O(n log n).
    """
    if high <= low:
        return []
    starts = sorted(
        (max(begin, low), index)
        for index, (begin, end) in enumerate(intervals)
        if min(end, high) > max(begin, low)
    )
    points = {low, high, *(begin for begin, _ in starts)}
    points.update(min(intervals[index][1], high) for _, index in starts)
    painted: list[Painted] = []
    active: list[int] = []
    upcoming = 0
    for here, following in pairwise(sorted(points)):
        while upcoming < len(starts) and starts[upcoming][0] <= here:
            heapq.heappush(active, starts[upcoming][1])
            upcoming += 1
        while active and intervals[active[0]][1] <= here:
            heapq.heappop(active)
        owner = active[0] if active else None
        if painted and painted[-1][2] == owner:
            painted[-1] = (painted[-1][0], following, owner)
        else:
            painted.append((here, following, owner))
    return painted


def close_gaps(intervals: Sequence[Interval], low: int, high: int, widest: int) -> list[Interval]:
    """Stretch an interval over each uncovered gap of at most `widest` beside it.

    The interval before the gap is stretched; only a gap at `low` goes to the one after it.
    """
    painted = paint(intervals, low, high)
    closed = list(intervals)
    for position, (begin, end, owner) in enumerate(painted):
        if owner is not None or end - begin > widest or len(painted) == 1:
            continue
        neighbour = painted[position - 1 if position else 1][2]
        assert neighbour is not None  # two uncovered neighbours would have been merged
        if position:
            closed[neighbour] = (closed[neighbour][0], max(closed[neighbour][1], end))
        else:
            closed[neighbour] = (min(closed[neighbour][0], begin), closed[neighbour][1])
    return closed
