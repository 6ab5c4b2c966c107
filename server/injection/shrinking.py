"""Pages of a worker's KV pool that a fault takes out of use.

Owns the pages it took; knows nothing of requests. Unlike the ballast of a request's own header
(`server.decode.ballast`) it gives running sequences nothing back: they are preempted, or wait.
"""

from __future__ import annotations

from collections.abc import Callable

from server.kv.pages import PageAllocator

OWNER = "out-of-use"


class Shrunk:
    """What the pool lacks. Takes pages when they are free, or cached and used by nobody.

    evict   frees up to so many cached pages; does nothing where there is no cache
    """

    def __init__(self, allocator: PageAllocator, evict: Callable[[int], object]) -> None:
        self._allocator = allocator
        self._evict = evict
        self._wanted = 0
        self._pages: list[int] = []

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def take(self, num_pages: int) -> None:
        """So many pages more are to go; what is in use now goes once it is free."""
        self._wanted += num_pages
        self.turn()

    @property
    def next_due_ns(self) -> int | None:
        """At once where pages are to be given back: requests may wait for them."""
        return 0 if self._pages and not self._wanted else None

    def turn(self) -> None:
        if not self._wanted:
            if self._pages:
                self._allocator.release(self._pages, OWNER)
                self._pages = []
            return
        allocator = self._allocator
        missing = min(self._wanted, allocator.num_pages) - len(self._pages)
        if missing <= 0:
            return
        if missing > allocator.num_free:
            self._evict(missing - allocator.num_free)
        self._pages += allocator.try_allocate(min(missing, allocator.num_free), OWNER) or []

    def clear(self) -> None:
        self._wanted = 0
