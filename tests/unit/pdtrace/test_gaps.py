"""Gaps of one stream as one short text: exact on the edges, and never too long for a ring."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.agent.buckets import DURATION_EDGES_S, duration_edges
from pdtrace.gaps import MAX_CHARS, GapTally, read_gap_counts
from pdtrace.ring.layout import MAX_STRING_BYTES

LENGTHS = st.lists(st.integers(0, 700 * 10**9), min_size=1, max_size=200)


def tally(lengths: Sequence[int], edges_s: Sequence[float] = DURATION_EDGES_S) -> GapTally:
    found = GapTally(edges_s)
    for length in lengths:
        found.add(length)
    return found


def test_text_says_how_many_by_length() -> None:
    found = tally([150_000_001, 200_000_000, 200_000_001, 1, 700 * 10**9])
    assert found.text() == "0-0.00001:1 0.15-0.2:2 0.2-0.3:1 605.5-:1"
    assert (found.count, found.longest_ns) == (5, 700 * 10**9)
    assert tally([]).text() is None


@given(LENGTHS)
def test_counts_are_exact_on_edges_above_what_was_put_together(lengths: list[int]) -> None:
    text = tally(lengths).text()
    assert text is not None
    assert len(text) <= MAX_CHARS < MAX_STRING_BYTES
    found = read_gap_counts(text)
    assert sum(one.count for one in found) == len(lengths)
    for one in found:
        upto = 10**18 if one.upto_ns is None else one.upto_ns
        inside = [length for length in lengths if one.over_ns < length <= upto]
        assert one.count == len(inside) + (lengths.count(0) if one.over_ns == 0 else 0)


def test_of_too_many_lengths_the_shortest_share_an_entry() -> None:
    text = tally([round(edge * 1e9) for edge in DURATION_EDGES_S]).text()
    assert text is not None
    found = read_gap_counts(text)
    assert found[0].over_ns == 0
    assert found[0].count > 1
    assert all(one.count == 1 for one in found[1:])


def test_limit_that_is_a_whole_number_is_an_edge_too() -> None:
    found = read_gap_counts(tally([10**9, 10**9 + 2_000], duration_edges([1.0])).text() or "")
    assert [one.count for one in found] == [1, 1]
    assert found[0].upto_ns == 1_000_001_000


@pytest.mark.parametrize("text", ["x", "1-2", "1-2:x", "2-1:3", "-1-2:3", "nan-2:1", "1-inf:2"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_gap_counts(text)
