"""Attempts in flight: which legs each of them has, who listens to it, when it is really over.

Owns the life of an attempt from dispatch until no worker holds anything of it; knows nothing of
HTTP or of what the tokens say.

    dispatched ─▶ let go (the client has its end, ─▶ closed (both legs said so, are dead, or the
                  or another attempt takes over)            drain deadline passed)

An attempt keeps its request's place in the gateway until it is closed: a place is free when the
workers are, not when the client is gone. Messages may be lost, so legs that stay open are reminded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdtrace.propagation import RequestContext
from pdtrace.stages import Outcome
from server.errors import RequestError, WorkerLost
from server.gateway.acceptance import Acceptance
from server.gateway.errors import GATEWAY, LegFailed, RequestLost, WorkerVanished
from server.gateway.mailbox import Mailbox
from server.gateway.registry import WorkerUse
from server.gateway.routing import PairChoice
from server.wire.messages import AnyMessage, Cancel, Heartbeat, LegClosed, Peer, TokenItem

REMIND_S = 0.5
"""How long a leg may take to answer a Cancel before it gets another."""
LAG_S = 1.0
"""How long a leg may stay open behind a complete answer before it is told to stop."""

Send = Callable[[str, AnyMessage], bool]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has its place."""


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """A worker appeared or changed its state."""


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker that holds a leg of the request vanished."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class LegMissing:
    """A worker is well and did not get its part of the request."""

    peer: Peer


Event = Admitted | WorkersChanged | TokenItem | LegClosed | WorkerGone | LegMissing


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the legs of an attempt are to stop."""

    outcome: Outcome
    reason: str
    by: str


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One attempt of a request, sent to its workers.

    open_legs   peers that have not closed their leg, by instance name
    let_go      nobody listens to it any more
    stop        why its legs were told to stop; None if they were not
    closed      set when no leg is open
    """

    context: RequestContext
    choice: PairChoice
    prompt_len: int
    promised_pages: int
    mailbox: Mailbox[Event]
    on_closed: Callable[[], None]
    open_legs: dict[str, Peer]
    let_go: bool = False
    stop: Stop | None = None
    first_token_seen: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    timers: list[asyncio.TimerHandle] = field(default_factory=list[asyncio.TimerHandle])

    @property
    def handoff_id(self) -> str:
        return self.context.handoff_id


def failure_of(event: Event) -> RequestError | None:
    """What `event` says about an attempt that has not finished; None if all is well."""
    if isinstance(event, WorkerGone):
        name = event.peer.instance
        return WorkerVanished(f"{name} vanished while it held the request.", by=name)
    if isinstance(event, LegMissing):
        name = event.peer.instance
        return RequestLost(f"{name} did not get the request.", by=name)
    if isinstance(event, LegClosed) and event.outcome != Outcome.COMPLETED:
        return LegFailed.of(event)
    return None


