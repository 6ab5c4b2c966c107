"""Messages that are lost, late, doubled or passed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.injection.fault import Delay, Drop, MessageFault, Reorder, Repeat
from server.injection.lane import Lane

MS = 1_000_000
DROP = Drop(message="Handoff")
REPEAT = Repeat(message="Handoff")
REORDER = Reorder(message="Handoff", ms=50)


def test_what_no_fault_hits_goes_on_at_once() -> None:
    lane: Lane[str] = Lane()
    assert lane.route("a", "x", None, 0) == ["a"]
    assert lane.next_due_ns is None


def test_a_dropped_item_is_gone() -> None:
    lane: Lane[str] = Lane()
    assert lane.route("a", "x", DROP, 0) == []
    assert lane.num_held == 0


def test_a_late_item_lets_others_pass_until_its_time() -> None:
    lane: Lane[str] = Lane()
    assert lane.route("late", "x", Delay(message="Handoff", ms=10), 5 * MS) == []
    assert lane.route("b", "x", None, 6 * MS) == ["b"]
    assert lane.next_due_ns == 15 * MS
    assert lane.release(15 * MS - 1) == []
    assert lane.release(15 * MS) == ["late"]
    assert lane.num_held == 0


def test_a_repeated_item_comes_twice_at_once_or_again_later() -> None:
    lane: Lane[str] = Lane()
    assert lane.route("a", "x", REPEAT, 0) == ["a", "a"]
    assert lane.route("b", "x", Repeat(message="Handoff", ms=7), 0) == ["b"]
    assert lane.release(7 * MS) == ["b"]


def test_a_reordered_item_comes_behind_the_next_one_of_its_key() -> None:
    lane: Lane[str] = Lane()
    assert lane.route("a", "x", REORDER, 0) == []
    assert lane.route("other", "y", None, 0) == ["other"]
    assert lane.route("b", "x", None, 0) == ["b", "a"]
    assert lane.route("c", "x", None, 0) == ["c"]


def test_a_reordered_item_that_nobody_follows_comes_at_its_time() -> None:
    lane: Lane[str] = Lane()
    lane.route("a", "x", REORDER, 0)
    assert lane.release(49 * MS) == []
    assert lane.release(50 * MS) == ["a"]


def test_late_items_come_in_the_order_of_their_instants() -> None:
    lane: Lane[str] = Lane()
    for item, ms in (("a", 30), ("b", 10), ("c", 20)):
        lane.route(item, "x", Delay(message="Handoff", ms=ms), 0)
    assert lane.release(30 * MS) == ["b", "c", "a"]


def test_what_is_held_can_be_let_go() -> None:
    lane: Lane[str] = Lane()
    lane.route("a", "x", Delay(message="Handoff", ms=10_000), MS)
    lane.route("b", "x", REORDER, MS)
    lane.release_all()
    assert lane.release(MS) == ["a", "b"]


FAULTS = st.one_of(
    st.none(),
    st.just(DROP),
    st.builds(Delay, message=st.just("Handoff"), ms=st.integers(0, 30)),
    st.builds(Repeat, message=st.just("Handoff"), ms=st.integers(0, 30)),
    st.builds(Reorder, message=st.just("Handoff"), ms=st.integers(0, 30)),
)


@given(st.lists(st.tuples(FAULTS, st.sampled_from("xy"), st.integers(0, 9)), max_size=30))
def test_every_item_comes_as_often_as_its_fault_says(
    way: list[tuple[MessageFault | None, str, int]],
) -> None:
    lane: Lane[int] = Lane()
    came: Counter[int] = Counter()
    now_ns = 0
    for number, (fault, key, wait_ms) in enumerate(way):
        came.update(lane.route(number, key, fault, now_ns))
        now_ns += wait_ms * MS
        came.update(lane.release(now_ns))
    came.update(lane.release(now_ns + 30 * MS))
    assert lane.num_held == 0
    for number, (fault, _, _) in enumerate(way):
        expected = 0 if isinstance(fault, Drop) else 2 if isinstance(fault, Repeat) else 1
        assert came[number] == expected
