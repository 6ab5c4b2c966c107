"""A generation request as ordered steps: ingest, admit, route, dispatch, relay, finish.

Owns the order, the marks between the steps and how each way out ends the request. HTTP is `http`,
what goes to the client `responder`, places `admission`, pairs `routing`, legs `attempts`, whether a
failed attempt is followed by another `retry`.

    ingest ─▶ admit ─▶ route ─▶ dispatch ─▶ relay ─▶ finish
                         ▲                    │
                         └── next attempt ◀───┘ failed, safe, and nothing written

Deadlines hold for all attempts together. A further attempt keeps the request's place, and starts
from nothing: what the one before had generated is dropped.

Instants that the marks stand for
  RECEIVED           first byte of the request read from the socket (`protocol` stamps it); under an
                     ASGI server that does not stamp, the moment the application was called
  FIRST_TOKEN_SENT   the write of the first content bytes returned: for a stream its first delta,
                     otherwise the body, so that both are what the client measures as first token
  COMPLETED          the last write returned; for a client that left, both legs closed, or had
                     `drain_s` to do so
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

from starlette.types import Receive, Send

from pdtrace.clock import SYSTEM_CLOCK, Clock
from pdtrace.recorder import Recorder, RequestContext
from pdtrace.stages import Gauge, Mark, Mode, Outcome, WaitReason
from server.config import COLOCATED, Settings
from server.engine.base import ModelInfo
from server.errors import DeadlineExceeded, Overloaded, RequestError
from server.gateway.admission import Admission, QueuePlace
from server.gateway.attempts import Admitted, Attempt, Event, failure_of
from server.gateway.call import Call
from server.gateway.cluster import Cluster, Mail
from server.gateway.dispatch import leg_messages
from server.gateway.endings import end_attempt, end_request
from server.gateway.errors import (
    GATEWAY,
    NO_WORKER,
    QUEUE_TIMEOUT,
    SHUTTING_DOWN,
    AttemptFailure,
    ClientGone,
    LegFailed,
    NoPair,
    QueueTimedOut,
    RequestLost,
    WorkerVanished,
    outcome_of,
)
from server.gateway.kept_waiting import KeptWaiting
from server.gateway.mailbox import Mailbox
from server.gateway.metrics import GatewayMetrics
from server.gateway.now import Now
from server.gateway.open_calls import OpenCalls
from server.gateway.openai_api import GenerationRequest, Operation
from server.gateway.openai_bodies import BODIES, Usage
from server.gateway.prompt import PromptEncoder, output_budget
from server.gateway.relay import OutputStream
from server.gateway.responder import Responder, StreamResponder, WholeResponder
from server.gateway.retry import may_retry
from server.gateway.retry_after import DrainRate, retry_after_s
from server.gateway.routing import PairChoice, RouteRequest
from server.log_fields import logged
from server.pauses import never_paused
from server.standstill import Pause
from server.tokenizer import Tokenizer
from server.wire.messages import Peer, TokenItem

PREFILL_FORWARDS = "prefill"
SHUTDOWN_ANSWER_S = 2.0
"""How long requests that were cut off may take to answer and to cancel their legs."""

_logger = logging.getLogger(__name__)
_GAUGES = (Gauge.LAST_PROGRESS_NS, Gauge.IN_FLIGHT, Gauge.WAITING)


class Gateway:
    """The state that all requests of this process share. Lives on one event loop.

    me          how workers reach this gateway
    model       of the workers it tokenizes for
    pauses      when this process stood still
    """

    def __init__(
        self,
        *,
        settings: Settings,
        me: Peer,
        model: ModelInfo,
        tokenizer: Tokenizer,
        mail: Mail,
        recorder: Recorder,
        clock: Clock = SYSTEM_CLOCK,
        pauses: Callable[[int, int], Sequence[Pause]] = never_paused,
    ) -> None:
        self.now = Now(clock)
        self.settings = settings
        self.model = model
        self.served_name = settings.served_name or model.name
        self.created_s = self.now.unix_s()
        self.stopping = False
        self.recorded = recorder.enabled
        self.mode = _mode(settings)
        self.admission = Admission(
            max_concurrency=settings.max_concurrency, max_queue=settings.max_queue
        )
        self.metrics = GatewayMetrics(
            model=self.served_name,
            in_flight=lambda: self.admission.in_flight,
            waiting=lambda: self.admission.waiting,
            members=lambda: self.cluster.reports(),  # noqa: PLW0108 -- made below
            refused_pairs=lambda: len(self.cluster.refusals()),
            recorded=recorder.enabled,
        )
        self.cluster = Cluster(
            settings=settings,
            me=me,
            fingerprint=model.fingerprint,
            mail=mail,
            ignored=self.metrics.ignored,
            forgotten=self.metrics.forgotten,
            now=self.now,
        )
        self._drain_rate = DrainRate(self.now.s())
        self._recorder = recorder
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._calls = OpenCalls()
        self._kept_waiting = KeptWaiting(self._calls, self.now, pauses)
        self._queued: dict[str, Call] = {}  # those without a place, by admission key

    def is_ready(self) -> bool:
        """Whether a generation is possible."""
        return not self.stopping and self.cluster.num_pairs() > 0

    def unready_reason(self) -> str:
        """Why no generation is possible, while none is."""
        if self.stopping:
            return "shutting down"
        refused = self.cluster.refusals()
        if refused:
            return NoPair.refused(refused).args[0]
        return "no pair of workers can serve a request"

    def tick(self) -> None:
        """Notice who died; say in the ring that this loop goes round, and where in the queue each
        waiting request stands. Every `heartbeat_s`."""
        self.cluster.bury_dead()
        self._kept_waiting.look()
        for key, place in self.admission.places():
            call = self._queued.get(key)
            if call is not None:
                _record_place(call, place)
        self._recorder.gauges(
            _GAUGES, (self.now.ns(), self.admission.in_flight, self.admission.waiting)
        )

    # -- requests -----------------------------------------------------------------------------

    def begin(
        self,
        operation: Operation,
        route: str,
        *,
        context: RequestContext,
        received_ns: int,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> Call:
        """Take up a request whose headers are known. `serve` must follow."""
        trace = self._recorder.begin(context, at_ns=received_ns)
        trace.mark(Mark.RECEIVED, "POST", route, operation, at_ns=received_ns)
        return Call(
            operation=operation,
            context=context,
            trace=trace,
            received_ns=received_ns,
            stage_began_ns=received_ns,
            send=send,
            headers=headers,
            responder=Responder(send, headers, timeout_s=self.settings.client_limits.unread_s),
            queue_left_s=self.settings.deadlines.gateway_queue_s,
        )

    async def serve(
        self, call: Call, read: Callable[[], Awaitable[GenerationRequest]], receive: Receive
    ) -> None:
        """Answer one request, whatever happens.

        read      reads, checks and parses the request, and sets `call.faults`; raises RequestError
        receive   tells when the client disconnects, once `read` is through
        """
        self._calls.add(call)
        watcher: asyncio.Task[None] | None = None
        try:
            if self.stopping:
                raise _shutting_down()
            request = await read()
            watcher = asyncio.create_task(_watch(receive, call.mailbox))
            with self._deadline(call, self._request_timeout, self.settings.deadlines.request_s):
                await self._generate(call, request)
        except RequestError as error:
            await self._fail(call, error)
        except asyncio.CancelledError:
            # The HTTP server gave up waiting for this request at shutdown.
            self._let_go(call, Outcome.FAILED, GATEWAY, SHUTTING_DOWN)
            end_request(
                call, Outcome.FAILED, SHUTTING_DOWN, GATEWAY, self.metrics, at_ns=self.now.ns()
            )
            raise
        except Exception:  # a request boundary
            _logger.exception(
                "request_id=%s failed in the gateway", logged(call.context.request_id)
            )
            await self._fail(call, RequestError("The server failed to handle the request."))
        finally:
            if watcher is not None:
                watcher.cancel()
            call.trace.end()
            self._calls.discard(call)

    async def shutdown(self, grace_s: float) -> None:
        """Take no more requests; give open ones `grace_s`, then end them with an error."""
        self.stopping = True
        if not await self._calls.ended(grace_s):
            _logger.info("ending %d requests that are still open", len(self._calls))
        for call in self._calls:
            call.mailbox.interrupt(_shutting_down())
        await self._calls.ended(SHUTDOWN_ANSWER_S)
        self._encoder.close()

    # -- the steps ----------------------------------------------------------------------------

    async def _generate(self, call: Call, request: GenerationRequest) -> None:
        with self.admission.approaching():
            await self._ingest(call, request)
            # Held before it takes a place, so that nobody else waits for this request's fault.
            await self.hold(call, "gateway.queue")
        wanted = RouteRequest(prompt_ids=call.prompt_ids, max_tokens=call.max_tokens)
        await self._admit(call, wanted)
        while True:
            choice = await self._route(call, wanted)
            try:
                attempt = await self._dispatch(call, request, choice)
                output = call.output = OutputStream(self._tokenizer, request.stop)
                await self._relay(call, attempt, output)
            except (LegFailed, WorkerVanished, RequestLost) as failure:
                wanted = self._try_again(call, request, wanted, failure)
            else:
                break
        await self._finish(call, attempt, output)

    async def _ingest(self, call: Call, request: GenerationRequest) -> None:
        call.responder = self._responder(call, request)
        call.prompt_ids = await self._encoder.encode(request)
        call.max_tokens = output_budget(
            len(call.prompt_ids),
            request.max_tokens,
            model=self.model,
            capacity=self.cluster.kv_capacity(),
            param="messages" if request.operation is Operation.CHAT else "prompt",
        )
        await self.hold(call, "gateway.ingest")
        self._kept_waiting.look()
        now_ns = self.now.ns()
        call.trace.mark(
            Mark.TOKENIZED,
            request.model,
            len(call.prompt_ids),
            call.max_tokens,
            request.stream,
            self.mode,
            at_ns=now_ns,
        )
        call.stage_ended("gateway.ingest", now_ns)

    async def _admit(self, call: Call, wanted: RouteRequest) -> None:
        with self._queueing(call):
            place = self.admission.enter(
                call.admission_key,
                call.context.request_id,
                lambda: call.mailbox.put(Admitted()),
            )
            if place is not None:
                _record_place(call, place)
                self._queued[call.admission_key] = call
                try:
                    await call.mailbox.take()
                finally:
                    del self._queued[call.admission_key]
            await self._wait_for_pair(call, wanted, "gateway.queue")
        self._kept_waiting.look()
        now_ns = self.now.ns()
        call.trace.mark(Mark.ADMITTED, self.admission.in_flight, at_ns=now_ns)
        call.stage_ended("gateway.queue", now_ns)

    async def _route(self, call: Call, wanted: RouteRequest) -> PairChoice:
        await self.hold(call, "gateway.route")
        while (choice := self.cluster.choose(wanted)) is None:
            with self._queueing(call):
                await self._wait_for_pair(call, wanted, "gateway.route")
        self._kept_waiting.look()
        now_ns = self.now.ns()
        call.trace.mark(
            Mark.ROUTED,
            choice.prefill.peer.instance,
            choice.decode.peer.instance,
            self.cluster.policy,
            choice.candidates,
            choice.reason,
            at_ns=now_ns,
        )
        call.stage_ended("gateway.route", now_ns)
        return choice

    async def _wait_for_pair(self, call: Call, wanted: RouteRequest, stage: str) -> None:
        if self.cluster.has_pair(wanted):
            return
        call.trace.wait(stage, WaitReason.NO_WORKER, needed=1, free=0)
        await self.cluster.wait_for_pair(wanted, call.mailbox)

    async def _dispatch(
        self, call: Call, request: GenerationRequest, choice: PairChoice
    ) -> Attempt:
        await self.hold(call, "gateway.dispatch")
        reserve = min(call.max_tokens, self.settings.reserve_output_tokens)
        messages = leg_messages(call, request, choice, mode=self.mode, gateway=self.cluster.me)
        # Before the first of them leaves: a worker's mark of its arrival must not come earlier, and
        # if this process dies now, the worker is known to have had it.
        now_ns = self.now.ns()
        call.trace.mark(Mark.DISPATCHED, at_ns=now_ns)
        call.stage_ended("gateway.dispatch", now_ns)
        attempt = call.attempt = self.cluster.attempts.open(
            call.context,
            choice,
            prompt_len=len(call.prompt_ids),
            promised_tokens=len(call.prompt_ids) + reserve,
            mailbox=call.mailbox,
            on_closed=lambda: self._attempt_closed(call),
        )
        call.attempts.append(attempt)
        call.num_open += 1
        refused = self.cluster.dispatch(attempt, messages)
        if refused is not None:
            raise WorkerVanished(f"{refused.instance} takes no messages.", by=refused.instance)
        return attempt

    def _try_again(
        self, call: Call, request: GenerationRequest, wanted: RouteRequest, failure: AttemptFailure
    ) -> RouteRequest:
        """End the attempt that failed and begin the next one; raises `failure` where none follows.

        From the first attempt's end on its legs are told to stop and nobody hears them any more.
        """
        attempt = call.attempt
        assert attempt is not None
        if call.mailbox.interruption is not None:
            raise call.mailbox.interruption
        if not may_retry(
            failure.code,
            attempt=call.context.attempt,
            max_retries=self.settings.max_retries,
            written=call.responder.status is not None,
        ):
            raise failure
        following = self.cluster.after(attempt.choice, wanted, failure)
        outcome, by = outcome_of(failure, dispatched=True)
        now_ns = self.now.ns()
        end_attempt(call, outcome, failure.code, failure.by, self.metrics, at_ns=now_ns)
        self.cluster.attempts.cancel(attempt, outcome, failure.code, by=by)
        self.cluster.attempts.let_go(attempt)
        call.mailbox.clear()
        call.begin_attempt(self._recorder, failure.code, now_ns)
        call.responder = self._responder(call, request)
        # It has a place still: from here on it waits for workers alone.
        call.trace.mark(Mark.ADMITTED, self.admission.in_flight, at_ns=now_ns)
        return following

    def _attempt_closed(self, call: Call) -> None:
        """Its workers hold nothing of an attempt any more."""
        call.num_open -= 1
        self._give_back_place(call)

    def _give_back_place(self, call: Call) -> None:
        """A place is free when the workers are: behind the request's last attempt."""
        if call.is_over and call.num_open == 0 and self.admission.release(call.admission_key):
            self._drain_rate.freed(self.now.s())

    async def _relay(self, call: Call, attempt: Attempt, output: OutputStream) -> None:
        """Tokens to the client until the last one is there. Raises what ended them before."""
        while output.finish_reason is None or self._decode_is_behind(attempt, output):
            text = ""
            failure: RequestError | None = None
            events = await call.mailbox.take()
            # Legs overtake each other, so only when all are closed is it sure that nothing follows.
            exhausted = attempt.closed.is_set()
            for event in events:
                if isinstance(event, TokenItem):
                    text += output.feed(event).text
                else:
                    failure = failure_of(event)
                if failure is not None or output.finish_reason is not None:
                    break
            if exhausted and failure is None and output.finish_reason is None:
                failure = LegFailed.incomplete(attempt.choice.decode.peer.instance)
            if failure is not None and call.responder.status is None:
                raise failure  # what came with it would be the first byte, and forbid a retry
            if text:
                if call.first_write_ns is None:
                    self._kept_waiting.arrived(call, "hop.token")
                    await self.hold(call, "hop.token")
                if await call.responder.write(text):
                    call.wrote(self.now.ns(), self.metrics)
            if failure is not None:
                raise failure

    def _decode_is_behind(self, attempt: Attempt, output: OutputStream) -> bool:
        """Whether the answer ended with prefill's token and decode does not know it yet.

        It is still part of the request: it waits for the KV, and must not run past the end.
        """
        forwarded = self.mode is Mode.PD_EARLY and output.num_tokens <= 1
        return forwarded and attempt.choice.decode.peer.instance in attempt.open_legs

    async def _finish(self, call: Call, attempt: Attempt, output: OutputStream) -> None:
        self._kept_waiting.arrived(call, "gateway.finish")
        await self.hold(call, "gateway.finish")
        if call.mailbox.interruption is not None:
            raise call.mailbox.interruption
        assert output.finish_reason is not None
        if await call.responder.finish(output.finish_reason, _usage(call)):
            call.wrote(self.now.ns(), self.metrics)
        self._kept_waiting.look()
        call.is_over = True
        self.cluster.attempts.let_go(attempt)
        self._give_back_place(call)
        call.measure(self.metrics)
        end_request(call, Outcome.COMPLETED, None, None, self.metrics, at_ns=self.now.ns())

    async def _fail(self, call: Call, error: RequestError) -> None:
        """End the request with `error`: tell the legs, the client and the trace."""
        self._kept_waiting.look()
        outcome, by = outcome_of(error, dispatched=bool(call.attempts))
        # What was refused never had a stage to end; what a leg gave up, that leg has recorded.
        if outcome is not Outcome.REJECTED and not isinstance(error, LegFailed):
            call.trace.abort(outcome, error.code, by)
        self._let_go(call, outcome, by, error.code)
        if error.retry_after_s is None:
            per_s = self._drain_rate.per_s(self.now.s())
            error.retry_after_s = retry_after_s(
                self.admission.waiting, per_s, self.settings.max_concurrency
            )
        try:
            if not isinstance(error, ClientGone):
                await call.responder.fail(error)
            else:
                for attempt in call.attempts:  # at most drain_s: then the legs count as closed
                    await attempt.closed.wait()
        except ClientGone:
            pass  # it left before it could be told; the outcome is what it was
        finally:
            self._kept_waiting.look()
            end_request(call, outcome, error.code, by, self.metrics, at_ns=self.now.ns())

    def _let_go(self, call: Call, outcome: Outcome, by: str, reason: str) -> None:
        """Give back what the request holds: its legs now, its place once they are closed."""
        call.is_over = True
        if call.attempt is not None:
            self.cluster.attempts.cancel(call.attempt, outcome, reason, by=by)
            self.cluster.attempts.let_go(call.attempt)
        self._give_back_place(call)

    # -- parts of the steps -------------------------------------------------------------------

    async def hold(self, call: Call, stage: str) -> None:
        """A fault hook delays `stage` of this request."""
        delay_ms = call.faults.get(stage, 0)
        if delay_ms:
            call.trace.wait(stage, WaitReason.INJECTED)
            await call.mailbox.pause(delay_ms / 1000)

    @contextmanager
    def _queueing(self, call: Call) -> Generator[None]:
        """A wait of the request: all its waits together are bounded by `gateway_queue_s`."""
        began_s = self.now.s()
        with self._deadline(call, self._queue_timeout, call.queue_left_s):
            try:
                yield
            finally:
                call.queue_left_s = max(0.0, call.queue_left_s - (self.now.s() - began_s))

    @contextmanager
    def _deadline(
        self, call: Call, error: Callable[[Call], RequestError], seconds: float
    ) -> Generator[None, None, None]:
        """Interrupt the request with `error` if the block takes longer than `seconds`."""
        timer = asyncio.get_running_loop().call_later(
            seconds, lambda: call.mailbox.interrupt(error(call))
        )
        try:
            yield
        finally:
            timer.cancel()

    def _queue_timeout(self, _call: Call) -> RequestError:
        seconds = self.settings.deadlines.gateway_queue_s
        if self.cluster.num_pairs() == 0:
            return QueueTimedOut(f"No worker was ready within {seconds:g} s.", code=NO_WORKER)
        return QueueTimedOut(f"No place came free within {seconds:g} s.", code=QUEUE_TIMEOUT)

    def _request_timeout(self, call: Call) -> RequestError:
        stage = "gateway.queue" if call.attempt is None else "hop.dispatch"
        if call.output is not None and call.output.num_tokens:
            stage = "decode.generate"
        return DeadlineExceeded(
            f"The request took longer than {self.settings.deadlines.request_s:g} s.", stage=stage
        )

    def _responder(self, call: Call, request: GenerationRequest) -> Responder:
        bodies = BODIES[request.operation](
            model=request.model,
            created_s=self.now.unix_s(),
            fingerprint=f"fp_{self.model.fingerprint[:12]}",
            include_usage=request.include_usage,
            usage_now=(lambda: _usage(call)) if request.usage_so_far else None,
        )
        timeout_s = self.settings.client_limits.unread_s
        if request.stream:
            return StreamResponder(
                call.send,
                call.headers,
                bodies=bodies,
                include_usage=request.include_usage,
                timeout_s=timeout_s,
            )
        return WholeResponder(call.send, call.headers, bodies=bodies, timeout_s=timeout_s)


def _mode(settings: Settings) -> Mode:
    if settings.mode == COLOCATED:
        return Mode.COLOCATED
    return Mode.PD_EARLY if settings.first_token == PREFILL_FORWARDS else Mode.PD


def _usage(call: Call) -> Usage:
    """Tokens of `call` so far."""
    output = call.output
    return Usage(
        prompt_tokens=len(call.prompt_ids),
        completion_tokens=0 if output is None else output.num_tokens,
        cached_tokens=0 if output is None else output.cached_tokens,
    )


def _record_place(call: Call, place: QueuePlace) -> None:
    call.trace.wait(
        "gateway.queue",
        WaitReason.CONCURRENCY,
        needed=1,
        free=0,
        limit=place.limit,
        position=place.position,
        blocker=place.blockers,
    )


def _shutting_down() -> Overloaded:
    return Overloaded("The server is shutting down.", code=SHUTTING_DOWN)


async def _watch(receive: Receive, mailbox: Mailbox[Event]) -> None:
    """Interrupt the request when its client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.interrupt(ClientGone("The client closed the connection."))
