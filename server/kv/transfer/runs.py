"""Page lists as runs of bytes: pages that follow each other on both sides move as one piece.

Owns the arithmetic; knows nothing of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

Run: TypeAlias = tuple[int, int, int]
"""Byte offset in the source pool, byte offset in the destination pool, number of bytes. A plain
tuple: one is made for every scattered page."""


def page_runs(
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    page_bytes: int,
    *,
    max_bytes: int | None = None,
) -> Iterator[Run]:
    """The longest runs that copy each source page to the destination page at the same place, in
    order; none longer than `max_bytes`, which may lie below a page's size."""
    limit = max_bytes if max_bytes is not None else page_bytes * max(1, len(source_pages))
    position = 0
    while position < len(source_pages):
        source, destination = source_pages[position], destination_pages[position]
        end = position + 1
        while (
            end < len(source_pages)
            and source_pages[end] == source + end - position
            and destination_pages[end] == destination + end - position
        ):
            end += 1
        num_bytes = (end - position) * page_bytes
        for offset in range(0, num_bytes, limit):
            yield (
                source * page_bytes + offset,
                destination * page_bytes + offset,
                min(limit, num_bytes - offset),
            )
        position = end
