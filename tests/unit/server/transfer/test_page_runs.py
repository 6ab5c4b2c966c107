"""Coalescing of page lists against copying page by page."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.kv.transfer.runs import page_runs

PAGE_BYTES = 12


@st.composite
def page_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    pages = st.lists(st.integers(0, 9), unique=True, max_size=10)
    source, destination = draw(pages), draw(pages)
    if draw(st.booleans()):
        source, destination = sorted(source), sorted(destination)
    num_pages = min(len(source), len(destination))
    return source[:num_pages], destination[:num_pages]


@given(pair=page_pairs(), max_bytes=st.none() | st.integers(1, 60))
def test_runs_copy_the_same_bytes_as_pages_one_by_one(
    pair: tuple[list[int], list[int]], max_bytes: int | None
) -> None:
    source_pages, destination_pages = pair
    runs = list(page_runs(source_pages, destination_pages, PAGE_BYTES, max_bytes=max_bytes))
    moved = [
        (source + offset, destination + offset)
        for source, destination, num_bytes in runs
        for offset in range(num_bytes)
    ]
    expected = [
        (from_page * PAGE_BYTES + offset, to_page * PAGE_BYTES + offset)
        for from_page, to_page in zip(source_pages, destination_pages, strict=True)
        for offset in range(PAGE_BYTES)
    ]
    assert moved == expected
    if max_bytes is not None:
        assert all(num_bytes <= max_bytes for _, _, num_bytes in runs)
    else:
        for before, after in itertools.pairwise(runs):
            follows = [before[end] + before[2] == after[end] for end in (0, 1)]
            assert follows != [True, True], "two runs that follow each other are one"


def test_pages_that_follow_each_other_on_both_sides_are_one_run() -> None:
    assert list(page_runs([3, 4, 5, 9], [0, 1, 2, 3], 10)) == [(30, 0, 30), (90, 30, 10)]
