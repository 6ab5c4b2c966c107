"""A fault delays its own stage by its own length, and nothing and nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdtrace.stages import GapCause, Mark, Role, WaitReason
from pdtrace.testing import FakeClock
from server.config import Settings
from server.wire.messages import CopyJob
from tests.support.scheduler_bus import PAGE, Cluster

MakeCluster = Callable[..., Cluster]
MS = 1_000_000
DELAY_MS = 70
PROMPT = list(range(1, 20))
OTHER = list(range(50, 60))
NUM_TOKENS = 6

PD = [
    ("hop.dispatch", Mark.RESERVE_RECEIVED),
    ("decode.reserve", Mark.PAGES_RESERVED),
    ("hop.publish", Mark.HANDSHAKE_DONE),
    ("prefill.queue", Mark.PREFILL_STARTED),
    ("prefill.compute", Mark.PREFILL_FINISHED),
    ("hop.notice", Mark.KV_NOTICED),
    ("decode.queue", Mark.DECODE_ADMITTED),
    ("decode.first", Mark.FIRST_TOKEN_COMMITTED),
    ("decode.generate", Mark.DECODE_FINISHED),
]
COLOCATED = [
    ("hop.dispatch", Mark.RESERVE_RECEIVED),
    ("prefill.queue", Mark.PREFILL_STARTED),
    ("prefill.compute", Mark.PREFILL_FINISHED),
    ("decode.first", Mark.FIRST_TOKEN_COMMITTED),
    ("decode.generate", Mark.DECODE_FINISHED),
]
CASES = [
    *(pytest.param(False, stage, mark, id=f"pd-{stage}") for stage, mark in PD),
    *(pytest.param(True, stage, mark, id=f"colocated-{stage}") for stage, mark in COLOCATED),
]


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill_pages": 64,
        "decode_pages": 64,
        "prefill_budget": 64,
        "reserve_output_tokens": 1,
        "max_running": 4,
        "gap_threshold_s": 0.02,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


Times = dict[Mark, int]


def play(
    cluster: Cluster, faults: dict[str, int], *, other: bool = True
) -> tuple[Times, Times, list[tuple[object, ...]]]:
    """Times of the marks of a request with `faults` and of one beside it; the former's waits."""
    start_ns = cluster.clock.monotonic_ns()
    first = cluster.submit(PROMPT, max_tokens=NUM_TOKENS, faults=faults)
    second = cluster.submit(OTHER, max_tokens=NUM_TOKENS) if other else None
    cluster.run_for(DELAY_MS + 100)
    assert cluster.results[first].tokens == cluster.expected(PROMPT, NUM_TOKENS)
    assert cluster.results[first].finish_reasons == ["length"]
    if second is not None:
        assert cluster.results[second].tokens == cluster.expected(OTHER, NUM_TOKENS)
    times: dict[int, Times] = {1: {}, 2: {}}
    waits: list[tuple[object, ...]] = []
    roles = [Role.WORKER] if "worker-0" in cluster.workers else [Role.PREFILL, Role.DECODE]
    for role in roles:
        for record in cluster.marks(role):
            if record.mark is not Mark.WAITING:
                times[record.key][record.mark] = record.t_ns - start_ns
            elif record.key == 1:
                waits.append(record.values)
    return times[1], times[2], waits


@pytest.mark.parametrize(("colocated", "stage", "mark"), CASES)
def test_fault_moves_its_stage_s_end_and_what_follows_by_its_delay(
    make_cluster: MakeCluster, colocated: bool, stage: str, mark: Mark
) -> None:
    chain = [end for _, end in (COLOCATED if colocated else PD)]
    fills_the_pool = stage == "decode.reserve"
    usual, usual_other, _ = play(
        make_cluster(settings=settings(), colocated=colocated), {}, other=not fills_the_pool
    )
    delayed, other, waits = play(
        make_cluster(settings=settings(), colocated=colocated),
        {stage: DELAY_MS},
        other=not fills_the_pool,
    )
    shifts = [(delayed[end] - usual[end]) / MS for end in chain]
    position = chain.index(mark)
    assert shifts[:position] == [0] * position
    assert all(DELAY_MS - 2 <= shift <= DELAY_MS + 2 for shift in shifts[position:])
    # Steps are shared, so the other request's moments are the same, give or take a turn.
    assert set(other) == set(usual_other)
    assert all(abs(other[end] - usual_other[end]) <= 2 * MS for end in other)
    reasons = [wait[1] for wait in waits if wait[0] == stage]
    assert reasons == [WaitReason.KV_PAGES if fills_the_pool else WaitReason.INJECTED]
    if fills_the_pool:
        assert ("decode.reserve", WaitReason.KV_PAGES, 5, 0, 64, 0, None, None) in waits


