"""The rules that a trace must keep, and the sentences that name each breach.

Rules look at one request's placed spans; rules over a whole recording are `pdtrace.check`'s. A
breach never stops the analysis: it is listed beside the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdtrace import semconv as a
from pdtrace.analysis.attributes import integer, text
from pdtrace.analysis.placement import (
    CLOSABLE_GAP_NS,
    FIRST_TOKEN_HOP,
    Placed,
    Placement,
    is_attempt,
    stage_of,
)
from pdtrace.duration import seconds_text
from pdtrace.spans import Span, Trace
from pdtrace.stages import (
    CHAINS,
    OPTIONAL_STAGES,
    ROOT_SPAN,
    Outcome,
)

_CHAIN_NAMES = frozenset(stage.name for chain in CHAINS.values() for stage in chain)
# A request for one token has nothing to decode: it may end after the boundary token.
_AFTER_BOUNDARY = frozenset(
    {"transfer", "hop.notice", "decode.queue", "decode.first", "decode.generate", "gateway.finish"}
)


class ViolationKind(StrEnum):
    """What a trace can do against its own contract."""

    NO_ROOT = "no_root"
    TWO_ROOTS = "two_roots"
    BAD_CLOCK = "bad_clock"  # a span's times are no wall times
    NEGATIVE = "negative"  # a span ends before it begins
    OVERLAP = "overlap"  # two chain stages claim the same time
    OUT_OF_ORDER = "out_of_order"  # a chain stage begins before one that must precede it
    REPEATED = "repeated"  # a stage that occurs once occurs twice in an attempt
    MISSING_STAGE = "missing_stage"
    MISSING_PARENT = "missing_parent"  # the parent's span is not in the trace
    ORPHAN = "orphan"  # no parent, or ancestors that do not lead to the root
    OUTSIDE_ROOT = "outside_root"
    MIXED_REQUEST_IDS = "mixed_request_ids"
    IMPOSSIBLE_MARKS = "impossible_marks"  # the assembler says so (`pd.violation`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One breach; `message` is a clause for people, without a full stop.

    between_clocks  it compares times of two hosts, by more than the error of their clocks explains
    """

    kind: ViolationKind
    message: str
    stage: str | None = None
    span_id: str | None = None
    between_clocks: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two chain stages ran at the same time; the shared `ns` count for `first`.

    expected  it is so by design
    error_ns  by how much the clocks of both may be wrong
    bounds    the other hosts' clocks that were read, and how well each is known
    """

    first: str
    second: str
    ns: int
    expected: bool
    error_ns: int = 0
    bounds: tuple[str, ...] = ()


def find_violations(
    trace: Trace, placement: Placement, overlaps: tuple[Overlap, ...], outcome: Outcome | None
) -> tuple[Violation, ...]:
    """All breaches of one request's trace, grouped by rule."""
    return (
        *_roots(placement),
        *_astray(placement),
        *_beyond(_lengths(placement)),
        *_beyond(_overlapping(placement, overlaps)),
        *_beyond(_disordered(placement)),
        *_repeated(placement),
        *_missing(placement, outcome),
        *_parentless(trace, placement),
        *_beyond(_outside(placement, outcome)),
        *_other_request_ids(trace, placement),
        *_impossible_marks(trace),
    )


def find_explained(
    placement: Placement, overlaps: tuple[Overlap, ...], outcome: Outcome | None
) -> tuple[str, ...]:
    """What would break a rule if clocks of different hosts were exact, but lies within their error;
    clauses without a full stop."""
    return tuple(
        f"{breach.violation.message}, within the clocks' error of {seconds_text(breach.error_ns)}"
        for breach in (
            *_lengths(placement),
            *_overlapping(placement, overlaps),
            *_disordered(placement),
            *_outside(placement, outcome),
        )
        if breach.ns <= breach.error_ns
    )


@dataclass(frozen=True, slots=True)
class _Breach:
    """A rule broken by `ns`, where clocks may be wrong by `error_ns`."""

    violation: Violation
    ns: int
    error_ns: int


def _beyond(breaches: Iterator[_Breach]) -> Iterator[Violation]:
    """Those that no error of clocks explains."""
    return (breach.violation for breach in breaches if breach.ns > breach.error_ns)


def _error(*items: Placed) -> int:
    return sum(item.error or 0 for item in items)


def _bounds(placement: Placement, *items: Placed) -> tuple[str, ...]:
    """The other hosts' clocks that `items` were read on, and how well each is known."""
    names = dict.fromkeys(name for item in items for name in (item.begun, item.clock))
    return tuple(placement.clocks[name].bound for name in names if name in placement.clocks)


