"""Where each stage span of a request lies: its root, clock, attempt and place in the chain.

Owns the step from a trace's spans to offsets from the request's begin. What the offsets mean for
the partition is `pdtrace.analysis.timeline`'s, which rules they break is
`pdtrace.analysis.violations`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdtrace import semconv as a
from pdtrace.analysis.attributes import host_id, integer, role_of, text
from pdtrace.analysis.skew import (
    MAX_SKEW_NS,
    OWN_CLOCK,
    ClockBasis,
    HostClock,
    Skew,
    Step,
    estimate_skews,
    read_on,
)
from pdtrace.assembly.steps import is_step
from pdtrace.spans import Span, Trace
from pdtrace.stages import (
    ATTEMPT_SPAN,
    CHAINS,
    MARKS,
    ROOT_SPAN,
    STAGE_BY_NAME,
    STAGES,
    Mode,
    Outcome,
    Role,
    Stage,
)

CLOSABLE_GAP_NS = 2_000
"""Exported times leave gaps of up to 2 µs between neighbours (ADR 001). They are closed, and no
rule is broken by them, where exact times are absent."""

CLOCK_AGREEMENT_NS = 1_000_000
"""Exact times count only where they agree with the wall times this well: otherwise they were
read on another clock than the root's."""

EARLIEST_WALL_NS = 946_684_800 * 10**9  # 2000-01-01
LATEST_WALL_NS = 7_258_118_400 * 10**9  # 2200-01-01
"""Times outside were not read on a wall clock: 1970 plus an uptime, or milliseconds."""

_BEGUN_ELSEWHERE = frozenset(
    stage.name
    for stage in STAGES
    if stage.begin
    and not any((MARKS[mark].roles & stage.roles) - {Role.WORKER} for mark in stage.begin)
)
"""Stages whose begin another process recorded, perhaps on another host."""

FIRST_TOKEN_HOP = "hop.token"  # noqa: S105 - a stage
"""It runs beside its neighbours: the first token travels while the chain goes on."""


def stage_of(span: Span) -> Stage | None:
    """The stage a span stands for: by `pd.stage`, else by its name."""
    return STAGE_BY_NAME.get(text(span.attributes, a.STAGE) or span.name)


def is_root(span: Span) -> bool:
    """Whether a span stands for a request: by `pd.span`, else by its name."""
    return (text(span.attributes, a.SPAN) or span.name) == ROOT_SPAN


def on_wall_time(span: Span) -> bool:
    """Whether both times of a span can be wall times."""
    return (
        EARLIEST_WALL_NS <= span.start_ns <= LATEST_WALL_NS
        and EARLIEST_WALL_NS <= span.end_ns <= LATEST_WALL_NS
    )


def is_attempt(span: Span) -> bool:
    """Whether a span stands for an attempt: by `pd.span`, else by its name."""
    return (text(span.attributes, a.SPAN) or span.name) == ATTEMPT_SPAN


@dataclass(slots=True, kw_only=True)
class Placed:
    """One stage span; `begin` and `end` are nanoseconds from the request's begin, unclipped.

    limit   the partition gives this span nothing from here on
    exact   whether the offsets are exact (otherwise they are wall times, whole microseconds)
    clock   on which the span was read, as `pdtrace.analysis.skew` names it
    begun   on which its begin was read, where that is another one
    error   bound on the error of both times against the request's clock; None if it is not known
    moved   what was added to both times because its clock contradicted the order of stages
    owned   nanoseconds of the partition that this span owns; set by the partition
    """

    span: Span
    stage: Stage
    attempt: int
    begin: int
    end: int
    limit: int
    exact: bool
    clock: str = OWN_CLOCK
    begun: str = OWN_CLOCK
    error: int | None = 0
    moved: int = 0
    owned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A trace's stage spans, placed.

    root         the request's span; None if the trace lacks it
    attempts     spans that stand for attempts
    rivals       further spans that claim to be the root
    astray       spans whose times are no wall times; not placed, unless all are like that
    began_ns     wall time of offset 0, Unix nanoseconds
    length       the request's length; negative if its root ends before it begins
    placed       all stage spans, by begin
    chain        those of the mode's chain, in causal order: what must precede comes first
    exact        whether root and chain stand on exact times
    clock        what the offsets count from
    clocks       other clocks that stages were read on, by the name that `Placed.clock` has
    """

    root: Span | None
    rivals: tuple[Span, ...]
    attempts: tuple[Span, ...]
    astray: tuple[Span, ...]
    began_ns: int
    length: int
    mode: Mode
    placed: tuple[Placed, ...]
    chain: tuple[Placed, ...]
    exact: bool
    clock: _Clock
    clocks: Mapping[str, HostClock]

    def offsets(self, span: Span) -> tuple[int, int]:
        """Begin and end of any span of the trace, nanoseconds from the request's begin."""
        begin, end, _ = self.clock.offsets(span)
        return begin, end


