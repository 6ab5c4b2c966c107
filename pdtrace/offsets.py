"""How the clocks of other hosts differ from a process's own, from round trips. Pure.

Owns the estimate of an offset at an instant and the bound on its error; knows nothing of rings or
messages.

    peer        received ──▶ answered        offset  (received + answered - sent - arrived) / 2
                ↗                  ↘         error   half the round trip: the truth is within it,
    own      sent                arrived             whichever way took longer

Near an instant the tightest round trips count: each allows the offsets in its own error, wider by
`DRIFT_BOUND_PPM` of the time that lies between, and the answer is what all of them allow. Drift is
estimated and taken out first. A round trip that contradicts those before it shows that a clock was
set forward or stood still (a machine was suspended): from the last round trip before to the first
one after it both offsets are possible, and the bound covers both.

What it takes for granted: no clock runs backwards, as CLOCK_MONOTONIC does not; drift stays within
`DRIFT_BOUND_PPM` of the estimate (of none, where too little is known to estimate it); and between
two round trips a clock is set at most once, by more than these can mistake for their own error.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from pdtrace.ring.records import ClockRecord

DRIFT_BOUND_PPM = 200
"""How much faster or slower than estimated a peer's clock may run: two crystals of 100 ppm each."""

MAX_SAMPLES = 512
"""Round trips kept of one stretch between two settings of a clock; older ones are thinned out."""

MAX_STRETCHES = 32
"""Settings of a clock that are remembered; before them no offset is known any more."""

NEIGHBOURS = 8
"""Round trips on either side of an instant that have a say in its offset."""

_DRIFT_BOUND = DRIFT_BOUND_PPM / 1e6
_MAX_DRIFT = 1000 / 1e6
_COMPARED = 64


class Offset(NamedTuple):
    """What to add to one clock's times to get another's, right to within `error_ns`."""

    offset_ns: int
    error_ns: int


class _Sample(NamedTuple):
    t_ns: int
    offset_ns: int
    error_ns: int


_by_time = attrgetter("t_ns")
_by_error = attrgetter("error_ns")


class _Range(NamedTuple):
    """Offsets that are possible, both ends included."""

    low: int
    high: int


class ClockOffsets:
    """The round trips of one process."""

    def __init__(self) -> None:
        self._to_peer: dict[str, _History] = {}
        self._from_peer: dict[str, _History] = {}

    def add(self, sample: ClockRecord) -> None:
        """Takes in a round trip; in the order in which they were made."""
        if sample.error_ns < 0:
            return
        peer, t_ns, offset_ns = sample.peer_clock_id, sample.t_ns, sample.offset_ns
        # The truth is within half the round trip at some instant of it; then it may have drifted.
        error_ns = sample.error_ns + round(_DRIFT_BOUND * sample.error_ns) + 1
        there = self._to_peer.setdefault(peer, _History())
        there.add(_Sample(t_ns, offset_ns, error_ns))
        back = self._from_peer.setdefault(peer, _History())
        back.add(_Sample(t_ns + offset_ns, -offset_ns, error_ns))

    def at(self, peer_clock_id: str, t_ns: int) -> Offset | None:
        """What to add to own time `t_ns` to get that host's; None without a round trip to it.

        Before the first round trip and after the last one the bound grows with the distance.
        """
        history = self._to_peer.get(peer_clock_id)
        return None if history is None else history.at(t_ns)

    def back(self, peer_clock_id: str, peer_t_ns: int) -> Offset | None:
        """What to add to a host's time `peer_t_ns` to get own time; None as for `at`."""
        history = self._from_peer.get(peer_clock_id)
        return None if history is None else history.at(peer_t_ns)

    def drift_ppm(self, peer_clock_id: str) -> float | None:
        """How much faster that host's clock runs, in millionths; None while it is not known."""
        history = self._to_peer.get(peer_clock_id)
        return None if history is None else history.drift_ppm

    @property
    def peers(self) -> Sequence[str]:
        """Clock ids of the hosts with a round trip, in order of the first."""
        return tuple(self._to_peer)

    def __bool__(self) -> bool:
        return bool(self._to_peer)


