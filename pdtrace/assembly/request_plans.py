"""What the spans of requests of one shape have in common, worked out once for each shape.

A shape is who recorded which marks in which order, waits aside, and how the answer was sent. Owns
which marks begin and end each span of a request in which everything went in order, whose attributes
stand where and what is parent of what: the rules of `pdtrace.assembly.request_spans` for such
requests, as a table. Pure: knows no times and no values; `pdtrace.assembly.orderly` fills them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdtrace import semconv as a
from pdtrace.assembly.drafts import ROOT_KEYS, SPAN_KEYS
from pdtrace.assembly.evidence import REPEATABLE_MARKS, REQUEST_MARKS
from pdtrace.assembly.stage_plans import CHAIN_PLANS, LANDING, SIDE_PLANS, StagePlan, numbered_salt
from pdtrace.spans import AttrValue, Event, Link, SpanKind
from pdtrace.stages import MARKS, OPTIONAL_STAGES, Mark, Mode, Role, StepKind

MAX_SHAPES = 2_000
"""Shapes whose plans are kept."""

CHUNK_AT: Mapping[Mark, int] = {
    mark: spec.attrs.index(a.CHUNK_INDEX)
    for mark, spec in MARKS.items()
    if a.CHUNK_INDEX in spec.attrs
}
"""Where a mark that occurs for every chunk has its number."""

_IN_EVERY_ATTEMPT = (Mark.RECEIVED, Mark.TOKENIZED, Mark.ADMITTED, Mark.DECODE_FINISHED)
_STEPS_OF = {"prefill.compute": StepKind.PREFILL, "decode.generate": StepKind.DECODE}


class Told(NamedTuple):
    """An attribute that a mark puts on a span: which value of which record.

    others  records and places that have it if this one says nothing
    """

    key: str
    record: int
    place: int
    others: tuple[tuple[int, int], ...] = ()


class SpanPlan(NamedTuple):
    """One stage span. Records are named by their number, counted through all legs.

    at          its place among the request's stage spans
    in_chain    its exported end keeps its place before the next chain stage begins
    begin, end  records whose times are its own
    leg         number of the leg that ended it
    salt        of its span id
    nested_in   place of the span that it is a child of; None: the root's or the attempt's child
    told        what marks put on it
    steps       kind of the forward passes that it consists of
    """

    at: int
    name: str
    kind: SpanKind
    kind_of_time: str
    at_root: bool
    in_chain: bool
    begin: int
    end: int
    leg: int
    salt: int
    nested_in: int | None
    told: tuple[Told, ...]
    steps: StepKind | None


class Pairs(NamedTuple):
    """Records of a repeated stage, and where their values have the number of the chunk."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    begins_at: int
    ends_at: int


class More(NamedTuple):
    """What stands on a stage's span because of its waits and forward passes."""

    attributes: Mapping[str, AttrValue] = {}
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RequestPlan:
    """All spans of a request of one shape.

    gateway   number of its leg
    first     record by mark, for the marks that occur once
    valued    records that carry values, and how many
    spans     of stages, by their place; an outer one comes before what is nested in it
    extents   of the same: place, whether it is in the chain, its begin and end
    by_stage  the same by stage
    stepped   those of them that consist of forward passes
    on_root   records that tell of the whole request
    paired    begins and ends of a repeated stage, which pair in this order if the times of the
              begins never fall and the numbers of the chunks are equal
    homeless  what stands on the attempt, as its stage has no span
    """

    mode: Mode
    gateway: int
    first: Mapping[Mark, int]
    valued: tuple[tuple[int, int], ...]
    spans: tuple[SpanPlan, ...]
    extents: tuple[tuple[int, bool, int, int], ...]
    by_stage: Mapping[str, tuple[SpanPlan, ...]]
    stepped: tuple[SpanPlan, ...]
    on_root: tuple[int, ...]
    paired: tuple[Pairs, ...]
    homeless: tuple[Told, ...]


