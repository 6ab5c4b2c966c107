"""One request's interval, partitioned: every nanosecond belongs to one stage or to `unexplained`.

Owns the timeline of a request and its partition; knows nothing of files, baselines or terminals.
Pure: a timeline follows from its trace alone.

The rule: each instant of the root's interval belongs to the first stage, in the order of
`CHAINS[mode]`, whose span covers it; an instant that no chain stage covers is `unexplained`. For
stages that begin in chain order this equals a sweep with a high-water mark. Parts are integers
and sum to the whole.

    spans       |--ingest--|--queue--|         |----hop.token----|
                                           |--------decode.generate--------|
    partition   |  ingest  |  queue  |unex.|gen|    hop.token    | generate|
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.analysis.attributes import host_id, integer, role_of, text
from pdtrace.analysis.facts import (
    Steps,
    StuckEvent,
    Try,
    Wait,
    is_open,
    longest_cause,
    nanoseconds,
    outcome_of,
    steps_of,
    stuck_events,
    tries_of,
    waits_told,
)
from pdtrace.analysis.intervals import close_gaps, paint
from pdtrace.analysis.placement import (
    CLOSABLE_GAP_NS,
    Placed,
    Placement,
    place,
    split_requests,
)
from pdtrace.analysis.skew import MAX_SKEW_NS, ClockBasis, HostClock
from pdtrace.analysis.violations import (
    Overlap,
    Violation,
    ViolationKind,
    find_explained,
    find_overlaps,
    find_violations,
    request_id_of,
)
from pdtrace.spans import AttrValue, Span, StatusCode, Trace
from pdtrace.stages import (
    CHAINS,
    STAGES,
    Kind,
    Mark,
    Mode,
    Outcome,
    Role,
)

__all__ = [
    "UNEXPLAINED",
    "Overlap",
    "Part",
    "Segment",
    "StageVisit",
    "Timeline",
    "Violation",
    "ViolationKind",
    "build_timeline",
    "build_timelines",
]

UNEXPLAINED = "unexplained"

MAX_EXPLAINED = 3
"""Sentences on what clocks explain, among the unknowns; all of them are in `explained`."""

_LOST_RECORDS = re.compile(r"(\S+) lost (\d+) records?")


# Work before waits: while one job copies, the wait of the next is not what costs time.
_DETAILS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        outer: tuple(
            stage.name
            for stage in sorted(STAGES, key=lambda stage: stage.kind is not Kind.WORK)
            if stage.within == outer
        )
        for outer in dict.fromkeys(stage.within for stage in STAGES if stage.within)
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageVisit:
    """One span of a stage. Times are nanoseconds from the request's begin.

    owned_ns   time of the partition that this span owns; 0 for stages beside the chain
    error_ns   bound on the error of both times, by clocks of other hosts; None if it is not known
    moved_ns   what was added to both recorded times, see `Timeline.clocks`
    outcome    how the request or the attempt ended, where it ended in this stage
    open       whether it had not ended when it was looked at
    waits      every wait recorded here, in order
    cause      the wait that explains most of the time; None if none was recorded
    """

    name: str
    attempt: int
    begin_ns: int
    end_ns: int
    owned_ns: int
    span_id: str
    service: str
    instance: str | None
    outcome: Outcome | None
    open: bool
    attributes: Mapping[str, AttrValue]
    waits: tuple[Wait, ...]
    cause: Wait | None
    error_ns: int | None = 0
    moved_ns: int = 0

    @property
    def duration_ns(self) -> int:
        return max(0, self.end_ns - self.begin_ns)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the partition; `name` is a chain stage or `unexplained`."""

    name: str
    begin_ns: int
    end_ns: int
    attempt: int | None = None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Part:
    """Time that belongs to one stage, or to `unexplained`, over the whole request."""

    name: str
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One request, explained. Times are nanoseconds, offsets count from the request's begin.

    open         whether it is still in flight: it is `total_ns` old, and has no outcome yet
    segments     the partition in time order, without gaps, from 0 to `total_ns`
    parts        the partition per stage in chain order, `unexplained` last; sums to `total_ns`
    details      per chain stage with nested stages: its part shared out among them, the rest
                 under its own name; sums to the stage's part
    visits       every stage span, in the chain or beside it, by begin
    exact        whether the partition stands on exact times (otherwise on microseconds)
    tries        its attempts, as far as they were recorded
    steps        its forward passes per stage
    stuck        reports of stages that took too long, made while they did
    ttft_ns      first request byte to first content byte written
    tpot_ns      generation time per token after the first, as the decode worker saw it
    clocks       clocks of other hosts that stages were read on
    explained    what only seems impossible, as it lies within the error of those; clauses
    lacks        sentences on what is known to be missing of the recording: any conclusion may be
                 wrong for it
    unknowns     sentences on what else this timeline cannot know
    attributes   those of the root span
    """

    trace_id: str
    root_id: str | None
    request_id: str | None
    mode: Mode
    outcome: Outcome | None
    outcome_reason: str | None
    outcome_by: str | None
    outcome_stage: str | None
    started_unix_ns: int
    total_ns: int
    open: bool
    exact: bool
    segments: tuple[Segment, ...]
    parts: tuple[Part, ...]
    details: Mapping[str, tuple[Part, ...]]
    visits: tuple[StageVisit, ...]
    overlaps: tuple[Overlap, ...]
    violations: tuple[Violation, ...]
    clocks: tuple[HostClock, ...]
    explained: tuple[str, ...]
    lacks: tuple[str, ...]
    unknowns: tuple[str, ...]
    attempts: int
    tries: tuple[Try, ...]
    steps: tuple[Steps, ...]
    stuck: tuple[StuckEvent, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft_ns: int | None
    tpot_ns: float | None
    prefill_worker: str | None
    decode_worker: str | None
    roles: frozenset[Role]
    hosts: frozenset[str]
    span_count: int
    attributes: Mapping[str, AttrValue]

    @property
    def key(self) -> tuple[str, str | None]:
        """Identity among timelines: a trace may hold several requests."""
        return (self.trace_id, self.root_id)

    @property
    def streamed(self) -> bool:
        """Whether tokens were sent one by one; otherwise the first left with the last."""
        return self.attributes.get(a.STREAM.key) is not False

    @property
    def current(self) -> StageVisit | None:
        """The chain stage that a request in flight is in; None if no stage says so, or it ended."""
        last = self.segments[-1].name if self.open and self.segments else None
        found = [visit for visit in self.visits if visit.open and visit.name == last]
        return found[-1] if found else None

    @property
    def unexplained_ns(self) -> int:
        return self.part_ns(UNEXPLAINED) or 0

    def part_ns(self, name: str) -> int | None:
        """Time owned by a chain stage or `unexplained`; None if the request lacks the stage."""
        return next((part.ns for part in self.parts if part.name == name), None)

    def detail_ns(self, outer: str, name: str) -> int:
        """Time inside `outer` that its nested stage `name` owns; 0 if there is none."""
        return next((part.ns for part in self.details.get(outer, ()) if part.name == name), 0)

    def visits_of(self, name: str) -> tuple[StageVisit, ...]:
        """The visits of one stage, by begin."""
        return tuple(visit for visit in self.visits if visit.name == name)


def build_timelines(traces: Iterable[Trace], *, max_skew_ns: int = MAX_SKEW_NS) -> list[Timeline]:
    """One timeline per request: a trace that several requests share is split by its roots.

    max_skew_ns  as for `build_timeline`
    """
    return [
        build_timeline(part, max_skew_ns=max_skew_ns)
        for trace in traces
        for part in split_requests(trace)
    ]


def build_timeline(trace: Trace, *, max_skew_ns: int = MAX_SKEW_NS) -> Timeline:
    """Partition one request's trace. Takes any spans: what is wrong is listed in `violations`.

    max_skew_ns  how far spans may be moved whose clock contradicts the order of stages; 0: not
    """
    placement = place(trace, max_skew_ns=max_skew_ns)
    total = max(0, placement.length)
    segments = _partition(placement, total)
    root = placement.root
    attributes: Mapping[str, AttrValue] = root.attributes if root else {}
    outcome = outcome_of(attributes)
    overlaps = find_overlaps(placement)
    explained = find_explained(placement, overlaps, outcome) if placement.clocks else ()
    recorders = _recorders(trace)
    visits = tuple(_visit(item) for item in sorted(placement.placed, key=_by_begin))
    output_tokens = integer(attributes, a.OUTPUT_TOKENS)
    return Timeline(
        trace_id=trace.trace_id,
        root_id=root.span_id if root else None,
        request_id=request_id_of(trace, root),
        mode=placement.mode,
        outcome=outcome,
        outcome_reason=text(attributes, a.OUTCOME_REASON),
        outcome_by=text(attributes, a.OUTCOME_BY),
        outcome_stage=text(attributes, a.OUTCOME_STAGE) or _failed_stage(placement),
        started_unix_ns=placement.began_ns,
        total_ns=total,
        open=is_open(root) if root else any(visit.open for visit in visits),
        exact=placement.exact,
        segments=segments,
        parts=_parts(segments, placement),
        details=_details(segments, placement, total),
        visits=visits,
        overlaps=overlaps,
        violations=find_violations(trace, placement, overlaps, outcome),
        clocks=tuple(placement.clocks.values()),
        explained=explained,
        lacks=tuple(_lacks(trace)),
        unknowns=(
            *_unknowns(trace, placement, outcome),
            *(f"It only looks impossible: {clause}." for clause in explained[:MAX_EXPLAINED]),
        ),
        attempts=max((item.attempt for item in placement.placed), default=1),
        tries=tries_of(placement),
        steps=tuple(steps_of(placement)),
        stuck=tuple(stuck_events(placement)),
        prompt_tokens=integer(attributes, a.PROMPT_TOKENS),
        cached_tokens=integer(attributes, a.CACHED_TOKENS),
        output_tokens=output_tokens,
        ttft_ns=_ttft(placement, attributes),
        tpot_ns=_tpot(placement, output_tokens),
        prefill_worker=text(attributes, a.PREFILL_WORKER)
        or _instance(placement, {Role.PREFILL, Role.WORKER}),
        decode_worker=text(attributes, a.DECODE_WORKER)
        or _instance(placement, {Role.DECODE, Role.WORKER}),
        roles=frozenset(role for span in recorders if (role := role_of(span))),
        hosts=frozenset(host for span in recorders if (host := host_id(span))),
        span_count=len(trace.spans),
        attributes=attributes,
    )


def _recorders(trace: Trace) -> tuple[Span, ...]:
    """A span of each recording process: most spans of a process share its resource."""
    return tuple({id(span.resource): span for span in trace.spans}.values())


def _partition(placement: Placement, total: int) -> tuple[Segment, ...]:
    """Share [0, total) out among the chain spans; notes on each span what it owns."""
    chain = placement.chain
    spans = [(item.begin, min(item.end, item.limit)) for item in chain]
    if not placement.exact:
        spans = close_gaps(spans, 0, total, CLOSABLE_GAP_NS)
    segments: list[Segment] = []
    for begin, end, index in paint(spans, 0, total):
        if index is None:
            segments.append(Segment(UNEXPLAINED, begin, end))
        else:
            chain[index].owned += end - begin
            segments.append(Segment(chain[index].stage.name, begin, end, chain[index].attempt))
    return tuple(segments)


def _parts(segments: Sequence[Segment], placement: Placement) -> tuple[Part, ...]:
    owned: defaultdict[str, int] = defaultdict(int)
    for segment in segments:
        owned[segment.name] += segment.duration_ns
    present = {item.stage.name for item in placement.chain}
    named = [Part(s.name, owned[s.name]) for s in CHAINS[placement.mode] if s.name in present]
    return (*named, Part(UNEXPLAINED, owned[UNEXPLAINED]))


def _details(
    segments: Sequence[Segment], placement: Placement, total: int
) -> Mapping[str, tuple[Part, ...]]:
    """Share each chain stage's segments out among the stages that detail it."""
    by_name: defaultdict[str, list[Placed]] = defaultdict(list)
    for item in placement.placed:
        by_name[item.stage.name].append(item)
    details: dict[str, tuple[Part, ...]] = {}
    for outer, inner_names in _DETAILS.items():
        inner = [item for name in inner_names for item in by_name[name]]
        own = [segment for segment in segments if segment.name == outer]
        if not inner or not own:
            continue
        owned: defaultdict[str, int] = defaultdict(int)
        painted = iter(paint([(item.begin, item.end) for item in inner], 0, total))
        begin, end, index = next(painted)
        for segment in own:
            while True:
                shared = min(end, segment.end_ns) - max(begin, segment.begin_ns)
                if shared > 0:
                    owned[outer if index is None else inner[index].stage.name] += shared
                if end >= segment.end_ns:
                    break
                begin, end, index = next(painted)  # the last one ends at `total`
        details[outer] = (
            *(Part(name, owned[name]) for name in inner_names if by_name[name]),
            Part(outer, owned[outer]),
        )
    return MappingProxyType(details)


