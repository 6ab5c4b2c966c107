"""Whole legs over the real transfer process and real copies in shared memory, some of which arrive
short, altered, late or never: both legs end with the reason, nothing stays taken, and no token
comes from KV of somebody else.

The fake engine's tokens are a hash of what lies in the KV pages, so that one foreign byte shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, Outcome, Role
from server.config import ProcessConfig, Settings
from server.gateway.errors import LegFailed
from server.gateway.retry import may_retry
from server.heartbeat import Progress
from server.kv.transfer.memory_ops import move_bytes
from server.kv.transfer.shm import ShmTransfer
from server.kv.transfer.worker import TransferWorker, take_step
from server.wire.messages import AnyMessage, CopyDone, CopyFailed, CopyJob
from server.wire.sockets import Received
from tests.support.scheduler_bus import PAGE, BusInbox, BusOutbox, Cluster

MakeCluster = Callable[..., Cluster]
LEGS = ("prefill-0", "decode-0")


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


@dataclass
class PieceFault:
    """What happens to one piece that is copied, counted from 1; 0: to none."""

    piece: int = 0
    what: str = ""
    seen: int = 0

    def move(self, destination: int, source: int, num_bytes: int) -> int:
        self.seen += 1
        if self.seen != self.piece:
            return move_bytes(destination, source, num_bytes)
        if self.what == "short":
            return move_bytes(destination, source, num_bytes - 1)
        if self.what == "raise":
            raise ArithmeticError("scripted")
        move_bytes(destination, source, num_bytes)
        ctypes.c_ubyte.from_address(destination).value ^= 0xFF
        return num_bytes


class StallingTransfer(ShmTransfer):
    """`stalled`: copies that began go on no more."""

    stalled = False

    def _advance(self) -> None:
        if not self.stalled:
            super()._advance()


class RealTransfer:
    """The transfer process on the bus, in the place of the double."""

    silent = False

    def __init__(self, cluster: Cluster) -> None:
        self.fault = PieceFault()
        self.transfer = StallingTransfer(move=self.fault.move, clock=cluster.clock)
        self._clock = cluster.clock
        self._inbox = BusInbox(cluster.clock)
        self.worker = TransferWorker(
            ProcessConfig(
                settings=cluster.settings,
                role="transfer",
                instance="transfer-0",
                incarnation="t1",
                endpoint="transfer",
                gateway_endpoint="gateway",
            ),
            transfer=self.transfer,
            inbox=self._inbox,
            outbox=BusOutbox("transfer", cluster.channels),
            recorder=cluster.rings.recorder(Role.TRANSFER),
            progress=Progress(cluster.clock),
            clock=cluster.clock,
        )

    @property
    def busy(self) -> bool:
        return not self.transfer.stalled and not self.worker.jobs.is_idle

    def take(self, message: AnyMessage) -> None:
        self._inbox.waiting.append(Received(message, self._clock.monotonic_ns()))

    def step(self) -> None:
        take_step(self.worker, 0.0)
        self.worker.jobs.check_integrity()


@pytest.fixture
def made(make_cluster: MakeCluster) -> tuple[Cluster, RealTransfer]:
    """Registered workers that compute two pages of prompt in a step."""
    settings = Settings(
        model="fake",
        page_size=PAGE,
        prefill_pages=16,
        decode_pages=8,
        prefill_budget=2 * PAGE,
        reserve_output_tokens=4,
        max_running=4,
    )
    cluster = make_cluster(settings=settings, registered=False)
    transfer = RealTransfer(cluster)
    cluster.transfer = transfer  # pyright: ignore[reportAttributeAccessIssue]
    cluster.run_for(3000, turn_ms=100)
    assert cluster.prefill.registration.known
    assert cluster.decode.registration.known
    cluster.delivered.clear()
    return cluster, transfer


def whole(cluster: Cluster, transfer: RealTransfer) -> None:
    """Nothing is held, and one more request is served, with KV of its own."""
    for _ in range(200):
        if not cluster.prefill.quarantine.num_pages + cluster.decode.quarantine.num_pages:
            break
        cluster.run_for(250, turn_ms=250)
    cluster.check()
    assert transfer.worker.jobs.is_idle
    assert cluster.decode.allocator.num_used == 0
    probe = cluster.submit(prompt(7, first=90))
    cluster.settle()
    assert cluster.results[probe].tokens == cluster.expected(prompt(7, first=90), 4)


@pytest.mark.case("XFER-01", "XFER-07")
@pytest.mark.parametrize("piece", [1, 2, 3])
@pytest.mark.parametrize(
    ("what", "reason", "recorded"),
    [
        ("alter", "checksum_mismatch", "checksum_mismatch"),
        ("short", "transfer_incomplete", "transfer_incomplete"),
        ("raise", "internal", "ArithmeticError"),
    ],
)
def test_a_damaged_copy_ends_both_legs_with_its_reason_and_no_token_comes_of_it(
    made: tuple[Cluster, RealTransfer],
    piece: int,
    what: str,
    reason: str,
    recorded: str,
) -> None:
    cluster, transfer = made
    transfer.fault.piece, transfer.fault.what = piece, what
    handoff_id = cluster.submit(prompt(5 * PAGE))  # three steps, a job each
    cluster.settle()
    assert transfer.fault.seen == piece, "nothing of it was copied afterwards"
    result = cluster.results[handoff_id]
    assert [(result.outcome(leg), result.reason(leg)) for leg in LEGS] == 2 * [("failed", reason)]
    assert result.tokens == []
    assert may_retry(reason, attempt=1, max_retries=1, written=False) is (what != "raise")
    aborts = [
        record.values
        for record in cluster.rings.records(Role.TRANSFER)
        if isinstance(record, MarkRecord) and record.mark is Mark.ABORTED
    ]
    assert aborts == [(Outcome.FAILED, recorded, "transfer-0")]
    whole(cluster, transfer)


def test_decode_frees_its_pages_at_once_when_a_copy_failed_for_good(
    made: tuple[Cluster, RealTransfer],
) -> None:
    cluster, transfer = made
    transfer.fault.piece, transfer.fault.what = 1, "alter"
    cluster.submit(prompt(3 * PAGE))

    def failed() -> bool:
        return any(
            receiver == "decode-0" and isinstance(message, CopyFailed)
            for receiver, message in cluster.delivered
        )

    while not failed():
        assert len(cluster.delivered) < 1000
        cluster.step()
    cluster.workers["decode-0"].step(0)
    assert cluster.decode.allocator.num_used == 0, "without asking for a drain"
    cluster.settle()
    whole(cluster, transfer)


@pytest.mark.case("XFER-01")
def test_a_copy_that_never_ends_times_out_without_further_traffic(
    made: tuple[Cluster, RealTransfer],
) -> None:
    cluster, transfer = made
    transfer.transfer.stalled = True
    begun_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(prompt(5 * PAGE))
    cluster.run_for(21_000, turn_ms=100)
    result = cluster.results[handoff_id]
    assert [(result.outcome(leg), result.reason(leg)) for leg in LEGS] == 2 * [
        ("timed_out", "transfer_timeout")
    ]
    assert cluster.clock.monotonic_ns() - begun_ns < 22e9
    error = LegFailed.of(result.closed["decode-0"][0])
    assert error.http_status == 504
    assert may_retry(error.code, attempt=1, max_retries=1, written=False)
    transfer.transfer.stalled = False
    whole(cluster, transfer)


@pytest.mark.case("XFER-02")
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE + 1])
def test_prompts_around_the_size_of_a_page_finish(
    made: tuple[Cluster, RealTransfer], length: int
) -> None:
    cluster, transfer = made
    handoff_id = cluster.submit(prompt(length))
    cluster.settle()
    result = cluster.results[handoff_id]
    assert [result.outcome(leg) for leg in LEGS] == 2 * ["completed"]
    assert result.tokens == cluster.expected(prompt(length), 4)
    whole(cluster, transfer)


def test_a_late_completion_of_an_ended_handoff_admits_nobody_who_has_its_pages(
    made: tuple[Cluster, RealTransfer],
) -> None:
    cluster, transfer = made
    kept: list[AnyMessage] = []

    def keep(receiver: str, message: AnyMessage) -> bool:
        if receiver == "decode-0" and isinstance(message, CopyDone):
            kept.append(message)
            return True
        return False

    cluster.channels.loses = keep
    first = cluster.submit(prompt(4 * PAGE))
    while not (kept and isinstance(kept[-1], CopyDone) and kept[-1].last):
        cluster.step()
    (leg,) = cluster.decode.legs
    pages = set(leg.own_pages)
    cluster.cancel(first)
    cluster.settle()
    assert cluster.decode.allocator.num_used == 0
    cluster.channels.loses = lambda _receiver, _message: False

    transfer.transfer.stalled = True  # the next one has the pages, and none of its own KV
    second = cluster.submit(prompt(4 * PAGE, first=60))
    while not any(leg.handoff_id == second and leg.own_pages for leg in cluster.decode.legs):
        cluster.step()
    (leg,) = cluster.decode.legs
    assert pages & set(leg.own_pages), "pages are reused"
    for message in kept:
        cluster.channels.put("transfer", "decode-0", message)
    cluster.run_for(2000, turn_ms=100)
    assert cluster.results[second].tokens == []
    assert cluster.decode.ignored["late.CopyDone"] == len(kept)
    transfer.transfer.stalled = False
    cluster.settle()
    assert cluster.results[second].tokens == cluster.expected(prompt(4 * PAGE, first=60), 4)
    assert cluster.results[first].tokens == []
    whole(cluster, transfer)


def test_a_late_copy_job_writes_nothing_into_pages_that_somebody_else_has(
    made: tuple[Cluster, RealTransfer],
) -> None:
    cluster, transfer = made
    kept: list[AnyMessage] = []

    def keep(_receiver: str, message: AnyMessage) -> bool:
        if isinstance(message, CopyJob) and message.last:
            kept.append(message)
            return True
        return False

    cluster.channels.loses = keep
    first = cluster.submit(prompt(4 * PAGE))
    while not kept:
        cluster.step()
    cluster.cancel(first)
    cluster.settle()
    cluster.channels.loses = lambda _receiver, _message: False
    second = cluster.submit(prompt(4 * PAGE, first=60), max_tokens=6)
    while not cluster.results[second].token_at:
        cluster.step()
    cluster.channels.put("prefill-0", "transfer", kept[0])
    cluster.settle()
    assert cluster.results[second].tokens == cluster.expected(prompt(4 * PAGE, first=60), 6)
    assert transfer.worker.ignored["late"] == 1
    whole(cluster, transfer)


@pytest.mark.parametrize("restarted", LEGS)
def test_a_copy_job_for_a_worker_that_was_started_anew_touches_nothing_of_its_successor(
    made: tuple[Cluster, RealTransfer], restarted: str
) -> None:
    cluster, transfer = made
    kept: list[AnyMessage] = []

    def keep(_receiver: str, message: AnyMessage) -> bool:
        if isinstance(message, CopyJob):
            kept.append(message)
            return True
        return False

    cluster.channels.loses = keep
    first = cluster.submit(prompt(2 * PAGE))
    while not kept:
        cluster.step()
    cluster.restart(restarted)
    cluster.run_for(3000, turn_ms=100)
    cluster.channels.loses = lambda _receiver, _message: False
    pools = {name: bytes(engine.pool.memory) for name, engine in cluster.engines.items()}
    cluster.channels.put("prefill-0", "transfer", kept[0])
    cluster.run_for(2000, turn_ms=100)
    assert {name: bytes(e.pool.memory) for name, e in cluster.engines.items()} == pools
    assert cluster.results[first].tokens == []
    whole(cluster, transfer)
