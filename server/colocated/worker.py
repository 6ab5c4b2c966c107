"""The colocated worker: one engine computes prompts and generates, the baseline PD must beat.

Owns the colocated legs, their pages and the prefix cache; what a step computes is decided by
`server.colocated.policy`, the running batch is `server.generating`.
"""

from __future__ import annotations

import threading

from pdtrace.stages import Gauge, Outcome, Role
from server.colocated.leg import ColocatedLeg
from server.colocated.policy import ColocatedPlan, ColocatedSnapshot, plan_colocated
from server.config import ProcessConfig
from server.engine.base import Engine, PrefillChunk
from server.faults import FaultHolds
from server.generating import GeneratingScheduler
from server.kv.radix import LOCK_OWNER, Match, RadixCache
from server.kv.radix import OWNER as CACHE
from server.prefill.policy import Chunk, QueuedPrompt, RunningPrompt
from server.request import ColocatedState, Ending
from server.scheduler import IDLE_WAIT_S, Ports
from server.serve import serve
from server.wire.messages import AnyMessage, ColocatedRequest, WorkerLoad

_LOOKAHEAD = 8  # queued prompts whose cached prefix is looked up for a plan
_S = ColocatedState


class ColocatedWorker(GeneratingScheduler[ColocatedLeg]):
    """One colocated process. `step` is a turn of its loop."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        super().__init__(config, engine, ports)
        self.cache = RadixCache(self.allocator, engine.layout.page_size)

    def step(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, plan, run, publish."""
        self.receive(max_wait_s)
        now_ns = self._clock()
        self._move_on(now_ns)
        plan = plan_colocated(self._snapshot(now_ns))
        self.record_waits(plan.waits, now_ns)
        self._apply(plan)
        self.flush()
        if plan.decode:
            self.run_batch(now_ns)
            self.flush()  # tokens do not wait for prompts
        self._run_prompts(plan.chunks)
        self.publish()

    # -- receive ------------------------------------------------------------------------------

    def handle(self, message: AnyMessage, arrived_ns: int) -> None:
        """Take in one message."""
        if isinstance(message, ColocatedRequest):
            self._receive_request(message, arrived_ns)
        else:
            self.ignore("unexpected", message)

    def _receive_request(self, message: ColocatedRequest, arrived_ns: int) -> None:
        if self.is_repeated(message):
            return
        leg = ColocatedLeg(
            context=message.context,
            trace=self._recorder.begin(message.context, at_ns=arrived_ns),
            gateway=message.gateway,
            observer=self._observer,
            deadlines=self.settings.deadlines,
            holds=FaultHolds(message.faults if self.settings.allow_faults else {}),
            created_ns=arrived_ns,
            state=_S.ARRIVED,
            generation=self.new_generation(
                prompt_len=len(message.prompt_ids),
                max_tokens=message.max_tokens,
                sampling=message.sampling,
                ignore_eos=message.ignore_eos,
                stop=message.stop,
            ),
            max_tokens=message.max_tokens,
            prompt_ids=message.prompt_ids,
        )
        if self.admit(leg) and not self.held(leg, "hop.dispatch", arrived_ns):
            self._open(leg, arrived_ns)

    def _open(self, leg: ColocatedLeg, at_ns: int) -> None:
        leg.advance(_S.QUEUED, at_ns)
        refusal = self.refusal(leg) or self.prompt_refusal(leg.prompt_ids)
        if refusal is not None:
            reason, what = refusal
            self.end(leg, self._ending(Outcome.REJECTED, reason, what))

    def _move_on(self, now_ns: int) -> None:
        """Move on the legs that no message moves: those whose hold is over."""
        for leg in self.legs:
            if leg.state is _S.ARRIVED and not self.held(leg, "hop.dispatch", now_ns):
                self._open(leg, now_ns)
        self._finish_computed(now_ns)
        self.finish_held(now_ns)

    # -- plan ---------------------------------------------------------------------------------

    def _snapshot(self, now_ns: int) -> ColocatedSnapshot:
        queue: list[QueuedPrompt] = []
        prefilling: list[tuple[int, RunningPrompt]] = []
        occupied = 0
        for leg in self.legs:
            if leg.state is _S.QUEUED:
                queue.append(self._queued(leg, len(queue), now_ns))
            elif leg.state is _S.PREFILLING and leg.token_id is None:
                prompt = RunningPrompt(
                    handoff_id=leg.handoff_id,
                    request_id=leg.request_id,
                    tokens=leg.prompt_len - leg.computed,
                )
                prefilling.append((leg.started, prompt))
            elif leg.state in (_S.PREFILLING, _S.COMMITTING):
                occupied += 1
        prefilling.sort(key=lambda entry: entry[0])
        return ColocatedSnapshot(
            queue=tuple(queue),
            prefilling=tuple(prompt for _, prompt in prefilling),
            running=self.running_sequences(now_ns),
            preempted=self.preempted_sequences(),
            pages=self.page_budget(
                self.allocator.num_free + self.cache.num_evictable, lambda leg: len(leg.table)
            ),
            budget=self.settings.prefill_budget,
            max_running=self.settings.max_running,
            chunked=self.settings.chunked,
            occupied=occupied,
        )

    def _queued(self, leg: ColocatedLeg, position: int, now_ns: int) -> QueuedPrompt:
        pages = self.pages_to_reserve(leg)
        tokens = leg.prompt_len
        if position < _LOOKAHEAD:
            match = self._match(leg)
            tokens -= match.num_tokens
            # A cached page costs a page only if it counts as free: locking it takes it away.
            pages -= sum(not self.allocator.held_only_by(page, CACHE) for page in match.pages)
        return QueuedPrompt(
            handoff_id=leg.handoff_id,
            request_id=leg.request_id,
            tokens=tokens,
            pages=pages,
            passes=leg.passes,
            held=leg.holds.held("prefill.queue", now_ns),
        )

    def _match(self, leg: ColocatedLeg) -> Match:
        return self.cache.match(leg.prompt_ids, leg.prompt_len - 1)

    def _apply(self, plan: ColocatedPlan) -> None:
        self.apply_pages(plan.pages)
        for handoff_id, passes in plan.passes.items():
            self.legs[handoff_id].passes = passes
        starting = [self.legs[handoff_id] for handoff_id in plan.start]
        # All matches are locked before any page is taken: taking pages may evict cached ones.
        for leg in starting:
            leg.match = self._match(leg)
            self.cache.lock(leg.match)
        for leg in starting:
            assert leg.match is not None
            needed = self.pages_to_reserve(leg) - len(leg.match.pages)
            pages = self.take_pages(needed, leg.handoff_id)
            if pages is None:  # growing took cached pages that the plan counted on
                self.cache.unlock(leg.match)
                leg.match = None
                continue
            leg.own_pages = pages
            leg.cached_tokens = leg.computed = leg.match.num_tokens

    def take_pages(self, num_pages: int, owner: str) -> list[int] | None:
        """Pages out of the free ones, then out of the cache."""
        lacking = num_pages - self.allocator.num_free
        if lacking > 0:
            self.cache.evict(lacking)
        return self.allocator.try_allocate(num_pages, owner)

    # -- run ----------------------------------------------------------------------------------

    def _run_prompts(self, chunks: tuple[Chunk, ...]) -> None:
        batch: list[ColocatedLeg] = []
        work: list[PrefillChunk] = []
        for chunk in chunks:
            leg = self.legs[chunk.handoff_id]
            if leg.match is None:
                continue  # got no pages
            end = min(leg.computed + chunk.tokens, leg.prompt_len)
            batch.append(leg)
            work.append(
                PrefillChunk(
                    token_ids=leg.prompt_ids[leg.computed : end],
                    start=leg.computed,
                    pages=leg.table,
                    sampling=leg.generation.sampling if end == leg.prompt_len else None,
                )
            )
        if not batch:
            return
        self._again = True
        self._steps += 1
        begun_ns = self._clock()
        for leg, chunk in zip(batch, work, strict=True):
            if leg.state is _S.QUEUED:
                leg.started = self._steps
                self.admit_to_batch(leg, len(batch))
                leg.advance(_S.PREFILLING, begun_ns)
            self._observer.chunk_started(leg, leg.num_chunks, len(chunk.token_ids), begun_ns)
        try:
            sampled = self.engine.prefill(work)
        except Exception as error:  # the batch's requests fail, the loop goes on
            self.fail_step(batch, error)
            return
        ended_ns = self._clock()
        self.interfering = batch[0].request_id
        for leg, chunk, token_id in zip(batch, work, sampled, strict=True):
            self._observer.chunk_finished(leg, leg.num_chunks, ended_ns)
            leg.num_chunks += 1
            leg.computed += len(chunk.token_ids)
            leg.token_id = token_id
        self._finish_computed(ended_ns)

    def _finish_computed(self, now_ns: int) -> None:
        """Commit the boundary tokens of prompts whose last chunk has run."""
        for leg in self.legs:
            if leg.token_id is None:
                continue
            if leg.state is _S.PREFILLING and not self.held(leg, "prefill.compute", now_ns):
                leg.advance(_S.COMMITTING, now_ns)
                self.cache.insert(leg.prompt_ids, leg.table)
            if leg.state is _S.COMMITTING and not self.held(leg, "decode.first", now_ns):
                self.commit_first(leg, leg.token_id, self._clock())

    # -- end ----------------------------------------------------------------------------------

    def end(self, leg: ColocatedLeg, ending: Ending, *, tell_peer: bool = True) -> None:
        """Free the pages; there is no other leg."""
        if leg.ending is not None:
            return
        leg.ending = ending
        self.free_pages(leg)
        self.close(leg, self._clock())

    def drain_expired(self, leg: ColocatedLeg) -> None:
        """Nothing drains here: no transfer touches the pages."""
        raise AssertionError(f"{leg.handoff_id} drains in a colocated worker")

    def free_pages(self, leg: ColocatedLeg) -> None:
        """Give back all pages of `leg` and let go of its cached prefix."""
        self.allocator.release(leg.own_pages, leg.handoff_id)
        leg.own_pages = []
        if leg.match is not None:
            self.cache.unlock(leg.match)
            leg.match = None

    # -- publish ------------------------------------------------------------------------------

    def report(self) -> WorkerLoad:
        """Set the gauges and return what routing looks at."""
        counts = self.count_states(_S)
        queued_tokens = sum(
            leg.prompt_len - leg.computed
            for leg in self.legs
            if leg.state in (_S.QUEUED, _S.PREFILLING)
        )
        used = sum(len(leg.table) for leg in self.legs)
        running = counts[_S.RUNNING] + counts[_S.COMMITTING] + counts[_S.PREFILLING]
        recorder = self._recorder
        recorder.gauge(Gauge.RUNNING, running)
        recorder.gauge(Gauge.WAITING, counts[_S.QUEUED] + counts[_S.PREEMPTED])
        recorder.gauge(Gauge.KV_PAGES_USED, used)
        recorder.gauge(Gauge.KV_PAGES_CACHED, self.cache.num_pages)
        return WorkerLoad(
            pages_total=self.allocator.num_pages,
            pages_free=self.allocator.num_free + self.cache.num_evictable,
            running=running,
            waiting=len(self.legs) - running,
            queued_tokens=queued_tokens,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is free, cached, or held by a leg in flight."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        self.check_owners({CACHE, LOCK_OWNER} if len(self.legs) else {CACHE})


def run(
    config: ProcessConfig, *, engine: Engine | None = None, stop: threading.Event | None = None
) -> None:
    """Serve as `config` says until SIGTERM or `stop`. Raises StartError or ModelError."""
    serve(config, role=Role.WORKER, make_worker=ColocatedWorker, engine=engine, stop=stop)
