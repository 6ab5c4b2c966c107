"""One colour for each stage, outcome, process state and quantile, on every board.

Owns hues only; what a stage is stands in `pdtrace.stages`. A role keeps a hue: gateway blue,
prefill green, transfer violet, decode orange, pauses red. What is drawn over stages (quantiles, the
whole request, limits) has colours that no stage comes near.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdtrace.analysis.timeline import UNEXPLAINED
from pdtrace.inflight import ProcessState
from pdtrace.stages import Outcome
from pdtrace.terminal.palette import COLOURS

STAGES: Mapping[str, str] = COLOURS
"""The terminal's: who goes from a waterfall to a board sees the same colours."""

REST = STAGES[UNEXPLAINED]

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        Outcome.COMPLETED.value: "#73BF69",
        Outcome.CANCELLED.value: "#8AB8FF",
        Outcome.REJECTED.value: "#FADE2A",
        Outcome.TIMED_OUT.value: "#FF9830",
        Outcome.FAILED.value: "#F2495C",
        Outcome.LOST.value: "#A352CC",
    }
)
STATES: Mapping[str, str] = MappingProxyType(
    {
        ProcessState.ALIVE.value: "#73BF69",
        ProcessState.STALLED.value: "#FF9830",
        ProcessState.CLOSED.value: "#8E8E8E",
        ProcessState.LOST.value: "#F2495C",
    }
)
NOT_READY = DRAINS = "#FADE2A"

GOOD, WARN, BAD, CALM, UNKNOWN = "green", "orange", "red", "blue", "text"

CALM_LINE = "#8E8E8E"
"""The median beside a 99th percentile in a stage's own colour."""

WHOLE = "#FF5FAF"
"""The whole request over its stages, and its 99th percentile."""
QUANTILES: Mapping[str, str] = MappingProxyType({"p50": "#5794F2", "p99": WHOLE})

BURNS = ("blue", "yellow", "orange", "red")
"""From the slowest burn to the fastest: of the line and of its limit."""

KV: Mapping[str, str] = MappingProxyType(
    {"free": "#37872D", "cached": "#96D98D", "reserved": "#FADE2A", "used": "#FF9830"}
)
