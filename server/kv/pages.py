"""Who holds which KV page: a free list, reference counts, and the holders' names.

Owns the accounting; knows nothing of bytes (`server.kv.pool`), tokens (`server.kv.radix`) or torch.

Every reference belongs to an owner tag (a handoff id, `"radix"`, or `""` when nobody gave one) and
is given back under the same tag, so a release that is not the caller's to make raises even while
others still hold the page.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from server.errors import IntegrityError


class PageAllocator:
    """Page numbers 0 … num_pages - 1 of one pool. Not thread-safe: it belongs to one scheduler.

    A page is free, or held by at least one reference. The lowest free pages go first, so that
    page lists tend to be runs, which copies coalesce.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # a heap
        self._holders: dict[int, dict[str, int]] = {}
        self._sole: Counter[str] = Counter()  # owner → pages that only this owner holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def try_allocate(self, num_pages: int, owner: str = "") -> list[int] | None:
        """`num_pages` free pages in ascending order, each held once by `owner`.

        None, with nothing changed, when fewer are free.
        """
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = {owner: 1}
        self._sole[owner] += num_pages
        return pages

    def retain(self, pages: Sequence[int], owner: str = "") -> None:
        """One more reference by `owner` on each of `pages`.

        Raises IntegrityError, with nothing changed, for a free, unknown or repeated page.
        """
        self._require_distinct(pages, "retain")
        for page in pages:
            if page not in self._holders:
                raise IntegrityError(f"retain of page {page} by {owner!r}: it is not allocated")
        for page in pages:
            holders = self._holders[page]
            if owner in holders:
                holders[owner] += 1
                continue
            if len(holders) == 1:
                self._sole[next(iter(holders))] -= 1
            holders[owner] = 1

    def release(self, pages: Sequence[int], owner: str = "") -> None:
        """Give back one reference by `owner` on each of `pages`; the last one frees the page.

        Raises IntegrityError, with nothing changed, for a repeated page and for one that `owner`
        does not hold (a double release, or somebody else's page).
        """
        self._require_distinct(pages, "release")
        for page in pages:
            if owner not in self._holders.get(page, {}):
                held = dict(self._holders.get(page, {})) or "nobody"
                raise IntegrityError(f"release of page {page} by {owner!r}: it is held by {held}")
        for page in pages:
            holders = self._holders[page]
            if holders[owner] > 1:
                holders[owner] -= 1
                continue
            if len(holders) == 1:
                self._sole[owner] -= 1
                del self._holders[page]
                heapq.heappush(self._free, page)
                continue
            del holders[owner]
            if len(holders) == 1:
                self._sole[next(iter(holders))] += 1

    def refcount(self, page: int) -> int:
        """References on `page`; 0 when it is free."""
        return sum(self._holders.get(page, {}).values())

    def held_only_by(self, page: int, owner: str) -> bool:
        """Whether `page` would be free once `owner` gave it up."""
        holders = self._holders.get(page)
        return holders is not None and len(holders) == 1 and owner in holders

    def num_held_only_by(self, owner: str) -> int:
        """How many pages would be free once `owner` gave all of its own up."""
        return self._sole[owner]

    def pages_by_owner(self) -> dict[str, list[int]]:
        """Held pages per owner tag, ascending: the answer to "who keeps the pool full?"."""
        result: dict[str, list[int]] = {}
        for page in sorted(self._holders):
            for owner in self._holders[page]:
                result.setdefault(owner, []).append(page)
        return result

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is exactly once free or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            repeated = [page for page, count in Counter(self._free).items() if count > 1]
            raise IntegrityError(f"pages twice in the free list: {sorted(repeated)}")
        both = free & self._holders.keys()
        if both:
            raise IntegrityError(f"pages both free and held: {sorted(both)}")
        missing = set(range(self.num_pages)) - free - self._holders.keys()
        if missing:
            raise IntegrityError(f"pages neither free nor held: {sorted(missing)}")
        unknown = (free | self._holders.keys()) - set(range(self.num_pages))
        if unknown:
            raise IntegrityError(f"pages outside 0 … {self.num_pages - 1}: {sorted(unknown)}")
        sole: Counter[str] = Counter()
        for page, holders in self._holders.items():
            if not holders or min(holders.values()) < 1:
                raise IntegrityError(f"page {page} is held without a reference: {holders}")
            if len(holders) == 1:
                sole[next(iter(holders))] += 1
        if sole != +self._sole:
            raise IntegrityError(f"sole holders are {dict(sole)}, counted {dict(+self._sole)}")

    @staticmethod
    def _require_distinct(pages: Sequence[int], verb: str) -> None:
        if len(set(pages)) != len(pages):
            repeated = [page for page, count in Counter(pages).items() if count > 1]
            raise IntegrityError(f"{verb} names pages more than once: {sorted(repeated)}")