def _visit(item: Placed) -> StageVisit:
    span = item.span
    waits = waits_told(item)
    end = item.end
    if item.stage.end is Mark.TOKEN_GAP:
        end = min(end, item.limit)  # a token that came after the request's end held it up no more
    return StageVisit(
        name=item.stage.name,
        attempt=item.attempt,
        begin_ns=item.begin,
        end_ns=max(item.begin, end),
        owned_ns=item.owned,
        span_id=span.span_id,
        service=span.resource.service_name,
        instance=span.resource.instance_id,
        outcome=_ended_here(span),
        open=is_open(span),
        attributes=span.attributes,
        waits=waits,
        cause=longest_cause(waits, text(span.attributes, a.WAIT_REASON)),
        error_ns=item.error,
        moved_ns=item.moved,
    )


def _ended_here(span: Span) -> Outcome | None:
    outcome = outcome_of(span.attributes)
    if outcome is None and span.status is StatusCode.ERROR:
        return Outcome.FAILED
    return None if outcome is Outcome.COMPLETED else outcome


def _by_begin(item: Placed) -> tuple[int, int, str]:
    return (item.begin, -item.end, item.span.span_id)


def _failed_stage(placement: Placement) -> str | None:
    """The chain stage that ended last among those in which the request or an attempt ended."""
    failed = [item for item in placement.chain if _ended_here(item.span)]
    return max(failed, key=lambda item: item.end).stage.name if failed else None


