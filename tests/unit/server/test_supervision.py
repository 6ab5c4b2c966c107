"""When a process is started again: every way through its life, without one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.supervision import (
    Life,
    Phase,
    RestartPolicy,
    became_ready,
    ended,
    is_due,
    started,
)

POLICY = RestartPolicy(
    first_pause_s=1.0, longest_pause_s=30.0, steady_s=60.0, max_failures=5, restart=True
)


def served(since_s: float = 0.0) -> Life:
    return became_ready(Life(since_s=since_s), since_s)


def test_the_first_end_is_followed_by_a_start_at_once() -> None:
    life = ended(served(), 100.0, POLICY)
    assert (life.phase, life.due_s) == (Phase.ENDED, 100.0)
    assert is_due(life, 100.0)
    life = started(life, 100.0)
    assert (life.phase, life.restarts, life.due_s) == (Phase.STARTING, 1, None)
    assert not is_due(life, 1e9)


def test_pauses_double_up_to_the_longest_while_ends_follow_each_other() -> None:
    life, now_s, pauses = served(), 0.0, list[float]()
    for _ in range(9):
        now_s += 1.0
        life = ended(life, now_s, POLICY)
        assert life.due_s is not None
        pauses.append(life.due_s - now_s)
        now_s = life.due_s
        assert not pauses[-1] or not is_due(life, now_s - 0.001)
        life = became_ready(started(life, now_s), now_s)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert life.restarts == 9


def test_a_process_that_served_for_long_is_started_at_once_again() -> None:
    life = ended(served(), 1.0, POLICY)
    life = became_ready(started(life, 1.0), 2.0)
    assert ended(life, 61.9, POLICY).due_s == pytest.approx(62.9)
    assert ended(life, 62.0, POLICY).due_s == 62.0


def test_a_process_that_was_told_to_stop_is_followed_at_once_each_time() -> None:
    life, now_s = served(), 0.0
    for _ in range(10):
        now_s += 1.0
        life = ended(life, now_s, POLICY, in_order=True)
        assert (life.due_s, life.ends) == (now_s, 0)
        life = became_ready(started(life, now_s), now_s)


def test_one_that_ends_in_order_before_it_served_has_failed() -> None:
    life = started(ended(served(), 0.0, POLICY), 0.0)
    life = ended(life, 1.0, POLICY, in_order=True)
    assert (life.due_s, life.failures) == (2.0, 1)


def test_a_long_start_is_not_a_steady_time() -> None:
    life = started(ended(served(), 0.0, POLICY), 0.0)
    assert ended(life, 500.0, POLICY).due_s == 501.0


def test_processes_that_never_became_ready_are_given_up_after_five() -> None:
    life, now_s = served(), 0.0
    for failures in range(5):
        life = ended(life, now_s, POLICY)
        assert (life.phase, life.failures) == (Phase.ENDED, failures)
        now_s = life.due_s or now_s
        life = started(life, now_s)
    life = ended(life, now_s, POLICY)
    assert (life.phase, life.failures, life.due_s) == (Phase.GIVEN_UP, 5, None)
    assert not is_due(life, 1e9)


def test_one_that_became_ready_begins_the_count_anew() -> None:
    life, now_s = served(), 0.0
    for _ in range(50):
        life = ended(life, now_s, POLICY)
        assert life.phase is Phase.ENDED
        now_s = life.due_s or now_s
        life = started(life, now_s)
        if life.restarts % 4 == 0:
            life = became_ready(life, now_s)
    assert life.restarts == 50


def test_without_a_limit_nothing_is_given_up() -> None:
    policy = RestartPolicy(max_failures=None)
    life, now_s = Life(since_s=0.0), 0.0
    for _ in range(100):
        life = ended(life, now_s, policy)
        assert life.due_s is not None and life.due_s - now_s <= 30.0
        now_s = life.due_s
        life = started(life, now_s)


def test_without_restarts_the_first_end_is_the_last() -> None:
    assert ended(served(), 5.0, RestartPolicy(restart=False)).phase is Phase.GIVEN_UP


@given(st.lists(st.tuples(st.sampled_from(["ready", "end", "look"]), st.floats(0, 1000))))
def test_any_history_keeps_to_the_policy(events: list[tuple[str, float]]) -> None:
    """A process is due only after it ended, and within the longest pause."""
    life, now_s = Life(since_s=0.0), 0.0
    for event, later_s in events:
        now_s += later_s
        if event == "ready" and life.phase is Phase.STARTING:
            life = became_ready(life, now_s)
        elif event == "end" and life.phase in {Phase.STARTING, Phase.READY}:
            life = ended(life, now_s, POLICY)
        elif event == "look" and is_due(life, now_s):
            life = started(life, now_s)
        assert (life.due_s is not None) == (life.phase is Phase.ENDED)
        assert life.due_s is None or life.due_s <= life.since_s + POLICY.longest_pause_s
        assert life.failures < 5 or life.phase is Phase.GIVEN_UP
