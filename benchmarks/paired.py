"""Estimates of a difference from pairs measured in turns, and how far to trust them.

Knows nothing of what was measured. Intervals come from resampling whole blocks, so neither the
shape of the noise nor what windows of one block share is assumed away.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

RESAMPLES = 1000
COVERAGE = 0.95

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A relative difference (0.01 is one per cent) with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """The largest difference, of either sign, that the interval allows."""
        return max(abs(self.low), abs(self.high))

    def verdict(self, limit: float) -> str:
        """Whether the difference is within `limit`, as far as the interval tells."""
        if self.reach <= limit:
            return "within"
        if self.low > limit or self.high < -limit:
            return "beyond"
        return "cannot tell"


def centre(values: Sequence[float]) -> float:
    """Median of the means of all pairs (Hodges and Lehmann): outliers pull it no more than the
    median, and it needs two thirds of the median's data."""
    return statistics.median(
        (first + second) / 2 for i, first in enumerate(values) for second in values[i:]
    )


def estimate(
    blocks: Sequence[T], measure: Callable[[Sequence[T]], float], *, seed: int = 1
) -> Estimate:
    """What `measure` says of the blocks, and the interval of what it says of blocks drawn from
    them. Raises ValueError without blocks."""
    if not blocks:
        raise ValueError("no blocks to estimate from")
    draw = random.Random(seed)
    found = sorted(measure(draw.choices(blocks, k=len(blocks))) for _ in range(RESAMPLES))
    cut = int(len(found) * (1 - COVERAGE) / 2)
    return Estimate(value=measure(blocks), low=found[cut], high=found[-1 - cut])


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a part `q` of them is; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else float("nan")
