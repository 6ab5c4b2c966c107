"""Records what a process does to its requests, cheaply enough for a scheduler loop.

    recorder = Recorder.open("run/rings", role=Role.DECODE, instance="decode-0")
    trace = recorder.begin(context)           # the RequestContext that the message carries
    trace.mark(Mark.RESERVE_RECEIVED)         # an instant: the clock's reading, or at_ns=
    trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=12, free=3, blocker="req-7")
    trace.mark(Mark.PAGES_RESERVED, 12, 188)  # values in the order of MARKS[mark].attrs
    trace.abort(Outcome.CANCELLED, "client_disconnected", by="client")
    trace.end()                               # this process lets go of the attempt
    recorder.step(StepKind.DECODE, traces, tokens=8, begin_ns=..., end_ns=...)  # a forward pass
    recorder.gauge(Gauge.KV_PAGES_FREE, 188)  # in place, readable while this process hangs
    recorder.gauges((Gauge.RUNNING, Gauge.WAITING), (8, 0))  # several in one call
    recorder.close()                          # clean shutdown; without it the agent sees a death

    Recorder.disabled()                       # the same interface, records nothing

Rules
- One recorder for each thread that records; a second thread is refused (and counted), gauges apart.
- begin() once per request, attempt and process; end() exactly when the process forgets the attempt.
- Recording calls never raise while serving: an error is logged once per kind, counted in the ring's
  header, and the call returns. With PDTRACE_RAISE=1 or raise_errors=True they raise, for tests.
- Recorder.open raises RingCreateError when the ring cannot be made; the caller decides what then.
- After a fork the child records into a ring of its own, made at its first begin() or gauge().
  Requests begun before the fork stay the parent's: what the child marks on them is dropped and
  counted.
- Recording keeps within a budget of CPU time: beyond it steps, waits and attributes are left out,
  in this order, and counted (`pdtrace.budget`). Marks never are.
- A finished file belongs to whoever collects it (`pdtrace agent`); nothing here deletes rings.

Cost on one core of a 2020s server: 0.15 µs a mark, 0.3 µs with four numbers, 2 µs a step; without
the C extension (`pdtrace.native`) 0.9 and 1.3 µs (`benchmarks/bench_recording.py`).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NoReturn

from pdtrace.budget import DEFAULT_BUDGET, Costs, Detail, read_budget
from pdtrace.calibration import MEMBERS, measure_costs
from pdtrace.clock import SYSTEM_CLOCK, Clock
from pdtrace.errors import PdtraceError, RecordError, RingClosedError, RingCreateError
from pdtrace.marking import Marking
from pdtrace.propagation import RequestContext
from pdtrace.ring.codec import (
    build_encoders,
    encode_clock,
    encode_open,
    encode_step,
    fit_ids,
    pack_head,
)
from pdtrace.ring.files import create_ring
from pdtrace.ring.identity import make_identity, resource_from_env
from pdtrace.ring.layout import KIND_END, Counter, ResourceValue, RingCapacity
from pdtrace.ring.records import Value
from pdtrace.ring.writer import RingWriter
from pdtrace.shedding import Shedding
from pdtrace.stages import Gauge, Mark, Outcome, Role, StepKind, WaitReason

RAISE_VARIABLE = "PDTRACE_RAISE"
MAX_BLOCKERS = 4
"""Request ids that a wait keeps."""
WAIT_REFRESH_NS = 100_000_000
"""A wait whose numbers alone change is recorded again at most this often."""

_FULL, _WAITS = int(Detail.FULL), int(Detail.WAITS)
_SHED: tuple[int | None, ...] = ()  # numbers of a wait that was left out: equal to none
_DROPPED = "dropped"  # logged once, as each kind of error is

_logger = logging.getLogger(__name__)
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


class RequestTrace(Marking):
    """One attempt of one request in one process; made by `Recorder.begin`. Usable as a context
    manager that ends it.

    context  identity, to embed in wire messages and log lines
    key      number of this attempt in its ring
    """

    __slots__ = (
        "_numbers",
        "_recorder",
        "_shedding",
        "_wait_ns",
        "context",
        "open_block",
        "opened_ns",
    )

    def __init__(
        self,
        recorder: Recorder,
        context: RequestContext,
        key: int,
        opened_ns: int,
        *,
        append: Callable[[bytes], None],
        kinds: Sequence[int | None],
        shedding: Shedding,
    ) -> None:
        self.context = context
        self.key = key
        self.opened_ns = opened_ns
        self.open_block = 0  # block of the ring that holds the latest OPEN record
        self.ring = None
        self._recorder = recorder
        self._role = recorder.role
        self._append = append
        self._encoders = shedding.encoders
        self._kinds = kinds
        self._shedding = shedding
        self._attempt = min(max(context.attempt, 0), 2**32 - 1)
        self._now = recorder.clock.monotonic_ns
        self._fail = recorder.report
        self._cause = None
        self._numbers: tuple[int | None, ...] = ()
        self._wait_ns = 0

    def wait(
        self,
        stage: str,
        reason: WaitReason,
        *,
        needed: int | None = None,
        free: int | None = None,
        limit: int | None = None,
        position: int | None = None,
        blocker: str | Sequence[str] | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Say why the request waits; cheap to call on every scheduling decision.

        Recorded when `stage`, `reason` or `blocker` differ from the last call or a mark came since,
        and when only the numbers differ at most every WAIT_REFRESH_NS. Units: see `WaitReason`.

        blocker  request id that is in the way, where known; or several, the most important first,
                 of which the first MAX_BLOCKERS are kept
        """
        try:
            if blocker is not None and not isinstance(blocker, str):
                blocker = tuple(islice(blocker, MAX_BLOCKERS))
            cause = (stage, reason, blocker)
            numbers = (needed, free, limit, position)
            if cause == self._cause:
                if numbers == self._numbers:
                    return
                if at_ns is None:
                    at_ns = self._now()
                if at_ns - self._wait_ns < WAIT_REFRESH_NS:
                    return
            elif at_ns is None:
                at_ns = self._now()
            shedding = self._shedding
            if shedding.detail < _WAITS:
                if cause != self._cause or self._numbers is not _SHED:
                    shedding.shed_wait()
                # Said again, and recorded if there is room by then, after WAIT_REFRESH_NS.
                self._cause, self._numbers, self._wait_ns = cause, _SHED, at_ns
                return
            shedding.recorded_wait()
            blockers: str | None = None
            if isinstance(blocker, tuple):
                blocker, blockers = self._recorder.name_blockers(blocker)
        except Exception as error:  # the guard: telemetry never reaches the request
            self._fail(error)
            return
        self.mark(
            Mark.WAITING,
            stage,
            reason,
            needed,
            free,
            limit,
            position,
            blocker,
            blockers,
            at_ns=at_ns,
        )
        self._cause = cause
        self._numbers = numbers
        self._wait_ns = at_ns

    def abort(
        self, outcome: Outcome, reason: str, by: str | None = None, *, at_ns: int | None = None
    ) -> None:
        """This process gives the attempt up; its open stage ends here. Follow with end().

        reason  stable code, `kv_timeout`
        by      who ended it: client, gateway, a worker id
        """
        self.mark(Mark.ABORTED, outcome, reason, by, at_ns=at_ns)

    def end(self, *, at_ns: int | None = None) -> None:
        """Let go of the attempt: nothing more will be recorded for it here. Idempotent."""
        self._recorder.finish(self, at_ns)

    def detach(self, append: Callable[[bytes], None]) -> None:
        """Send further records elsewhere; for `Recorder`."""
        self._append = append
        self.ring = None

    def write_open(self, *, repeated: bool = False) -> int:
        """Append this attempt's OPEN record; returns how many strings were cut. For `Recorder`."""
        body, truncated = encode_open(self.context, self.key, self.opened_ns, repeated=repeated)
        self._append(body)
        return truncated

    def __enter__(self) -> RequestTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Recorder:
    """The recording side of one thread of one process. Make one with `open` or `disabled`.

    role      of this process: decides which marks it may record
    instance  worker id
    clock     read once for each mark without at_ns
    path      the ring file, None for memory or when disabled
    clock_id  `<host id>/<boot id>`: processes with equal ones share CLOCK_MONOTONIC; "" when
              disabled
    """

    enabled = True

    def __init__(
        self,
        role: Role,
        instance: str,
        make_ring: Callable[[], tuple[RingWriter, Path | None]],
        *,
        clock: Clock,
        raise_errors: bool,
        budget: float | None = None,
    ) -> None:
        self.role = role
        self.instance = instance
        self.clock = clock
        self.path: Path | None = None
        self.errors = 0
        """Errors that the guard swallowed, also those after close()."""
        self.dropped = 0
        """In a forked child: what it recorded on its parent's requests, with or without a ring."""
        self._make_ring = make_ring
        self._raise_errors = raise_errors
        self._logged: set[str] = set()
        self._next_key = 1
        self._steps = 0
        self._live: dict[int, RequestTrace] = {}  # oldest OPEN record first
        encoders = build_encoders(role, on_error=self.report, on_truncated=self._count_truncated)
        self._kinds = [None if one is None else kind for kind, one in enumerate(encoders)]
        self._shedding = Shedding(instance, encoders, share=budget, costs=recording_costs)
        self._closed = False
        self._ring: RingWriter | None = None
        self._attach_ring()
        _recorders.add(self)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        role: Role,
        instance: str,
        resource: Mapping[str, ResourceValue] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        capacity: RingCapacity | None = None,
        raise_errors: bool | None = None,
        budget: float | None = DEFAULT_BUDGET,
    ) -> Recorder:
        """Make `<directory>/<instance>-<pid>.ring` and record into it.

        instance      worker id: unique among the processes alive, stable in logs
        resource      OpenTelemetry resource attributes; they add to and win over those of
                      OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME. `service.name` defaults to
                      `pd-<role>`
        capacity      64 blocks of 64 KiB by default: about 100,000 marks before the oldest go
        raise_errors  None: as PDTRACE_RAISE says
        budget        share of one core that recording may take: beyond it steps, then waits, then
                      attributes are left out and counted; None: no limit. PDTRACE_BUDGET, a number
                      or `off`, has the last word

        Raises RingCreateError, also for a role or a budget that is none.
        """
        try:
            role = Role(role)  # callers without a type checker give its name
        except ValueError as error:
            known = ", ".join(Role)
            raise RingCreateError(f"role is {role!r}, expected one of {known}") from error
        try:
            share = read_budget(os.environ, budget)
        except ValueError as error:
            raise RingCreateError(str(error)) from error
        capacity = RingCapacity() if capacity is None else capacity
        attributes = {**resource_from_env(os.environ), **(resource or {})}

        def make_ring() -> tuple[RingWriter, Path]:
            identity = make_identity(role=role, instance=instance, resource=attributes, clock=clock)
            return create_ring(directory, identity, capacity)

        return cls(
            role,
            instance,
            make_ring,
            clock=clock,
            raise_errors=should_raise(raise_errors),
            budget=share,
        )

    @classmethod
    def disabled(cls) -> Recorder:
        """A recorder that records nothing and costs a call; for when recording is off."""
        return _DISABLED

    def begin(self, context: RequestContext, *, at_ns: int | None = None) -> RequestTrace:
        """Take up one attempt of a request in this process."""
        try:
            opened_ns = self.clock.monotonic_ns() if at_ns is None else at_ns
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)
            opened_ns = 0
        key = self._next_key
        self._next_key = key + 1
        ring = self._ring
        if ring is None:
            ring = self._attach_ring_after_fork()
        elif opened_ns >= self._shedding.due_ns:
            self._look()
        trace = RequestTrace(
            self,
            context,
            key,
            opened_ns,
            append=self._refuse if ring is None else self._append,
            kinds=self._kinds,
            shedding=self._shedding,
        )
        try:
            truncated = trace.write_open()
            if ring is not None:
                trace.open_block = ring.block
                trace.ring = ring
                self._live[key] = trace
                if truncated:
                    ring.count(Counter.TRUNCATED, truncated)
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)
        return trace

    def step(
        self,
        kind: StepKind,
        traces: Sequence[RequestTrace],
        *,
        tokens: int,
        begin_ns: int,
        end_ns: int,
    ) -> int:
        """Record a forward pass and who took part; returns its number in this ring, from 1.

        traces    attempts begun here and not ended: call this before the end() of those that finish
                  with the pass. Others count, but are not named
        tokens    computed in it: of prompts, or one for each member
        begin_ns  CLOCK_MONOTONIC nanoseconds, as is end_ns
        """
        number = self._steps = self._steps + 1
        try:
            if self._shedding.detail < _FULL:
                self._shedding.shed_step(len(traces))
                if end_ns >= self._shedding.due_ns:
                    self._look()
                return number
            ring = self._writer()
            members = [trace.key for trace in traces if trace.ring is ring]
            body = encode_step(
                kind, number, begin_ns, end_ns, tokens=tokens, members=members, size=len(traces)
            )
            ring.append(body)
            self._shedding.recorded_step(len(members))
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)
        return number

    def clock_sample(
        self,
        *,
        peer: str,
        peer_clock_id: str,
        offset_ns: int,
        error_ns: int,
        at_ns: int | None = None,
    ) -> None:
        """Record what a round trip to a process of another host said of that host's clock.

        peer           instance that answered
        peer_clock_id  its `Recorder.clock_id`
        offset_ns      the peer's CLOCK_MONOTONIC less this process's
        error_ns       half the round trip: the true offset is within
        """
        try:
            if at_ns is None:
                at_ns = self.clock.monotonic_ns()
            body, cut = encode_clock(peer, peer_clock_id, offset_ns, error_ns, at_ns)
            ring = self._writer()
            ring.append(body)
            if cut:
                ring.count(Counter.TRUNCATED)
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)

    def gauge(self, gauge: Gauge, value: int) -> None:
        """Set a gauge in the ring's header. Any thread."""
        try:
            ring = self._writer()
            if self._closed:
                raise RingClosedError(f"the recorder of {self.instance} is closed")
            ring.gauges[gauge] = value
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)

    def gauges(self, gauges: Sequence[Gauge], values: Sequence[int]) -> None:
        """Set several gauges, a value for each; costs little more than one. Any thread."""
        try:
            ring = self._writer()
            if self._closed:
                raise RingClosedError(f"the recorder of {self.instance} is closed")
            slots = ring.gauges
            for gauge, value in zip(gauges, values, strict=True):
                slots[gauge] = value
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)

    def close(self) -> None:
        """Mark the ring as closed cleanly and let go of it. Idempotent.

        Attempts not ended stay open in the ring: the agent reports them as such.
        """
        self._closed = True
        self._live.clear()
        if self._ring is not None:
            self._ring.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finish(self, trace: RequestTrace, at_ns: int | None) -> None:
        """Write `trace`'s END record; called by `RequestTrace.end`."""
        if self._live.pop(trace.key, None) is not trace:
            return
        try:
            if at_ns is None:
                at_ns = self.clock.monotonic_ns()
            if self._ring is not None:
                self._ring.append(pack_head(KIND_END, 0, 0, trace.key, at_ns))
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)
        trace.detach(_refuse_ended)

    def report(self, error: Exception) -> None:
        """The guard: count, log the first of each kind, go on; or raise when asked to."""
        self.errors += 1
        if self._ring is not None:
            self._ring.count(Counter.ERRORS)
        if self._raise_errors:
            raise error
        kind = error.code if isinstance(error, PdtraceError) else type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            _logger.warning(
                "recording failed, the request is not affected; further %s errors are only counted",
                kind,
                exc_info=error,
            )

    def name_blockers(self, ids: tuple[str, ...]) -> tuple[str | None, str | None]:
        """The first id, and all of them in one string if there are more; for `RequestTrace`."""
        if len(ids) < 2:
            return (ids[0] if ids else None), None
        joined, left_out = fit_ids(ids)
        if left_out and self._ring is not None:
            self._ring.count(Counter.TRUNCATED, left_out)
        return ids[0], joined

    def leave_to_parent(self) -> None:
        """In a forked child: touch the parent's ring no more."""
        if self._ring is not None:
            self._ring.abandon()
            self._ring = None
        self.path = None
        self._shedding.detach()
        self._steps = 0
        self.dropped = 0
        self._logged.discard(_DROPPED)
        for trace in self._live.values():
            trace.detach(self._drop)
        self._live.clear()

    def _attach_ring(self) -> RingWriter:
        ring, self.path = self._make_ring()
        ring.on_block = self._on_block
        self._ring = ring
        self._append = ring.append  # one for all traces: fewer objects to find in the caches
        self.clock_id = ring.identity.clock_id
        self._shedding.attach(ring, self.clock.monotonic_ns())
        return ring

    def _on_block(self) -> None:
        self._repeat_opens()
        self._look()

    def _look(self) -> None:
        try:
            self._shedding.look(self.clock.monotonic_ns())
        except Exception as error:  # the guard: telemetry never reaches the request
            self.report(error)

    def _writer(self) -> RingWriter:
        ring = self._ring or self._attach_ring_after_fork()
        if ring is None:
            self._refuse(b"")
        return ring

    def _attach_ring_after_fork(self) -> RingWriter | None:
        """A forked child's own ring, made when first needed; None when it cannot be made."""
        if self._closed:
            return None
        try:
            ring = self._attach_ring()
        except Exception as error:  # the guard: telemetry never reaches the request
            self._closed = True
            self.report(error)
            return None
        if self.dropped:
            ring.count(Counter.DROPPED, self.dropped)
        return ring

    def _repeat_opens(self) -> None:
        """Write again the OPEN records that the next block recycles, oldest first."""
        ring = self._ring
        if ring is None:
            return
        # Half a block at most, so that marks always find room in the block that has just begun.
        room = ring.block_room // 2
        limit = ring.block - ring.blocks + 1
        while self._live:
            trace = next(iter(self._live.values()))
            if trace.open_block > limit or ring.block_room < room:
                return
            del self._live[trace.key]
            trace.write_open(repeated=True)
            trace.open_block = ring.block
            self._live[trace.key] = trace

    def _count_truncated(self) -> None:
        if self._ring is not None:
            self._ring.count(Counter.TRUNCATED)

    def _drop(self, body: bytes) -> None:
        self.dropped += 1
        if self._ring is not None:
            self._ring.count(Counter.DROPPED)
        if _DROPPED not in self._logged:
            self._logged.add(_DROPPED)
            _logger.warning(
                "%s: a forked child recorded on a request that its parent began; that is dropped, "
                "and further records are only counted",
                self.instance,
            )

    def _refuse(self, body: bytes) -> NoReturn:
        raise RingClosedError(
            f"the recorder of {self.instance} is closed, or has no ring after a fork"
        )


