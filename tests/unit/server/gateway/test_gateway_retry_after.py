"""How long refused clients are told to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.retry_after import (
    GUESS_S,
    MAX_S,
    MIN_S,
    WINDOW_S,
    DrainRate,
    retry_after_s,
)

PLACES = 8


@pytest.mark.parametrize(
    ("waiting", "per_s", "expected"),
    [
        (0, 0.0, MIN_S),  # nobody waits: the reason lies elsewhere
        (1, 0.0, GUESS_S),  # none has ended lately: that says nothing of the queue
        (PLACES, 0.0, GUESS_S),
        (PLACES + 1, 0.0, 2 * GUESS_S),
        (100 * PLACES, 0.0, MAX_S),
        (256, 0.1, MAX_S),
        (10, 4.0, 3),
        (8, 4.0, 2),
        (3, 4.0, MIN_S),
        (256, 1e6, MIN_S),
    ],
)
def test_it_is_the_time_that_the_queue_takes(waiting: int, per_s: float, expected: int) -> None:
    assert retry_after_s(waiting, per_s, PLACES) == expected


@given(waiting=st.integers(0, 10_000), per_s=st.floats(0, 1e6))
def test_it_is_bounded_and_grows_with_the_queue(waiting: int, per_s: float) -> None:
    seconds = retry_after_s(waiting, per_s, PLACES)
    assert MIN_S <= seconds <= MAX_S
    assert seconds <= retry_after_s(waiting + 1, per_s, PLACES)
    if per_s:
        assert seconds >= retry_after_s(waiting, per_s + 1, PLACES)


def test_rate_counts_what_came_free_lately() -> None:
    rate = DrainRate(100.0)
    assert rate.per_s(100.0) == 0
    for tenth in range(200):
        rate.freed(100.0 + tenth / 10)
    assert rate.per_s(120.0) == pytest.approx(10.0)
    assert rate.per_s(125.0) == pytest.approx(5.0)
    assert rate.per_s(120.0 + WINDOW_S + 1) == 0


def test_rate_of_a_young_gateway_is_over_its_life() -> None:
    rate = DrainRate(100.0)
    for _ in range(6):
        rate.freed(101.0)
    assert rate.per_s(100.5) == 6.0, "no less than a second"
    assert rate.per_s(102.0) == 3.0


def test_memory_is_bounded_however_long_it_runs() -> None:
    rate = DrainRate(0.0)
    for second in range(10_000):
        rate.freed(float(second))
    assert rate.per_s(10_000.0) == pytest.approx(1.0)
