"""What each stage usually costs, learnt from other requests: the yardstick of a verdict.

Owns robust statistics per stage; what counts as slow is `pdtrace.verdict`'s. Standard library only.

A stage's usual time is the median of its peers, those that completed in the same mode. Stages that
grow with tokens (`Stage.scale`) are compared along a line through the peers, fitted by medians of
thirds (Tukey's resistant line), so that a few stalled peers do not bend it. The request under
judgement is never its own peer. Spread is the upper half of the peers' interquartile range, scaled
to a standard deviation: queues lean upwards, and only the upper side can excuse a long wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from pdtrace.placement import FIRST_TOKEN_HOP
from pdtrace.stages import STAGE_BY_NAME, Mode, Outcome, Scale
from pdtrace.timeline import UNEXPLAINED, Timeline

NESTED_LEAVES: Mapping[str, tuple[str, ...]] = {
    "decode.generate": ("decode.preempted", "decode.gap"),
}
"""Nested stages that are judged by themselves: a pause is not slow generation."""

_SIGMA_PER_QUARTILE = 1.4826
_REACH = 2
"""How many times the tokens of the largest peer a line is trusted for: attention is quadratic."""
_EXACT_REFIT_BELOW = 48
"""With fewer peers a line is refitted without the judged request; with more, one request cannot
move the medians of thirds by much, and only its residual is left out."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A judged piece of a request: a chain stage, less its pauses, or a pause inside one.

    outer   the chain stage it lies in; the same as `name` unless it is a pause
    tokens  what its healthy time grows with; None where nothing or not known
    """

    name: str
    outer: str
    ns: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Usual:
    """What peers needed for a leaf of this size. Nanoseconds.

    beyond  whether the leaf has over twice the tokens of any peer: the line is a guess there
    """

    ns: float
    spread_ns: float
    peers: int
    beyond: bool = False


class Yardstick(Protocol):
    """Knows the usual time of leaves, without the request under judgement."""

    def usual(self, timeline: Timeline, leaf: Leaf) -> Usual | None:
        """None if the leaf has no peers."""
        ...


def leaves(timeline: Timeline) -> tuple[Leaf, ...]:
    """The pieces of a request that are judged; their `ns` and `unexplained` sum to the whole."""
    found: list[Leaf] = []
    for part in timeline.parts:
        if part.name == UNEXPLAINED:
            continue
        if part.name == FIRST_TOKEN_HOP and not timeline.streamed and part.ns == 0:
            continue  # the first token left with the last: there is nothing to compare
        tokens = _tokens(timeline, part.name)
        rest = part.ns
        for inner in NESTED_LEAVES.get(part.name, ()):
            pause = timeline.detail_ns(part.name, inner)
            found.append(Leaf(inner, part.name, pause, None))
            rest -= pause
        found.append(Leaf(part.name, part.name, rest, tokens))
    return tuple(found)


def _tokens(timeline: Timeline, stage: str) -> int | None:
    match STAGE_BY_NAME[stage].scale:
        case Scale.CONSTANT:
            return None
        case Scale.PROMPT_TOKENS:
            if timeline.prompt_tokens is None:
                return None
            cached = timeline.cached_tokens or 0 if stage.startswith("prefill.") else 0
            return max(1, timeline.prompt_tokens - cached)
        case Scale.OUTPUT_TOKENS:
            return None if timeline.output_tokens is None else max(0, timeline.output_tokens)


def is_peer(timeline: Timeline) -> bool:
    """Whether a request's times say what is usual: it completed, and its root is known."""
    return timeline.outcome is Outcome.COMPLETED and timeline.root_id is not None


class Baselines:
    """Baselines of a fixed set of requests. Immutable once built."""

    def __init__(self, timelines: Iterable[Timeline]) -> None:
        self._series: dict[tuple[Mode, str], _Series] = {}
        for timeline in timelines:
            _record(self._series, timeline, window=None)

    def usual(self, timeline: Timeline, leaf: Leaf) -> Usual | None:
        """What the other requests needed for this leaf; None without any."""
        series = self._series.get((timeline.mode, leaf.name))
        return None if series is None else series.usual(timeline.key, leaf)


class RollingBaselines:
    """Baselines of the most recent `window` requests, for a process that never ends.

    Memory is bounded by `window` times the number of stages. A line through token counts is
    refitted when an eighth of its samples is new, so that one request costs microseconds.
    """

    def __init__(self, window: int = 512) -> None:
        if window < 8:
            raise ValueError(f"window is {window}; at least 8 requests are needed")
        self._window = window
        self._series: dict[tuple[Mode, str], _Series] = {}

    def add(self, timeline: Timeline) -> None:
        """Learn from a finished request; one that did not complete is passed over."""
        _record(self._series, timeline, window=self._window)

    def usual(self, timeline: Timeline, leaf: Leaf) -> Usual | None:
        """What the other requests of the window needed for this leaf; None without any."""
        series = self._series.get((timeline.mode, leaf.name))
        return None if series is None else series.usual(timeline.key, leaf)


_Key = tuple[str, str | None]


