"""What every transfer implementation must do: `server.kv.transfer.base` states the contract."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.kv.layout import KvLayout
from server.kv.transfer.base import Copied, Drained, Failed, Reason
from server.wire.messages import PoolRef
from tests.support.kv_transfers import HARNESSES, LAYOUT, NUM_PAGES, Ends, Harness

PAGE = LAYOUT.page_bytes


class Bench(NamedTuple):
    """A harness with both pools."""

    harness: Harness
    ends: Ends
    source: PoolRef
    destination: PoolRef

    def page(self, ref: PoolRef, page: int) -> bytes:
        return bytes(self.harness.memory(ref)[LAYOUT.page_range(page)])

    def image(self, ref: PoolRef) -> bytes:
        return bytes(self.harness.memory(ref))


@pytest.fixture(params=HARNESSES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    harness = HARNESSES[request.param](tmp_path)
    yield Bench(harness, Ends(harness), harness.add_pool("source"), harness.add_pool("destination"))
    harness.close()


def expect_failure(bench: Bench, reason: Reason, text: str = "") -> Failed:
    event = bench.ends.next_event()
    assert isinstance(event, Failed)
    assert event.reason is reason
    assert text in event.message
    return event


PAGES = st.permutations(range(NUM_PAGES))


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(source_pages=PAGES, destination_pages=PAGES, num_pages=st.integers(1, NUM_PAGES))
def test_pages_arrive_in_their_places_and_nothing_else_changes(
    bench: Bench, source_pages: list[int], destination_pages: list[int], num_pages: int
) -> None:
    source_pages, destination_pages = source_pages[:num_pages], destination_pages[:num_pages]
    source_before = bench.image(bench.source)
    expected = bytearray(bench.image(bench.destination))
    for from_page, to_page in zip(source_pages, destination_pages, strict=True):
        expected[LAYOUT.page_range(to_page)] = bench.page(bench.source, from_page)
    started_ns = time.monotonic_ns()
    bench.ends.copy(bench.source, source_pages, bench.destination, destination_pages)
    event = bench.ends.next_event()
    assert isinstance(event, Copied)
    assert (event.handoff_id, event.index) == ("h-1", 0)
    assert event.num_bytes == num_pages * PAGE
    assert started_ns <= event.finished_ns <= time.monotonic_ns()
    assert bench.image(bench.destination) == expected
    assert bench.image(bench.source) == source_before


def test_copies_of_one_handoff_follow_each_other(bench: Bench) -> None:
    for index in range(5):
        bench.ends.copy(bench.source, [index], bench.destination, [10 + index], index=index)
        event = bench.ends.next_event()
        assert isinstance(event, Copied)
        assert event.index == index
    for index in range(5):
        assert bench.page(bench.destination, 10 + index) == bench.page(bench.source, index)
    bench.ends.quiet()


def test_copies_of_several_handoffs_all_end_once(bench: Bench) -> None:
    for number in range(4):
        bench.ends.copy(
            bench.source, [number], bench.destination, [number + 8], handoff_id=f"h-{number}"
        )
    events = bench.ends.until(4)
    assert {event.handoff_id for event in events} == {"h-0", "h-1", "h-2", "h-3"}
    assert all(isinstance(event, Copied) for event in events)
    bench.ends.quiet()


def test_a_second_unfinished_copy_of_a_handoff_is_refused(bench: Bench) -> None:
    bench.ends.copy(bench.source, [0], bench.destination, [0])
    bench.ends.copy(bench.source, [1], bench.destination, [1], index=1)
    events = bench.ends.until(2)
    assert {type(event) for event in events} == {Copied, Failed}
    failed = next(event for event in events if isinstance(event, Failed))
    assert (failed.index, failed.reason) == (1, Reason.INTERNAL)


@pytest.mark.parametrize("end", ["source", "destination"])
def test_an_unknown_pool_fails_the_copy_and_is_named(bench: Bench, end: str) -> None:
    stranger = PoolRef(owner="stranger", incarnation="1")
    before = bench.image(bench.destination)
    pair = (stranger, bench.destination) if end == "source" else (bench.source, stranger)
    bench.ends.copy(pair[0], [0], pair[1], [0])
    assert expect_failure(bench, Reason.UNKNOWN_POOL, "stranger").settled
    assert bench.image(bench.destination) == before


@pytest.mark.parametrize("end", ["source", "destination"])
def test_another_incarnation_than_the_registered_one_fails(bench: Bench, end: str) -> None:
    stale = PoolRef(owner=end, incarnation="0")
    pair = (stale, bench.destination) if end == "source" else (bench.source, stale)
    bench.ends.copy(pair[0], [0], pair[1], [0])
    assert expect_failure(bench, Reason.UNKNOWN_POOL, "incarnation").settled


@pytest.mark.parametrize(
    ("source_pages", "destination_pages"),
    [
        ([], []),
        ([0, 1], [0]),
        ([0], [0, 1]),
        ([NUM_PAGES], [0]),
        ([0], [NUM_PAGES]),
        ([-1], [0]),
        ([0], [-1]),
        ([0, 1], [3, 3]),
        ([3, 3], [0, 1]),
        ([0], [2**40]),
    ],
)
def test_bad_page_lists_fail_and_write_nothing(
    bench: Bench, source_pages: list[int], destination_pages: list[int]
) -> None:
    before = bench.image(bench.destination)
    bench.ends.copy(bench.source, source_pages, bench.destination, destination_pages)
    assert expect_failure(bench, Reason.BAD_PAGES).settled
    assert bench.image(bench.destination) == before
    bench.ends.copy(bench.source, [1], bench.destination, [1], index=1)
    assert isinstance(bench.ends.next_event(), Copied), "the transfer works on"


def test_pools_of_different_layouts_do_not_exchange_pages(bench: Bench) -> None:
    other = KvLayout(num_layers=1, num_kv_heads=2, head_dim=4, page_size=4, dtype="float32")
    assert other.page_bytes == LAYOUT.page_bytes, "sizes alone would not tell"
    ref = bench.harness.add_pool("other", layout=other, host="destination")
    before = bench.image(ref)
    bench.ends.copy(bench.source, [0], ref, [0])
    assert expect_failure(bench, Reason.LAYOUT_MISMATCH).settled
    assert bench.image(ref) == before


def test_registering_the_same_pool_again_does_not_disturb_a_copy(bench: Bench) -> None:
    before = bench.image(bench.source)
    bench.ends.copy(bench.source, [0], bench.destination, [1])
    bench.harness.register_again(bench.source)
    bench.harness.register_again(bench.destination)
    assert isinstance(bench.ends.next_event(), Copied)
    assert bench.image(bench.source) == before
    assert bench.page(bench.destination, 1) == before[LAYOUT.page_range(0)]


@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_restarted_worker_replaces_its_pool(bench: Bench, end: str) -> None:
    old = bench.source if end == "source" else bench.destination
    fresh = bench.harness.add_pool(end, "2")
    old_pair = (old, bench.destination) if end == "source" else (bench.source, old)
    new_pair = (fresh, bench.destination) if end == "source" else (bench.source, fresh)
    bench.ends.copy(*_pages(old_pair), handoff_id="h-old")
    expect_failure(bench, Reason.UNKNOWN_POOL, "incarnation")
    bench.ends.copy(*_pages(new_pair), handoff_id="h-new")
    assert isinstance(bench.ends.next_event(), Copied)
    assert bench.page(new_pair[1], 2) == bench.page(new_pair[0], 1)


def _pages(pair: tuple[PoolRef, PoolRef]) -> tuple[PoolRef, list[int], PoolRef, list[int]]:
    return pair[0], [1], pair[1], [2]


@pytest.mark.parametrize("end", ["source", "destination"])
def test_cancelling_an_unknown_handoff_drains_at_once(bench: Bench, end: str) -> None:
    transfer = bench.harness.source if end == "source" else bench.harness.destination
    transfer.cancel("h-9")
    assert transfer.poll(1.0) == [Drained(handoff_id="h-9")]


def test_a_drained_source_is_read_no_more(bench: Bench) -> None:
    before = bench.image(bench.destination)
    bench.ends.copy(bench.source, [0, 1, 2], bench.destination, [3, 4, 5])
    bench.harness.source.cancel("h-1")
    assert bench.ends.next_event() == Drained(handoff_id="h-1")
    bench.harness.memory(bench.source)[:] = bytes(NUM_PAGES * PAGE)
    bench.ends.quiet()
    for page in (3, 4, 5):
        assert bench.page(bench.destination, page) == before[LAYOUT.page_range(page)]


def test_a_drained_destination_is_written_no_more(bench: Bench) -> None:
    before = bench.image(bench.destination)
    bench.ends.copy(bench.source, [0, 1, 2], bench.destination, [3, 4, 5])
    bench.harness.destination.cancel("h-1")
    assert bench.harness.destination.poll(1.0)[-1] == Drained(handoff_id="h-1")
    bench.harness.source.poll(0.05)
    for _ in range(20):
        bench.harness.source.poll(0.002)
        bench.harness.destination.poll(0.0)
    assert bench.image(bench.destination) == before


@pytest.mark.parametrize("end", ["source", "destination"])
def test_copies_of_a_cancelled_handoff_are_refused(bench: Bench, end: str) -> None:
    transfer = bench.harness.source if end == "source" else bench.harness.destination
    transfer.cancel("h-1")
    assert transfer.poll(1.0) == [Drained(handoff_id="h-1")]
    before = bench.image(bench.destination)
    bench.ends.copy(bench.source, [0], bench.destination, [0])
    assert expect_failure(bench, Reason.CANCELLED, "h-1").settled
    assert bench.image(bench.destination) == before
    bench.ends.copy(bench.source, [0], bench.destination, [0], handoff_id="h-2")
    assert isinstance(bench.ends.next_event(), Copied), "others are not affected"


def test_cancelling_a_finished_handoff_drains_and_leaves_its_bytes(bench: Bench) -> None:
    bench.ends.copy(bench.source, [0], bench.destination, [0])
    assert isinstance(bench.ends.next_event(), Copied)
    bench.harness.source.cancel("h-1")
    assert bench.ends.next_event() == Drained(handoff_id="h-1")
    assert bench.page(bench.destination, 0) == bench.page(bench.source, 0)


def test_poll_waits_no_longer_than_asked_when_nothing_happens(bench: Bench) -> None:
    start = time.monotonic()
    assert bench.harness.source.poll(0.05) == []
    assert 0.04 < time.monotonic() - start < 20
    start = time.monotonic()
    assert bench.harness.source.poll(0.0) == []
    assert time.monotonic() - start < 20


def test_wake_ends_a_waiting_poll_from_another_thread(bench: Bench) -> None:
    timer = threading.Timer(0.05, bench.harness.source.wake)
    timer.start()
    start = time.monotonic()
    assert bench.harness.source.poll(30.0) == []
    assert time.monotonic() - start < 20
    timer.join()
    bench.harness.source.wake()
    start = time.monotonic()
    assert bench.harness.source.poll(30.0) == [], "a wake before the wait is not lost"
    assert time.monotonic() - start < 20


def test_close_is_idempotent_and_ends_a_copy_under_way(bench: Bench) -> None:
    bench.ends.copy(bench.source, [0], bench.destination, [0])
    bench.harness.source.close()
    bench.harness.source.close()
