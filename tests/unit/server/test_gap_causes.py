"""Each cause of a late token, produced in a worker; the steps that a worker records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdtrace.ring.records import MarkRecord, OpenRecord, StepRecord, Value
from pdtrace.stages import GapCause, Mark, Role, StepKind
from server.config import Settings
from server.engine.base import DecodeSlot, PrefillChunk
from server.wire.messages import Cancel, CopyDone
from tests.support.scheduler_bus import PAGE, Cluster, by_kind, constant

MakeCluster = Callable[..., Cluster]
MS = 1_000_000


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def config(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill_pages": 64,
        "decode_pages": 64,
        "prefill_budget": 16,
        "reserve_output_tokens": 2,
        "max_running": 8,
        "gap_threshold_s": 0.05,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


def gaps(cluster: Cluster, role: Role, key: int = 1) -> list[tuple[Value, ...]]:
    """Attributes of one request's gaps, in order."""
    return [r.values for r in cluster.marks(role) if r.mark is Mark.TOKEN_GAP and r.key == key]


def run_alone(cluster: Cluster, turns: int) -> None:
    """A first request that generates on its own for a while."""
    cluster.submit(prompt(5), max_tokens=12)
    for _ in range(turns):
        cluster.step()


@pytest.mark.parametrize("chunked", [True, False])
def test_prompts_in_the_same_worker(make_cluster: MakeCluster, chunked: bool) -> None:
    cluster = make_cluster(
        settings=config(chunked=chunked, prefill_budget=18),
        colocated=True,
        # The pass over both prompts takes 160 ms, a step of the batch 2 ms.
        step_time=by_kind(decode=0.002, prompt_token=0.01),
    )
    run_alone(cluster, 4)
    cluster.submit(prompt(4, first=50), max_tokens=2)
    cluster.submit(prompt(12, first=90), max_tokens=2)
    cluster.settle()
    ((index, gap_s, cause, cause_s, step, batch_size, blocker),) = gaps(cluster, Role.WORKER)
    assert (cause, cause_s, blocker) == (GapCause.INTERFERING_PREFILL, 0.16, "r3")
    assert gap_s == pytest.approx(0.162)
    assert isinstance(index, int)
    assert isinstance(step, int)
    assert index >= 2
    assert step > index
    assert batch_size == 3


def test_growth_of_the_batch(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(
        settings=config(),
        step_time=by_kind(decode=lambda size: 0.02 * size**2),
    )
    run_alone(cluster, 8)
    cluster.submit(prompt(6, first=50), max_tokens=4)
    cluster.settle()
    first, *later = gaps(cluster, Role.DECODE)
    assert first[2:] == (GapCause.BATCH_GROWTH, 0.06, first[4], 2, "r2")
    # Further steps are as long as that one: the batch is what it is.
    assert [(gap[2], gap[3], gap[6]) for gap in later] == [
        (GapCause.BATCH_GROWTH, 0.08, None)
    ] * len(later)
    assert later


def test_request_that_ends_with_its_first_token_is_no_growth(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), step_ms=2)
    run_alone(cluster, 8)
    cluster.submit(prompt(6, first=50), max_tokens=1)
    for _ in range(40):
        if any(leg.request_id == "r2" and leg.handoff for leg in cluster.decode.legs):
            break
        cluster.step()
    cluster.step_time = by_kind(decode=0.3)  # from the turn on in which it comes and goes
    cluster.settle()
    found = gaps(cluster, Role.DECODE)
    assert {gap[6] for gap in found} == {None}
    assert found[0][2] == GapCause.UNKNOWN


def test_pages_taken_away(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(
        settings=config(decode_pages=12, reserve_output_tokens=1, max_running=4), step_ms=10
    )
    for first in range(4):
        cluster.submit(prompt(8, first=first), max_tokens=24)
    cluster.settle()
    records = list(cluster.marks(Role.DECODE))
    lost = {r.key for r in records if r.mark is Mark.PREEMPTED}
    assert lost
    for key in lost:
        mine = [r for r in records if r.key == key]
        away = [
            (lost_at.t_ns, back.t_ns)
            for lost_at, back in zip(
                [r for r in mine if r.mark is Mark.PREEMPTED],
                [r for r in mine if r.mark is Mark.RESUMED],
                strict=True,
            )
        ]
        blamed = [r for r in mine if r.mark is Mark.TOKEN_GAP]
        late = [(lost_ns, back_ns) for lost_ns, back_ns in away if back_ns - lost_ns > 50 * MS]
        assert len(blamed) == len(late) >= 1
        for record, (lost_ns, back_ns) in zip(blamed, late, strict=True):
            assert record.values[2:4] == (
                GapCause.PREEMPTION,
                pytest.approx((back_ns - lost_ns) / 1e9),
            )
            assert record.values[6] in {"r1", "r2", "r3", "r4"} - {f"r{key}"}


def test_kv_of_others_that_lands(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), step_time=by_kind(decode=0.002))
    run_alone(cluster, 8)
    cluster.inboxes["decode-0"].cost_ms[CopyDone] = 60
    cluster.submit(prompt(6, first=50), max_tokens=2)
    cluster.settle()
    (gap,) = gaps(cluster, Role.DECODE)
    assert gap[1:4] == (pytest.approx(0.062), GapCause.TRANSFER_LANDING, 0.06)
    assert gap[6] == "r2"


