"""What each stage usually costs, learnt from other requests: the yardstick of a verdict.

Owns robust statistics per stage; what counts as slow is `pdtrace.analysis.verdict`'s. Standard
library only.

A stage's usual time is the median of its peers, those that completed in the same mode. Stages that
grow with tokens (`Stage.scale`) are compared along a line through the peers, fitted by medians of
thirds (Tukey's resistant line), so that a few stalled peers do not bend it. The request under
judgement is never its own peer. Spread is the upper half of the peers' interquartile range, scaled
to a standard deviation: queues lean upwards, and only the upper side can excuse a long wait.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from pdtrace.analysis.columns import Samples
from pdtrace.analysis.placement import FIRST_TOKEN_HOP
from pdtrace.analysis.timeline import UNEXPLAINED, Timeline
from pdtrace.stages import STAGE_BY_NAME, Mode, Outcome, Scale

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
_MAX_WAITING = 32
"""Samples that wait to be sorted in; with more, sorting anew costs less."""


class Leaf(NamedTuple):
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


Key = tuple[str, str | None]


class Judged(Protocol):
    """What tells a request's peers: its mode, and its identity, as it is never its own peer."""

    @property
    def mode(self) -> Mode: ...

    @property
    def key(self) -> Key: ...


class Yardstick(Protocol):
    """Knows the usual time of leaves, without the request under judgement."""

    def usual(self, request: Judged, leaf: Leaf) -> Usual | None:
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
        tokens = leaf_tokens(
            part.name, timeline.prompt_tokens, timeline.cached_tokens, timeline.output_tokens
        )
        rest = part.ns
        for inner in NESTED_LEAVES.get(part.name, ()):
            pause = timeline.detail_ns(part.name, inner)
            found.append(Leaf(inner, part.name, pause, None))
            rest -= pause
        found.append(Leaf(part.name, part.name, rest, tokens))
    return tuple(found)


def leaf_tokens(
    stage: str, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None
) -> int | None:
    """The tokens that a chain stage's healthy time grows with; None where nothing or not known."""
    match STAGE_BY_NAME[stage].scale:
        case Scale.CONSTANT:
            return None
        case Scale.PROMPT_TOKENS:
            if prompt_tokens is None:
                return None
            cached = cached_tokens or 0 if stage.startswith("prefill.") else 0
            return max(1, prompt_tokens - cached)
        case Scale.OUTPUT_TOKENS:
            return None if output_tokens is None else max(0, output_tokens)


def is_peer(timeline: Timeline) -> bool:
    """Whether a request's times say what is usual: it completed, and its root is known."""
    return timeline.outcome is Outcome.COMPLETED and timeline.root_id is not None


class Baselines:
    """Baselines of a set of requests, as large as it may be: 600 bytes for each of them."""

    def __init__(self, timelines: Iterable[Timeline] = ()) -> None:
        self._series = _SeriesTable(window=None)
        for timeline in timelines:
            self.add(timeline)

    def add(self, timeline: Timeline) -> None:
        """Learn from a finished request; one that did not complete is passed over."""
        if is_peer(timeline):
            self._series.learn(timeline, leaves(timeline))

    def usual(self, request: Judged, leaf: Leaf) -> Usual | None:
        """What the other requests needed for this leaf; None without any."""
        return self._series.usual(request, leaf)


class RollingBaselines:
    """Baselines of the most recent `window` requests, for a process that never ends.

    Memory is bounded by `window` times the number of stages. A line through token counts is
    refitted when an eighth of its samples is new, so that one request costs microseconds.
    """

    def __init__(self, window: int = 512) -> None:
        if window < 8:
            raise ValueError(f"window is {window}; at least 8 requests are needed")
        self._series = _SeriesTable(window)

    def add(self, timeline: Timeline) -> None:
        """Learn from a finished request; one that did not complete is passed over."""
        if is_peer(timeline):
            self.learn(timeline, leaves(timeline))

    def learn(self, request: Judged, found: Iterable[Leaf]) -> None:
        """Learn from the leaves of a request that completed."""
        self._series.learn(request, found)

    def usual(self, request: Judged, leaf: Leaf) -> Usual | None:
        """What the other requests of the window needed for this leaf; None without any."""
        return self._series.usual(request, leaf)

    def settle(self, request: Judged, leaf: Leaf) -> None:
        """Refit the leaf's line if `usual` would now. Who leaves `usual` out calls this in its
        place, for leaves with tokens: what is learnt then does not depend on who was judged."""
        self._series.settle(request, leaf)