def _record(
    series: dict[tuple[Mode, str], _Series], timeline: Timeline, *, window: int | None
) -> None:
    if not is_peer(timeline):
        return
    for leaf in leaves(timeline):
        key = (timeline.mode, leaf.name)
        if key not in series:
            scaled = STAGE_BY_NAME[leaf.name].scale is not Scale.CONSTANT
            series[key] = _Series(window, scaled)
        series[key].add(timeline.key, leaf)


@dataclass(frozen=True, slots=True)
class _Line:
    base: float
    slope: float

    def at(self, tokens: float) -> float:
        return max(0.0, self.base + self.slope * tokens)


@dataclass(slots=True)
class _Series:
    """Samples of one leaf: (tokens or 0, nanoseconds) by request; oldest leave past `window`."""

    window: int | None
    scaled: bool
    samples: dict[_Key, tuple[int, int]] = field(default_factory=dict[_Key, tuple[int, int]])
    order: deque[_Key] = field(default_factory=deque[_Key])
    line: _Line | None = None
    residuals: list[float] = field(default_factory=list[float])
    largest: tuple[int, int] = (0, 0)
    """The largest token counts that the line knows: the second and the first."""
    fresh: int = 0

    def add(self, key: _Key, leaf: Leaf) -> None:
        if key in self.samples or (self.scaled and leaf.tokens is None):
            return
        self.samples[key] = (leaf.tokens or 0, leaf.ns)
        self.order.append(key)
        self.fresh += 1
        if self.line is not None:
            insort(self.residuals, self._residual(self.line, self.samples[key]))
        if self.window is not None and len(self.order) > self.window:
            oldest = self.samples.pop(self.order.popleft())
            if self.line is not None:
                del self.residuals[bisect_left(self.residuals, self._residual(self.line, oldest))]

    def usual(self, key: _Key, leaf: Leaf) -> Usual | None:
        own = self.samples.get(key)
        peers = len(self.samples) - (own is not None)
        if peers < 1:
            return None
        if self.scaled and leaf.tokens is None:
            # Its size is not known: compare with requests of any size.
            line, skip, reach = _Line(0.0, 0.0), None, 0
            residuals = sorted(float(ns) for _, ns in self.samples.values())
        elif own is not None and self.scaled and peers < _EXACT_REFIT_BELOW:
            others = [sample for other, sample in self.samples.items() if other != key]
            line = self._fit(others)
            residuals, skip = sorted(self._residual(line, s) for s in others), None
            reach = max(tokens for tokens, _ in others)
        else:
            line, residuals = self._fitted()
            skip = None if own is None else bisect_left(residuals, self._residual(line, own))
            reach = self.largest[own is None or own[0] < self.largest[1]]
        middle = _quantile(residuals, 0.5, skip)
        upper = _quantile(residuals, 0.75, skip)
        tokens = leaf.tokens or 0
        return Usual(
            ns=max(0.0, line.at(tokens) + middle),
            spread_ns=_SIGMA_PER_QUARTILE * max(0.0, upper - middle),
            peers=peers,
            beyond=self.scaled and tokens > _REACH * reach > 0,
        )

    def _fitted(self) -> tuple[_Line, list[float]]:
        if self.line is None or (self.scaled and self.fresh * 8 > len(self.samples)):
            self.line = self._fit(self.samples.values())
            ordered = sorted(tokens for tokens, _ in self.samples.values()) if self.scaled else []
            self.largest = (ordered[-2], ordered[-1]) if len(ordered) > 1 else (0, 0)
            self.residuals = sorted(self._residual(self.line, s) for s in self.samples.values())
            self.fresh = 0
        return self.line, self.residuals

    def _fit(self, samples: Iterable[tuple[int, int]]) -> _Line:
        return _resistant_line(sorted(samples)) if self.scaled else _Line(0.0, 0.0)

    @staticmethod
    def _residual(line: _Line, sample: tuple[int, int]) -> float:
        return sample[1] - line.at(sample[0])


def _resistant_line(samples: Sequence[tuple[int, int]]) -> _Line:
    """A line through (tokens, nanoseconds), sorted: by the medians of the outer thirds.

    Too few different token counts give a line through zero. Slopes are never negative: more
    tokens do not take less time.
    """
    third = max(1, len(samples) // 3)
    low, high = samples[:third], samples[-third:]
    x_low, x_high = median(x for x, _ in low), median(x for x, _ in high)
    if x_high <= x_low * 1.25:
        tokens = median(x for x, _ in samples)
        usual = median(y for _, y in samples)
        return _Line(0.0, usual / tokens) if tokens > 0 else _Line(usual, 0.0)
    slope = max(0.0, (median(y for _, y in high) - median(y for _, y in low)) / (x_high - x_low))
    return _Line(max(0.0, median(y - slope * x for x, y in samples)), slope)


def _quantile(ordered: Sequence[float], q: float, skip: int | None) -> float:
    """A quantile of sorted values, linear between neighbours, as if index `skip` were not there."""
    count = len(ordered) - (skip is not None)
    position = q * (count - 1)
    below = int(position)
    above = min(below + 1, count - 1)

    def value(index: int) -> float:
        return ordered[index + (skip is not None and index >= skip)]

    return value(below) + (value(above) - value(below)) * (position - below)
