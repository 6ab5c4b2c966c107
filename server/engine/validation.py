"""What every engine checks before it computes: a bad call is a scheduler's bug, said at once.

Pure checks on the arguments of `Engine.prefill` and `Engine.decode`; holds no pages and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.kv.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Ranges that a step's arguments must lie in."""

    vocab_size: int
    context_length: int
    num_pages: int
    layout: KvLayout

    def check_prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Raises ValueError for the first chunk that cannot be computed."""
        written: set[int] = set()
        for index, chunk in enumerate(chunks):
            what = f"prefill chunk {index}"
            if not chunk.token_ids:
                raise ValueError(f"{what} has no tokens")
            if chunk.start < 0:
                raise ValueError(f"{what} starts at position {chunk.start}, expected 0 or more")
            self._check_tokens(what, chunk.token_ids)
            self._check_pages(what, chunk.pages, chunk.start, len(chunk.token_ids), written)
            if chunk.sampling is not None:
                check_sampling(chunk.sampling)

    def check_decode(self, slots: Sequence[DecodeSlot]) -> None:
        """Raises ValueError for the first slot that cannot be computed."""
        written: set[int] = set()
        for index, slot in enumerate(slots):
            what = f"decode slot {index}"
            if slot.position < 0:
                raise ValueError(f"{what} is at position {slot.position}, expected 0 or more")
            self._check_tokens(what, (slot.token_id,))
            self._check_pages(what, slot.pages, slot.position, 1, written)
            check_sampling(slot.sampling)

    def check_pages_exist(self, pages: Sequence[int]) -> None:
        """Raises ValueError when one of `pages` is not in the pool."""
        if pages and not (min(pages) >= 0 and max(pages) < self.num_pages):
            bad = next(page for page in pages if not 0 <= page < self.num_pages)
            raise ValueError(f"page {bad} is not in the pool of {self.num_pages} pages")

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            bad = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise ValueError(f"{what} has token id {bad}, the vocabulary has {self.vocab_size}")

    def _check_pages(
        self, what: str, pages: Sequence[int], start: int, count: int, written: set[int]
    ) -> None:
        end = start + count
        page_size = self.layout.page_size
        if end > self.context_length:
            raise ValueError(
                f"{what} ends at position {end}, the context length is {self.context_length}"
            )
        needed = self.layout.pages_for(end)
        if len(pages) < needed:
            raise ValueError(
                f"{what} has {len(pages)} pages of {page_size} tokens, "
                f"positions up to {end} need {needed}"
            )
        self.check_pages_exist(pages[:needed])
        # A page that two rows of one step write belongs to two sequences: a scheduler's bug
        # that would corrupt both silently.
        for page in set(pages[start // page_size : needed]):
            if page in written:
                raise ValueError(f"{what} writes page {page}, which the same step writes already")
            written.add(page)


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError when a sampling parameter is out of its range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature is {sampling.temperature}, expected 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}, expected more than 0 and at most 1")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}, expected 0 (off) or more")
