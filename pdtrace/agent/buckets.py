"""One ladder of histogram buckets for every duration in seconds, and one for counts. Pure.

Owns the edges and how service-level thresholds get onto one; knows nothing of what is measured.
One ladder for all stages, so that their quantiles can be compared and added up.

No edge is a whole number: `le="1"` and `le="1.0"` are different labels to Prometheus, and clients
disagree on which of them to write. A threshold that is a whole number therefore gets its edge a
microsecond above, where nothing that is measured can tell the difference; `edge_of` says where.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

DURATION_EDGES_S = (
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001_5, 0.002_5, 0.005, 0.007_5,
    0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.5,
    7.5, 12.5, 25.5, 45.5, 90.5, 180.5, 360.5, 605.5,
)  # fmt: skip
"""Upper edges, seconds: some 50 % apart where requests spend their time, from a hop between two
processes to a request that its deadline ends, after ten minutes, and its end's way to whoever
measures. What is above the last edge has no quantile."""

COUNT_EDGES = (0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5)
"""Upper edges for counts such as batch sizes: halves, so that a whole count is never on an edge,
and one below 1, so that a quantile among ones comes out as about 1."""

SLO_VARIABLE = "PDTRACE_SLO_SECONDS"
"""Environment variable with thresholds to put on edges, seconds, separated by commas."""

MAX_THRESHOLDS = 16

_ABOVE_A_WHOLE_NUMBER_S = 1e-6

_log = logging.getLogger(__name__)


def edge_of(threshold_s: float) -> float:
    """The edge that stands for a threshold: itself, or a microsecond above a whole number."""
    return threshold_s + _ABOVE_A_WHOLE_NUMBER_S if threshold_s.is_integer() else threshold_s


def duration_edges(thresholds_s: Iterable[float] = ()) -> tuple[float, ...]:
    """The ladder with each threshold on an edge, ascending.

    Raises ValueError for a threshold that is not a positive number, or too many of them.
    """
    wanted = set(thresholds_s)
    if len(wanted) > MAX_THRESHOLDS:
        raise ValueError(f"{len(wanted)} thresholds; at most {MAX_THRESHOLDS} fit the ladder")
    for threshold_s in wanted:
        if not (math.isfinite(threshold_s) and threshold_s > 0):
            raise ValueError(f"threshold {threshold_s!r} must be a number of seconds above 0")
    return tuple(sorted({*DURATION_EDGES_S, *(edge_of(float(value)) for value in wanted)}))


def duration_edges_from(environ: Mapping[str, str]) -> tuple[float, ...]:
    """The ladder with the thresholds that SLO_VARIABLE names.

    A setting that cannot be used is said in one line and left out: metrics are not worth a start.
    """
    text = environ.get(SLO_VARIABLE, "").strip()
    if not text:
        return DURATION_EDGES_S
    try:
        return duration_edges(float(part) for part in text.split(","))
    except ValueError as error:
        _log.warning(
            "%s=%r is left out: %s. Give seconds above 0, separated by commas, such as 0.2,1.5",
            *(SLO_VARIABLE, text, error),
        )
        return DURATION_EDGES_S
