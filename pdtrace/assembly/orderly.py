"""The spans of a request in which everything went in order, by the plan of its shape.

Owns a shortcut: `spans_in_order` gives what assembly gives, or None where something went otherwise
(an abort, a retry, a lost process, several clocks, times that contradict the order, a stage that
never ended) or where the shape has not come before. Tests hold both equal. The spans are made when
somebody asks for them: encoders and judges that know the plan need only its times.
What the plan of a shape is, is `pdtrace.assembly.request_plans`'. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import overload

from pdtrace import semconv as a
from pdtrace.assembly.collected import AttemptIds, CollectedRequest, Leg
from pdtrace.assembly.drafts import (
    CHAIN_GAP_NS,
    ROOT_KEYS,
    SIDE_GAP_NS,
    STRING_LISTS,
    root_name,
    set_attribute,
)
from pdtrace.assembly.evidence import derived_span_id, place_of, span_id_base
from pdtrace.assembly.orderly_fields import add_orderly_fields
from pdtrace.assembly.request_plans import (
    MAX_SHAPES,
    More,
    RequestPlan,
    SpanPlan,
    Told,
    plan_request,
)
from pdtrace.assembly.wait_marks import blocker_links, tell_waits
from pdtrace.otlp.span_fields import SelfEncoding
from pdtrace.ring.records import MarkRecord, Value
from pdtrace.spans import AttrValue, Resource, Span, SpanKind
from pdtrace.stages import ATTEMPT_SPAN, ROOT_SPAN, STAGE_BY_NAME, Mark, Mode, Outcome

_MODES = {mode.value: mode for mode in Mode}
_MODE_AT = place_of(Mark.TOKENIZED, a.MODE)
_STREAM_AT = place_of(Mark.TOKENIZED, a.STREAM)
_OUTCOME_AT = place_of(Mark.COMPLETED, a.OUTCOME)
_ENDED_BY_AT = (place_of(Mark.COMPLETED, a.OUTCOME_REASON), place_of(Mark.COMPLETED, a.OUTCOME_BY))
_WAIT_STAGE_AT = place_of(Mark.WAITING, a.WAIT_STAGE)
_WORKERS_AT = tuple(
    (attr.key, place_of(Mark.ROUTED, attr)) for attr in (a.PREFILL_WORKER, a.DECODE_WORKER)
)
_STAGE, _STAGE_KIND = a.STAGE.key, a.STAGE_KIND.key
_BEGIN, _END = a.BEGIN_NS.key, a.END_NS.key
_COMPLETED = Outcome.COMPLETED.value
_TOKENIZED, _WAITING = Mark.TOKENIZED, Mark.WAITING
_WAITING_BYTE = bytes((Mark.WAITING,))
_by_time = attrgetter("t_ns")

NO_MORE = More()


class OrderlySpans(Sequence[Span], SelfEncoding):
    """The spans of one request, root first, then its attempt, then stages by begin.

    plan           of its shape
    records        the marks but for waits, by their numbers in the plan, and `times` theirs
    walls          the same in Unix time, whole microseconds
    resources      of the legs
    identity       attributes that all spans share
    id_base        of the stages' span ids, with the salts of the plan
    shown_ends     where each stage's exported span ends, by place
    more           by place, for the stages that have it
    order          the stages' places by begin
    """

    def __init__(
        self, request: CollectedRequest, legs: Sequence[Leg], plan: RequestPlan, ids: AttemptIds
    ) -> None:
        """Raises OutOfOrderError for times or values that do not allow for the plan."""
        self.plan = plan
        marks = [record for leg in legs for record in leg.marks]
        self.records = records = [record for record in marks if record.mark is not _WAITING]
        self.times = times = [record.t_ns for record in records]
        self.resources = [leg.process.resource for leg in legs]
        self.trace_id, self.trace_state = request.trace_id, request.trace_state
        self.root_id, self.attempt_id = request.root_span_id, ids.span_id
        self.client_parent_id = request.client_parent_span_id
        self.number = records[0].attempt or 1
        self.identity: dict[str, AttrValue] = {
            a.REQUEST_ID.key: request.request_id,
            a.ATTEMPT.key: self.number,
        }
        if ids.handoff_id:
            self.identity[a.HANDOFF_ID.key] = ids.handoff_id
        anchor = legs[plan.gateway].process.anchor
        self.wall_offset_ns = anchor.wall_ns - anchor.monotonic_ns
        if any(len(records[number].values) < count for number, count in plan.valued):
            raise OutOfOrderError  # a writer that did not know all of them
        self.received_ns = times[plan.first[Mark.RECEIVED]]
        self.decoded_ns = times[plan.first[Mark.DECODE_FINISHED]]
        self.completed_ns = times[plan.first[Mark.COMPLETED]]
        offset_ns = self.wall_offset_ns
        self.walls = [t_ns + offset_ns - (t_ns + offset_ns) % 1_000 for t_ns in times]
        self._check_end()
        self._check_pairs()
        self.shown_ends = self._shown_ends()
        waits = [record for record in marks if record.mark is _WAITING]
        self.more = self._more(request, legs, sorted(waits, key=_by_time))
        self.id_base = span_id_base(self.root_id, self.attempt_id)
        begins = [times[begin] for _, _, begin, _ in plan.extents]
        self.order = sorted(range(len(begins)), key=begins.__getitem__)
        self._root: Span | None = None
        self._all: list[Span] | None = None

    # -- as a sequence -----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.order) + 2

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        return self.root if index == 0 else self._made()[index]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._made())

    @property
    def root(self) -> Span:
        """The first, without the others."""
        if self._root is None:
            self._root = self._make_root()
        return self._root

    def share(self, key: str, value: AttrValue) -> None:
        """Each span has the attribute, from now on."""
        self.identity[key] = value
        self._root = None
        self.forget()

    def forget(self) -> None:
        """Lets go of the spans that were made; they are made again for who asks."""
        self._all = None

    @property
    def num_parts(self) -> int:
        """Spans with their events and links."""
        return len(self) + sum([len(more.events) + len(more.links) for more in self.more.values()])

    def stage_lengths(self) -> list[tuple[str, int]]:
        """Each stage and how long it took, in nanoseconds."""
        times = self.times
        return [(plan.name, times[plan.end] - times[plan.begin]) for plan in self.plan.spans]

    def add_fields(self, parts_of: Callable[[Resource], list[bytes]]) -> bool:
        """The spans in protobuf, as `SelfEncoding` says."""
        return add_orderly_fields(self, parts_of)

    def told(self, told: Iterable[Told]) -> dict[str, AttrValue]:
        """Attributes that marks put on a span."""
        attributes: dict[str, AttrValue] = {}
        for one in told:
            value = self.value(one)
            if value is not None:
                attributes[one.key] = value
        return attributes

    def value(self, told: Told) -> Value:
        """One of them; None where nothing was recorded."""
        _, number, place, others = told
        value = self.records[number].values[place]
        if value is None:
            for number, place in others:
                value = self.records[number].values[place]
                if value is not None:
                    return value
        return value

    # -- what the times and values allow for -------------------------------------------------

    def _check_end(self) -> None:
        plan, times = self.plan, self.times
        values = self.records[plan.first[Mark.COMPLETED]].values
        outcome = values[_OUTCOME_AT]
        if (
            (outcome and str(outcome) != _COMPLETED)
            or any(values[place] for place in _ENDED_BY_AT)
            or not self.received_ns <= self.decoded_ns <= self.completed_ns
            or self.decoded_ns < times[plan.first[Mark.ADMITTED]]
            or not 0 < min(times) + self.wall_offset_ns <= max(times) + self.wall_offset_ns < 2**63
        ):
            raise OutOfOrderError

    def _check_pairs(self) -> None:
        records, times = self.records, self.times
        for begins, ends, begins_at, ends_at in self.plan.paired:
            chunks = [records[number].values[begins_at] for number in begins]
            ended = [records[number].values[ends_at] for number in ends]
            if chunks != ended or None in chunks or len(set(chunks)) != len(chunks):
                raise OutOfOrderError
            if len(begins) > 1 and any(
                times[one] > times[other] for one, other in pairwise(begins)
            ):
                raise OutOfOrderError

    def _shown_ends(self) -> list[int]:
        """What lies beside the chain ends with the attempt at the latest, and not in the
        microsecond in which a chain stage ends; a first token that took longer ends with it, too:
        as assembly has it."""
        times, walls, until_ns = self.times, self.walls, self.decoded_ns
        decoded = walls[self.plan.first[Mark.DECODE_FINISHED]]
        first_token = self.plan.first.get(Mark.FIRST_TOKEN_SENT)
        shown: list[int] = []
        beside: list[int] = []
        chain_ends: set[int] = set()
        for at, in_chain, begin, end in self.plan.extents:
            end_ns = times[end]
            if end_ns < times[begin]:
                raise OutOfOrderError
            if in_chain:
                outlasts = end == first_token and end_ns > until_ns
                shown_ns = (decoded if outlasts else walls[end]) - CHAIN_GAP_NS
                chain_ends.add(shown_ns)
            else:
                shown_ns = (walls[end] if end_ns < until_ns else decoded) - SIDE_GAP_NS
                beside.append(at)
            shown.append(shown_ns)
        for at in beside:
            while shown[at] in chain_ends:
                shown[at] -= CHAIN_GAP_NS
        return shown

    # -- waits and forward passes ------------------------------------------------------------

    def _more(
        self, request: CollectedRequest, legs: Sequence[Leg], waits: Iterable[MarkRecord]
    ) -> Mapping[int, More]:
        more: dict[int, More] = {}
        by_stage: dict[int, list[MarkRecord]] = {}
        for record in waits:
            by_stage.setdefault(self._waiting(record).at, []).append(record)
        for at, told in by_stage.items():
            _, _, begin, end = self.plan.extents[at]
            events, attributes = tell_waits(
                told, self.times[begin], self.times[end], self.wall_offset_ns
            )
            more[at] = More(attributes, events, blocker_links(request, told))
        for plan in self.plan.stepped:
            for steps in legs[plan.leg].steps:
                if steps.kind is plan.steps and steps.attempt == self.number:
                    attributes, events, links = more.get(plan.at, NO_MORE)
                    passes: dict[str, AttrValue] = {
                        **attributes,
                        a.STEPS.key: steps.count,
                        a.STEP_SLOWEST_NUMBER.key: steps.slowest_number,
                        a.STEP_SLOWEST_SECONDS.key: steps.slowest_ns / 1e9,
                    }
                    more[plan.at] = More(passes, events, links)
        return more

    def _waiting(self, record: MarkRecord) -> SpanPlan:
        """The stage that a WAITING mark is about."""
        name, times = str(record.values[_WAIT_STAGE_AT]), self.times
        candidates = self.plan.by_stage.get(name)
        if not candidates or name not in STAGE_BY_NAME:
            raise OutOfOrderError
        for plan in candidates:
            if times[plan.begin] <= record.t_ns <= times[plan.end]:
                return plan
        return candidates[-1]

    # -- spans -------------------------------------------------------------------------------

    def _made(self) -> list[Span]:
        made = self._all
        if made is None:
            stages = self._make_stages()
            made = [self.root, self.make_attempt(), *[stages[at] for at in self.order]]
            self._all = made
        return made

    def _make_stages(self) -> list[Span]:
        """The spans of stages, by place."""
        trace_id, state, times = self.trace_id, self.trace_state, self.times
        walls, base, shown = self.walls, self.id_base, self.shown_ends
        template = {**self.identity, _STAGE: "", _STAGE_KIND: "", _BEGIN: 0, _END: 0}
        spans: list[Span] = []
        for plan in self.plan.spans:
            begin_ns, end_ns = times[plan.begin], shown[plan.at]
            attributes = template.copy()
            attributes[_STAGE] = plan.name
            attributes[_STAGE_KIND] = plan.kind_of_time
            attributes[_BEGIN] = begin_ns
            attributes[_END] = times[plan.end]
            if plan.told:
                attributes.update(self.told(plan.told))
            more = self.more.get(plan.at, NO_MORE)
            attributes.update(more.attributes)
            if plan.nested_in is not None:
                parent_id = spans[plan.nested_in].span_id
            else:
                parent_id = self.root_id if plan.at_root else self.attempt_id
            start_ns = walls[plan.begin]
            spans.append(
                Span(
                    trace_id,
                    derived_span_id(base, plan.salt),
                    parent_id,
                    plan.name,
                    plan.kind,
                    start_ns,
                    end_ns if end_ns > start_ns else start_ns,
                    self.resources[plan.leg],
                    attributes,
                    more.events,
                    more.links,
                    trace_state=state,
                )
            )
        return spans

    def make_attempt(self) -> Span:
        """The span of the attempt."""
        plan, times = self.plan, self.times
        first = plan.first
        attributes: dict[str, AttrValue] = {a.SPAN.key: ATTEMPT_SPAN, **self.identity}
        routed = first.get(Mark.ROUTED)
        if routed is not None:
            for key, place in _WORKERS_AT:
                set_attribute(attributes, key, self.records[routed].values[place])
        reserved, released = first.get(Mark.PAGES_RESERVED), first.get(Mark.DECODE_RELEASED)
        if reserved is not None and released is not None:
            held_ns = max(times[released] - times[reserved], 0)
            attributes[a.KV_HELD_SECONDS.key] = held_ns / 1e9
        told = self.told(plan.homeless)
        attributes.update({key: told[key] for key in told if key not in attributes})
        attributes[a.OUTCOME.key] = _COMPLETED
        attributes[_BEGIN] = times[first[Mark.ADMITTED]]
        attributes[_END] = self.decoded_ns
        start_ns = self.walls[first[Mark.ADMITTED]]
        end_ns = self.walls[first[Mark.DECODE_FINISHED]] - CHAIN_GAP_NS
        return Span(
            self.trace_id,
            self.attempt_id,
            self.root_id,
            ATTEMPT_SPAN,
            SpanKind.INTERNAL,
            start_ns,
            max(end_ns, start_ns),
            self.resources[plan.gateway],
            attributes,
            trace_state=self.trace_state,
        )

    def _make_root(self) -> Span:
        plan, times = self.plan, self.times
        attributes: dict[str, AttrValue] = {
            a.SPAN.key: ROOT_SPAN,
            **self.identity,
            a.PROVIDER.key: "pdtrace",
        }
        for number in sorted(plan.on_root, key=times.__getitem__):
            record = self.records[number]
            for key, value in zip(ROOT_KEYS[record.mark], record.values, strict=False):
                if key is None or value is None:
                    continue
                if key in STRING_LISTS:
                    set_attribute(attributes, key, value)
                else:
                    attributes[key] = value
        name = root_name(attributes)
        attributes[a.OUTCOME.key] = _COMPLETED
        sent = plan.first.get(Mark.FIRST_TOKEN_SENT)
        if sent is not None:
            attributes[a.TTFT_SECONDS.key] = max(times[sent] - self.received_ns, 0) / 1e9
        attributes[_BEGIN] = self.received_ns
        attributes[_END] = self.completed_ns
        return Span(
            self.trace_id,
            self.root_id,
            self.client_parent_id,
            name,
            SpanKind.SERVER,
            self.walls[plan.first[Mark.RECEIVED]],
            self.walls[plan.first[Mark.COMPLETED]],
            self.resources[plan.gateway],
            attributes,
            trace_state=self.trace_state,
        )


class OutOfOrderError(Exception):
    """The times or values of a request do not allow for the plan of its shape."""


class _Shapes:
    """Plans by shape. One is made for a shape that comes again: most of the odd ones do not."""

    def __init__(self) -> None:
        self._plans: dict[object, RequestPlan | None] = {}
        self._seen: set[object] = set()

    def plan(self, legs: Sequence[Leg], mode: Mode, *, streams: bool) -> RequestPlan | None:
        recorded = [bytes([record.mark for record in leg.marks]) for leg in legs]
        if any(_WAITING_BYTE in marks for marks in recorded):
            recorded = [marks.replace(_WAITING_BYTE, b"") for marks in recorded]
        key = (mode, streams, *recorded, *[leg.process.role for leg in legs])
        try:
            return self._plans[key]
        except KeyError:
            pass
        if key not in self._seen:
            if len(self._seen) >= MAX_SHAPES:
                self._seen.clear()
                self._plans.clear()
            self._seen.add(key)
            return None
        shape = [
            (leg.process.role, [Mark(number) for number in marks])
            for leg, marks in zip(legs, recorded, strict=True)
        ]
        plan = self._plans[key] = plan_request(shape, mode, streams=streams)
        return plan


_shapes = _Shapes()


def spans_in_order(request: CollectedRequest) -> OrderlySpans | None:
    """The spans of `request` as `assemble` gives them; None where only assembly can tell."""
    legs = [leg for leg in request.legs if leg.marks]
    if not legs or not _is_whole(request):
        return None
    attempts = {record.attempt for leg in legs for record in leg.marks}
    if len(attempts) != 1:
        return None
    ids = request.attempts.get(attempts.pop() or 1)
    tokenized = _tokenized(legs)
    if ids is None or tokenized is None:
        return None
    try:
        mode = _MODES.get(str(tokenized.values[_MODE_AT])) or request.mode
        if mode is None:
            return None
        streams = tokenized.values[_STREAM_AT] is not False
        plan = _shapes.plan(legs, mode, streams=streams)
        return None if plan is None else OrderlySpans(request, legs, plan, ids)
    except (OutOfOrderError, IndexError):  # or a value that the writer of a mark did not know
        return None


def _tokenized(legs: Sequence[Leg]) -> MarkRecord | None:
    for leg in legs:
        for record in leg.marks:
            if record.mark is _TOKENIZED:
                return record
    return None


def _is_whole(request: CollectedRequest) -> bool:
    """Whether nothing is known to be missing of it, and all of it was recorded on one clock."""
    if request.open_at_ns is not None or request.gave_up or request.stuck:
        return False
    clock_id = request.legs[0].process.clock_id
    for leg in request.legs:
        if leg.records_missed or leg.lost_at_ns is not None or leg.process.clock_id != clock_id:
            return False
    return True
