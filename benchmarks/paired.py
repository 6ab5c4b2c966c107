"""Estimates of a difference from pairs measured in turns, and how far to trust them.

Knows nothing of what was measured. Intervals come from resampling whole blocks, so neither the
shape of the noise nor what windows of one block share is assumed away.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

RESAMPLES = 1000
COVERAGE = 0.95

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A cost relative to none (0.01 is one per cent) with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """The largest difference, of either sign, that the interval allows."""
        return max(abs(self.low), abs(self.high))

    def verdict(self, limit: float, floor: float) -> str:
        """Whether the cost is within `limit`, as far as the interval and the noise floor tell."""
        if self.reach <= limit:
            return "within"
        if self.low > max(limit, floor):
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


def adjusted(
    values: Sequence[Mapping[str, float]], beside: Sequence[Mapping[str, Sequence[float]]]
) -> list[dict[str, float]]:
    """`values` (block, variant → value) less what goes with the quantities measured `beside` them.

    Slopes are those of least squares within blocks and within variants, so neither drift nor what
    the variants themselves differ by is taken for an influence of those quantities.
    """
    names = list(values[0])
    outcome = np.array([[block[name] for name in names] for block in values])
    causes = np.array([[block[name] for name in names] for block in beside])
    causes = causes - causes.mean(axis=(0, 1))
    slopes, *_ = np.linalg.lstsq(
        _residuals(causes).reshape(-1, causes.shape[2]), _residuals(outcome).ravel(), rcond=None
    )
    return [dict(zip(names, map(float, row), strict=True)) for row in outcome - causes @ slopes]


def _residuals(table: np.ndarray) -> np.ndarray:
    """What neither the block (first axis) nor the variant (second) accounts for."""
    return table - table.mean(0, keepdims=True) - table.mean(1, keepdims=True) + table.mean((0, 1))
