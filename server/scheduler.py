"""What every scheduler process does besides its plan: receive, time out, end, answer, report.

Owns the legs' table, the page allocator, outgoing tokens, the watch over the gateway and the
counters of ignored messages; knows nothing of what a step computes. A worker (`server.prefill`,
`server.decode`, `server.colocated`) derives from `Scheduler`, and its `step` is its table of
contents: receive, plan, run, publish.

A message or a step that raises fails the requests it concerns and nothing else.
"""

from __future__ import annotations

import heapq
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence, Set
from typing import Generic

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import (
    STAGE_BY_NAME,
    Gauge,
    Kind,
    Outcome,
    Role,
    StepKind,
    WaitReason,
)
from server.admission import PageBudget, Wait, largest
from server.config import ProcessConfig
from server.engine.base import Engine
from server.errors import IntegrityError
from server.gateway_watch import GatewayWatch
from server.injection.process import refuse
from server.kv.pages import PageAllocator
from server.legs import LegT, LegTable
from server.log_fields import logged
from server.loop_log import Doing, LoopLog
from server.ports import Ports
from server.recording import record_round_trip
from server.request import Ending
from server.said import Said, is_due
from server.standstill import Standstill
from server.tracing import TraceObserver
from server.wire.messages import (
    Abort,
    AnyMessage,
    Cancel,
    HeartbeatAck,
    LegClosed,
    Peer,
    TokenItem,
    Tokens,
    WorkerLoad,
)
from server.wire.sockets import Received

IDLE_WAIT_S = 0.25
"""Longest wait for a message: how often an idle loop shows that it is alive."""
HOLDERS_NS = 100_000_000
"""How long the answer to who holds most pages may be old."""
DRAINING = "draining"
"""Reason of requests that end because their worker stops."""

_logger = logging.getLogger(__name__)

_GENERATE = "decode.generate"
_GAUGES = (
    Gauge.IN_FLIGHT,
    Gauge.STEPS,
    Gauge.LAST_PROGRESS_NS,
)


