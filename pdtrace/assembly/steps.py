"""Which forward passes become spans, and those spans. Pure.

Owns the choice (`StepPolicy`, `StepWatch`) and the form of a step's span; every pass is counted and
measured elsewhere. Never a span per token: only passes that are slow against the median of their
own kind in their own process, and a sample by step number, so that two agents sample the same ones.

A step's span is a trace of its own, with a link to the attempt of each member: a pass belongs to
many requests, and none of them owns its time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import median
from typing import NamedTuple

from pdtrace import semconv as a
from pdtrace.assembly.collected import CollectedRequest, Process
from pdtrace.ring.records import StepRecord
from pdtrace.spans import Link, Span, SpanKind
from pdtrace.stages import StepKind

MAX_LINKS = 16
_WINDOW = 256
_ENOUGH = 16
"""Passes of a kind before one of them can be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """Which passes become spans. Raises ValueError for values out of range.

    slow_factor   times the median of its kind that makes a pass slow
    floor_s       seconds; no faster pass is slow
    sample_every  every so manieth pass of a process; 0 samples none
    max_per_s     spans in one second, of all processes together; what is beyond is counted
    """

    slow_factor: float = 3.0
    floor_s: float = 0.05
    sample_every: int = 1_000
    max_per_s: int = 5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slow_factor) and self.slow_factor >= 1):
            raise ValueError(f"slow_factor is {self.slow_factor}; it must be 1 or more")
        if self.floor_s < 0 or self.sample_every < 0 or self.max_per_s < 0:
            raise ValueError(f"{self}: floor_s, sample_every and max_per_s must be 0 or more")


class StepWatch:
    """Chooses passes, one after another.

    chosen    passes that became spans
    left_out  slow or sampled ones beyond `max_per_s`
    """

    def __init__(self, policy: StepPolicy) -> None:
        self.chosen = 0
        self.left_out = 0
        self._policy = policy
        self._usual: dict[tuple[str, StepKind], _Usual] = {}
        self._second = -1
        self._in_second = 0

    def choose(self, ring: str, step: StepRecord) -> bool:
        """Whether this pass becomes a span. Each pass of a ring once, in order."""
        policy = self._policy
        length_ns = step.end_ns - step.begin_ns
        key = (ring, step.kind)
        usual = self._usual.get(key)
        if usual is None:
            usual = self._usual[key] = _Usual()
        slow = (
            length_ns >= policy.floor_s * 1e9
            and (median_ns := usual.median_ns()) is not None
            and length_ns > policy.slow_factor * median_ns
        )
        usual.add(length_ns)
        sampled = policy.sample_every > 0 and step.number % policy.sample_every == 0
        if not slow and not sampled:
            return False
        second = step.end_ns // 1_000_000_000
        if second != self._second:
            self._second, self._in_second = second, 0
        if self._in_second >= policy.max_per_s:
            self.left_out += 1
            return False
        self._in_second += 1
        self.chosen += 1
        return True

    def keep(self, rings: Collection[str]) -> None:
        """Forgets the rings that are not among `rings`."""
        for key in [key for key in self._usual if key[0] not in rings]:
            del self._usual[key]


@dataclass(slots=True)
class _Usual:
    """Median of the last passes; worked out again when an eighth of them is new."""

    lengths: deque[int] = field(default_factory=lambda: deque[int](maxlen=_WINDOW))
    fresh: int = 0
    median: float = 0.0

    def add(self, length_ns: int) -> None:
        self.lengths.append(length_ns)
        self.fresh += 1

    def median_ns(self) -> float | None:
        if len(self.lengths) < _ENOUGH:
            return None
        if self.fresh * 8 >= len(self.lengths):
            self.median = median(self.lengths)
            self.fresh = 0
        return self.median


class Member(NamedTuple):
    """A request that took part in a pass."""

    request_id: str
    trace_id: str
    attempt_span_id: str
    sampled: bool


class ChosenStep(NamedTuple):
    """A pass that becomes a span, with the members that are known by name."""

    process: Process
    record: StepRecord
    members: tuple[Member, ...]


def step_span(step: ChosenStep) -> Span:
    """The span of a pass. Its ids follow from process and step number: made twice, it is equal."""
    process, record, members = step
    identity = f"{process.clock_id}/{process.instance}/{process.anchor.wall_ns}/{record.number}"
    digest = blake2b(identity.encode(), digest_size=24).hexdigest()
    shown = members[:MAX_LINKS]
    return Span(
        trace_id=digest[:32],
        span_id=digest[32:],
        parent_id=None,
        name=f"step.{record.kind.value}",
        kind=SpanKind.INTERNAL,
        start_ns=process.anchor.to_wall_ns(record.begin_ns),
        end_ns=process.anchor.to_wall_ns(max(record.end_ns, record.begin_ns)),
        resource=process.resource,
        attributes={
            a.STEP_NUMBER.key: record.number,
            a.STEP_KIND.key: record.kind.value,
            a.STEP_TOKENS.key: record.tokens,
            a.STEP_MEMBERS.key: tuple(member.request_id for member in shown),
            a.BATCH_SIZE.key: record.size,
            a.BEGIN_NS.key: record.begin_ns,
            a.END_NS.key: record.end_ns,
        },
        links=tuple(
            Link(trace_id=member.trace_id, span_id=member.attempt_span_id)
            for member in _sampled(shown)
        ),
    )


def step_delivery(step: ChosenStep) -> tuple[CollectedRequest, list[Span]]:
    """The span in the form in which requests are delivered.

    Sampled if one of its members is: a caller that wants no traces gets none of its passes.
    """
    span = step_span(step)
    carrier = CollectedRequest(
        request_id="",
        trace_id=span.trace_id,
        root_span_id=span.span_id,
        sampled=any(member.sampled for member in step.members),
    )
    return carrier, [span]


def is_step(span: Span) -> bool:
    """Whether a span is a pass's own."""
    return are_step_keys(span.attributes.keys())


def are_step_keys(keys: Set[str]) -> bool:
    """The same, of the keys of its attributes."""
    return a.STEP_KIND.key in keys and a.STAGE.key not in keys


def _sampled(members: Sequence[Member]) -> Iterable[Member]:
    return (member for member in members if member.sampled)
