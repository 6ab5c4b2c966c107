"""Transfers whose copies go wrong on the way because a fault says so.

Owns where bytes are lost or altered: behind what read them at the source, before what checks them
at the destination, as memory or a network would do it. Which copy is hit is decided by the injector
when the copy is submitted.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterable
from typing import Any, cast

from pdtrace.clock import Clock
from server.injection.fault import Damage, Place
from server.injection.injector import Injector
from server.kv.transfer.base import PageCopy, TransferEvent
from server.kv.transfer.memory_ops import move_bytes
from server.kv.transfer.shm import ShmTransfer
from server.kv.transfer.tcp import TcpTransfer
from server.kv.transfer.tcp_receiver import Receiver
from server.kv.transfer.tcp_sender import Outgoing, Sender


class Damages:
    """What becomes of the copies under way that are hit, by handoff: each has one at a time."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._damages: dict[str, Damage] = {}

    def decide(self, copy: PageCopy) -> Damage | None:
        """`copy` is about to start."""
        self._damages.pop(copy.handoff_id, None)
        damage = self._injector.copy(copy.handoff_id, copy.index)
        if damage is not None:
            self._damages[copy.handoff_id] = damage
        return damage

    def take(self, handoff_id: str) -> Damage | None:
        """What is to be done now to the copy under way; each is damaged once."""
        return self._damages.pop(handoff_id, None)

    def put_back(self, handoff_id: str, damage: Damage) -> None:
        """It could not be done yet."""
        self._damages[handoff_id] = damage

    def forget(self, events: Iterable[TransferEvent]) -> None:
        """These copies are over."""
        for event in events:
            self._damages.pop(event.handoff_id, None)


class FaultyShmTransfer(ShmTransfer):
    """A transfer in shared memory of which pieces arrive short or altered, or whose copies never
    end."""

    def __init__(self, *, verify: bool, clock: Clock, injector: Injector) -> None:
        super().__init__(verify=verify, move=self._move_faulty, clock=clock)
        self._damages = Damages(injector)
        self._damage: Damage | None = None

    def submit(self, copy: PageCopy) -> None:
        if self._damages.decide(copy) is not Damage.NEVER:
            super().submit(copy)

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        events = super().poll(timeout_s)
        self._damages.forget(events)
        return events

    def _copy_runs(self, active: Any, budget: int) -> int:
        self._damage = self._damages.take(active.copy.handoff_id)
        return super()._copy_runs(active, budget)

    def _move_faulty(self, destination: int, source: int, num_bytes: int) -> int:
        damage, self._damage = self._damage, None
        if damage is Damage.SHORT:
            return move_bytes(destination, source, num_bytes - 1)
        moved = move_bytes(destination, source, num_bytes)
        if damage is Damage.ALTERED:
            ctypes.c_ubyte.from_address(destination).value ^= 0xFF
        return moved


class FaultyTcpTransfer(TcpTransfer):
    """A TCP transfer that raises where it sends or receives, and whose copies break off, are
    altered on the wire, or never end."""

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
        self._damages = Damages(injector)

    def submit(self, copy: PageCopy) -> None:
        if self._damages.decide(copy) is not Damage.NEVER:
            super().submit(copy)

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        events = super().poll(timeout_s)
        self._damages.forget(events)
        return events

    def _make_sender(self, address: str) -> Sender:
        return _FaultySender(
            address, secret=self._secret, monotonic_ns=self._monotonic_ns, damages=self._damages
        )

    def _advance_sender(self, sender: Sender) -> None:
        self._injector.call(Place.SENDER)
        super()._advance_sender(sender)

    def _advance_receiver(self, receiver: Receiver) -> None:
        self._injector.call(Place.RECEIVER)
        super()._advance_receiver(receiver)


class _FaultySender(Sender):
    def __init__(
        self, address: str, *, secret: bytes, monotonic_ns: Callable[[], int], damages: Damages
    ) -> None:
        super().__init__(address, secret=secret, monotonic_ns=monotonic_ns)
        self._damages = damages

    def _send(self, connection: socket.socket, item: Outgoing) -> None:
        damage = None if item.sent else self._damages.take(item.copy.handoff_id)
        if damage is not None:
            connection = cast(socket.socket, _FaultyWire(connection, item, damage))
        super()._send(connection, item)
        if damage is not None and not item.sent:  # there was no room for any page yet
            self._damages.put_back(item.copy.handoff_id, damage)


class _FaultyWire:
    """What a sender needs of a connection. Headers pass; the first piece of pages does not."""

    def __init__(self, connection: socket.socket, item: Outgoing, damage: Damage) -> None:
        self._connection = connection
        self._item = item
        self._damage = damage

    def send(self, data: memoryview) -> int:
        if self._item.head or self._item.sent:
            return self._connection.send(data)
        if self._damage is Damage.SHORT:
            num_bytes = self._connection.send(data[: max(1, len(data) // 2)])
            self._connection.shutdown(socket.SHUT_WR)
            return num_bytes
        return self._connection.send(bytes([data[0] ^ 0xFF]) + data[1:])
