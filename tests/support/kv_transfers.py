"""Every transfer implementation behind one harness, for the shared contract tests."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from server.kv.layout import KvLayout
from server.kv.pool import KvPool, PoolDescriptor
from server.kv.transfer.base import KvTransfer, PageCopy, TransferEvent
from server.kv.transfer.memory import MemoryTransfer
from server.kv.transfer.shm import ShmTransfer
from server.kv.transfer.tcp import TcpTransfer
from server.kv.transfer.tcp_auth import HELLO_BYTES, VERDICT_BYTES, SenderGreeting
from server.kv.transfer.tcp_frames import (
    LENGTH_BYTES,
    CopyReply,
    decode_length,
    decode_reply,
    parse_address,
)
from server.wire.messages import PoolRef

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
NUM_PAGES = 16
LIMIT_S = 60.0
SECRET = bytes(range(32))


class Harness(Protocol):
    """A pool of `source` and one of `destination`, each known to its host's transfer.

    source, destination   the transfers of the two hosts; one object where there is one host
    address               what copies name as the destination host
    """

    source: KvTransfer
    destination: KvTransfer
    address: str | None

    def add_pool(
        self, owner: str, incarnation: str = "1", *, layout: KvLayout = LAYOUT, host: str = ""
    ) -> PoolRef:
        """Make, fill with random bytes and register a pool; `host` is source or destination
        (by default the one of that name)."""
        ...

    def register_again(self, ref: PoolRef) -> None:
        """What every heartbeat does."""
        ...

    def memory(self, ref: PoolRef) -> memoryview | bytearray: ...

    def close(self) -> None: ...


@dataclass
class Ends:
    """What a test needs beside the harness: polling both ends until something happens."""

    harness: Harness
    events: list[TransferEvent] = field(default_factory=list[TransferEvent])

    def copy(
        self,
        source: PoolRef,
        source_pages: Sequence[int],
        destination: PoolRef,
        destination_pages: Sequence[int],
        *,
        handoff_id: str = "h-1",
        index: int = 0,
    ) -> None:
        self.harness.source.submit(
            PageCopy(
                handoff_id=handoff_id,
                index=index,
                source=source,
                source_pages=source_pages,
                destination=destination,
                destination_pages=destination_pages,
                address=self.harness.address,
            )
        )

    def poll_once(self, timeout_s: float = 0.002) -> list[TransferEvent]:
        """Events of the source end; the destination end is given a turn."""
        events = self.harness.source.poll(timeout_s)
        if self.harness.destination is not self.harness.source:
            assert self.harness.destination.poll(0.0) == []
        return events

    def until(self, count: int) -> list[TransferEvent]:
        """The next `count` events of the source end."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.events) < count:
            assert time.monotonic() < deadline, f"only {self.events} came"
            self.events += self.poll_once()
        events, self.events = self.events[:count], self.events[count:]
        return events

    def next_event(self) -> TransferEvent:
        return self.until(1)[0]

    def quiet(self, turns: int = 20) -> None:
        """Nothing happens for a while."""
        for _ in range(turns):
            assert self.poll_once() == []


class _PoolsOnDisk:
    """Pools as workers make them."""

    def __init__(self, directory: Path, num_pages: int = NUM_PAGES) -> None:
        self._directory = directory
        self._num_pages = num_pages
        self._pools: dict[PoolRef, KvPool] = {}

    def make(self, ref: PoolRef, layout: KvLayout) -> PoolDescriptor:
        pool = KvPool.create(
            self._directory / ref.owner, owner=ref.owner, layout=layout, num_pages=self._num_pages
        )
        pool.memory[:] = os.urandom(pool.descriptor.num_bytes)
        self._pools[ref] = pool
        return pool.descriptor

    def descriptor(self, ref: PoolRef) -> PoolDescriptor:
        return self._pools[ref].descriptor

    def memory(self, ref: PoolRef) -> memoryview:
        return self._pools[ref].memory

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
            pool.unlink()


class ShmHarness:
    def __init__(self, directory: Path, *, num_pages: int = NUM_PAGES) -> None:
        self.source: KvTransfer = ShmTransfer()
        self.destination: KvTransfer = self.source
        self.address: str | None = None
        self._pools = _PoolsOnDisk(directory, num_pages)

    def add_pool(
        self, owner: str, incarnation: str = "1", *, layout: KvLayout = LAYOUT, host: str = ""
    ) -> PoolRef:
        ref = PoolRef(owner=owner, incarnation=incarnation)
        self.source.register(ref, self._pools.make(ref, layout))
        return ref

    def register_again(self, ref: PoolRef) -> None:
        self.source.register(ref, self._pools.descriptor(ref))

    def descriptor(self, ref: PoolRef) -> PoolDescriptor:
        return self._pools.descriptor(ref)

    def memory(self, ref: PoolRef) -> memoryview:
        return self._pools.memory(ref)

    def close(self) -> None:
        self.source.close()
        self._pools.close()


