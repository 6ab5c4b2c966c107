"""On which clock the spans of a request were read, and how far that clock is from the request's.

Owns the clocks of one trace and what causality says of one that nobody measured: what must precede
something cannot come after it. Pure; knows nothing of spans' places in the partition. How measured
offsets come about is `pdtrace.offsets`'.

A clock of which nothing is known but its wall time is moved only where the order of stages
contradicts it, by the least that restores the order, and never by more than a limit. The recorded
times stay as they are: only the analysis moves them, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pdtrace import semconv as a
from pdtrace.analysis.attributes import host_id, integer
from pdtrace.duration import seconds_text
from pdtrace.spans import Span

OWN_CLOCK = ""
"""The clock of the host that recorded the request itself."""

MAX_SKEW_NS = 60 * 10**9
"""A clock that causality says is further off is not moved: there is more wrong than a clock."""

TOLERANCE_NS = 2_000  # exported times are whole microseconds with gaps (ADR 001)
MAX_STEPS = 256


class ClockBasis(StrEnum):
    """What the distance of a clock from the request's is known by."""

    MEASURED = "measured"  # round trips between the hosts; the error has a bound
    WALL = "wall"  # both hosts' wall clocks, whose error nobody knows
    CAUSALITY = "causality"  # the wall clocks contradict what must precede what


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """A clock other than the request's own that spans of the request were read on.

    host        `host.id`; None where the recording does not name it
    instances   the processes that read it
    offset_ns   measured: what was added to its times to get the request's, at the last of its spans
    error_ns    bound on the error of the spans' times; None if it is not known
    skew_ns     by causality: the least that must be added to its times, and `skew_most_ns` the most
                that can be; None where the order of stages contradicts nothing
    moved_ns    what the analysis added to its recorded times
    refused     why it was not moved although causality asks for it
    """

    host: str | None
    instances: tuple[str, ...]
    basis: ClockBasis
    offset_ns: int | None = None
    error_ns: int | None = None
    skew_ns: int | None = None
    skew_most_ns: int | None = None
    moved_ns: int = 0
    refused: str | None = None

    @property
    def name(self) -> str:
        """`decode-0 on host-b`."""
        who = ", ".join(self.instances) or "a process"
        return f"{who} on {self.host}" if self.host else who

    @property
    def bound(self) -> str:
        """What is known of it, in brackets behind something that it may explain."""
        if self.offset_ns is not None and self.error_ns is not None:
            return (
                f"{self.name}: offset {offset_text(self.offset_ns)} ± {seconds_text(self.error_ns)}"
            )
        return f"{self.name}: error of its clock not known"

    @property
    def sentence(self) -> str:
        """For people; a whole sentence."""
        if self.basis is ClockBasis.MEASURED:
            assert self.offset_ns is not None and self.error_ns is not None
            return (
                f"Times of {self.name} stand on another clock, offset "
                f"{offset_text(self.offset_ns)} and "
                f"known to ± {seconds_text(self.error_ns)}: so are the stages that begin or end "
                "there."
            )
        if self.skew_ns is None:
            return f"Times of {self.name} stand on another clock, whose error is not known."
        late = "behind" if self.skew_ns > 0 else "ahead"
        amount = f"{seconds_text(abs(self.skew_ns))} or more"
        most = self.skew_most_ns
        if most is not None:
            low, high = sorted((abs(self.skew_ns), abs(most)))
            if high - low > TOLERANCE_NS and (most > 0) == (self.skew_ns > 0):
                amount = f"{seconds_text(low)} to {seconds_text(high)}"
            else:
                amount = seconds_text(abs(self.skew_ns))
        said = f"The clock of {self.name} is {amount} {late} by the order of the stages"
        if self.refused:
            return f"{said}; its spans stay where they were recorded: {self.refused}."
        return (
            f"{said}; its spans are shown moved by {signed(self.moved_ns)}, the recorded times are "
            "kept."
        )


def offset_text(ns: int) -> str:
    """To the microsecond, however large: `-5.000123 s`."""
    return f"{ns / 1e9:+.6f} s"


def signed(ns: int) -> str:
    """`-5.00 s`, `+120 ms`."""
    return f"{'-' if ns < 0 else '+'}{seconds_text(abs(ns))}"


class Reading(NamedTuple):
    """How a span's times were read.

    clock      OWN_CLOCK or a name of another one
    error_ns   bound on their error against the request's clock; None if it is not known
    """

    clock: str
    error_ns: int | None


_OWN = Reading(OWN_CLOCK, 0)


def read_on(span: Span, root: Span | None, *, exact: bool) -> Reading:
    """The clock of a span; `exact` says that its exact times count from the request's begin."""
    if root is None or span.resource is root.resource:
        return _OWN
    here, home = host_id(span), host_id(root)
    if exact and a.CLOCK_OFFSET_NS.key in span.attributes:
        return Reading(f"host {here}", _bound(span))
    if here == home:
        # Without names of hosts only exact times tell that a clock was shared.
        if here is not None or exact or span.resource.service_name == root.resource.service_name:
            return _OWN
        return Reading(f"process {_process(span)}", None)
    if here is None:
        return _OWN if exact else Reading(f"process {_process(span)}", None)
    return Reading(f"host {here}", None)