Shape = Sequence[tuple[Role, Sequence[Mark]]]
"""Of each leg that recorded something, its role and its marks in the order recorded; without waits,
which come in any number and at any time."""


def plan_request(shape: Shape, mode: Mode, *, streams: bool) -> RequestPlan | None:
    """The plan of a request with one attempt that completed; None for a shape in which something
    went otherwise: a mark twice, a stage that was cut short or is missing, no gateway.

    streams  whether the answer was sent token by token
    """
    plan = _Planning(shape, mode, streams)
    return plan.made() if plan.is_in_order() else None


@dataclass(slots=True)
class _Marks:
    """The records of a shape: by mark those that occur once, and those that may come again."""

    first: dict[Mark, int] = field(default_factory=dict[Mark, int])
    repeated: dict[Mark, list[int]] = field(default_factory=dict[Mark, list[int]])
    leg_of: list[int] = field(default_factory=list[int])
    is_twice: bool = False


def _read(shape: Shape) -> _Marks:
    marks = _Marks()
    for leg, (_, recorded) in enumerate(shape):
        for mark in recorded:
            number = len(marks.leg_of)
            marks.leg_of.append(leg)
            if mark in REPEATABLE_MARKS:
                marks.repeated.setdefault(mark, []).append(number)
            else:
                marks.is_twice = marks.is_twice or mark in marks.first
                marks.first[mark] = number
    return marks


