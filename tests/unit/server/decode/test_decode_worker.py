"""The decode leg: reservations, landing, the batch, preemption, and every way to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdtrace.stages import GapCause, Mark, Role, WaitReason
from server.config import Deadlines, Settings
from server.engine.base import DecodeSlot, SamplingParams
from server.request import DecodeState, PrefillState
from server.serve import stop_worker, take_step
from server.wire.messages import Cancel, CopyDone, Handoff, PagesReserved, Tokens
from tests.support.scheduler_bus import PAGE, Cluster

MakeCluster = Callable[..., Cluster]
MS = 1_000_000


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def small(**changes: object) -> Settings:
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


def until(cluster: Cluster, state: DecodeState, *, turns: int = 50) -> None:
    for _ in range(turns):
        if any(leg.state is state for leg in cluster.decode.legs):
            return
        cluster.step()
    raise AssertionError(f"no leg reached {state}")


def waits(cluster: Cluster, role: Role = Role.DECODE) -> list[tuple[object, ...]]:
    return [r.values for r in cluster.marks(role) if r.mark is Mark.WAITING]


def test_batch_of_several_sequences_gives_each_its_own_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    prompts = [prompt(3 + i, first=i) for i in range(6)]
    handoffs = [cluster.submit(p, max_tokens=5 + i) for i, p in enumerate(prompts)]
    cluster.settle()
    for i, handoff_id in enumerate(handoffs):
        assert cluster.results[handoff_id].tokens == cluster.expected(prompts[i], 5 + i)


def test_sampled_tokens_depend_on_seed_and_position_alone(make_cluster: MakeCluster) -> None:
    sampling = SamplingParams(temperature=0.7, seed=5)
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(6), max_tokens=6, sampling=sampling)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(6), 6, sampling)


def test_one_message_carries_the_tokens_of_a_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for first in range(3):
        cluster.submit(prompt(4, first=first), max_tokens=6)
    cluster.settle()
    sizes = [len(message.items) for _, message in cluster.delivered if isinstance(message, Tokens)]
    assert 3 in sizes


@pytest.mark.parametrize("early", [False, True])
def test_stop_string_ends_generation_with_the_token_that_completes_it(
    make_cluster: MakeCluster, early: bool
) -> None:
    cluster = make_cluster()
    expected = cluster.expected(prompt(6), 8)
    text = "".join(map(chr, expected))
    for count, stop in ((1, text[0]), (5, text[3:5])):
        handoff_id = cluster.submit(prompt(6), max_tokens=8, stop=(stop,), early=early)
        cluster.settle()
        result = cluster.results[handoff_id]
        assert result.finish_reasons == ["stop"]
        assert result.tokens == expected[: max(count, text.find(stop) + len(stop))]


def test_request_that_can_never_fit_is_refused_at_once_on_both_legs(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=small())
    fits = cluster.submit(prompt(20), max_tokens=29)  # 48 positions with KV, 12 pages
    never = cluster.submit(prompt(20), max_tokens=30)
    cluster.step()
    cluster.step()
    result = cluster.results[never]
    assert (result.outcome("decode-0"), result.reason("decode-0")) == ("rejected", "kv_capacity")
    assert result.outcome("prefill-0") == "rejected"
    assert "13 KV pages" in result.closed["decode-0"][0].message
    cluster.settle()
    assert cluster.results[fits].tokens == cluster.expected(prompt(20), 29)


def test_positions_beyond_the_context_are_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small(decode_pages=4000))
    handoff_id = cluster.submit(prompt(20), max_tokens=8192)
    cluster.settle()
    assert cluster.results[handoff_id].reason("decode-0") == "context_length"


def test_request_waits_for_pages_and_says_who_holds_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small())
    cluster.submit(prompt(32), faults={"prefill.queue": 30})
    cluster.run_for(3)
    second = cluster.submit(prompt(24))
    cluster.settle()
    assert ("decode.reserve", WaitReason.KV_PAGES, 6, 4, 12, 0, "r1", None) in waits(cluster)
    assert cluster.results[second].tokens == cluster.expected(prompt(24), 4)


def test_large_request_is_passed_a_bounded_number_of_times(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small(max_running=2))
    order: list[str] = []
    cluster.submit(prompt(16), max_tokens=12)
    for _ in range(4):
        cluster.step()
    large = cluster.submit(prompt(40), max_tokens=2)
    small_ones = [cluster.submit(prompt(3, first=i), max_tokens=12) for i in range(24)]
    cluster.settle()
    for _, message in cluster.delivered:
        if isinstance(message, PagesReserved):
            order.append(message.handoff_id)
    assert order.index(large) <= 1 + 8
    assert order.index(large) >= 1
    assert set(small_ones) <= set(order)


def test_preempted_sequences_come_back_with_the_right_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small())
    prompts = [prompt(8, first=i) for i in range(4)]
    handoffs = [cluster.submit(p, max_tokens=24) for p in prompts]
    cluster.settle()
    for p, handoff_id in zip(prompts, handoffs, strict=True):
        assert cluster.results[handoff_id].tokens == cluster.expected(p, 24)
    by_leg = cluster.marks_by_leg(Role.DECODE).values()
    marks = [[record.mark for record in records] for records in by_leg]
    assert sum(m.count(Mark.PREEMPTED) for m in marks) >= 2
    assert all(m.count(Mark.PREEMPTED) == m.count(Mark.RESUMED) for m in marks)
    counts = [r.values[2] for records in by_leg for r in records if r.mark is Mark.DECODE_FINISHED]
    assert counts == [m.count(Mark.PREEMPTED) for m in marks]


def test_oldest_sequence_is_never_preempted(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small())
    for first in range(4):
        cluster.submit(prompt(8, first=first), max_tokens=24)
    cluster.settle()
    oldest = min(
        cluster.marks_by_leg(Role.DECODE).values(),
        key=lambda records: next(r.t_ns for r in records if r.mark is Mark.DECODE_ADMITTED),
    )
    assert Mark.PREEMPTED not in [record.mark for record in oldest]


def test_boundary_token_is_committed_without_running_the_prompt(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    engine = cluster.engines["decode-0"]
    positions: list[int] = []
    step = engine.decode

    def watched(slots: Sequence[DecodeSlot]) -> list[int]:
        positions.extend(slot.position for slot in slots)
        return step(slots)

    def no_prompts(chunks: object) -> list[int | None]:
        raise AssertionError("decode ran a prompt")

    monkeypatch.setattr(engine, "decode", watched)
    monkeypatch.setattr(engine, "prefill", no_prompts)
    cluster.submit(prompt(6), max_tokens=4)
    cluster.settle()
    assert positions == [6, 7, 8]


def test_token_that_comes_late_is_marked_with_its_cause(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small(gap_threshold_s=0.2), step_ms=300)
    cluster.submit(prompt(4), max_tokens=3)
    cluster.settle()
    gaps = [r.values for r in cluster.marks(Role.DECODE) if r.mark is Mark.TOKEN_GAP]
    assert gaps == [
        (1, 0.3, GapCause.UNKNOWN, 0.3, 1, 1, None),
        (2, 0.3, GapCause.BATCH_GROWTH, 0.3, 2, 1, None),
    ]


def test_gap_of_a_preempted_sequence_is_blamed_on_preemption(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=small(gap_threshold_s=0.05), step_ms=10)
    for first in range(4):
        cluster.submit(prompt(8, first=first), max_tokens=24)
    cluster.settle()
    by_leg = cluster.marks_by_leg(Role.DECODE).values()
    preempted = [records for records in by_leg if any(r.mark is Mark.PREEMPTED for r in records)]
    assert preempted
    for records in preempted:
        gaps = [r.values[2] for r in records if r.mark is Mark.TOKEN_GAP]
        assert GapCause.PREEMPTION in gaps


def test_handoff_of_another_history_fails_both_legs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(6), decode_digest="other")
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.token_at == {}
    assert result.reason("decode-0") == result.reason("prefill-0") == "handshake_mismatch"
    assert "prompt digest" in result.closed["decode-0"][0].message


def test_bytes_that_did_not_all_land_fail_the_request(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(6))
    for _ in range(40):
        for name in cluster.channels.names():
            if name == ("transfer", "decode-0"):
                message = cluster.channels.waiting[name].popleft()
                assert isinstance(message, CopyDone)
                short = CopyDone(
                    handoff_id=message.handoff_id,
                    index=message.index,
                    last=message.last,
                    num_bytes=message.num_bytes - 1,
                )
                cluster.hand("decode-0", short)
            else:
                cluster.deliver(name)
        for worker in cluster.workers.values():
            worker.step(0)
        cluster.transfer.step()
    cluster.settle()
    assert cluster.results[handoff_id].token_at == {}
    assert cluster.results[handoff_id].reason("decode-0") == "transfer_incomplete"


def test_pages_that_a_transfer_may_write_are_not_reused_before_it_has_drained(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=small(decode_pages=6))
    first = cluster.submit(prompt(20), faults={"prefill.queue": 50})
    cluster.run_for(3)
    cluster.cancel(first)
    second = cluster.submit(prompt(20, first=9))
    cluster.deliver(("gateway", "decode-0"))
    cluster.deliver(("gateway", "decode-0"))
    cluster.decode.step(0)
    states = {leg.handoff_id: leg.state for leg in cluster.decode.legs}
    assert states == {first: DecodeState.DRAINING, second: DecodeState.RESERVING}
    assert cluster.decode.allocator.num_free == 1
    assert "decode-0" not in cluster.results[first].closed
    cluster.settle()
    assert cluster.results[first].outcome("decode-0") == "cancelled"
    assert cluster.results[second].tokens == cluster.expected(prompt(20, first=9), 4)


@pytest.mark.parametrize("after", range(14))
@pytest.mark.parametrize("early", [False, True])
def test_cancel_after_any_number_of_turns_ends_both_legs(
    make_cluster: MakeCluster, after: int, early: bool
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(20), max_tokens=8, early=early)
    other = cluster.submit(prompt(9), max_tokens=8)
    for _ in range(after):
        cluster.step()
    cluster.cancel(handoff_id)
    cluster.settle()
    result = cluster.results[handoff_id]
    for instance in ("decode-0", "prefill-0"):
        assert {closed.outcome for closed in result.closed[instance]} <= {"cancelled", "completed"}
    assert cluster.results[other].tokens == cluster.expected(prompt(9), 8)


def test_cancel_of_an_unknown_handoff_is_answered_and_the_late_request_refused(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(6))
    cancel = Cancel(
        handoff_id=handoff_id,
        outcome="timed_out",
        reason="deadline_exceeded",
        by="gateway",
        gateway=cluster.gateway,
    )
    cluster.hand("decode-0", cancel)
    cluster.settle()
    outcomes = [closed.outcome for closed in cluster.results[handoff_id].closed["decode-0"]]
    assert outcomes == ["timed_out", "timed_out"]
    assert cluster.results[handoff_id].token_at == {}


DEADLINES = Deadlines(
    reserve_s=1, await_kv_s=2, decode_queue_s=3, preempted_s=4, handshake_s=100, prefill_queue_s=100
)


@pytest.mark.parametrize(
    ("faults", "stage", "seconds"),
    [
        ({"decode.reserve": 50_000}, "decode.reserve", 1),
        ({"prefill.queue": 50_000}, "prefill.queue", 2),
        ({"decode.queue": 50_000}, "decode.queue", 3),
        ({"decode.first": 50_000}, "decode.first", 3),
    ],
)
def test_deadline_passes_without_traffic(
    make_cluster: MakeCluster, faults: dict[str, int], stage: str, seconds: float
) -> None:
    cluster = make_cluster(settings=small(deadlines=DEADLINES))
    started_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(prompt(6), faults=faults)
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.outcome("decode-0") == "timed_out"
    assert result.closed["decode-0"][0].message == f"decode-0: {stage} took longer than allowed"
    aborted = [r for r in cluster.marks(Role.DECODE) if r.mark is Mark.ABORTED]
    assert [r.t_ns - started_ns for r in aborted] == [seconds * 1000 * MS]


def test_request_has_a_deadline_of_its_own_while_it_runs(make_cluster: MakeCluster) -> None:
    deadlines = Deadlines(request_s=1.0)
    cluster = make_cluster(settings=small(deadlines=deadlines, decode_pages=200), step_ms=100)
    handoff_id = cluster.submit(prompt(6), max_tokens=100)
    cluster.settle()
    assert cluster.results[handoff_id].outcome("decode-0") == "timed_out"
    assert 5 <= len(cluster.results[handoff_id].tokens) <= 10


def test_repeated_and_late_messages_are_counted_and_without_effect(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(6), max_tokens=12)
    until(cluster, DecodeState.RUNNING)
    past = [m for receiver, m in cluster.delivered if receiver == "decode-0"]
    for message in past:
        cluster.hand("decode-0", message)
    cluster.settle()
    for message in past:
        cluster.hand("decode-0", message)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(6), 12)
    kinds = {type(message).__name__ for message in past}
    assert kinds == {"DecodeRequest", "Handoff", "CopyDone"}
    for kind in kinds:
        assert cluster.decode.ignored[f"duplicate.{kind}"] >= 1
        assert cluster.decode.ignored[f"late.{kind}"] >= 1


def test_unknown_handoffs_are_counted(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.hand("decode-0", CopyDone(handoff_id="nobody", index=0, last=True, num_bytes=1))
    cluster.hand(
        "decode-0",
        Handoff(handoff_id="nobody", token_id=1, prompt_len=1, prompt_digest="", cached_tokens=0),
    )
    cluster.step()
    assert cluster.decode.ignored == {"unknown.CopyDone": 1, "unknown.Handoff": 1}


def test_memory_of_past_handoffs_is_bounded(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for number in range(5000):
        cancel = Cancel(
            handoff_id=f"x{number}",
            outcome="cancelled",
            reason="test",
            by="client",
            gateway=cluster.gateway,
        )
        cluster.hand("decode-0", cancel)
    cluster.step()
    assert cluster.decode.legs.past("x0") is None
    assert cluster.decode.legs.past("x4999") is not None


def test_step_that_raises_fails_its_batch_and_the_loop_goes_on(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    engine = cluster.engines["decode-0"]
    step = engine.decode

    def broken(slots: Sequence[DecodeSlot]) -> list[int]:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "decode", broken)
    bad = cluster.submit(prompt(6))
    cluster.settle()
    monkeypatch.setattr(engine, "decode", step)
    good = cluster.submit(prompt(6))
    cluster.settle()
    assert cluster.results[bad].outcome("decode-0") == "failed"
    assert cluster.results[bad].reason("decode-0") == "engine_error"
    assert cluster.results[good].tokens == cluster.expected(prompt(6), 4)


def test_turn_that_raises_gives_up_its_requests_and_serves_the_next(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    bad = cluster.submit(prompt(6), max_tokens=12)
    until(cluster, DecodeState.RUNNING)

    def broken(_: int) -> None:
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.decode, "run_batch", broken)
        take_step(cluster.decode, 0)
    cluster.settle()
    good = cluster.submit(prompt(6))
    cluster.settle()
    assert cluster.results[bad].reason("decode-0") == "internal"
    assert cluster.results[good].tokens == cluster.expected(prompt(6), 4)


def test_stop_answers_every_request_in_flight_and_refuses_later_ones(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    first = cluster.submit(prompt(6), faults={"decode.queue": 50_000})
    until(cluster, DecodeState.LANDED)
    stop_worker(cluster.decode, grace_s=0.05, drain_s=0.05)
    later = cluster.submit(prompt(6))
    cluster.settle()
    assert cluster.results[first].outcome("decode-0") == "failed"
    assert cluster.results[first].reason("decode-0") == "draining"
    assert cluster.results[later].outcome("decode-0") == "rejected"
    assert cluster.results[later].outcome("prefill-0") == "rejected"


def test_load_and_gauges_follow_the_requests(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(prompt(6), max_tokens=12)
    until(cluster, DecodeState.RUNNING)
    load = cluster.decode.report()
    assert (load.pages_total, load.pages_free, load.running, load.waiting) == (32, 29, 1, 0)
    cluster.settle()
    load = cluster.decode.report()
    assert (load.pages_free, load.running, load.waiting) == (32, 0, 0)


def test_first_token_does_not_wait_for_the_next_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(step_ms=100)
    cluster.submit(prompt(6), max_tokens=3)
    cluster.settle()
    sent = [message.items for _, message in cluster.delivered if isinstance(message, Tokens)]
    assert [item.index for items in sent for item in items] == [0, 1, 2]
    assert len(sent) == 3


def test_leg_whose_end_failed_half_way_is_let_go_and_answered(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(6), faults={"decode.queue": 50_000})
    until(cluster, DecodeState.LANDED)

    def broken(_: object) -> None:
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.decode, "free_pages", broken)
        cluster.cancel(handoff_id)
        leg = cluster.decode.legs[handoff_id]
        cluster.step()
    cluster.settle()
    assert len(cluster.decode.legs) == 0
    assert cluster.results[handoff_id].outcome("decode-0") == "cancelled"
    assert cluster.decode.ignored.pop("integrity") == 2  # once abandoned, once found unwhole
    cluster.decode.free_pages(leg)


@pytest.mark.parametrize("settled", [False, True])
def test_failed_copy_lets_go_of_the_pages_at_once_only_if_that_is_settled(
    make_cluster: MakeCluster, settled: bool
) -> None:
    cluster = make_cluster()
    cluster.transfer.fail_next = "peer_lost"
    cluster.transfer.settled = settled
    handoff_id = cluster.submit(prompt(6))
    for _ in range(40):
        for name in cluster.channels.names():
            if "transfer" not in name or not cluster.transfer.failed:
                cluster.deliver(name)
        for worker in cluster.workers.values():
            worker.step(0)
        cluster.transfer.step()
        if cluster.transfer.failed:
            break
    for receiver in ("prefill-0", "decode-0"):
        cluster.deliver(("transfer", receiver))
        cluster.workers[receiver].step(0)
    states = [leg.state for leg in cluster.decode.legs]
    assert states == ([] if settled else [DecodeState.DRAINING])
    assert cluster.decode.allocator.num_used == (0 if settled else 3)
    assert [leg.state for leg in cluster.prefill.legs] == [PrefillState.DRAINING]
    cluster.settle()
    assert cluster.results[handoff_id].reason("decode-0") == "peer_lost"
    assert cluster.decode.allocator.num_used == 0
