"""A fault hook: takes every free page, so that a reservation truly waits for pages.

Owns the pages it took; running sequences get them back when they need them.
"""

from __future__ import annotations

from server.kv.pages import PageAllocator

OWNER = "ballast"


class Ballast:
    """Pages held for the fault `decode.reserve`."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: list[int] = []

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def fill(self) -> None:
        """Take all pages that are free."""
        self._pages += self._allocator.try_allocate(self._allocator.num_free, OWNER) or []

    def give_back(self, num_pages: int | None = None) -> None:
        """Free `num_pages` pages, or all."""
        count = self.num_pages if num_pages is None else min(num_pages, self.num_pages)
        if count > 0:
            self._allocator.release(self._pages[-count:], OWNER)
            del self._pages[-count:]
