"""What the next prefill step computes: a pure function from a snapshot to a plan.

Owns the token budget and the order of prompts; knows nothing of pages' numbers, engines or time.

The budget of a step goes to the prompts that already run, in the order they started, then to those
in the queue, first come, first served. The last prompt that gets tokens may get a part of what it
needs: its chunk ends where the budget does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdtrace.stages import WaitReason
from server.admission import (
    MAX_PASSES,
    Candidate,
    FifoAdmission,
    PageBudget,
    Wait,
    largest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """A prompt that has not started.

    tokens   positions to compute: those that the prefix cache does not hold
    pages    pages to take from the pool, for the whole prompt
    passes   how often later prompts started while it lacked pages
    held     a fault hook keeps it in the queue
    """

    handoff_id: str
    request_id: str
    tokens: int
    pages: int
    passes: int = 0
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPrompt:
    """A prompt with positions left to compute; `tokens` of them."""

    handoff_id: str
    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSnapshot:
    """What the plan depends on. `running` in order of start, `queue` in order of arrival."""

    running: tuple[RunningPrompt, ...]
    queue: tuple[QueuedPrompt, ...]
    pages: PageBudget
    budget: int
    max_passes: int = MAX_PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`tokens` positions of one prompt, in this step."""

    handoff_id: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """One step.

    start    queued prompts that get pages, in order; each has a chunk
    chunks   at most the budget's tokens in all
    waits    why each prompt that got no tokens waits
    passes   new totals of the prompts that were overtaken
    """

    start: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    waits: tuple[Wait, ...]
    passes: Mapping[str, int]


def plan_prefill(snapshot: PrefillSnapshot) -> PrefillPlan:
    """The next step. Starts no prompt whose pages are not free."""
    left = snapshot.budget
    chunks: list[Chunk] = []
    starved: list[Wait] = []
    takers: list[tuple[str, int]] = []
    for prompt in snapshot.running:
        tokens = min(left, prompt.tokens)
        if tokens > 0:
            chunks.append(Chunk(handoff_id=prompt.handoff_id, tokens=tokens))
            takers.append((prompt.request_id, tokens))
            left -= tokens
        else:
            starved.append(
                Wait(
                    handoff_id=prompt.handoff_id,
                    reason=WaitReason.TOKEN_BUDGET,
                    needed=prompt.tokens,
                    free=0,
                    limit=snapshot.budget,
                    blockers=largest(takers),
                )
            )
    admission = FifoAdmission(snapshot.pages, max_passes=snapshot.max_passes)
    start: list[str] = []
    for index, prompt in enumerate(snapshot.queue):
        position = index - len(start)  # those that start are ahead no more
        candidate = Candidate(
            handoff_id=prompt.handoff_id,
            request_id=prompt.request_id,
            needed=prompt.pages,
            passes=prompt.passes,
            held=prompt.held,
        )
        if left == 0 and not prompt.held:
            starved.append(
                Wait(
                    handoff_id=prompt.handoff_id,
                    reason=WaitReason.TOKEN_BUDGET,
                    needed=prompt.tokens,
                    free=0,
                    limit=snapshot.budget,
                    position=position,
                    blockers=largest(takers),
                )
            )
        elif admission.offer(candidate, position):
            tokens = min(left, prompt.tokens)
            chunks.append(Chunk(handoff_id=prompt.handoff_id, tokens=tokens))
            takers.append((prompt.request_id, tokens))
            start.append(prompt.handoff_id)
            left -= tokens
    return PrefillPlan(
        start=tuple(start),
        chunks=tuple(chunks),
        waits=(*starved, *admission.waits),
        passes=admission.passes,
    )
