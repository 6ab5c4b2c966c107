"""The transfer process: copy jobs in, KV pages moved, both legs told. One per host.

Owns the loop, the marks and the answers; how bytes move is a `KvTransfer`'s business. Messages come
from any leg in any order; within a leg's socket they keep theirs. Late and repeated messages are
ignored and counted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from pdtrace.clock import SYSTEM_CLOCK, Clock
from pdtrace.recorder import Recorder
from pdtrace.stages import Gauge, Mark, Outcome, Role, WaitReason
from pdtrace.stopping import Stop, StopFlag, stop_on_signals
from server.config import ProcessConfig
from server.errors import StartError
from server.heartbeat import HeartbeatThread, Progress
from server.injection.damage import FaultyShmTransfer, FaultyTcpTransfer
from server.injection.injector import Injector
from server.injection.process import heartbeat_outbox, make_injector, recorder_class, refuse
from server.injection.transfers import disturb, faulty_sink, faulty_source, faulty_transfer
from server.kv.transfer.base import (
    Copied,
    CopyState,
    Drained,
    Failed,
    KvTransfer,
    PageCopy,
    Reason,
    TransferError,
)
from server.kv.transfer.jobs import Failure, Job, JobTable, TransferHandoff
from server.kv.transfer.policy import COPIES_PER_ROUTE, CopyPlan, JobView, plan_copies
from server.kv.transfer.secret import shared_secret
from server.kv.transfer.shm import ShmTransfer
from server.kv.transfer.tcp import TcpTransfer
from server.log_fields import logged
from server.pauses import Pauses, PauseThread, never_paused
from server.readiness import announce_ready
from server.recording import open_recorder, process_clock, record_round_trip
from server.round_trips import RoundTrips
from server.said import Said, is_due
from server.standstill import Pause, Standstill
from server.wire.curve import load_keys
from server.wire.messages import (
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    HeartbeatAck,
    Peer,
    PoolRef,
    RegisterPool,
    WorkerLoad,
)
from server.wire.sockets import Inbox, Outbox, Received

IDLE_WAIT_S = 0.5
SWEEP_S = 1.0
GRACE_S = 1.0
"""How long what had begun may go on after SIGTERM."""
ACCEPT_S = 0.5
"""How much of that copies may still begin: the gateway starts no more requests, but legs that it
has started do not know."""
QUIET_S = 0.2
"""After so long without a copy nobody is expected to begin another."""
_TURN_S = 0.02
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
_QUEUE_STAGE = "transfer.queue"
_STAGE = "transfer"
_GAUGES = (Gauge.COPY_JOBS_WAITING, Gauge.COPIED_BYTES, Gauge.LAST_PROGRESS_NS)

_logger = logging.getLogger(__name__)


class MessageSource(Protocol):
    """Where messages come from; `server.wire.sockets.Inbox`."""

    def drain(self) -> list[Received]: ...


class MessageSink(Protocol):
    """Where messages go; `server.wire.sockets.Outbox`."""

    def send(self, endpoint: str, message: AnyMessage) -> bool: ...


class TransferWorker:
    """Runs copy jobs over `transfer`. Not thread-safe: one thread steps it.

    ignored       messages that changed nothing, by why: duplicate, late, stale, unexpected
    undelivered   answers that could not be queued for their receiver
    """

    def __init__(
        self,
        config: ProcessConfig,
        *,
        transfer: KvTransfer,
        inbox: MessageSource,
        outbox: MessageSink,
        recorder: Recorder,
        progress: Progress,
        round_trips: RoundTrips | None = None,
        clock: Clock = SYSTEM_CLOCK,
        pauses: Callable[[int, int], Sequence[Pause]] = never_paused,
    ) -> None:
        self.config = config
        self.jobs = JobTable()
        self.stopping = False
        self.ignored: Counter[str] = Counter()
        self.undelivered = 0
        self.copied_bytes = 0
        self._transfer = transfer
        self._inbox = inbox
        self._outbox = outbox
        self._recorder = recorder
        self._progress = progress
        self._round_trips = RoundTrips() if round_trips is None else round_trips
        self._now_ns = clock.monotonic_ns
        self._page_bytes: dict[str, int] = {}  # by pool owner
        self._me = Peer(
            instance=config.instance, endpoint=config.endpoint, incarnation=config.incarnation
        )
        self._started_ns = clock.monotonic_ns()
        self._standstill = Standstill(pauses, self._started_ns)
        self._register_errors: dict[str, str] = {}
        self._askers: dict[str, list[CancelCopies]] = {}  # who waits for the drain of a handoff
        self._swept_ns = clock.monotonic_ns()
        deadlines = config.settings.deadlines
        self._copy_ns = round(deadlines.copy_s * NS_PER_S)
        self._abandon_ns = round((deadlines.prefill_compute_s + deadlines.transfer_s) * NS_PER_S)

    def step(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, plan, start, copy, publish."""
        self._tell_pauses()
        for received in self._inbox.drain():
            self._take(received.message, received.arrived_ns)
        now_ns = self._now_ns()
        plan = plan_copies(self.jobs.waiting(), self.jobs.running(), now_ns)
        self._record_waits(plan, now_ns)
        for view in plan.start:
            self._start(view)
        self._publish()
        for event in self._transfer.poll(self._wait_s(plan, max_wait_s)):
            match event:
                case Copied():
                    self._copied(event)
                case Failed():
                    self._failed(event)
                case Drained():
                    self._drained(event)
        self._time_out()
        self._sweep()
        self._publish()

    # -- receive ------------------------------------------------------------------------------

    def _take(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message. One that raises is lost alone; a copy job takes its handoff along,
        whose legs would wait for it."""
        try:
            self.handle(message, arrived_ns)
        except Exception as error:  # a request boundary: those behind it are taken in
            _logger.exception("%s failed", type(message).__name__)
            if isinstance(message, CopyJob):
                self._fail_job(message, arrived_ns, _defect(error))

    def _fail_job(self, message: CopyJob, arrived_ns: int, failure: Failure) -> None:
        handoff_id = message.context.handoff_id
        if self.jobs.is_over(handoff_id) or handoff_id in self._askers:
            return
        self._give_up(self.jobs.get(handoff_id) or self._open(message, arrived_ns), failure)

    def handle(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message."""
        match message:
            case CopyJob():
                self._receive_job(message, arrived_ns)
            case CancelCopies():
                self._receive_cancel(message)
            case RegisterPool():
                self._register(message)
            case HeartbeatAck():
                trip = self._round_trips.answered(message, arrived_ns)
                if trip is not None:
                    record_round_trip(self._recorder, trip)
            case _:
                self.ignored["unexpected"] += 1
                refuse(message, self.config.instance)

    def _receive_job(self, message: CopyJob, arrived_ns: int) -> None:
        handoff_id = message.context.handoff_id
        if message.again_to not in ("", self._me.incarnation):
            self.ignored["stale"] += 1
            return
        if self.jobs.is_over(handoff_id) or handoff_id in self._askers:
            self.ignored["late"] += 1
            return
        if self.stopping and self.jobs.get(handoff_id) is None:
            self._fail(self._open(message, arrived_ns), message.index, self._stop_failure())
            return
        handoff = self.jobs.get(handoff_id) or self._open(message, arrived_ns)
        if message.index < handoff.next_index:
            self.ignored["duplicate"] += 1
            return
        handoff.touched_ns = arrived_ns
        missing = message.index - handoff.next_index
        self.jobs.add(handoff, Job(message=message, held_until_ns=self._hold(message, arrived_ns)))
        page_bytes = self._page_bytes.get(message.source.owner)
        handoff.trace.mark(
            Mark.COPY_QUEUED,
            message.index,
            len(message.source_pages),
            None if page_bytes is None else page_bytes * len(message.source_pages),
            self.jobs.num_waiting,
            at_ns=arrived_ns,
        )
        if missing:
            # Earlier jobs were lost, or run by a transfer process that is no more.
            first = message.index - missing
            self._give_up(
                handoff,
                Failure(
                    Reason.JOBS_MISSING,
                    f"copy job {message.index} came, job {first} was expected",
                ),
            )

    def _tell_pauses(self) -> None:
        """Say in the trace of each handoff that this process stood still meanwhile, if it did."""
        for begin_ns, end_ns in self._standstill.news(self._now_ns()):
            for handoff in self.jobs:
                _tell_pause(handoff, begin_ns, end_ns)

    def _open(self, message: CopyJob, arrived_ns: int) -> TransferHandoff:
        handoff = TransferHandoff(
            first=message,
            trace=self._recorder.begin(message.context, at_ns=arrived_ns),
            touched_ns=arrived_ns,
        )
        self.jobs.open(handoff)
        pause = self._standstill.before(arrived_ns)
        if pause is not None:
            _tell_pause(handoff, *pause)
        return handoff

    def _hold(self, message: CopyJob, arrived_ns: int) -> int:
        delay_ms = message.faults.get(_STAGE, 0) if self.config.settings.allow_faults else 0
        return arrived_ns + delay_ms * NS_PER_MS if message.last and delay_ms > 0 else 0

    def _receive_cancel(self, message: CancelCopies) -> None:
        askers = self._askers.setdefault(message.handoff_id, [])
        if message not in askers:
            askers.append(message)
        handoff = self.jobs.get(message.handoff_id)
        if handoff is not None:
            self.jobs.give_up(handoff, CopyState.CANCELLED)
            if handoff.running is not None and handoff.running.state is CopyState.COPYING:
                handoff.running.advance(CopyState.DRAINING)
        self._transfer.cancel(message.handoff_id)

    def _register(self, message: RegisterPool) -> None:
        owner = message.pool.owner
        try:
            self._transfer.register(
                PoolRef(owner=owner, incarnation=message.peer.incarnation), message.pool
            )
        except TransferError as error:
            # It is tried again with every heartbeat: log what is new only.
            if self._register_errors.get(owner) != str(error):
                self._register_errors[owner] = str(error)
                _logger.warning("%s", error)
            return
        self._register_errors.pop(owner, None)
        self._page_bytes[owner] = message.pool.layout.page_bytes

    # -- start --------------------------------------------------------------------------------

    def _record_waits(self, plan: CopyPlan, now_ns: int) -> None:
        for wait in plan.waits:
            handoff = self.jobs.get(wait.handoff_id)
            assert handoff is not None
            if not is_due(handoff.said, _QUEUE_STAGE, wait.reason, wait.position, now_ns):
                continue
            handoff.said = Said(_QUEUE_STAGE, wait.reason, now_ns)
            if wait.reason is WaitReason.INJECTED:
                handoff.trace.wait(_QUEUE_STAGE, wait.reason, at_ns=now_ns)
            else:
                handoff.trace.wait(
                    _QUEUE_STAGE,
                    wait.reason,
                    needed=1,
                    free=0,
                    limit=COPIES_PER_ROUTE,
                    position=wait.position,
                    blocker=wait.blockers,
                    at_ns=now_ns,
                )

    def _start(self, view: JobView) -> None:
        handoff = self.jobs.get(view.handoff_id)
        assert handoff is not None
        job = self.jobs.start(view)
        message = job.message
        handoff.said = None
        handoff.touched_ns = self._now_ns()
        job.started_ns = handoff.touched_ns
        handoff.trace.mark(Mark.COPY_STARTED, message.index, at_ns=handoff.touched_ns)
        copy = PageCopy(
            handoff_id=handoff.handoff_id,
            index=message.index,
            source=message.source,
            source_pages=message.source_pages,
            destination=message.destination,
            destination_pages=message.destination_pages,
            address=message.transfer_address,
        )
        try:
            self._transfer.submit(copy)
        except Exception as error:  # a defect: this handoff ends, others are served
            _logger.exception("copy job %d of %s did not start", copy.index, copy.handoff_id)
            self._give_up(handoff, _defect(error))

    # -- end ----------------------------------------------------------------------------------

    def _copied(self, event: Copied) -> None:
        handoff = self._running(event)
        if handoff is None:
            return
        expected = self._num_bytes(handoff)
        if expected is not None and event.num_bytes != expected:
            what = f"{event.num_bytes} of {expected} bytes of copy job {event.index} arrived"
            self._fail(handoff, event.index, Failure(Reason.TRANSFER_INCOMPLETE, what))
            return
        message = self.jobs.finish(handoff, event.num_bytes).message
        handoff.touched_ns = event.finished_ns
        self.copied_bytes += event.num_bytes
        trace = handoff.trace
        trace.mark(Mark.COPY_FINISHED, message.index, event.num_bytes, at_ns=event.finished_ns)
        if message.last:
            trace.mark(Mark.KV_LANDED, handoff.num_bytes, at_ns=event.finished_ns)
            trace.end()
            context = handoff.first.context
            _logger.info(
                "request_id=%s trace_id=%s handoff_id=%s outcome=completed jobs=%d bytes=%d",
                logged(context.request_id),
                context.trace_id,
                context.handoff_id,
                message.index + 1,
                handoff.num_bytes,
            )
            self.jobs.give_up(handoff, CopyState.CANCELLED)
            self.jobs.close(handoff.handoff_id)
        done = CopyDone(
            handoff_id=handoff.handoff_id,
            index=message.index,
            last=message.last,
            num_bytes=event.num_bytes,
        )
        self._send(message.decode, done)
        self._send(message.prefill, done)

    def _num_bytes(self, handoff: TransferHandoff) -> int | None:
        """What the running job of `handoff` copies; None when its pool is not known here."""
        assert handoff.running is not None
        message = handoff.running.message
        page_bytes = self._page_bytes.get(message.source.owner)
        return None if page_bytes is None else page_bytes * len(message.source_pages)

    def _failed(self, event: Failed) -> None:
        handoff = self._running(event)
        if handoff is None:
            return
        failure = Failure(event.reason, event.message, event.error)
        self._fail(handoff, event.index, failure, settled=event.settled)

    def _running(self, event: Copied | Failed) -> TransferHandoff | None:
        """The handoff whose running job `event` ends; None when it drains or is over."""
        handoff = self.jobs.get(event.handoff_id)
        if handoff is None or handoff.running is None:
            return None
        is_current = handoff.running.message.index == event.index
        return handoff if is_current and handoff.running.state is CopyState.COPYING else None

    def _fail(
        self, handoff: TransferHandoff, index: int, failure: Failure, *, settled: bool = True
    ) -> None:
        """End `handoff`. Decode is told only when its pages are certain not to be written any
        more; else it learns of it from prefill, and drains at its own host."""
        reason = failure.reason
        running = handoff.running
        self.jobs.give_up(handoff, CopyState.FAILED)
        if running is not None:
            running.advance(CopyState.FAILED)
        outcome = Outcome.TIMED_OUT if reason is Reason.TRANSFER_TIMEOUT else Outcome.FAILED
        # A span's `error.type` is the type of an exception, where there was one.
        handoff.trace.abort(outcome, failure.error or reason, by=self.config.instance)
        handoff.trace.end()
        self.jobs.close(handoff.handoff_id)
        level = logging.INFO if reason is Reason.CANCELLED else logging.WARNING
        _logger.log(
            level,
            "request_id=%s trace_id=%s handoff_id=%s outcome=%s reason=%s: %s",
            logged(handoff.first.context.request_id),
            handoff.first.context.trace_id,
            handoff.handoff_id,
            outcome,
            reason,
            failure.message,
        )
        failed = CopyFailed(
            handoff_id=handoff.handoff_id,
            index=index,
            reason=reason,
            message=failure.message,
            settled=settled,
        )
        self._send(handoff.first.prefill, failed)
        if settled:
            self._send(handoff.first.decode, failed)

    def _time_out(self) -> None:
        """Give up copies that never end."""
        now_ns = self._now_ns()
        for handoff in self.jobs:
            job = handoff.running
            if job is None or job.state is not CopyState.COPYING:
                continue
            if now_ns - job.started_ns >= self._copy_ns:
                limit_s = self.config.settings.deadlines.copy_s
                self._give_up(
                    handoff,
                    Failure(
                        Reason.TRANSFER_TIMEOUT,
                        f"copy job {job.message.index} did not end in {limit_s:g} s",
                    ),
                )

    def _give_up(self, handoff: TransferHandoff, failure: Failure) -> None:
        """Fail `handoff`, if need be once the transfer has let go of its running job."""
        running = handoff.running
        if running is None:
            self._fail(handoff, max(0, handoff.next_index - 1), failure)
        elif running.state is CopyState.COPYING:
            self.jobs.give_up(handoff, CopyState.FAILED)
            running.advance(CopyState.DRAINING)
            handoff.failure = failure
            self._transfer.cancel(handoff.handoff_id)

    def _drained(self, event: Drained) -> None:
        askers = self._askers.pop(event.handoff_id, [])
        handoff = self.jobs.get(event.handoff_id)
        if handoff is not None:
            self._end_drained(handoff, askers)
        self.jobs.close(event.handoff_id)
        for asked in askers:
            peer = asked.reply_to
            self._send(
                peer,
                CopiesDrained(
                    handoff_id=event.handoff_id,
                    transfer=self._me,
                    started_ns=self._started_ns,
                    jobs=self.jobs.come_from(peer.incarnation) if asked.ask_jobs else {},
                ),
            )

    def _end_drained(self, handoff: TransferHandoff, askers: list[CancelCopies]) -> None:
        running = handoff.running
        if running is not None:
            running.advance(CopyState.CANCELLED)
            handoff.jobs.clear()
        if handoff.failure is not None and running is not None:
            # Between hosts this drain speaks for the source alone.
            settled = handoff.first.transfer_address is None
            self._fail(handoff, running.message.index, handoff.failure, settled=settled)
        else:
            by = askers[0].reply_to.instance if askers else None
            handoff.trace.abort(Outcome.CANCELLED, Reason.CANCELLED, by=by)
            handoff.trace.end()

    def _send(self, peer: Peer, message: AnyMessage) -> None:
        if not self._outbox.send(peer.endpoint, message):
            self.undelivered += 1

    def _sweep(self) -> None:
        """Forget handoffs of which no further job will come: their prefill worker is gone."""
        now_ns = self._now_ns()
        if now_ns - self._swept_ns < SWEEP_S * NS_PER_S:
            return
        self._swept_ns = now_ns
        for handoff in self.jobs:
            if handoff.jobs or now_ns - handoff.touched_ns < self._abandon_ns:
                continue
            handoff.trace.abort(Outcome.LOST, "abandoned", by=handoff.first.prefill.instance)
            handoff.trace.end()
            self.jobs.close(handoff.handoff_id)

    def fail_all(self, failure: Failure) -> None:
        """Give up every handoff: a turn of the loop failed, or the process stops."""
        for handoff in self.jobs:
            self._give_up(handoff, failure)

    # -- stop ---------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """From here on what has not begun is refused: handoffs of this host, copies of others."""
        self.stopping = True
        self._transfer.stop_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing that had begun is still under way, for this host or another one."""
        return self.jobs.num_handoffs == 0 and self._transfer.num_incoming == 0

    @property
    def work_done(self) -> tuple[int, int]:
        """Changes with every copy, sent or received."""
        return self.copied_bytes, self._transfer.num_received

    def give_up_rest(self) -> None:
        """The process ends now."""
        self.fail_all(self._stop_failure())

    def _stop_failure(self) -> Failure:
        return Failure(Reason.TRANSFER_STOPPING, f"{self.config.instance} is shutting down")

    # -- publish ------------------------------------------------------------------------------

    def _publish(self) -> None:
        running = len(self.jobs.running())
        waiting = self.jobs.num_waiting
        now_ns = self._progress.tick(
            busy=bool(running or waiting),
            load=WorkerLoad(running=running, waiting=waiting),
            ignored=self.ignored,
        )
        self._recorder.gauges(_GAUGES, (waiting, self.copied_bytes, now_ns))

    def _wait_s(self, plan: CopyPlan, max_wait_s: float) -> float:
        if plan.wake_ns is None:
            return max_wait_s
        return max(0.0, min(max_wait_s, (plan.wake_ns - self._now_ns()) / NS_PER_S))


def run(config: ProcessConfig, *, stop: Stop | None = None) -> None:
    """Serve as `config` says until SIGTERM, SIGINT or `stop`. Raises StartError."""
    stop = StopFlag() if stop is None else stop
    with contextlib.ExitStack() as stack:
        clock = process_clock(config)
        injector = make_injector(config, clock)
        mover = _make_transfer(config, clock, injector)
        transfer = faulty_transfer(mover, injector)
        stack.callback(transfer.close)
        stack.enter_context(stop_on_signals(stop, transfer.wake))
        keys = load_keys(config.settings.curve_keys)
        inbox = Inbox(config.endpoint, on_arrival=transfer.wake, clock=clock, keys=keys)
        stack.callback(inbox.close)
        recorder = open_recorder(config, Role.TRANSFER, clock, recorder_class(injector))
        stack.callback(recorder.close)
        outbox = Outbox(keys=keys)
        stack.callback(outbox.close)
        progress = Progress(clock)
        progress.recorded = recorder.enabled
        round_trips = RoundTrips(config.incarnation)
        pauses = Pauses(clock)
        pause_thread = PauseThread(pauses)
        worker = TransferWorker(
            config,
            transfer=transfer,
            inbox=faulty_source(inbox, injector, clock),
            outbox=faulty_sink(outbox, injector),
            recorder=recorder,
            progress=progress,
            round_trips=round_trips,
            clock=clock,
            pauses=pauses.within,
        )
        disturb(worker, injector, config.settings.faults)
        heartbeat = HeartbeatThread(
            config,
            progress,
            round_trips=round_trips,
            clock=clock,
            make_outbox=heartbeat_outbox(injector, keys),
            num_malformed=lambda: inbox.counters.malformed,
            denied=lambda: {
                "control": inbox.counters.denied,
                "transfer": mover.num_refused if isinstance(mover, TcpTransfer) else 0,
            },
        )
        heartbeat.start()
        stack.callback(heartbeat.stop)
        pause_thread.start()
        stack.callback(pause_thread.stop)
        announce_ready(config)
        _logger.info("%s serves at %s", config.instance, config.endpoint)
        while not stop.is_set():
            take_step(worker, IDLE_WAIT_S)
        progress.draining = True
        heartbeat.beat_now()  # from here on no request is started that needs this process
        stop_worker(worker)
    _logger.info("%s stopped", config.instance)


def _tell_pause(handoff: TransferHandoff, begin_ns: int, end_ns: int) -> None:
    stood_ms = (end_ns - begin_ns) // NS_PER_MS
    handoff.trace.wait(_STAGE, WaitReason.PROCESS_PAUSED, needed=stood_ms, at_ns=begin_ns)


def take_step(worker: TransferWorker, max_wait_s: float) -> None:
    """One turn of the loop. A turn that raises fails the handoffs at hand, not the process."""
    try:
        worker.step(max_wait_s)
    except Exception as error:  # a process boundary: the handoffs at hand fail, later ones do not
        _logger.exception("%s: a turn of the loop failed", worker.config.instance)
        worker.fail_all(_defect(error))


def stop_worker(worker: TransferWorker) -> None:
    """Go on until nothing comes any more, at most for `ACCEPT_S`, then refuse what is new; give up
    what has not ended `GRACE_S` after the call."""
    begun_s = quiet_s = time.monotonic()
    done = worker.work_done
    while time.monotonic() < min(begun_s + ACCEPT_S, quiet_s + QUIET_S):
        take_step(worker, _TURN_S)
        if not worker.is_finished or worker.work_done != done:
            done, quiet_s = worker.work_done, time.monotonic()
    worker.stop_accepting()
    while True:
        take_step(worker, _TURN_S)
        if worker.is_finished or time.monotonic() >= begun_s + GRACE_S:
            break
    worker.give_up_rest()
    take_step(worker, 0.0)  # answers what drained at once


def _defect(error: Exception) -> Failure:
    failed = TransferError.of(error)
    return Failure(failed.reason, str(failed), failed.error)


def _make_transfer(config: ProcessConfig, clock: Clock, injector: Injector | None) -> KvTransfer:
    verify = config.settings.verify_copies
    if config.settings.transfer == "shm" and injector is not None:
        return FaultyShmTransfer(verify=verify, clock=clock, injector=injector)
    if config.settings.transfer == "shm":
        return ShmTransfer(verify=verify, clock=clock)
    if config.transfer_address is None:
        raise StartError(f"{config.instance} has no transfer_address, TCP transfer needs one")
    address, secret = config.transfer_address, shared_secret(config.settings.run_path)
    timeout_s = config.settings.deadlines.copy_s
    if injector is not None:
        return FaultyTcpTransfer(
            address, secret=secret, copy_timeout_s=timeout_s, clock=clock, injector=injector
        )
    return TcpTransfer(address, secret=secret, copy_timeout_s=timeout_s, clock=clock)