def place(trace: Trace, *, max_skew_ns: int = MAX_SKEW_NS) -> Placement:
    """Place a trace's stage spans. Takes any spans; a trace without any has length 0.

    max_skew_ns  how far spans may be moved whose clock contradicts the order of stages; 0: not
    """
    root, rivals = _pick_root(trace)
    astray = tuple(span for span in trace.spans if not on_wall_time(span))
    sound: Sequence[Span] = trace.spans
    if 0 < len(astray) < len(trace.spans):
        sound = [span for span in trace.spans if on_wall_time(span)]
    clock = _Clock.of(sound, root if sound is trace.spans or root not in astray else None)
    stages = [(span, stage) for span in sound if (stage := stage_of(span)) is not None]
    attempts = [span for span in trace.spans if is_attempt(span)]
    numbers = {span.span_id: integer(span.attributes, a.ATTEMPT) or 1 for span in attempts}
    placed: list[Placed] = []
    for span, stage in stages:
        number = integer(span.attributes, a.ATTEMPT)
        if number is None:
            number = numbers.get(span.parent_id or "", 1)
        begin, end, exact = clock.offsets(span)
        read = read_on(span, root, exact=exact)
        placed.append(
            Placed(
                span=span,
                stage=stage,
                attempt=max(1, number),
                begin=begin,
                end=end,
                limit=max(0, clock.length),
                exact=exact,
                clock=read.clock,
                error=read.error_ns,
            )
        )
    placed.sort(key=_by_time)
    mode = _mode(root, placed)
    streamed = root is None or root.attributes.get(a.STREAM.key) is not False
    chain = _in_causal_order(placed, mode, streamed=streamed)
    clocks: Mapping[str, HostClock] = {}
    if any(item.clock != OWN_CLOCK for item in placed):
        skews = _skews(chain, root, clock.length)
        clocks = _host_clocks(placed, root, skews, max_skew_ns)
        if any(found.moved_ns for found in clocks.values()):
            for item in placed:
                item.moved = clocks[item.clock].moved_ns if item.clock in clocks else 0
                item.begin += item.moved
                item.end += item.moved
                item.limit = max(0, clock.length)
            placed.sort(key=_by_time)
            chain = _in_causal_order(placed, mode, streamed=streamed)
        _spread_doubt(chain)
    return Placement(
        root=root,
        rivals=rivals,
        attempts=tuple(attempts),
        astray=astray,
        began_ns=clock.wall,
        length=clock.length,
        mode=mode,
        placed=tuple(placed),
        chain=tuple(chain),
        exact=clock.exact is not None and all(item.exact for item in chain),
        clock=clock,
        clocks=clocks,
    )


def _by_time(item: Placed) -> tuple[int, int, str]:
    return (item.begin, item.end, item.span.span_id)


def _skews(chain: Sequence[Placed], root: Span | None, length: int) -> Mapping[str, Skew]:
    """What causality says of the clocks whose error is not known."""
    unknown = {item.clock for item in chain if item.error is None}
    if root is None or not unknown:
        return {}
    steps = [
        Step(
            item.clock,
            item.attempt if item.stage.parent == ATTEMPT_SPAN else None,
            item.begin,
            item.end,
        )
        for item in chain
        if item.stage.name != FIRST_TOKEN_HOP
    ]
    completed = text(root.attributes, a.OUTCOME) in {Outcome.COMPLETED.value, None}
    return estimate_skews(steps, unknown, length=length, completed=completed)


def _host_clocks(
    placed: Sequence[Placed], root: Span | None, skews: Mapping[str, Skew], max_skew_ns: int
) -> Mapping[str, HostClock]:
    """All clocks but the request's own. One without a name is told only if it is off."""
    by_clock: dict[str, list[Placed]] = {}
    for item in placed:
        if item.clock != OWN_CLOCK:
            by_clock.setdefault(item.clock, []).append(item)
    clocks: dict[str, HostClock] = {}
    for clock, items in sorted(by_clock.items()):
        skew = skews.get(clock)
        host = host_id(items[0].span)
        if skew is None and (host is None or root is None):
            continue
        errors = [item.error for item in items if item.error is not None]
        measured = len(errors) == len(items)
        who = {s.instance_id or s.service_name for s in (item.span.resource for item in items)}
        refused = _refusal(skew, max_skew_ns) if skew else None
        clocks[clock] = HostClock(
            host=host,
            instances=tuple(sorted(who)),
            basis=ClockBasis.MEASURED
            if measured
            else ClockBasis.CAUSALITY
            if skew
            else ClockBasis.WALL,
            offset_ns=integer(items[-1].span.attributes, a.CLOCK_OFFSET_NS),
            error_ns=max(errors) if measured else None,
            skew_ns=skew.amount if skew else None,
            skew_most_ns=_other_limit(skew) if skew else None,
            moved_ns=skew.amount if skew and not refused else 0,
            refused=refused,
        )
    return clocks


