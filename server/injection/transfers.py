"""Faults of the transfer process.

Owns which of its parts is wrapped for which place, and the jobs that are frozen; how bytes move is
the wrapped transfer's, how they are damaged `server.injection.damage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from pdtrace.clock import Clock
from server.injection.fault import Fault, Place
from server.injection.injector import Injector
from server.injection.ports import FaultyInbox, FaultyOutbox, Sink, Source
from server.kv.pool import PoolDescriptor
from server.kv.transfer.base import KvTransfer, PageCopy, TransferEvent
from server.kv.transfer.jobs import JobTable
from server.wire.messages import AnyMessage, CopyJob, PoolRef

if TYPE_CHECKING:
    from server.kv.transfer.worker import TransferWorker

STAGE = "transfer"
"""The stage in which a transfer process holds requests."""


class FaultyTransfer:
    """`transfer` with faults in front of it: a `KvTransfer` itself."""

    def __init__(self, transfer: KvTransfer, injector: Injector) -> None:
        self._transfer = transfer
        self._injector = injector

    def register(self, ref: PoolRef, pool: PoolDescriptor) -> None:
        self._transfer.register(ref, pool)

    def submit(self, copy: PageCopy) -> None:
        self._injector.call(Place.COPY)
        self._transfer.submit(copy)

    def cancel(self, handoff_id: str) -> None:
        self._transfer.cancel(handoff_id)

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        return self._transfer.poll(self._injector.bound_s(timeout_s))

    def stop_accepting(self) -> None:
        self._transfer.stop_accepting()

    @property
    def num_incoming(self) -> int:
        return self._transfer.num_incoming

    @property
    def num_received(self) -> int:
        return self._transfer.num_received

    def wake(self) -> None:
        self._transfer.wake()

    def close(self) -> None:
        self._transfer.close()


def faulty_transfer(transfer: KvTransfer, injector: Injector | None) -> KvTransfer:
    """`transfer` with faults in front of it."""
    return transfer if injector is None else FaultyTransfer(transfer, injector)


def faulty_source(inbox: Source, injector: Injector | None, clock: Clock) -> Source:
    """`inbox` with faults behind it."""
    if injector is None:
        return inbox
    return FaultyInbox(inbox, injector, stamp_ns=clock.monotonic_ns)


def faulty_sink(outbox: Sink, injector: Injector | None) -> Sink:
    """`outbox` with faults behind it."""
    if injector is None:
        return outbox
    faulty = FaultyOutbox(outbox, injector)
    injector.watch(faulty)
    return faulty


def disturb(worker: TransferWorker, injector: Injector | None, faults: Iterable[Fault]) -> None:
    """Wrap the parts of `worker`, whose ports are faulty already, and arm `faults`."""
    if injector is None:
        return
    frozen = FrozenJobs(worker.jobs, injector)
    injector.watch(frozen)
    handle = injector.handling(worker.handle)

    def handle_freezable(message: AnyMessage, arrived_ns: int) -> None:
        handle(frozen.freeze(message) if isinstance(message, CopyJob) else message, arrived_ns)

    worker.step = injector.loop(worker.step)
    worker.handle = handle_freezable
    injector.arm(faults)


class FrozenJobs:
    """The last copy jobs of handoffs, where a fault freezes their stage: they look as if their
    request's own header held them."""

    next_due_ns: int | None = None
    """Nothing is due: the jobs hold themselves."""

    def __init__(self, jobs: JobTable, injector: Injector) -> None:
        self._jobs = jobs
        self._injector = injector
        self._handoffs: set[str] = set()
        self._cleared = False

    def freeze(self, message: CopyJob) -> CopyJob:
        """`message`, held if a fault says so."""
        context = message.context
        ms = self._injector.stage(STAGE, context.request_id) if message.last else 0
        if not ms:
            return message
        self._handoffs.add(context.handoff_id)
        ms += message.faults.get(STAGE, 0)
        return msgspec.structs.replace(message, faults={**message.faults, STAGE: ms})

    def turn(self) -> None:
        if not self._cleared:
            return
        self._cleared = False
        for handoff_id in self._handoffs:
            handoff = self._jobs.get(handoff_id)
            for job in () if handoff is None else handoff.jobs:
                job.held_until_ns = 0
        self._handoffs.clear()

    def clear(self) -> None:
        self._cleared = True