def _bound(span: Span) -> int | None:
    error_ns = integer(span.attributes, a.CLOCK_ERROR_NS)
    if integer(span.attributes, a.CLOCK_OFFSET_NS) is None:
        return None  # another writer's attribute
    return None if error_ns is None or error_ns < 0 else error_ns


def _process(span: Span) -> str:
    return f"{span.resource.service_name} {span.resource.instance_id or ''}".strip()


class Step(NamedTuple):
    """A chain stage, in causal order. `attempt` is None for stages around the attempts."""

    clock: str
    attempt: int | None
    begin: int
    end: int


class Skew(NamedTuple):
    """What must be added to a clock's times, at least and at most, so that causes precede effects.

    None: no limit. `least` > `most`: no single amount does it.
    """

    least: int | None
    most: int | None

    @property
    def is_sound(self) -> bool:
        """Whether the times can stand as they are."""
        return (self.least or 0) <= TOLERANCE_NS and (self.most or 0) >= -TOLERANCE_NS

    @property
    def is_contradictory(self) -> bool:
        return self.least is not None and self.most is not None and self.least > self.most

    @property
    def amount(self) -> int:
        """The least move, in either direction, that restores the order."""
        if self.least is not None and self.least > 0:
            return self.least
        return self.most if self.most is not None and self.most < 0 else 0


def estimate_skews(
    steps: Sequence[Step], unknown: Collection[str], *, length: int, completed: bool
) -> dict[str, Skew]:
    """For each clock in `unknown` that contradicts the order of `steps`: what it takes to mend it.

    length     of the request, which holds all its stages if it `completed`; one that was given up
               may be noticed late, so there only begins are held against each other
    """
    if len(steps) > MAX_STEPS:
        return {}
    waiting = [clock for clock in dict.fromkeys(s.clock for s in steps) if clock in unknown]
    steps = [s if s.clock in unknown else s._replace(clock=OWN_CLOCK) for s in steps]
    rooms = _rooms(steps, length, whole=completed)
    if completed and _contradictory(rooms, waiting):
        rooms = _rooms(steps, length, whole=False)
    skews: dict[str, Skew] = {}
    for clock in _contradictory(rooms, waiting):
        skews[clock] = Skew(_minus(rooms.get((OWN_CLOCK, clock))), rooms.get((clock, OWN_CLOCK)))
        rooms = {pair: room for pair, room in rooms.items() if clock not in pair}
        waiting.remove(clock)
    for clock in waiting:
        closed = _closed(rooms)
        skew = Skew(_minus(closed.get((OWN_CLOCK, clock))), closed.get((clock, OWN_CLOCK)))
        if not skew.is_sound:
            skews[clock] = skew
        # What is left for the others depends on where this one stands.
        rooms[clock, OWN_CLOCK], rooms[OWN_CLOCK, clock] = skew.amount, -skew.amount
    return skews


_Rooms = dict[tuple[str, str], int]
"""By how much one clock's times may be moved further than another's, at most."""


def _rooms(steps: Sequence[Step], length: int, *, whole: bool) -> _Rooms:
    """What the order of steps leaves, and that the request holds them.

    whole  a stage ends before the next one begins, and all before the request; else begins alone
           are in order
    """
    rooms: _Rooms = {}

    def leave(first: str, then: str, room: int) -> None:
        if first != then:
            rooms[first, then] = min(room, rooms.get((first, then), room))

    for index, step in enumerate(steps):
        leave(OWN_CLOCK, step.clock, step.begin)
        if whole:
            leave(step.clock, OWN_CLOCK, length - step.end)
        for later in steps[index + 1 :]:
            # Attempts may overlap: a worker may notice late that its attempt was given up.
            if step.attempt == later.attempt or None in {step.attempt, later.attempt}:
                until = step.end if whole else step.begin
                leave(step.clock, later.clock, later.begin - until)
    return rooms


def _closed(rooms: _Rooms) -> _Rooms:
    """`rooms` with what follows from them by way of other clocks (Floyd and Warshall)."""
    closed = dict(rooms)
    clocks = list(dict.fromkeys(clock for pair in rooms for clock in pair))
    for middle in clocks:
        for first in clocks:
            way = closed.get((first, middle))
            if way is None:
                continue
            for then in clocks:
                rest = closed.get((middle, then))
                if rest is not None:
                    known = closed.get((first, then))
                    closed[first, then] = way + rest if known is None else min(known, way + rest)
    return closed


def _contradictory(rooms: _Rooms, clocks: Sequence[str]) -> list[str]:
    """Clocks that would have to be moved further than themselves."""
    closed = _closed(rooms)
    return [clock for clock in clocks if closed.get((clock, clock), 0) < 0]


def _minus(room: int | None) -> int | None:
    return None if room is None else -room