class Scheduler(ABC, Generic[LegT]):
    """Base of the three workers. Single-threaded: `step` and everything it calls."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        self.config = config
        self.settings = config.settings
        self.engine = engine
        self.legs: LegTable[LegT] = LegTable()
        self.allocator = PageAllocator(engine.pool.descriptor.num_pages)
        self.ignored: Counter[str] = Counter()
        """Messages without effect, as "why.Type": duplicate, late, unknown, stale, unexpected."""
        self.peer = Peer(
            instance=config.instance, endpoint=config.endpoint, incarnation=config.incarnation
        )
        self.draining = False
        self._gateway = GatewayWatch(dead_after_s=config.settings.dead_after_s)
        self._ports = ports
        self._clock = ports.clock
        self._recorder = ports.recorder
        self._observer = TraceObserver(ports.recorder, lambda: self.allocator.num_free)
        self._log = LoopLog()
        self._taken_from_ns = 0  # when this turn began to take in messages
        self._num_taken = 0  # how many it took
        self._holders: tuple[LegT, ...] = ()
        self._holders_ns: int | None = None
        self._role = Role(config.role)
        self._standstill = Standstill(ports.pauses, self._clock())
        self._tokens: dict[str, list[TokenItem]] = {}
        self._closed: list[tuple[str, LegClosed]] = []
        self._again = False  # something came free: plan once more before waiting
        self._steps = 0
        self._was_idle = True

    @abstractmethod
    def step(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """One turn of the loop; waits up to `max_wait_s` for a message when there is no work."""

    @abstractmethod
    def handle(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message of a request or of a peer's copies; not a Cancel."""

    @abstractmethod
    def end(self, leg: LegT, ending: Ending, *, tell_peer: bool = True) -> None:
        """Give `leg` up: free what it holds, or begin to drain it. No effect once it has ended."""

    @abstractmethod
    def drain_expired(self, leg: LegT) -> None:
        """The transfer did not answer in time: close `leg` without reusing its pages."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is free, cached, or held by a leg in flight."""

    def check_owners(self, others: Set[str]) -> None:
        """Raises IntegrityError for a page whose owner is no leg in flight and not in `others`."""
        for owner, pages in self.allocator.pages_by_owner().items():
            if owner not in others and self.legs.get(owner) is None:
                raise IntegrityError(f"pages {pages} are held by {owner!r}, which is over")

    @abstractmethod
    def is_waiting(self, leg: LegT) -> bool:
        """Whether nothing of `leg` has been done yet: it could as well be served elsewhere."""

    @abstractmethod
    def pages_held(self, leg: LegT) -> int:
        """Pages of the pool that `leg` keeps from others."""

    @abstractmethod
    def report(self) -> WorkerLoad:
        """Set the gauges and return what routing looks at.

        Those of pages are set in one call: who reads them beside it must not see the states of one
        turn next to the free pages of another.
        """

    # -- receive ------------------------------------------------------------------------------

    def receive(self, max_wait_s: float) -> None:
        """Take in all messages that wait, then time out what is due."""
        wait_s = self._wait_s(max_wait_s)
        asked_ns = self._clock()
        received = self._ports.inbox.get(wait_s)
        if wait_s > 0:
            self._taken_from_ns = self._clock()
            self._log.add(asked_ns, self._taken_from_ns, Doing.IDLE)
        else:
            self._taken_from_ns = asked_ns
        self.tell_pauses(self._taken_from_ns)
        self._num_taken = 0 if received is None else 1
        if received is not None:
            self._take(received)
            others = self._ports.inbox.drain()
            self._num_taken += len(others)
            for received in others:
                self._take(received)
        now_ns = self._clock()
        self.watch(now_ns)
        for leg in self.legs.due(now_ns):
            leg.holds.release_due(now_ns)
            if leg.deadline_ns is not None and leg.deadline_ns <= now_ns:
                self._time_out(leg)

    def _wait_s(self, max_wait_s: float) -> float:
        if self._again:
            self._again = False
            return 0.0
        wake_ns = self.legs.next_wake_ns()
        if wake_ns is None:
            return max_wait_s
        return min(max_wait_s, max(0.0, (wake_ns - self._clock()) / 1e9))

    def _take(self, received: Received) -> None:
        message = received.message
        try:
            self.take_in(message, received.arrived_ns)
        except Exception as error:  # a request boundary: it must not stop the loop
            handoff_id = handoff_of(message)
            _logger.exception("%s of %s failed", type(message).__name__, handoff_id)
            leg = self.legs.get(handoff_id)
            if leg is not None:
                self._give_up(leg, "internal", f"{type(error).__name__} in a message's handling")

    def take_in(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message of any type."""
        if isinstance(message, HeartbeatAck):
            self._answered(message, arrived_ns)
        elif isinstance(message, Cancel):
            self._cancel(message)
        else:
            self.handle(message, arrived_ns)

    def watch(self, now_ns: int) -> None:
        """Notice who is not there any more. Called every turn, without any message."""
        silent = self._gateway.silent(now_ns)
        if silent is not None:
            limit_s = self.settings.dead_after_s
            self._lose_gateway(silent, f"has not answered for {limit_s:g} s")

    def _answered(self, message: HeartbeatAck, arrived_ns: int) -> None:
        is_mine = self._ports.round_trips.is_mine(message)
        replaced = self._gateway.answered(message.gateway, message.seq) if is_mine else None
        if replaced is not None:
            self._lose_gateway(replaced, "was started anew")
        if is_mine:
            self._ports.taken.heard(message.seq)
        trip = self._ports.round_trips.answered(message, arrived_ns)
        if trip is not None:
            record_round_trip(self._recorder, trip)

    def _lose_gateway(self, gateway: Peer, what: str) -> None:
        """Nobody waits for the requests of `gateway` any more: end them all."""
        lost = [leg for leg in self.legs if leg.gateway.incarnation == gateway.incarnation]
        if lost:
            _logger.warning("%s %s: ending %d requests", gateway.instance, what, len(lost))
        for leg in lost:
            self.end(leg, _gateway_lost(gateway, what))

    def _cancel(self, message: Cancel) -> None:
        self._gateway.wrote(message.gateway)
        ending = Ending(
            outcome=outcome_of(message.outcome),
            reason=message.reason,
            message=f"{message.reason}: cancelled by {message.by}",
            by=message.by,
        )
        leg = self.legs.get(message.handoff_id)
        if leg is not None:
            self.end(leg, ending)
            return
        past = self.legs.past(message.handoff_id)
        if past is None:
            self.legs.remember(message.handoff_id, ending, arrived=False)
        self.answer(message.gateway, message.handoff_id, ending if past is None else past.ending)

    def ignore(self, why: str, message: AnyMessage) -> None:
        """Count a message without effect."""
        self.ignored[f"{why}.{type(message).__name__}"] += 1
        refuse(message, self.config.instance)

    def ignore_unknown(self, message: AnyMessage) -> None:
        """Count a message of a handoff that is not in the table."""
        known = self.legs.past(handoff_of(message)) is not None
        self.ignore("late" if known else "unknown", message)

    def is_repeated(self, message: AnyMessage) -> bool:
        """Whether a request is here already or was; counts it."""
        handoff_id = handoff_of(message)
        past = self.legs.past(handoff_id)
        if self.legs.get(handoff_id) is not None:
            self.ignore("duplicate", message)
        elif past is not None and past.arrived:
            self.ignore("late", message)
        else:
            return False
        return True

    def admit(self, leg: LegT) -> bool:
        """Put a request into the table, unless its end came first or the worker is stopping."""
        past = self.legs.past(leg.handoff_id)
        self._gateway.wrote(leg.gateway)
        self._ports.taken.take(leg.handoff_id)
        self.legs.add(leg)
        if past is not None:
            self.end(leg, past.ending, tell_peer=False)
        elif self._gateway.is_retired(leg.gateway):
            self.end(leg, _gateway_lost(leg.gateway, "was started anew"))
        elif self.draining:
            self._refuse_draining(leg)
        return leg.ending is None

    def overload(self) -> tuple[str, str] | None:
        """Why one more request may not wait here, as reason and sentence; None when it may."""
        limit = self.settings.max_waiting
        waiting = sum(self.is_waiting(leg) for leg in self.legs)  # the new one is among them
        if waiting <= limit:
            return None
        return "overloaded", f"{waiting - 1} requests wait, the limit is {limit}"

    def aborted(self, message: Abort) -> None:
        """The other leg is over; so is this one, now or when it arrives."""
        ending = Ending(
            outcome=outcome_of(message.outcome),
            reason=message.reason,
            message=message.message,
            by=message.by,
        )
        leg = self.legs.get(message.handoff_id)
        if leg is not None:
            self.end(leg, ending, tell_peer=False)
        elif self.legs.past(message.handoff_id) is None:
            self.legs.remember(message.handoff_id, ending, arrived=False)
        else:
            self.ignore("late", message)

    def prompt_refusal(self, prompt_ids: Sequence[int]) -> tuple[str, str] | None:
        """Why a prompt can never be computed here, as reason and sentence; None when it can.

        One bad row would fail the whole step, so rows are checked before they join one.
        """
        info, num_tokens = self.engine.info, len(prompt_ids)
        if not prompt_ids:
            return "invalid_request", "the prompt is empty"
        if min(prompt_ids) < 0 or max(prompt_ids) >= info.vocab_size:
            return "invalid_request", f"a token id is outside the vocabulary of {info.vocab_size}"
        if num_tokens > info.context_length:
            return (
                "context_length",
                f"the prompt has {num_tokens} tokens, the context {info.context_length}",
            )
        needed = self.engine.layout.pages_for(num_tokens)
        if needed > self.allocator.num_pages:
            return "kv_capacity", f"needs {needed} KV pages, has {self.allocator.num_pages}"
        return None

    # -- plan ---------------------------------------------------------------------------------

    def held(self, leg: LegT, stage: str, now_ns: int) -> bool:
        """Whether a fault hook holds `leg` in `stage`; says so in the trace."""
        if not leg.holds.held(stage, now_ns):
            return False
        self._observer.cause(leg, stage, WaitReason.INJECTED, now_ns)
        return True

    def record_waits(self, waits: Sequence[Wait], now_ns: int) -> None:
        """Say in the trace why each of these legs was left out of a plan that has been applied."""
        if not self._recorder.enabled:
            return
        for wait in waits:
            leg = self.legs.get(wait.handoff_id)
            if leg is None:
                continue
            stage = leg.stage
            if not is_due(leg.said, stage, wait.reason, wait.position, now_ns):
                continue
            leg.said = Said(stage, wait.reason, now_ns)
            blockers = wait.blockers
            if wait.reason is WaitReason.KV_PAGES:
                blockers = self.page_holders(now_ns)
            self._observer.waits(leg, wait, blockers, now_ns)

    def page_holders(self, now_ns: int) -> tuple[str, ...]:
        """Requests that hold most of the pages: who is in the way when they run out.

        Looked up again when one of them has gone or holds none any more, else every HOLDERS_NS:
        their order changes with every page, and each change would be one more record for each
        request that waits.
        """
        table = self.legs
        if (
            self._holders_ns is None
            or now_ns - self._holders_ns >= HOLDERS_NS
            or any(
                table.get(leg.handoff_id) is not leg or not self.pages_held(leg)
                for leg in self._holders
            )
        ):
            self._holders_ns = now_ns
            holders = heapq.nlargest(MAX_BLOCKERS, table, key=self.pages_held)
            self._holders = tuple(leg for leg in holders if self.pages_held(leg))
        return tuple(leg.request_id for leg in self._holders)

    def page_budget(self, free: int) -> PageBudget:
        return PageBudget(free=free, total=self.allocator.num_pages)

    def tell_pauses(self, now_ns: int) -> None:
        """Say in the trace of each request that this process stood still in a stage of its own, if
        it did. Where tokens come late, the gap says so."""
        for begin_ns, end_ns in self._standstill.news(now_ns):
            for leg in self.legs:
                stage = STAGE_BY_NAME.get(leg.stage)
                if stage is not None and self._role in stage.roles and stage.name != _GENERATE:
                    self._observer.paused(leg, stage.name, begin_ns, end_ns)
                    leg.said = None  # what it waits for now is said anew

    def say_kept_waiting(self, leg: LegT, stage: str, arrived_ns: int) -> None:
        """Say in the trace that a message of `leg` lay in the inbox because a step ran, or could
        not come because this process stood still, if so."""
        if leg.ending is not None:  # refused meanwhile: its trace has ended
            return
        pause = self._standstill.before(arrived_ns)
        if pause is not None:
            came_by = stage if STAGE_BY_NAME[stage].kind is Kind.HOP else "hop.dispatch"
            self._observer.paused(leg, came_by, *pause)
            return
        step = self._log.kept_waiting(arrived_ns)
        if step is not None:
            self._observer.cause(leg, stage, WaitReason.WORKER_BUSY, arrived_ns, blockers=step.who)

    # -- run ----------------------------------------------------------------------------------

    def ran(
        self, kind: StepKind, legs: Sequence[LegT], tokens: Sequence[int], begin_ns: int
    ) -> tuple[int, int]:
        """Record the step that has just ended, well or not: its number, and when it ended.

        tokens   computed for each of `legs`
        """
        end_ns = self._clock()
        doing = Doing.PREFILL if kind is StepKind.PREFILL else Doing.DECODE
        who = largest([(leg.request_id, count) for leg, count in zip(legs, tokens, strict=True)])
        self._log.add(begin_ns, end_ns, doing, who)
        self.tell_pauses(end_ns)  # before the step's requests leave their stage
        number = self._recorder.step(
            kind,
            [leg.trace for leg in legs],
            tokens=sum(tokens),
            begin_ns=begin_ns,
            end_ns=end_ns,
        )
        return number, end_ns

    # -- end ----------------------------------------------------------------------------------

    def fail(self, leg: LegT, reason: str, message: str, *, tell_peer: bool = True) -> None:
        """End `leg` as failed, by this worker."""
        self.end(
            leg,
            Ending(outcome=Outcome.FAILED, reason=reason, message=message, by=self.config.instance),
            tell_peer=tell_peer,
        )

    def fail_step(self, legs: Sequence[LegT], error: Exception) -> None:
        """A step raised: its requests fail, the loop goes on."""
        _logger.error("step of %d requests failed", len(legs), exc_info=error)
        for leg in legs:
            self.fail(leg, "engine_error", f"{type(error).__name__} in a step: {error}")

    def close(self, leg: LegT, at_ns: int) -> None:
        """`leg` holds nothing any more: it is closed, forgotten and answered."""
        assert leg.ending is not None
        leg.advance(type(leg.state)("closed"), at_ns)
        self.legs.close(leg)
        self._again = True
        self.answer(leg.gateway, leg.handoff_id, leg.ending)
        _logger.info(
            "request_id=%s trace_id=%s handoff_id=%s outcome=%s reason=%s seconds=%.3f",
            logged(leg.request_id),
            leg.context.trace_id,
            leg.handoff_id,
            leg.ending.outcome,
            leg.ending.reason,
            (at_ns - leg.created_ns) / 1e9,
        )

    def completed(self) -> Ending:
        return Ending(
            outcome=Outcome.COMPLETED, reason="completed", message="", by=self.config.instance
        )

    def answer(self, gateway: Peer, handoff_id: str, ending: Ending) -> None:
        """Tell the gateway with the next publication, behind the tokens of this turn."""
        self._closed.append(
            (
                gateway.endpoint,
                LegClosed(
                    handoff_id=handoff_id,
                    instance=self.config.instance,
                    outcome=ending.outcome,
                    reason=ending.reason,
                    message=ending.message,
                    by=ending.by,
                ),
            )
        )

    def _time_out(self, leg: LegT) -> None:
        if leg.state.value == "draining":
            self.drain_expired(leg)
            return
        self.end(
            leg,
            self._ending(
                Outcome.TIMED_OUT, "deadline_exceeded", f"{leg.waits_in} took longer than allowed"
            ),
        )

    def _give_up(self, leg: LegT, reason: str, what: str) -> None:
        """End `leg` as failed, whatever it takes: a leg half ended would stay for ever."""
        half_ended = leg.ending
        try:
            self.end(leg, self._ending(Outcome.FAILED, reason, what))
        except Exception:  # a bug in ending: the leg must go all the same
            _logger.exception("ending %s failed", leg.handoff_id)
            half_ended = leg.ending
        if half_ended is not None and self._is_stuck(leg):
            self._abandon(leg, half_ended)

    def _is_stuck(self, leg: LegT) -> bool:
        return self.legs.get(leg.handoff_id) is leg and leg.state.value != "draining"

    def _abandon(self, leg: LegT, ending: Ending) -> None:
        """A leg whose end failed half-way, by a bug of ours: let go of it, pages and all."""
        _logger.error("%s was not closed properly and is abandoned", leg.handoff_id)
        self.ignored["integrity"] += 1
        self.legs.close(leg)
        leg.trace.end()
        self.answer(leg.gateway, leg.handoff_id, ending)

    def _ending(self, outcome: Outcome, reason: str, what: str) -> Ending:
        instance = self.config.instance
        return Ending(outcome=outcome, reason=reason, message=f"{instance}: {what}", by=instance)

    # -- publish ------------------------------------------------------------------------------

    def emit(self, leg: LegT, item: TokenItem) -> None:
        """Send tokens with this turn's message to the leg's gateway."""
        self._tokens.setdefault(leg.gateway.endpoint, []).append(item)

    def send(self, peer: Peer, message: AnyMessage) -> bool:
        """Send at once. False, counted, when the peer is unreachable."""
        if self._ports.outbox.send(peer.endpoint, message):
            return True
        self.ignore("unsent", message)
        return False

    def flush(self) -> None:
        """Send the tokens and closings that are ready, before a step keeps them waiting."""
        for endpoint, items in self._tokens.items():
            tokens = Tokens(instance=self.config.instance, items=tuple(items))
            if not self._ports.outbox.send(endpoint, tokens):
                self.ignore("unsent", tokens)
        self._tokens.clear()
        for endpoint, closed in self._closed:
            if not self._ports.outbox.send(endpoint, closed):
                self.ignore("unsent", closed)
        self._closed.clear()

    def publish(self) -> None:
        """Send what is ready, then show where the loop is."""
        self.flush()
        busy = len(self.legs) > 0
        tick_ns = self._ports.progress.tick(busy=busy, load=self.report(), ignored=self.ignored)
        self._recorder.gauges(_GAUGES, (len(self.legs), self._steps, tick_ns))
        if not busy and not self._was_idle:
            try:
                self.check_integrity()
            except Exception:  # a bug of ours must be loud, but must not stop serving
                _logger.exception("%s is idle and not whole", self.config.instance)
                self.ignored["integrity"] += 1
        self._was_idle = not busy

    # -- stop ---------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """From here on requests are refused, those included that still wait; the others go on."""
        self.draining = True
        self._ports.progress.draining = True
        for leg in self.legs:
            if self.is_waiting(leg):
                self._refuse_draining(leg)

    def _refuse_draining(self, leg: LegT) -> None:
        self.end(leg, self._ending(Outcome.REJECTED, DRAINING, "is shutting down"))

    def end_all(self, reason: str, what: str) -> None:
        """Give up every request in flight, as failed for `reason`."""
        for leg in self.legs:
            self._give_up(leg, reason, what)


def _gateway_lost(gateway: Peer, what: str) -> Ending:
    return Ending(
        outcome=Outcome.LOST,
        reason="gateway_lost",
        message=f"{gateway.instance} {what}",
        by=gateway.instance,
    )


def handoff_of(message: AnyMessage) -> str:
    """Handoff a message speaks of; "" for those that speak of none."""
    context = getattr(message, "context", None)
    if context is not None:
        return context.handoff_id
    return getattr(message, "handoff_id", "")


def outcome_of(text: str) -> Outcome:
    """Outcome named in a message; FAILED for a word that is none."""
    try:
        return Outcome(text)
    except ValueError:
        return Outcome.FAILED
