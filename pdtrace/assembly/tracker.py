"""Follows requests through the records of many rings until their spans can be built.

Owns which request is open, which legs it still waits for, and when to stop waiting; what is kept of
one request is `pdtrace.assembly.open_requests`'. A plain state machine: the caller feeds records
and the time; it reads no files and no clock. Asking what is finished touches only requests of which
something was read since, or whose time has come.

    OPEN (the first of a request)                                     → open
    COMPLETED, or the gateway died, or let go of it and was silent for `grace_ns`
        and every leg let go, and those it was routed to were heard   → finished
        else, ten times `grace_ns` after the end, or after `grace_ns`
        of silence if nobody is known to hold it; later by as long as
        a process it waits for is kept from running, within bounds    → finished, incomplete
    no gateway on this host: every leg let go, `grace_ns` of silence  → finished, incomplete if a
                                                  gateway's records of that time were overwritten
    more than `max_open` requests                                     → the oldest, incomplete

What arrives for a finished request is late: counted, not kept. A process writes the OPEN records of
what it holds again before its ring recycles them. So of an attempt that is not named again behind a
gap, the end was overwritten: it was let go of.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

from pdtrace.assembly.collected import CollectedRequest, Process, Stuck
from pdtrace.assembly.open_requests import (
    TELLING_MARKS,
    OpenLeg,
    OpenRequest,
    Source,
    plan_of,
)
from pdtrace.assembly.progress import Progress
from pdtrace.inflight import InFlight
from pdtrace.propagation import RequestContext
from pdtrace.ring.records import (
    EndRecord,
    LossRecord,
    MarkRecord,
    OpenRecord,
    Record,
    StepRecord,
    Value,
)
from pdtrace.stages import Mark, Role

DEFAULT_GRACE_NS = 1_000_000_000
MAX_GRACES = 10
MAX_HALTED_GRACES = 60
"""For one whose process is kept from running: once that goes on, it tells what became of it."""
DEFAULT_MAX_OPEN = 200_000
MAX_REMEMBERED = 200_000
"""Requests remembered at least, to tell late records from records of unknown requests, and to link
waits to the requests that were in the way."""
MAX_MARKS = 20_000
"""Marks kept of one request; what is more counts as missed."""
ROOM_FOR_STAGES = 1_000
"""Marks beyond MAX_MARKS for those that say where the request is."""
MAX_SHARED_VALUES = 10_000
MAX_GAPS = 1_000
"""Gaps kept of a gateway's ring; the latest."""
MAX_GAPPED = 64
"""Gateways' rings whose gaps are kept; the latest to have any."""
MAX_UNNAMED = 10_000
"""Marks kept of one ring whose OPEN record has not been read."""

_NUMEROUS_MARKS = frozenset(
    {
        *(Mark.WAITING, Mark.TOKEN_GAP, Mark.CHUNK_STARTED, Mark.CHUNK_FINISHED),
        *(Mark.COPY_QUEUED, Mark.COPY_STARTED, Mark.COPY_FINISHED),
    }
)
"""Marks that one request may have in any number."""
_COMPLETED = Mark.COMPLETED  # asked for every mark, and members of an enum are found slowly
_RECURRING_MARKS = frozenset({Mark.RECEIVED, Mark.TOKENIZED, Mark.ROUTED})
"""Marks of nearly every request whose values are texts of a small choice."""

_V = TypeVar("_V")

Halted = Callable[[str], str | None]
"""What keeps the process of a ring from running at this instant, to be read behind "it is"; None if
nothing does."""


def _nothing_known(_ring: str) -> str | None:
    return None


@dataclass(slots=True)
class TrackerCounts:
    """Totals since the start.

    late       marks of requests that were finished already
    unnamed    marks whose request is not known: its OPEN record was overwritten
    evicted    requests finished early because too many were open
    overgrown  marks left out because their request has too many
    """

    requests: int = 0
    late: int = 0
    unnamed: int = 0
    evicted: int = 0
    overgrown: int = 0


