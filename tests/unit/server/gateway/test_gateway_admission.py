"""The gateway's queue: places, order, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import IntegrityError, Overloaded
from server.gateway.admission import QUEUE_FULL, Admission


def unexpected() -> None:
    raise AssertionError("admitted at once, and then told so")


def test_places_are_taken_then_waited_for_then_refused() -> None:
    admission = Admission(max_concurrency=1, max_queue=1)
    told: list[str] = []
    assert admission.enter("a", "req-a", unexpected) is None
    place = admission.enter("b", "req-b", lambda: told.append("b"))
    assert place is not None
    assert (place.position, place.limit, place.blockers) == (0, 1, ("req-a",))
    with pytest.raises(Overloaded) as refusal:
        admission.enter("c", "req-c", unexpected)
    assert (refusal.value.http_status, refusal.value.code) == (429, "queue_full")
    assert told == []
    admission.release("a")
    assert told == ["b"]
    assert (admission.in_flight, admission.waiting) == (1, 0)


def test_room_is_kept_for_who_approaches_and_nobody_beyond_it_begins() -> None:
    admission = Admission(max_concurrency=1, max_queue=1)
    with admission.approaching():
        with (
            admission.approaching(),
            pytest.raises(Overloaded) as refusal,
            admission.approaching(),
        ):
            raise AssertionError("let in")
        assert (refusal.value.http_status, refusal.value.code) == (429, QUEUE_FULL)
        with admission.approaching():
            pass
    assert admission.enter("a", "a", unexpected) is None
    with admission.approaching():
        pass
    assert admission.enter("b", "b", lambda: None) is not None
    with pytest.raises(Overloaded), admission.approaching():
        raise AssertionError("let in")
    admission.release("b")
    with admission.approaching():
        pass


def test_leaving_the_queue_tells_nobody() -> None:
    admission = Admission(max_concurrency=1, max_queue=2)
    told: list[str] = []
    admission.enter("a", "a", unexpected)
    admission.enter("b", "b", unexpected)
    admission.enter("c", "c", lambda: told.append("c"))
    admission.release("b")
    admission.release("b")
    admission.release("unknown")
    assert told == []
    admission.release("a")
    assert told == ["c"]


def test_entering_twice_is_a_bug() -> None:
    admission = Admission(max_concurrency=2, max_queue=0)
    admission.enter("a", "a", unexpected)
    with pytest.raises(IntegrityError):
        admission.enter("a", "a", unexpected)


@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
)
def test_first_come_first_served_whatever_happens(
    limit: int, queue: int, steps: list[tuple[bool, int]]
) -> None:
    admission = Admission(max_concurrency=limit, max_queue=queue)
    inside: set[str] = set()
    line: list[str] = []

    def admitted(key: str) -> None:
        assert line.pop(0) == key
        inside.add(key)

    for enters, number in steps:
        key = str(number)
        if enters and key not in inside and key not in line:
            try:
                place = admission.enter(key, key, lambda key=key: admitted(key))
            except Overloaded:
                assert len(inside) == limit
                assert len(line) == queue
            else:
                if place is None:
                    inside.add(key)
                else:
                    assert place.position == len(line)
                    line.append(key)
        elif not enters:
            inside.discard(key)
            if key in line:
                line.remove(key)
            admission.release(key)
        admission.check_integrity()
        assert (admission.in_flight, admission.waiting) == (len(inside), len(line))