def _refuse_ended(body: bytes) -> NoReturn:
    raise RecordError("the trace has ended: record before end()")


_NOTHING_SHED = Shedding("", ())


class _DisabledTrace(RequestTrace):
    __slots__ = ()

    def mark(self, mark: Mark, *values: Value, at_ns: int | None = None) -> None:
        pass

    def wait(self, stage: str, reason: WaitReason, **numbers: object) -> None:
        pass

    def abort(
        self, outcome: Outcome, reason: str, by: str | None = None, *, at_ns: int | None = None
    ) -> None:
        pass

    def end(self, *, at_ns: int | None = None) -> None:
        pass


class _DisabledRecorder(Recorder):
    enabled = False

    def __init__(self) -> None:
        self.role = Role.WORKER
        self.instance = ""
        self.clock = SYSTEM_CLOCK
        self.path = None
        self.errors = 0
        self.dropped = 0
        self.clock_id = ""

    def begin(self, context: RequestContext, *, at_ns: int | None = None) -> RequestTrace:
        return _DisabledTrace(
            self, context, 0, 0, append=_refuse_ended, kinds=(), shedding=_NOTHING_SHED
        )

    def step(
        self,
        kind: StepKind,
        traces: Sequence[RequestTrace],
        *,
        tokens: int,
        begin_ns: int,
        end_ns: int,
    ) -> int:
        return 0

    def clock_sample(
        self,
        *,
        peer: str,
        peer_clock_id: str,
        offset_ns: int,
        error_ns: int,
        at_ns: int | None = None,
    ) -> None:
        pass

    def gauge(self, gauge: Gauge, value: int) -> None:
        pass

    def gauges(self, gauges: Sequence[Gauge], values: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def report(self, error: Exception) -> None:
        pass


_DISABLED = _DisabledRecorder()


@cache
def recording_costs() -> Costs:
    """What recording costs in this process, measured at the first call (about 5 ms)."""
    capacity = RingCapacity(blocks=4)

    def make_ring() -> tuple[RingWriter, None]:
        identity = make_identity(role=Role.DECODE, instance="calibration", resource={})
        return RingWriter(bytearray(capacity.file_bytes), identity, capacity), None

    recorder = Recorder(
        Role.DECODE, "calibration", make_ring, clock=SYSTEM_CLOCK, raise_errors=True
    )
    with recorder:
        context = RequestContext.create()
        return measure_costs(recorder, [recorder.begin(context) for _ in range(MEMBERS)])


def should_raise(raise_errors: bool | None) -> bool:
    """`raise_errors`, or what PDTRACE_RAISE says when it is None."""
    if raise_errors is not None:
        return raise_errors
    return os.environ.get(RAISE_VARIABLE, "") not in ("", "0")


def _leave_rings_to_parent() -> None:
    for recorder in list(_recorders):
        recorder.leave_to_parent()


os.register_at_fork(after_in_child=_leave_rings_to_parent)
