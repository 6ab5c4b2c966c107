"""Follows requests through the records of many rings until their spans can be built.

Owns which request is open, which legs it still waits for, and when to stop waiting. A plain state
machine: the caller feeds records and the time; it reads no files and no clock.

    OPEN (the first of a request)                                     → open
    COMPLETED, or the gateway let go of it or died
        and every leg let go, and those it was routed to were heard   → finished
        else, ten times `grace_ns` after the end, or after `grace_ns`
        of silence if nobody is known to hold it                      → finished, incomplete
    no gateway on this host: every leg let go, `grace_ns` of silence  → finished
    more than `max_open` requests                                     → the oldest, incomplete

What arrives for a finished request is late: counted, not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pdtrace import semconv as a
from pdtrace.collected import AttemptIds, CollectedRequest, Leg, Process
from pdtrace.propagation import RequestContext
from pdtrace.ring.records import EndRecord, MarkRecord, OpenRecord, Record
from pdtrace.stages import MARKS, Mark, Role

DEFAULT_GRACE_NS = 1_000_000_000
MAX_GRACES = 10
DEFAULT_MAX_OPEN = 50_000
MAX_REMEMBERED = 100_000
"""Finished requests remembered, to tell late records from records of unknown requests."""
MAX_MARKS = 20_000
"""Marks kept of one request; what is more counts as missed."""
MAX_UNNAMED = 10_000
"""Marks kept of one ring whose OPEN record has not been read."""

_PREFILL_AT = MARKS[Mark.ROUTED].attrs.index(a.PREFILL_WORKER)
_DECODE_AT = MARKS[Mark.ROUTED].attrs.index(a.DECODE_WORKER)

_K = TypeVar("_K")
_V = TypeVar("_V")


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


@dataclass(slots=True)
class _Open:
    context: RequestContext
    begun: int  # order of appearance
    touched_ns: int
    attempts: dict[int, AttemptIds] = field(default_factory=dict[int, AttemptIds])
    legs: dict[str, Leg] = field(default_factory=dict[str, Leg])
    held: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    expected: set[str] = field(default_factory=set[str])
    blockers: set[str] = field(default_factory=set[str])
    num_marks: int = 0
    ended_ns: int | None = None
    has_gateway: bool = False


@dataclass(slots=True)
class _Ring:
    process: Process
    handled_key: int = 0
    last_key: int = 0
    keys: dict[int, _Open | None] = field(default_factory=dict[int, "_Open | None"])
    unnamed: dict[int, list[MarkRecord]] = field(default_factory=dict[int, list[MarkRecord]])
    num_unnamed: int = 0
    last_ns: int = 0


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
        self._open: dict[str, _Open] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._roots: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._begun = 0

    # -- input -------------------------------------------------------------------------------

    def add_ring(self, ring: str, process: Process, *, handled_key: int = 0) -> None:
        """A ring that records will come from.

        handled_key  last key that a former tracker saw (`last_key`): unless their OPEN records come
                     again, its requests and those before are finished
        """
        self._rings[ring] = _Ring(process, handled_key, handled_key)

    def last_key(self, ring: str) -> int:
        """The highest key that `ring` gave to a request."""
        return self._rings[ring].last_key

    def remember_finished(self, span_ids: Iterable[str]) -> None:
        """Span ids of roots or attempts that were exported before: their records are late."""
        for span_id in span_ids:
            _keep(self._finished, span_id, None)

    def feed(self, ring: str, records: Iterable[Record], now_ns: int) -> list[str]:
        """Records of one ring in the order written; the requests that appeared in it, by root."""
        source = self._rings[ring]
        appeared: list[str] = []
        for record in records:
            if isinstance(record, MarkRecord):
                self._mark(ring, source, record, now_ns)
            elif isinstance(record, OpenRecord):
                if self._name(ring, source, record, now_ns):
                    appeared.append(record.context.root_span_id)
            elif isinstance(record, EndRecord):
                self._release(ring, source, record.key, now_ns)
        return appeared

    def records_missed(self, ring: str, count: int) -> None:
        """`count` records of a ring were overwritten or torn before they could be read."""
        for request in self._in_ring(ring):
            request.legs[ring].records_missed += count

    def ring_gone(self, ring: str, gone_ns: int | None, reason: str) -> None:
        """The process of a ring, which has been read to its end, records no more.

        gone_ns  when it was found gone; None if that was not observed: the last record then counts
        """
        source = self._rings.pop(ring)
        at_ns = max(source.last_ns, gone_ns or 0)
        for request in self._in_ring(ring):
            leg = request.legs[ring]
            if any(held_ring == ring for held_ring, _ in request.held):
                leg.lost_at_ns = at_ns
                leg.lost_reason = reason
                request.held = {held for held in request.held if held[0] != ring}
                if leg.process.role is Role.GATEWAY and request.ended_ns is None:
                    request.ended_ns = at_ns
            request.expected.discard(leg.process.instance)
        self.counts.unnamed += source.num_unnamed

    # -- output ------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, root_span_id: str) -> bool:
        """Whether a request is in flight."""
        return root_span_id in self._open

    def finished(self, now_ns: int) -> list[CollectedRequest]:
        """Requests whose spans can be built, oldest first. Each is returned once."""
        done: list[CollectedRequest] = []
        instances = {ring.process.instance for ring in self._rings.values()}
        for root_id, request in list(self._open.items()):
            silent = now_ns - request.touched_ns >= self._grace_ns
            if request.ended_ns is None:
                if silent and not request.has_gateway and not request.held:
                    done.append(self._finish(root_id, None))
                continue
            missing = self._still_waits_for(request, instances)
            overdue = now_ns - request.ended_ns >= self._grace_ns * MAX_GRACES
            # A worker that lives and holds a leg is silent during a long step, no more.
            unheard = silent and not request.held
            if missing is None or unheard or overdue:
                done.append(self._finish(root_id, missing))
        while len(self._open) > self._max_open:
            self.counts.evicted += 1
            done.append(self._finish(next(iter(self._open)), "too many requests in flight"))
        return done

    def finish_ended(self) -> list[CollectedRequest]:
        """Requests that have ended, without waiting for their legs; the others stay in flight."""
        instances = {ring.process.instance for ring in self._rings.values()}
        return [
            self._finish(root_id, self._still_waits_for(request, instances))
            for root_id, request in list(self._open.items())
            if request.ended_ns is not None
        ]

    # -- inside ------------------------------------------------------------------------------

    def _in_ring(self, ring: str) -> Iterator[_Open]:
        return (request for request in self._open.values() if ring in request.legs)

    def _name(self, ring: str, source: _Ring, record: OpenRecord, now_ns: int) -> bool:
        """Binds a key; whether its request is in flight and appears in this ring."""
        key, context = record.key, record.context
        source.last_key = max(source.last_key, key)
        if source.keys.get(key) is not None:
            return False  # repeated so that it stays in the ring
        if context.root_span_id in self._finished or context.attempt_span_id in self._finished:
            source.keys[key] = None
            self._drop_unnamed(source, key)
            return False
        request = self._open.get(context.root_span_id)
        if request is None:
            self._begun += 1
            request = _Open(context, self._begun, now_ns)
            self._open[context.root_span_id] = request
            _keep(self._roots, context.request_id, (context.trace_id, context.root_span_id))
        source.keys[key] = request
        request.held.add((ring, key))
        request.touched_ns = now_ns
        request.attempts[max(context.attempt, 1)] = AttemptIds(
            span_id=context.attempt_span_id, handoff_id=context.handoff_id or None
        )
        if ring not in request.legs:
            request.legs[ring] = Leg(process=source.process)
            request.has_gateway = request.has_gateway or source.process.role is Role.GATEWAY
        for mark in source.unnamed.pop(key, ()):
            source.num_unnamed -= 1
            self._mark(ring, source, mark, now_ns)
        return True

    def _mark(self, ring: str, source: _Ring, record: MarkRecord, now_ns: int) -> None:
        source.last_ns = max(source.last_ns, record.t_ns)
        key = record.key
        if key not in source.keys:
            if key <= source.handled_key:
                return
            if source.num_unnamed < MAX_UNNAMED:
                source.unnamed.setdefault(key, []).append(record)
                source.num_unnamed += 1
            else:
                self.counts.unnamed += 1
            return
        request = source.keys[key]
        if request is None:
            self.counts.late += 1
            return
        leg = request.legs[ring]
        request.touched_ns = now_ns
        if request.num_marks >= MAX_MARKS and record.mark is not Mark.COMPLETED:
            self.counts.overgrown += 1
            leg.records_missed += 1
            return
        request.num_marks += 1
        leg.marks.append(record)
        if record.mark is Mark.COMPLETED:
            request.ended_ns = now_ns
        elif record.mark is Mark.ROUTED and len(record.values) > max(_PREFILL_AT, _DECODE_AT):
            workers = (record.values[_PREFILL_AT], record.values[_DECODE_AT])
            request.expected.update(str(worker) for worker in workers if worker)

    def _release(self, ring: str, source: _Ring, key: int, now_ns: int) -> None:
        if key not in source.keys:
            self._drop_unnamed(source, key)
            return
        request = source.keys.pop(key)
        if request is None:
            return
        request.held.discard((ring, key))
        request.touched_ns = now_ns
        gateway = source.process.role is Role.GATEWAY
        if gateway and request.ended_ns is None and not self._gateway_holds(request):
            request.ended_ns = now_ns

    def _gateway_holds(self, request: _Open) -> bool:
        return any(request.legs[ring].process.role is Role.GATEWAY for ring, _ in request.held)

    def _drop_unnamed(self, source: _Ring, key: int) -> None:
        dropped = len(source.unnamed.pop(key, ()))
        source.num_unnamed -= dropped
        self.counts.unnamed += dropped

    def _still_waits_for(self, request: _Open, instances: set[str]) -> str | None:
        """Who has not let go of an ended request, or has not been heard of it; None if nobody."""
        holding = {request.legs[ring].process.instance for ring, _ in request.held}
        heard = {leg.process.instance for leg in request.legs.values()}
        waiting = holding | (request.expected & instances - heard)
        return f"{', '.join(sorted(waiting))} did not finish" if waiting else None

    def _finish(self, root_id: str, gave_up: str | None) -> CollectedRequest:
        request = self._open.pop(root_id)
        for ring, key in request.held:
            if ring in self._rings:
                self._rings[ring].keys[key] = None
        _keep(self._finished, root_id, None)
        self.counts.requests += 1
        context = request.context
        names = {
            str(value)
            for leg in request.legs.values()
            for record in leg.marks
            if record.mark is Mark.WAITING
            for attr, value in zip(MARKS[Mark.WAITING].attrs, record.values, strict=False)
            if attr is a.WAIT_BLOCKER and value
        }
        return CollectedRequest(
            request_id=context.request_id,
            trace_id=context.trace_id,
            root_span_id=context.root_span_id,
            client_parent_span_id=context.client_parent_span_id,
            sampled=context.sampled,
            trace_state=context.tracestate,
            mode=context.mode,
            attempts=request.attempts,
            legs=list(request.legs.values()),
            gave_up=gave_up,
            blockers={name: self._roots[name] for name in names if name in self._roots},
        )


def _keep(memory: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Adds to a memory of the last `MAX_REMEMBERED`."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
