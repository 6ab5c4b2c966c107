"""What prefill and decode workers share: one leg of a handoff, whose pages are copied.

Owns the watch over the other leg's worker and over the host's transfer process, and the pages that
are not reused before the transfer has let go of them; knows nothing of prompts or tokens. When the
other worker is asked, and when it counts as gone, is `server.counterparts`.
"""

from __future__ import annotations

from abc import abstractmethod

from pdtrace.stages import Outcome
from server.config import ProcessConfig
from server.counterparts import Counterparts
from server.engine.base import Engine
from server.kv.transfer.base import Reason
from server.legs import LegT
from server.ports import Ports
from server.quarantine import Quarantine
from server.registration import Registration
from server.request import NS_PER_S, Ending
from server.scheduler import Scheduler, outcome_of
from server.wire.messages import (
    Abort,
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    CopyFailed,
    LegProbe,
    LegReport,
    LegStatus,
    Peer,
)

CLOSED = "closed"
DRAINING = "draining"
MAX_MISSES = 4
"""How often the other leg may say that all was sent before one that still lacks some gives up."""


class PairedScheduler(Scheduler[LegT]):
    """Base of the workers that hold one leg of a handoff."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        super().__init__(config, engine, ports)
        assert config.transfer_endpoint is not None
        self._transfer = Peer(
            instance="transfer", endpoint=config.transfer_endpoint, incarnation=""
        )
        self.quarantine = Quarantine()
        self.registration = Registration(
            self.peer,
            engine.pool.descriptor,
            lambda message: self.send(self._transfer, message),
            dead_after_s=config.settings.dead_after_s,
        )
        settings = config.settings
        self._counterparts = Counterparts(
            self.peer,
            every_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            silent_s=settings.deadlines.peer_silence_s,
            send=self.send,
        )

    # -- what a worker says of its legs -------------------------------------------------------

    @abstractmethod
    def counterpart(self, leg: LegT) -> Peer:
        """The worker of the other leg."""

    @abstractmethod
    def needs_other(self, leg: LegT) -> bool:
        """Whether `leg` cannot go on, or end well, without the other one."""

    @abstractmethod
    def lacks(self, leg: LegT) -> str:
        """What `leg` waits for that the other worker sends; see `LegStatus`."""

    @abstractmethod
    def has_whole_kv(self, leg: LegT) -> bool:
        """Whether all KV has landed, as far as `leg` knows."""

    @abstractmethod
    def send_again(self, leg: LegT, lacking: str) -> None:
        """The other leg lacks what `leg` may have sent already."""

    @abstractmethod
    def send_again_past(self, handoff_id: str, lacking: str, to: Peer) -> None:
        """The other leg lacks what one that completed here has sent."""

    @abstractmethod
    def other_completed(self, leg: LegT, status: LegStatus) -> None:
        """The other leg has all of its own behind it, or its KV is whole."""

    @abstractmethod
    def is_copied(self, leg: LegT) -> bool:
        """Whether the transfer process was given copies of `leg` that it may not have finished."""

    @abstractmethod
    def free_and_close(self, leg: LegT) -> None:
        """Nothing touches the pages of `leg` any more: free them and close it."""

    # -- receive ------------------------------------------------------------------------------

    def handle(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message that either of the two workers may get."""
        match message:
            case LegProbe():
                self._probed(message)
            case LegReport():
                self._reported(message)
            case CopiesDrained():
                self._drained(message)
            case CopyFailed():
                self._copy_failed(message)
            case Abort():
                self.aborted(message)
            case _:
                self.ignore("unexpected", message)

    def _drained(self, message: CopiesDrained) -> None:
        if message.transfer.endpoint != self.config.transfer_endpoint:
            self.ignore("foreign", message)  # it says nothing of this host's transfer process
            return
        if self.registration.replaced_by(message.transfer, message.started_ns):
            self._transfer_replaced(message.transfer)
        if self.registration.answered(message):
            if self.registration.known:
                self.jobs_told(message)
            return
        leg = self.legs.get(message.handoff_id)
        if leg is not None and leg.state.value == DRAINING:
            self.free_and_close(leg)
        elif self.quarantine.release(message.handoff_id):
            self._again = True
        else:
            self.ignore_unknown(message)

    def _copy_failed(self, message: CopyFailed) -> None:
        if message.reason == Reason.UNKNOWN_POOL:
            self.registration.forget()
        leg = self.legs.get(message.handoff_id)
        if leg is None:
            self.ignore_unknown(message)
        elif self.is_copied(leg):
            self.copies_failed(leg, message)
        else:
            self.ignore("late", message)

    def copies_failed(self, leg: LegT, message: CopyFailed) -> None:
        """End `leg`. That no more jobs will run does not say that the failed one let go of its
        source pages, so this ends by draining, like every end with copies open."""
        timed_out = message.reason == Reason.TRANSFER_TIMEOUT
        self.end(
            leg,
            Ending(
                outcome=Outcome.TIMED_OUT if timed_out else Outcome.FAILED,
                reason=message.reason,
                message=message.message,
                by=self.config.instance,
            ),
        )

    def _transfer_replaced(self, transfer: Peer) -> None:
        """The transfer process was started anew. It knows nothing of what was asked of the one
        before it, which cannot touch a page any more: once it has answered to a drain, all of a
        handoff's pages are safe."""
        for leg in self.legs:
            if leg.state.value == DRAINING:
                self.cancel_copies(leg.handoff_id)
            elif self.loses_with_transfer(leg):
                self.fail(
                    leg, "transfer_lost", f"{transfer.instance} was started anew with copies open"
                )
        self.quarantine.ask_now()

    def jobs_told(self, message: CopiesDrained) -> None:
        """The transfer process said which of this worker's copy jobs it has got."""

    @abstractmethod
    def loses_with_transfer(self, leg: LegT) -> bool:
        """Whether a transfer process that is no more took copies of `leg` with it."""

    def _probed(self, message: LegProbe) -> None:
        asker = message.asker
        self._counterparts.heard(asker)
        statuses: list[LegStatus] = []
        for asked in message.legs:
            leg = self.legs.get(asked.handoff_id)
            if leg is None:
                if asked.lacks:
                    self.send_again_past(asked.handoff_id, asked.lacks, asker)
                statuses.append(self._past_status(asked.handoff_id))
            elif self.counterpart(leg).incarnation != asker.incarnation:
                statuses.append(LegStatus(handoff_id=asked.handoff_id))
            else:
                # What was sent a moment ago is on its way: it would arrive twice.
                if asked.lacks and leg.ending is None and not self.is_recent(leg.entered_ns):
                    self.send_again(leg, asked.lacks)
                statuses.append(self._status(leg))
        self.send(asker, LegReport(peer=self.peer, legs=tuple(statuses)))

    def is_recent(self, at_ns: int) -> bool:
        """Whether what was sent at that time may still be on its way."""
        return self._clock() - at_ns < self.settings.heartbeat_s * NS_PER_S / 2

    def _status(self, leg: LegT) -> LegStatus:
        if leg.ending is not None:
            return _ended(leg.handoff_id, leg.ending)
        return LegStatus(
            handoff_id=leg.handoff_id,
            state=leg.state.value,
            lacks=self.lacks(leg),
            whole=self.has_whole_kv(leg),
        )

    def _past_status(self, handoff_id: str) -> LegStatus:
        past = self.legs.past(handoff_id)
        return LegStatus(handoff_id=handoff_id) if past is None else _ended(handoff_id, past.ending)

    def _reported(self, message: LegReport) -> None:
        self._counterparts.heard(message.peer)
        for status in message.legs:
            leg = self.legs.get(status.handoff_id)
            if leg is None or leg.ending is not None or not self.needs_other(leg):
                continue
            if message.peer.incarnation != self.counterpart(leg).incarnation:
                self._lose(leg, "was started anew")
            elif status.state == "":
                self._other_is_unknown(leg)
            elif status.state == CLOSED and status.outcome != Outcome.COMPLETED:
                ending = Ending(
                    outcome=outcome_of(status.outcome),
                    reason=status.reason,
                    message=status.message,
                    by=status.by,
                )
                self.end(leg, ending, tell_peer=False)
            elif status.state == CLOSED or status.whole:
                self.other_completed(leg, status)
            else:
                leg.other = status.state

    def _other_is_unknown(self, leg: LegT) -> None:
        """The other worker lives and knows nothing of the handoff."""
        limit_s = self.settings.deadlines.handshake_s
        if leg.other:
            self._lose(leg, "knows nothing of the request any more")
        elif self._clock() - leg.created_ns > limit_s * NS_PER_S:
            self.end(
                leg,
                self._ending(
                    Outcome.TIMED_OUT,
                    "deadline_exceeded",
                    f"{self.counterpart(leg).instance} did not get the request in {limit_s:g} s",
                ),
            )

    def _lose(self, leg: LegT, what: str) -> None:
        self.fail(
            leg,
            "worker_lost",
            f"{self.config.instance}: {self.counterpart(leg).instance} {what}",
        )

    # -- watch --------------------------------------------------------------------------------

    def watch(self, now_ns: int) -> None:
        """Ask the transfer process and the other legs' workers, as far as that is due."""
        super().watch(now_ns)
        self.registration.ask(now_ns)
        every_ns = round(self.settings.deadlines.drain_s * NS_PER_S)
        for handoff_id in self.quarantine.to_ask(now_ns, every_ns):
            self.cancel_copies(handoff_id)
        if self._counterparts.is_due(now_ns):
            self._ask_counterparts(now_ns)

    def _ask_counterparts(self, now_ns: int) -> None:
        waiting: dict[str, tuple[Peer, list[LegT]]] = {}
        for leg in self.legs:
            if leg.ending is None and self.needs_other(leg):
                peer = self.counterpart(leg)
                waiting.setdefault(peer.incarnation, (peer, []))[1].append(leg)
        self._counterparts.keep(waiting.keys())
        for peer, legs in waiting.values():
            gone = self._counterparts.ask(peer, [self._status(leg) for leg in legs], now_ns)
            if gone is not None:
                for leg in legs:
                    self._lose(leg, gone)

    # -- end ----------------------------------------------------------------------------------

    def end(self, leg: LegT, ending: Ending, *, tell_peer: bool = True) -> None:
        """Free the pages, or wait until the transfer has let go of them."""
        if leg.ending is not None:
            return
        leg.ending = ending
        if tell_peer:
            self._abort(leg, ending)
        if not self.is_copied(leg):
            self.free_and_close(leg)
            return
        leg.advance(type(leg.state)(DRAINING), self._clock())
        self.cancel_copies(leg.handoff_id)

    def _abort(self, leg: LegT, ending: Ending) -> None:
        self.send(
            self.counterpart(leg),
            Abort(
                handoff_id=leg.handoff_id,
                outcome=ending.outcome,
                reason=ending.reason,
                message=ending.message,
                by=ending.by,
            ),
        )

    def cancel_copies(self, handoff_id: str) -> None:
        """Have the transfer process let go of a handoff; CopiesDrained is the answer."""
        self.send(self._transfer, CancelCopies(handoff_id=handoff_id, reply_to=self.peer))


def _ended(handoff_id: str, ending: Ending) -> LegStatus:
    return LegStatus(
        handoff_id=handoff_id,
        state=CLOSED,
        outcome=ending.outcome,
        reason=ending.reason,
        message=ending.message,
        by=ending.by,
    )
