"""Requests that a heartbeat names: each until the gateway has answered one that named it."""

from __future__ import annotations

from server.taken import MAX_IDS, TakenRequests, TakenState


def test_request_is_named_until_a_beat_that_named_it_is_answered() -> None:
    taken = TakenRequests()
    taken.take("a")
    taken.telling(1, taken.state)
    taken.take("b")
    taken.telling(2, taken.state)
    assert taken.state == TakenState(0, 2, ("a", "b"))
    taken.heard(1)
    assert taken.state == TakenState(1, 2, ("b",))
    taken.take("c")
    taken.heard(2)
    assert taken.state == TakenState(2, 3, ("c",))


def test_late_and_repeated_answers_change_nothing() -> None:
    taken = TakenRequests()
    taken.take("a")
    for seq in (1, 2):
        taken.telling(seq, taken.state)
    taken.heard(2)
    taken.take("b")
    for seq in (1, 2, 7):  # 7 was never told
        taken.heard(seq)
    assert taken.state == TakenState(7, 2, ("b",))


def test_what_nobody_answers_is_bounded() -> None:
    taken = TakenRequests()
    for number in range(MAX_IDS + 10):
        taken.take(f"h{number}")
        taken.telling(number, taken.state)
    assert len(taken.state.ids) == MAX_IDS
    assert taken.state.ids[0] == "h10"
