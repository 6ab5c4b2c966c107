"""The decode worker: reserves pages, waits for KV to land in them, and generates.

Owns the decode legs and their pages; who gets pages and slots is decided by `server.decode.policy`,
the running batch is `server.generating`, the watch over the other leg and the transfer process
`server.paired`.
"""

from __future__ import annotations

from collections import Counter

from pdtrace.stages import Gauge, Outcome, Role, WaitReason
from pdtrace.stopping import Stop
from server.admission import Candidate
from server.config import ProcessConfig
from server.decode.ballast import OWNER as BALLAST
from server.decode.ballast import Ballast
from server.decode.leg import DecodeLeg
from server.decode.policy import DecodePlan, DecodeSnapshot, LandedSequence, plan_decode
from server.engine.base import Engine
from server.faults import FaultHolds
from server.generating import GeneratingScheduler
from server.loop_log import Doing
from server.paired import MAX_MISSES, PairedScheduler
from server.ports import Ports
from server.request import DecodeState
from server.scheduler import IDLE_WAIT_S
from server.serve import serve
from server.wire.messages import (
    AnyMessage,
    CopyDone,
    CopyFailed,
    DecodeRequest,
    Handoff,
    LegStatus,
    PagesReserved,
    Peer,
    PoolRef,
    WorkerLoad,
)

_S = DecodeState
_GAUGES = (
    Gauge.RUNNING,
    Gauge.WAITING,
    Gauge.RESERVING,
    Gauge.TRANSFERRING,
    Gauge.KV_PAGES_TOTAL,
    Gauge.KV_PAGES_FREE,
    Gauge.KV_PAGES_RESERVED,
    Gauge.KV_PAGES_USED,
    Gauge.HELD_PAGES,
)
_WAITING = frozenset({_S.ARRIVED, _S.RESERVING})
_WITHOUT_KV = frozenset({_S.ARRIVED, _S.RESERVING, _S.AWAITING_KV})