class _Stretch:
    """Round trips between which no clock was set, by time."""

    __slots__ = ("_drift", "samples")

    def __init__(self, first: _Sample) -> None:
        self.samples = [first]
        self._drift: float | None = None

    @property
    def drift(self) -> float | None:
        return self._drift

    def contradicted_by(self, new: _Sample) -> int | None:
        """Index of the last round trip that cannot be true together with `new`; None if all can."""
        drift = self._drift or 0.0
        for index in range(len(self.samples) - 1, max(-1, len(self.samples) - 1 - _COMPARED), -1):
            old = self.samples[index]
            between = new.t_ns - old.t_ns
            apart = abs(old.offset_ns + drift * between - new.offset_ns)
            if apart > old.error_ns + new.error_ns + _DRIFT_BOUND * abs(between) + 1:
                return index
        return None

    def add(self, sample: _Sample) -> None:
        insort(self.samples, sample, key=_by_time)
        if len(self.samples) > MAX_SAMPLES:
            self._thin_out()
        self._estimate_drift()

    def cut_after(self, index: int) -> None:
        del self.samples[index + 1 :]
        self._estimate_drift()

    def range_at(self, t_ns: int) -> _Range:
        """The offsets that the nearest round trips allow at `t_ns`."""
        here = bisect_right(self.samples, t_ns, key=_by_time)
        near = self.samples[max(0, here - NEIGHBOURS) : here + NEIGHBOURS]
        for drift in (self._drift, 0.0):
            if drift is not None:
                allowed = [_allowed(sample, t_ns, drift) for sample in near]
                low = max(found.low for found in allowed)
                high = min(found.high for found in allowed)
                if low <= high:
                    return _Range(low, high)
        # They contradict each other by less than what shows a setting: none of them is left out.
        return _hull([_allowed(sample, t_ns, self._drift or 0.0) for sample in near])

    def _thin_out(self) -> None:
        """Of each two neighbours in the older half keep the one with the smaller error."""
        half = MAX_SAMPLES // 2
        older = self.samples[:half]
        pairs = zip(older[::2], older[1::2], strict=True)
        self.samples[:half] = [min(pair, key=_by_error) for pair in pairs]

    def _estimate_drift(self) -> None:
        """From the best round trips of the first and the last third, where they are good enough."""
        third = len(self.samples) // 3
        if not third:
            self._drift = None
            return
        early = min(self.samples[:third], key=_by_error)
        late = min(self.samples[-third:], key=_by_error)
        between = late.t_ns - early.t_ns
        doubt = early.error_ns + late.error_ns
        if between <= 0 or doubt > _DRIFT_BOUND / 2 * between:
            self._drift = None
            return
        drift = (late.offset_ns - early.offset_ns) / between
        self._drift = min(max(drift, -_MAX_DRIFT), _MAX_DRIFT)


class _History:
    """The round trips to one host, in stretches; `_borders[i]` lies behind `_stretches[i]`."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._borders: list[_Border] = []
        self._known_from_ns: int | None = None

    @property
    def drift_ppm(self) -> float | None:
        drift = self._stretches[-1].drift if self._stretches else None
        return None if drift is None else drift * 1e6

    def add(self, sample: _Sample) -> None:
        if not self._stretches:
            self._stretches.append(_Stretch(sample))
            return
        last = self._stretches[-1]
        contradicted = last.contradicted_by(sample)
        if contradicted is None:
            last.add(sample)
            return
        # Round trips that fit both sides cannot tell on which of them they were made.
        last.cut_after(contradicted)
        self._stretches.append(_Stretch(sample))
        self._borders.append(_Border(last.samples[-1], sample))
        if len(self._stretches) > MAX_STRETCHES:
            self._known_from_ns = self._stretches.pop(0).samples[-1].t_ns
            del self._borders[0]

    def at(self, t_ns: int) -> Offset | None:
        if self._known_from_ns is not None and t_ns <= self._known_from_ns:
            return None
        if len(self._stretches) == 1:
            return _answer(self._stretches[0].range_at(t_ns))
        return _answer(_hull(list(self._possible(t_ns))))

    def _possible(self, t_ns: int) -> Iterator[_Range]:
        """Offsets at `t_ns` by each stretch in which it may have been read."""
        for index, stretch in enumerate(self._stretches):
            before = self._borders[index - 1] if index else None
            after = self._borders[index] if index < len(self._borders) else None
            if (before and t_ns < before.last_ns) or (after and t_ns > after.first_ns):
                continue
            found = stretch.range_at(t_ns)
            if before and t_ns < stretch.samples[0].t_ns:
                found = before.clamp(found, t_ns)
            if after and t_ns > stretch.samples[-1].t_ns:
                found = after.clamp(found, t_ns)
            yield found


class _Border:
    """The time between the `last` round trip before a setting and the `first` one after it."""

    __slots__ = ("_peer", "first_ns", "last_ns")

    def __init__(self, last: _Sample, first: _Sample) -> None:
        self.last_ns, self.first_ns = sorted((last.t_ns, first.t_ns))
        low = last.t_ns + last.offset_ns - last.error_ns
        high = first.t_ns + first.offset_ns + first.error_ns
        self._peer = _Range(low, high) if low <= high else None

    def clamp(self, offsets: _Range, t_ns: int) -> _Range:
        """`offsets`, moved to where `t_ns` lies between the two round trips on the peer's clock,
        which keeps times in order."""
        if self._peer is None:
            return offsets
        least, most = self._peer.low - t_ns, self._peer.high - t_ns
        return _Range(min(max(offsets.low, least), most), min(max(offsets.high, least), most))


def _allowed(sample: _Sample, t_ns: int, drift: float) -> _Range:
    away = t_ns - sample.t_ns
    middle = sample.offset_ns + round(drift * away)
    error = sample.error_ns + round(_DRIFT_BOUND * abs(away)) + 1
    return _Range(middle - error, middle + error)


def _hull(ranges: Sequence[_Range]) -> _Range:
    return _Range(min(found.low for found in ranges), max(found.high for found in ranges))


def _answer(found: _Range) -> Offset:
    return Offset((found.low + found.high) // 2, (found.high - found.low + 1) // 2)
