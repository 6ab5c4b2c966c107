"""Which running sequences keep their pages, which lose them, and who gets them back. Pure.

Owns the rule for pages that run out during decode; knows nothing of queues for admission.

The rule: sequences grow in the order they were admitted; while pages are short the latest-admitted
one loses all of its own. Sequences that lost theirs come back in order of admission, before anybody
else is admitted, when their pages are free and one more for each running sequence, so that coming
back does not push the next one out. Host memory for their KV is bounded: what does not fit is
dropped, the latest-admitted's first, and computed again when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import WaitReason
from server.admission import PageBudget, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """A sequence in the batch, in order of admission.

    pages    pages that come free when it is preempted
    grow     pages it lacks for its next token: 0 or 1
    held     it sits this step out (a fault hook)
    """

    handoff_id: str
    request_id: str
    pages: int
    grow: int = 0
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptedSequence:
    """A sequence without pages, in order of admission; `pages` it needs to go on."""

    handoff_id: str
    request_id: str
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequence:
    """A sequence that is in host memory, or about to be, with `pages` of KV.

    admitted   order of admission
    """

    handoff_id: str
    admitted: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A sequence to preempt, and the request that gets its pages (itself when nobody's)."""

    handoff_id: str
    blocker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Order of application: preempt, grow, resume.

    running   sequences in the batch afterwards, in order
    free      pages left
    waits     why each preempted sequence waits
    returning request id of the first sequence that waits to come back: it goes before new ones
    """

    preempt: tuple[Preemption, ...]
    grow: tuple[str, ...]
    resume: tuple[str, ...]
    running: tuple[str, ...]
    free: int
    waits: tuple[Wait, ...]
    returning: str | None


def plan_pages(
    running: tuple[RunningSequence, ...],
    preempted: tuple[PreemptedSequence, ...],
    pages: PageBudget,
    *,
    slots: int,
    max_running: int,
) -> PagePlan:
    """Room for one more token of each running sequence.

    slots   free before, out of `max_running`
    """
    free = pages.free
    stay = list(running)
    preempt: list[Preemption] = []
    grow: list[str] = []
    index = 0
    while index < len(stay):
        sequence = stay[index]
        lacks = 0 if sequence.held else sequence.grow
        while lacks > free and len(stay) > index:
            victim = stay.pop()
            free += victim.pages
            preempt.append(Preemption(handoff_id=victim.handoff_id, blocker=sequence.request_id))
        if len(stay) > index:
            free -= lacks
            if lacks:
                grow.append(sequence.handoff_id)
        index += 1
    slots += len(preempt)
    resume: list[str] = []
    waits: list[Wait] = []
    gone = {running[len(stay) + n].request_id for n in range(len(preempt))}
    takers = tuple(dict.fromkeys(p.blocker for p in preempt if p.blocker not in gone))
    first: str | None = None  # request that waits to come back: nobody does before it
    for index, sequence in enumerate(preempted):
        position = index - len(resume)  # those that come back are ahead no more
        headroom = len(stay) + len(resume)
        fits = sequence.pages + headroom <= free
        if not waits and not preempt and slots > 0 and fits:
            resume.append(sequence.handoff_id)
            free -= sequence.pages
            slots -= 1
            continue
        if slots <= 0:
            waits.append(
                Wait(
                    handoff_id=sequence.handoff_id,
                    reason=WaitReason.SLOTS,
                    needed=1,
                    free=0,
                    limit=max_running,
                    position=position,
                    blockers=tuple(other.request_id for other in stay[:MAX_BLOCKERS]),
                )
            )
        elif first is not None and fits:
            waits.append(
                Wait(
                    handoff_id=sequence.handoff_id,
                    reason=WaitReason.HEAD_OF_LINE,
                    position=position,
                    blockers=(first,),
                )
            )
        elif fits:  # but nobody comes back while others lose their pages
            waits.append(
                Wait(
                    handoff_id=sequence.handoff_id,
                    reason=WaitReason.PREEMPTED,
                    position=position,
                    blockers=takers[:MAX_BLOCKERS],
                )
            )
        else:
            waits.append(
                Wait(
                    handoff_id=sequence.handoff_id,
                    reason=WaitReason.KV_PAGES,
                    needed=sequence.pages + headroom,
                    free=free,
                    limit=pages.total,
                    position=position,
                )
            )
        first = first or sequence.request_id
    return PagePlan(
        preempt=tuple(preempt),
        grow=tuple(grow),
        resume=tuple(resume),
        running=(*(sequence.handoff_id for sequence in stay), *resume),
        free=free,
        waits=tuple(waits),
        returning=_first_returning(running, preempted, preempt, resume),
    )


def dropped_for(
    victim: SavedSequence, saved: Sequence[SavedSequence], *, max_pages: int
) -> tuple[str, ...]:
    """Sequences whose KV is dropped so that what is saved, that of `victim` included, has at most
    `max_pages`."""
    stay = sorted((*saved, victim), key=lambda sequence: sequence.admitted)
    total = sum(sequence.pages for sequence in stay)
    gone: list[str] = []
    while total > max_pages:
        youngest = stay.pop()
        total -= youngest.pages
        gone.append(youngest.handoff_id)
    return tuple(gone)


def _first_returning(
    running: tuple[RunningSequence, ...],
    preempted: tuple[PreemptedSequence, ...],
    preempt: list[Preemption],
    resume: list[str],
) -> str | None:
    for sequence in preempted:
        if sequence.handoff_id not in resume:
            return sequence.request_id
    lost = {preemption.handoff_id for preemption in preempt}
    return next((s.request_id for s in running if s.handoff_id in lost), None)
