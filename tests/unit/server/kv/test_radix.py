"""The prefix cache against a brute-force model: a dict from whole prefixes to pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.errors import IntegrityError
from server.kv.pages import PageAllocator
from server.kv.radix import OWNER, Match, RadixCache

REQUEST = "request"
OTHER = "other request"
TOKENS = st.lists(st.integers(0, 1), max_size=10)


@dataclass
class Entry:
    """One cached prefix of the model."""

    page: int
    last_used: int


class RadixCacheMachine(RuleBasedStateMachine):
    """Prompts over two token ids, so that prefixes collide often."""

    @initialize(page_size=st.integers(1, 3), num_pages=st.integers(1, 12))
    def start(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, page_size)
        self.model: dict[tuple[int, ...], Entry] = {}
        self.now = 0
        self.locked: list[Match] = []
        self.held: list[list[int]] = []  # page lists of running requests

    def prefixes(self, token_ids: list[int], limit: int) -> list[tuple[int, ...]]:
        size = self.page_size
        return [tuple(token_ids[:end]) for end in range(size, limit + 1, size)]

    def touch(self, prefixes: list[tuple[int, ...]]) -> list[int]:
        """Pages of the cached head of `prefixes`, all used at one instant."""
        self.now += 1
        pages: list[int] = []
        for prefix in prefixes:
            if prefix not in self.model:
                break
            self.model[prefix].last_used = self.now
            pages.append(self.model[prefix].page)
        return pages

    def shared(self, page: int) -> bool:
        return any(page in match.pages for match in self.locked) or any(
            page in pages for pages in self.held
        )

    def leaves(self) -> list[tuple[int, ...]]:
        parents = {prefix[: -self.page_size] for prefix in self.model}
        return sorted(
            (prefix for prefix in self.model if prefix not in parents),
            key=lambda prefix: self.model[prefix].last_used,
        )

    @rule(token_ids=TOKENS, max_tokens=st.integers(-1, 11), lock=st.booleans())
    def match(self, token_ids: list[int], max_tokens: int, lock: bool) -> None:
        match = self.cache.match(token_ids, max_tokens)
        pages = self.touch(self.prefixes(token_ids, min(max_tokens, len(token_ids))))
        assert list(match.pages) == pages
        assert match.num_tokens == len(pages) * self.page_size
        assert match.num_tokens <= max(0, max_tokens)
        if lock:
            self.cache.lock(match, REQUEST)
            self.locked.append(match)

    @rule(index=st.integers(0))
    @precondition(lambda self: self.locked)
    def unlock(self, index: int) -> None:
        self.cache.unlock(self.locked.pop(index % len(self.locked)))

    @rule(token_ids=TOKENS, keep=st.booleans(), reuse=st.booleans())
    def compute_and_insert(self, token_ids: list[int], keep: bool, reuse: bool) -> None:
        """A request that did (`reuse`) or did not look for its prefix first."""
        prefixes = self.prefixes(token_ids, len(token_ids))
        match = None
        if reuse:
            match = self.cache.match(token_ids, len(token_ids))
            self.touch(prefixes)
            self.cache.lock(match, REQUEST)
        reused = list(match.pages) if match else []
        num_own = -(-len(token_ids) // self.page_size) - len(reused)
        own = self.allocator.try_allocate(num_own, REQUEST)
        if own is not None:
            num_fresh = self.cache.insert(token_ids, reused + own)
            num_known = len(self.touch(prefixes))
            assert num_fresh == len(prefixes) - num_known
            pages = reused + own
            for prefix, page in list(zip(prefixes, pages, strict=False))[num_known:]:
                self.model[prefix] = Entry(page, self.now)
            if keep:
                self.held.append(own)
            else:
                self.allocator.release(own, REQUEST)
        if match:
            self.cache.unlock(match)

    @rule(index=st.integers(0))
    @precondition(lambda self: self.held)
    def finish_request(self, index: int) -> None:
        self.allocator.release(self.held.pop(index % len(self.held)), REQUEST)

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        free_before = self.allocator.num_free
        num_freed = self.cache.evict(num_pages)
        expected = 0
        target = min(num_pages, sum(not self.shared(entry.page) for entry in self.model.values()))
        while expected < target:
            leaves = self.leaves()
            free_leaves = [leaf for leaf in leaves if not self.shared(self.model[leaf].page)]
            if free_leaves:
                del self.model[free_leaves[0]]
                expected += 1
                continue
            blocking = [leaf for leaf in leaves if self.blocks(leaf)]
            del self.model[blocking[0]]
        assert num_freed == expected
        assert self.allocator.num_free == free_before + num_freed

    def blocks(self, leaf: tuple[int, ...]) -> bool:
        return any(
            not self.shared(self.model[tuple(prefix)].page)
            for prefix in self.prefixes(list(leaf), len(leaf) - self.page_size)
        )

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.cache.num_pages == len(self.model)
        assert self.cache.num_evictable == sum(
            not self.shared(entry.page) for entry in self.model.values()
        )
        for match in self.locked:
            for page in match.pages:
                assert self.allocator.refcount(page) >= 2, "a locked page is still cached"
        self.cache.check_integrity()
        self.allocator.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for match in self.locked:
            self.cache.unlock(match)
        for pages in self.held:
            self.allocator.release(pages, REQUEST)
        assert self.cache.evict(self.allocator.num_pages) == len(self.model)
        assert self.allocator.num_free == self.allocator.num_pages


RadixCacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None
)
TestRadixCache = RadixCacheMachine.TestCase


def cache_of(num_pages: int, page_size: int = 2) -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(num_pages)
    return allocator, RadixCache(allocator, page_size)


def remember(allocator: PageAllocator, cache: RadixCache, token_ids: list[int]) -> list[int]:
    pages = allocator.try_allocate(-(-len(token_ids) // 2), REQUEST)
    assert pages is not None
    cache.insert(token_ids, pages)
    allocator.release(pages, REQUEST)
    return pages


def test_a_match_leaves_at_least_one_prompt_token_to_compute() -> None:
    allocator, cache = cache_of(8)
    prompt = [1, 2, 3, 4]
    remember(allocator, cache, prompt)
    assert cache.match(prompt, len(prompt) - 1).num_tokens == 2
    assert cache.match([*prompt, 5], len(prompt)).num_tokens == 4


def test_a_partial_last_page_is_not_cached() -> None:
    allocator, cache = cache_of(8)
    pages = remember(allocator, cache, [1, 2, 3])
    assert cache.num_pages == 1
    assert cache.match([1, 2, 3, 4], 3).pages == (pages[0],)
    assert allocator.num_used == 1


def test_least_recently_used_leaf_goes_first_and_locked_pages_stay() -> None:
    allocator, cache = cache_of(8)
    [first] = remember(allocator, cache, [1, 1])
    [second] = remember(allocator, cache, [2, 2])
    [third] = remember(allocator, cache, [3, 3])
    cache.match([1, 1], 2)
    locked = cache.match([3, 3], 2)
    cache.lock(locked, REQUEST)
    assert cache.num_evictable == 2
    assert cache.evict(1) == 1
    assert cache.match([2, 2], 2).pages == ()
    assert cache.match([1, 1], 2).pages == (first,)
    assert cache.evict(5) == 1
    assert cache.match([3, 3], 2).pages == (third,)
    cache.unlock(locked)
    assert cache.evict(1) == 1
    assert second != first
    assert allocator.num_free == 8


def test_evicting_a_page_that_a_request_still_holds_frees_nothing_and_keeps_it_cached() -> None:
    allocator, cache = cache_of(4)
    pages = allocator.try_allocate(2, REQUEST)
    assert pages is not None
    cache.insert([1, 2, 3, 4], pages)
    assert cache.num_evictable == 0
    assert cache.evict(2) == 0
    assert cache.match([1, 2, 3, 4], 4).pages == tuple(pages)
    allocator.release(pages, REQUEST)
    assert cache.evict(2) == 2


def test_a_held_page_below_a_freeable_one_is_forgotten_when_room_is_needed() -> None:
    allocator, cache = cache_of(4)
    [cached] = remember(allocator, cache, [1, 1])
    own = allocator.try_allocate(2, REQUEST)  # recomputed [1, 1] without looking it up
    assert own is not None
    assert cache.insert([1, 1, 2, 2], own) == 1
    assert allocator.refcount(own[0]) == 1, "the duplicate is the request's alone"
    assert cache.num_evictable == 1
    assert cache.evict(1) == 1
    assert allocator.refcount(cached) == 0
    assert allocator.refcount(own[1]) == 1
    assert cache.num_pages == 0


def test_locks_are_counted_per_match() -> None:
    allocator, cache = cache_of(4)
    remember(allocator, cache, [1, 1])
    first, second = cache.match([1, 1], 2), cache.match([1, 1], 2)
    cache.lock(first, REQUEST)
    cache.lock(second, OTHER)
    with pytest.raises(IntegrityError, match="locked twice"):
        cache.lock(first, OTHER)
    cache.unlock(first)
    with pytest.raises(IntegrityError, match="was not locked"):
        cache.unlock(first)
    assert cache.evict(1) == 0
    assert allocator.pages_by_owner() == {OWNER: [0], OTHER: [0]}
    cache.unlock(second)
    assert cache.evict(1) == 1


def test_locking_a_match_whose_page_was_evicted_and_reused_is_an_error() -> None:
    allocator, cache = cache_of(1)
    remember(allocator, cache, [1, 1])
    match = cache.match([1, 1], 2)
    cache.evict(1)
    remember(allocator, cache, [2, 2])
    with pytest.raises(IntegrityError, match="evicted after the match"):
        cache.lock(match, REQUEST)


def test_bad_inserts_are_refused_and_change_nothing() -> None:
    allocator, cache = cache_of(4)
    [page] = remember(allocator, cache, [1, 1])
    own = allocator.try_allocate(1, REQUEST)
    assert own is not None
    with pytest.raises(IntegrityError, match="needs 2 pages, got 1"):
        cache.insert([2, 2, 3, 3], own)
    with pytest.raises(IntegrityError, match=f"page {page}: it is cached under another prefix"):
        cache.insert([2, 2, 3, 3], [own[0], page])
    with pytest.raises(IntegrityError, match=r"page 3 .*not allocated"):
        cache.insert([2, 2, 3, 3], [own[0], 3])
    cache.check_integrity()
    allocator.check_integrity()
    assert cache.num_pages == 1


def test_integrity_check_finds_a_page_that_was_released_under_the_cache() -> None:
    allocator, cache = cache_of(4)
    remember(allocator, cache, [1, 1])
    allocator.release([0], OWNER)
    with pytest.raises(IntegrityError, match=r"cache holds pages \[\], its tree has \[0\]"):
        cache.check_integrity()
