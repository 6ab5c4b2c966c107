"""What only the shared-memory transfer can do wrong: slices, order, and mappings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.kv.pool import KvPool, PoolDescriptor
from server.kv.transfer import shm
from server.kv.transfer.base import Copied, Drained, Failed, Reason, TransferError
from server.kv.transfer.pools import MAX_POOLS, PoolTable
from server.wire.messages import PoolRef
from tests.support.kv_transfers import LAYOUT, NUM_PAGES, Ends, ShmHarness

PAGE = LAYOUT.page_bytes
ALL = list(range(NUM_PAGES))


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmHarness]:
    """Copies a page and a half per poll."""
    monkeypatch.setattr(shm, "STEP_BYTES", PAGE + PAGE // 2)
    harness = ShmHarness(tmp_path)
    yield harness
    harness.close()


def test_a_long_copy_takes_several_polls_and_arrives_whole(harness: ShmHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    Ends(harness).copy(source, ALL, destination, ALL)
    polls = 0
    events = harness.source.poll(0)
    while not events:
        polls += 1
        events = harness.source.poll(0)
    assert polls > 3
    assert isinstance(events[0], Copied)
    assert harness.memory(destination) == harness.memory(source)


def test_copies_run_in_order_of_submission(harness: ShmHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    ends.copy(source, ALL[:8], destination, ALL[:8], handoff_id="long")
    ends.copy(source, [9], destination, [9], handoff_id="short")
    assert [event.handoff_id for event in ends.until(2)] == ["long", "short"]


def test_cancel_in_the_middle_stops_the_copy_there(harness: ShmHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    before = bytes(harness.memory(destination))
    Ends(harness).copy(source, ALL, destination, ALL)
    assert harness.source.poll(0) == []
    harness.source.cancel("h-1")
    assert harness.source.poll(0) == [Drained(handoff_id="h-1")]
    copied = bytes(harness.memory(destination))
    assert copied != before, "the copy had begun"
    assert copied[-PAGE:] == before[-PAGE:], "and did not get to the end"
    for _ in range(20):
        assert harness.source.poll(0) == []
    assert harness.memory(destination) == copied


@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_worker_that_restarts_during_a_copy_fails_it(harness: ShmHarness, end: str) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    Ends(harness).copy(source, ALL, destination, ALL)
    assert harness.source.poll(0) == []
    fresh = harness.add_pool(end, "2")
    before = bytes(harness.memory(fresh))
    [event] = harness.source.poll(0)
    assert isinstance(event, Failed)
    assert (event.reason, event.settled) == (Reason.POOL_REPLACED, True)
    for _ in range(20):
        assert harness.source.poll(0) == []
    assert harness.memory(fresh) == before, "the pool of the restarted worker is untouched"


def test_a_worker_that_starts_again_does_not_share_memory_with_its_predecessor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pool"
    old = KvPool.create(path, owner="decode-0", layout=LAYOUT, num_pages=NUM_PAGES)
    mapped = KvPool.attach(old.descriptor)
    fresh = KvPool.create(path, owner="decode-0", layout=LAYOUT, num_pages=NUM_PAGES)
    mapped.memory[:PAGE] = b"\xff" * PAGE
    assert bytes(fresh.memory[:PAGE]) == bytes(PAGE)
    assert bytes(old.memory[:PAGE]) == b"\xff" * PAGE
    for pool in (old, mapped, fresh):
        pool.close()


@pytest.mark.parametrize("end", ["source", "destination"])
def test_the_pool_of_a_worker_that_is_gone_is_unmapped_for_those_that_come(
    harness: ShmHarness, end: str
) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    other = harness.add_pool("other")
    Ends(harness).copy(source, ALL, destination, ALL)
    assert harness.source.poll(0) == []
    gone = source if end == "source" else destination
    path = Path(harness.descriptor(gone).path)
    assert is_mapped(path)
    path.unlink()
    harness.register_again(other)  # as with each of its heartbeats
    [event] = harness.source.poll(0)
    assert isinstance(event, Failed)
    assert (event.reason, event.settled) == (Reason.POOL_REPLACED, True)
    Ends(harness).copy(source, ALL, destination, ALL, handoff_id="late")
    [event] = harness.source.poll(0)
    assert isinstance(event, Failed)
    assert event.reason is Reason.UNKNOWN_POOL
    assert is_mapped(path, count=1), "the test's own mapping is the last"


def is_mapped(path: Path, *, count: int = 2) -> bool:
    """Whether this process maps `path` that often, removed or not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{path}" in line for line in lines) == count


def test_a_copy_to_another_host_is_refused(harness: ShmHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    harness.address = "127.0.0.1:9"
    ends = Ends(harness)
    ends.copy(source, [0], destination, [0])
    event = ends.next_event()
    assert isinstance(event, Failed)
    assert event.reason is Reason.NO_ROUTE
    assert "127.0.0.1:9" in event.message


def descriptor_of(path: Path, num_pages: int = 1) -> PoolDescriptor:
    return PoolDescriptor(owner="w", path=str(path), num_pages=num_pages, layout=LAYOUT)


def test_a_pool_that_cannot_be_mapped_is_an_error_and_keeps_the_old_one(tmp_path: Path) -> None:
    table = PoolTable()
    path = tmp_path / "pool"
    path.write_bytes(bytes(PAGE))
    old = PoolRef(owner="w", incarnation="1")
    table.register(old, descriptor_of(path))
    (tmp_path / "link").symlink_to(path)
    for bad in (tmp_path / "missing", tmp_path / "link", tmp_path):
        with pytest.raises(TransferError, match="cannot be mapped"):
            table.register(PoolRef(owner="w", incarnation="2"), descriptor_of(bad))
    with pytest.raises(TransferError, match=r"has 128 bytes|has \d+ bytes"):
        table.register(PoolRef(owner="w", incarnation="2"), descriptor_of(path, num_pages=2))
    assert table.get(old).ref == old
    table.close()


def test_the_number_of_mapped_pools_is_bounded(tmp_path: Path) -> None:
    table = PoolTable()
    path = tmp_path / "pool"
    path.write_bytes(bytes(PAGE))
    for number in range(MAX_POOLS):
        table.register(PoolRef(owner=f"w-{number}", incarnation="1"), descriptor_of(path))
    with pytest.raises(TransferError, match="mapped already"):
        table.register(PoolRef(owner="one-more", incarnation="1"), descriptor_of(path))
    table.register(PoolRef(owner="w-0", incarnation="2"), descriptor_of(path))
    table.close()
