"""Each page of a pool counts in one state, whoever shares it, and what leaks counts in none.

The truth is the plainest one: for each owner a list of the pages that it was given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.kv.page_states import PageStates, count_page_states
from server.kv.pages import PageAllocator
from server.kv.radix import OWNER, Match, RadixCache

PAGE = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
OUT_OF_USE = "out of use"


@dataclass
class Request:
    """A prompt with all of its pages: those of `match`, then `own`."""

    prompt: list[int]
    match: Match
    own: list[int] = field(default_factory=list[int])

    @property
    def pages(self) -> set[int]:
        return {*self.match.pages, *self.own}


class PageStatesMachine(RuleBasedStateMachine):
    """Requests that share prefixes begin, are cached, end, are held back, and are forgotten."""

    @initialize(num_pages=st.integers(4, 24))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, PAGE)
        self.number = 0
        self.in_flight: dict[str, Request] = {}
        self.held_back: dict[str, Request] = {}
        self.forgotten: dict[str, Request] = {}
        self.out_of_use: list[int] = []

    def pick(self, data: st.DataObject, among: dict[str, Request]) -> str:
        return data.draw(st.sampled_from(sorted(among)))

    @rule(prompt=PROMPTS)
    def begin(self, prompt: list[int]) -> None:
        """Lock the cached prefix, then free pages, then evicted ones: as prompts get theirs."""
        self.number += 1
        owner = f"h{self.number}"
        match = self.cache.match(prompt, len(prompt) - 1)
        self.cache.lock(match, owner)
        needed = -(-len(prompt) // PAGE) - len(match.pages)
        self.cache.evict(max(0, needed - self.allocator.num_free))
        own = self.allocator.try_allocate(needed, owner)
        if own is None:
            self.cache.unlock(match)
        else:
            self.in_flight[owner] = Request(prompt, match, own)

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight)
    def remember(self, data: st.DataObject) -> None:
        request = self.in_flight[self.pick(data, self.in_flight)]
        self.cache.insert(request.prompt, [*request.match.pages, *request.own])

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight)
    def finish(self, data: st.DataObject) -> None:
        owner = self.pick(data, self.in_flight)
        self.free(owner, self.in_flight.pop(owner))

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight)
    def hold_back(self, data: st.DataObject) -> None:
        owner = self.pick(data, self.in_flight)
        self.held_back[owner] = self.in_flight.pop(owner)

    @rule(data=st.data())
    @precondition(lambda self: self.held_back)
    def let_go(self, data: st.DataObject) -> None:
        owner = self.pick(data, self.held_back)
        self.free(owner, self.held_back.pop(owner))

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight)
    def forget(self, data: st.DataObject) -> None:
        """The bug: the request is gone, and nobody gave its pages back."""
        owner = self.pick(data, self.in_flight)
        self.forgotten[owner] = self.in_flight.pop(owner)

    @rule(num_pages=st.integers(1, 3))
    def shrink(self, num_pages: int) -> None:
        self.cache.evict(max(0, num_pages - self.allocator.num_free))
        self.out_of_use += self.allocator.try_allocate(num_pages, OUT_OF_USE) or []

    @rule(num_pages=st.integers(1, 4))
    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)

    def free(self, owner: str, request: Request) -> None:
        self.allocator.release(request.own, owner)
        self.cache.unlock(request.match)

    @invariant()
    def agrees_with_the_lists(self) -> None:
        used = {page for request in self.in_flight.values() for page in request.pages}
        held = {page for request in self.held_back.values() for page in request.pages} - used
        lost = {page for request in self.forgotten.values() for page in request.pages}
        lost = (lost | set(self.out_of_use)) - used - held
        cached = set(self.allocator.pages_by_owner().get(OWNER, [])) - used - held - lost
        states = count_page_states(
            self.allocator.count_by_holders(),
            in_flight=self.in_flight.keys(),
            held_back=self.held_back.keys(),
        )
        assert states == PageStates(len(used), len(cached), len(held))
        assert self.allocator.num_pages == self.allocator.num_free + sum(states) + len(lost)
        assert states.cached == self.cache.num_evictable, "all that is cached can be given up"

    @invariant()
    def is_whole(self) -> None:
        self.allocator.check_integrity()
        self.cache.check_integrity()

    def teardown(self) -> None:
        """What is left when all is over is exactly what was lost."""
        if not hasattr(self, "allocator"):
            return
        for among in (self.in_flight, self.held_back):
            for owner, request in among.items():
                self.free(owner, request)
        lost = {page for request in self.forgotten.values() for page in request.pages}
        self.cache.evict(self.allocator.num_pages)
        states = count_page_states(self.allocator.count_by_holders(), in_flight=set[str]())
        assert states == (0, 0, 0)
        assert self.allocator.num_used == len(lost | set(self.out_of_use))


PageStatesMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPageStates = PageStatesMachine.TestCase


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ({"a"}, (1, 0, 0)),
        ({"a", "b", OWNER}, (1, 0, 0)),
        ({"a", "held", OWNER}, (1, 0, 0)),
        ({"a", "stranger", OWNER}, (1, 0, 0)),
        ({"held"}, (0, 0, 1)),
        ({"held", OWNER}, (0, 0, 1)),
        ({"held", "stranger"}, (0, 0, 1)),
        ({OWNER}, (0, 1, 0)),
        ({"stranger"}, (0, 0, 0)),
        ({"stranger", OWNER}, (0, 0, 0)),
    ],
)
def test_a_page_counts_in_the_first_state_that_a_holder_puts_it_in(
    holders: set[str], expected: tuple[int, int, int]
) -> None:
    counted = count_page_states([(frozenset(holders), 1)], in_flight={"a", "b"}, held_back={"held"})
    assert counted == expected


@pytest.mark.parametrize("num_pages", [64, 4096])
def test_what_is_gone_through_grows_with_requests_and_not_with_pages(num_pages: int) -> None:
    """So that it may be told at every turn of a loop."""
    requests = 8
    allocator = PageAllocator(num_pages)
    cache = RadixCache(allocator, PAGE)
    shared = list(range(num_pages))  # half of the pool
    first = allocator.try_allocate(num_pages // 2, "h0") or []
    cache.insert(shared, first)
    for number in range(1, requests):
        match = cache.match(shared, len(shared))
        cache.lock(match, f"h{number}")
        assert allocator.try_allocate(num_pages // 32, f"h{number}")
    sets = [owners for owners, _ in allocator.count_by_holders()]
    assert len(sets) == requests  # what all share, and the own pages of each but the first
    assert Counter(len(owners) for owners in sets) == {requests + 1: 1, 1: requests - 1}
