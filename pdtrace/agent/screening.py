"""The leaves of a finished request without its timeline, where its spans are as they should be.

Owns a shortcut: `screen` gives what `baselines.leaves(build_timeline(...))` would at a tenth of the
cost, or None where a span is odd (retried, a clock that nobody compared, a stage twice, no exact
times); the timeline then has the say. Pure; knows nothing of the statistics of peers or of what
counts as slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from pdtrace import semconv as a
from pdtrace.analysis.attributes import host_id, host_of, integer, text
from pdtrace.analysis.baselines import NESTED_LEAVES, Key, Leaf, leaf_tokens
from pdtrace.analysis.intervals import Interval, paint
from pdtrace.analysis.placement import (
    CLOCK_AGREEMENT_NS,
    EARLIEST_WALL_NS,
    FIRST_TOKEN_HOP,
    LATEST_WALL_NS,
)
from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.spans import AttrValue, Span
from pdtrace.stages import (
    ATTEMPT_SPAN,
    CHAINS,
    ROOT_SPAN,
    STAGE_BY_NAME,
    STAGES,
    Kind,
    Mode,
    Outcome,
    Scale,
)

_SPAN, _STAGE, _ATTEMPT = a.SPAN.key, a.STAGE.key, a.ATTEMPT.key
_BEGIN, _END = a.BEGIN_NS.key, a.END_NS.key
_OFFSET, _ERROR = a.CLOCK_OFFSET_NS.key, a.CLOCK_ERROR_NS.key
_OF_ATTEMPT = frozenset(stage.name for stage in STAGES if stage.parent == ATTEMPT_SPAN)
_SCALED = frozenset(stage.name for stage in STAGES if stage.scale is not Scale.CONSTANT)
# Work before waits, as in the details of a timeline.
_NESTED: Mapping[str, tuple[str, ...]] = {
    outer: tuple(
        stage.name
        for stage in sorted(STAGES, key=lambda stage: stage.kind is not Kind.WORK)
        if stage.within == outer
    )
    for outer in NESTED_LEAVES
}
_INNER = frozenset(name for names in _NESTED.values() for name in names)

_leaf = cast(
    "Callable[[tuple[str, str, int, int | None]], Leaf]",
    partial(tuple.__new__, Leaf),  # pyright: ignore[reportUnknownArgumentType]
)
"""Makes a leaf in half the time of its class."""


class _Chain(NamedTuple):
    """Stages in the order in which they own time, and each one's place in it.

    stages  name, pauses inside, and whether it grows with tokens
    """

    mode: Mode
    stages: tuple[tuple[str, tuple[str, ...], bool], ...]
    places: Mapping[str, int]


def _chains(*, streamed: bool) -> Mapping[str, _Chain]:
    chains: dict[str, _Chain] = {}
    for mode, stages in CHAINS.items():
        names = tuple(stage.name for stage in stages)
        if not streamed:
            # One write: the first token leaves with the last (`pdtrace.analysis.placement`).
            names = (*(name for name in names if name != FIRST_TOKEN_HOP), FIRST_TOKEN_HOP)
        chains[mode.value] = _Chain(
            mode,
            tuple((name, NESTED_LEAVES.get(name, ()), name in _SCALED) for name in names),
            {name: at for at, name in enumerate(names)},
        )
    return chains


_STREAMED, _AT_ONCE = _chains(streamed=True), _chains(streamed=False)


class Screened(NamedTuple):
    """A request by its leaves, as `pdtrace.analysis.baselines` has them. Nanoseconds."""

    mode: Mode
    key: Key
    completed: bool
    total_ns: int
    leaves: Sequence[Leaf]


def screen(spans: Sequence[Span]) -> Screened | None:
    """The leaves of a request whose root comes first; None where only its timeline can tell."""
    root = spans[0]
    facts = root.attributes
    streamed = facts.get(a.STREAM.key) is not False
    chain = (_STREAMED if streamed else _AT_ONCE).get(text(facts, a.MODE) or "")
    origin, end = facts.get(_BEGIN), facts.get(_END)
    if (
        chain is None
        or facts.get(_SPAN) != ROOT_SPAN
        or type(origin) is not int
        or type(end) is not int
        or (text(facts, a.STAGE) or root.name) in STAGE_BY_NAME
        or not EARLIEST_WALL_NS <= root.start_ns <= root.end_ns <= LATEST_WALL_NS
    ):
        return None
    total = max(0, end - origin)
    if isinstance(spans, OrderlySpans):
        placed = _place_orderly(spans, chain, origin)
    else:
        placed = _place(spans, chain, origin, root.start_ns)
    if placed is None:
        return None
    intervals, inner = placed
    return Screened(
        mode=chain.mode,
        key=(root.trace_id, root.span_id),
        completed=text(facts, a.OUTCOME) == Outcome.COMPLETED,
        total_ns=total,
        leaves=_leaves(chain, intervals, inner, total, facts, streamed=streamed),
    )


_Placed = tuple[list[Interval | None], dict[str, list[Interval]]]
"""Chain stages by place and what is nested in them, from the request's begin."""


def _place_orderly(spans: OrderlySpans, chain: _Chain, origin: int) -> _Placed | None:
    """Where spans that were not made yet will lie; None if odd. They are on one clock, each stage
    of the chain occurs once, and nothing that is nested in one is judged by itself."""
    times, offset = spans.times, spans.wall_offset_ns
    if not EARLIEST_WALL_NS + 1_000 <= min(times) + offset <= max(times) + offset <= LATEST_WALL_NS:
        return None
    if not {host_of(resource) for resource in spans.resources} <= {None, host_id(spans.root)}:
        return None
    intervals: list[Interval | None] = [None] * len(chain.stages)
    for name, place in chain.places.items():
        for plan in spans.plan.by_stage.get(name, ()):
            intervals[place] = (times[plan.begin] - origin, times[plan.end] - origin)
    return intervals, {}


