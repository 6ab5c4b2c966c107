"""What the pages of a pool that are not free are for. Pure.

Owns the state in which a page counts when several owners share it; knows nothing of what a request
does. A page counts once, in the first state that one of its holders puts it in:

    held by                                               state
    a request in flight, whoever else                     used
    a request that is over but may still be copied        held back
    the prefix cache and nobody else                      cached: free when it is needed
    others, whether or not the cache holds it too         none

What is in no state is what nobody will give back. It is not counted here on purpose: it shows as
what the states lack to the whole pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from server.kv.radix import OWNER as CACHE

_CACHE_ALONE = frozenset((CACHE,))


class PageStates(NamedTuple):
    """Numbers of pages."""

    used: int
    cached: int
    held_back: int


def count_page_states(
    holders: Iterable[tuple[frozenset[str], int]],
    *,
    in_flight: Set[str],
    held_back: Set[str] = frozenset(),
) -> PageStates:
    """Pages by their state.

    holders     sets of owners, and how many pages just these hold (`PageAllocator`)
    in_flight   owner tags of requests in flight
    held_back   owner tags of requests that are over, whose pages a transfer may still touch
    """
    used = cached = kept = 0
    for owners, num_pages in holders:
        if not in_flight.isdisjoint(owners):
            used += num_pages
        elif not held_back.isdisjoint(owners):
            kept += num_pages
        elif owners == _CACHE_ALONE:
            cached += num_pages
    return PageStates(used=used, cached=cached, held_back=kept)
