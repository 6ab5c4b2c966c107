"""What a colocated worker's next step computes: a pure function from a snapshot to a plan.

Owns how prompts and running sequences share a step; knows nothing of pages' numbers or engines.

    chunked     each step runs the batch, and prompts get what is left of the token budget
    unchunked   a step runs whole prompts while there are any that may start, and the batch waits,
                but for MAX_WAITED steps at most; several prompts share a step up to the budget, a
                longer one runs alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import WaitReason
from server.admission import (
    MAX_PASSES,
    Candidate,
    FifoAdmission,
    PageBudget,
    Wait,
    largest,
)
from server.preemption import PagePlan, PreemptedSequence, RunningSequence, plan_pages
from server.prefill.policy import Chunk, QueuedPrompt, RunningPrompt

MAX_WAITED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedSnapshot:
    """What the plan depends on.

    queue        prompts in order of arrival; their pages include room for output
    prefilling   prompts with positions left, in order of start
    occupied     other slots in use: prompts computed whose boundary token is not committed yet
    waited       steps in a row that the batch has let prompts go first
    """

    queue: tuple[QueuedPrompt, ...]
    prefilling: tuple[RunningPrompt, ...]
    running: tuple[RunningSequence, ...]
    preempted: tuple[PreemptedSequence, ...]
    pages: PageBudget
    budget: int
    max_running: int
    chunked: bool
    occupied: int = 0
    waited: int = 0
    max_passes: int = MAX_PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedPlan:
    """Order of application: `pages`, `start`, then the step: `chunks` and, if `decode`, the batch.

    start    queued prompts that get pages; each has a chunk
    waits    why each prompt or preempted sequence that is left out waits
    passes   new totals of the prompts that were overtaken
    """

    pages: PagePlan
    start: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    decode: bool
    waits: tuple[Wait, ...]
    passes: Mapping[str, int]


def plan_colocated(snapshot: ColocatedSnapshot) -> ColocatedPlan:
    """The next step. Never plans more pages than are free or more slots than `max_running`."""
    held_slots = len(snapshot.prefilling) + snapshot.occupied
    slots = snapshot.max_running - len(snapshot.running) - held_slots
    pages = plan_pages(
        snapshot.running,
        snapshot.preempted,
        snapshot.pages,
        slots=slots,
        max_running=snapshot.max_running,
    )
    slots = snapshot.max_running - len(pages.running) - held_slots
    # A prompt always gets on, however large the batch is.
    left = max(1, snapshot.budget - len(pages.running)) if snapshot.chunked else snapshot.budget
    chunks: list[Chunk] = []
    waits: list[Wait] = list(pages.waits)
    takers: list[tuple[str, int]] = []
    for prompt in snapshot.prefilling:
        tokens = min(left, prompt.tokens) if snapshot.chunked else prompt.tokens
        if tokens > 0:
            chunks.append(Chunk(handoff_id=prompt.handoff_id, tokens=tokens))
            takers.append((prompt.request_id, tokens))
            left -= tokens
        else:
            waits.append(_budget_wait(prompt, left, snapshot.budget, None, takers))
    admission = FifoAdmission(
        PageBudget(free=pages.free, total=snapshot.pages.total),
        headroom=len(pages.running),
        max_passes=snapshot.max_passes,
    )
    occupants = tuple(
        sequence.request_id for sequence in (*snapshot.running, *snapshot.prefilling)[:MAX_BLOCKERS]
    )
    start: list[str] = []
    for index, prompt in enumerate(snapshot.queue):
        position = index - len(start)  # those that start are ahead no more
        if prompt.held:
            waits.append(_wait(prompt, WaitReason.INJECTED, position))
        elif pages.returning is not None:
            waits.append(_wait(prompt, WaitReason.HEAD_OF_LINE, position, (pages.returning,)))
        elif slots <= 0:
            waits.append(
                Wait(
                    handoff_id=prompt.handoff_id,
                    reason=WaitReason.SLOTS,
                    needed=1,
                    free=0,
                    limit=snapshot.max_running,
                    position=position,
                    blockers=occupants,
                )
            )
        elif left <= 0 or (not snapshot.chunked and chunks and prompt.tokens > left):
            waits.append(_budget_wait(prompt, left, snapshot.budget, position, takers))
            left = 0  # nobody passes a prompt that waits for tokens
        elif admission.offer(_candidate(prompt), position):
            tokens = min(left, prompt.tokens) if snapshot.chunked else prompt.tokens
            chunks.append(Chunk(handoff_id=prompt.handoff_id, tokens=tokens))
            takers.append((prompt.request_id, tokens))
            start.append(prompt.handoff_id)
            left -= tokens
            slots -= 1
    return ColocatedPlan(
        pages=pages,
        start=tuple(start),
        chunks=tuple(chunks),
        decode=snapshot.chunked or not chunks or snapshot.waited >= MAX_WAITED,
        waits=(*waits, *admission.waits),
        passes=admission.passes,
    )


def _candidate(prompt: QueuedPrompt) -> Candidate:
    return Candidate(
        handoff_id=prompt.handoff_id,
        request_id=prompt.request_id,
        needed=prompt.pages,
        passes=prompt.passes,
    )


def _wait(
    prompt: QueuedPrompt, reason: WaitReason, position: int, blockers: tuple[str, ...] = ()
) -> Wait:
    return Wait(handoff_id=prompt.handoff_id, reason=reason, position=position, blockers=blockers)


def _budget_wait(
    prompt: QueuedPrompt | RunningPrompt,
    left: int,
    budget: int,
    position: int | None,
    takers: Sequence[tuple[str, int]],
) -> Wait:
    return Wait(
        handoff_id=prompt.handoff_id,
        reason=WaitReason.TOKEN_BUDGET,
        needed=prompt.tokens,
        free=max(0, left),
        limit=budget,
        position=position,
        blockers=largest(takers),
    )
