"""Faults of the scheduler processes: prefill, decode and colocated workers.

Owns which of a worker's parts is wrapped for which place.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Any

from server.injection.fault import Fault, Place
from server.injection.freezing import FrozenHolds
from server.injection.injector import Injector
from server.injection.ports import FaultyInbox, FaultyOutbox
from server.injection.shrinking import OWNER as OUT_OF_USE
from server.injection.shrinking import Shrunk
from server.kv.radix import RadixCache
from server.ports import Ports
from server.request import Leg
from server.scheduler import Scheduler


def faulty_ports(ports: Ports, injector: Injector | None) -> Ports:
    """`ports` with faults between the sockets and the worker."""
    if injector is None:
        return ports
    outbox = FaultyOutbox(ports.outbox, injector)
    injector.watch(outbox)
    inbox = FaultyInbox(ports.inbox, injector, stamp_ns=ports.clock)
    return replace(ports, inbox=inbox, outbox=outbox)


def disturb(worker: Scheduler[Any], injector: Injector | None, faults: Iterable[Fault]) -> None:
    """Wrap the parts of `worker`, whose ports are faulty already, and arm `faults`."""
    if injector is None:
        return
    engine = worker.engine
    worker.step = injector.loop(worker.step)
    worker.take_in = injector.handling(worker.take_in)
    engine.prefill = injector.around(Place.ENGINE, engine.prefill)
    engine.decode = injector.around(Place.ENGINE, engine.decode)
    _let_freeze(worker, injector)
    _let_shrink(worker, injector)
    injector.arm(faults)


def _let_freeze(worker: Scheduler[Any], injector: Injector) -> None:
    admit = worker.admit

    def admit_freezable(leg: Leg[Any]) -> bool:
        leg.holds = FrozenHolds(leg.holds, injector, leg.request_id)
        return admit(leg)

    worker.admit = admit_freezable


def _let_shrink(worker: Scheduler[Any], injector: Injector) -> None:
    cache: object = getattr(worker, "cache", None)
    evict = cache.evict if isinstance(cache, RadixCache) else _has_no_cache
    shrunk = Shrunk(worker.allocator, evict)
    check_owners = worker.check_owners

    def check_other_owners(others: Set[str]) -> None:
        check_owners({*others, OUT_OF_USE})

    worker.check_owners = check_other_owners
    injector.shrink = shrunk.take
    injector.watch(shrunk)


def _has_no_cache(_num_pages: int) -> None:
    pass