def _refusal(skew: Skew, max_skew_ns: int) -> str | None:
    if skew.is_contradictory:
        return "no single amount restores the order"
    if abs(skew.amount) > max_skew_ns:
        return f"the limit is {max_skew_ns / 1e9:g} s" if max_skew_ns else "moving is switched off"
    return None


def _other_limit(skew: Skew) -> int | None:
    return skew.most if skew.amount == skew.least else skew.least


def _spread_doubt(chain: Sequence[Placed]) -> None:
    """A stage begins with the end of the one before it, and is as uncertain as that where another
    process recorded it, or the same one whose clock was set meanwhile."""
    before: Placed | None = None
    for item in chain:
        if before is not None and (
            item.stage.name in _BEGUN_ELSEWHERE or item.clock == before.clock != OWN_CLOCK
        ):
            item.begun = before.clock
            known = item.error is not None and before.error is not None
            item.error = max(item.error or 0, before.error or 0) if known else None
        if item.stage.name != FIRST_TOKEN_HOP:
            before = item


def split_requests(trace: Trace) -> tuple[Trace, ...]:
    """Split a trace that holds several requests: a caller's `traceparent` may span many of them,
    also tries of one request under one id.

    Spans follow their root, those without one follow their request id. Roots of one request id stay
    together where one hangs below the other or has nothing below it: that is a violation, not two
    requests. A trace without a root stays whole; one of forward passes alone holds no request.
    """
    roots = [span for span in trace.spans if is_root(span)]
    if not roots and all(is_step(span) for span in trace.spans):
        return ()
    if len(roots) < 2:
        return (trace,)
    by_id = {span.span_id: span for span in trace.spans}
    leaders = _leaders(roots, trace.spans, by_id)
    groups: dict[str, list[Span]] = {leaders[root.span_id]: [] for root in roots}
    by_request: dict[str, list[Span]] = {}
    for root in roots:
        if leaders[root.span_id] == root.span_id:
            by_request.setdefault(_root_key(root), []).append(root)
    first = leaders[min(roots, key=lambda span: (span.start_ns, span.span_id)).span_id]
    for span in trace.spans:
        top = _root_above(span, by_id)
        if top is not None:
            key = leaders[top.span_id]
        elif tries := by_request.get(text(span.attributes, a.REQUEST_ID) or ""):
            begun = [root for root in tries if root.start_ns <= span.start_ns]
            key = max(begun, key=lambda root: root.start_ns).span_id if begun else tries[0].span_id
        elif stage_of(span) is None and not is_attempt(span):
            continue  # the caller's own span
        else:
            key = first
        groups[key].append(span)
    return tuple(Trace(trace_id=trace.trace_id, spans=tuple(spans)) for spans in groups.values())


def _leaders(
    roots: Sequence[Span], spans: Sequence[Span], by_id: Mapping[str, Span]
) -> dict[str, str]:
    """Each root's span id → that of the root which stands for its request."""
    parents = {span.parent_id for span in spans}
    leaders: dict[str, str] = {}
    full: dict[str, str] = {}
    for root in sorted(roots, key=lambda span: (span.start_ns, span.span_id)):
        above = by_id.get(root.parent_id or "")
        outer = _root_above(above, by_id, _root_key(root)) if above else None
        leaders[root.span_id] = outer.span_id if outer else root.span_id
        if outer is None and root.span_id in parents:
            full.setdefault(_root_key(root), root.span_id)
    for root in roots:
        if leaders[root.span_id] == root.span_id and root.span_id not in parents:
            leaders[root.span_id] = full.get(_root_key(root), root.span_id)
    for root_id, leader in leaders.items():
        leaders[root_id] = leaders[leader]
    return leaders


def _root_key(root: Span) -> str:
    return text(root.attributes, a.REQUEST_ID) or root.span_id