def test_loop_that_is_busy_with_other_messages(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), step_time=by_kind(decode=0.002))
    run_alone(cluster, 8)
    cluster.inboxes["decode-0"].cost_ms[Cancel] = 20
    for number in range(4):
        cluster.hand(
            "decode-0",
            Cancel(
                handoff_id=f"x{number}",
                outcome="cancelled",
                reason="test",
                by="client",
                gateway=cluster.gateway,
            ),
        )
    cluster.settle()
    (gap,) = gaps(cluster, Role.DECODE)
    assert gap[2:4] == (GapCause.SCHEDULER_BUSY, 0.08)
    assert gap[6] is None


@pytest.mark.parametrize("colocated", [False, True])
def test_fault_hook(make_cluster: MakeCluster, colocated: bool) -> None:
    cluster = make_cluster(settings=config(), colocated=colocated, step_ms=2)
    cluster.submit(prompt(5), max_tokens=8, faults={"decode.gap": 100})
    cluster.submit(prompt(5, first=50), max_tokens=8)
    cluster.settle()
    (gap,) = gaps(cluster, Role.WORKER if colocated else Role.DECODE)
    assert gap[2] == GapCause.INJECTED
    assert gap[3] == pytest.approx(0.1, abs=0.01)
    assert gap[6] is None


def test_step_that_takes_long_for_no_reason_of_the_worker(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), step_ms=2)
    run_alone(cluster, 8)
    usual, cluster.step_time = cluster.step_time, constant(0.3)
    cluster.step()
    cluster.step_time = usual
    cluster.settle()
    (gap,) = gaps(cluster, Role.DECODE)
    assert gap[1:4] == (pytest.approx(0.3), GapCause.UNKNOWN, pytest.approx(0.298))


def test_gap_names_the_step_that_ended_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), step_ms=60)
    cluster.submit(prompt(5), max_tokens=4)
    cluster.settle()
    records = cluster.rings.records(Role.DECODE)
    steps = {r.number: r for r in records if isinstance(r, StepRecord)}
    marks = [r for r in records if isinstance(r, MarkRecord) and r.mark is Mark.TOKEN_GAP]
    assert [r.values[4] for r in marks] == [1, 2, 3]
    for record in marks:
        number = record.values[4]
        assert isinstance(number, int)
        assert steps[number].end_ns == record.t_ns


# -- steps ----------------------------------------------------------------------------------------


def steps(cluster: Cluster, role: Role) -> list[tuple[StepKind, int, tuple[str, ...], float]]:
    """Kind, tokens, members' request ids and milliseconds of each step, in order."""
    records = cluster.rings.records(role)
    names = {r.key: r.context.request_id for r in records if isinstance(r, OpenRecord)}
    found = [r for r in records if isinstance(r, StepRecord)]
    assert [r.number for r in found] == list(range(1, len(found) + 1))
    assert all(r.size == len(r.members) for r in found)
    return [
        (r.kind, r.tokens, tuple(names[key] for key in r.members), (r.end_ns - r.begin_ns) / 1e6)
        for r in found
    ]


def test_every_pass_is_a_step_with_its_members_and_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), step_ms=5)
    cluster.submit(prompt(20), max_tokens=3)
    cluster.submit(prompt(4, first=50), max_tokens=3)
    cluster.settle()
    assert steps(cluster, Role.PREFILL) == [
        (StepKind.PREFILL, 16, ("r1",), 5.0),
        (StepKind.PREFILL, 8, ("r1", "r2"), 5.0),
    ]
    decoded = steps(cluster, Role.DECODE)
    assert {kind for kind, _, _, _ in decoded} == {StepKind.DECODE}
    assert all(tokens == len(members) for _, tokens, members, _ in decoded)
    # Two tokens of each are generated: the boundary token was prefill's.
    assert sorted(name for _, _, members, _ in decoded for name in members) == [
        "r1",
        "r1",
        "r2",
        "r2",
    ]


def test_colocated_worker_records_both_kinds(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), colocated=True, step_ms=5)
    cluster.submit(prompt(20), max_tokens=3)
    cluster.settle()
    assert steps(cluster, Role.WORKER) == [
        (StepKind.PREFILL, 16, ("r1",), 5.0),
        (StepKind.PREFILL, 4, ("r1",), 5.0),
        (StepKind.DECODE, 1, ("r1",), 5.0),
        (StepKind.DECODE, 1, ("r1",), 5.0),
    ]


def test_step_that_fails_is_recorded_with_the_time_it_took(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(settings=config())

    def broken_decode(_: Sequence[DecodeSlot]) -> list[int]:
        cluster.clock.advance(ms=40)
        raise RuntimeError("device lost")

    def broken_prefill(_: Sequence[PrefillChunk]) -> list[int | None]:
        cluster.clock.advance(ms=30)
        raise RuntimeError("device lost")

    monkeypatch.setattr(cluster.engines["decode-0"], "decode", broken_decode)
    cluster.submit(prompt(5), max_tokens=3)
    cluster.settle()
    assert steps(cluster, Role.DECODE) == [(StepKind.DECODE, 1, ("r1",), 40.0)]
    monkeypatch.setattr(cluster.engines["prefill-0"], "prefill", broken_prefill)
    cluster.submit(prompt(5, first=60), max_tokens=3)
    cluster.settle()
    failed = [r for r in cluster.rings.records(Role.PREFILL) if isinstance(r, StepRecord)][-1]
    assert (failed.size, failed.tokens, failed.end_ns - failed.begin_ns) == (1, 5, 30_000_000)