def find_overlaps(placement: Placement) -> tuple[Overlap, ...]:
    """Each chain span against the one before it in the chain that reaches furthest."""
    slack = _slack(placement)
    overlaps: list[Overlap] = []
    furthest: Placed | None = None
    for item in placement.chain:
        if furthest is not None:
            until = min(item.end, item.limit, furthest.end, furthest.limit)
            shared = until - max(item.begin, furthest.begin)
            if shared > slack:
                expected = FIRST_TOKEN_HOP in {furthest.stage.name, item.stage.name}
                overlaps.append(
                    Overlap(
                        furthest.stage.name,
                        item.stage.name,
                        shared,
                        expected,
                        _error(furthest, item),
                        _bounds(placement, furthest, item),
                    )
                )
        if furthest is None or item.end > furthest.end:
            furthest = item
    return tuple(overlaps)


def request_id_of(trace: Trace, root: Span | None) -> str | None:
    """The root's request id; without one, the id that most spans carry."""
    own = text(root.attributes, a.REQUEST_ID) if root else None
    if own is not None:
        return own
    counts: defaultdict[str, int] = defaultdict(int)
    for span in trace.spans:
        if (value := text(span.attributes, a.REQUEST_ID)) is not None:
            counts[value] += 1
    return max(counts, key=lambda key: (counts[key], key), default=None)


def _slack(placement: Placement) -> int:
    return 0 if placement.exact else CLOSABLE_GAP_NS


def _breach(
    kind: ViolationKind, message: str, span: Span, bounds: tuple[str, ...] = ()
) -> Violation:
    stage = stage_of(span)
    return Violation(
        kind=kind,
        message=f"{message} ({'; '.join(bounds)})" if bounds else message,
        stage=stage.name if stage else None,
        span_id=span.span_id,
        between_clocks=bool(bounds),
    )


def _roots(placement: Placement) -> Iterator[Violation]:
    if placement.root is None:
        yield Violation(kind=ViolationKind.NO_ROOT, message=f"no span is named {ROOT_SPAN!r}")
    for span in placement.rivals:
        yield _breach(ViolationKind.TWO_ROOTS, f"{span.span_id} is another root", span)


def _astray(placement: Placement) -> Iterator[Violation]:
    for span in placement.astray:
        yield _breach(
            ViolationKind.BAD_CLOCK,
            f"{span.name} runs from {span.start_ns} to {span.end_ns}, which are no Unix times in "
            "nanoseconds",
            span,
        )


def _lengths(placement: Placement) -> Iterator[_Breach]:
    if placement.root is not None and placement.length < 0:
        violation = _breach(
            ViolationKind.NEGATIVE,
            f"the request ends {seconds_text(-placement.length)} before it begins",
            placement.root,
        )
        yield _Breach(violation, -placement.length, 0)
    for item in placement.placed:
        short = min(item.end - item.begin, item.span.end_ns - item.span.start_ns)
        if short < 0:
            violation = _breach(
                ViolationKind.NEGATIVE,
                f"{item.stage.name} ends {seconds_text(-short)} before it begins",
                item.span,
                _bounds(placement, item),
            )
            yield _Breach(violation, -short, _error(item, item))


def _overlapping(placement: Placement, overlaps: tuple[Overlap, ...]) -> Iterator[_Breach]:
    slack = _slack(placement)
    for overlap in overlaps:
        # A stage that occurs twice is told by its own rule.
        if not overlap.expected and overlap.first != overlap.second:
            bounds = f" ({'; '.join(overlap.bounds)})" if overlap.bounds else ""
            shared = seconds_text(overlap.ns)
            violation = Violation(
                kind=ViolationKind.OVERLAP,
                message=f"{overlap.first} and {overlap.second} share {shared}{bounds}",
                stage=overlap.second,
                between_clocks=bool(bounds),
            )
            yield _Breach(violation, overlap.ns - slack, overlap.error_ns)


def _disordered(placement: Placement) -> Iterator[_Breach]:
    slack = _slack(placement)
    latest: Placed | None = None
    for item in placement.chain:
        if item.stage.name == FIRST_TOKEN_HOP:
            continue
        if latest is not None and item.attempt == latest.attempt:
            early = latest.begin - item.begin
            if early > slack:
                violation = _breach(
                    ViolationKind.OUT_OF_ORDER,
                    f"{item.stage.name} begins {seconds_text(early)} before {latest.stage.name}, "
                    "which precedes it",
                    item.span,
                    _bounds(placement, latest, item),
                )
                yield _Breach(violation, early - slack, _error(latest, item))
                continue
        latest = item


def _repeated(placement: Placement) -> Iterator[Violation]:
    seen: set[tuple[str, int]] = set()
    for item in placement.placed:
        key = (item.stage.name, item.attempt)
        if not item.stage.repeats and key in seen:
            yield _breach(
                ViolationKind.REPEATED,
                f"{item.stage.name} occurs again in attempt {item.attempt}",
                item.span,
            )
        seen.add(key)


