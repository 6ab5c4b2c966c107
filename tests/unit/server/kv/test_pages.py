"""The page allocator against a model: a list of references per page."""
# pyright: reportPrivateUsage=false
# (the integrity check is tested by damaging what it guards)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.errors import IntegrityError
from server.kv.pages import PageAllocator, _Holding

OWNERS = ("", "h-1", "h-2", "radix")


class PageAllocatorMachine(RuleBasedStateMachine):
    """Random allocations, retains and releases; a Counter of (page, owner) is the truth."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.references: Counter[tuple[int, str]] = Counter()

    def held(self) -> set[int]:
        return {page for (page, _), count in self.references.items() if count}

    @rule(num_pages=st.integers(0, 14), owner=st.sampled_from(OWNERS))
    def allocate(self, num_pages: int, owner: str) -> None:
        free = sorted(set(range(self.allocator.num_pages)) - self.held())
        pages = self.allocator.try_allocate(num_pages, owner)
        if num_pages > len(free):
            assert pages is None
            return
        assert pages is not None
        assert pages == free[:num_pages]
        self.references.update((page, owner) for page in pages)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    @precondition(lambda self: self.held())
    def retain(self, data: st.DataObject, owner: str) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held())), unique=True))
        self.allocator.retain(pages, owner)
        self.references.update((page, owner) for page in pages)

    @rule(data=st.data())
    @precondition(lambda self: self.held())
    def release(self, data: st.DataObject) -> None:
        held = sorted(key for key, count in self.references.items() if count)
        _, owner = data.draw(st.sampled_from(held))
        mine = [page for page, other in held if other == owner]
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True))
        self.allocator.release(pages, owner)
        self.references.subtract((page, owner) for page in pages)

    @rule(page=st.integers(-1, 13), owner=st.sampled_from(OWNERS))
    def a_wrong_release_changes_nothing(self, page: int, owner: str) -> None:
        if self.references[page, owner]:
            return
        mine = [other for (other, tag), count in self.references.items() if count and tag == owner]
        with pytest.raises(IntegrityError, match=f"page {page} "):
            self.allocator.release([*mine, page], owner)

    @rule(page=st.integers(-1, 13), owner=st.sampled_from(OWNERS))
    def a_wrong_retain_changes_nothing(self, page: int, owner: str) -> None:
        if page in self.held():
            return
        with pytest.raises(IntegrityError, match=f"page {page} "):
            self.allocator.retain([*sorted(self.held()), page], owner)

    @invariant()
    def agrees_with_the_model(self) -> None:
        held = self.held()
        assert self.allocator.num_used == len(held)
        assert self.allocator.num_free == self.allocator.num_pages - len(held)
        owners: dict[int, set[str]] = {page: set() for page in held}
        for (page, owner), count in self.references.items():
            if count:
                owners[page].add(owner)
        for page in range(self.allocator.num_pages):
            expected = sum(self.references[page, owner] for owner in OWNERS)
            assert self.allocator.refcount(page) == expected
        for owner in OWNERS:
            alone = [page for page in held if owners[page] == {owner}]
            assert self.allocator.num_held_only_by(owner) == len(alone)
            assert all(self.allocator.held_only_by(page, owner) for page in alone)
        together = Counter(frozenset(owners[page]) for page in held)
        assert dict(self.allocator.count_by_holders()) == together
        by_owner = self.allocator.pages_by_owner()
        assert {page for pages in by_owner.values() for page in pages} == held
        self.allocator.check_integrity()


PageAllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestPageAllocator = PageAllocatorMachine.TestCase


def test_allocation_beyond_the_free_pages_returns_none_and_takes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.try_allocate(3, "h-1") == [0, 1, 2]
    assert allocator.try_allocate(2, "h-2") is None
    assert allocator.num_free == 1
    assert allocator.try_allocate(0, "h-2") == []


def test_double_release_is_an_error_that_names_page_and_holders() -> None:
    allocator = PageAllocator(4)
    pages = allocator.try_allocate(2, "h-1")
    assert pages is not None
    allocator.retain(pages, "radix")
    allocator.release(pages, "h-1")
    with pytest.raises(IntegrityError, match=r"page 0 by 'h-1'.*radix"):
        allocator.release(pages, "h-1")
    allocator.release(pages, "radix")
    with pytest.raises(IntegrityError, match="nobody"):
        allocator.release(pages, "radix")
    assert allocator.num_free == 4


def test_one_call_may_not_name_a_page_twice() -> None:
    allocator = PageAllocator(4)
    allocator.try_allocate(2)
    allocator.retain([0])
    with pytest.raises(IntegrityError, match=r"more than once: \[0\]"):
        allocator.release([0, 0])
    with pytest.raises(IntegrityError, match=r"more than once: \[1\]"):
        allocator.retain([1, 1])
    assert allocator.refcount(0) == 2


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages is 0"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="-1 pages"):
        PageAllocator(2).try_allocate(-1)


DAMAGE: list[tuple[Callable[[PageAllocator], object], str]] = [
    (lambda a: a._free.append(3), "twice in the free list"),
    (lambda a: a._free.append(0), "both free and held"),
    (lambda a: a._free.remove(3), r"neither free nor held: \[3\]"),
    (lambda a: a._free.append(9), r"outside 0 … 3: \[9\]"),
    (lambda a: a._held.update({1: _Holding(frozenset(), 1)}), "page 1 is held without a reference"),
    (lambda a: a._held.update({1: _Holding(frozenset(("h-1",)), 1)}), "page 1 is held without a"),
    (lambda a: setattr(a._held[0], "num_pages", 3), "pages by holders are .* 2}, counted .* 3}"),
    (lambda a: a._further.update({(1, "h-2"): 1}), "page 1 has 1 more references by 'h-2'"),
    (lambda a: a._further.update({(1, "h-1"): 0}), "page 1 has 0 more references by 'h-1'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_integrity_check_finds_and_names_damage(
    damage: Callable[[PageAllocator], object], message: str
) -> None:
    allocator = PageAllocator(4)
    allocator.try_allocate(2, "h-1")
    allocator.check_integrity()
    damage(allocator)
    with pytest.raises(IntegrityError, match=message):
        allocator.check_integrity()
