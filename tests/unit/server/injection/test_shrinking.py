"""Pages that a fault takes out of use: never ones that are in use, all given back when cleared."""

from __future__ import annotations

from server.injection.shrinking import OWNER, Shrunk
from server.kv.pages import PageAllocator


class Cached:
    """Pages that a cache holds and gives up when it is asked to."""

    def __init__(self, allocator: PageAllocator, num_pages: int) -> None:
        self.allocator = allocator
        self.pages = allocator.try_allocate(num_pages, "cache") or []

    def evict(self, num_pages: int) -> None:
        going, self.pages = self.pages[:num_pages], self.pages[num_pages:]
        self.allocator.release(going, "cache")


def nothing(_num_pages: int) -> None:
    pass


def test_free_pages_go_at_once_and_used_ones_as_they_come_free() -> None:
    allocator = PageAllocator(10)
    used = allocator.try_allocate(7, "r1")
    assert used is not None
    shrunk = Shrunk(allocator, nothing)
    shrunk.take(5)
    assert (shrunk.num_pages, allocator.num_free) == (3, 0)
    allocator.release(used, "r1")
    shrunk.turn()
    assert (shrunk.num_pages, allocator.num_free) == (5, 5)
    allocator.check_integrity()


def test_cached_pages_are_evicted_for_it() -> None:
    allocator = PageAllocator(10)
    cached = Cached(allocator, 8)
    shrunk = Shrunk(allocator, cached.evict)
    shrunk.take(5)
    assert (shrunk.num_pages, len(cached.pages), allocator.num_free) == (5, 5, 0)


def test_more_than_the_pool_has_is_the_pool() -> None:
    allocator = PageAllocator(4)
    shrunk = Shrunk(allocator, nothing)
    shrunk.take(3)
    shrunk.take(100)
    assert (shrunk.num_pages, allocator.num_free) == (4, 0)
    assert allocator.pages_by_owner().keys() == {OWNER}


def test_clearing_gives_all_back_with_the_next_turn() -> None:
    allocator = PageAllocator(4)
    shrunk = Shrunk(allocator, nothing)
    shrunk.take(3)
    assert shrunk.next_due_ns is None
    shrunk.clear()
    assert shrunk.next_due_ns == 0, "requests may wait for them"
    shrunk.turn()
    assert (shrunk.num_pages, allocator.num_free) == (0, 4)
    assert shrunk.next_due_ns is None