class TickingClock(FakeClock):
    """A clock on which every reading costs time, so that no two instants of a turn are the same."""

    def monotonic_ns(self) -> int:
        self.advance(ns=50_000)
        return super().monotonic_ns()


@pytest.mark.parametrize(("colocated", "stage", "mark"), CASES)
def test_hold_lasts_its_whole_delay_from_the_mark_that_begins_its_stage(
    make_cluster: MakeCluster, colocated: bool, stage: str, mark: Mark
) -> None:
    del mark  # it ends the stage
    cluster = make_cluster(settings=settings(), colocated=colocated, clock=TickingClock())
    cluster.submit(PROMPT, max_tokens=NUM_TOKENS, faults={stage: DELAY_MS})
    held: list[tuple[int, int]] = []
    for _ in range(60):
        cluster.step()
        held = [
            (leg.entered_ns, release_ns)
            for worker in cluster.workers.values()
            for leg in worker.legs
            if (release_ns := leg.holds.next_release_ns) is not None
        ]
        if held:
            break
    ((entered_ns, release_ns),) = held
    assert release_ns >= entered_ns + DELAY_MS * MS
    cluster.settle()


@pytest.mark.parametrize("colocated", [False, True])
def test_gap_fault_leaves_the_sequence_out_of_the_batch_once(
    make_cluster: MakeCluster, colocated: bool
) -> None:
    cluster = make_cluster(settings=settings(), colocated=colocated)
    cluster.submit(PROMPT, max_tokens=NUM_TOKENS, faults={"decode.gap": DELAY_MS})
    cluster.submit(OTHER, max_tokens=NUM_TOKENS)
    cluster.run_for(DELAY_MS + 60)
    role = Role.WORKER if colocated else Role.DECODE
    gaps = [record for record in cluster.marks(role) if record.mark is Mark.TOKEN_GAP]
    assert [(record.key, record.values[0], record.values[2]) for record in gaps] == [
        (1, 2, GapCause.INJECTED)
    ]
    assert gaps[0].values[3] == pytest.approx(DELAY_MS / 1e3, abs=0.003)
    assert gaps[0].values[1] == pytest.approx(DELAY_MS / 1e3, abs=0.003)
    for number, prompt in ((1, PROMPT), (2, OTHER)):
        expected = cluster.expected(prompt, NUM_TOKENS)
        assert cluster.results[f"h{number}"].tokens == expected


def test_full_pool_of_a_fault_takes_no_pages_from_running_sequences(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings())
    runner = cluster.submit(OTHER, max_tokens=60)
    cluster.run_for(8)
    cluster.submit(PROMPT, max_tokens=2, faults={"decode.reserve": DELAY_MS})
    cluster.run_for(40)
    assert cluster.decode.ballast.num_pages > 0
    cluster.run_for(DELAY_MS)
    assert cluster.decode.ballast.num_pages == 0
    assert cluster.results[runner].tokens == cluster.expected(OTHER, 60)
    assert Mark.PREEMPTED not in [record.mark for record in cluster.marks(Role.DECODE)]


def test_transfer_s_fault_travels_with_the_copy_jobs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=settings())
    cluster.submit(PROMPT, faults={"transfer": 5})
    cluster.settle()
    faults = [message.faults for _, message in cluster.delivered if isinstance(message, CopyJob)]
    assert faults == [{"transfer": 5}]


@pytest.mark.parametrize("colocated", [False, True])
def test_faults_are_ignored_unless_the_server_allows_them(
    make_cluster: MakeCluster, colocated: bool
) -> None:
    cluster = make_cluster(settings=settings(allow_faults=False), colocated=colocated)
    usual, _, _ = play(cluster, {})
    cluster = make_cluster(settings=settings(allow_faults=False), colocated=colocated)
    stages = COLOCATED if colocated else PD
    same, _, _ = play(cluster, {stage: DELAY_MS for stage, _ in stages})
    assert same == usual


@pytest.mark.parametrize("stage", ["hop.dispatch", "decode.generate", "decode.gap"])
def test_held_request_can_be_cancelled(make_cluster: MakeCluster, stage: str) -> None:
    cluster = make_cluster(settings=settings())
    handoff_id = cluster.submit(PROMPT, max_tokens=4, faults={stage: 50_000})
    cluster.run_for(30)
    assert len(cluster.decode.legs) == 1
    cluster.cancel(handoff_id)
    cluster.run_for(3)
    assert len(cluster.decode.legs) == 0
    assert cluster.results[handoff_id].outcome("decode-0") == "cancelled"
