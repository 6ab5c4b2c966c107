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
from pdtrace.attributes import host_id, integer, role_of, text
from pdtrace.intervals import close_gaps, paint
from pdtrace.placement import (
    CLOSABLE_GAP_NS,
    Placed,
    Placement,
    place,
    split_requests,
)
from pdtrace.skew import MAX_SKEW_NS, ClockBasis, HostClock
from pdtrace.spans import AttrValue, Span, StatusCode, Trace
from pdtrace.stages import (
    CHAINS,
    STAGES,
    Kind,
    Mode,
    Outcome,
    Role,
)
from pdtrace.violations import (
    Overlap,
    Violation,
    ViolationKind,
    find_explained,
    find_overlaps,
    find_violations,
    request_id_of,
)

__all__ = [
    "UNEXPLAINED",
    "Overlap",
    "Part",
    "Segment",
    "StageVisit",
    "Steps",
    "StuckEvent",
    "Timeline",
    "Try",
    "Violation",
    "ViolationKind",
    "Wait",
    "build_timeline",
    "build_timelines",
]

UNEXPLAINED = "unexplained"

MAX_EXPLAINED = 3
"""Sentences on what clocks explain, among the unknowns; all of them are in `explained`."""

BLOCKER_SEPARATOR = "\x1f"
"""Stands between request ids where a list had to be written as one text."""

_LOST_RECORDS = re.compile(r"(\S+) lost (\d+) records?")

_OUTCOMES: Mapping[str, Outcome] = MappingProxyType({o.value: o for o in Outcome})

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
class Wait:
    """Why a stage waited; numbers are in the unit of the reason. Times are None if not recorded.

    reason        a `WaitReason`, for a gap between two tokens a `GapCause`, or another writer's
    blocker       request id in the way; the first of `blockers`
    at_ns         when it was recorded, from the request's begin
    for_ns        how long it held: until the next reason or the end of the stage
    explained_ns  part of a gap that its cause took
    step          forward pass in which a gap lies, by the worker's count
    batch         requests that were in it
    """

    stage: str
    reason: str
    needed: int | None = None
    free: int | None = None
    limit: int | None = None
    position: int | None = None
    blocker: str | None = None
    blockers: tuple[str, ...] = ()
    at_ns: int | None = None
    for_ns: int | None = None
    explained_ns: int | None = None
    step: int | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The forward passes of one stage; `slowest` counts the worker's passes."""

    stage: str
    attempt: int
    count: int
    slowest: int | None
    slowest_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckEvent:
    """A stage was reported as stuck, `at_ns` from the request's begin, when it was `age_ns` old."""

    stage: str
    attempt: int
    at_ns: int
    age_ns: int | None
    threshold_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One attempt at the request. Times count from the request's begin.

    outcome  how it ended; None while it goes on, or if that was not recorded
    stage    chain stage in which it ended without success
    """

    number: int
    begin_ns: int
    end_ns: int
    outcome: Outcome | None
    reason: str | None
    by: str | None
    stage: str | None
    prefill_worker: str | None
    decode_worker: str | None


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

    def waits_of(self, stage: str) -> tuple[Wait, ...]:
        """Waits recorded for one stage, in the order recorded."""
        return tuple(w for visit in self.visits for w in visit.waits if w.stage == stage)


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
    outcome = _outcome(attributes)
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
        open=_is_open(root) if root else any(visit.open for visit in visits),
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
        tries=_tries(placement),
        steps=tuple(_steps(visits)),
        stuck=tuple(_stuck(placement)),
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
    waits = _waits(item)
    return StageVisit(
        name=item.stage.name,
        attempt=item.attempt,
        begin_ns=item.begin,
        end_ns=max(item.begin, item.end),
        owned_ns=item.owned,
        span_id=span.span_id,
        service=span.resource.service_name,
        instance=span.resource.instance_id,
        outcome=_ended_here(span),
        open=_is_open(span),
        attributes=span.attributes,
        waits=waits,
        cause=_cause(waits, text(span.attributes, a.WAIT_REASON)),
        error_ns=item.error,
        moved_ns=item.moved,
    )


def _is_open(span: Span) -> bool:
    return span.attributes.get(a.OPEN.key) is True


def _tries(placement: Placement) -> tuple[Try, ...]:
    """Where an attempt's span carries no workers, those of its stages stand in."""
    tries: list[Try] = []
    for span in placement.attempts:
        number = integer(span.attributes, a.ATTEMPT) or 1
        begin, end = placement.offsets(span)
        mine = [item for item in placement.placed if item.attempt == number]
        prefill, decode = (
            text(span.attributes, attr)
            or next((i.span.resource.instance_id for i in mine if role_of(i.span) in roles), None)
            for attr, roles in (
                (a.PREFILL_WORKER, {Role.PREFILL, Role.WORKER}),
                (a.DECODE_WORKER, {Role.DECODE, Role.WORKER}),
            )
        )
        tries.append(
            Try(
                number=number,
                begin_ns=begin,
                end_ns=max(begin, end),
                outcome=_outcome(span.attributes),
                reason=text(span.attributes, a.OUTCOME_REASON),
                by=text(span.attributes, a.OUTCOME_BY),
                stage=text(span.attributes, a.OUTCOME_STAGE),
                prefill_worker=prefill,
                decode_worker=decode,
            )
        )
    return tuple(sorted(tries, key=lambda one: (one.number, one.begin_ns)))


