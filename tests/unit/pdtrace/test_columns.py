"""Columns hold any whole numbers; samples in them are a mapping like any other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pdtrace.analysis.columns import Column, Samples

WHOLE = st.integers(-(2**65), 2**65) | st.integers(0, 100)


@given(st.lists(WHOLE))
def test_column_keeps_what_it_is_given(numbers: Sequence[int]) -> None:
    column = Column()
    for number in numbers:
        column.append(number)
    assert list(column.values) == list(numbers)
    assert list(column.ordered()) == sorted(numbers)


def test_numbers_take_eight_bytes_each_while_they_fit() -> None:
    column = Column()
    for number in (1, 2**62, -5):
        column.append(number)
    assert isinstance(column.values, array)
    assert column.values.itemsize == 8
    assert isinstance(column.ordered(), array)
    column.append(2**63)
    assert list(column.values) == [1, 2**62, -5, 2**63]


KEYS = st.integers(0, 7)
PAIRS = st.tuples(st.integers(0, 2**64), st.integers(0, 2**64))


@given(st.lists(st.tuples(st.booleans(), KEYS, PAIRS | st.none()), max_size=40))
def test_samples_are_a_mapping(
    steps: Sequence[tuple[bool, int, tuple[int, int] | None]],
) -> None:
    """Two share their keys: what one holds, the other does not."""
    rows: dict[int, int] = {}
    both = Samples(rows), Samples(rows)
    expected: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
    for which, key, pair in steps:
        if pair is not None:
            both[which][key] = pair
            expected[which][key] = pair
        else:
            assert both[which].pop(key, None) == expected[which].pop(key, None)
        for samples, plain in zip(both, expected, strict=True):
            assert dict(samples) == plain
            assert len(samples) == len(plain)
            assert sorted(samples.values()) == sorted(plain.values())
            assert (key in samples) is (key in plain)
            assert samples.get(key) == plain.get(key)
