"""Wherever a request can be left waiting, the trace says why, with numbers and who is in the way.

One scenario for each reason of each stage; a stage of kind WAIT without one fails the last test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdtrace.propagation import RequestContext
from pdtrace.ring.records import MarkRecord, OpenRecord
from pdtrace.stages import STAGES, GapCause, Kind, Mark, Role
from pdtrace.stages import WaitReason as Why
from pdtrace.testing import FakeClock, MemoryRings
from server.config import Deadlines, ProcessConfig, Settings
from server.engine.fake import StepShape
from server.heartbeat import Progress, RoundTrips
from server.kv.layout import KvLayout
from server.kv.transfer.memory import Delay, MemoryTransfer
from server.kv.transfer.worker import TransferWorker
from server.request import ColocatedState, DecodeState
from server.wire.messages import (
    AnyMessage,
    CopyJob,
    Peer,
    PoolDescriptor,
    PoolRef,
    RegisterPool,
)
from server.wire.sockets import Received
from tests.support.gateway_doubles import endless, gateway_under_test
from tests.support.scheduler_bus import PAGE, Cluster, by_kind, constant

MakeCluster = Callable[..., Cluster]
Waits = list[tuple[Any, ...]]
"""Reason, needed, free, limit, position and blockers of each wait of one request in one stage."""


class Bench(NamedTuple):
    """What a scenario may use."""

    make_cluster: MakeCluster
    directory: Path


Scenario = Callable[[Bench], Waits]
SCENARIOS: dict[tuple[str, str], tuple[Scenario, Waits]] = {}
"""By stage and name: the scenario, and the waits that it must leave among others."""


def waits_in(stage: str, name: str, *expected: tuple[Any, ...]) -> Callable[[Scenario], Scenario]:
    """Registers a scenario."""

    def register(scenario: Scenario) -> Scenario:
        SCENARIOS[stage, name] = (scenario, list(expected))
        return scenario

    return register


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def config(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill_pages": 32,
        "decode_pages": 12,
        "prefill_budget": 8,
        "reserve_output_tokens": 1,
        "max_running": 4,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


def values_of(rings: MemoryRings, role: Role, request_id: str, stage: str) -> Waits:
    records = rings.records(role)
    keys = {
        r.key for r in records if isinstance(r, OpenRecord) and r.context.request_id == request_id
    }
    found: Waits = []
    for record in records:
        if not isinstance(record, MarkRecord) or record.key not in keys:
            continue
        if record.mark is Mark.WAITING and record.values[0] == stage:
            found.append(_wait(record.values))
    return found


def _wait(values: tuple[Any, ...]) -> tuple[Any, ...]:
    _, reason, needed, free, limit, position, blocker, blockers = values
    ids = tuple(blockers.split("\x1f")) if blockers else (blocker,) if blocker else ()
    assert ids[:1] == ((blocker,) if blocker else ())
    return reason, needed, free, limit, position, ids


def waits(cluster: Cluster, role: Role, request_id: str, stage: str) -> Waits:
    return values_of(cluster.rings, role, request_id, stage)


def during_step(cluster: Cluster, ms: float, act: Callable[[], None]) -> None:
    """Let `act` happen a third into the next step of any worker, which takes `ms`."""
    usual = cluster.step_time

    def once(_: StepShape) -> float:
        cluster.step_time = usual
        cluster.clock.advance(ms=ms / 3)
        act()
        return ms * 2 / 3 / 1e3

    cluster.step_time = once


def until(cluster: Cluster, state: DecodeState | ColocatedState) -> None:
    for _ in range(50):
        if any(leg.state is state for worker in cluster.workers.values() for leg in worker.legs):
            return
        cluster.step()
    raise AssertionError(f"no leg reached {state}")


# -- gateway --------------------------------------------------------------------------------------


@waits_in(
    "gateway.queue",
    "concurrency",
    (Why.CONCURRENCY, 1, 0, 2, 1, ("first", "second")),
    (Why.CONCURRENCY, 1, 0, 2, 0, ("first", "second")),
)
def gateway_is_full(bench: Bench) -> Waits:
    async def play() -> Waits:
        async with gateway_under_test(
            bench.directory, decode_script=endless(), max_concurrency=2
        ) as g:
            tasks: list[asyncio.Task[Any]] = []
            for name in ("first", "second", "third", "fourth"):
                tasks.append(asyncio.create_task(g.complete(headers={"X-Request-Id": name})))
                if len(tasks) <= 2:
                    await g.decode.until(lambda worker: len(worker.requests) == len(tasks))
                else:
                    await g.waiting(len(tasks) - 2)

            def of_fourth() -> Waits:
                records = g.records()
                (key,) = [
                    r.key
                    for r in records
                    if isinstance(r, OpenRecord) and r.context.request_id == "fourth"
                ]
                return [
                    _wait(r.values)
                    for r in records
                    if isinstance(r, MarkRecord) and r.key == key and r.mark is Mark.WAITING
                ]

            tasks[2].cancel()  # the fourth moves up
            async with asyncio.timeout(30):
                while len(of_fourth()) < 2:  # noqa: ASYNC110 -- records have no event
                    await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await g.idle()
            return of_fourth()

    return asyncio.run(play())


@waits_in("gateway.queue", "no worker", (Why.NO_WORKER, 1, 0, None, None, ()))
def gateway_has_no_worker(bench: Bench) -> Waits:
    async def play() -> Waits:
        async with gateway_under_test(
            bench.directory,
            wait_ready=False,
            deadlines=Deadlines(drain_s=1.0, gateway_queue_s=0.2),
            dead_after_s=0.2,
        ) as g:
            for worker in g.workers.values():
                worker.beats = False
            async with asyncio.timeout(30):
                while (await g.client.get("/ready")).status_code == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await g.complete()
            return [_wait(values) for values in g.marks(Mark.WAITING)]

    return asyncio.run(play())


# -- decode ---------------------------------------------------------------------------------------


@waits_in("decode.reserve", "pages", (Why.KV_PAGES, 6, 1, 12, 0, ("r1", "r2")))
def pool_is_taken(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.submit(prompt(32), faults={"prefill.queue": 30})
    cluster.submit(prompt(12), faults={"prefill.queue": 30})
    cluster.run_for(3)
    cluster.submit(prompt(24))
    cluster.settle()
    return waits(cluster, Role.DECODE, "r3", "decode.reserve")


@waits_in(
    "decode.reserve", "behind one that was passed", (Why.HEAD_OF_LINE, None, None, None, 1, ("r2",))
)
def queue_is_held_up(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.submit(prompt(16), faults={"prefill.queue": 200})
    cluster.run_for(3)
    cluster.submit(prompt(40))  # does not fit beside it, and may be passed eight times
    cluster.run_for(3)
    for first in range(8):
        cluster.submit(prompt(3, first=first))
        cluster.run_for(10)
    cluster.submit(prompt(3, first=9))
    cluster.settle()
    return waits(cluster, Role.DECODE, "r11", "decode.reserve")


@waits_in(
    "decode.reserve", "behind one that comes back", (Why.HEAD_OF_LINE, None, None, None, 0, ("r4",))
)
def preempted_comes_first(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(), step_ms=1)
    for first in range(4):
        cluster.submit(prompt(8, first=first), max_tokens=24)
    until(cluster, DecodeState.PREEMPTED)
    cluster.submit(prompt(3))
    cluster.settle()
    return waits(cluster, Role.DECODE, "r5", "decode.reserve")


@waits_in("decode.reserve", "during a step", (Why.WORKER_BUSY, None, None, None, None, ("r1",)))
def request_comes_during_a_step(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(), step_ms=1)
    cluster.submit(prompt(5), max_tokens=8)
    until(cluster, DecodeState.RUNNING)

    def arrive() -> None:
        cluster.submit(prompt(5, first=50))
        cluster.deliver(("gateway", "decode-0"))

    during_step(cluster, 30, arrive)
    cluster.settle()
    return waits(cluster, Role.DECODE, "r2", "decode.reserve")


@waits_in("decode.reserve", "no transfer", (Why.PEER_NOT_READY, 1, 0, None, None, ()))
def transfer_does_not_know_the_pool(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(), registered=False)
    cluster.transfer.silent = True
    cluster.submit(prompt(5))
    cluster.run_for(3)
    cluster.transfer.silent = False
    cluster.settle()
    return waits(cluster, Role.DECODE, "r1", "decode.reserve")


@waits_in("decode.queue", "slots", (Why.SLOTS, 1, 0, 5, 0, ("r1", "r2", "r3", "r4")))
def batch_is_full(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(decode_pages=64, max_running=5), step_ms=1)
    for first in range(5):
        cluster.submit(prompt(5, first=first), max_tokens=40)
    for _ in range(12):
        cluster.step()
    cluster.submit(prompt(5, first=50))
    cluster.settle()
    return waits(cluster, Role.DECODE, "r6", "decode.queue")


@waits_in(
    "decode.preempted",
    "pages",
    (Why.PREEMPTED, 3, 0, 12, None, ("r1",)),
    (Why.KV_PAGES, 6, 1, 12, 0, ("r1", "r2", "r3")),
)
def pages_are_taken_away(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(), step_ms=1)
    for first in range(4):
        cluster.submit(prompt(8, first=first), max_tokens=24)
    cluster.settle()
    return waits(cluster, Role.DECODE, "r4", "decode.preempted")


@waits_in("hop.notice", "during a step", (Why.WORKER_BUSY, None, None, None, None, ("r1",)))
def kv_lands_during_a_step(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(), step_ms=1)
    cluster.submit(prompt(5), max_tokens=20)
    until(cluster, DecodeState.RUNNING)
    cluster.submit(prompt(5, first=50))

    def lands() -> None:
        """All of the others' work for the second request, while decode computes."""
        for _ in range(3):
            for name in cluster.channels.names():
                if name != ("decode-0", "gateway"):
                    cluster.deliver(name)
            cluster.transfer.step()

    for _ in range(3):
        during_step(cluster, 30, lands)
        cluster.step()
    cluster.settle()
    return waits(cluster, Role.DECODE, "r2", "hop.notice")


