"""Faults of the scheduler processes: prefill, decode and colocated workers.

Owns which of a worker's parts is wrapped for which place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from server.injection.fault import Fault, Place
from server.injection.injector import Injector
from server.injection.ports import FaultyInbox, FaultyOutbox
from server.scheduler import Ports, Scheduler


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
    worker.handle = injector.handling(worker.handle)
    engine.prefill = injector.around(Place.ENGINE, engine.prefill)
    engine.decode = injector.around(Place.ENGINE, engine.decode)
    injector.arm(faults)
