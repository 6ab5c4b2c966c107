"""The transfer process's loop with faults: what raises, what is frozen, what never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from pdtrace.propagation import RequestContext
from pdtrace.ring.records import EndRecord, MarkRecord, OpenRecord, Record
from pdtrace.stages import Mark, Outcome, Role, WaitReason
from pdtrace.testing import FakeClock, MemoryRings
from server.config import ProcessConfig, Settings
from server.heartbeat import Progress
from server.injection.fault import Corrupt, Damage, Fault, Freeze, Place, Raise
from server.injection.injector import Injector
from server.injection.transfers import disturb, faulty_sink, faulty_transfer
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.kv.transfer.memory import MemoryTransfer
from server.kv.transfer.worker import TransferWorker
from server.wire.messages import (
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    InjectFaults,
    Peer,
    PoolRef,
    RegisterPool,
)
from server.wire.sockets import Received
from tests.support.injection import scripted

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, dtype="float32")
PREFILL = Peer(instance="prefill-0", endpoint="p0", incarnation="p")
DECODE = Peer(instance="decode-0", endpoint="d0", incarnation="d")
TRANSFER = Peer(instance="transfer-0", endpoint="t0", incarnation="t")


def drained(handoff_id: str) -> CopiesDrained:
    started_ns = FakeClock().monotonic_ns()
    return CopiesDrained(handoff_id=handoff_id, transfer=TRANSFER, started_ns=started_ns)


@dataclass
class Mail:
    waiting: list[AnyMessage] = field(default_factory=list[AnyMessage])
    sent: list[tuple[str, AnyMessage]] = field(default_factory=list[tuple[str, AnyMessage]])
    now_ns: Callable[[], int] = FakeClock().monotonic_ns

    def drain(self) -> list[Received]:
        waiting, self.waiting = self.waiting, []
        return [Received(message, self.now_ns()) for message in waiting]

    def get(self, timeout_s: float) -> Received | None:
        raise AssertionError("a transfer process drains")

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        self.sent.append((endpoint, message))
        return True


class Rig:
    """A worker with faults over a scripted transfer, on a fake clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.records: list[Record] = []
        self.rings = MemoryRings(clock=self.clock)
        self.injector = Injector(TRANSFER, role="transfer", now_ns=self.clock.monotonic_ns)
        self.transfer = MemoryTransfer(scripted(self.injector), clock=self.clock)
        self.mail = Mail(now_ns=self.clock.monotonic_ns)
        self.worker = TransferWorker(
            ProcessConfig(
                settings=Settings(allow_faults=True),
                role="transfer",
                instance="transfer-0",
                incarnation="t",
                endpoint="t0",
                gateway_endpoint="g0",
            ),
            transfer=faulty_transfer(self.transfer, self.injector),
            inbox=self.mail,
            outbox=faulty_sink(self.mail, self.injector),
            recorder=self.rings.recorder(Role.TRANSFER),
            progress=Progress(self.clock),
            clock=self.clock,
        )
        disturb(self.worker, self.injector, ())
        self.step(register(PREFILL), register(DECODE))

    def step(self, *messages: AnyMessage) -> list[AnyMessage]:
        """Take a turn with `messages`; what decode was sent in it."""
        self.mail.waiting += messages
        before = len(self.mail.sent)
        self.worker.step(0.0)
        self.worker.jobs.check_integrity()
        return [message for to, message in self.mail.sent[before:] if to == DECODE.endpoint]

    def marks(self, mark: Mark) -> list[tuple[object, ...]]:
        """The values of all of them that were recorded."""
        return [r.values for r in self.read() if isinstance(r, MarkRecord) and r.mark is mark]

    def read(self) -> list[Record]:
        self.records += self.rings.records(Role.TRANSFER)
        return self.records

    def arm(self, *faults: Fault) -> None:
        self.injector.arm(faults)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.worker.jobs.is_idle
    opened = {record.key for record in rig.read() if isinstance(record, OpenRecord)}
    assert opened == {record.key for record in rig.read() if isinstance(record, EndRecord)}
    rig.transfer.close()


def register(peer: Peer) -> RegisterPool:
    pool = PoolDescriptor(owner=peer.instance, path="", num_pages=8, layout=LAYOUT)
    return RegisterPool(peer=peer, pool=pool)