def _instance(placement: Placement, roles: set[Role]) -> str | None:
    """The worker of the last attempt that has one in a given role."""
    found = [
        (item.attempt, item.span.resource.instance_id)
        for item in placement.placed
        if item.span.resource.instance_id and role_of(item.span) in roles
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _ttft(placement: Placement, attributes: Mapping[str, AttrValue]) -> int | None:
    sent = [item.end for item in placement.chain if item.stage.name == "hop.token"]
    if sent and placement.root is not None:
        return max(0, sent[-1])
    return nanoseconds(attributes, a.TTFT_SECONDS)


def _tpot(placement: Placement, output_tokens: int | None) -> float | None:
    generated = [item for item in placement.chain if item.stage.name == "decode.generate"]
    if not generated or output_tokens is None or output_tokens < 2:
        return None
    return max(0, generated[-1].end - generated[-1].begin) / (output_tokens - 1)


def _lacks(trace: Trace) -> Iterable[str]:
    said = {why for span in trace.spans if (why := text(span.attributes, a.INCOMPLETE))}
    for clause in dict.fromkeys(clause for why in sorted(said) for clause in why.split("; ")):
        if lost := _LOST_RECORDS.fullmatch(clause):
            records = f"{lost[2]} record{'' if lost[2] == '1' else 's'}"
            yield f"The recorder of {lost[1]} lost {records} while this request was open."
        else:
            yield f"The recording lacks something: {clause}."


def _unknowns(trace: Trace, placement: Placement, outcome: Outcome | None) -> Iterable[str]:
    root = placement.root
    if root is None:
        yield "The root span is missing: begin, end and outcome are not known."
    elif outcome is None and not is_open(root):
        yield "The outcome was not recorded."
    elif outcome is Outcome.COMPLETED and integer(root.attributes, a.OUTPUT_TOKENS) is None:
        yield "The number of output tokens was not recorded."
    if not placement.placed:
        yield "No stage was recorded."
    elif not placement.exact:
        yield "Exact times are missing: stage boundaries are good to about 2 µs."
    hosts = {host for span in _recorders(trace) if (host := host_id(span))}
    told = {clock.host for clock in placement.clocks.values() if clock.basis is not ClockBasis.WALL}
    if len(hosts - told) > 1:
        yield f"Spans come from {len(hosts)} hosts; the error between their clocks is not known."
    for clock in placement.clocks.values():
        if clock.basis is not ClockBasis.WALL:
            yield clock.sentence
    known = {item.span.span_id for item in placement.placed}
    known.update(span.span_id for span in (*placement.attempts, *placement.rivals))
    if astray := len([span for span in placement.astray if span.span_id not in known]):
        yield f"{astray} span{'s have' if astray > 1 else ' has'} no wall time, and no say here."
    known.update(span.span_id for span in placement.astray)
    if root is not None:
        known.add(root.span_id)
    others = len({span.span_id for span in trace.spans} - known)
    if others:
        yield f"{others} other span{'s are' if others > 1 else ' is'} in this trace and left out."
