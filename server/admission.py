"""Who gets pages next: first come, first served, with bounded overtaking. Pure.

Owns the rule and the reason it gives to those left out; knows nothing of which pages they get.

The rule: a request that lacks pages may be overtaken by later ones that fit, `max_passes` times in
all. After that nobody passes it, and the pages that come free add up until it fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import WaitReason

MAX_PASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a request was left out of a plan. Units of the numbers: see `WaitReason`.

    needed     of pages, those that must be free: the ones that must stay free are among them
    position   requests ahead of it that the plan leaves in its queue too
    blockers   request ids in the way, most important first, at most MAX_BLOCKERS. Of a wait for
               pages the plan leaves them to the scheduler, which knows who holds how many
    """

    handoff_id: str
    reason: WaitReason
    needed: int | None = None
    free: int | None = None
    limit: int | None = None
    position: int | None = None
    blockers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBudget:
    """What a pool can give at the instant of a snapshot.

    free      pages that can be had, incl. those that evicting cached prefixes frees
    total     pages of the pool
    """

    free: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A request in a queue for pages.

    needed   pages it needs to be taken
    passes   how often later requests were taken while it lacked pages
    held     a fault hook keeps it in the queue
    """

    handoff_id: str
    request_id: str
    needed: int
    passes: int = 0
    held: bool = False


def largest(takers: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Request ids that took most of something, largest share first."""
    ranked = sorted(takers, key=lambda taker: -taker[1])  # stable: ties keep their order
    return tuple(request_id for request_id, _ in ranked[:MAX_BLOCKERS])


class FifoAdmission:
    """Offers pages to the requests of one queue, in order; collects waits and passes.

    headroom   pages that must stay free after a request was taken
    """

    def __init__(
        self, pages: PageBudget, *, headroom: int = 0, max_passes: int = MAX_PASSES
    ) -> None:
        self.free = pages.free
        self.waits: list[Wait] = []
        self._pages = pages
        self._headroom = headroom
        self._max_passes = max_passes
        self._lacking: list[Candidate] = []
        self._passes: dict[str, int] = {}
        self._blocker: Candidate | None = None

    @property
    def passes(self) -> Mapping[str, int]:
        """Total of passes of each request that was overtaken in this plan."""
        return MappingProxyType(self._passes)

    def offer(self, candidate: Candidate, position: int) -> bool:
        """Whether the next request of the queue gets its pages; if not, a wait says why.

        position   requests ahead of it that stay in the queue
        """
        if candidate.held:
            self._wait(candidate, WaitReason.INJECTED, position)
            return False
        if self._blocker is not None:
            self._wait(candidate, WaitReason.HEAD_OF_LINE, position, (self._blocker.request_id,))
            return False
        if candidate.needed + self._headroom > self.free:
            self.waits.append(
                Wait(
                    handoff_id=candidate.handoff_id,
                    reason=WaitReason.KV_PAGES,
                    needed=candidate.needed + self._headroom,
                    free=self.free,
                    limit=self._pages.total,
                    position=position,
                )
            )
            self._lacking.append(candidate)
            if candidate.passes >= self._max_passes:
                self._blocker = candidate
            return False
        self._overtake()
        self.free -= candidate.needed
        return True

    def _overtake(self) -> None:
        for candidate in self._lacking:
            passes = self._passes.get(candidate.handoff_id, candidate.passes) + 1
            self._passes[candidate.handoff_id] = passes
            if passes >= self._max_passes and self._blocker is None:
                self._blocker = candidate

    def _wait(
        self,
        candidate: Candidate,
        reason: WaitReason,
        position: int,
        blockers: tuple[str, ...] = (),
    ) -> None:
        self.waits.append(
            Wait(
                handoff_id=candidate.handoff_id,
                reason=reason,
                position=position,
                blockers=blockers,
            )
        )
