"""Copies in shared memory that arrive short, altered or not at all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.kv.transfer import shm
from server.kv.transfer.base import Copied, Failed, Reason
from server.kv.transfer.memory_ops import Move, first_difference, is_equal, move_bytes
from server.kv.transfer.shm import ShmTransfer
from tests.support.kv_transfers import LAYOUT, Ends, ShmHarness

PAGE = LAYOUT.page_bytes
MakeEnds = Callable[..., Ends]


@pytest.fixture
def make_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEnds]:
    """A transfer whose pieces are half a page; `move` copies them."""
    monkeypatch.setattr(shm, "PIECE_BYTES", PAGE // 2)
    harness = ShmHarness(tmp_path)
    made: list[ShmTransfer] = []

    def make(move: Move, *, verify: bool = True) -> Ends:
        harness.source.close()
        harness.source = harness.destination = ShmTransfer(move=move, verify=verify)
        made.append(harness.source)
        return Ends(harness)

    yield make
    for transfer in made:
        transfer.close()
    harness.close()


def in_piece(number: int, what: Move) -> Move:
    """Copies, but does `what` in the place of piece `number`, counted from 1 over all copies."""
    count = 0

    def move(destination: int, source: int, num_bytes: int) -> int:
        nonlocal count
        count += 1
        return (what if count == number else move_bytes)(destination, source, num_bytes)

    return move


def alter(destination: int, source: int, num_bytes: int) -> int:
    """The last byte arrives with one bit flipped."""
    moved = move_bytes(destination, source, num_bytes)
    last = ctypes.c_ubyte.from_address(destination + num_bytes - 1)
    last.value ^= 1
    return moved


def half(destination: int, source: int, num_bytes: int) -> int:
    return move_bytes(destination, source, num_bytes // 2)


def lie(destination: int, source: int, num_bytes: int) -> int:
    """Copies half and says all."""
    move_bytes(destination, source, num_bytes // 2)
    return num_bytes


def fail(_destination: int, _source: int, _num_bytes: int) -> int:
    raise ValueError("scripted")


def copy_then_another(ends: Ends) -> Failed:
    """How a copy of three pages fails; the copy after it must not."""
    harness = ends.harness
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends.copy(source, [2, 4, 6], destination, [9, 7, 5])
    ends.copy(source, [1], destination, [0], handoff_id="h-2")
    failed, copied = ends.until(2)
    assert isinstance(failed, Failed)
    assert failed.settled
    assert isinstance(copied, Copied)
    assert copied.handoff_id == "h-2"
    ends.quiet(3)
    return failed


def test_one_altered_bit_is_found_and_its_place_named(make_ends: MakeEnds) -> None:
    failed = copy_then_another(make_ends(in_piece(4, alter)))
    assert (failed.reason, failed.message) == (
        Reason.CHECKSUM_MISMATCH,
        f"page 7 of destination differs from page 4 of source from byte {PAGE - 1} on",
    )


def test_bytes_that_did_not_arrive_though_all_were_reported_are_found(make_ends: MakeEnds) -> None:
    failed = copy_then_another(make_ends(in_piece(1, lie)))
    assert (failed.reason, failed.message) == (
        Reason.CHECKSUM_MISMATCH,
        f"page 9 of destination differs from page 2 of source from byte {PAGE // 4} on",
    )


@pytest.mark.parametrize("verify", [True, False])
def test_a_short_copy_is_found_by_its_length(make_ends: MakeEnds, verify: bool) -> None:
    # Without verification pieces are whole runs: here pages.
    number, size = (4, PAGE // 2) if verify else (2, PAGE)
    failed = copy_then_another(make_ends(in_piece(number, half), verify=verify))
    assert (failed.reason, failed.message) == (
        Reason.TRANSFER_INCOMPLETE,
        f"{size // 2} bytes arrived of a piece of {size}, after "
        f"{(number - 1) * size} of {3 * PAGE}",
    )


def test_without_verification_altered_bytes_pass(make_ends: MakeEnds) -> None:
    ends = make_ends(in_piece(1, alter), verify=False)
    source, destination = ends.harness.add_pool("source"), ends.harness.add_pool("destination")
    ends.copy(source, [0], destination, [0])
    assert isinstance(ends.next_event(), Copied)


@pytest.mark.case("XFER-07")
def test_what_a_copy_raises_ends_that_copy_and_no_other(make_ends: MakeEnds) -> None:
    failed = copy_then_another(make_ends(in_piece(3, fail)))
    assert (failed.reason, failed.error) == (Reason.INTERNAL, "ValueError")
    assert failed.message == "the transfer failed: ValueError: scripted"


@given(
    data=st.binary(min_size=1, max_size=300),
    others=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 255)), max_size=4),
)
def test_first_difference_is_where_the_first_bytes_differ(
    data: bytes, others: list[tuple[int, int]]
) -> None:
    changed = bytearray(data)
    for at, flip in others:
        changed[at % len(data)] ^= flip
    differing = [i for i, pair in enumerate(zip(data, changed, strict=True)) if pair[0] != pair[1]]
    one, other = (
        ctypes.create_string_buffer(bytes(value), len(value)) for value in (data, changed)
    )
    found = first_difference(ctypes.addressof(one), ctypes.addressof(other), len(data))
    assert found == (differing[0] if differing else None)
    assert is_equal(ctypes.addressof(one), ctypes.addressof(other), len(data)) == (not differing)