def job(handoff: str, index: int = 0, *, last: bool = True) -> CopyJob:
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
        source=PoolRef(owner="prefill-0", incarnation="p"),
        source_pages=(index,),
        destination=PoolRef(owner="decode-0", incarnation="d"),
        destination_pages=(index,),
        prefill=PREFILL,
        decode=DECODE,
        transfer_address=None,
    )


def done(handoff: str, index: int = 0) -> CopyDone:
    return CopyDone(handoff_id=handoff, index=index, last=True, num_bytes=LAYOUT.page_bytes)


def test_a_copy_job_that_raises_fails_its_handoff_at_once_and_the_rest_is_taken_in(
    rig: Rig,
) -> None:
    rig.arm(Raise(place=Place.MESSAGE, message="CopyJob", nth=2))
    told = rig.step(job("a"), job("b"), job("c"))
    told += rig.step()
    failed = [message for message in told if isinstance(message, CopyFailed)]
    assert [(message.handoff_id, message.reason) for message in failed] == [("b", "internal")]
    assert [message for message in told if isinstance(message, CopyDone)] == [done("a"), done("c")]
    told = [message for to, message in rig.mail.sent if to == PREFILL.endpoint]
    assert failed[0] in told
    assert rig.marks(Mark.ABORTED) == [(Outcome.FAILED, "InjectedError", "transfer-0")]
    assert rig.step(job("b", 1)) == [], "it is over"


def test_a_later_copy_job_that_raises_takes_its_handoff_along(rig: Rig) -> None:
    told = rig.step(job("a", last=False))
    assert not any(isinstance(message, CopyFailed) for message in told)
    rig.arm(Raise(place=Place.MESSAGE, message="CopyJob"))
    failed = rig.step(job("a", 1))
    assert [message.reason for message in failed if isinstance(message, CopyFailed)] == ["internal"]
    assert rig.step(job("a", 2)) == []


def test_a_job_of_a_cancelled_handoff_that_raises_is_over_already(rig: Rig) -> None:
    assert rig.step(CancelCopies(handoff_id="a", reply_to=DECODE)) == [drained("a")]
    rig.arm(Raise(place=Place.MESSAGE, message="CopyJob"))
    assert rig.step(job("a")) == []


def test_another_message_that_raises_is_lost_alone(rig: Rig) -> None:
    rig.arm(Raise(place=Place.MESSAGE, message="CancelCopies"))
    told = rig.step(
        CancelCopies(handoff_id="x", reply_to=DECODE),
        CancelCopies(handoff_id="y", reply_to=DECODE),
        job("a"),
    )
    assert told == [drained("y"), done("a")]


def test_a_frozen_transfer_holds_the_last_copy_and_says_so(rig: Rig) -> None:
    rig.arm(Freeze(stage="transfer", ms=800, request="req-b"))
    told = rig.step(job("a"), job("b", last=False))
    told += rig.step(job("b", 1))
    rig.clock.advance(ms=799)
    told += rig.step()
    assert {message.handoff_id for message in told if isinstance(message, CopyDone)} == {"a", "b"}
    assert done("b", 1) not in told
    waits = [values[:2] for values in rig.marks(Mark.WAITING)]
    assert ("transfer.queue", WaitReason.INJECTED) in waits
    rig.clock.advance(ms=1)
    assert rig.step() == [done("b", 1)]
    assert rig.injector.injected == {"freeze.transfer": 1}


def test_clearing_lets_a_frozen_copy_go(rig: Rig) -> None:
    rig.arm(Freeze(stage="transfer", ms=3_600_000))
    assert rig.step(job("a")) == []
    rig.injector.obey(InjectFaults(clear=True))
    assert rig.step() == [done("a")]


def test_a_copy_that_never_ends_fails_after_its_deadline(rig: Rig) -> None:
    rig.arm(Corrupt(copy=Damage.NEVER))
    limit_s = rig.worker.config.settings.deadlines.copy_s
    assert rig.step(job("a")) == []
    rig.clock.advance(s=limit_s, ms=-1)
    assert rig.step() == []
    rig.clock.advance(ms=1)
    told = rig.step() + rig.step()
    assert [message.reason for message in told if isinstance(message, CopyFailed)] == [
        "transfer_timeout"
    ]


def test_a_short_copy_fails_its_handoff(rig: Rig) -> None:
    rig.arm(Corrupt(copy=Damage.SHORT))
    told = rig.step(job("a")) + rig.step()
    assert [message.reason for message in told if isinstance(message, CopyFailed)] == [
        "transfer_incomplete"
    ]