def _steps(visits: Sequence[StageVisit]) -> Iterable[Steps]:
    for visit in visits:
        count = integer(visit.attributes, a.STEPS)
        if count:
            yield Steps(
                stage=visit.name,
                attempt=visit.attempt,
                count=count,
                slowest=integer(visit.attributes, a.STEP_SLOWEST_NUMBER),
                slowest_ns=_nanoseconds(visit.attributes, a.STEP_SLOWEST_SECONDS),
            )


def _stuck(placement: Placement) -> Iterable[StuckEvent]:
    for item in placement.placed:
        for event in item.span.events:
            if a.STUCK_SECONDS.key in event.attributes:
                yield StuckEvent(
                    stage=item.stage.name,
                    attempt=item.attempt,
                    at_ns=event.time_ns + item.begin - item.span.start_ns,
                    age_ns=_nanoseconds(event.attributes, a.STUCK_SECONDS),
                    threshold_ns=_nanoseconds(event.attributes, a.STUCK_AFTER_SECONDS),
                )


def _nanoseconds(attributes: Mapping[str, AttrValue], attr: a.Attr) -> int | None:
    """An attribute in seconds as nanoseconds; None if it is absent or no sensible length."""
    seconds = attributes.get(attr.key)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        return None
    return round(seconds * 1e9)


def _ended_here(span: Span) -> Outcome | None:
    outcome = _outcome(span.attributes)
    if outcome is None and span.status is StatusCode.ERROR:
        return Outcome.FAILED
    return None if outcome is Outcome.COMPLETED else outcome


def _cause(waits: Sequence[Wait], named: str | None) -> Wait | None:
    """The longest wait of the reason that the recorder names, else of the reason held longest."""
    if not waits:
        return None
    held: defaultdict[str, int] = defaultdict(int)
    for wait in waits:
        held[wait.reason] += wait.for_ns or 0
    reason = named or max(held, key=lambda key: held[key])
    alike = [wait for wait in waits if wait.reason == reason] or list(waits)
    return max(alike, key=lambda wait: wait.for_ns or 0)


def _by_begin(item: Placed) -> tuple[int, int, str]:
    return (item.begin, -item.end, item.span.span_id)


def _waits(item: Placed) -> tuple[Wait, ...]:
    """Waits from the span's events; one from its own attributes unless an event told it."""
    span = item.span
    if not span.events:
        return _own_wait(item)
    shift = item.begin - span.start_ns
    events = sorted(
        (event for event in span.events if text(event.attributes, a.WAIT_REASON)),
        key=lambda event: event.time_ns,
    )
    waits: list[Wait] = []
    for position, event in enumerate(events):
        begin = event.time_ns + shift
        end = item.end
        if position + 1 < len(events):
            end = min(end, events[position + 1].time_ns + shift)
        held = max(0, end - max(begin, item.begin))
        waits.append(_wait(item, event.attributes, at_ns=begin, for_ns=held))
    told = {wait.reason for wait in waits}
    return (*waits, *(wait for wait in _own_wait(item) if wait.reason not in told))


def _own_wait(item: Placed) -> tuple[Wait, ...]:
    attributes = item.span.attributes
    if text(attributes, a.WAIT_REASON):
        return (_wait(item, attributes),)
    cause = text(attributes, a.GAP_CAUSE)
    if cause is None:
        return ()
    blockers = _blockers(attributes)
    return (
        Wait(
            stage=item.stage.name,
            reason=cause,
            blocker=blockers[0] if blockers else None,
            blockers=blockers,
            at_ns=item.begin,
            for_ns=max(0, item.end - item.begin),
            explained_ns=_nanoseconds(attributes, a.GAP_CAUSE_SECONDS),
            step=integer(attributes, a.STEP_NUMBER),
            batch=integer(attributes, a.BATCH_SIZE),
        ),
    )


def _wait(
    item: Placed,
    attributes: Mapping[str, AttrValue],
    *,
    at_ns: int | None = None,
    for_ns: int | None = None,
) -> Wait:
    blockers = _blockers(attributes)
    return Wait(
        stage=text(attributes, a.WAIT_STAGE) or item.stage.name,
        reason=text(attributes, a.WAIT_REASON) or "unknown",
        needed=integer(attributes, a.WAIT_NEEDED),
        free=integer(attributes, a.WAIT_FREE),
        limit=integer(attributes, a.WAIT_LIMIT),
        position=integer(attributes, a.WAIT_POSITION),
        blocker=blockers[0] if blockers else None,
        blockers=blockers,
        at_ns=at_ns,
        for_ns=for_ns,
    )


def _blockers(attributes: Mapping[str, AttrValue]) -> tuple[str, ...]:
    """Request ids in the way, the most important one first, each once."""
    names: list[str] = []
    if (first := text(attributes, a.WAIT_BLOCKER)) is not None:
        names.append(first)
    listed = attributes.get(a.WAIT_BLOCKERS.key)
    if isinstance(listed, str):
        names += listed.split(BLOCKER_SEPARATOR)
    elif isinstance(listed, list | tuple):
        names += [str(name) for name in listed]
    return tuple(dict.fromkeys(name for name in names if name))


def _outcome(attributes: Mapping[str, AttrValue]) -> Outcome | None:
    return _OUTCOMES.get(text(attributes, a.OUTCOME) or "")


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
    return _nanoseconds(attributes, a.TTFT_SECONDS)


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
    elif outcome is None and not _is_open(root):
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
