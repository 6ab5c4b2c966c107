"""When a request counts as stuck in a stage, and how long stages usually take. Pure.

Owns the rule (`StuckPolicy`), the once-per-request bookkeeping (`StuckWatch`) and rolling
percentiles of finished requests' stages (`RollingStageTimes`). Reads no clock; who is told is the
agent's business.

    threshold = max(share x the stage's deadline, factor x the stage's p99), at least floor_s
    no deadline, and no p99 or a stage that takes as long as the caller asked: at least default_s

The larger of the two counts: a stage with a deadline of 30 s may take 15 s before anybody is
called, and one whose p99 is 20 s is not stuck at 15 s just because its deadline says 30 s.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdtrace import semconv as a
from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.inflight import InFlight
from pdtrace.logtext import one_line
from pdtrace.spans import Span
from pdtrace.stages import CHAINS, STAGE_BY_NAME, STAGES, Outcome, Scale

_CHAIN_STAGES = frozenset(stage.name for chain in CHAINS.values() for stage in chain)
_AS_LONG_AS_ASKED = frozenset(s.name for s in STAGES if s.scale is Scale.OUTPUT_TOKENS)
"""How long an answer is, is the caller's choice: many short ones say little of a long one."""

_MAX_PLACES = 8

_STAGE, _BEGIN, _END = a.STAGE.key, a.BEGIN_NS.key, a.END_NS.key


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckPolicy:
    """The rule. Raises ValueError for values out of range or a stage that does not exist.

    share      of a stage's deadline, 0 to 1
    factor     times the stage's p99
    floor_s    seconds; nothing younger is stuck
    default_s  seconds; the floor where no deadline and no telling p99 is known
    deadlines  seconds by stage: when the server itself gives the stage up
    """

    share: float = 0.5
    factor: float = 3.0
    floor_s: float = 1.0
    default_s: float = 10.0
    deadlines: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"stuck share is {self.share}; it must be above 0 and at most 1")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"stuck factor is {self.factor}; it must be 1 or more")
        for name, value in (("floor", self.floor_s), ("default", self.default_s)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"stuck {name} is {value}; it must be seconds above 0")
        for stage, deadline_s in self.deadlines.items():
            if stage not in STAGE_BY_NAME:
                raise ValueError(
                    f"deadline for {stage!r}, which is no stage; `pdtrace stages` lists them"
                )
            if not (math.isfinite(deadline_s) and deadline_s > 0):
                raise ValueError(f"deadline of {stage} is {deadline_s}; it must be seconds above 0")

    def threshold_s(self, stage: str, p99_s: float | None) -> float:
        """Age above which a request is stuck in `stage`. `p99_s`: None where it is not known."""
        deadline_s = self.deadlines.get(stage)
        if deadline_s is None and (p99_s is None or stage in _AS_LONG_AS_ASKED):
            floor_s = max(self.floor_s, self.default_s)
        else:
            floor_s = self.floor_s
        by_deadline = 0.0 if deadline_s is None else self.share * deadline_s
        by_p99 = 0.0 if p99_s is None else self.factor * p99_s
        return max(floor_s, by_deadline, by_p99)

    def is_stuck(self, request: InFlight) -> bool:
        """Whether a request, with its `p99_s`, is older in its stage than that. One that was
        answered is not, whatever its legs still do."""
        return (
            request.stage is not None
            and request.ended is None
            and request.stage_age_s > self.threshold_s(request.stage, request.p99_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckReport:
    """One request that is stuck: it and the age above which its stage counts as such."""

    request: InFlight
    stage: str
    threshold_s: float

    def line(self) -> str:
        """One line for the log: who, where, how long, what it waits for and who is in its way."""
        request = self.request
        where = f" on {one_line(request.worker)}" if request.worker else ""
        text = (
            f"request {one_line(request.request_id)} (trace {request.trace_id}, "
            f"attempt {request.attempt}) is stuck in {self.stage}{where}: "
            f"{request.stage_age_s:.1f} s old, above {self.threshold_s:.1f} s"
        )
        wait = request.wait
        if wait is None:
            return text
        numbers = ", ".join(
            f"{name} {value}"
            for name, value in (
                ("needed", wait.needed),
                ("free", wait.free),
                ("limit", wait.limit),
                ("position", wait.position),
            )
            if value is not None
        )
        text += f"; waits for {one_line(wait.reason)}" + (f" ({numbers})" if numbers else "")
        return text + (
            f", blocked by {', '.join(map(one_line, wait.blockers))}" if wait.blockers else ""
        )


class StuckWatch:
    """Finds the requests that have become stuck; each is reported once. O(open) per check."""

    def __init__(self, policy: StuckPolicy) -> None:
        self.policy = policy
        self._reported: set[str] = set()

    def restore(self, root_span_ids: Iterable[str]) -> None:
        """Requests in flight that were reported before."""
        self._reported.update(root_span_ids)

    def check(self, in_flight: Sequence[InFlight]) -> list[StuckReport]:
        """Of all requests in flight, with their `p99_s`: those not reported before."""
        reports: list[StuckReport] = []
        for request in in_flight:
            stage = request.stage
            if stage is None or request.root_span_id in self._reported:
                continue
            if self.policy.is_stuck(request):
                threshold_s = self.policy.threshold_s(stage, request.p99_s)
                reports.append(StuckReport(request=request, stage=stage, threshold_s=threshold_s))
        open_ids = {request.root_span_id for request in in_flight}
        self._reported &= open_ids
        self._reported.update(report.request.root_span_id for report in reports)
        return reports


def rest_of(reports: Sequence[StuckReport]) -> str:
    """One line for many requests that became stuck at once."""
    places = Counter((report.stage, report.request.worker) for report in reports)
    shown = [
        f"{count} in {stage}" + (f" on {one_line(worker)}" if worker else "")
        for (stage, worker), count in places.most_common(_MAX_PLACES)
    ]
    if len(places) > _MAX_PLACES:
        shown.append("and elsewhere")
    return f"{len(reports)} further requests are stuck: {', '.join(shown)}"


@dataclass(frozen=True, slots=True)
class StageTime:
    """Median and 99th percentile of a stage, seconds; `p99_s` is None with too few requests."""

    usual_s: float
    p99_s: float | None


class RollingStageTimes:
    """How long each chain stage took in the most recent `window` completed requests, per mode.

    A percentile is worked out again when an eighth of its samples is new. A p99 needs `enough`
    requests: below, the slowest of a handful would pass for it.
    """

    def __init__(self, window: int = 512, *, enough: int = 20) -> None:
        self._window = window
        self._enough = enough
        self._by_mode: dict[str, dict[str, _Series]] = {}

    def add(self, spans: Sequence[Span]) -> None:
        """Learn from a finished request, root first; one that did not complete is passed over."""
        root = spans[0].attributes
        if root.get(a.OUTCOME.key) != Outcome.COMPLETED.value:
            return
        series = self._by_mode.setdefault(str(root.get(a.MODE.key, "")), {})
        for stage, length_ns in stage_lengths(spans):
            if stage not in _CHAIN_STAGES:
                continue
            found = series.get(stage)
            if found is None:
                found = series[stage] = _Series(deque(maxlen=self._window))
            found.samples.append(length_ns)
            found.fresh += 1

    def of(self, mode: str, stage: str) -> StageTime | None:
        """None without any finished request."""
        series = self._by_mode.get(mode, {}).get(stage)
        return None if series is None else series.time(self._enough)


def stage_lengths(spans: Sequence[Span]) -> Iterable[tuple[str, int]]:
    """Stages of a request and how long they took, in nanoseconds, where that is known exactly."""
    if isinstance(spans, OrderlySpans):
        return spans.stage_lengths()
    lengths: list[tuple[str, int]] = []
    for span in spans:
        attributes = span.attributes
        stage = attributes.get(_STAGE)
        begin_ns, end_ns = attributes.get(_BEGIN), attributes.get(_END)
        if isinstance(stage, str) and type(begin_ns) is int and type(end_ns) is int:
            lengths.append((stage, end_ns - begin_ns))
    return lengths


@dataclass(slots=True)
class _Series:
    samples: deque[int]
    fresh: int = 0
    last: StageTime | None = None

    def time(self, enough: int) -> StageTime:
        if self.last is None or self.fresh * 8 > len(self.samples):
            ordered = sorted(self.samples)
            self.fresh = 0
            p99 = _quantile(ordered, 0.99) / 1e9 if len(ordered) >= enough else None
            self.last = StageTime(_quantile(ordered, 0.5) / 1e9, p99)
        return self.last


def _quantile(ordered: Sequence[int], q: float) -> int:
    """The smallest value that is at least as large as a share `q` of all."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def parse_deadlines(texts: Iterable[str]) -> dict[str, float]:
    """`STAGE=SECONDS` each. Raises ValueError with the text and the form expected."""
    deadlines: dict[str, float] = {}
    for text in texts:
        stage, equals, value = text.partition("=")
        try:
            deadlines[stage.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"deadline {text!r} must be STAGE=SECONDS, such as decode.reserve=30")
    return deadlines
