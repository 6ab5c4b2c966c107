"""The colocated worker: one engine computes prompts and generates, the baseline PD must beat.

Owns the colocated legs, their pages and the prefix cache; what a step computes is decided by
`server.colocated.policy`, the running batch is `server.generating`.
"""

from __future__ import annotations

from pdtrace.stages import Gauge, Outcome, Role, StepKind
from pdtrace.stopping import Stop
from server.colocated.leg import ColocatedLeg
from server.colocated.policy import ColocatedPlan, ColocatedSnapshot, plan_colocated
from server.config import ProcessConfig
from server.engine.base import Engine
from server.faults import FaultHolds
from server.generating import GeneratingScheduler
from server.kv.page_states import count_page_states
from server.kv.radix import OWNER as CACHE
from server.kv.radix import RadixCache
from server.ports import Ports
from server.prefill.policy import Chunk, QueuedPrompt, RunningPrompt
from server.prompts import PromptPages, chunk_work
from server.request import ColocatedState, Ending
from server.scheduler import IDLE_WAIT_S
from server.serve import serve
from server.wire.messages import AnyMessage, ColocatedRequest, WorkerLoad

_S = ColocatedState
_IN_STEPS = (_S.PREFILLING, _S.COMMITTING, _S.RUNNING, _S.RECOMPUTING)
_GAUGES = (
    Gauge.RUNNING,
    Gauge.WAITING,
    Gauge.KV_PAGES_TOTAL,
    Gauge.KV_PAGES_FREE,
    Gauge.KV_PAGES_USED,
    Gauge.KV_PAGES_CACHED,
)


class ColocatedWorker(GeneratingScheduler[ColocatedLeg]):
    """One colocated process. `step` is a turn of its loop."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        super().__init__(config, engine, ports)
        self.cache = RadixCache(self.allocator, engine.layout.page_size)
        self._prompts = PromptPages(self.allocator, self.cache)
        self._waited = 0  # steps in a row that the batch has let prompts go first

    def step(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """Receive, plan, run, publish."""
        self.receive(max_wait_s)
        now_ns = self._clock()
        self._move_on(now_ns)
        plan = plan_colocated(self._snapshot(now_ns))
        self._apply(plan)
        self.record_waits(plan.waits, now_ns)
        self.flush()
        self._waited = 0 if plan.decode else self._waited + 1
        if plan.decode:
            self.run_batch(now_ns)
            self.flush()  # tokens do not wait for prompts
        self.recompute()
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
            self.say_kept_waiting(leg, "prefill.queue", arrived_ns)

    def _open(self, leg: ColocatedLeg, at_ns: int) -> None:
        leg.advance(_S.QUEUED, at_ns)
        refusal = self.refusal(leg) or self.prompt_refusal(leg.prompt_ids) or self.overload()
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
                queue.append(
                    self._prompts.queued(leg, len(queue), self.pages_to_reserve(leg), now_ns)
                )
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
            pages=self.page_budget(self._prompts.num_available),
            budget=self.settings.prefill_budget,
            max_running=self.settings.max_running,
            chunked=self.settings.chunked,
            occupied=occupied,
            waited=self._waited,
        )

    def _apply(self, plan: ColocatedPlan) -> None:
        self.apply_pages(plan.pages)
        for handoff_id, passes in plan.passes.items():
            self.legs[handoff_id].passes = passes
        starting = [self.legs[handoff_id] for handoff_id in plan.start]
        self._prompts.claim(starting, self.pages_to_reserve, self.take_pages)
        for leg in starting:
            leg.cached_tokens = leg.computed

    def take_pages(self, num_pages: int, owner: str) -> list[int] | None:
        """Pages out of the free ones, then out of the cache."""
        return self._prompts.take(num_pages, owner)

    # -- run ----------------------------------------------------------------------------------

    def _run_prompts(self, chunks: tuple[Chunk, ...]) -> None:
        batch, work = chunk_work(chunks, self.legs.__getitem__)
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

    def is_waiting(self, leg: ColocatedLeg) -> bool:
        """Whether nothing of the prompt has been computed."""
        return leg.state in (_S.ARRIVED, _S.QUEUED)

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

    def pages_held(self, leg: ColocatedLeg) -> int:
        """Pages of the pool that `leg` keeps from others."""
        return len(leg.table)

    def report(self) -> WorkerLoad:
        """Set the gauges and return what routing looks at."""
        counts = self.count_states(_S)
        queued_tokens = sum(
            leg.prompt_len - leg.computed
            for leg in self.legs
            if leg.state in (_S.QUEUED, _S.PREFILLING)
        )
        pages = count_page_states(
            self.allocator.count_by_holders(), in_flight=self.legs.handoff_ids
        )
        running = sum(counts[state] for state in _IN_STEPS)
        waiting = counts[_S.QUEUED] + counts[_S.PREEMPTED]
        self._recorder.gauges(
            _GAUGES,
            (
                running,
                waiting,
                self.allocator.num_pages,
                self.allocator.num_free,
                pages.used,
                pages.cached,
            ),
        )
        return WorkerLoad(
            pages_total=self.allocator.num_pages,
            pages_free=self._prompts.num_available,
            running=running,
            waiting=len(self.legs) - running,
            queued_tokens=queued_tokens,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is free, cached, or held by a leg in flight."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        self.check_owners({CACHE})


def run(config: ProcessConfig, *, engine: Engine | None = None, stop: Stop | None = None) -> None:
    """Serve as `config` says until SIGTERM or `stop`. Raises StartError or ModelError."""
    serve(config, role=Role.WORKER, make_worker=ColocatedWorker, engine=engine, stop=stop)
