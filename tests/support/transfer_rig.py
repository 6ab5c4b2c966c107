"""A transfer process's loop over a scripted transfer, under a fake clock; and messages for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pdtrace.propagation import RequestContext
from pdtrace.ring.records import EndRecord, MarkRecord, OpenRecord
from pdtrace.stages import Mark, Role
from pdtrace.testing import FakeClock, MemoryRings
from server.config import ProcessConfig, Settings
from server.heartbeat import Progress
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.kv.transfer.memory import MemoryTransfer, Script, copy_all
from server.kv.transfer.worker import TransferWorker
from server.round_trips import RoundTrips
from server.wire.messages import (
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    CopyDone,
    CopyJob,
    Peer,
    PoolRef,
    RegisterPool,
    decode,
    encode,
)
from server.wire.sockets import Received

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype="float32")
PAGE = LAYOUT.page_bytes
PREFILL = Peer(instance="prefill-0", endpoint="ipc:///p0", incarnation="p")
TRANSFER = Peer(instance="transfer-0", endpoint="ipc:///t0", incarnation="t")
DECODE = Peer(instance="decode-0", endpoint="ipc:///d0", incarnation="d")
SOURCE = PoolRef(owner="prefill-0", incarnation="p")
DESTINATION = PoolRef(owner="decode-0", incarnation="d")


def drained(handoff_id: str) -> CopiesDrained:
    return CopiesDrained(
        handoff_id=handoff_id, transfer=TRANSFER, started_ns=FakeClock().monotonic_ns()
    )


@dataclass
class Mail:
    """Inbox and outbox of the worker; endpoints in `gone` cannot be reached."""

    clock: FakeClock
    waiting: list[Received] = field(default_factory=list[Received])
    sent: list[tuple[str, AnyMessage]] = field(default_factory=list[tuple[str, AnyMessage]])
    gone: set[str] = field(default_factory=set[str])

    def drain(self) -> list[Received]:
        messages, self.waiting = self.waiting, []
        return messages

    def put(self, message: AnyMessage) -> None:
        self.waiting.append(Received(decode(encode(message)), self.clock.monotonic_ns()))

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        self.sent.append((endpoint, decode(encode(message))))
        return endpoint not in self.gone

    def to(self, peer: Peer) -> list[AnyMessage]:
        return [message for endpoint, message in self.sent if endpoint == peer.endpoint]


@dataclass
class Rig:
    """A worker over a scripted transfer under a fake clock."""

    worker: TransferWorker
    transfer: MemoryTransfer
    mail: Mail
    clock: FakeClock
    rings: MemoryRings
    progress: Progress
    round_trips: RoundTrips
    records: list[Any] = field(default_factory=list[Any])

    def step(self, *messages: AnyMessage, times: int = 1) -> None:
        for message in messages:
            self.mail.put(message)
        for _ in range(times):
            self.worker.step(0.0)
            self.worker.jobs.check_integrity()

    def read(self) -> list[Any]:
        self.records += self.rings.records(Role.TRANSFER)
        return self.records

    def marks(self) -> list[tuple[Mark, tuple[Any, ...]]]:
        return [(r.mark, r.values) for r in self.read() if isinstance(r, MarkRecord)]

    def traces_are_ended(self) -> bool:
        opened = {r.key for r in self.read() if isinstance(r, OpenRecord)}
        return opened == {r.key for r in self.records if isinstance(r, EndRecord)}


class MakeRig(Protocol):
    """Makes a rig; `options` are settings."""

    def __call__(self, script: Script = copy_all, **options: Any) -> Rig: ...


def register(peer: Peer) -> RegisterPool:
    pool = PoolDescriptor(owner=peer.instance, path="", num_pages=8, layout=LAYOUT)
    return RegisterPool(peer=peer, pool=pool)


def job(
    index: int = 0,
    *,
    last: bool = False,
    handoff: str = "a",
    pages: tuple[int, ...] = (0,),
    source: PoolRef = SOURCE,
    address: str | None = None,
    faults: dict[str, int] | None = None,
) -> CopyJob:
    return CopyJob(
        context=RequestContext(
            request_id=f"req-{handoff}",
            trace_id="1" * 32,
            root_span_id="2" * 16,
            attempt_span_id="3" * 16,
            handoff_id=handoff,
        ),
        index=index,
        last=last,
        source=source,
        source_pages=pages,
        destination=DESTINATION,
        destination_pages=pages,
        transfer_address=address,
        prefill=PREFILL,
        decode=DECODE,
        faults=faults or {},
    )


def done(index: int, *, last: bool, num_pages: int = 1, handoff: str = "a") -> CopyDone:
    return CopyDone(handoff_id=handoff, index=index, last=last, num_bytes=num_pages * PAGE)


def cancel(handoff: str, peer: Peer) -> CancelCopies:
    return CancelCopies(handoff_id=handoff, reply_to=peer)


def new_rig(script: Script = copy_all, **options: Any) -> Rig:
    """A rig whose worker knows both pools; the caller closes its transfer."""
    clock = FakeClock()
    transfer = MemoryTransfer(script, clock=clock)
    mail = Mail(clock)
    rings = MemoryRings(clock=clock)
    progress = Progress(clock)
    worker = TransferWorker(
        ProcessConfig(
            settings=Settings(**options),
            role="transfer",
            instance="transfer-0",
            incarnation="t",
            endpoint="ipc:///t0",
            gateway_endpoint="ipc:///g0",
        ),
        transfer=transfer,
        inbox=mail,
        outbox=mail,
        recorder=rings.recorder(Role.TRANSFER),
        progress=progress,
        round_trips=(round_trips := RoundTrips("t")),
        clock=clock,
    )
    rig = Rig(worker, transfer, mail, clock, rings, progress, round_trips)
    rig.step(register(PREFILL), register(DECODE))
    return rig
