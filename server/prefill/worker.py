"""The prefill worker: computes prompts chunk by chunk and hands them to decode.

Owns the prefill legs, the prefix cache and the copy jobs; what a step computes is decided by
`server.prefill.policy`, what fits together by `server.prefill.handshake`. The watch over the other
leg and the transfer process is `server.paired`.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec.structs

from pdtrace.stages import Gauge, Outcome, Role, StepKind, WaitReason
from pdtrace.stopping import Stop
from server.config import ProcessConfig
from server.engine.base import Engine
from server.engine.validation import check_sampling
from server.faults import FaultHolds
from server.kv.page_states import count_page_states
from server.kv.radix import OWNER as CACHE
from server.kv.radix import RadixCache
from server.paired import PairedScheduler
from server.ports import Ports
from server.prefill.handshake import find_mismatch
from server.prefill.leg import PrefillLeg
from server.prefill.policy import (
    Chunk,
    PrefillPlan,
    PrefillSnapshot,
    QueuedPrompt,
    RunningPrompt,
    plan_prefill,
)
from server.prompts import PromptPages, chunk_work
from server.request import NS_PER_S, PrefillState
from server.scheduler import IDLE_WAIT_S
from server.serve import serve
from server.wire.messages import (
    Abort,
    AnyMessage,
    CopiesDrained,
    CopyDone,
    CopyJob,
    Handoff,
    LegStatus,
    PagesReserved,
    Peer,
    PoolRef,
    PrefillRequest,
    TokenItem,
    WorkerLoad,
)

MAX_EARLY_RESERVATIONS = 1024
MAX_HANDED_OVER = 1024
"""Handoffs that are over here and may have to be told of again."""
_S = PrefillState
_GAUGES = (
    Gauge.RUNNING,
    Gauge.WAITING,
    Gauge.RESERVING,
    Gauge.TRANSFERRING,
    Gauge.KV_PAGES_TOTAL,
    Gauge.KV_PAGES_FREE,
    Gauge.KV_PAGES_USED,
    Gauge.KV_PAGES_CACHED,
    Gauge.HELD_PAGES,
)
_WAITING = frozenset({_S.ARRIVED, _S.BOOTSTRAP, _S.QUEUED})


class PrefillWorker(PairedScheduler[PrefillLeg]):
    """One prefill process. `step` is a turn of its loop."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        super().__init__(config, engine, ports)
        self.cache = RadixCache(self.allocator, engine.layout.page_size)
        self._prompts = PromptPages(self.allocator, self.cache)
        self._pool = PoolRef(owner=config.instance, incarnation=config.incarnation)
        # Reservations that came before their request, oldest first.
        self._early: OrderedDict[str, tuple[PagesReserved, int]] = OrderedDict()
        # What decode was told of handoffs that completed here, oldest first.
        self._handed_over: OrderedDict[str, tuple[AnyMessage, ...]] = OrderedDict()

    def step(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, plan, run, publish."""
        self.receive(max_wait_s)
        now_ns = self._clock()
        self._shake_hands(now_ns)
        self._finish_computed(now_ns)
        plan = plan_prefill(self._snapshot(now_ns))
        self._start(plan)
        self.record_waits(plan.waits, now_ns)
        self.flush()
        self._run(plan.chunks)
        self.publish()

    # -- receive ------------------------------------------------------------------------------

    def handle(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message."""
        match message:
            case PrefillRequest():
                self._receive_request(message, arrived_ns)
            case PagesReserved():
                self._receive_pages(message, arrived_ns)
            case CopyDone():
                self._copied(message)
            case Abort():
                self._early.pop(message.handoff_id, None)
                self.aborted(message)
            case _:
                super().handle(message, arrived_ns)

    def _receive_request(self, message: PrefillRequest, arrived_ns: int) -> None:
        if self.is_repeated(message):
            return
        leg = PrefillLeg(
            context=message.context,
            trace=self._recorder.begin(message.context, at_ns=arrived_ns),
            gateway=message.gateway,
            observer=self._observer,
            deadlines=self.settings.deadlines,
            holds=FaultHolds(message.faults if self.settings.allow_faults else {}),
            created_ns=arrived_ns,
            state=_S.ARRIVED,
            prompt_ids=message.prompt_ids,
            prompt_digest=message.prompt_digest,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            early=message.early,
            ignore_eos=message.ignore_eos,
            decode=message.decode,
            faults=message.faults if self.settings.allow_faults else {},
        )
        early = self._early.pop(leg.handoff_id, None)
        if not self.admit(leg):
            return
        leg.advance(_S.BOOTSTRAP, arrived_ns)
        refusal = self._refusal(leg)
        if refusal is not None:
            reason, what = refusal
            self.end(leg, self._ending(Outcome.REJECTED, reason, what))
        elif early is None:
            self._observer.cause(
                leg, leg.stage, WaitReason.PEER_NOT_READY, arrived_ns, needed=1, free=0
            )
        else:
            self._reserved(leg, early[0])
            self.say_kept_waiting(leg, "hop.publish", early[1])

    def _refusal(self, leg: PrefillLeg) -> tuple[str, str] | None:
        """Why `leg` can never be computed here, as reason and sentence; None when it can."""
        try:
            check_sampling(leg.sampling)
        except ValueError as error:
            return "invalid_request", str(error)
        return self.prompt_refusal(leg.prompt_ids) or self.overload()

    def _receive_pages(self, message: PagesReserved, arrived_ns: int) -> None:
        leg = self.legs.get(message.handoff_id)
        if leg is not None:
            self._reserved(leg, message)
            self.say_kept_waiting(leg, "hop.publish", arrived_ns)
        elif self.legs.past(message.handoff_id) is not None:
            self.ignore("late", message)
        else:
            self._early[message.handoff_id] = (message, arrived_ns)

    def watch(self, now_ns: int) -> None:
        """Also let go of what no request claimed in time."""
        super().watch(now_ns)
        self._forget_early(now_ns)

    def _forget_early(self, now_ns: int) -> None:
        """Drop reservations whose request will not come any more."""
        limit_ns = now_ns - round(self.settings.deadlines.handshake_s * NS_PER_S)
        while self._early:
            message, arrived_ns = next(iter(self._early.values()))
            if len(self._early) <= MAX_EARLY_RESERVATIONS and arrived_ns > limit_ns:
                return
            self._early.popitem(last=False)
            self.ignore("unknown", message)

    def _reserved(self, leg: PrefillLeg, message: PagesReserved) -> None:
        if message.decode.incarnation != leg.decode.incarnation:
            self.ignore("stale", message)
        elif leg.reservation is not None or leg.state is not _S.BOOTSTRAP:
            self.ignore("duplicate", message)
        else:
            leg.reservation = message
            leg.limit("handshake_s", self._clock())

    def _shake_hands(self, now_ns: int) -> None:
        if not self.registration.known:
            return
        for leg in self.legs:
            if leg.state is not _S.BOOTSTRAP or leg.reservation is None:
                continue
            if self.held(leg, "hop.publish", now_ns):
                continue
            mismatch = find_mismatch(
                leg.reservation,
                info=self.engine.info,
                layout=self.engine.layout,
                num_pages=self.engine.layout.pages_for(leg.prompt_len),
            )
            if mismatch is None:
                leg.advance(_S.QUEUED, now_ns)
            else:
                self.fail(leg, "handshake_mismatch", mismatch)

    def _copied(self, message: CopyDone) -> None:
        leg = self.legs.get(message.handoff_id)
        if leg is None:
            self.ignore_unknown(message)
        elif message.index in leg.jobs_done or not 0 <= message.index < leg.num_jobs:
            self.ignore("duplicate", message)
        else:
            leg.jobs_done[message.index] = message
            if leg.state is not _S.SENDING:
                return
            if leg.all_copied:
                self._complete(leg)
            else:
                self._say_held(leg)

    def _complete(self, leg: PrefillLeg) -> None:
        assert leg.handoff is not None
        self._handed_over[leg.handoff_id] = (leg.handoff, *leg.jobs_done.values())
        while len(self._handed_over) > MAX_HANDED_OVER:
            self._handed_over.popitem(last=False)
        leg.ending = self.completed()
        self.free_and_close(leg)

    # -- plan ---------------------------------------------------------------------------------

    def _snapshot(self, now_ns: int) -> PrefillSnapshot:
        running: list[tuple[int, RunningPrompt]] = []
        queue: list[QueuedPrompt] = []
        for leg in self.legs:
            if leg.state is _S.RUNNING and leg.token_id is None:
                running.append(
                    (
                        leg.started,
                        RunningPrompt(
                            handoff_id=leg.handoff_id,
                            request_id=leg.request_id,
                            tokens=leg.prompt_len - leg.computed,
                        ),
                    )
                )
            elif leg.state is _S.QUEUED:
                queue.append(self._prompts.queued(leg, len(queue), self._pages_of(leg), now_ns))
        running.sort(key=lambda entry: entry[0])
        return PrefillSnapshot(
            running=tuple(prompt for _, prompt in running),
            queue=tuple(queue),
            pages=self.page_budget(self._prompts.num_available),
            budget=self.settings.prefill_budget,
        )

    def _start(self, plan: PrefillPlan) -> None:
        for handoff_id, passes in plan.passes.items():
            self.legs[handoff_id].passes = passes
        self._prompts.claim(
            [self.legs[handoff_id] for handoff_id in plan.start],
            self._pages_of,
            self._prompts.take,
        )

    def _pages_of(self, leg: PrefillLeg) -> int:
        return self.engine.layout.pages_for(leg.prompt_len)

    # -- run ----------------------------------------------------------------------------------

    def _run(self, chunks: tuple[Chunk, ...]) -> None:
        batch, work = chunk_work(chunks, self.legs.__getitem__)
        if not batch:
            return
        self._again = True
        self._steps += 1
        begun_ns = self._clock()
        for leg, chunk in zip(batch, work, strict=True):
            if leg.state is _S.QUEUED:
                leg.batch_size = len(batch)
                leg.started = self._steps
                leg.advance(_S.RUNNING, begun_ns)
            self._observer.chunk_started(leg, leg.num_chunks, len(chunk.token_ids), begun_ns)
        tokens = [len(chunk.token_ids) for chunk in work]
        try:
            sampled = self.engine.prefill(work)
        except Exception as error:  # the batch's requests fail, the loop goes on
            self.ran(StepKind.PREFILL, batch, tokens, begun_ns)
            self.fail_step(batch, error)
            return
        _, ended_ns = self.ran(StepKind.PREFILL, batch, tokens, begun_ns)
        for leg, chunk, token_id in zip(batch, work, sampled, strict=True):
            self._observer.chunk_finished(leg, leg.num_chunks, ended_ns)
            leg.num_chunks += 1
            leg.computed += len(chunk.token_ids)
            leg.token_id = token_id
            if token_id is None:
                self._copy(leg, leg.computed // self.engine.layout.page_size, last=False)
        self._finish_computed(ended_ns)

    def _finish_computed(self, now_ns: int) -> None:
        """Hand over the prompts whose last chunk has run."""
        for leg in self.legs:
            if leg.state is not _S.RUNNING or leg.token_id is None:
                continue
            if self.held(leg, "prefill.compute", now_ns):
                continue
            leg.advance(_S.SENDING, now_ns)
            self.cache.insert(leg.prompt_ids, leg.table)
            self._hand_over(leg, leg.token_id, now_ns)
            if leg.ending is None:
                self._copy(leg, leg.num_pages, last=True)

    def _say_held(self, leg: PrefillLeg) -> None:
        """Source pages stay taken until the copies that are open have read them."""
        self._observer.cause(
            leg,
            "prefill.hold",
            WaitReason.COPY_QUEUE,
            self._clock(),
            needed=leg.num_jobs - len(leg.jobs_done),
            limit=leg.num_jobs,
        )

    def _hand_over(self, leg: PrefillLeg, token_id: int, now_ns: int) -> None:
        leg.handoff = Handoff(
            handoff_id=leg.handoff_id,
            token_id=token_id,
            prompt_len=leg.prompt_len,
            prompt_digest=leg.prompt_digest,
            cached_tokens=leg.cached_tokens,
        )
        if not self.send(leg.decode, leg.handoff):
            self.fail(leg, "peer_unreachable", f"{leg.decode.instance} cannot be reached")
            return
        if not leg.early:
            return
        eos = () if leg.ignore_eos else self.engine.info.eos_token_ids
        reason = "stop" if token_id in eos else "length" if leg.max_tokens == 1 else None
        self._observer.forwarded(leg, now_ns)
        self.emit(
            leg,
            TokenItem(
                handoff_id=leg.handoff_id,
                index=0,
                token_ids=(token_id,),
                finish_reason=reason,
                cached_tokens=leg.cached_tokens,
            ),
        )

    def _copy(self, leg: PrefillLeg, end_page: int, *, last: bool) -> None:
        """Have source pages up to `end_page` copied that no job names yet."""
        if end_page <= leg.pages_sent:
            return
        assert leg.reservation is not None
        span = slice(leg.pages_sent, end_page)
        job = CopyJob(
            context=leg.context,
            index=leg.num_jobs,
            last=last,
            source=self._pool,
            source_pages=tuple(leg.table[span]),
            destination=leg.reservation.pool,
            destination_pages=leg.reservation.pages[span],
            transfer_address=leg.reservation.transfer_address,
            prefill=self.peer,
            decode=leg.decode,
            faults=leg.faults,
        )
        if not self.send(self._transfer, job):
            self.registration.forget()  # others wait until it answers
            self.fail(leg, "transfer_unreachable", "the transfer process cannot be reached")
            return
        leg.pages_sent = end_page
        leg.jobs.append(job)
        leg.job_sent_ns = self._clock()
        leg.last_job_sent = last
        if last:
            self._say_held(leg)

    def jobs_told(self, message: CopiesDrained) -> None:
        """Send again what the transfer process has not got. What it has, or had, it ignores."""
        now_ns = self._clock()
        for leg in self.legs:
            # What was sent a moment ago is on its way.
            if leg.ending is not None or not leg.copies_open or self.is_recent(leg.job_sent_ns):
                continue
            lacking = leg.jobs[message.jobs.get(leg.handoff_id, 0) :]
            for job in lacking:
                again = msgspec.structs.replace(job, again_to=message.transfer.incarnation)
                self.send(self._transfer, again)
                leg.job_sent_ns = now_ns

    # -- the other leg ------------------------------------------------------------------------

    def counterpart(self, leg: PrefillLeg) -> Peer:
        """The worker of the other leg."""
        return leg.decode

    def needs_other(self, leg: PrefillLeg) -> bool:
        """Until the end: what decode does not wait for any more need not be computed or sent."""
        return leg.state is not _S.DRAINING

    def lacks(self, leg: PrefillLeg) -> str:
        """Decode's pages are all that is waited for."""
        return "pages" if leg.state is _S.BOOTSTRAP and leg.reservation is None else ""

    def has_whole_kv(self, leg: PrefillLeg) -> bool:
        """Once it has, the leg is closed."""
        return False

    def send_again(self, leg: PrefillLeg, lacking: str) -> None:
        """The handoff may have been lost."""
        if lacking == "handoff" and leg.handoff is not None:
            self.send(leg.decode, leg.handoff)

    def send_again_past(self, handoff_id: str, lacking: str, to: Peer) -> None:
        """The handoff and the completions that were observed here may have been lost on the way."""
        for message in self._handed_over.get(handoff_id, ()):
            self.send(to, message)

    def other_completed(self, leg: PrefillLeg, status: LegStatus) -> None:
        """All copies are done, or decode could not have all of the KV."""
        leg.other = status.state
        if leg.state is _S.SENDING and leg.last_job_sent:
            leg.landed = True
            self._complete(leg)

    # -- end ----------------------------------------------------------------------------------

    def is_copied(self, leg: PrefillLeg) -> bool:
        """Whether the transfer may still read source pages."""
        return leg.copies_open

    def loses_with_transfer(self, leg: PrefillLeg) -> bool:
        """A successor runs no job whose predecessors it does not know of."""
        return leg.num_jobs > 0 and not leg.all_copied

    def drain_expired(self, leg: PrefillLeg) -> None:
        """Keep the pages out of use; the locked prefix stays locked with them."""
        self.quarantine.keep(leg.handoff_id, leg.num_pages, lambda: self._release(leg))
        self.close(leg, self._clock())

    def free_and_close(self, leg: PrefillLeg) -> None:
        """Free the source pages and close `leg`."""
        self._release(leg)
        self.close(leg, self._clock())

    def _release(self, leg: PrefillLeg) -> None:
        if leg.match is not None:
            self.allocator.release(leg.own_pages, leg.handoff_id)
            self.cache.unlock(leg.match)

    def is_waiting(self, leg: PrefillLeg) -> bool:
        """Whether nothing of the prompt has been computed."""
        return leg.state in _WAITING

    # -- publish ------------------------------------------------------------------------------

    def pages_held(self, leg: PrefillLeg) -> int:
        """Pages of the pool that `leg` keeps from others."""
        return leg.num_pages

    def report(self) -> WorkerLoad:
        """Set the gauges and return what routing looks at."""
        states = [leg.state for leg in self.legs]
        queued_tokens = sum(
            leg.prompt_len - leg.computed
            for leg in self.legs
            if leg.state in (_S.BOOTSTRAP, _S.QUEUED, _S.RUNNING)
        )
        pages = count_page_states(
            self.allocator.count_by_holders(),
            in_flight=self.legs.handoff_ids,
            held_back=self.quarantine.owners,
        )
        running, waiting = states.count(_S.RUNNING), states.count(_S.QUEUED)
        self._recorder.gauges(
            _GAUGES,
            (
                running,
                waiting,
                states.count(_S.BOOTSTRAP),
                states.count(_S.SENDING),
                self.allocator.num_pages,
                self.allocator.num_free,
                pages.used,
                pages.cached,
                pages.held_back,
            ),
        )
        return WorkerLoad(
            pages_total=self.allocator.num_pages,
            pages_free=self._prompts.num_available,
            running=running,
            waiting=len(states) - running,
            queued_tokens=queued_tokens,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is free, cached, or held by a leg in flight."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        self.check_owners({CACHE, *self.quarantine.owners})


def run(config: ProcessConfig, *, engine: Engine | None = None, stop: Stop | None = None) -> None:
    """Serve as `config` says until SIGTERM or `stop`. Raises StartError or ModelError."""
    serve(config, role=Role.PREFILL, make_worker=PrefillWorker, engine=engine, stop=stop)