def _root_above(span: Span, by_id: Mapping[str, Span], key: str | None = None) -> Span | None:
    """The request root above a span, or the span itself; None if its ancestors miss it.

    key  of the request to look for; None: any
    """
    seen: set[str] = set()
    here: Span | None = span
    while here is not None and here.span_id not in seen:
        if is_root(here) and key in {None, _root_key(here)}:
            return here
        seen.add(here.span_id)
        here = by_id.get(here.parent_id) if here.parent_id else None
    return None


def _pick_root(trace: Trace) -> tuple[Span | None, tuple[Span, ...]]:
    """The outermost, earliest root, and its rivals."""
    ids = {span.span_id for span in trace.spans}
    roots = sorted(
        (span for span in trace.spans if is_root(span)),
        key=lambda span: (span.parent_id in ids, span.start_ns, span.span_id),
    )
    return (roots[0], tuple(roots[1:])) if roots else (None, ())


@dataclass(frozen=True, slots=True)
class _Clock:
    """The request's begin on the wall clock and, where known, on its host's monotonic clock."""

    wall: int
    exact: int | None
    length: int

    @classmethod
    def of(cls, spans: Sequence[Span], root: Span | None) -> _Clock:
        if root is None:
            # What its stages cover stands in for the request.
            known = [span for span in spans if stage_of(span)] or spans
            begin = min((span.start_ns for span in known), default=0)
            end = max((span.end_ns for span in known), default=begin)
            return cls(begin, None, end - begin)
        exact = _exact_times(root)
        begin, end = exact or (root.start_ns, root.end_ns)
        return cls(root.start_ns, exact[0] if exact else None, end - begin)

    def offsets(self, span: Span) -> tuple[int, int, bool]:
        """(begin, end, exact) from the request's begin."""
        begin, end = span.start_ns - self.wall, span.end_ns - self.wall
        exact = _exact_times(span)
        if exact is None or self.exact is None:
            return begin, end, False
        precise = exact[0] - self.exact
        # Another host's wall clock may say anything: its exact times were brought to this clock.
        brought = a.CLOCK_OFFSET_NS.key in span.attributes
        if not brought and abs(precise - begin) > CLOCK_AGREEMENT_NS:
            return begin, end, False
        return precise, exact[1] - self.exact, True


def _exact_times(span: Span) -> tuple[int, int] | None:
    begin, end = integer(span.attributes, a.BEGIN_NS), integer(span.attributes, a.END_NS)
    return None if begin is None or end is None else (begin, end)


def _mode(root: Span | None, placed: Sequence[Placed]) -> Mode:
    named = text(root.attributes, a.MODE) if root else None
    if named in set(Mode):
        return Mode(named)
    transferred = any(item.stage.name == "transfer" for item in placed)
    if not transferred and any(role_of(item.span) is Role.WORKER for item in placed):
        return Mode.COLOCATED
    return Mode.PD


def _in_causal_order(placed: Sequence[Placed], mode: Mode, *, streamed: bool) -> list[Placed]:
    """Chain spans sorted by what must precede what: before the attempts, each attempt, after them.

    An attempt's spans are limited to the time before the next attempt: a worker may notice late
    that its attempt was given up. An answer that is not streamed is one write: its first token
    leaves with its last, so the first token's way stands after the generation, not before it.
    """
    rank = {stage.name: position for position, stage in enumerate(CHAINS[mode])}
    if not streamed:
        rank[FIRST_TOKEN_HOP] = len(rank)
    chain = [item for item in placed if item.stage.name in rank]
    begun: dict[int, int] = {}
    for item in chain:
        if item.stage.parent == ATTEMPT_SPAN:
            begun[item.attempt] = min(item.begin, begun.get(item.attempt, item.begin))
    following = dict(pairwise(sorted(begun)))
    after_all = max(begun, default=0) + 1
    first_of_attempt = min(rank[s.name] for s in CHAINS[mode] if s.parent == ATTEMPT_SPAN)

    def group(item: Placed) -> int:
        if item.stage.name == FIRST_TOKEN_HOP and not streamed:
            return after_all
        if item.stage.parent == ATTEMPT_SPAN:
            return item.attempt
        return 0 if rank[item.stage.name] < first_of_attempt else after_all

    for item in chain:
        if item.stage.parent == ATTEMPT_SPAN and item.attempt in following:
            item.limit = min(item.limit, begun[following[item.attempt]])
    return sorted(
        chain,
        key=lambda item: (
            group(item),
            rank[item.stage.name],
            item.begin,
            item.end,
            item.span.span_id,
        ),
    )