def _place(spans: Sequence[Span], chain: _Chain, origin: int, wall: int) -> _Placed | None:
    """Where spans lie; None if odd."""
    intervals: list[Interval | None] = [None] * len(chain.stages)
    inner: dict[str, list[Interval]] = {}
    places = chain.places
    low, high = wall - origin - CLOCK_AGREEMENT_NS, wall - origin + CLOCK_AGREEMENT_NS
    home = host_id(spans[0])
    at_home = {id(spans[0].resource)}
    attempt: AttrValue | None = None
    for span in spans[1:]:
        facts = span.attributes
        name = span.name
        if facts.get(_STAGE) != name:
            if name == ATTEMPT_SPAN and facts.get(_SPAN) == ATTEMPT_SPAN and _STAGE not in facts:
                continue
            return None
        begin, end, start = facts.get(_BEGIN), facts.get(_END), span.start_ns
        if (
            type(begin) is not int
            or type(end) is not int
            or not EARLIEST_WALL_NS <= start <= span.end_ns <= LATEST_WALL_NS
            or _SPAN in facts
            or name == ROOT_SPAN
        ):
            return None
        if _OFFSET in facts:
            offset, error = facts[_OFFSET], facts.get(_ERROR)
            if type(offset) is not int or type(error) is not int or error < 0:
                return None  # its clock may be corrected by what causes must precede
        elif not low <= start - begin <= high:
            return None
        elif id(span.resource) not in at_home:
            if host_id(span) not in {None, home}:
                return None
            at_home.add(id(span.resource))
        place = places.get(name)
        if place is not None:
            if intervals[place] is not None:
                return None
            if name in _OF_ATTEMPT:
                number = facts.get(_ATTEMPT)
                if type(number) is not int or number < 1 or (attempt or number) != number:
                    return None
                attempt = number
            intervals[place] = (begin - origin, end - origin)
        elif name in _INNER:
            inner.setdefault(name, []).append((begin - origin, end - origin))
    return intervals, inner


def _leaves(
    chain: _Chain,
    intervals: Sequence[Interval | None],
    inner: Mapping[str, Sequence[Interval]],
    total: int,
    facts: Mapping[str, AttrValue],
    *,
    streamed: bool,
) -> list[Leaf]:
    sizes = (
        integer(facts, a.PROMPT_TOKENS),
        integer(facts, a.CACHED_TOKENS),
        integer(facts, a.OUTPUT_TOKENS),
    )
    lengths = _swept(intervals, total)
    owned: _Owned = ()
    if lengths is None or inner:
        owned = _painted(intervals, total)
        lengths = [
            None if own is None else sum([end - begin for begin, end in own]) for own in owned
        ]
    found: list[Leaf] = []
    append = found.append
    for place, ((name, pauses, scaled), rest) in enumerate(zip(chain.stages, lengths, strict=True)):
        if rest is None or (not streamed and name == FIRST_TOKEN_HOP and rest == 0):
            continue
        if pauses:
            pieces = owned[place] if inner else None
            paused = _paused(name, pieces, inner, total) if pieces else {}
            for pause in pauses:
                length = paused.get(pause, 0)
                append(_leaf((pause, name, length, None)))
                rest -= length  # noqa: PLW2901 what is left of it
        append(_leaf((name, name, rest, leaf_tokens(name, *sizes) if scaled else None)))
    return found


_Owned = Sequence[Sequence[Interval] | None]
"""What each chain stage owns of the request; None for a stage that it lacks."""


def _swept(intervals: Sequence[Interval | None], total: int) -> list[int | None] | None:
    """How much each stage owns, in one pass with a high-water mark; None where a stage may own time
    before that."""
    lengths: list[int | None] = []
    reached = covered_from = 0
    for interval in intervals:
        if interval is None:
            lengths.append(None)
            continue
        begin, end = interval
        if begin < covered_from:
            return None  # it may own part of the gap before
        # Not with min() and max(): this runs for every stage of every request.
        end = end if end < total else total
        begin = begin if begin > reached else reached
        if begin >= end:
            lengths.append(0)
            continue
        if begin > reached:
            covered_from = begin
        lengths.append(end - begin)
        reached = end
    return lengths


def _painted(intervals: Sequence[Interval | None], total: int) -> _Owned:
    """The rule itself: each instant belongs to the first stage that covers it."""
    owned = [None if interval is None else list[Interval]() for interval in intervals]
    present = [pieces for pieces in owned if pieces is not None]
    for begin, end, index in paint([x for x in intervals if x is not None], 0, total):
        if index is not None:
            present[index].append((begin, end))
    return owned


def _paused(
    outer: str, pieces: Sequence[Interval], inner: Mapping[str, Sequence[Interval]], total: int
) -> dict[str, int]:
    """Time of a chain stage that its nested stages own."""
    names = [name for name in _NESTED[outer] for _ in inner.get(name, ())]
    intervals = [interval for name in _NESTED[outer] for interval in inner.get(name, ())]
    paused: dict[str, int] = {}
    for begin, end, index in paint(intervals, 0, total):
        if index is None:
            continue
        for from_ns, until_ns in pieces:
            shared = min(end, until_ns) - max(begin, from_ns)
            if shared > 0:
                paused[names[index]] = paused.get(names[index], 0) + shared
    return paused
