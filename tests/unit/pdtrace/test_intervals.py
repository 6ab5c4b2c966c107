"""Painting gives each instant to the first interval that covers it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdtrace.analysis.intervals import close_gaps, paint

INTERVALS = st.lists(
    st.tuples(st.integers(-20, 60), st.integers(-20, 60)),
    max_size=12,
)


@given(INTERVALS, st.integers(-10, 20), st.integers(-10, 50))
def test_each_instant_belongs_to_the_first_interval_that_covers_it(
    intervals: list[tuple[int, int]], low: int, high: int
) -> None:
    painted = paint(intervals, low, high)
    owner_of = {at: owner for begin, end, owner in painted for at in range(begin, end)}
    assert sorted(owner_of) == list(range(low, high))
    for at, owner in owner_of.items():
        covering = [i for i, (begin, end) in enumerate(intervals) if begin <= at < end]
        assert owner == (covering[0] if covering else None)


@given(INTERVALS)
def test_neighbours_of_one_owner_are_merged(intervals: list[tuple[int, int]]) -> None:
    painted = paint(intervals, 0, 40)
    owners = [owner for _, _, owner in painted]
    assert all(one != other for one, other in pairwise(owners))


def test_small_gaps_go_to_the_interval_before_them() -> None:
    assert close_gaps([(2, 10), (12, 30)], 0, 33, 3) == [(0, 12), (12, 33)]


def test_wide_gaps_stay_open() -> None:
    assert close_gaps([(0, 10), (14, 30)], 0, 30, 3) == [(0, 10), (14, 30)]


def test_nothing_to_stretch_stays_nothing() -> None:
    assert close_gaps([], 0, 2, 3) == []
