"""Prompts on their way through an engine: what prefill and colocated workers do alike.

Owns how a prompt gets its pages (cached prefix first, then free ones, then evicted ones) and how a
planned chunk becomes engine work; knows nothing of states, marks or what follows a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from server.engine.base import PrefillChunk, SamplingParams
from server.faults import FaultHolds
from server.kv.pages import PageAllocator
from server.kv.radix import OWNER as CACHE
from server.kv.radix import Match, RadixCache
from server.prefill.policy import Chunk, QueuedPrompt

LOOKAHEAD = 8
"""Queued prompts whose cached prefix is looked up for planning; later ones count as uncached."""


class PromptLeg(Protocol):
    """What is needed of a leg. Pages in order of positions: those of `match`, then `own_pages`."""

    prompt_ids: tuple[int, ...]
    match: Match | None
    own_pages: list[int]
    computed: int
    passes: int
    holds: FaultHolds

    @property
    def handoff_id(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def table(self) -> list[int]: ...

    @property
    def sampling(self) -> SamplingParams: ...


LegT = TypeVar("LegT", bound=PromptLeg)


class PromptPages:
    """Pages for prompts, out of one pool and its prefix cache."""

    def __init__(self, allocator: PageAllocator, cache: RadixCache) -> None:
        self.allocator = allocator
        self.cache = cache

    @property
    def num_available(self) -> int:
        """Pages that are free or that eviction would free."""
        return self.allocator.num_free + self.cache.num_evictable

    def queued(self, leg: PromptLeg, position: int, pages: int, now_ns: int) -> QueuedPrompt:
        """`leg` as the policy sees it; `pages` is what it needs without a cached prefix."""
        tokens = leg.prompt_len
        if position < LOOKAHEAD:
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

    def claim(
        self,
        legs: Sequence[LegT],
        pages_of: Callable[[LegT], int],
        take: Callable[[int, str], list[int] | None],
    ) -> None:
        """Lock the cached prefix of each leg and take the rest of its pages.

        A leg that gets none keeps `match` None: estimates of what is free may have been too high.
        """
        # All matches are locked before any page is taken: taking pages may evict cached ones.
        matches = [self._match(leg) for leg in legs]
        for leg, match in zip(legs, matches, strict=True):
            self.cache.lock(match, leg.handoff_id)
        for leg, match in zip(legs, matches, strict=True):
            pages = take(pages_of(leg) - len(match.pages), leg.handoff_id)
            if pages is None:
                self.cache.unlock(match)
                continue
            leg.match = match
            leg.own_pages = pages
            leg.computed = match.num_tokens

    def take(self, num_pages: int, owner: str) -> list[int] | None:
        """Pages out of the free ones, then out of the cache."""
        lacking = num_pages - self.allocator.num_free
        if lacking > 0:
            self.cache.evict(lacking)
        return self.allocator.try_allocate(num_pages, owner)

    def _match(self, leg: PromptLeg) -> Match:
        return self.cache.match(leg.prompt_ids, leg.prompt_len - 1)


def chunk_work(
    chunks: Sequence[Chunk], leg_of: Callable[[str], LegT]
) -> tuple[list[LegT], list[PrefillChunk]]:
    """The engine's work for planned chunks, and the leg of each. Legs without pages stay out."""
    batch: list[LegT] = []
    work: list[PrefillChunk] = []
    for chunk in chunks:
        leg = leg_of(chunk.handoff_id)
        if leg.match is None:
            continue
        end = min(leg.computed + chunk.tokens, leg.prompt_len)
        batch.append(leg)
        work.append(
            PrefillChunk(
                token_ids=leg.prompt_ids[leg.computed : end],
                start=leg.computed,
                pages=leg.table,
                sampling=leg.sampling if end == leg.prompt_len else None,
            )
        )
    return batch, work