class DecodeWorker(GeneratingScheduler[DecodeLeg], PairedScheduler[DecodeLeg]):
    """One decode process. `step` is a turn of its loop."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        super().__init__(config, engine, ports)
        self.ballast = Ballast(self.allocator)
        self._pool = PoolRef(owner=config.instance, incarnation=config.incarnation)
        self._landing: list[str] = []  # requests whose KV this turn takes in

    def step(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, plan, run, publish."""
        self.receive(max_wait_s)
        now_ns = self._clock()
        self._notice(now_ns)
        self._note_landings()
        plan = plan_decode(self._snapshot(now_ns))
        self._apply(plan)
        self.record_waits(plan.waits, now_ns)
        self._commit()
        self.flush()  # first tokens do not wait for the step
        self.run_batch(now_ns)
        self.recompute()
        self.publish()

    # -- receive ------------------------------------------------------------------------------

    def handle(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message."""
        match message:
            case DecodeRequest():
                self._receive_request(message, arrived_ns)
            case Handoff():
                self._handed_over(message)
            case CopyDone():
                self._copied(message, arrived_ns)
            case _:
                super().handle(message, arrived_ns)

    def _receive_request(self, message: DecodeRequest, arrived_ns: int) -> None:
        if self.is_repeated(message):
            return
        leg = DecodeLeg(
            context=message.context,
            trace=self._recorder.begin(message.context, at_ns=arrived_ns),
            gateway=message.gateway,
            observer=self._observer,
            deadlines=self.settings.deadlines,
            holds=FaultHolds(message.faults if self.settings.allow_faults else {}),
            created_ns=arrived_ns,
            state=_S.ARRIVED,
            generation=self.new_generation(
                prompt_len=message.prompt_len,
                max_tokens=message.max_tokens,
                sampling=message.sampling,
                ignore_eos=message.ignore_eos,
                stop=message.stop,
            ),
            max_tokens=message.max_tokens,
            prompt_ids=message.prompt_ids if len(message.prompt_ids) == message.prompt_len else (),
            early=message.early,
            prompt_digest=message.prompt_digest,
            prefill=message.prefill,
        )
        if self.admit(leg) and not self.held(leg, "hop.dispatch", arrived_ns):
            self._open(leg, arrived_ns)
            self.say_kept_waiting(leg, "decode.reserve", arrived_ns)

    def _open(self, leg: DecodeLeg, at_ns: int) -> None:
        leg.advance(_S.RESERVING, at_ns)
        refusal = self.refusal(leg) or self.overload()
        if refusal is not None:
            reason, what = refusal
            self.end(leg, self._ending(Outcome.REJECTED, reason, what))

    def _handed_over(self, message: Handoff) -> None:
        leg = self.legs.get(message.handoff_id)
        if leg is None:
            self.ignore_unknown(message)
            return
        if leg.state is not _S.AWAITING_KV or leg.handoff is not None:
            self.ignore("late" if leg.handoff is None else "duplicate", message)
            return
        leg.handoff = message
        mismatch = self._handoff_mismatch(leg, message)
        if mismatch is not None:
            self.fail(leg, "handshake_mismatch", mismatch)

    def _handoff_mismatch(self, leg: DecodeLeg, message: Handoff) -> str | None:
        if message.prompt_len != leg.generation.prompt_len:
            return (
                f"prompt length: prefill has {message.prompt_len}, "
                f"decode has {leg.generation.prompt_len}"
            )
        if message.prompt_digest != leg.prompt_digest:
            return (
                f"prompt digest: prefill has {message.prompt_digest[:16]}, "
                f"decode has {leg.prompt_digest[:16]}"
            )
        if not 0 <= message.token_id < self.engine.info.vocab_size:
            return (
                f"boundary token {message.token_id}, "
                f"the vocabulary has {self.engine.info.vocab_size}"
            )
        return None

    def _copied(self, message: CopyDone, arrived_ns: int) -> None:
        leg = self.legs.get(message.handoff_id)
        if leg is None:
            self.ignore_unknown(message)
        elif message.index in leg.copied:
            self.ignore("duplicate", message)
        elif leg.state is not _S.AWAITING_KV:
            self.ignore("late", message)
        else:
            self._landing.append(leg.request_id)
            leg.copied[message.index] = message.num_bytes
            if message.last:
                leg.last_job = message.index
            if leg.all_copied:
                self.say_kept_waiting(leg, "hop.notice", arrived_ns)

    def copies_failed(self, leg: DecodeLeg, message: CopyFailed) -> None:
        """No pages are left to a transfer that is certain not to write them any more."""
        leg.settled = message.settled
        super().copies_failed(leg, message)

    def _notice(self, now_ns: int) -> None:
        """Move on the legs that no message moves: holds that are over, KV that is whole."""
        for leg in self.legs:
            if leg.state is _S.ARRIVED and not self.held(leg, "hop.dispatch", now_ns):
                self._open(leg, now_ns)
            elif leg.state is _S.AWAITING_KV:
                self._land(leg, now_ns)
        self.finish_held(now_ns)

    def _land(self, leg: DecodeLeg, now_ns: int) -> None:
        handoff = leg.handoff
        if handoff is None or not leg.all_copied or self.held(leg, "hop.notice", now_ns):
            return
        layout = self.engine.layout
        expected = layout.pages_for(handoff.prompt_len) * layout.page_bytes
        copied = sum(leg.copied.values())
        if copied != expected:
            self.fail(
                leg, "transfer_incomplete", f"{copied} bytes landed, the prompt has {expected}"
            )
            return
        leg.cached_tokens = handoff.cached_tokens
        leg.advance(_S.LANDED, now_ns)
        self._landing.append(leg.request_id)

    def _note_landings(self) -> None:
        """Remember the time that this turn spent on KV that arrived, if that was most of it."""
        if self._landing and 2 * len(self._landing) >= self._num_taken:
            who, _ = Counter(self._landing).most_common(1)[0]
            self._log.add(self._taken_from_ns, self._clock(), Doing.LANDING, (who,))
        self._landing.clear()

    # -- plan ---------------------------------------------------------------------------------

    def _snapshot(self, now_ns: int) -> DecodeSnapshot:
        reserving: list[Candidate] = []
        landed: list[tuple[int, LandedSequence]] = []
        committing = 0
        fill = False
        for leg in self.legs:
            if leg.state is _S.RESERVING and not self.registration.known:
                # It is the transfer process that must answer first: it does not know the pool yet.
                self._observer.cause(
                    leg, leg.stage, WaitReason.PEER_NOT_READY, now_ns, needed=1, free=0
                )
            elif leg.state is _S.RESERVING:
                fill = leg.holds.held("decode.reserve", now_ns) or fill
                reserving.append(
                    Candidate(
                        handoff_id=leg.handoff_id,
                        request_id=leg.request_id,
                        needed=self.pages_to_reserve(leg),
                        passes=leg.passes,
                    )
                )
            elif leg.state is _S.LANDED:
                landed.append(
                    (
                        leg.entered_ns,
                        LandedSequence(
                            handoff_id=leg.handoff_id,
                            request_id=leg.request_id,
                            held=leg.holds.held("decode.queue", now_ns),
                        ),
                    )
                )
            elif leg.state is _S.COMMITTING:
                committing += 1
        if fill:
            self.ballast.fill()
        else:
            self.ballast.give_back()
        landed.sort(key=lambda entry: entry[0])
        return DecodeSnapshot(
            reserving=tuple(reserving),
            landed=tuple(sequence for _, sequence in landed),
            running=self.running_sequences(now_ns),
            preempted=self.preempted_sequences(),
            pages=self.page_budget(self.allocator.num_free + self.ballast.num_pages),
            pages_new=self.allocator.num_free,
            max_running=self.settings.max_running,
            committing=committing,
        )

    def _apply(self, plan: DecodePlan) -> None:
        self.apply_pages(plan.pages)
        num_running = len(plan.pages.running)
        for handoff_id in plan.admit:
            leg = self.legs[handoff_id]
            num_running += 1
            self.admit_to_batch(leg, num_running)
            leg.advance(_S.COMMITTING, self._clock())
        for handoff_id, passes in plan.passes.items():
            self.legs[handoff_id].passes = passes
        for handoff_id in plan.reserve:
            self._reserve(self.legs[handoff_id])

    def _reserve(self, leg: DecodeLeg) -> None:
        pages = self.allocator.try_allocate(self.pages_to_reserve(leg), leg.handoff_id)
        if pages is None:
            return
        leg.own_pages = pages
        leg.marked_pages = len(pages)
        leg.advance(_S.AWAITING_KV, self._clock())
        self._publish_pages(leg)

    def _publish_pages(self, leg: DecodeLeg) -> None:
        """If prefill cannot be reached just now, because it was started anew perhaps, it asks for
        the pages once it can; and if it never can, it counts as gone."""
        num_pages = self.engine.layout.pages_for(leg.generation.prompt_len)
        sent = self.send(
            leg.prefill,
            PagesReserved(
                handoff_id=leg.handoff_id,
                decode=self.peer,
                fingerprint=self.engine.info.fingerprint,
                layout=self.engine.layout,
                pool=self._pool,
                pages=tuple(leg.own_pages[:num_pages]),
                transfer_address=self.config.transfer_address,
            ),
        )
        leg.published = sent or leg.published

    def take_pages(self, num_pages: int, owner: str) -> list[int] | None:
        """Pages for a sequence that runs or comes back, if need be out of the ballast."""
        self.ballast.give_back(max(0, num_pages - self.allocator.num_free))
        return self.allocator.try_allocate(num_pages, owner)

    # -- run ----------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Commit the boundary tokens of the sequences that were admitted."""
        for leg in self.legs:
            if leg.state is not _S.COMMITTING:
                continue
            # The clock is read after the admission: a hold lasts from that mark on.
            now_ns = self._clock()
            if not self.held(leg, "decode.first", now_ns):
                assert leg.handoff is not None
                self.commit_first(leg, leg.handoff.token_id, now_ns)

    # -- the other leg ------------------------------------------------------------------------

    def counterpart(self, leg: DecodeLeg) -> Peer:
        """The worker of the other leg."""
        return leg.prefill

    def needs_other(self, leg: DecodeLeg) -> bool:
        """Until all of the KV is here."""
        return leg.state in _WITHOUT_KV

    def lacks(self, leg: DecodeLeg) -> str:
        """Once the pages are published: the boundary token, and that the copies are done."""
        if leg.state is not _S.AWAITING_KV:
            return ""
        return "handoff" if leg.handoff is None else "" if leg.all_copied else "copies"

    def has_whole_kv(self, leg: DecodeLeg) -> bool:
        """Whether the completion of every copy was observed."""
        return leg.all_copied

    def send_again(self, leg: DecodeLeg, lacking: str) -> None:
        """The reservation may have been lost."""
        if lacking == "pages" and leg.state is _S.AWAITING_KV:
            self._publish_pages(leg)

    def send_again_past(self, handoff_id: str, lacking: str, to: Peer) -> None:
        """A leg that is over has no pages; that it is over is in the report."""

    def other_completed(self, leg: DecodeLeg, status: LegStatus) -> None:
        """Prefill has sent all, and what is lacking once more: that may be on its way."""
        if self.lacks(leg) == "":
            return
        leg.misses += 1
        if leg.misses >= MAX_MISSES:
            self.fail(
                leg,
                "handoff_lost",
                f"{leg.prefill.instance} has sent everything, the {self.lacks(leg)} did not arrive",
            )

    # -- end ----------------------------------------------------------------------------------

    def is_copied(self, leg: DecodeLeg) -> bool:
        """Whether the transfer may still write the pages."""
        return leg.state is _S.AWAITING_KV and leg.may_be_written

    def loses_with_transfer(self, leg: DecodeLeg) -> bool:
        """Prefill knows which copies were open, and tells."""
        return False

    def drain_expired(self, leg: DecodeLeg) -> None:
        """Keep the pages out of use: the transfer may still write them."""
        self.quarantine.keep(leg.handoff_id, len(leg.own_pages), lambda: self.free_pages(leg))
        self.close(leg, self._clock())

    def free_pages(self, leg: DecodeLeg) -> None:
        """Give back all pages of `leg`."""
        self.allocator.release(leg.own_pages, leg.handoff_id)
        leg.own_pages = []

    def free_and_close(self, leg: DecodeLeg) -> None:
        """Free the pages and close `leg`."""
        self.free_pages(leg)
        self.close(leg, self._clock())

    def is_waiting(self, leg: DecodeLeg) -> bool:
        """Whether no pages are reserved yet."""
        return leg.state in _WAITING

    # -- publish ------------------------------------------------------------------------------

    def pages_held(self, leg: DecodeLeg) -> int:
        """Pages of the pool that `leg` keeps from others."""
        return len(leg.own_pages)

    def page_holders(self, now_ns: int) -> tuple[str, ...]:
        """Requests that hold most of the pages; nobody while a fault hook fills the pool."""
        return () if self.ballast.num_pages else super().page_holders(now_ns)

    def report(self) -> WorkerLoad:
        """Set the gauges and return what routing looks at."""
        counts = self.count_states(_S)
        reserved = sum(
            len(leg.own_pages) for leg in self.legs if leg.state in (_S.AWAITING_KV, _S.LANDED)
        )
        held = sum(len(leg.own_pages) for leg in self.legs) + self.ballast.num_pages
        running = counts[_S.RUNNING] + counts[_S.COMMITTING] + counts[_S.RECOMPUTING]
        self._recorder.gauges(
            _GAUGES,
            (
                running,
                counts[_S.LANDED] + counts[_S.PREEMPTED],
                counts[_S.RESERVING],
                counts[_S.AWAITING_KV],
                self.allocator.num_pages,
                self.allocator.num_free,
                reserved,
                held - reserved,
                self.quarantine.num_pages,
            ),
        )
        return WorkerLoad(
            pages_total=self.allocator.num_pages,
            pages_free=self.allocator.num_free,
            running=running,
            waiting=len(self.legs) - running,
            queued_tokens=0,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is free or held by a leg in flight."""
        self.allocator.check_integrity()
        self.check_owners({BALLAST, *self.quarantine.owners})


def run(config: ProcessConfig, *, engine: Engine | None = None, stop: Stop | None = None) -> None:
    """Serve as `config` says until SIGTERM or `stop`. Raises StartError or ModelError."""
    serve(config, role=Role.DECODE, make_worker=DecodeWorker, engine=engine, stop=stop)
