"""The prefill leg: chunks, copies, the handshake, and every way to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdtrace.stages import Mark, Role, WaitReason
from server.engine.base import PrefillChunk
from server.engine.fake import FakeModel
from server.request import PrefillState
from server.wire.messages import (
    Abort,
    CopyJob,
    PagesReserved,
    Peer,
    PrefillRequest,
)
from tests.support.scheduler_bus import MODEL, PAGE, Cluster

MakeCluster = Callable[..., Cluster]
BUDGET = 8


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def jobs(cluster: Cluster) -> list[CopyJob]:
    return [message for _, message in cluster.delivered if isinstance(message, CopyJob)]


@pytest.mark.parametrize(
    "length", [1, PAGE - 1, PAGE, PAGE + 1, BUDGET - 1, BUDGET, BUDGET + 1, 10 * BUDGET]
)
def test_prompts_around_page_and_budget_edges_give_the_right_tokens(
    make_cluster: MakeCluster, length: int
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(length), max_tokens=6)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(length), 6)
    copied = jobs(cluster)
    assert [job.index for job in copied] == list(range(len(copied)))
    assert [job.last for job in copied] == [False] * (len(copied) - 1) + [True]
    assert sum(len(job.source_pages) for job in copied) == -(-length // PAGE)


def test_pages_of_a_chunk_are_copied_while_later_chunks_compute(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(prompt(10 * BUDGET))
    for _ in range(6):
        cluster.step()
    (leg,) = cluster.prefill.legs
    assert leg.state is PrefillState.RUNNING
    assert leg.computed < leg.prompt_len
    assert len(jobs(cluster)) >= 1
    assert leg.jobs_done
    cluster.settle()


def test_two_prompts_share_a_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    first, second = cluster.submit(prompt(3)), cluster.submit(prompt(4, first=50))
    cluster.settle()
    started = [r.values for r in cluster.marks(Role.PREFILL) if r.mark is Mark.PREFILL_STARTED]
    assert started == [(0, 2), (0, 2)]
    assert cluster.results[first].tokens == cluster.expected(prompt(3), 4)
    assert cluster.results[second].tokens == cluster.expected(prompt(4, first=50), 4)


def test_cached_prefix_is_not_computed_again_but_is_copied(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(prompt(20))
    cluster.settle()
    before = len(jobs(cluster))
    longer = [*prompt(20), 99, 98]
    handoff_id = cluster.submit(longer)
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.cached_tokens == 20
    assert result.tokens == cluster.expected(longer, 4)
    assert sum(len(job.source_pages) for job in jobs(cluster)[before:]) == 6
    chunk_tokens = [
        r.values[1] for r in cluster.marks(Role.PREFILL) if r.mark is Mark.CHUNK_STARTED
    ]
    assert chunk_tokens == [8, 8, 4, 2]


def test_same_prompt_again_computes_at_least_its_last_page(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(prompt(8))
    cluster.settle()
    handoff_id = cluster.submit(prompt(8))
    cluster.settle()
    assert cluster.results[handoff_id].cached_tokens == 4
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(8), 4)


def test_cached_pages_give_way_to_prompts_that_need_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for first in range(8):
        handoff_id = cluster.submit(prompt(40, first=first))
        cluster.settle()
        assert cluster.results[handoff_id].tokens == cluster.expected(prompt(40, first=first), 4)
    assert cluster.prefill.cache.num_pages <= 32


def test_reservation_may_come_before_the_request(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(5))
    cluster.deliver(("gateway", "decode-0"))
    cluster.decode.step(0)
    cluster.deliver(("decode-0", "prefill-0"))
    cluster.prefill.step(0)
    assert len(cluster.prefill.legs) == 0
    cluster.settle()
    assert cluster.results[handoff_id].outcome("prefill-0") == "completed"


def test_early_token_comes_from_prefill_and_the_rest_from_decode(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(5), max_tokens=4, early=True)
    cluster.settle()
    result = cluster.results[handoff_id]
    assert (result.first_from, result.cached_tokens) == ("prefill-0", 0)
    assert result.tokens == cluster.expected(prompt(5), 4)
    assert result.finish_reasons == ["length"]
    marks = [record.mark for record in cluster.marks(Role.PREFILL)]
    forwarded = marks.index(Mark.FIRST_TOKEN_FORWARDED)
    assert marks[forwarded - 1] is Mark.PREFILL_FINISHED


@pytest.mark.parametrize("early", [False, True])
def test_one_token_is_finished_by_the_leg_that_sends_it(
    make_cluster: MakeCluster, early: bool
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(5), max_tokens=1, early=early)
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.first_from == ("prefill-0" if early else "decode-0")
    assert (result.tokens, result.finish_reasons) == (cluster.expected(prompt(5), 1), ["length"])
    assert result.outcome("decode-0") == result.outcome("prefill-0") == "completed"
    finished = [r.values for r in cluster.marks(Role.DECODE) if r.mark is Mark.DECODE_FINISHED]
    assert finished == [(1, "length", 0)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_sequence_as_boundary_token(
    make_cluster: MakeCluster, early: bool, ignore_eos: bool
) -> None:
    model = FakeModel(num_layers=1, num_kv_heads=1, head_dim=1, eos_permille=1000)
    cluster = make_cluster(model=model)
    handoff_id = cluster.submit(prompt(5), max_tokens=3, early=early, ignore_eos=ignore_eos)
    cluster.settle()
    result = cluster.results[handoff_id]
    assert len(result.tokens) == (3 if ignore_eos else 1)
    assert result.finish_reasons == ["length" if ignore_eos else "stop"]


def test_other_model_on_decode_fails_both_legs_with_both_fingerprints(
    make_cluster: MakeCluster,
) -> None:
    other = FakeModel(num_layers=1, num_kv_heads=1, head_dim=1, eos_permille=1)
    cluster = make_cluster(decode_model=other)
    handoff_id = cluster.submit(prompt(5))
    cluster.settle()
    result = cluster.results[handoff_id]
    for instance in ("prefill-0", "decode-0"):
        (closed,) = result.closed[instance]
        assert (closed.outcome, closed.reason, closed.by) == (
            "failed",
            "handshake_mismatch",
            "prefill-0",
        )
        assert MODEL.info.fingerprint[:16] in closed.message
        assert other.info.fingerprint[:16] in closed.message
    assert jobs(cluster) == []


def test_other_prompt_length_on_decode_fails_the_handshake(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    bad = cluster.submit(prompt(5), decode_len=40)
    good = cluster.submit(prompt(6))
    cluster.settle()
    assert "the prompt has 2" in cluster.results[bad].closed["decode-0"][0].message
    assert "reserved 10" in cluster.results[bad].closed["decode-0"][0].message
    assert cluster.results[good].outcome("decode-0") == "completed"


def test_reservation_of_another_incarnation_is_ignored(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(5), faults={"hop.dispatch": 50})
    cluster.run_for(5)
    stale = PagesReserved(
        handoff_id=handoff_id,
        decode=Peer(instance="decode-0", endpoint="decode-0", incarnation="old"),
        fingerprint="other",
        layout=cluster.prefill.engine.layout,
        pool=cluster.prefill._pool,  # pyright: ignore[reportPrivateUsage]
        pages=(1, 2),
        transfer_address=None,
    )
    cluster.hand("prefill-0", stale)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(5), 4)
    assert cluster.prefill.ignored["stale.PagesReserved"] == 1


def test_source_pages_are_held_until_the_last_copy_is_done(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.transfer.silent = True
    handoff_id = cluster.submit(prompt(9))
    cluster.run_for(20)
    (leg,) = cluster.prefill.legs
    assert leg.state is PrefillState.SENDING
    held = {*leg.own_pages}
    assert held <= {p for p in range(32) if cluster.prefill.allocator.refcount(p)}
    assert Mark.SOURCE_RELEASED not in [r.mark for r in cluster.marks(Role.PREFILL)]
    cluster.transfer.silent = False
    cluster.settle()
    assert cluster.results[handoff_id].outcome("prefill-0") == "completed"
    released = [r.values for r in cluster.marks(Role.PREFILL) if r.mark is Mark.SOURCE_RELEASED]
    assert released == [(3,)]


def test_transfer_that_hangs_times_out_and_its_pages_stay_out_of_use_until_it_answers(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    cluster.transfer.silent = True
    handoff_id = cluster.submit(prompt(9))
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.outcome("prefill-0") == "timed_out"
    assert "transfer took longer" in result.closed["prefill-0"][0].message
    assert cluster.prefill.quarantine.num_pages == 3
    assert cluster.decode.quarantine.num_pages == 3
    assert cluster.prefill.allocator.num_used >= 3
    # The pool goes on without these pages, and gets them back when the transfer answers.
    cluster.transfer.silent = False
    other = cluster.submit(prompt(9, first=60))
    cluster.settle()
    assert cluster.results[other].tokens == cluster.expected(prompt(9, first=60), 4)
    cluster.step()
    assert cluster.prefill.quarantine.num_pages == cluster.decode.quarantine.num_pages == 0


def test_failed_copy_fails_both_legs_with_its_reason_and_nobody_else(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    cluster.transfer.fail_next = "transfer_failed"
    bad = cluster.submit(prompt(20))
    cluster.settle()
    good = cluster.submit(prompt(20, first=3))
    cluster.settle()
    for instance in ("prefill-0", "decode-0"):
        assert cluster.results[bad].outcome(instance) == "failed"
        assert cluster.results[bad].reason(instance) == "transfer_failed"
    assert cluster.results[good].tokens == cluster.expected(prompt(20, first=3), 4)


def test_step_that_raises_fails_its_requests_and_the_loop_goes_on(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    engine = cluster.engines["prefill-0"]
    compute = engine.prefill

    def broken(chunks: Sequence[PrefillChunk]) -> list[int | None]:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "prefill", broken)
    bad = [cluster.submit(prompt(3)), cluster.submit(prompt(4))]
    cluster.settle()
    monkeypatch.setattr(engine, "prefill", compute)
    good = cluster.submit(prompt(5))
    cluster.settle()
    for handoff_id in bad:
        for instance in ("prefill-0", "decode-0"):
            assert cluster.results[handoff_id].outcome(instance) == "failed"
            assert cluster.results[handoff_id].reason(instance) == "engine_error"
    assert cluster.results[good].outcome("decode-0") == "completed"


def test_unreachable_transfer_process_is_blamed_itself(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(20))
    for _ in range(2):
        cluster.step()
    cluster.channels.cut.add("transfer")
    for _ in range(6):
        cluster.step()
    cluster.channels.cut.clear()
    cluster.settle()  # its pages are free once the transfer process has let go of them
    assert cluster.results[handoff_id].reason("prefill-0") == "transfer_unreachable"


def test_unreachable_decode_fails_the_request_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(20))
    for _ in range(2):
        cluster.step()
    cluster.channels.cut.add("decode-0")
    for _ in range(6):
        cluster.step()
    assert cluster.results[handoff_id].reason("prefill-0") == "peer_unreachable"
    cluster.channels.cut.clear()
    cluster.cancel(handoff_id)
    cluster.settle()


def test_abort_that_comes_before_the_request_closes_it_on_arrival(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(prompt(5), max_tokens=4000)  # never fits: decode refuses
    cluster.deliver(("gateway", "decode-0"))
    cluster.decode.step(0)
    cluster.deliver(("decode-0", "prefill-0"))
    cluster.prefill.step(0)
    assert any(isinstance(message, Abort) for _, message in cluster.delivered)
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.outcome("decode-0") == result.outcome("prefill-0") == "rejected"
    assert result.reason("prefill-0") == "kv_capacity"


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [([], "invalid_request"), ([5, 10**6], "invalid_request"), ([5, -1], "invalid_request")],
)
def test_prompt_that_the_engine_would_refuse_is_rejected_before_a_step(
    make_cluster: MakeCluster, token_ids: list[int], reason: str
) -> None:
    cluster = make_cluster()
    bad = cluster.submit(token_ids, decode_len=max(1, len(token_ids)))
    good = cluster.submit(prompt(5))
    cluster.settle()
    assert cluster.results[bad].outcome("prefill-0") == "rejected"
    assert cluster.results[bad].reason("prefill-0") == reason
    assert cluster.results[good].outcome("prefill-0") == "completed"


def test_short_prompt_behind_a_long_one_says_who_is_in_its_way(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(prompt(10 * BUDGET))
    for _ in range(3):
        cluster.step()
    cluster.submit(prompt(2))
    cluster.settle()
    waits = [r.values for r in cluster.marks(Role.PREFILL) if r.mark is Mark.WAITING]
    assert ("prefill.queue", WaitReason.TOKEN_BUDGET, 2, 0, BUDGET, 0, "r1", None) in waits


def test_request_of_a_closed_handoff_is_ignored(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(prompt(5))
    cluster.settle()
    (request,) = [m for _, m in cluster.delivered if isinstance(m, PrefillRequest)]
    cluster.hand("prefill-0", request)
    cluster.settle()
    assert cluster.prefill.ignored["late.PrefillRequest"] == 1


def test_pages_kept_out_of_use_are_asked_for_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.transfer.silent = True
    cluster.submit(prompt(9))
    cluster.settle()
    assert cluster.prefill.quarantine.num_pages == cluster.decode.quarantine.num_pages == 3
    cluster.transfer.restart()  # a new process: the old one's messages are lost with it
    cluster.run_for(100)
    assert cluster.prefill.quarantine.num_pages == 3
    cluster.clock.advance(s=10)
    cluster.run_for(5)
    assert cluster.prefill.quarantine.num_pages == cluster.decode.quarantine.num_pages == 0
    assert cluster.prefill.quarantine.num_handoffs_ever == 1


def test_nothing_is_copied_before_the_transfer_knows_both_pools(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(registered=False)
    cluster.transfer.silent = True  # not up yet
    handoff_id = cluster.submit(prompt(9))
    cluster.run_for(300)
    assert [leg.state for leg in cluster.prefill.legs] == [PrefillState.BOOTSTRAP]
    assert jobs(cluster) == []
    waits = [r.values for r in cluster.marks(Role.DECODE) if r.mark is Mark.WAITING]
    assert [wait[:2] for wait in waits] == [("decode.reserve", WaitReason.PEER_NOT_READY)]
    cluster.transfer.silent = False
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(9), 4)


def test_registration_that_is_lost_is_sent_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(registered=False)
    handoff_id = cluster.submit(prompt(9))
    cluster.prefill.step(0)
    cluster.channels.waiting["prefill-0", "transfer"].clear()
    cluster.run_for(250)
    assert cluster.prefill.registration.known
    cluster.settle()
    assert cluster.results[handoff_id].outcome("prefill-0") == "completed"


def test_transfer_that_was_started_anew_costs_one_request_and_is_told_of_the_pools(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    cluster.transfer.restart()
    lost = cluster.submit(prompt(9))
    cluster.settle()
    assert cluster.results[lost].reason("decode-0") == "unknown_pool"
    served = cluster.submit(prompt(9))
    cluster.settle()
    assert cluster.results[served].tokens == cluster.expected(prompt(9), 4)