def _missing(placement: Placement, outcome: Outcome | None) -> Iterator[Violation]:
    if outcome is not Outcome.COMPLETED or placement.root is None:
        return
    attributes = placement.root.attributes
    last = max((item.attempt for item in placement.chain), default=1)
    present = {
        item.stage.name
        for item in placement.chain
        if item.stage.parent == ROOT_SPAN or item.attempt == last
    }
    excused = {*OPTIONAL_STAGES, *(s.name for span in placement.astray if (s := stage_of(span)))}
    tokens = integer(attributes, a.OUTPUT_TOKENS)
    if (tokens is not None and tokens <= 1) or integer(attributes, a.MAX_TOKENS) == 1:
        excused |= _AFTER_BOUNDARY
    for stage in CHAINS[placement.mode]:
        if stage.name not in present and stage.name not in excused:
            yield Violation(
                kind=ViolationKind.MISSING_STAGE,
                message=f"a completed request lacks {stage.name}",
                stage=stage.name,
            )


def _parentless(trace: Trace, placement: Placement) -> Iterator[Violation]:
    if placement.root is None:
        return
    by_id = {span.span_id: span for span in trace.spans}
    attached = {placement.root.span_id: True}
    for span in (*placement.attempts, *(item.span for item in placement.placed)):
        if not span.parent_id:
            yield _breach(ViolationKind.ORPHAN, f"{span.name} has no parent", span)
        elif span.parent_id not in by_id:
            yield _breach(
                ViolationKind.MISSING_PARENT,
                f"the parent {span.parent_id} of {span.name} is not in the trace",
                span,
            )
        elif not _hangs_below_root(span, by_id, attached):
            yield _breach(
                ViolationKind.ORPHAN, f"{span.name} does not hang below the request", span
            )


def _is_ours(span: Span) -> bool:
    return stage_of(span) is not None or is_attempt(span)


def _hangs_below_root(span: Span, by_id: Mapping[str, Span], attached: dict[str, bool]) -> bool:
    """Climb to a span whose answer is known; `attached` keeps answers, so a trace costs O(n).

    A chain that breaks at a span of ours counts as attached here: that span is told itself.
    """
    path: dict[str, None] = {}
    here = span
    while here.span_id not in attached and here.span_id not in path:
        path[here.span_id] = None
        parent = by_id.get(here.parent_id or "")
        if parent is None:
            break
        here = parent
    if here.span_id in attached:
        answer = attached[here.span_id]
    else:
        circular = by_id.get(here.parent_id or "") is not None
        answer = not circular and _is_ours(here)
    attached.update(dict.fromkeys(path, answer))
    return answer


def _outside(placement: Placement, outcome: Outcome | None) -> Iterator[_Breach]:
    if placement.root is None:
        return
    slack = _slack(placement)
    last = max((item.attempt for item in placement.chain), default=1)
    for item in placement.placed:
        # Pages outlive the answer, and workers notice an abort after the client does; one that
        # stood still notices that an attempt was given up when the next one is long over.
        may_outlive = (
            item.stage.name not in _CHAIN_NAMES
            or outcome is not Outcome.COMPLETED
            or item.attempt < last
        )
        late = item.end - placement.length
        if item.begin < -slack:
            by, message = (
                -item.begin,
                f"{item.stage.name} begins {seconds_text(-item.begin)} before the request",
            )
        elif late > slack and not may_outlive:
            by, message = late, f"{item.stage.name} ends {seconds_text(late)} after the request"
        else:
            continue
        bounds = _bounds(placement, item)
        violation = _breach(ViolationKind.OUTSIDE_ROOT, message, item.span, bounds)
        yield _Breach(violation, by - slack, _error(item))


def _other_request_ids(trace: Trace, placement: Placement) -> Iterator[Violation]:
    own = request_id_of(trace, placement.root)
    services: defaultdict[str, set[str]] = defaultdict(set)
    for span in trace.spans:
        value = text(span.attributes, a.REQUEST_ID)
        if value is not None and value != own:
            services[value].add(span.resource.service_name)
    for other in sorted(services):
        yield Violation(
            kind=ViolationKind.MIXED_REQUEST_IDS,
            message=f"spans of {', '.join(sorted(services[other]))} carry another request id: "
            f"{other}",
        )


def _impossible_marks(trace: Trace) -> Iterator[Violation]:
    for span in trace.spans:
        if (what := text(span.attributes, a.VIOLATION)) is not None:
            yield _breach(ViolationKind.IMPOSSIBLE_MARKS, f"{span.name}: {what}", span)