class _Planning:
    def __init__(self, shape: Shape, mode: Mode, streams: bool) -> None:
        self.mode = mode
        self.streams = streams
        self.roles = [role for role, _ in shape]
        self.marks = _read(shape)
        self.mark_of = [mark for _, recorded in shape for mark in recorded]
        self.spans: list[SpanPlan] = []
        self.by_stage: dict[str, tuple[SpanPlan, ...]] = {}
        self.paired: list[Pairs] = []
        self.landed = self._landed()

    def is_in_order(self) -> bool:
        """Whether all is there that the plan of a completed request rests on."""
        marks = self.marks
        return (
            self.roles.count(Role.GATEWAY) == 1
            and not marks.is_twice
            and Mark.COMPLETED in marks.first
            and all(mark in marks.first for mark in _IN_EVERY_ATTEMPT)
            and all(mark in CHUNK_AT for mark in marks.repeated)
            and not any(self._lacks_end(plan) for plan in SIDE_PLANS[self.mode])
            and not any(self._is_missing(plan) for plan in CHAIN_PLANS[self.mode])
        )

    def _lacks_end(self, plan: StagePlan) -> bool:
        """Whether a repeated stage has a begin without an end, or the other way round."""
        repeated = self.marks.repeated
        begins = sum(len(repeated.get(mark, ())) for mark in plan.begin)
        ends = len(repeated.get(plan.end, ()))
        return plan.stage.repeats and (begins != ends or (begins > 0 and len(plan.begin) > 1))

    def _is_missing(self, plan: StagePlan) -> bool:
        """Whether a chain stage has no span though its process was there: assembly says so."""
        return (
            (self._begin_of(plan) is None or plan.end not in self.marks.first)
            and plan.name not in OPTIONAL_STAGES
            and not plan.stage.roles.isdisjoint(self.roles)
        )

    def made(self) -> RequestPlan | None:
        for plan in CHAIN_PLANS[self.mode]:
            self._plan_once(plan)
        for plan in SIDE_PLANS[self.mode]:
            if plan.stage.repeats:
                self._plan_repeated(plan)
            else:
                self._plan_once(plan)
        homeless = self._told(self._homeless())
        if any(told.others for told in homeless):
            return None  # which of them says it depends on their times
        return RequestPlan(
            mode=self.mode,
            gateway=self.roles.index(Role.GATEWAY),
            first=self.marks.first,
            valued=tuple(
                (number, len(MARKS[mark].attrs))
                for number, mark in enumerate(self.mark_of)
                if MARKS[mark].attrs
            ),
            spans=tuple(self.spans),
            extents=tuple((s.at, s.in_chain, s.begin, s.end) for s in self.spans),
            by_stage=self.by_stage,
            stepped=tuple(span for span in self.spans if span.steps is not None),
            on_root=tuple(n for mark, n in self.marks.first.items() if mark in ROOT_KEYS),
            paired=tuple(self.paired),
            homeless=homeless,
        )

    def _begin_of(self, plan: StagePlan) -> int | None:
        first = self.marks.first
        return next((first[mark] for mark in plan.begin if mark in first), None)

    def _plan_once(self, plan: StagePlan) -> None:
        begin, end = self._begin_of(plan), self.marks.first.get(plan.end)
        if begin is None or end is None:
            return
        records = list(self.landed.get(plan.name, ()))
        if not plan.in_chain:
            records = [*self._own(plan, begin, end), *records]
        self._add(plan, begin, end, plan.salt, records)

    def _plan_repeated(self, plan: StagePlan) -> None:
        repeated = self.marks.repeated
        begins = [number for mark in plan.begin for number in repeated.get(mark, ())]
        ends = repeated.get(plan.end, [])
        if not begins:
            return
        self.paired.append(
            Pairs(
                tuple(begins), tuple(ends), *(CHUNK_AT[self.mark_of[n[0]]] for n in (begins, ends))
            )
        )
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            salt = numbered_salt(plan.name, index) if index else plan.salt
            self._add(plan, begin, end, salt, self._own(plan, begin, end))

    def _own(self, plan: StagePlan, begin: int, end: int) -> list[int]:
        """Records whose attributes a stage beside the chain takes by itself."""
        lands = LANDING[self.mode].get(self.mark_of[begin]) == plan.name
        return [end, begin] if lands else [end]

    def _landed(self) -> Mapping[str, list[int]]:
        """Records that occur once, by the stage that takes their attributes."""
        landed: dict[str, list[int]] = {}
        for mark, number in self.marks.first.items():
            name = LANDING[self.mode].get(mark)
            if name is not None:
                landed.setdefault(name, []).append(number)
        return landed

    def _homeless(self) -> Iterable[int]:
        for mark, number in self.marks.first.items():
            name = LANDING[self.mode].get(mark)
            if mark not in REQUEST_MARKS and (name is None or name not in self.by_stage):
                yield number

    def _told(self, records: Iterable[int]) -> tuple[Told, ...]:
        """Of equal keys the first record that says something counts."""
        sources: dict[str, list[tuple[int, int]]] = {}
        for number in dict.fromkeys(records):
            for place, key in enumerate(SPAN_KEYS[self.mark_of[number]]):
                if key is not None:
                    sources.setdefault(key, []).append((number, place))
        return tuple(Told(key, *first, tuple(others)) for key, (first, *others) in sources.items())

    def _add(
        self, plan: StagePlan, begin: int, end: int, salt: int, records: Iterable[int]
    ) -> None:
        outer = self.by_stage.get(plan.nested_in or "", ())
        # An answer in one piece leaves after the attempt, and so does its first token.
        in_chain = plan.in_chain and (self.streams or plan.end is not Mark.FIRST_TOKEN_SENT)
        span = SpanPlan(
            at=len(self.spans),
            name=plan.name,
            kind=plan.kind,
            kind_of_time=plan.kind_of_time,
            at_root=plan.at_root,
            in_chain=in_chain,
            begin=begin,
            end=end,
            leg=self.marks.leg_of[end],
            salt=salt,
            nested_in=outer[0].at if outer else None,
            told=self._told(records),
            steps=_STEPS_OF.get(plan.name),
        )
        self.spans.append(span)
        self.by_stage[plan.name] = (*self.by_stage.get(plan.name, ()), span)
