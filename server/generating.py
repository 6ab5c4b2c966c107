"""Sequences that generate: the part that decode and colocated workers share.

Owns the running batch (grow, preempt, resume, recompute, step), the commit of tokens and the end of
a sequence; knows nothing of where the KV of the prompt came from.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import GapCause, StepKind, WaitReason
from server.config import ProcessConfig
from server.detokenize import TokenBytes
from server.engine.base import DecodeSlot, Engine, PrefillChunk, SamplingParams
from server.engine.validation import check_sampling
from server.gaps import BatchChange, account_gap, explain_gap, time_without
from server.generating_leg import GenLegT
from server.output import LENGTH, Generation, StopRules
from server.pauses import FLOOR_NS as PAUSE_FLOOR_NS
from server.ports import Ports
from server.preemption import (
    PagePlan,
    PreemptedSequence,
    RunningSequence,
    SavedSequence,
    dropped_for,
)
from server.scheduler import Scheduler
from server.wire.messages import TokenItem

STEPS_LATELY = 8


class GeneratingScheduler(Scheduler[GenLegT]):
    """Base of the workers that run a batch."""

    def __init__(self, config: ProcessConfig, engine: Engine, ports: Ports) -> None:
        super().__init__(config, engine, ports)
        self._num_admitted = 0
        self._gap_threshold_s = config.settings.gap_threshold_s
        # Its size, the positions of its KV, and how long its step took, nanoseconds.
        self._last_batch = (0, 0, 0)
        self._lately: deque[tuple[int, int]] = deque(maxlen=STEPS_LATELY)  # sizes and times alike
        # Those that joined the batch since, the latest last; some may be over already.
        self._joined: deque[GenLegT] = deque(maxlen=MAX_BLOCKERS)

    @abstractmethod
    def take_pages(self, num_pages: int, owner: str) -> list[int] | None:
        """Pages for a sequence that runs or comes back; None when there are too few."""

    @abstractmethod
    def free_pages(self, leg: GenLegT) -> None:
        """Give back all pages of `leg`."""

    @cached_property
    def _tokenizer(self) -> TokenBytes:
        # Loading one takes a while, and only stop strings need it.
        from server.tokenizer import load_tokenizer  # noqa: PLC0415

        return load_tokenizer(self.settings.model)

    def new_generation(
        self,
        *,
        prompt_len: int,
        max_tokens: int,
        sampling: SamplingParams,
        ignore_eos: bool,
        stop: Sequence[str],
    ) -> Generation:
        return Generation(
            prompt_len=prompt_len,
            sampling=sampling,
            rules=StopRules(
                max_tokens=max_tokens,
                eos_token_ids=self.engine.info.eos_token_ids,
                ignore_eos=ignore_eos,
                stop=stop,
                tokenizer=lambda: self._tokenizer,
            ),
        )

    def refusal(self, leg: GenLegT) -> tuple[str, str] | None:
        """Why `leg` can never be served here, as reason and sentence; None when it can."""
        prompt_len, max_tokens = leg.generation.prompt_len, leg.max_tokens
        if prompt_len < 1 or max_tokens < 1:
            return "invalid_request", f"{prompt_len} prompt tokens, max_tokens {max_tokens}"
        try:
            check_sampling(leg.generation.sampling)
        except ValueError as error:
            return "invalid_request", str(error)
        length = prompt_len + max_tokens - 1  # the last token's KV is never written
        if length > self.engine.info.context_length:
            return (
                "context_length",
                f"{length} positions, the context has {self.engine.info.context_length}",
            )
        needed = self.engine.layout.pages_for(length)
        if needed > self.allocator.num_pages:
            return (
                "kv_capacity",
                f"needs {needed} KV pages, {self.config.instance} has {self.allocator.num_pages}",
            )
        return None

    def pages_to_reserve(self, leg: GenLegT) -> int:
        """Pages for the prompt and the first `reserve_output_tokens` of the output."""
        output = min(leg.max_tokens, self.settings.reserve_output_tokens)
        return self.engine.layout.pages_for(leg.generation.prompt_len + output - 1)

    # -- plan ---------------------------------------------------------------------------------

    def running_sequences(self, now_ns: int) -> tuple[RunningSequence, ...]:
        """The batch in order of admission, with those whose KV is being computed again."""
        legs = [leg for leg in self.legs if leg.state in (leg.running, leg.recomputing)]
        legs.sort(key=lambda leg: leg.admitted)
        return tuple(
            RunningSequence(
                handoff_id=leg.handoff_id,
                request_id=leg.request_id,
                pages=len(leg.own_pages),
                grow=max(0, self._pages_for_next(leg) - len(leg.table)),
                held=leg.state is leg.recomputing or self._sits_out(leg, now_ns),
            )
            for leg in legs
        )

    def preempted_sequences(self) -> tuple[PreemptedSequence, ...]:
        """Those without pages, in order of admission."""
        legs = [leg for leg in self.legs if leg.state is leg.preempted]
        legs.sort(key=lambda leg: leg.admitted)
        return tuple(
            PreemptedSequence(
                handoff_id=leg.handoff_id,
                request_id=leg.request_id,
                pages=self._pages_for_next(leg),
            )
            for leg in legs
        )

    def _pages_for_next(self, leg: GenLegT) -> int:
        return self.engine.layout.pages_for(leg.generation.kv_len + 1)

    def _sits_out(self, leg: GenLegT, now_ns: int) -> bool:
        if leg.finish_held:
            return True
        if leg.generation.num_tokens < 2:
            return False
        held = self.held(leg, "decode.gap", now_ns)
        if held and leg.absent is None:
            leg.leave(GapCause.INJECTED, now_ns)
        elif not held and leg.absent is not None:
            leg.come_back(now_ns)
        return held

    def apply_pages(self, plan: PagePlan) -> None:
        """Preempt, grow and resume as planned."""
        for preemption in plan.preempt:
            leg = self.legs[preemption.handoff_id]
            blocker = preemption.blocker if preemption.blocker != leg.request_id else None
            self._preempt(leg, blocker)
        for handoff_id in plan.grow:
            leg = self.legs[handoff_id]
            pages = self.take_pages(1, handoff_id)
            if pages is not None:
                leg.own_pages.extend(pages)
        for handoff_id in plan.resume:
            self._resume(self.legs[handoff_id])

    def _preempt(self, leg: GenLegT, blocker: str | None) -> None:
        keeps = leg.state is leg.running and self._make_room_in_memory(leg)
        if not keeps and not self._may_recompute(leg):
            self._give_up_kv(leg)
        if leg.ending is not None:
            return
        if keeps:
            kept = leg.table[: self.engine.layout.pages_for(leg.generation.kv_len)]
            try:
                leg.saved = self.engine.offload(kept)
            except Exception as error:  # this request fails, the loop goes on
                self.fail_step([leg], error)
                return
        leg.recomputed = 0
        leg.marked_pages = len(leg.table)
        leg.preemptions += 1
        free = self.allocator.num_free  # at the decision: its own pages go to somebody else
        self.free_pages(leg)
        now_ns = self._clock()
        # One that lacks a page itself gives way to those that hold the others.
        blockers = self.page_holders(now_ns) if blocker is None else (blocker,)
        if leg.absent is None:
            leg.leave(GapCause.PREEMPTION, now_ns, blockers[0] if blockers else None)
        leg.advance(leg.preempted, now_ns)
        self._observer.cause(
            leg,
            leg.stage,
            WaitReason.PREEMPTED,
            now_ns,
            needed=self._pages_for_next(leg),
            free=free,
            limit=self.allocator.num_pages,
            blockers=blockers,
        )

    def _make_room_in_memory(self, victim: GenLegT) -> bool:
        """Drop saved KV until that of `victim` fits beside the rest; False when it does not, as it
        was admitted last. What is dropped is computed again."""
        saved = [self._saved(leg) for leg in self.legs if leg.saved is not None]
        dropped = dropped_for(self._saved(victim), saved, max_pages=self.settings.preempted_pages)
        for handoff_id in dropped:
            leg = self.legs[handoff_id]
            leg.saved = None
            if leg is not victim and not self._may_recompute(leg):
                self._give_up_kv(leg)
        return victim.handoff_id not in dropped

    def _may_recompute(self, leg: GenLegT) -> bool:
        return bool(leg.prompt_ids) and leg.recomputes < self.settings.max_recomputes

    def _give_up_kv(self, leg: GenLegT) -> None:
        limit = self.settings.preempted_pages
        self.fail(
            leg,
            "host_memory",
            f"KV pages ran out, its {self._saved(leg).pages} do not fit into host memory, which "
            f"has {limit}, and they were computed again {leg.recomputes} times",
        )

    def _saved(self, leg: GenLegT) -> SavedSequence:
        return SavedSequence(
            handoff_id=leg.handoff_id,
            admitted=leg.admitted,
            pages=self.engine.layout.pages_for(leg.generation.kv_len),
        )

    def _resume(self, leg: GenLegT) -> None:
        pages = self.take_pages(self._pages_for_next(leg), leg.handoff_id)
        if pages is None:
            return
        leg.own_pages = pages
        leg.marked_pages = len(pages)
        if leg.saved is None:
            leg.recomputes += 1
            leg.advance(leg.recomputing, self._clock())
            return
        kept = pages[: self.engine.layout.pages_for(leg.generation.kv_len)]
        try:
            self.engine.restore(leg.saved, kept)
        except Exception as error:  # this request fails, the loop goes on
            self.fail_step([leg], error)
            return
        leg.saved = None
        self._rejoin(leg)

    def _rejoin(self, leg: GenLegT) -> None:
        now_ns = self._clock()
        leg.come_back(now_ns)
        leg.advance(leg.running, now_ns)
        leg.recomputed = 0
        self._joined.append(leg)

    # -- run ----------------------------------------------------------------------------------

    def admit_to_batch(self, leg: GenLegT, batch_size: int) -> None:
        """Give `leg` its place in the order of admission."""
        self._num_admitted += 1
        leg.admitted = self._num_admitted
        leg.batch_size = batch_size

    def commit_first(self, leg: GenLegT, token_id: int, now_ns: int) -> None:
        """Commit the boundary token; the gateway has it already when prefill forwarded it."""
        leg.generation.commit(token_id, now_ns)
        leg.advance(leg.running, now_ns)
        self._joined.append(leg)
        self._again = True
        reason = leg.generation.finish_reason
        if not leg.early:
            self._put_out(leg, token_id, now_ns)
        elif reason is not None:
            eos = token_id in self.engine.info.eos_token_ids
            leg.finish_said = reason == LENGTH or eos  # prefill knows these, not stop strings
            self._finish(leg, now_ns)

    def run_batch(self, now_ns: int) -> None:
        """One token for each sequence of the batch that has room for it."""
        batch = [
            leg
            for leg in self.legs
            if leg.state is leg.running
            and not self._sits_out(leg, now_ns)
            and self._pages_for_next(leg) <= len(leg.table)
        ]
        if not batch:
            return
        self._again = True
        self._steps += 1
        slots = [
            DecodeSlot(
                token_id=leg.generation.last_token_id,
                position=leg.generation.kv_len,
                pages=leg.table,
                sampling=leg.generation.sampling,
            )
            for leg in batch
        ]
        begun_ns = self._clock()
        ones = [1] * len(batch)
        try:
            token_ids = self.engine.decode(slots)
        except Exception as error:  # the batch's requests fail, the loop goes on
            self.ran(StepKind.DECODE, batch, ones, begun_ns)
            self.fail_step(batch, error)
            return
        number, ended_ns = self.ran(StepKind.DECODE, batch, ones, begun_ns)
        kv_tokens = sum(leg.generation.kv_len for leg in batch)
        for leg, token_id in zip(batch, token_ids, strict=True):
            before_ns = leg.generation.last_ns
            gap_s = leg.generation.commit(token_id, ended_ns)
            if gap_s is not None and gap_s > self._gap_threshold_s:
                self._mark_gap(leg, before_ns, ended_ns, number, batch, kv_tokens=kv_tokens)
            if leg.absences:
                leg.absences.clear()
            self._put_out(leg, token_id, ended_ns)
        took_ns = self._took_ns(begun_ns, ended_ns)
        self._last_batch = (len(batch), kv_tokens, took_ns)
        self._lately.append((len(batch), took_ns))
        self._joined.clear()

    def recompute(self) -> None:
        """Compute a part of the KV that was lost, of the sequences that have pages again: as many
        tokens as prompts may have in a step, so that the batch does not wait long."""
        left = self.settings.prefill_budget
        legs = [leg for leg in self.legs if leg.state is leg.recomputing]
        legs.sort(key=lambda leg: leg.admitted)
        batch: list[GenLegT] = []
        work: list[PrefillChunk] = []
        for leg in legs:
            token_ids = leg.kv_tokens[leg.recomputed :][:left]
            if not token_ids:
                break
            left -= len(token_ids)
            batch.append(leg)
            work.append(
                PrefillChunk(
                    token_ids=token_ids, start=leg.recomputed, pages=leg.table, sampling=None
                )
            )
        if not batch:
            return
        self._again = True
        self._steps += 1
        begun_ns = self._clock()
        tokens = [len(chunk.token_ids) for chunk in work]
        try:
            self.engine.prefill(work)
        except Exception as error:  # the batch's requests fail, the loop goes on
            self.ran(StepKind.PREFILL, batch, tokens, begun_ns)
            self.fail_step(batch, error)
            return
        self.ran(StepKind.PREFILL, batch, tokens, begun_ns)
        for leg, count in zip(batch, tokens, strict=True):
            leg.recomputed += count
            if leg.recomputed == leg.generation.kv_len:
                self._rejoin(leg)

    def _took_ns(self, begun_ns: int, ended_ns: int) -> int:
        took_ns = ended_ns - begun_ns
        if took_ns < PAUSE_FLOOR_NS:  # as nearly always
            return took_ns
        return time_without(begun_ns, ended_ns, self._ports.pauses(begun_ns, ended_ns))

    def _mark_gap(
        self,
        leg: GenLegT,
        before_ns: int,
        at_ns: int,
        step: int,
        batch: Sequence[GenLegT],
        *,
        kv_tokens: int,
    ) -> None:
        account = account_gap(
            before_ns,
            at_ns,
            spells=self._log.spells,
            absences=leg.absences,
            pauses=self._ports.pauses(before_ns, at_ns),
            known_from_ns=self._log.known_from_ns,
        )
        others = [other for other in self._joined if other is not leg and other in batch]
        size_before, kv_tokens_before, usual_ns = self._last_batch
        change = BatchChange(
            usual_ns=usual_ns,
            fastest_ns=min(
                (ns for size, ns in self._lately if size >= len(batch)), default=usual_ns
            ),
            size=len(batch),
            size_before=size_before,
            kv_tokens=kv_tokens,
            kv_tokens_before=kv_tokens_before,
            joined=others[-1].request_id if others else None,
        )
        self._observer.gap(
            leg,
            leg.generation.num_tokens - 1,
            account.gap_ns / 1e9,
            explain_gap(account, change),
            step=step,
            batch_size=len(batch),
            at_ns=at_ns,
        )

    def _put_out(self, leg: GenLegT, token_id: int, at_ns: int) -> None:
        generation = leg.generation
        index = generation.num_tokens - 1
        finished = generation.finish_reason is not None
        held = finished and self.held(leg, "decode.generate", at_ns)
        if finished and not held:
            # The mark comes before the message, so that the gateway cannot be done before it.
            leg.advance(leg.finished, at_ns)
        self.emit(
            leg,
            TokenItem(
                handoff_id=leg.handoff_id,
                index=index,
                token_ids=(token_id,),
                finish_reason=None if held else generation.finish_reason,
                cached_tokens=leg.cached_tokens if index == 0 else None,
            ),
        )
        if held:
            leg.finish_held = True
        elif finished:
            self._let_go(leg)

    def finish_held(self, now_ns: int) -> None:
        """Finish the sequences whose hold is over."""
        for leg in self.legs:
            if leg.state is not leg.running or not leg.finish_held:
                continue
            if not self.held(leg, "decode.generate", now_ns):
                self._finish(leg, now_ns)

    def _finish(self, leg: GenLegT, now_ns: int) -> None:
        if not leg.finish_held and self.held(leg, "decode.generate", now_ns):
            leg.finish_held = True
            return
        leg.advance(leg.finished, now_ns)
        if not leg.finish_said:
            self.emit(
                leg,
                TokenItem(
                    handoff_id=leg.handoff_id,
                    index=leg.generation.num_tokens,
                    token_ids=(),
                    finish_reason=leg.generation.finish_reason,
                ),
            )
        self._let_go(leg)

    def _let_go(self, leg: GenLegT) -> None:
        leg.ending = self.completed()
        leg.marked_pages = len(leg.table)
        self.free_pages(leg)
        self.close(leg, self._clock())

    # -- publish ------------------------------------------------------------------------------

    def count_states(self, states: Iterable[Any]) -> dict[Any, int]:
        """Legs per state, every state of `states` included."""
        counts = dict.fromkeys(states, 0)
        for leg in self.legs:
            counts[leg.state] = counts.get(leg.state, 0) + 1
        return counts
