"""How far apart Grafana asks a query's points, and how far back its rates look.

Owns the rules of Grafana's Prometheus data source, for tests against real programs; asks nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

SOURCE_S = 15.0
"""What a data source takes for the scrape interval where nobody has said it."""
_MOST_POINTS = 11_000

_STEPS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30),
    *(60, 120, 300, 600, 900, 1_200, 1_800),
    *(3_600, 7_200, 10_800, 21_600, 43_200, 86_400),
)
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def step_s(*, range_s: float, points: int, least_s: float) -> float:
    """Seconds between points: about one for each of `points`, rounded, and never less than the
    least."""
    return max(_rounded(range_s / points), _rounded(range_s / _MOST_POINTS), least_s)


def windows(
    *, range_s: float, points: int, least: str | None = None, source_s: float = SOURCE_S
) -> Mapping[str, str]:
    """Grafana's variables of time for one query.

    least     minimum step of the query, as it stands there with its variables filled in
    source_s  the scrape interval, as the data source has it: what counts where a query has none
    """
    least_s = source_s if not least else seconds(least)
    step = step_s(range_s=range_s, points=points, least_s=least_s)
    lengths = {
        "__interval": step,
        "__rate_interval": max(step + least_s, 4 * least_s),
        "__range": range_s,
    }
    return {name: f"{math.ceil(length)}s" for name, length in lengths.items()}


def seconds(text: str) -> float:
    """`15s`, `1m`. Raises ValueError for another unit."""
    number = text.rstrip("mshd")
    return float(number) * _UNITS_S[text.removeprefix(number)]


def _rounded(interval_s: float) -> float:
    """To the nearest step that people read well, as Grafana does it."""
    for lower, upper in itertools.pairwise(_STEPS_S):
        if interval_s <= (lower + upper) / 2:
            return lower
    return _STEPS_S[-1]
