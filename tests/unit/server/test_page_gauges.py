"""What the workers tell of their pages: each once, and what nobody will give back as lacking.

That the states are right at the end of every turn is looked at in every test with a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdtrace.stages import Gauge, Role
from server.errors import IntegrityError
from server.scheduler import Scheduler
from tests.support.page_truth import unaccounted
from tests.support.scheduler_bus import PAGE, Cluster

MakeCluster = Callable[..., Cluster]
PREFIX = list(range(1, 5 * PAGE + 1))
ASKING = 3


def gauges_of(cluster: Cluster, role: Role) -> Mapping[Gauge, int]:
    return cluster.rings.reader(role).gauges()


def with_prefix(number: int) -> list[int]:
    """A prompt of the prefix and a page and a half of its own."""
    return [*PREFIX, *range(100 + 10 * number, 100 + 10 * number + PAGE + PAGE // 2)]


def submit_sharing(cluster: Cluster) -> list[str]:
    """Requests that share the cached prefix, all computed and none over."""
    cluster.submit(PREFIX)
    cluster.settle()
    held = {"prefill.compute": 60_000}
    asked = [cluster.submit(with_prefix(number), faults=held) for number in range(ASKING)]
    cluster.run_for(200)
    return asked


@pytest.mark.parametrize("colocated", [False, True])
def test_a_prefix_that_requests_share_counts_once(
    make_cluster: MakeCluster, colocated: bool
) -> None:
    cluster = make_cluster(colocated=colocated)
    role = Role.WORKER if colocated else Role.PREFILL
    submit_sharing(cluster)
    worker = cluster.colocated if colocated else cluster.prefill
    legs = list(worker.legs)
    assert [leg.cached_tokens for leg in legs] == [len(PREFIX)] * ASKING
    gauges = gauges_of(cluster, role)
    own = sum(len(leg.own_pages) for leg in legs)
    assert gauges[Gauge.KV_PAGES_USED] == len(PREFIX) // PAGE + own
    assert gauges[Gauge.KV_PAGES_CACHED] == 0, "none could be given up"
    assert unaccounted(gauges) == 0
    cluster.settle()
    gauges = gauges_of(cluster, role)
    assert gauges[Gauge.KV_PAGES_USED] == unaccounted(gauges) == 0
    assert gauges[Gauge.KV_PAGES_CACHED] == worker.cache.num_pages == 5 + ASKING


def test_pages_held_back_count_as_used_while_a_request_shares_them(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    cluster.submit(PREFIX)
    cluster.settle()
    cluster.transfer.silent = True
    [first, second] = [cluster.submit(with_prefix(number)) for number in range(2)]
    cluster.run_for(200)
    cluster.cancel(first)
    cluster.run_for(11_000, turn_ms=50)  # its drain has been given up, the other still copies
    assert set(cluster.prefill.quarantine.owners) == {first}
    assert cluster.prefill.legs.get(second) is not None
    gauges = gauges_of(cluster, Role.PREFILL)
    assert (gauges[Gauge.KV_PAGES_USED], gauges[Gauge.HELD_PAGES]) == (5 + 2, 2)
    cluster.cancel(second)
    cluster.run_for(11_000, turn_ms=50)
    gauges = gauges_of(cluster, Role.PREFILL)
    assert (gauges[Gauge.KV_PAGES_USED], gauges[Gauge.HELD_PAGES]) == (0, 5 + 2 + 2)
    assert unaccounted(gauges) == 0
    cluster.transfer.silent = False
    cluster.run_for(11_000, turn_ms=50)
    gauges = gauges_of(cluster, Role.PREFILL)
    assert (gauges[Gauge.HELD_PAGES], gauges[Gauge.KV_PAGES_CACHED]) == (0, 5 + 2)


def forgets(worker: Scheduler[Any], role: Role, victim: str) -> None:
    """The bug: `worker` does not free what `victim` holds when it is over."""
    name = "_release" if role is Role.PREFILL else "free_pages"
    free: Callable[[Any], None] = getattr(worker, name)

    def free_others(leg: Any) -> None:
        if leg.handoff_id != victim:
            free(leg)

    setattr(worker, name, free_others)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.WORKER])
def test_pages_of_a_forgotten_request_are_unaccounted_to_the_page(
    tmp_path: Path, role: Role
) -> None:
    cluster = Cluster(tmp_path, colocated=role is Role.WORKER)
    [worker] = [w for name, w in cluster.workers.items() if name.startswith(role.value)]
    victim, *others = submit_sharing(cluster)
    forgets(worker, role, victim)
    holding = worker.legs[victim].table
    cluster.cancel(victim)
    cluster.run_for(200)
    assert worker.legs.get(victim) is None
    shared = 0 if role is Role.DECODE else len(PREFIX) // PAGE
    assert len(holding) > shared
    assert unaccounted(gauges_of(cluster, role)) == len(holding) - shared, "others share the prefix"
    for handoff_id in others:
        cluster.cancel(handoff_id)
    cluster.run_for(200)
    assert len(worker.legs) == 0
    assert unaccounted(gauges_of(cluster, role)) == len(holding)
    with pytest.raises(IntegrityError, match=f"held by '{victim}', which is over"):
        worker.check_integrity()
    cluster.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.WORKER])
def test_a_lock_that_nobody_takes_off_is_unaccounted_too(tmp_path: Path, role: Role) -> None:
    """Such pages can never be given up, although they are in the cache."""
    cluster = Cluster(tmp_path, colocated=role is Role.WORKER)
    worker = cluster.colocated if role is Role.WORKER else cluster.prefill
    cluster.submit(PREFIX)
    cluster.settle()
    assert unaccounted(gauges_of(cluster, role)) == 0
    match = worker.cache.match(PREFIX, len(PREFIX))
    worker.cache.lock(match, "h-of-old")
    cluster.step()
    gauges = gauges_of(cluster, role)
    assert (gauges[Gauge.KV_PAGES_CACHED], unaccounted(gauges)) == (0, len(PREFIX) // PAGE)
    with pytest.raises(IntegrityError, match="held by 'h-of-old', which is over"):
        worker.check_integrity()
    worker.cache.unlock(match)
    cluster.step()
    assert unaccounted(gauges_of(cluster, role)) == 0
    cluster.check()
    cluster.close()
