"""The agent's verdict on each finished request, against those before it.

Owns the rolling judgement; the rule is `pdtrace.analysis.verdict`'s. Nearly every request is
healthy: its leaves alone show that (`pdtrace.agent.screening`), and only one that may have stalled
is judged in full. The result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdtrace.agent.screening import Screened, screen
from pdtrace.analysis.baselines import Leaf, RollingBaselines, leaves
from pdtrace.analysis.timeline import build_timeline
from pdtrace.analysis.verdict import DEFAULT_POLICY, VerdictPolicy, assess, judge, stall_attributes
from pdtrace.spans import AttrValue, Span, Trace


class RollingJudge:
    """Names the stage in which a request stalled, against the requests before it.

    told  is given the leaves of each request from then on, and how long it took in nanoseconds;
          to be set once the agent has learnt from what a former one judged
    """

    def __init__(self, window: int = 512, policy: VerdictPolicy = DEFAULT_POLICY) -> None:
        self.baselines = RollingBaselines(window)
        self.told: Callable[[Sequence[Leaf], int], None] | None = None
        self._policy = policy

    def __call__(self, spans: Sequence[Span]) -> Mapping[str, AttrValue]:
        """Attributes for the root of a request, which comes first; none if it did not stall."""
        screened = screen(spans)
        if screened is None:
            timeline = build_timeline(Trace(trace_id=spans[0].trace_id, spans=spans))
            attributes = stall_attributes(
                judge(timeline, self.baselines, self._policy), self._policy
            )
            self.baselines.add(timeline)
            if self.told is not None:
                self.told(leaves(timeline), timeline.total_ns)
            return attributes
        if self.told is not None:
            self.told(screened.leaves, screened.total_ns)
        attributes = {}
        if self._may_have_stalled(screened):
            timeline = build_timeline(Trace(trace_id=spans[0].trace_id, spans=spans))
            attributes = stall_attributes(
                judge(timeline, self.baselines, self._policy), self._policy
            )
        if screened.completed:
            self.baselines.learn(screened, screened.leaves)
        return attributes

    def _may_have_stalled(self, request: Screened) -> bool:
        """Whether a leaf passes the outlier rule. An excess is no longer than its leaf, so the
        usual time of a short leaf need not be known."""
        least_ns = max(self._policy.floor_s * 1e9, self._policy.share * request.total_ns)
        stalled = False
        for leaf in request.leaves:
            if leaf.ns >= least_ns:
                usual = self.baselines.usual(request, leaf)
                stalled = stalled or assess(leaf, usual, request.total_ns, self._policy).stalled
            elif leaf.tokens is not None:
                self.baselines.settle(request, leaf)
        return stalled