class _Memory(Generic[_V]):
    """The last `MAX_REMEMBERED` keys at least, twice as many at most.

    Two generations rather than an order: dropping the older half at once costs nothing per key.
    """

    def __init__(self) -> None:
        self._young: dict[str, _V] = {}
        self._old: dict[str, _V] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._young or key in self._old

    def get(self, key: str) -> _V | None:
        return self._young.get(key) or self._old.get(key)

    def keep(self, key: str, value: _V) -> None:
        if len(self._young) >= MAX_REMEMBERED:
            self._old, self._young = self._young, {}
        self._young[key] = value


class _SharedValues:
    """One tuple for all marks that carry equal values, for those marks whose values recur."""

    def __init__(self) -> None:
        self._known: dict[tuple[Value, ...], tuple[Value, ...]] = {}

    def share(self, record: MarkRecord) -> None:
        """Lets go of a record's own tuple and strings if others carry the same."""
        values = record.values
        known = self._known.get(values)
        if known is not None:
            record.values = known
        else:
            if len(self._known) >= MAX_SHARED_VALUES:
                self._known.clear()
            self._known[values] = values


@dataclass(slots=True)
class _Gap:
    """Records of a gateway that were overwritten, and between which of its times they lie.

    end_ns  None until a later record was read; the end of the read in which that was, so at most
            too late
    """

    count: int
    begin_ns: int
    end_ns: int | None = None


def _lost_at(t_ns: int, gaps: deque[_Gap]) -> int:
    """Records that are missing in the gaps around a time; `gaps` in their order."""
    count = 0
    for gap in reversed(gaps):
        if gap.end_ns is not None and gap.end_ns < t_ns:
            break
        if gap.begin_ns <= t_ns:
            count += gap.count
    return count


@dataclass(slots=True)
class _Ring:
    source: Source
    handled_key: int = 0
    last_key: int = 0
    keys: dict[int, OpenLeg | None] = field(default_factory=dict[int, "OpenLeg | None"])
    unnamed: dict[int, list[MarkRecord]] = field(default_factory=dict[int, list[MarkRecord]])
    num_unnamed: int = 0
    again: set[int] = field(default_factory=set[int])
    """Keys of requests that a former tracker finished: their records are read again."""
    last_ns: int = 0
    gap_ns: int = 0
    before_gap: int = 0
    named: set[int] | None = None
    """Keys named since records were overwritten, until the ring is read to its end."""
    gaps: deque[_Gap] = field(default_factory=lambda: deque[_Gap](maxlen=MAX_GAPS))

    @property
    def is_gateway(self) -> bool:
        return self.source.process.role is Role.GATEWAY

    def miss(self, count: int, *, overwritten: bool) -> None:
        """Records are missing behind the last one."""
        if self.last_ns > self.gap_ns:
            self.gap_ns, self.before_gap = self.last_ns, self.source.num_missed
        self.source.num_missed += count
        if overwritten:
            self.named = set()
            if self.is_gateway:
                self.gaps.append(_Gap(count, self.last_ns))

    def end_gaps(self) -> None:
        """Records that lie behind the latest gap were read."""
        for gap in reversed(self.gaps):
            if gap.end_ns is not None:
                return
            if self.last_ns > gap.begin_ns:
                gap.end_ns = self.last_ns

    def missed_before(self, t_ns: int) -> int:
        """How many were missing already when a request began whose begin is missing too: those
        before the last gap, if it began in that."""
        return self.before_gap if t_ns >= self.gap_ns else 0


