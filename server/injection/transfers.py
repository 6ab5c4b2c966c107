"""Faults of the transfer process.

Owns which of its parts is wrapped for which place; how bytes move is the wrapped transfer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdtrace.clock import Clock
from server.injection.fault import Fault, Place
from server.injection.injector import Injector
from server.injection.ports import FaultyInbox, FaultyOutbox, Sink, Source
from server.kv.pool import PoolDescriptor
from server.kv.transfer.base import KvTransfer, PageCopy, TransferEvent
from server.kv.transfer.tcp import TcpTransfer
from server.kv.transfer.tcp_receiver import Receiver
from server.kv.transfer.tcp_sender import Sender
from server.wire.messages import PoolRef

if TYPE_CHECKING:
    from server.kv.transfer.worker import TransferWorker


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

    def wake(self) -> None:
        self._transfer.wake()

    def close(self) -> None:
        self._transfer.close()


class FaultyTcpTransfer(TcpTransfer):
    """A TCP transfer that raises where it sends or receives."""

    def __init__(
        self,
        listen: str,
        *,
        secret: bytes,
        copy_timeout_s: float,
        clock: Clock,
        injector: Injector,
    ) -> None:
        super().__init__(listen, secret=secret, copy_timeout_s=copy_timeout_s, clock=clock)
        self._injector = injector

    def _advance_sender(self, sender: Sender) -> None:
        self._injector.call(Place.SENDER)
        super()._advance_sender(sender)

    def _advance_receiver(self, receiver: Receiver) -> None:
        self._injector.call(Place.RECEIVER)
        super()._advance_receiver(receiver)


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
    worker.step = injector.loop(worker.step)
    worker.handle = injector.handling(worker.handle)
    injector.arm(faults)
