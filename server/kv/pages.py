"""Who holds which KV page: a free list, reference counts, and the holders' names.

Owns the accounting; knows nothing of bytes (`server.kv.pool`), tokens (`server.kv.radix`) or torch.

Every reference belongs to an owner tag (a handoff id, `"radix"`, or `""` when nobody gave one) and
is given back under the same tag, so a release that is not the caller's to make raises even while
others still hold the page.

Pages that the same owners hold are counted together. There are about as many such sets of owners as
there are owners, so what all pages are for can be told often, whatever the size of the pool
(`server.kv.page_states`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from server.errors import IntegrityError


@dataclass(slots=True, eq=False)
class _Holding:
    """Pages that the same owners hold, no more and no fewer. There is one for each set of owners,
    which its pages share: to move a page costs the same however many hold it."""

    owners: frozenset[str]
    num_pages: int = 0


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
        self._held: dict[int, _Holding] = {}
        self._holdings: dict[frozenset[str], _Holding] = {}  # none of them without a page
        self._further: Counter[tuple[int, str]] = Counter()  # references beyond an owner's first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held)

    def try_allocate(self, num_pages: int, owner: str = "") -> list[int] | None:
        """`num_pages` free pages in ascending order, each held once by `owner`.

        None, with nothing changed, when fewer are free.
        """
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(num_pages)]
        if pages:
            holding = self._holding(frozenset((owner,)))
            holding.num_pages += num_pages
            self._held.update(dict.fromkeys(pages, holding))
        return pages

    def retain(self, pages: Sequence[int], owner: str = "") -> None:
        """One more reference by `owner` on each of `pages`.

        Raises IntegrityError, with nothing changed, for a free, unknown or repeated page.
        """
        self._require_distinct(pages, "retain")
        for page in pages:
            if page not in self._held:
                raise IntegrityError(f"retain of page {page} by {owner!r}: it is not allocated")
        joined: list[int] = []
        for page in pages:
            if owner in self._held[page].owners:
                self._further[page, owner] += 1
            else:
                joined.append(page)
        self._move(joined, lambda owners: owners | {owner})

    def release(self, pages: Sequence[int], owner: str = "") -> None:
        """Give back one reference by `owner` on each of `pages`; the last one frees the page.

        Raises IntegrityError, with nothing changed, for a repeated page and for one that `owner`
        does not hold (a double release, or somebody else's page).
        """
        self._require_distinct(pages, "release")
        for page in pages:
            holding = self._held.get(page)
            if holding is None or owner not in holding.owners:
                held = self._references(page) or "nobody"
                raise IntegrityError(f"release of page {page} by {owner!r}: it is held by {held}")
        left: list[int] = []
        for page in pages:
            if (page, owner) not in self._further:
                left.append(page)
                continue
            self._further[page, owner] -= 1
            if not self._further[page, owner]:
                del self._further[page, owner]
        self._move(left, lambda owners: owners - {owner})

    def refcount(self, page: int) -> int:
        """References on `page`; 0 when it is free."""
        return sum(self._references(page).values())

    def held_only_by(self, page: int, owner: str) -> bool:
        """Whether `page` would be free once `owner` gave it up."""
        holding = self._held.get(page)
        return holding is not None and len(holding.owners) == 1 and owner in holding.owners

    def num_held_only_by(self, owner: str) -> int:
        """How many pages would be free once `owner` gave all of its own up."""
        holding = self._holdings.get(frozenset((owner,)))
        return 0 if holding is None else holding.num_pages

    def count_by_holders(self) -> Iterator[tuple[frozenset[str], int]]:
        """Each set of owners that hold a page together, and how many pages are held by just these.
        They sum to `num_used`."""
        return ((holding.owners, holding.num_pages) for holding in self._holdings.values())

    def pages_by_owner(self) -> dict[str, list[int]]:
        """Held pages per owner tag, ascending: the answer to "who keeps the pool full?"."""
        result: dict[str, list[int]] = {}
        for page in sorted(self._held):
            for owner in self._held[page].owners:
                result.setdefault(owner, []).append(page)
        return result

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is exactly once free or held."""
        free, held = set(self._free), self._held.keys()
        if len(free) != len(self._free):
            repeated = [page for page, count in Counter(self._free).items() if count > 1]
            raise IntegrityError(f"pages twice in the free list: {sorted(repeated)}")
        if free & held:
            raise IntegrityError(f"pages both free and held: {sorted(free & held)}")
        missing = set(range(self.num_pages)) - free - held
        if missing:
            raise IntegrityError(f"pages neither free nor held: {sorted(missing)}")
        unknown = (free | held) - set(range(self.num_pages))
        if unknown:
            raise IntegrityError(f"pages outside 0 … {self.num_pages - 1}: {sorted(unknown)}")
        for page, holding in self._held.items():
            if not holding.owners or self._holdings.get(holding.owners) is not holding:
                raise IntegrityError(f"page {page} is held without a reference that counts")
        counted = dict(self.count_by_holders())
        together = Counter(holding.owners for holding in self._held.values())
        if together != counted:
            raise IntegrityError(f"pages by holders are {dict(together)}, counted {counted}")
        for (page, owner), count in self._further.items():
            if count < 1 or owner not in self._references(page):
                raise IntegrityError(f"page {page} has {count} more references by {owner!r}")

    def _references(self, page: int) -> dict[str, int]:
        holding = self._held.get(page)
        if holding is None:
            return {}
        return {owner: 1 + self._further[page, owner] for owner in sorted(holding.owners)}

    def _holding(self, owners: frozenset[str]) -> _Holding:
        return self._holdings.setdefault(owners, _Holding(owners))

    def _move(
        self, pages: Sequence[int], change: Callable[[frozenset[str]], frozenset[str]]
    ) -> None:
        """Count `pages` under changed owners; those that nobody holds then are free. A set of
        owners is built once for all of its pages."""
        changed: dict[_Holding, _Holding | None] = {}
        for page in pages:
            before = self._held[page]
            if before not in changed:
                owners = change(before.owners)
                changed[before] = self._holding(owners) if owners else None
            before.num_pages -= 1
            after = changed[before]
            if after is None:
                del self._held[page]
                heapq.heappush(self._free, page)
            else:
                after.num_pages += 1
                self._held[page] = after
        for before in changed:
            if not before.num_pages:
                del self._holdings[before.owners]

    @staticmethod
    def _require_distinct(pages: Sequence[int], verb: str) -> None:
        if len(set(pages)) != len(pages):
            repeated = [page for page, count in Counter(pages).items() if count > 1]
            raise IntegrityError(f"{verb} names pages more than once: {sorted(repeated)}")
