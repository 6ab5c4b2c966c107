"""Copies that go wrong on purpose, in every transfer, and transfers that raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdtrace.clock import SYSTEM_CLOCK
from server.injection.damage import FaultyShmTransfer, FaultyTcpTransfer
from server.injection.fault import Corrupt, Damage, Place, Raise
from server.injection.injector import Injector
from server.kv.transfer.base import Copied, Drained, Failed, Reason
from server.kv.transfer.memory import MemoryTransfer
from server.wire.messages import Peer, PoolRef
from tests.support.injection import scripted
from tests.support.kv_transfers import SECRET, Ends, Harness, MemoryHarness, ShmHarness, TcpHarness

MakeEnds = Callable[[str], tuple[Ends, Injector]]


def make_injector() -> Injector:
    me = Peer(instance="transfer-0", endpoint="", incarnation="1")
    return Injector(me, role="transfer")


def tcp(injector: Injector) -> FaultyTcpTransfer:
    return FaultyTcpTransfer(
        "127.0.0.1:0", secret=SECRET, copy_timeout_s=30.0, clock=SYSTEM_CLOCK, injector=injector
    )


def faulty(name: str, directory: Path, injector: Injector) -> Harness:
    """The harness `name` over transfers with faults; over TCP those of the source are told."""
    if name == "memory":
        memory = MemoryHarness(directory)
        assert isinstance(memory.source, MemoryTransfer)
        memory.source.script = scripted(injector)
        return memory
    if name == "shm":
        shm = ShmHarness(directory)
        shm.close()
        shm.source = FaultyShmTransfer(verify=True, clock=SYSTEM_CLOCK, injector=injector)
        shm.destination = shm.source
        return shm
    wire = TcpHarness(directory)
    wire.sender.close()
    wire.source = tcp(injector)
    return wire


@pytest.fixture
def make_ends(tmp_path: Path) -> Iterator[MakeEnds]:
    made: list[Harness] = []

    def make(name: str) -> tuple[Ends, Injector]:
        injector = make_injector()
        made.append(faulty(name, tmp_path, injector))
        return Ends(made[-1]), injector

    yield make
    for harness in made:
        harness.close()


def pools(ends: Ends) -> tuple[PoolRef, PoolRef]:
    return ends.harness.add_pool("source"), ends.harness.add_pool("destination")


TRANSFERS = ("shm", "tcp", "memory")


@pytest.mark.parametrize("name", TRANSFERS)
def test_without_faults_copies_are_whole(make_ends: MakeEnds, name: str) -> None:
    ends, injector = make_ends(name)
    source, destination = pools(ends)
    ends.copy(source, range(16), destination, range(16))
    assert isinstance(ends.next_event(), Copied)
    assert ends.harness.memory(destination) == ends.harness.memory(source)
    assert not injector.injected


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("shm", Damage.SHORT, Reason.TRANSFER_INCOMPLETE),
        ("shm", Damage.ALTERED, Reason.CHECKSUM_MISMATCH),
        ("tcp", Damage.SHORT, Reason.PEER_LOST),
        ("tcp", Damage.ALTERED, Reason.CHECKSUM_MISMATCH),
        ("memory", Damage.ALTERED, Reason.CHECKSUM_MISMATCH),
    ],
)
def test_the_nth_copy_is_damaged_found_and_told_and_the_others_are_whole(
    make_ends: MakeEnds, name: str, damage: Damage, reason: Reason
) -> None:
    ends, injector = make_ends(name)
    source, destination = pools(ends)
    injector.arm([Corrupt(copy=damage, nth=2)])
    for number in range(3):
        memory = ends.harness.memory(destination)
        memory[:] = bytes(byte ^ 0xFF for byte in ends.harness.memory(source))
        ends.copy(source, range(16), destination, range(16), handoff_id=f"h-{number}")
        event = ends.next_event()
        assert event.handoff_id == f"h-{number}"
        same = ends.harness.memory(destination) == ends.harness.memory(source)
        if number == 1:
            assert isinstance(event, Failed)
            assert event.reason is reason, event.message
            assert not same
        else:
            assert isinstance(event, Copied)
            assert same
    assert injector.injected == {f"corrupt.{damage}": 1}


def test_a_scripted_copy_that_is_short_says_how_much_arrived(make_ends: MakeEnds) -> None:
    ends, injector = make_ends("memory")
    source, destination = pools(ends)
    injector.arm([Corrupt(copy=Damage.SHORT)])
    ends.copy(source, [0, 1], destination, [0, 1])
    short = ends.next_event()
    ends.copy(source, [0, 1], destination, [0, 1], handoff_id="h-2")
    whole = ends.next_event()
    assert isinstance(short, Copied)
    assert isinstance(whole, Copied)
    assert short.num_bytes == whole.num_bytes // 2


@pytest.mark.parametrize("name", TRANSFERS)
def test_a_copy_that_never_ends_is_in_nobody_s_way_and_can_be_cancelled(
    make_ends: MakeEnds, name: str
) -> None:
    ends, injector = make_ends(name)
    source, destination = pools(ends)
    injector.arm([Corrupt(copy=Damage.NEVER)])
    before = bytes(ends.harness.memory(destination))
    ends.copy(source, [0], destination, [0], handoff_id="never")
    ends.quiet()
    assert bytes(ends.harness.memory(destination)) == before
    ends.copy(source, [1], destination, [1], handoff_id="other")
    assert ends.next_event().handoff_id == "other"
    ends.harness.source.cancel("never")
    assert ends.next_event() == Drained(handoff_id="never")
    ends.quiet()


@pytest.mark.parametrize("place", [Place.SENDER, Place.RECEIVER])
def test_an_end_of_a_tcp_transfer_that_raises_fails_the_copy_at_hand_and_no_other(
    tmp_path: Path, place: Place
) -> None:
    injectors = {Place.SENDER: make_injector(), Place.RECEIVER: make_injector()}
    harness = TcpHarness(tmp_path)
    harness.close()
    harness.source, harness.destination = (tcp(injector) for injector in injectors.values())
    assert isinstance(harness.destination, FaultyTcpTransfer)
    harness.address = harness.destination.address
    try:
        ends = Ends(harness)
        source, destination = pools(ends)
        ends.copy(source, [0], destination, [0], handoff_id="before")
        assert isinstance(ends.next_event(), Copied)
        injectors[place].arm([Raise(place=place)])
        ends.copy(source, [1], destination, [1], handoff_id="hit")
        event = ends.next_event()
        assert isinstance(event, Failed)
        assert event.reason is (Reason.INTERNAL if place is Place.SENDER else Reason.PEER_LOST)
        assert injectors[place].injected == {f"raise.{place}": 1}
        ends.copy(source, [2], destination, [2], handoff_id="after")
        assert isinstance(ends.next_event(), Copied)
    finally:
        harness.close()
