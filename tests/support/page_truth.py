"""What each page of a worker is for, the slow way: page by page, out of the lists of who holds it.

Owns the truth that the gauges of a scheduler are compared with; knows nothing of how they are
counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pdtrace.stages import Gauge
from server.colocated.worker import ColocatedWorker
from server.decode.ballast import OWNER as BALLAST
from server.decode.worker import DecodeWorker
from server.kv.radix import OWNER as CACHE
from server.prefill.worker import PrefillWorker
from server.request import DecodeState
from server.scheduler import Scheduler

STATES = (
    Gauge.KV_PAGES_FREE,
    Gauge.KV_PAGES_RESERVED,
    Gauge.KV_PAGES_USED,
    Gauge.KV_PAGES_CACHED,
    Gauge.HELD_PAGES,
)


def unaccounted(gauges: Mapping[Gauge, int]) -> int:
    """Pages of a pool that are in no state, as the alert has it; negative would be too many."""
    return gauges[Gauge.KV_PAGES_TOTAL] - sum(gauges.get(state, 0) for state in STATES)


def pages_of_legs(worker: Scheduler[Any]) -> dict[int, Gauge]:
    """The state of each page that requests in flight have in their tables."""
    states: dict[int, Gauge] = {}
    for leg in worker.legs:
        reserved = leg.state in (DecodeState.AWAITING_KV, DecodeState.LANDED)
        state = Gauge.KV_PAGES_RESERVED if reserved else Gauge.KV_PAGES_USED
        states |= dict.fromkeys(leg.table, state)
    return states


def true_states(worker: Scheduler[Any]) -> dict[Gauge, int]:
    """Number of pages in each state that a worker of this kind tells of."""
    states = pages_of_legs(worker)
    held_back: set[str] = set()
    expected: dict[Gauge, int] = {Gauge.KV_PAGES_USED: 0}
    if isinstance(worker, PrefillWorker | DecodeWorker):
        held_back |= worker.quarantine.owners
        expected[Gauge.HELD_PAGES] = 0
    if isinstance(worker, PrefillWorker | ColocatedWorker):
        expected[Gauge.KV_PAGES_CACHED] = 0
    if isinstance(worker, DecodeWorker):
        expected[Gauge.KV_PAGES_RESERVED] = 0
    by_owner = worker.allocator.pages_by_owner()
    holders: dict[int, set[str]] = {}
    for owner, pages in by_owner.items():
        for page in pages:
            holders.setdefault(page, set()).add(owner)
    for page, owners in holders.items():
        if page in states:
            continue
        if BALLAST in owners:
            states[page] = Gauge.KV_PAGES_USED
        elif owners & held_back:
            states[page] = Gauge.HELD_PAGES
        elif owners == {CACHE}:
            states[page] = Gauge.KV_PAGES_CACHED
    expected |= Counter(states.values())
    expected[Gauge.KV_PAGES_TOTAL] = worker.allocator.num_pages
    expected[Gauge.KV_PAGES_FREE] = worker.allocator.num_pages - len(holders)
    return expected


def check_pages(worker: Scheduler[Any], gauges: Mapping[Gauge, int]) -> None:
    """Raises AssertionError unless `gauges` tell the truth about the pages of `worker`."""
    told = {state: gauges[state] for state in (*STATES, Gauge.KV_PAGES_TOTAL) if state in gauges}
    assert told == true_states(worker)
    assert unaccounted(told) >= 0
