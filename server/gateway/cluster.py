"""The workers as this gateway sees them: who is there, what each has to do, who should be next.

Owns what their messages change; knows nothing of a request beyond its legs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from pdtrace.recorder import RequestContext
from server.config import COLOCATED, PD, Settings
from server.errors import Overloaded
from server.gateway.attempts import Attempt, Attempts, Event, WorkersChanged
from server.gateway.errors import NO_WORKER
from server.gateway.mailbox import Mailbox
from server.gateway.registry import KvCapacity, MemberReport, Registry
from server.gateway.routing import (
    PairChoice,
    Policy,
    RouteRequest,
    RouterState,
    choose_pair,
    count_pairs,
)
from server.injection.process import refuse
from server.wire.messages import AnyMessage, Heartbeat, LegClosed, Peer, Tokens

_logger = logging.getLogger(__name__)


class Mail(Protocol):
    """What the gateway asks of `server.wire.sockets.Outbox`."""

    def send(self, endpoint: str, message: AnyMessage) -> bool: ...

    def forget(self, endpoint: str) -> None: ...


class Cluster:
    """Members, attempts in flight and routing. Lives on one event loop.

    me            how workers reach this gateway
    fingerprint   of the model this gateway tokenizes for
    ignored       told of messages that nobody waits for, by type
    """

    def __init__(
        self,
        *,
        settings: Settings,
        me: Peer,
        fingerprint: str,
        mail: Mail,
        ignored: Callable[[str], None],
    ) -> None:
        self.me = me
        self.policy = Policy(settings.policy)
        self.attempts = Attempts(
            send=mail.send, me=me, drain_s=settings.deadlines.drain_s, ignored=ignored
        )
        num_transfers = 0
        if settings.mode == PD:
            # One per host; over TCP the two sides count as two hosts.
            num_transfers = 2 if settings.transfer == "tcp" else 1
        self._registry = Registry(
            fingerprint=fingerprint,
            colocated=settings.mode == COLOCATED,
            num_transfers=num_transfers,
            dead_after_s=settings.dead_after_s,
            stalled_after_s=settings.stalled_after_s,
        )
        self._mail = mail
        self._ignored = ignored
        self._router = RouterState()
        self._heartbeat_s = settings.heartbeat_s
        self._dead_after_s = settings.dead_after_s
        self._last_look_s = time.monotonic()
        self._without_worker: set[Mailbox[Event]] = set()

    def deliver(self, message: AnyMessage) -> None:
        """Take in one message of a worker."""
        if isinstance(message, Tokens):
            for item in message.items:
                self.attempts.tokens(item)
        elif isinstance(message, LegClosed):
            self.attempts.leg_closed(message)
        elif isinstance(message, Heartbeat):
            replaced = self._registry.observe(message, time.monotonic())
            if replaced is not None:
                self._lose(replaced, "was started again")
                self.attempts.worker_replaced(replaced)
            self.attempts.worker_back(message.peer)
            for mailbox in self._without_worker:
                mailbox.put(WorkersChanged())
        else:
            self._ignored(type(message).__name__)
            refuse(message, self.me.instance)

    def bury_dead(self) -> None:
        """Notice who has not beaten in time. To be called every `heartbeat_s`.

        A gateway that was stopped or starved finds everybody silent, and their heartbeats still
        unread: the time it missed itself is nobody's silence.
        """
        now_s = time.monotonic()
        missed_s = now_s - self._last_look_s - self._heartbeat_s
        if missed_s > self._dead_after_s / 4:
            _logger.warning("this gateway stood still for %.1f s", missed_s)
            self._registry.excuse(missed_s, now_s)
        self._last_look_s = now_s
        for peer in self._registry.newly_dead(now_s):
            self._lose(peer, "sent no heartbeat in time")

    def reports(self) -> list[MemberReport]:
        """All processes heard of, in order of name."""
        return self._registry.reports(time.monotonic())

    def kv_capacity(self) -> KvCapacity:
        return self._registry.kv_capacity(time.monotonic())

    def num_pairs(self) -> int:
        """Pairs that could serve a request at this instant."""
        return count_pairs(self._registry.snapshot(time.monotonic(), self.attempts.use))

    async def wait_for_pair(self, mailbox: Mailbox[Event]) -> None:
        """Return when there is a pair. Raises an interruption of `mailbox`."""
        self._without_worker.add(mailbox)
        try:
            while self.num_pairs() == 0:
                await mailbox.take()
        finally:
            self._without_worker.discard(mailbox)

    def choose(self, request: RouteRequest) -> PairChoice:
        """The pair for `request`. Raises Overloaded when there is none."""
        snapshot = self._registry.snapshot(time.monotonic(), self.attempts.use)
        choice = choose_pair(snapshot, request, self.policy, self._router)
        if choice is None:
            raise Overloaded("No pair of workers is ready.", code=NO_WORKER)
        self._router.record(choice, request, self.policy)
        return choice

    def dispatch(
        self,
        messages: list[tuple[Peer, AnyMessage]],
        context: RequestContext,
        choice: PairChoice,
        *,
        prompt_len: int,
        promised_tokens: int,
        mailbox: Mailbox[Event],
        on_closed: Callable[[], None],
    ) -> tuple[Attempt, Peer | None]:
        """Open an attempt and send its legs, in order; and the peer that takes no messages, if any.

        After a refusal the legs behind it are not asked to begin.
        """
        attempt = self.attempts.open(
            context,
            choice,
            prompt_len=prompt_len,
            promised_tokens=promised_tokens,
            mailbox=mailbox,
            on_closed=on_closed,
        )
        refused: Peer | None = None
        for peer, message in messages:
            if refused is not None or not self._mail.send(peer.endpoint, message):
                refused = refused or peer
                self.attempts.leg_refused(attempt, peer)
        return attempt, refused

    def _lose(self, peer: Peer, why: str) -> None:
        _logger.warning("%s is gone: it %s", peer.instance, why)
        self.attempts.worker_gone(peer)
        self._router.forget(peer.incarnation)
        # What was queued for it must not reach a successor at the same address.
        self._mail.forget(peer.endpoint)
