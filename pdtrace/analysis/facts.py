"""What a trace tells beside times: waits and gaps with their causes, passes, attempts, reports.

Owns the shapes and reading them from placed spans, in the forms that writers give them; where the
time went is `pdtrace.analysis.timeline`'s. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.analysis.attributes import integer, role_of, text
from pdtrace.analysis.placement import Placed, Placement
from pdtrace.ring.codec import ID_SEPARATOR
from pdtrace.spans import AttrValue, Span
from pdtrace.stages import Outcome, Role, WaitReason

NS_PER_MS = 1_000_000
_OUTCOMES: Mapping[str, Outcome] = MappingProxyType({o.value: o for o in Outcome})


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


def is_open(span: Span) -> bool:
    """Whether a span had not ended when its request was looked at."""
    return span.attributes.get(a.OPEN.key) is True


def outcome_of(attributes: Mapping[str, AttrValue]) -> Outcome | None:
    """The outcome that a span tells; None if it tells none that is known."""
    return _OUTCOMES.get(text(attributes, a.OUTCOME) or "")


def waits_told(item: Placed) -> tuple[Wait, ...]:
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
        begin = max(event.time_ns + shift, item.begin)
        end = min(item.end, item.limit)  # what lasted beyond its request held nobody up
        if position + 1 < len(events):
            end = min(end, events[position + 1].time_ns + shift)
        if text(event.attributes, a.WAIT_REASON) == WaitReason.PROCESS_PAUSED:
            stood_ms = integer(event.attributes, a.WAIT_NEEDED) or 0
            end = min(end, event.time_ns + shift + stood_ms * NS_PER_MS)
            if end <= begin:
                continue  # the process went on before this stage began
        held = max(0, end - begin)
        waits.append(_wait(item, event.attributes, at_ns=begin, for_ns=held))
    told = {text(event.attributes, a.WAIT_REASON) for event in events}
    return (*waits, *(wait for wait in _own_wait(item) if wait.reason not in told))


def _own_wait(item: Placed) -> tuple[Wait, ...]:
    attributes = item.span.attributes
    if text(attributes, a.WAIT_REASON):
        return (_wait(item, attributes),)
    cause = text(attributes, a.GAP_CAUSE)
    if cause is None:
        return ()
    blockers = _blockers(attributes)
    held = max(0, min(item.end, item.limit) - item.begin)
    explained = nanoseconds(attributes, a.GAP_CAUSE_SECONDS)
    return (
        Wait(
            stage=item.stage.name,
            reason=cause,
            blocker=blockers[0] if blockers else None,
            blockers=blockers,
            at_ns=item.begin,
            for_ns=held,
            explained_ns=None if explained is None else min(explained, held),
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
        names += listed.split(ID_SEPARATOR)
    elif isinstance(listed, list | tuple):
        names += [str(name) for name in listed]
    return tuple(dict.fromkeys(name for name in names if name))


def longest_cause(waits: Sequence[Wait], named: str | None) -> Wait | None:
    """The longest wait of the reason that the recorder names, else of the reason held longest."""
    if not waits:
        return None
    held: defaultdict[str, int] = defaultdict(int)
    for wait in waits:
        held[wait.reason] += wait.for_ns or 0
    reason = named or max(held, key=lambda key: held[key])
    alike = [wait for wait in waits if wait.reason == reason] or list(waits)
    return max(alike, key=lambda wait: wait.for_ns or 0)


def tries_of(placement: Placement) -> tuple[Try, ...]:
    """The attempts, by number. Where one's span carries no workers, its stages' stand in."""
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
                outcome=outcome_of(span.attributes),
                reason=text(span.attributes, a.OUTCOME_REASON),
                by=text(span.attributes, a.OUTCOME_BY),
                stage=text(span.attributes, a.OUTCOME_STAGE),
                prefill_worker=prefill,
                decode_worker=decode,
            )
        )
    return tuple(sorted(tries, key=lambda one: (one.number, one.begin_ns)))


def steps_of(placement: Placement) -> Iterable[Steps]:
    """The forward passes of each stage that tells of some, by begin."""
    for item in placement.placed:
        attributes = item.span.attributes
        count = integer(attributes, a.STEPS)
        if count:
            yield Steps(
                stage=item.stage.name,
                attempt=item.attempt,
                count=count,
                slowest=integer(attributes, a.STEP_SLOWEST_NUMBER),
                slowest_ns=nanoseconds(attributes, a.STEP_SLOWEST_SECONDS),
            )


def stuck_events(placement: Placement) -> Iterable[StuckEvent]:
    """Reports of stages that took too long, made while they did."""
    for item in placement.placed:
        for event in item.span.events:
            if a.STUCK_SECONDS.key in event.attributes:
                yield StuckEvent(
                    stage=item.stage.name,
                    attempt=item.attempt,
                    at_ns=event.time_ns + item.begin - item.span.start_ns,
                    age_ns=nanoseconds(event.attributes, a.STUCK_SECONDS),
                    threshold_ns=nanoseconds(event.attributes, a.STUCK_AFTER_SECONDS),
                )


def nanoseconds(attributes: Mapping[str, AttrValue], attr: a.Attr) -> int | None:
    """An attribute in seconds as nanoseconds; None if it is absent or no sensible length."""
    seconds = attributes.get(attr.key)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        return None
    return round(seconds * 1e9)