# -- prefill --------------------------------------------------------------------------------------


@waits_in("prefill.bootstrap", "decode", (Why.PEER_NOT_READY, 1, 0, None, None, ()))
def decode_has_not_answered(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.submit(prompt(5))
    cluster.settle()
    return waits(cluster, Role.PREFILL, "r1", "prefill.bootstrap")


@waits_in("hop.publish", "during a step", (Why.WORKER_BUSY, None, None, None, None, ("r1",)))
def reservation_comes_during_a_step(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.submit(prompt(24))
    cluster.submit(prompt(5, first=50))
    cluster.deliver(("gateway", "prefill-0"))
    cluster.deliver(("gateway", "prefill-0"))
    cluster.deliver(("gateway", "decode-0"))
    cluster.decode.step(0)
    cluster.deliver(("decode-0", "prefill-0"))

    def answers() -> None:
        cluster.deliver(("gateway", "decode-0"))
        cluster.decode.step(0)
        cluster.deliver(("decode-0", "prefill-0"))

    during_step(cluster, 30, answers)
    cluster.prefill.step(0)
    cluster.settle()
    return waits(cluster, Role.PREFILL, "r2", "hop.publish")


@waits_in(
    "prefill.queue",
    "budget",
    (Why.TOKEN_BUDGET, 2, 0, 8, 1, ("r1",)),
    (Why.TOKEN_BUDGET, 2, 0, 8, 0, ("r2", "r1")),
)
def step_is_full(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(decode_pages=64))
    cluster.submit(prompt(35))  # four steps, and three tokens of the fifth
    cluster.submit(prompt(5, first=50))
    cluster.submit(prompt(2, first=90))
    cluster.settle()
    return waits(cluster, Role.PREFILL, "r3", "prefill.queue")


@waits_in("prefill.queue", "pages", (Why.KV_PAGES, 5, 0, 6, 0, ("r1", "r2")))
def sources_are_held(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(prefill_pages=6, decode_pages=64))
    cluster.submit(prompt(16))
    cluster.submit(prompt(8, first=50))
    cluster.transfer.silent = True
    cluster.run_for(20)
    cluster.submit(prompt(20, first=90))
    cluster.run_for(20)
    cluster.transfer.silent = False
    cluster.settle()
    return waits(cluster, Role.PREFILL, "r3", "prefill.queue")


@waits_in(
    "prefill.hold",
    "copies",
    (Why.COPY_QUEUE, 3, None, 3, None, ()),
    (Why.COPY_QUEUE, 2, None, 3, None, ()),
    (Why.COPY_QUEUE, 1, None, 3, None, ()),
)
def copies_are_open(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.transfer.silent = True
    cluster.submit(prompt(24))
    cluster.run_for(20)
    cluster.transfer.silent = False
    cluster.run_for(600, turn_ms=150)  # numbers alone are written every 100 ms
    cluster.settle()
    return waits(cluster, Role.PREFILL, "r1", "prefill.hold")


# -- a process that stands still ----------------------------------------------------------------


def paused(ms: int) -> tuple[Any, ...]:
    return (Why.PROCESS_PAUSED, ms, None, None, None, ())


def frozen_step(cluster: Cluster, instance: str, ms: float) -> None:
    """Let a worker's process stand still in the next step of any worker."""
    usual = cluster.step_time

    def once(_: StepShape) -> float:
        cluster.step_time = usual
        cluster.stand_still(instance, ms)
        return 0.001

    cluster.step_time = once


@waits_in("prefill.compute", "pause", paused(4000))
def prefill_is_stopped_in_a_pass(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.submit(prompt(5))
    frozen_step(cluster, "prefill-0", 4000)
    cluster.settle()
    return waits(cluster, Role.PREFILL, "r1", "prefill.compute")


@waits_in(
    "decode.reserve",
    "pause",
    (Why.KV_PAGES, 5, 3, 12, 0, ("r1",)),
    paused(4000),
    (Why.KV_PAGES, 5, 3, 12, 0, ("r1",)),
)
def decode_is_stopped_while_one_waits(bench: Bench) -> Waits:
    """What it waited for before the pause it waits for again behind it."""
    cluster = bench.make_cluster(settings=config(), step_ms=1)
    cluster.submit(prompt(36), max_tokens=8)
    cluster.submit(prompt(17, first=50))
    for _ in range(5):
        cluster.step()
    cluster.stand_still("decode-0", 4000)
    cluster.settle()
    return waits(cluster, Role.DECODE, "r2", "decode.reserve")


@waits_in("hop.dispatch", "pause", paused(4000))
def request_comes_while_decode_is_stopped(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config())
    cluster.submit(prompt(5))
    cluster.stand_still("decode-0", 4000)
    cluster.settle()
    return waits(cluster, Role.DECODE, "r1", "hop.dispatch")


@waits_in("decode.gap", "pause", (GapCause.PROCESS_PAUSED, 4.0, None))
def token_is_late_because_decode_was_stopped(bench: Bench) -> Waits:
    """Nobody is blamed, and the request waits for nothing."""
    cluster = bench.make_cluster(settings=config(gap_threshold_s=0.05), step_ms=1)
    cluster.submit(prompt(5), max_tokens=8)
    until(cluster, DecodeState.RUNNING)
    cluster.step()
    frozen_step(cluster, "decode-0", 4000)
    cluster.step()
    cluster.submit(prompt(5, first=50), max_tokens=8)
    cluster.settle()
    mine = [r for r in cluster.marks(Role.DECODE) if r.key == 1]
    assert Mark.WAITING not in {r.mark for r in mine}
    gaps = [r for r in mine if r.mark is Mark.TOKEN_GAP]
    return [(r.values[2], pytest.approx(r.values[3], abs=0.01), r.values[6]) for r in gaps]


# -- colocated ------------------------------------------------------------------------------------


@waits_in("prefill.queue", "slots", (Why.SLOTS, 1, 0, 2, 0, ("r1", "r2")))
def worker_is_full(bench: Bench) -> Waits:
    cluster = bench.make_cluster(
        settings=config(decode_pages=64, max_running=2), colocated=True, step_ms=1
    )
    for first in range(2):
        cluster.submit(prompt(5, first=first), max_tokens=20)
    for _ in range(4):
        cluster.step()
    cluster.submit(prompt(5, first=50))
    cluster.settle()
    return waits(cluster, Role.WORKER, "r3", "prefill.queue")


@waits_in("prefill.queue", "during a step", (Why.WORKER_BUSY, None, None, None, None, ("r2", "r3")))
def prompt_comes_during_a_step(bench: Bench) -> Waits:
    cluster = bench.make_cluster(settings=config(decode_pages=64), colocated=True)
    cluster.submit(prompt(5), max_tokens=20)
    until(cluster, ColocatedState.RUNNING)
    cluster.submit(prompt(5, first=50))
    cluster.submit(prompt(2, first=90))

    def arrive() -> None:
        cluster.submit(prompt(3, first=120))
        cluster.deliver(("gateway", "worker-0"))

    def in_prompts(shape: StepShape) -> float:
        if shape.num_tokens > shape.num_seqs:
            during_step(cluster, 30, arrive)
            return cluster.step_time(shape)
        return 0.0

    cluster.step_time = in_prompts
    cluster.step()
    cluster.step_time = constant(0.0)
    cluster.settle()
    return waits(cluster, Role.WORKER, "r4", "prefill.queue")


@waits_in("prefill.queue", "whole prompts", (Why.TOKEN_BUDGET, 9, 3, 8, 0, ("r1",)))
def prompt_does_not_fit_beside_another(bench: Bench) -> Waits:
    cluster = bench.make_cluster(
        settings=config(decode_pages=64, chunked=False), colocated=True, step_ms=1
    )
    cluster.submit(prompt(5))
    cluster.submit(prompt(9, first=50))
    cluster.settle()
    return waits(cluster, Role.WORKER, "r2", "prefill.queue")


@waits_in("decode.gap", "prompt", (GapCause.INTERFERING_PREFILL, 0.06, "r2"))
def prompt_makes_a_token_late(bench: Bench) -> Waits:
    cluster = bench.make_cluster(
        settings=config(decode_pages=64, chunked=False, gap_threshold_s=0.05), colocated=True
    )
    cluster.step_time = by_kind(decode=0.002, prompt_token=0.003)
    cluster.submit(prompt(5), max_tokens=8)
    until(cluster, ColocatedState.RUNNING)
    cluster.step()
    cluster.submit(prompt(20, first=50))
    cluster.settle()
    gaps = [r for r in cluster.marks(Role.WORKER) if r.mark is Mark.TOKEN_GAP]
    return [(r.values[2], r.values[3], r.values[6]) for r in gaps]


# -- transfer -------------------------------------------------------------------------------------


class TransferMail:
    """Inbox and outbox of a transfer process; what it sends is let fall."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.waiting: list[Received] = []

    def put(self, message: AnyMessage) -> None:
        self.waiting.append(Received(message, self.clock.monotonic_ns()))

    def drain(self) -> list[Received]:
        messages, self.waiting = self.waiting, []
        return messages

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        return bool(endpoint and message)


def transfers(
    *jobs: tuple[str, int, bool], late: tuple[str, int, bool] | None = None, stopped_ms: float = 0
) -> MemoryRings:
    """Copies of 1 s, one path: (request, index, last) in order of arrival; `late` comes during the
    first copy, in which the process stands still for `stopped_ms`."""
    pauses: list[tuple[int, int]] = []
    clock = FakeClock()
    rings, mail = MemoryRings(clock=clock), TransferMail(clock)
    transfer = MemoryTransfer(lambda _: Delay(1.0), clock=clock)
    worker = TransferWorker(
        ProcessConfig(
            settings=Settings(),
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
        progress=Progress(clock),
        round_trips=RoundTrips("t"),
        clock=clock,
        pauses=lambda begin_ns, end_ns: [p for p in pauses if p[0] < end_ns and p[1] > begin_ns],
    )
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4, dtype="float32")
    peers = [
        Peer(instance=name, endpoint=f"ipc:///{name}", incarnation=name)
        for name in ("prefill-0", "decode-0")
    ]
    for peer in peers:
        pool = PoolDescriptor(owner=peer.instance, path="", num_pages=8, layout=layout)
        mail.put(RegisterPool(peer=peer, pool=pool))
    for job in jobs:
        mail.put(_copy_job(job, peers))
    worker.step(0.0)
    begin_ns = clock.monotonic_ns()
    clock.advance(ms=stopped_ms)
    pauses.append((begin_ns, clock.monotonic_ns()))
    if late is not None:
        mail.put(_copy_job(late, peers))
    for _ in range(3 * len(jobs) + 3):
        worker.step(0.0)
        clock.advance(s=0.5)
    assert worker.jobs.is_idle
    transfer.close()
    return rings


def _copy_job(job: tuple[str, int, bool], peers: list[Peer]) -> CopyJob:
    request_id, index, last = job
    source, destination = [PoolRef(owner=p.instance, incarnation=p.incarnation) for p in peers]
    return CopyJob(
        context=RequestContext(
            request_id=request_id,
            trace_id="1" * 32,
            root_span_id="2" * 16,
            attempt_span_id="3" * 16,
            handoff_id=f"h-{request_id}",
        ),
        index=index,
        last=last,
        source=source,
        source_pages=(index,),
        destination=destination,
        destination_pages=(index,),
        transfer_address=None,
        prefill=peers[0],
        decode=peers[1],
    )


@waits_in("transfer", "pause, in the middle", paused(4000))
def transfer_is_stopped_in_a_copy(bench: Bench) -> Waits:
    del bench
    rings = transfers(("r1", 0, True), stopped_ms=4000)
    return values_of(rings, Role.TRANSFER, "r1", "transfer")


@waits_in("transfer", "pause, before it comes", paused(4000))
def copy_comes_while_transfer_is_stopped(bench: Bench) -> Waits:
    del bench
    rings = transfers(("r1", 0, True), late=("r2", 0, True), stopped_ms=4000)
    return values_of(rings, Role.TRANSFER, "r2", "transfer")


@waits_in("transfer.queue", "path", (Why.BANDWIDTH, 1, 0, 1, 1, ("a",)))
def path_is_used_by_another(_: Bench) -> Waits:
    rings = transfers(("a", 0, True), ("b", 0, True))
    return values_of(rings, Role.TRANSFER, "b", "transfer.queue")


@waits_in("transfer.queue", "own copy", (Why.BANDWIDTH, 1, 0, 1, 0, ()))
def path_is_used_by_its_own_copy(_: Bench) -> Waits:
    rings = transfers(("a", 0, False), late=("a", 1, True))
    return values_of(rings, Role.TRANSFER, "a", "transfer.queue")


@waits_in(
    "transfer.queue",
    "jobs ahead",
    (Why.COPY_QUEUE, 1, 0, 1, 3, ("a", "b")),
    (Why.COPY_QUEUE, 1, 0, 1, 2, ("b", "a")),
    (Why.BANDWIDTH, 1, 0, 1, 1, ("a",)),
)
def jobs_are_ahead(_: Bench) -> Waits:
    rings = transfers(("a", 0, False), ("b", 0, True), ("a", 1, True), ("c", 0, True))
    return values_of(rings, Role.TRANSFER, "c", "transfer.queue")


def test_every_visit_of_a_queue_has_its_reason() -> None:
    rings = transfers(("a", 0, False), ("a", 1, False), ("a", 2, True))
    own = (Why.BANDWIDTH, 1, 0, 1, 0, ())
    assert values_of(rings, Role.TRANSFER, "a", "transfer.queue") == [own, own]


def test_nobody_waits_for_pages_of_its_own(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(decode_pages=14, max_running=8), step_ms=1)
    for first in range(4):
        cluster.submit(prompt(8, first=first), max_tokens=24)
    until(cluster, DecodeState.RUNNING)
    for first in range(3):  # while these wait, it is known who holds most pages
        cluster.submit(prompt(8, first=first), max_tokens=40)
    cluster.settle()
    records = cluster.rings.records(Role.DECODE)
    names = {r.key: r.context.request_id for r in records if isinstance(r, OpenRecord)}
    preempted: set[str] = set()
    waits: set[tuple[str, str]] = set()
    for record in records:
        if not isinstance(record, MarkRecord):
            continue
        name = names[record.key]
        if record.mark is Mark.PREEMPTED:
            preempted.add(name)
        elif record.mark is Mark.RESUMED:
            preempted.remove(name)
        elif record.mark is Mark.WAITING and record.values[1] == Why.KV_PAGES:
            blockers = _wait(record.values)[-1]
            assert name not in blockers
            assert preempted.isdisjoint(blockers), "it holds no pages"
            waits.add((name, str(record.values[0])))
    assert {stage for _, stage in waits} == {"decode.reserve", "decode.preempted"}


@pytest.mark.parametrize("colocated", [False, True])
def test_long_queue_does_not_put_each_of_its_waits_into_the_trace_at_every_step(
    make_cluster: MakeCluster, *, colocated: bool
) -> None:
    waiting, steps = 120, 40
    cluster = make_cluster(
        settings=config(prefill_pages=512, decode_pages=512, max_running=256),
        colocated=colocated,
        step_ms=5,
    )
    for first in range(waiting + steps):
        cluster.submit(prompt(12, first=first), max_tokens=1)  # each takes one step and a half
    for _ in range(steps):
        cluster.step()
    role = Role.WORKER if colocated else Role.PREFILL
    records = [r for r in cluster.marks(role) if r.mark is Mark.WAITING]
    budget = [r for r in records if r.values[1] == Why.TOKEN_BUDGET]
    keys = {record.key for record in budget}
    assert len(keys) >= waiting  # each says it once
    assert {r.values[5] for r in budget} >= set(range(8)), "the head of the queue says it exactly"
    each_time = sum(1 for _ in budget) / len(keys)
    assert each_time < steps / 5


# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "name"), SCENARIOS, ids=[" ".join(key) for key in SCENARIOS])
def test_wait_is_recorded_with_its_numbers_and_who_is_in_the_way(
    make_cluster: MakeCluster, tmp_path: Path, stage: str, name: str
) -> None:
    scenario, expected = SCENARIOS[stage, name]
    found = scenario(Bench(make_cluster, tmp_path))
    rest = iter(found)
    assert all(wait in rest for wait in expected), found  # all of them, in this order


def test_every_stage_that_waits_has_a_scenario() -> None:
    waiting = {stage.name for stage in STAGES if stage.kind is Kind.WAIT}
    assert waiting - {stage for stage, _ in SCENARIOS} == set()