class TcpHarness:
    def __init__(
        self, directory: Path, *, copy_timeout_s: float = 30.0, num_pages: int = NUM_PAGES
    ) -> None:
        self.receiver = TcpTransfer("127.0.0.1:0", secret=SECRET, copy_timeout_s=copy_timeout_s)
        self.sender = TcpTransfer("127.0.0.1:0", secret=SECRET, copy_timeout_s=copy_timeout_s)
        self.source: KvTransfer = self.sender
        self.destination: KvTransfer = self.receiver
        self.address: str | None = self.receiver.address
        self._pools = _PoolsOnDisk(directory, num_pages)

    def add_pool(
        self, owner: str, incarnation: str = "1", *, layout: KvLayout = LAYOUT, host: str = ""
    ) -> PoolRef:
        ref = PoolRef(owner=owner, incarnation=incarnation)
        transfer = self.destination if (host or owner) == "destination" else self.source
        transfer.register(ref, self._pools.make(ref, layout))
        return ref

    def register_again(self, ref: PoolRef) -> None:
        transfer = self.destination if ref.owner == "destination" else self.source
        transfer.register(ref, self._pools.descriptor(ref))

    def descriptor(self, ref: PoolRef) -> PoolDescriptor:
        return self._pools.descriptor(ref)

    def memory(self, ref: PoolRef) -> memoryview:
        return self._pools.memory(ref)

    def close(self) -> None:
        self.source.close()
        self.destination.close()
        self._pools.close()


class TcpClient:
    """A client of the destination's transfer that says what a test wants; it gives that transfer
    its turns. To be closed by its socket."""

    def __init__(self, harness: TcpHarness) -> None:
        assert harness.address is not None
        self._harness = harness
        self.socket = socket.create_connection(parse_address(harness.address))
        self.socket.setblocking(False)

    def hello(self) -> bytes:
        """What the receiver says first."""
        return self.receive(HELLO_BYTES)

    def greet(self, secret: bytes = SECRET) -> Self:
        """Prove to know the secret."""
        greeting = SenderGreeting(secret)
        self.send(greeting.feed(self.hello()))
        greeting.feed(self.receive(VERDICT_BYTES))
        assert greeting.done
        return self

    def send(self, data: bytes) -> None:
        """All of it; the receiver reads meanwhile. Raises ConnectionError when it hangs up."""
        while data:
            with contextlib.suppress(BlockingIOError):
                data = data[self.socket.send(data) :]
            self._harness.destination.poll(0.0)

    def receive(self, num_bytes: int) -> bytes:
        """Up to `num_bytes`; fewer when the connection is closed."""
        data = b""
        deadline = time.monotonic() + LIMIT_S
        while len(data) < num_bytes:
            assert time.monotonic() < deadline, "neither an answer nor the end of the connection"
            self._harness.destination.poll(0.005)
            try:
                piece = self.socket.recv(num_bytes - len(data))
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return data
            if not piece:
                return data
            data += piece
        return data

    def reply(self) -> CopyReply:
        return decode_reply(self.receive(decode_length(self.receive(LENGTH_BYTES))))

    def is_closed(self) -> bool:
        return self.receive(1) == b""


class MemoryHarness:
    def __init__(self, _directory: Path) -> None:
        self._transfer = MemoryTransfer()
        self.source: KvTransfer = self._transfer
        self.destination: KvTransfer = self._transfer
        self.address: str | None = None

    def add_pool(
        self, owner: str, incarnation: str = "1", *, layout: KvLayout = LAYOUT, host: str = ""
    ) -> PoolRef:
        ref = PoolRef(owner=owner, incarnation=incarnation)
        descriptor = PoolDescriptor(owner=owner, path="", num_pages=NUM_PAGES, layout=layout)
        self.source.register(ref, descriptor)
        self.memory(ref)[:] = os.urandom(descriptor.num_bytes)
        return ref

    def register_again(self, ref: PoolRef) -> None:
        self.source.register(
            ref, PoolDescriptor(owner=ref.owner, path="", num_pages=NUM_PAGES, layout=LAYOUT)
        )

    def memory(self, ref: PoolRef) -> bytearray:
        return self._transfer.memory(ref)

    def close(self) -> None:
        self.source.close()


HARNESSES: dict[str, Callable[[Path], Harness]] = {
    "shm": ShmHarness,
    "tcp": TcpHarness,
    "memory": MemoryHarness,
}
