"""A gateway, a transfer process or the other leg's worker is gone, and nobody tells: the legs that
depend on it end with a reason, by timers alone, and others go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdtrace.stages import Mark, Outcome, Role
from server.config import Deadlines, Settings
from server.request import MAX_ENDING_CHARS, DecodeState, PrefillState
from server.wire.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    AnyMessage,
    CopyJob,
    DecodeRequest,
    LegProbe,
    LegReport,
    Peer,
)
from tests.support.scheduler_bus import PAGE, Cluster

MakeCluster = Callable[..., Cluster]
S = 1_000_000_000
LEGS = ("prefill-0", "decode-0")
OTHER_GATEWAY = Peer(instance="gateway-0", endpoint="gateway", incarnation="g2")


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill_pages": 64,
        "decode_pages": 64,
        "prefill_budget": 8,
        "reserve_output_tokens": 4,
        "max_running": 4,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


def aborts(cluster: Cluster, role: Role) -> list[tuple[object, ...]]:
    return [r.values for r in cluster.marks(role) if r.mark is Mark.ABORTED]


def whole(cluster: Cluster) -> None:
    """Nothing is held, and one more request is served."""
    for _ in range(100):
        kept = cluster.prefill.quarantine.num_pages + cluster.decode.quarantine.num_pages
        if not kept and cluster.prefill.registration.known and cluster.decode.registration.known:
            break
        cluster.run_for(250, turn_ms=250)
    cluster.check()
    assert cluster.decode.allocator.num_used == 0
    served = cluster.submit(prompt(7, first=90))
    cluster.settle()
    assert cluster.results[served].tokens == cluster.expected(prompt(7, first=90), 4)


def spread(cluster: Cluster) -> dict[str, str]:
    """A request held in each of several stages, by stage."""
    faults = {
        "decode.reserve": {"hop.dispatch": 50_000},
        "prefill.queue": {"prefill.queue": 50_000},
        "prefill.compute": {"prefill.compute": 50_000},
        "decode.queue": {"decode.queue": 50_000},
        "decode.generate": {"decode.gap": 50_000},
    }
    handoffs = {
        stage: cluster.submit(prompt(6, first=10 * n), faults=fault)
        for n, (stage, fault) in enumerate(faults.items())
    }
    cluster.run_for(60)
    return handoffs


# -- the gateway ----------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
def test_legs_of_a_gateway_that_is_gone_end_as_lost_wherever_they_are(
    make_cluster: MakeCluster, replaced: bool
) -> None:
    cluster = make_cluster(settings=settings())
    handoffs = spread(cluster)
    cluster.answer_beats()
    cluster.run_for(500, turn_ms=100)
    assert len(cluster.decode.legs) == len(handoffs)
    if replaced:
        cluster.answer_beats(OTHER_GATEWAY)
        cluster.run_for(200, turn_ms=100)
        cluster.gateway = OTHER_GATEWAY
    else:
        cluster.run_for(2400, turn_ms=100)
        assert len(cluster.decode.legs) == len(handoffs), "not before dead_after_s"
        cluster.run_for(1200, turn_ms=100)
    for stage, handoff_id in handoffs.items():
        result = cluster.results[handoff_id]
        for leg in LEGS:
            outcomes = {(closed.outcome, closed.reason, closed.by) for closed in result.closed[leg]}
            done = stage in ("decode.queue", "decode.generate") and leg == "prefill-0"
            assert outcomes == {
                ("completed", "completed", leg) if done else ("lost", "gateway_lost", "gateway-0")
            }, (stage, leg)
    assert {values[:3] for values in aborts(cluster, Role.DECODE)} == {
        (Outcome.LOST, "gateway_lost", "gateway-0")
    }
    whole(cluster)


def test_late_request_of_a_gateway_that_was_replaced_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=settings())
    cluster.answer_beats()
    cluster.step()
    cluster.answer_beats(OTHER_GATEWAY)
    cluster.step()
    late = cluster.submit(prompt(6))  # in the name of the first one
    cluster.step()
    cluster.step()
    for leg in LEGS:
        assert cluster.results[late].reason(leg) == "gateway_lost"
    cluster.gateway = OTHER_GATEWAY
    whole(cluster)


def test_late_answer_of_a_gateway_that_is_gone_does_not_retire_the_present_one(
    make_cluster: MakeCluster,
) -> None:
    """A worker that had heard of none yet hears of the second one first."""
    cluster = make_cluster(settings=settings())
    late: list[AnyMessage] = []
    cluster.answer_beats()
    for leg in LEGS:
        late += cluster.channels.waiting["gateway", leg]
        cluster.channels.waiting["gateway", leg].clear()
    cluster.answer_beats(OTHER_GATEWAY)
    cluster.step()
    for leg, message in zip(LEGS, late, strict=True):
        cluster.channels.put("gateway", leg, message)
    cluster.step()
    cluster.gateway = OTHER_GATEWAY
    cluster.answer_beats()
    whole(cluster)


def test_worker_that_stood_still_itself_does_not_take_the_gateway_for_dead(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings())
    handoff_id = cluster.submit(prompt(6), faults={"decode.queue": 40_000})
    cluster.answer_beats()
    cluster.run_for(100)
    assert [leg.state for leg in cluster.decode.legs] == [DecodeState.LANDED]
    cluster.clock.advance(s=50)  # stopped, or in one long step
    cluster.decode.step(0)
    cluster.answer_beats()
    cluster.settle()
    assert cluster.results[handoff_id].outcome("decode-0") == "completed"


def test_words_of_another_leg_that_fill_a_message_reach_the_gateway_cut(
    make_cluster: MakeCluster,
) -> None:
    """What is sent on says a little more than what came: it must still fit."""
    cluster = make_cluster(settings=settings())
    handoff_id = cluster.submit(prompt(6), faults={"decode.queue": 40_000})
    cluster.run_for(100)
    words = "x" * (MAX_MESSAGE_BYTES - 200)
    cluster.channels.put(
        "prefill-0",
        "decode-0",
        Abort(handoff_id=handoff_id, outcome="failed", reason="r", message=words, by="prefill-0"),
    )
    cluster.settle()
    (closed,) = cluster.results[handoff_id].closed["decode-0"]
    assert (closed.outcome, closed.reason, closed.by) == ("failed", "r", "prefill-0")
    assert closed.message == words[:MAX_ENDING_CHARS] + "…"
    whole(cluster)


# -- the transfer process -------------------------------------------------------------------------


def until_sending(cluster: Cluster) -> None:
    for _ in range(200):
        if any(leg.state is PrefillState.SENDING for leg in cluster.prefill.legs):
            return
        cluster.run_for(1)
    raise AssertionError("no leg is sending")


def test_transfer_that_is_started_anew_loses_what_had_copies_open_and_nothing_else(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings())
    queued = cluster.submit(prompt(6, first=50), faults={"prefill.queue": 3000})
    cluster.run_for(10)
    cluster.transfer.silent = True
    lost = cluster.submit(prompt(9))
    until_sending(cluster)
    assert cluster.transfer.peer.incarnation == "t1"
    cluster.transfer.restart()
    begun_ns = cluster.clock.monotonic_ns()
    cluster.run_for(1200, turn_ms=10)  # the next question to the transfer process is due
    result = cluster.results[lost]
    for leg in LEGS:
        (closed,) = result.closed[leg]
        assert (closed.outcome, closed.reason, closed.by) == (
            "failed",
            "transfer_lost",
            "prefill-0",
        )
    assert "transfer-0 was started anew" in result.closed["decode-0"][0].message
    assert cluster.prefill.quarantine.num_handoffs_ever == 0, "its pages were free at once"
    assert cluster.decode.quarantine.num_handoffs_ever == 0
    cluster.settle()
    assert cluster.results[queued].outcome("decode-0") == "completed"
    assert cluster.clock.monotonic_ns() - begun_ns < 4 * S
    whole(cluster)


def test_pages_kept_from_a_dead_transfer_come_free_when_its_successor_answers(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(transfer_s=1, drain_s=2)))
    cluster.transfer.silent = True
    timed_out = cluster.submit(prompt(9))
    cluster.settle()
    assert cluster.results[timed_out].outcome("prefill-0") == "timed_out"
    assert cluster.prefill.quarantine.num_pages == cluster.decode.quarantine.num_pages == 3
    cluster.transfer.restart()
    cluster.run_for(1200, turn_ms=10)
    assert cluster.prefill.quarantine.num_pages == cluster.decode.quarantine.num_pages == 0
    whole(cluster)


def test_nothing_is_reserved_or_started_while_the_transfer_is_dead(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(reserve_s=5)))
    cluster.transfer.silent = True
    cluster.run_for(5000, turn_ms=100)
    assert not cluster.prefill.registration.known
    assert not cluster.decode.registration.known
    waits = cluster.submit(prompt(9))
    cluster.run_for(4000, turn_ms=100)
    assert [leg.state for leg in cluster.decode.legs] == [DecodeState.RESERVING]
    assert [leg.state for leg in cluster.prefill.legs] == [PrefillState.BOOTSTRAP]
    cluster.settle()
    result = cluster.results[waits]
    assert [(closed.outcome, closed.by) for closed in result.closed["prefill-0"]] == [
        ("timed_out", "decode-0")
    ]
    assert result.closed["decode-0"][0].message == (
        "decode-0: decode.reserve took longer than allowed"
    )
    assert not any(isinstance(message, CopyJob) for _, message in cluster.delivered)
    cluster.transfer.silent = False
    whole(cluster)


# -- the other leg's worker -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["prefill.queue", "prefill.compute"])
@pytest.mark.parametrize("dead", LEGS)
@pytest.mark.parametrize("successor", [False, True])
def test_other_worker_that_dies_ends_the_leg_that_waits_for_it(
    make_cluster: MakeCluster, stage: str, dead: str, successor: bool
) -> None:
    cluster = make_cluster(settings=settings())
    handoff_id = cluster.submit(prompt(9), faults={stage: 60_000})
    cluster.run_for(600, turn_ms=10)
    (left,) = set(LEGS) - {dead}
    if successor:
        cluster.restart(dead)
        limit_s = 1.0
    else:
        cluster.channels.cut.add(dead)
        limit_s = 4.5
    cluster.run_for(limit_s * 1000, turn_ms=20)
    result = cluster.results[handoff_id]
    (closed,) = result.closed[left]
    assert (closed.outcome, closed.reason, closed.by) == ("failed", "worker_lost", left)
    how = "was started anew" if successor else "cannot be reached"
    assert closed.message == f"{left}: {dead} {how}"
    cluster.channels.cut.clear()
    cluster.run_for(2000, turn_ms=50)
    if not successor:  # it was only cut off: it hears that the other leg is over
        assert result.reason(dead) == "worker_lost"
    whole(cluster)


def test_prefill_that_cannot_be_reached_for_a_moment_gets_the_pages_when_it_can(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings())
    cluster.channels.cut.add("prefill-0")
    handoff_id = cluster.submit(prompt(9))
    cluster.run_for(600, turn_ms=10)
    assert cluster.decode.ignored["unsent.PagesReserved"] >= 1
    cluster.channels.cut.clear()
    cluster.run_for(1000, turn_ms=10)
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(9), 4)
    whole(cluster)


def test_other_worker_that_is_silent_but_connected_is_given_up_after_a_while(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(peer_silence_s=20)))
    handoff_id = cluster.submit(prompt(9), faults={"prefill.queue": 60_000})
    cluster.run_for(600, turn_ms=10)
    cluster.channels.loses = lambda _to, message: isinstance(message, LegProbe | LegReport)
    cluster.run_for(19_000, turn_ms=200)
    assert len(cluster.decode.legs) == 1
    cluster.run_for(3000, turn_ms=200)
    reasons = {cluster.results[handoff_id].reason(leg) for leg in LEGS}
    assert reasons == {"worker_lost"}
    cluster.channels.loses = lambda _to, _message: False
    whole(cluster)


def test_worker_that_forgot_a_request_it_had_is_not_waited_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=settings())
    handoff_id = cluster.submit(prompt(9), faults={"prefill.queue": 60_000})
    cluster.run_for(1200, turn_ms=10)
    leg = cluster.prefill.legs[handoff_id]
    del cluster.prefill.legs._legs[handoff_id]  # pyright: ignore[reportPrivateUsage]
    cluster.run_for(1200, turn_ms=10)
    (closed,) = cluster.results[handoff_id].closed["decode-0"]
    assert closed.reason == "worker_lost"
    assert closed.message == "decode-0: prefill-0 knows nothing of the request any more"
    leg.trace.end()
    whole(cluster)


# -- whose time it is -----------------------------------------------------------------------------


def test_time_out_in_decode_s_queue_for_pages_is_decode_s_and_no_failed_handshake(
    make_cluster: MakeCluster,
) -> None:
    deadlines = Deadlines(reserve_s=40, handshake_s=5)
    cluster = make_cluster(settings=settings(deadlines=deadlines))
    handoff_id = cluster.submit(prompt(6), faults={"decode.reserve": 60_000})
    cluster.run_for(39_000, turn_ms=250)
    assert [leg.state for leg in cluster.prefill.legs] == [PrefillState.BOOTSTRAP]
    cluster.settle()
    result = cluster.results[handoff_id]
    for leg in LEGS:
        (closed,) = result.closed[leg]
        assert (closed.outcome, closed.by) == ("timed_out", "decode-0")
        assert closed.message == "decode-0: decode.reserve took longer than allowed"
    whole(cluster)


def test_handshake_is_timed_from_the_moment_that_the_pages_are_known(
    make_cluster: MakeCluster,
) -> None:
    deadlines = Deadlines(reserve_s=40, handshake_s=5)
    cluster = make_cluster(settings=settings(deadlines=deadlines))
    faults = {"decode.reserve": 20_000, "hop.publish": 30_000}
    begun_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(prompt(6), faults=faults)
    cluster.settle()
    (closed,) = cluster.results[handoff_id].closed["prefill-0"]
    assert (closed.outcome, closed.by) == ("timed_out", "prefill-0")
    assert closed.message == "prefill-0: prefill.bootstrap took longer than allowed"
    assert cluster.clock.monotonic_ns() - begun_ns == pytest.approx(25 * S, abs=S)
    whole(cluster)


def test_reservation_that_no_request_claims_is_forgotten_without_new_traffic(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(handshake_s=2)))
    cluster.submit(prompt(6))
    (request,) = (
        m for m in cluster.channels.waiting["gateway", "decode-0"] if isinstance(m, DecodeRequest)
    )
    cluster.channels.waiting.clear()
    cluster.hand("decode-0", request)
    cluster.run_for(3000, turn_ms=100)
    assert cluster.prefill.ignored["unknown.PagesReserved"] == 1
    whole(cluster)
