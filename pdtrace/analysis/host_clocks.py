"""What a recording says of its hosts' clocks: offset, error, drift, and what they break. Pure.

Owns the view over many requests; one request's clocks are `pdtrace.analysis.skew`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from pdtrace.analysis.skew import ClockBasis, HostClock, offset_text
from pdtrace.analysis.timeline import Timeline
from pdtrace.duration import seconds_text

MAX_DRIFT_PPM = 1000.0
"""Offsets that part faster than this were set, they did not drift."""

DRIFT_DOUBT_PPM = 100.0
"""A drift that is known less well than this is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """One clock that is not the gateway's. Times in nanoseconds.

    host         `host.id`; None where the recording does not name it
    requests     that have spans read on it, and of these those whose spans were `moved`
    basis        the weakest that any of them had to rely on
    offsets_ns   least and most that was added to its times to get the gateway's; None if that was
                 not measured
    error_ns     largest bound on the error of an offset; None where some have none
    drift_ppm    how much faster than the gateway's it runs, in millionths; None if not known
    drift_doubt  what `drift_ppm` is known to, in millionths
    settings     times that it was set, between requests
    """

    host: str | None
    instances: tuple[str, ...]
    requests: int
    moved: int
    basis: ClockBasis
    offsets_ns: tuple[int, int] | None
    error_ns: int | None
    drift_ppm: float | None
    drift_doubt: float | None
    settings: int

    @property
    def sentence(self) -> str:
        """For people; a whole sentence."""
        who = ", ".join(self.instances)
        text = f"Clock of {self.host} ({who})" if self.host else f"Clock of {who}"
        if self.offsets_ns is None or self.error_ns is None:
            text += ": its error is not known"
        else:
            low, high = self.offsets_ns
            text += f": offset {offset_text(low)}"
            if high - low > self.error_ns:
                text += f" to {offset_text(high)}"
            text += f", known to ± {seconds_text(self.error_ns)}"
        if self.drift_ppm is not None:
            text += f", drift {self.drift_ppm:+.0f} ± {self.drift_doubt:.0f} ppm"
        if self.settings:
            text += f", set {self.settings} time{'s' if self.settings > 1 else ''}"
        if self.moved:
            requests = f"{self.moved} request{'s' if self.moved > 1 else ''}"
            text += f"; spans of {requests} moved, as the order of stages asks for it"
        return text + "."


class _Point(NamedTuple):
    t_ns: int
    offset_ns: int
    error_ns: int


def summarize_clocks(timelines: Iterable[Timeline]) -> tuple[HostSummary, ...]:
    """The other hosts' clocks in a recording, by name."""
    book = ClockBook()
    for timeline in timelines:
        book.add(timeline)
    return book.summaries()


class ClockBook:
    """The other hosts' clocks in requests that come one by one."""

    def __init__(self) -> None:
        self._readings: dict[str, _Readings] = {}

    def add(self, timeline: Timeline) -> None:
        for clock in timeline.clocks:
            name = clock.host or clock.name
            if name not in self._readings:
                self._readings[name] = _Readings(host=clock.host)
            read_ns = timeline.started_unix_ns + _read_ns(timeline, clock)
            self._readings[name].add(read_ns, clock)

    def summaries(self) -> tuple[HostSummary, ...]:
        """By name."""
        return tuple(self._readings[name].summary() for name in sorted(self._readings))


def _read_ns(timeline: Timeline, clock: HostClock) -> int:
    """When its offset was that, counted from the request's begin: requests do not end in the order
    in which they leave a worker."""
    return max(
        (visit.end_ns for visit in timeline.visits if visit.instance in clock.instances),
        default=timeline.total_ns,
    )


@dataclass(slots=True)
class _Readings:
    """What requests say of one clock.

    points  those that say both, its offset and the error of it
    """

    host: str | None
    instances: set[str] = field(default_factory=set[str])
    requests: int = 0
    moved: int = 0
    bases: set[ClockBasis] = field(default_factory=set[ClockBasis])
    points: list[_Point] = field(default_factory=list[_Point])

    def add(self, read_ns: int, clock: HostClock) -> None:
        self.instances.update(clock.instances)
        self.requests += 1
        self.moved += clock.moved_ns != 0
        self.bases.add(clock.basis)
        if clock.error_ns is not None and clock.offset_ns is not None:
            self.points.append(_Point(read_ns, clock.offset_ns, clock.error_ns))

    def summary(self) -> HostSummary:
        points = sorted(self.points)
        offsets = [point.offset_ns for point in points]
        stretches = _stretches(points)
        drift, doubt = _drift(max(stretches, key=lambda s: s[-1].t_ns - s[0].t_ns, default=[]))
        weakest = [ClockBasis.CAUSALITY, ClockBasis.WALL, ClockBasis.MEASURED]
        return HostSummary(
            host=self.host,
            instances=tuple(sorted(self.instances)),
            requests=self.requests,
            moved=self.moved,
            basis=next(basis for basis in weakest if basis in self.bases),
            offsets_ns=(min(offsets), max(offsets)) if offsets else None,
            error_ns=max(point.error_ns for point in points)
            if points and len(points) == self.requests
            else None,
            drift_ppm=drift,
            drift_doubt=doubt,
            settings=max(0, len(stretches) - 1),
        )


def _stretches(points: Sequence[_Point]) -> list[list[_Point]]:
    """Points between which no clock was set."""
    stretches = [[points[0]]] if points else []
    for before, after in pairwise(points):
        apart = abs(after.offset_ns - before.offset_ns) - before.error_ns - after.error_ns
        if apart > (after.t_ns - before.t_ns) * MAX_DRIFT_PPM / 1e6:
            stretches.append([])
        stretches[-1].append(after)
    return stretches


def _drift(points: Sequence[_Point]) -> tuple[float, float] | tuple[None, None]:
    """Between the best point of the first third and that of the last one."""
    third = len(points) // 3
    if not third:
        return None, None
    early = min(points[:third], key=lambda point: point.error_ns)
    late = min(points[-third:], key=lambda point: point.error_ns)
    between = late.t_ns - early.t_ns
    if between <= 0:
        return None, None
    doubt = (early.error_ns + late.error_ns) / between * 1e6
    if doubt > DRIFT_DOUBT_PPM:
        return None, None
    # What must be added shrinks while the clock gains.
    return (early.offset_ns - late.offset_ns) / between * 1e6, doubt


def clock_breach(timeline: Timeline) -> str | None:
    """What the clocks of one request contradict beyond what their errors explain; None if they do
    not."""
    for violation in timeline.violations:
        if violation.between_clocks:
            return violation.message
    return next((clock.sentence for clock in timeline.clocks if clock.refused), None)
