"""The agent's verdict on each finished request, against those before it.

Owns the rolling judgement; the rule is `pdtrace.verdict`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdtrace.baselines import RollingBaselines
from pdtrace.spans import AttrValue, Span, Trace
from pdtrace.timeline import build_timeline
from pdtrace.verdict import judge, stall_attributes


class RollingJudge:
    """Names the stage in which a request stalled, against the requests before it."""

    def __init__(self, window: int = 512) -> None:
        self._baselines = RollingBaselines(window)

    def __call__(self, spans: Sequence[Span]) -> Mapping[str, AttrValue]:
        timeline = build_timeline(Trace(trace_id=spans[0].trace_id, spans=spans))
        attributes = stall_attributes(judge(timeline, self._baselines))
        self._baselines.add(timeline)
        return attributes
