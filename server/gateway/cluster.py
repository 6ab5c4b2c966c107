"""The workers as this gateway sees them: who is there, what each has to do, who should be next.

Owns what their messages change; knows nothing of a request beyond its legs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from server.config import COLOCATED, PD, Settings
from server.gateway.attempts import Attempt, Attempts, Event, WorkersChanged
from server.gateway.errors import AttemptFailure, NoPair, WorkerVanished
from server.gateway.expected import expected_instances
from server.gateway.mailbox import Mailbox
from server.gateway.now import SYSTEM_NOW, Now
from server.gateway.pairing import Refusal, RefusedPairs
from server.gateway.registry import KvCapacity, MemberReport, MemberState, Registry
from server.gateway.retry import Blame, rule_of
from server.gateway.routing import (
    ClusterSnapshot,
    PairChoice,
    Policy,
    RouteRequest,
    RouterState,
    choose_pair,
    count_pairs,
    misfits,
    refusals,
)
from server.injection.process import refuse
from server.log_fields import logged
from server.wire.messages import AnyMessage, Heartbeat, LegClosed, Peer, Tokens

FORGET_AFTER = 20
"""After how many times `dead_after_s` without a heartbeat a stranger is forgotten."""

_logger = logging.getLogger(__name__)


class Mail(Protocol):
    """What the gateway asks of `server.wire.sockets.Outbox`."""

    def send(self, endpoint: str, message: AnyMessage) -> bool: ...

    def forget(self, endpoint: str) -> None: ...

    def is_lost(self, endpoint: str) -> bool: ...


class Cluster:
    """Members, attempts in flight and routing. Lives on one event loop.

    me            how workers reach this gateway
    fingerprint   of the model this gateway tokenizes for
    ignored       told of messages that nobody waits for, by type
    forgotten     told of each stranger that is forgotten
    """

    def __init__(
        self,
        *,
        settings: Settings,
        me: Peer,
        fingerprint: str,
        mail: Mail,
        ignored: Callable[[str], None],
        forgotten: Callable[[], None] = lambda: None,
        now: Now = SYSTEM_NOW,
    ) -> None:
        self.me = me
        self._now = now
        self.policy = Policy(settings.policy)
        self.attempts = Attempts(
            send=mail.send,
            me=me,
            drain_s=settings.deadlines.drain_s,
            accept_s=settings.deadlines.accept_s,
            ignored=ignored,
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
            expected=expected_instances(settings),
        )
        self._mail = mail
        self._ignored = ignored
        self._forgotten = forgotten
        self._router = RouterState()
        self._refused = RefusedPairs()
        self._heartbeat_s = settings.heartbeat_s
        self._dead_after_s = settings.dead_after_s
        self._last_look_s = self._now.s()
        self._without_worker: set[Mailbox[Event]] = set()

    def deliver(self, message: AnyMessage) -> None:
        """Take in one message of a worker."""
        if isinstance(message, Tokens):
            for item in message.items:
                self.attempts.tokens(item)
        elif isinstance(message, LegClosed):
            choice = self.attempts.leg_closed(message)
            if choice is not None:
                self._learn(choice, message.reason, message.message, by=message.by)
        elif isinstance(message, Heartbeat):
            replaced = self._registry.observe(message, self._now.s())
            if replaced is not None:
                self._lose(replaced, "was started again")
                self.attempts.worker_replaced(replaced)
                self._refused.forget(replaced.incarnation)
            self.attempts.worker_back(message.peer)
            self.attempts.heard(message, self._now.s())
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
        now_s = self._now.s()
        missed_s = now_s - self._last_look_s - self._heartbeat_s
        if missed_s > self._dead_after_s / 4:
            _logger.warning("this gateway stood still for %.1f s", missed_s)
            self._registry.excuse(missed_s, now_s)
        self._last_look_s = now_s
        self._doubt_lost(self._registry.peers())
        self._registry.cut_off(
            lambda peer: self._mail.is_lost(peer.endpoint), 2 * self._heartbeat_s, now_s
        )
        for peer in self._registry.newly_dead(now_s):
            if self._registry.has_left(peer):
                self._lose(peer, "stopped when it was told to", logging.INFO)
            else:
                self._lose(peer, "sent no heartbeat in time")
        for report in self._registry.forget_strangers(FORGET_AFTER * self._dead_after_s, now_s):
            self._forgotten()
            _logger.warning(
                "%s, which this server did not start, is forgotten: %s, silent for %.0f s",
                logged(report.instance),
                report.state,
                report.heartbeat_age_s,
            )

    def reports(self) -> list[MemberReport]:
        """All processes heard of, in order of name."""
        reports = self._registry.reports(self._now.s())
        alone = misfits(self._snapshot(), self._refused.reasons)
        return [
            replace(
                report,
                state=MemberState.INCOMPATIBLE,
                reason=alone[report.instance].sentence,
                lacking=True,
            )
            if report.state is MemberState.READY and report.instance in alone
            else report
            for report in reports
        ]

    def refusals(self) -> list[Refusal]:
        """Pairings of the workers that are ready which are not chosen, and why."""
        return refusals(self._snapshot(), self._refused.reasons)

    def kv_capacity(self) -> KvCapacity:
        return self._registry.kv_capacity(self._now.s())

    def num_pairs(self) -> int:
        """Pairs that could serve a request at this instant."""
        return count_pairs(self._snapshot())

    def _snapshot(self) -> ClusterSnapshot:
        return self._registry.snapshot(
            self._now.s(), self.attempts.use, frozenset(self._refused.reasons)
        )

    def _doubt_lost(self, peers: Iterable[Peer]) -> bool:
        """Give those no work to whom the connection is lost; whether there are any."""
        lost = [peer for peer in peers if self._mail.is_lost(peer.endpoint)]
        for peer in lost:
            self._registry.doubt(peer.incarnation, "its connection was lost")
        return bool(lost)

    def has_pair(self, request: RouteRequest) -> bool:
        """Whether there is a pair for `request`. Raises NoPair when there will be none."""
        return self._look_for_pair(request) is not None

    async def wait_for_pair(self, request: RouteRequest, mailbox: Mailbox[Event]) -> None:
        """Return when there is a pair for `request`.

        Raises NoPair when waiting is in vain, and an interruption of `mailbox`.
        """
        self._without_worker.add(mailbox)
        try:
            while self._look_for_pair(request) is None:
                await mailbox.take()
        finally:
            self._without_worker.discard(mailbox)

    def choose(self, request: RouteRequest) -> PairChoice | None:
        """The pair for `request`; None when there is none at this instant.

        Raises NoPair when there will be none.
        """
        choice = self._look_for_pair(request)
        if choice is not None:
            self._router.record(choice, request, self.policy)
        return choice

    def _look_for_pair(self, request: RouteRequest) -> PairChoice | None:
        while True:
            snapshot = self._snapshot()
            choice = choose_pair(snapshot, request, self.policy, self._router)
            if choice is None:
                break
            if not self._doubt_lost((choice.prefill.peer, choice.decode.peer)):
                return choice
        if count_pairs(snapshot) == 0:
            refused = refusals(snapshot, self._refused.reasons)
            if refused:
                raise NoPair.refused(refused)
        return None

    def after(
        self, choice: PairChoice, request: RouteRequest, error: AttemptFailure
    ) -> RouteRequest:
        """`request` for the attempt after one on `choice` that failed with `error`.

        Raises `error` when there is no way but the one that led there, NoPair when there is none.
        """
        rule = rule_of(error.code)
        assert rule is not None
        blame = Blame.WORKER if isinstance(error, WorkerVanished) else rule.blame
        avoid = {peer.incarnation for peer in _blamed(choice, blame, error.by)}
        following = replace(request, avoid=request.avoid | avoid, elsewhere=rule.elsewhere)
        if self._look_for_pair(following) is None and rule.elsewhere:
            raise error
        return following

    def _learn(self, choice: PairChoice, reason: str, message: str, *, by: str) -> None:
        """What the end of an attempt says of its workers."""
        rule = rule_of(reason)
        if rule is None:
            return
        if rule.refuse and by == choice.prefill.peer.instance:
            self._refused.add(choice.prefill.peer, choice.decode.peer, message or reason)
        if rule.doubt and rule.blame is Blame.TRANSFER:
            self._registry.doubt_transfers(reason)
        elif rule.doubt:
            for peer in _blamed(choice, rule.blame, by):
                self._registry.doubt(peer.incarnation, reason)

    def dispatch(
        self, attempt: Attempt, messages: Sequence[tuple[Peer, AnyMessage]]
    ) -> Peer | None:
        """Send the legs of an attempt, in order; the peer that takes no messages, if there is one.

        After a refusal the legs behind it are not asked to begin.
        """
        refused: Peer | None = None
        for peer, message in messages:
            if refused is not None or not self._mail.send(peer.endpoint, message):
                refused = refused or peer
                self.attempts.leg_refused(attempt, peer)
            else:
                beat = self._registry.latest_beat(peer.incarnation)
                self.attempts.leg_sent(attempt, peer, beat=beat, now_s=self._now.s())
        if refused is not None:
            self._registry.doubt(refused.incarnation, "takes no messages")
        return refused

    def _lose(self, peer: Peer, why: str, level: int = logging.WARNING) -> None:
        _logger.log(level, "%s is gone: it %s", logged(peer.instance), why)
        self.attempts.worker_gone(peer)
        self._router.forget(peer.incarnation)
        # What was queued for it must not reach a successor at the same address.
        self._mail.forget(peer.endpoint)


def _blamed(choice: PairChoice, blame: Blame, by: str) -> list[Peer]:
    """Workers of `choice` that `blame` means, after an end by the instance `by`."""
    pair = [choice.prefill.peer, choice.decode.peer]
    match blame:
        case Blame.PAIR:
            return pair
        case Blame.WORKER:
            return [peer for peer in pair if peer.instance == by]
        case Blame.PARTNER:
            is_one = any(peer.instance == by for peer in pair)
            return [peer for peer in pair if is_one and peer.instance != by]
        case Blame.NOBODY | Blame.TRANSFER:
            return []