class RequestTracker:
    """All requests in flight, by the id of their root span.

    counts  totals, for the agent's summary
    """

    def __init__(
        self, *, grace_ns: int = DEFAULT_GRACE_NS, max_open: int = DEFAULT_MAX_OPEN
    ) -> None:
        self.counts = TrackerCounts()
        self._grace_ns = grace_ns
        self._max_open = max_open
        self._rings: dict[str, _Ring] = {}
        self._open: dict[str, OpenRequest] = {}
        self._finished: _Memory[bool] = _Memory()
        self._roots: _Memory[bytes] = _Memory()
        self._shared = _SharedValues()
        self._stuck: dict[str, tuple[Stuck, ...]] = {}
        self._begun = 0
        self._home: Process | None = None
        self._changed: dict[str, None] = {}
        """Requests that may have finished with what was read since the last question."""
        self._due: list[tuple[int, int, str]] = []
        """Requests that time alone may finish: a heap of (when, order, root)."""
        self._unmeasured: dict[str, None] = {}
        """Requests that only wait for the next round trip between two clocks."""
        self._done: deque[tuple[OpenRequest, str | None]] = deque()
        """Requests that are finished and were not asked for yet."""
        self._gaps: dict[str, tuple[Process, deque[_Gap]]] = {}
        """Of gateways' rings, gone ones too."""

    # -- input -------------------------------------------------------------------------------

    def add_ring(self, ring: str, process: Process, *, handled_key: int = 0) -> None:
        """A ring that records will come from.

        handled_key  last key that a former tracker saw (`last_key`): unless their OPEN records come
                     again, its requests and those before are finished
        """
        self._rings[ring] = _Ring(Source(ring, process), handled_key, handled_key)
        if self._home is None or (
            process.role is Role.GATEWAY and self._home.role is not Role.GATEWAY
        ):
            self._home = process
        for other in self._rings.values():
            other.source.is_foreign = other.source.process.clock_id != self._home.clock_id

    def last_key(self, ring: str) -> int:
        """The highest key that `ring` gave to a request."""
        return self._rings[ring].last_key

    def remember_finished(self, span_ids: Iterable[str]) -> None:
        """Span ids of roots or attempts that were exported before: their records come again."""
        for span_id in span_ids:
            self._finished.keep(span_id, False)

    def feed(self, ring: str, records: Iterable[Record], now_ns: int) -> list[str]:
        """Records of one ring in the order written; the requests that appeared in it, by root."""
        source = self._rings[ring]
        appeared: list[str] = []
        for record in records:
            if isinstance(record, MarkRecord):
                self._mark(source, record, now_ns)
            elif isinstance(record, StepRecord):
                self._step(source, record)
            elif isinstance(record, OpenRecord):
                if self._name(source, record, now_ns):
                    appeared.append(record.context.root_span_id)
            elif isinstance(record, EndRecord):
                self._release(source, record.key, now_ns)
            elif isinstance(record, LossRecord):
                source.miss(record.count, overwritten=record.overwritten)
            else:
                source.source.sample(record)
                self._changed.update(self._unmeasured)
                self._unmeasured.clear()
        if source.gaps:
            source.end_gaps()
            self._keep_gaps(ring, source)
        return appeared

    def read_to_end(self, ring: str, now_ns: int) -> None:
        """A ring held nothing further than what was fed: what was not named since records of it
        were overwritten has been let go of in between."""
        source = self._rings[ring]
        named, source.named = source.named, None
        if named is None:
            return
        for key in [key for key in source.keys if key not in named]:
            self._release(source, key, now_ns)

    def ring_gone(self, ring: str, gone_ns: int | None, reason: str) -> None:
        """The process of a ring, which has been read to its end, records no more.

        gone_ns  when it was found gone; None if that was not observed: the last record then counts
        """
        gone = self._rings.pop(ring)
        at_ns = max(gone.last_ns, gone_ns or 0)
        instance = gone.source.process.instance
        for root, request in self._open.items():
            expected = instance in request.expected
            if expected:
                request.expected = tuple(name for name in request.expected if name != instance)
            lost = False
            for leg in request.legs:
                if leg.source is gone.source and leg.is_held:
                    leg.is_held = False
                    leg.lost_at_ns, leg.lost_reason = at_ns, reason
                    request.num_held -= 1
                    lost = True
            if lost and gone.source.process.role is Role.GATEWAY and request.ended_ns is None:
                request.ended_ns = at_ns
            if lost or expected:
                self._changed[root] = None
        self.counts.unnamed += gone.num_unnamed

    def mark_stuck(self, root_span_id: str, report: Stuck) -> None:
        """Keeps that a stage of a request in flight was reported as stuck, for its span."""
        request = self._open.get(root_span_id)
        if request is not None:
            request.stuck += (report,)
            self._stuck[root_span_id] = request.stuck

    def remember_stuck(self, reports: Mapping[str, tuple[Stuck, ...]]) -> None:
        """What a former tracker kept of requests that will be read again (`stuck_ones`)."""
        self._stuck.update(reports)

    def stuck_ones(self, at_most: int) -> dict[str, tuple[Stuck, ...]]:
        """The latest requests in flight that were reported as stuck, by root."""
        roots = list(self._stuck)[-at_most:]
        return {root: self._stuck[root] for root in roots if root in self._open}

    # -- output ------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_done(self) -> int:
        """Requests known to be finished that `finished` has not returned yet, at most."""
        return len(self._done)

    def is_open(self, root_span_id: str) -> bool:
        """Whether a request is in flight."""
        return root_span_id in self._open

    def open_ids(self) -> list[str]:
        """Request ids of what is in flight, oldest first; callers may have used one twice."""
        return [request.context.request_id for request in self._open.values()]

    def held_in(self, ring: str) -> list[str]:
        """Ids of the requests in flight that a ring's process has not let go of."""
        legs = [leg for leg in self._rings[ring].keys.values() if leg is not None]
        return [self._open[leg.root].context.request_id for leg in legs]

    def attempt_at(self, ring: str, key: int) -> tuple[RequestContext, str] | None:
        """The request in flight and the attempt's span id that a key of a ring stands for."""
        leg = self._rings[ring].keys.get(key)
        if leg is None:
            return None
        request = self._open[leg.root]
        ids = (request.ids or {}).get(leg.attempt)
        return request.context, request.context.attempt_span_id if ids is None else ids.span_id

    def open_roots(self) -> list[str]:
        """Root span ids of what is in flight, oldest first."""
        return list(self._open)

    def in_flight(self, now_ns: int, roots: Iterable[str] | None = None) -> list[InFlight]:
        """Every request in flight as it stands, oldest first.

        now_ns  CLOCK_MONOTONIC of the gateway's host, or of this host where no gateway is known
        roots   only these of them, for who cannot wait for all at once
        """
        only, to_home, opened = self._only_ones(), self._to_home, self._open
        shown = opened if roots is None else [root for root in roots if root in opened]
        lost = self._lost_by_gateways
        return [opened[root].look(now_ns, to_home, only, lost=lost(opened[root])) for root in shown]

    def peek(self, request_id: str, now_ns: int) -> list[CollectedRequest]:
        """What is known of the requests in flight with that id; they stay in flight.

        now_ns  as for `in_flight`
        """
        return [
            request.collected(gave_up=None, resolve=self._resolve, open_at_ns=now_ns)
            for request in self._open.values()
            if request.context.request_id == request_id
        ]

    def finished(
        self,
        now_ns: int,
        *,
        at_most: int | None = None,
        gateways_behind: bool = False,
        halted: Halted = _nothing_known,
    ) -> list[CollectedRequest]:
        """Requests whose spans can be built, oldest first. Each is returned once.

        at_most          requests to return; the others stay in flight until the next call
        gateways_behind  not all that the gateways wrote was read: what is missing may be there, so
                         that nobody is given up
        halted           asked about those who are about to be given up
        """
        if not self._done:
            self._decide(now_ns, gateways_behind, cache(halted))
        finished: list[CollectedRequest] = []
        while self._done and (at_most is None or len(finished) < at_most):
            request, gave_up = self._done.popleft()
            root = request.context.root_span_id
            # What was read since may have changed it.
            if root not in self._changed and self._open.get(root) is request:
                finished.append(self._finish(request, gave_up))
        return finished

    def _decide(self, now_ns: int, gateways_behind: bool, halted: Halted) -> None:
        done: list[tuple[OpenRequest, str | None]] = []
        instances = self._instances()
        changed, self._changed = self._changed, {}
        due = self._due
        while due and due[0][0] <= now_ns:
            _, _, root = heapq.heappop(due)
            request = self._open.get(root)
            if request is not None:
                request.due_ns = None
                changed[root] = None
        for root in changed:
            request = self._open.get(root)
            if request is None:
                continue
            is_done, gave_up, due_ns = self._verdict(request, instances, now_ns, halted)
            if is_done and gateways_behind and (gave_up or not request.has_gateway):
                is_done, due_ns = False, now_ns + self._grace_ns
            if is_done:
                done.append((request, gave_up))
            elif due_ns is not None and (request.due_ns is None or due_ns < request.due_ns):
                request.due_ns = due_ns
                heapq.heappush(due, (due_ns, request.begun, root))
        done.sort(key=lambda pair: pair[0].begun)
        excess = len(self._open) - len(done) - self._max_open
        if excess > 0:
            self.counts.evicted += excess
            decided = {id(request) for request, _ in done}
            oldest = (one for one in self._open.values() if id(one) not in decided)
            done += ((one, "too many requests in flight") for one in islice(oldest, excess))
        self._done.extend(done)

    def finish_ended(
        self, now_ns: int, *, at_most: int | None = None, halted: Halted = _nothing_known
    ) -> list[CollectedRequest]:
        """Requests that have ended, without waiting for their legs, oldest first; the others stay
        in flight."""
        instances, halted = self._instances(), cache(halted)
        ended = [request for request in self._open.values() if request.ended_ns is not None]
        finished: list[CollectedRequest] = []
        for request in sorted(ended, key=attrgetter("begun"))[:at_most]:
            waiting = self._still_waits_for(request, instances)
            self._look_at(waiting, instances, request, now_ns, halted)
            finished.append(self._finish(request, _not_finished(waiting, request, now_ns)))
        return finished

    # -- inside ------------------------------------------------------------------------------

    def _name(self, ring: _Ring, record: OpenRecord, now_ns: int) -> bool:
        """Binds a key; whether its request is in flight and appears in this ring."""
        key, context = record.key, record.context
        ring.last_key = max(ring.last_key, key)
        if ring.named is not None:
            ring.named.add(key)
        if ring.keys.get(key) is not None:
            return False  # repeated so that it stays in the ring
        root = context.root_span_id
        finished, attempt_id = self._finished, context.attempt_span_id
        if root in finished or attempt_id in finished:
            ring.keys[key] = None
            if not (finished.get(root) or finished.get(attempt_id)):
                ring.again.add(key)
            self._drop_unnamed(ring, key)
            return False
        t_ns = self._to_home(ring.source, record.t_ns)
        attempt = max(context.attempt, 1)
        request = self._open.get(root)
        if request is None:
            self._begun += 1
            request = OpenRequest(
                context=context,
                begun=self._begun,
                begun_ns=t_ns,
                touched_ns=now_ns,
                progress=Progress(plan_of(context.mode), attempt),
                legs=[],
                stuck=self._stuck.get(root, ()),
            )
            self._open[root] = request
            self._remember_root(context.request_id, context.trace_id, root)
        elif attempt > request.progress.attempt:
            request.progress.begin_attempt(attempt, t_ns)
        request.begun_ns = min(request.begun_ns, t_ns)
        request.touched_ns = now_ns
        leg = ring.keys[key] = request.add_leg(key, ring.source, context)
        if request.outcome is None and ring.is_gateway:
            request.ended_ns = None  # it goes on
        if record.repeated:  # its begin is among what is missing
            leg.missed_before = min(leg.missed_before, ring.missed_before(record.t_ns))
        self._changed[root] = None
        for mark in ring.unnamed.pop(key, ()):
            ring.num_unnamed -= 1
            self._mark(ring, mark, now_ns)
        return True

    def _mark(self, ring: _Ring, record: MarkRecord, now_ns: int) -> None:
        t_ns, key, mark = record.t_ns, record.key, record.mark
        if t_ns > ring.last_ns:  # noqa: PLR1730 a tenth of the time of max()
            ring.last_ns = t_ns
        leg = ring.keys.get(key)
        if leg is None:
            self._mark_without_request(ring, record)
            return
        request = self._open[leg.root]
        request.touched_ns = now_ns
        if ring.source.is_foreign:
            t_ns = self._to_home(ring.source, t_ns)
        request.progress.reach(mark, record.attempt or 1, t_ns)
        if mark in TELLING_MARKS:
            request.told(leg, record, self._to_home)
            if mark is _COMPLETED:
                request.ended_ns = now_ns
                self._changed[leg.root] = None
        if (
            request.num_marks >= MAX_MARKS
            and mark is not _COMPLETED
            and (mark in _NUMEROUS_MARKS or request.num_marks >= MAX_MARKS + ROOM_FOR_STAGES)
        ):
            self.counts.overgrown += 1
            leg.overgrown += 1
            return
        if mark in _RECURRING_MARKS:
            self._shared.share(record)
        record.key = leg.key  # one number object for all its marks
        request.num_marks += 1
        leg.marks.append(record)

    def _mark_without_request(self, ring: _Ring, record: MarkRecord) -> None:
        key = record.key
        if key in ring.keys:
            self.counts.late += key not in ring.again
        elif key > ring.handled_key:
            if ring.num_unnamed < MAX_UNNAMED:
                ring.unnamed.setdefault(key, []).append(record)
                ring.num_unnamed += 1
            else:
                self.counts.unnamed += 1

    def _step(self, ring: _Ring, record: StepRecord) -> None:
        keys = ring.keys
        kind, number = record.kind, record.number
        length_ns = max(record.end_ns - record.begin_ns, 0)
        for key in record.members:
            leg = keys.get(key)
            if leg is not None:
                leg.take_step(kind, number, length_ns)

    def _release(self, ring: _Ring, key: int, now_ns: int) -> None:
        if key not in ring.keys:
            self._drop_unnamed(ring, key)
            return
        leg = ring.keys.pop(key)
        if leg is None:
            ring.again.discard(key)
            return
        request = self._open[leg.root]
        leg.is_held = False
        leg.missed_until = ring.source.num_missed
        request.num_held -= 1
        request.touched_ns = now_ns
        if (
            ring.source.process.role is Role.GATEWAY
            and request.ended_ns is None
            and not request.is_held_by_gateway
        ):
            request.ended_ns = now_ns
        self._changed[leg.root] = None

    def _drop_unnamed(self, ring: _Ring, key: int) -> None:
        dropped = len(ring.unnamed.pop(key, ()))
        ring.num_unnamed -= dropped
        self.counts.unnamed += dropped

    def _only_ones(self) -> dict[Role, str]:
        """The instance of each role that has but one."""
        found: dict[Role, set[str]] = {}
        for ring in self._rings.values():
            process = ring.source.process
            found.setdefault(process.role, set()).add(process.instance)
        return {role: next(iter(names)) for role, names in found.items() if len(names) == 1}

    def _instances(self) -> Mapping[str, str]:
        """The ring of each instance."""
        return {ring.source.process.instance: name for name, ring in self._rings.items()}

    def _verdict(
        self, request: OpenRequest, instances: Mapping[str, str], now_ns: int, halted: Halted
    ) -> tuple[bool, str | None, int | None]:
        """Whether a request is finished, what is missing of it, and when time alone finishes it."""
        silent_at_ns = request.touched_ns + self._grace_ns
        if request.ended_ns is None:
            if request.has_gateway or request.num_held:
                return False, None, None
            return now_ns >= silent_at_ns, self._lost_by_gateways(request), silent_at_ns
        waiting = self._still_waits_for(request, instances)
        if not waiting and now_ns < silent_at_ns and self._is_between_attempts(request):
            return False, None, silent_at_ns
        if not waiting and self._expects_round_trip(request):
            # Whether a clock was set during the request is known with the round trip after it.
            due_ns = request.ended_ns + self._grace_ns
            if now_ns < due_ns:
                self._unmeasured[request.context.root_span_id] = None
                return False, None, due_ns
        due_ns = request.ended_ns + self._grace_ns * MAX_GRACES
        if not request.num_held:
            # A worker that lives and holds a leg is silent during a long step, no more.
            due_ns = min(due_ns, silent_at_ns)
        if waiting and now_ns >= due_ns:
            self._look_at(waiting, instances, request, now_ns, halted)
            if request.halted_ns is not None:
                # What it writes once it goes on takes a moment to come.
                until_ns = request.halted_ns + 2 * self._grace_ns
                until_ns = min(until_ns, request.ended_ns + self._grace_ns * MAX_HALTED_GRACES)
                if now_ns < until_ns:
                    return False, None, min(until_ns, now_ns + self._grace_ns)
        return not waiting or now_ns >= due_ns, _not_finished(waiting, request, now_ns), due_ns

    def _look_at(
        self,
        waiting: Iterable[str],
        instances: Mapping[str, str],
        request: OpenRequest,
        now_ns: int,
        halted: Halted,
    ) -> None:
        """Keeps which of those that a request waits for are kept from running."""
        for instance in waiting:
            ring = instances.get(instance)
            how = None if ring is None else halted(ring)
            if how is not None:
                request.halted[instance] = how, now_ns
                request.halted_ns = now_ns

    def _keep_gaps(self, name: str, ring: _Ring) -> None:
        """Also for the time after the ring is gone."""
        if name in self._gaps and self._gaps[name][1] is ring.gaps:
            return
        self._gaps[name] = ring.source.process, ring.gaps
        if len(self._gaps) > MAX_GAPPED:
            del self._gaps[next(iter(self._gaps))]

    def _lost_by_gateways(self, request: OpenRequest) -> str | None:
        """Which gateways of this host may have written what nobody has read of a request that none
        is known to have had: they lost records of the time in which it appeared elsewhere."""
        if request.has_gateway:
            return None
        lost: list[str] = []
        for process, gaps in self._gaps.values():
            on_its_clock = (
                leg.marks[0].t_ns
                for leg in request.legs
                if leg.marks and leg.source.process.clock_id == process.clock_id
            )
            count = max((_lost_at(t_ns, gaps) for t_ns in on_its_clock), default=0)
            if count:
                lost.append(f"{process.instance} lost {count} records")
        return "; ".join(lost) or None

    def _is_between_attempts(self, request: OpenRequest) -> bool:
        """Whether a gateway that lives let go of an attempt without a word on the request, as far
        as all that it wrote was read: the next attempt may be a moment away."""
        if request.outcome is not None:
            return False
        for leg in request.legs:
            ring = self._rings.get(leg.source.ring)
            if leg.role is Role.GATEWAY and ring is not None and ring.source is leg.source:
                return leg.missed_until == leg.missed_before
        return False

    def _expects_round_trip(self, request: OpenRequest) -> bool:
        """Whether a process of another host, which lives and measures, has not done so since."""
        for leg in request.legs:
            source = leg.source
            if not source.is_foreign or source.sampled_ns is None or not leg.marks:
                continue
            ring = self._rings.get(source.ring)
            lives = ring is not None and ring.source is source
            if lives and source.sampled_ns < leg.marks[-1].t_ns:
                return True
        return False

    def _still_waits_for(self, request: OpenRequest, instances: Mapping[str, str]) -> list[str]:
        """Who has not let go of an ended request, or has not been heard of it."""
        heard = {leg.source.process.instance for leg in request.legs}
        waiting = {leg.source.process.instance for leg in request.legs if leg.is_held}
        waiting |= {name for name in request.expected if name in instances} - heard
        return sorted(waiting)

    def _finish(self, request: OpenRequest, gave_up: str | None) -> CollectedRequest:
        root = request.context.root_span_id
        del self._open[root]
        self._stuck.pop(root, None)
        self._unmeasured.pop(root, None)
        for leg in request.legs:
            ring = self._rings.get(leg.source.ring) if leg.is_held else None
            if ring is not None and ring.source is leg.source:
                ring.keys[leg.key] = None
        self._finished.keep(root, True)
        self.counts.requests += 1
        return request.collected(gave_up=gave_up, resolve=self._resolve)

    def _remember_root(self, request_id: str, trace_id: str, root_span_id: str) -> None:
        try:
            ids = bytes.fromhex(trace_id + root_span_id)
        except ValueError:
            return  # no ids of ours: nothing to link to
        self._roots.keep(request_id, ids)

    def _resolve(self, request_id: str) -> tuple[str, str] | None:
        """Trace id and root span id of the latest request with that id."""
        ids = self._roots.get(request_id)
        return None if ids is None else (ids[:16].hex(), ids[16:].hex())

    def _to_home(self, source: Source, t_ns: int) -> int:
        return t_ns if self._home is None else source.to_home(t_ns, self._home, self._sources)

    def _sources(self) -> Iterable[Source]:
        return (ring.source for ring in self._rings.values())


def _not_finished(waiting: Iterable[str], request: OpenRequest, now_ns: int) -> str | None:
    """What is missing of a request, a clause for each group of those that did not finish."""
    running = [name for name in waiting if name not in request.halted]
    clauses = [f"{', '.join(running)} did not finish"] if running else []
    for name in waiting:
        if name in request.halted:
            how, at_ns = request.halted[name]
            clauses.append(f"{name} did not finish: it {'is' if at_ns == now_ns else 'was'} {how}")
    return "; ".join(clauses) or None