class _SeriesTable:
    """The samples of all leaves, by mode and name."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._by_mode: dict[Mode, dict[str, _Series]] = {mode: {} for mode in Mode}
        self._rows: dict[Mode, dict[Key, int]] = {mode: {} for mode in Mode}

    def learn(self, request: Judged, found: Iterable[Leaf]) -> None:
        by_name, key = self._by_mode[request.mode], request.key
        for name, _, ns, tokens in found:
            series = by_name.get(name)
            if series is None:
                scaled = STAGE_BY_NAME[name].scale is not Scale.CONSTANT
                series = by_name[name] = _Series(self._window, scaled, self._samples(request.mode))
            series.add(key, tokens, ns)

    def _samples(self, mode: Mode) -> MutableMapping[Key, tuple[int, int]]:
        """What stays for good is kept small; what goes again soon, quick to reach."""
        return Samples(self._rows[mode]) if self._window is None else {}

    def usual(self, request: Judged, leaf: Leaf) -> Usual | None:
        series = self._by_mode[request.mode].get(leaf.name)
        return None if series is None else series.usual(request.key, leaf)

    def settle(self, request: Judged, leaf: Leaf) -> None:
        series = self._by_mode[request.mode].get(leaf.name)
        if series is not None:
            series.settle(request.key, leaf.tokens)


@dataclass(frozen=True, slots=True)
class _Line:
    base: float
    slope: float

    def at(self, tokens: float) -> float:
        return max(0.0, self.base + self.slope * tokens)


_FLAT = _Line(0.0, 0.0)


@dataclass(slots=True)
class _Series:
    """Samples of one leaf: (tokens or 0, nanoseconds) by request; oldest leave past `window`.

    due        samples that `line` is to be fitted to before its next use; None where it was
    residuals  of all samples against `line`, sorted, but for `joined` and `left`
    largest    the largest token counts that the line knows: the second and the first
    fresh      samples since the last fit
    """

    window: int | None
    scaled: bool
    samples: MutableMapping[Key, tuple[int, int]]
    order: deque[Key] = field(default_factory=deque[Key])
    was_asked: bool = False
    due: list[tuple[int, int]] | None = None
    line: _Line = _FLAT
    residuals: array[float] = field(default_factory=lambda: array("d"))
    joined: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    left: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    unsorted: bool = False
    largest: tuple[int, int] = (0, 0)
    fresh: int = 0

    def add(self, key: Key, tokens: int | None, ns: int) -> None:
        samples = self.samples
        if key in samples or (self.scaled and tokens is None):
            return
        sample = samples[key] = (tokens or 0, ns)
        self.fresh += 1
        # Sorted in when somebody asks: for most leaves, nobody does for a long time.
        self.joined.append(sample)
        if self.window is not None:
            self.order.append(key)
            if len(self.order) > self.window:
                self.left.append(samples.pop(self.order.popleft()))
        if len(self.joined) > _MAX_WAITING:
            self._give_up_order()

    def usual(self, key: Key, leaf: Leaf) -> Usual | None:
        own = self.samples.get(key)
        peers = len(self.samples) - (own is not None)
        if peers < 1:
            return None
        if self.scaled and leaf.tokens is None:
            # Its size is not known: compare with requests of any size.
            line, skip, reach = _FLAT, None, 0
            residuals = sorted(float(ns) for _, ns in self.samples.values())
        elif self._needs_own_line(own, peers):
            others = [sample for other, sample in self.samples.items() if other != key]
            line = self._fit(others)
            residuals, skip = sorted(self._residual(line, s) for s in others), None
            reach = max(tokens for tokens, _ in others)
        else:
            line = self._fitted()
            residuals = self._sorted_residuals(line)
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

    def settle(self, key: Key, tokens: int | None) -> None:
        """Fit as `usual` would; the work is left to whoever needs the line."""
        if not self.scaled or tokens is None:
            return
        own = self.samples.get(key)
        peers = len(self.samples) - (own is not None)
        if peers and not self._needs_own_line(own, peers):
            self._note_if_due()

    def _needs_own_line(self, own: tuple[int, int] | None, peers: int) -> bool:
        return own is not None and self.scaled and peers < _EXACT_REFIT_BELOW

    def _note_if_due(self) -> None:
        if not self.was_asked or (self.scaled and self.fresh * 8 > len(self.samples)):
            self.was_asked = True
            self.due = list(self.samples.values())
            self.fresh = 0

    def _fitted(self) -> _Line:
        self._note_if_due()
        if self.due is not None:
            self.line = self._fit(self.due)
            ordered = sorted(tokens for tokens, _ in self.due) if self.scaled else []
            self.largest = (ordered[-2], ordered[-1]) if len(ordered) > 1 else (0, 0)
            self.due = None
            self._give_up_order()
        return self.line

    def _give_up_order(self) -> None:
        self.unsorted = True
        self.joined.clear()
        self.left.clear()

    def _sorted_residuals(self, line: _Line) -> array[float]:
        residual = self._residual
        if self.unsorted:
            base, slope = line.base, line.slope
            found = [ns - max(0.0, base + slope * tokens) for tokens, ns in self.samples.values()]
            self.residuals = array("d", sorted(found))
            self.unsorted = False
        else:
            for sample in self.joined:
                insort(self.residuals, residual(line, sample))
            for sample in self.left:
                del self.residuals[bisect_left(self.residuals, residual(line, sample))]
        self.joined.clear()
        self.left.clear()
        return self.residuals

    def _fit(self, samples: Iterable[tuple[int, int]]) -> _Line:
        return _resistant_line(sorted(samples)) if self.scaled else _FLAT

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
