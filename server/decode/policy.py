"""What a decode worker does next: a pure function from a snapshot to a plan.

Owns the order of claims on pages and slots; knows nothing of pages' numbers, engines or time.

Pages go, in this order, to running sequences that grow, to preempted ones that come back, and to
requests that reserve. Slots go to preempted sequences, then to landed ones, first come, first
served. A landed sequence has its pages already, so it may run while a preempted one still waits for
pages: it must, or nothing would ever come free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import WaitReason
from server.admission import (
    MAX_PASSES,
    Candidate,
    FifoAdmission,
    PageBudget,
    Wait,
)
from server.preemption import PagePlan, PreemptedSequence, RunningSequence, plan_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedSequence:
    """A sequence whose KV is whole, in order of landing; `held` by a fault hook."""

    handoff_id: str
    request_id: str
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSnapshot:
    """What the plan depends on.

    pages         for sequences that run or come back
    pages_new     free pages for new reservations: fewer while a fault hook fills the pool
    committing    sequences that have a slot but are not in the batch yet
    """

    reserving: tuple[Candidate, ...]
    landed: tuple[LandedSequence, ...]
    running: tuple[RunningSequence, ...]
    preempted: tuple[PreemptedSequence, ...]
    pages: PageBudget
    pages_new: int
    max_running: int
    committing: int = 0
    max_passes: int = MAX_PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Order of application: `pages`, then `admit`, then `reserve`.

    admit     landed sequences that join the batch
    reserve   requests that get their pages
    waits     why each of the others waits, with the stage's queue it waits in
    """

    pages: PagePlan
    admit: tuple[str, ...]
    reserve: tuple[str, ...]
    waits: tuple[Wait, ...]
    passes: Mapping[str, int]


def plan_decode(snapshot: DecodeSnapshot) -> DecodePlan:
    """The next turn. Never plans more pages than are free or more slots than `max_running`."""
    slots = snapshot.max_running - len(snapshot.running) - snapshot.committing
    pages = plan_pages(
        snapshot.running,
        snapshot.preempted,
        snapshot.pages,
        slots=slots,
        max_running=snapshot.max_running,
    )
    slots = snapshot.max_running - len(pages.running) - snapshot.committing
    oldest = tuple(sequence.request_id for sequence in snapshot.running[:MAX_BLOCKERS])
    waits: list[Wait] = list(pages.waits)
    admit: list[str] = []
    for index, sequence in enumerate(snapshot.landed):
        position = index - len(admit)  # those that go on are ahead no more
        if sequence.held:
            waits.append(
                Wait(handoff_id=sequence.handoff_id, reason=WaitReason.INJECTED, position=position)
            )
        elif slots > 0:
            admit.append(sequence.handoff_id)
            slots -= 1
        else:
            waits.append(
                Wait(
                    handoff_id=sequence.handoff_id,
                    reason=WaitReason.SLOTS,
                    needed=1,
                    free=0,
                    limit=snapshot.max_running,
                    position=position,
                    blockers=oldest,
                )
            )
    taken = snapshot.pages.free - pages.free
    admission = FifoAdmission(
        PageBudget(free=max(0, snapshot.pages_new - max(0, taken)), total=snapshot.pages.total),
        headroom=len(pages.running) + len(admit),
        max_passes=snapshot.max_passes,
    )
    reserve: list[str] = []
    for index, candidate in enumerate(snapshot.reserving):
        position = index - len(reserve)
        if pages.returning is not None:
            waits.append(
                Wait(
                    handoff_id=candidate.handoff_id,
                    reason=WaitReason.HEAD_OF_LINE,
                    position=position,
                    blockers=(pages.returning,),
                )
            )
        elif admission.offer(candidate, position):
            reserve.append(candidate.handoff_id)
    return DecodePlan(
        pages=pages,
        admit=tuple(admit),
        reserve=tuple(reserve),
        waits=(*waits, *admission.waits),
        passes=admission.passes,
    )