class Attempts:
    """All attempts in flight, by handoff id, and what they make of each worker's load.

    send      to an endpoint; False when the message was refused
    me        this gateway, for answers
    ignored   told of messages that nobody waits for, by type
    """

    def __init__(
        self,
        *,
        send: Send,
        me: Peer,
        drain_s: float,
        accept_s: float,
        ignored: Callable[[str], None],
    ) -> None:
        self._send = send
        self._me = me
        self._drain_s = drain_s
        self._ignored = ignored
        self._acceptance = Acceptance(accept_s)
        self._open: dict[str, Attempt] = {}
        self.use: dict[str, WorkerUse] = {}
        """Per incarnation of a worker."""
        self._lost: dict[str, list[str]] = {}  # handoffs it may hold, per incarnation given up

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        context: RequestContext,
        choice: PairChoice,
        *,
        prompt_len: int,
        promised_tokens: int,
        mailbox: Mailbox[Event],
        on_closed: Callable[[], None],
    ) -> Attempt:
        """Register an attempt; its messages may follow."""
        peers = {worker.peer.instance: worker.peer for worker in (choice.prefill, choice.decode)}
        attempt = Attempt(
            context=context,
            choice=choice,
            prompt_len=prompt_len,
            promised_pages=choice.decode.layout.pages_for(promised_tokens),
            mailbox=mailbox,
            on_closed=on_closed,
            open_legs=peers,
        )
        self._open[attempt.handoff_id] = attempt
        for peer in peers.values():
            self._use(peer).in_flight += 1
        self._use(choice.prefill.peer).pending_tokens += prompt_len
        self._use(choice.decode.peer).promised_pages += attempt.promised_pages
        return attempt

    def tokens(self, item: TokenItem) -> None:
        """Tokens arrived."""
        attempt = self._open.get(item.handoff_id)
        if attempt is None:
            self._ignored("tokens")
            return
        self._saw_token(attempt)
        if not attempt.let_go:
            attempt.mailbox.put(item)
        elif item.finish_reason is None:
            # The answer ended here, at a stop string, and the worker goes on: it must not.
            self.cancel(attempt, Outcome.COMPLETED, "stop", by=GATEWAY)

    def leg_sent(self, attempt: Attempt, peer: Peer, *, beat: int, now_s: float) -> None:
        """The request is on its way to `peer`, whose latest heartbeat had number `beat`."""
        self._acceptance.sent(peer.incarnation, attempt.handoff_id, beat=beat, now_s=now_s)

    def heard(self, beat: Heartbeat, now_s: float) -> None:
        """A worker said what it has taken in: legs that it lacks are missing."""
        for handoff_id in self._acceptance.heard(beat, now_s):
            attempt = self._open[handoff_id]
            _logger.warning("%s: %s did not get the request", handoff_id, beat.peer.instance)
            if not attempt.let_go:
                attempt.mailbox.put(LegMissing(beat.peer))

    def leg_closed(self, message: LegClosed) -> PairChoice | None:
        """A worker let go of an attempt: its workers, if nobody had told them to."""
        attempt = self._open.get(message.handoff_id)
        if attempt is None or message.instance not in attempt.open_legs:
            self._ignored("leg_closed")
            return None
        unasked = attempt.stop is None
        if not attempt.let_go:
            attempt.mailbox.put(message)
        self._close_leg(attempt, message.instance)
        return attempt.choice if unasked else None

    def worker_gone(self, peer: Peer) -> None:
        """A worker counts as dead: what it had is lost. If it only stood still: `worker_back`."""
        for attempt in list(self._open.values()):
            if attempt.open_legs.get(peer.instance) == peer:
                self._lost.setdefault(peer.incarnation, []).append(attempt.handoff_id)
                if not attempt.let_go:
                    attempt.mailbox.put(WorkerGone(peer))
                self._close_leg(attempt, peer.instance)
        self.use.pop(peer.incarnation, None)

    def worker_replaced(self, peer: Peer) -> None:
        """Another incarnation took the place of `peer`, which cannot come back."""
        self._lost.pop(peer.incarnation, None)

    def worker_back(self, peer: Peer) -> None:
        """A worker is alive. If it was given up, it must not go on with what it had."""
        for handoff_id in self._lost.pop(peer.incarnation, ()):
            self._cancel_at(peer, handoff_id, Outcome.FAILED, WorkerLost.code, by=GATEWAY)

    def cancel(self, attempt: Attempt, outcome: Outcome, reason: str, *, by: str) -> None:
        """Tell the legs that are open to stop. The first reason counts."""
        if attempt.stop is not None:
            return
        attempt.stop = Stop(outcome, reason, by)
        self._saw_token(attempt)
        self._stop_legs(attempt, attempt.stop)

    def _stop_legs(self, attempt: Attempt, stop: Stop) -> None:
        for peer in attempt.open_legs.values():
            self._cancel_at(peer, attempt.handoff_id, stop.outcome, stop.reason, by=stop.by)

    def _cancel_at(
        self, peer: Peer, handoff_id: str, outcome: Outcome, reason: str, *, by: str
    ) -> None:
        self._send(
            peer.endpoint,
            Cancel(handoff_id=handoff_id, outcome=outcome, reason=reason, by=by, gateway=self._me),
        )

    def leg_refused(self, attempt: Attempt, peer: Peer) -> None:
        """The request did not get on its way to `peer`, which therefore holds nothing."""
        self._close_leg(attempt, peer.instance)

    def let_go(self, attempt: Attempt) -> None:
        """Nobody listens any more. From here on the legs have `drain_s` to close. Idempotent."""
        if attempt.let_go:
            return
        attempt.let_go = True
        if not attempt.open_legs:
            self._close(attempt)
            return
        loop = asyncio.get_running_loop()
        first_s = LAG_S if attempt.stop is None else REMIND_S
        attempt.timers = [
            loop.call_later(self._drain_s, self._give_up_on, attempt),
            loop.call_later(first_s, self._remind, attempt),
        ]

    def _remind(self, attempt: Attempt) -> None:
        """A leg is open still: what it was told, or what it answered, may be lost."""
        if attempt.stop is None:
            self.cancel(attempt, Outcome.COMPLETED, "stop", by=GATEWAY)
        else:
            self._stop_legs(attempt, attempt.stop)
        loop = asyncio.get_running_loop()
        attempt.timers[-1] = loop.call_later(REMIND_S, self._remind, attempt)

    def _give_up_on(self, attempt: Attempt) -> None:
        _logger.warning(
            "%s: %s did not close within %g s",
            attempt.handoff_id,
            ", ".join(sorted(attempt.open_legs)),
            self._drain_s,
        )
        self._ignored("leg_not_closed")
        for instance in list(attempt.open_legs):
            self._close_leg(attempt, instance)

    def _close_leg(self, attempt: Attempt, instance: str) -> None:
        peer = attempt.open_legs.pop(instance)
        self._acceptance.over(peer.incarnation, attempt.handoff_id)
        use = self._use(peer)
        use.in_flight -= 1
        if peer == attempt.choice.prefill.peer:
            self._saw_token(attempt)
        if peer == attempt.choice.decode.peer:
            use.promised_pages -= attempt.promised_pages
        if not attempt.open_legs:
            attempt.closed.set()
            if attempt.let_go:
                self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        for timer in attempt.timers:
            timer.cancel()
        if self._open.pop(attempt.handoff_id, None) is not None:
            attempt.on_closed()

    def _saw_token(self, attempt: Attempt) -> None:
        """Prefill has nothing more to compute for it."""
        if not attempt.first_token_seen:
            attempt.first_token_seen = True
            self._use(attempt.choice.prefill.peer).pending_tokens -= attempt.prompt_len

    def _use(self, peer: Peer) -> WorkerUse:
        return self.use.setdefault(peer.incarnation, WorkerUse())
