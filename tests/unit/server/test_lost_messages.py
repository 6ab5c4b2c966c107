"""A message between processes is lost, once or for ever: both legs end in bounded time, with a
reason, and nothing stays taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pdtrace.stages import Mark, Role
from server.config import Deadlines, Settings
from server.request import DecodeState, PrefillState
from server.wire.messages import (
    Abort,
    AnyMessage,
    Cancel,
    CancelCopies,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    DecodeRequest,
    Handoff,
    LegProbe,
    LegReport,
    PagesReserved,
    PrefillRequest,
    RegisterPool,
)
from tests.support.scheduler_bus import PAGE, Cluster

MakeCluster = Callable[..., Cluster]
S = 1_000_000_000
LEGS = ("prefill-0", "decode-0")


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill_pages": 32,
        "decode_pages": 32,
        "prefill_budget": 8,
        "reserve_output_tokens": 4,
        "max_running": 4,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


def lose(cluster: Cluster, kind: type[AnyMessage], receiver: str, *, count: int = 1) -> None:
    """The first `count` messages of a type to `receiver` are lost."""

    def lost(to: str, message: AnyMessage) -> bool:
        number = sum(type(other) is kind for other in cluster.channels.lost)
        return to == receiver and type(message) is kind and number < count

    cluster.channels.loses = lost


def whole(cluster: Cluster) -> None:
    """Nothing is held, and one more request is served."""
    cluster.channels.loses = lambda _receiver, _message: False
    cluster.transfer.silent = False
    for _ in range(200):
        if not cluster.prefill.quarantine.num_pages + cluster.decode.quarantine.num_pages:
            break
        cluster.run_for(250, turn_ms=250)
    cluster.check()
    assert cluster.decode.allocator.num_used == 0
    probe = cluster.submit(prompt(7, first=90))
    cluster.settle()
    assert cluster.results[probe].tokens == cluster.expected(prompt(7, first=90), 4)


@dataclass(frozen=True, slots=True)
class Loss:
    """What comes of one lost message: outcome and reason of both legs, and in what time."""

    kind: type[AnyMessage]
    receiver: str
    outcome: str
    reason: str
    within_s: float


REPAIRED = "completed"
LOSSES = [
    Loss(PagesReserved, "prefill-0", REPAIRED, REPAIRED, 2),
    Loss(Handoff, "decode-0", REPAIRED, REPAIRED, 2),
    Loss(CopyDone, "decode-0", REPAIRED, REPAIRED, 2),
    Loss(CopyDone, "prefill-0", REPAIRED, REPAIRED, 2),
    Loss(LegProbe, "prefill-0", REPAIRED, REPAIRED, 2),
    Loss(LegReport, "decode-0", REPAIRED, REPAIRED, 2),
    Loss(DecodeRequest, "decode-0", "timed_out", "deadline_exceeded", 31),
    Loss(PrefillRequest, "prefill-0", "timed_out", "deadline_exceeded", 31),
    Loss(CopyJob, "transfer", REPAIRED, REPAIRED, 3),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind.__name__}-{loss.receiver}")
def test_lost_message_is_made_good_or_ends_both_legs_by_a_deadline(
    make_cluster: MakeCluster, loss: Loss
) -> None:
    cluster = make_cluster(settings=settings(), step_ms=1)
    lose(cluster, loss.kind, loss.receiver)
    begun_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(prompt(6), faults={"prefill.compute": 700})
    cluster.settle()
    assert len(cluster.channels.lost) == 1
    result = cluster.results[handoff_id]
    known = [leg for leg in LEGS if leg in result.closed]
    assert {(result.outcome(leg), result.reason(leg)) for leg in known} == {
        (loss.outcome, loss.reason)
    }
    assert cluster.clock.monotonic_ns() - begun_ns <= loss.within_s * S
    if loss.outcome == REPAIRED:
        assert result.tokens == cluster.expected(prompt(6), 4)
    whole(cluster)


@pytest.mark.parametrize(
    ("kind", "lost_from"), [(DecodeRequest, "prefill-0"), (PrefillRequest, "decode-0")]
)
def test_leg_whose_other_one_was_never_asked_for_says_who_did_not_get_the_request(
    make_cluster: MakeCluster, kind: type[AnyMessage], lost_from: str
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(handshake_s=5)))
    lose(cluster, kind, "decode-0" if kind is DecodeRequest else "prefill-0")
    handoff_id = cluster.submit(prompt(6))
    cluster.settle()
    (closed,) = cluster.results[handoff_id].closed[lost_from]
    (other,) = set(LEGS) - {lost_from}
    assert closed.message == f"{lost_from}: {other} did not get the request in 5 s"
    # The request may still come: what is over here refuses it at once.
    (late,) = cluster.channels.lost
    cluster.channels.loses = lambda _receiver, _message: False
    cluster.channels.put("gateway", other, late)
    cluster.settle()
    assert cluster.results[handoff_id].outcome(other) == "timed_out"
    whole(cluster)


@pytest.mark.parametrize("direction", [("prefill-0", "decode-0"), ("decode-0", "prefill-0")])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.case("CAN-06")
def test_hundred_legs_that_end_on_one_side_end_on_the_other_within_a_second(
    make_cluster: MakeCluster, direction: tuple[str, str], lost: bool
) -> None:
    """Also if none of the messages that tell of it arrives."""
    by, other = direction
    cluster = make_cluster(settings=settings(decode_pages=400, prefill_pages=400))
    fault = {"prefill.queue": 60_000}
    handoffs = [cluster.submit(prompt(6, first=i), faults=fault) for i in range(100)]
    cluster.run_for(700, turn_ms=10)
    assert {leg.state for leg in cluster.decode.legs} == {DecodeState.AWAITING_KV}
    assert {leg.state for leg in cluster.prefill.legs} == {PrefillState.QUEUED}
    if lost:
        lose(cluster, Abort, other, count=100)
    for handoff_id in handoffs:
        message = Cancel(
            handoff_id=handoff_id,
            outcome="failed",
            reason="fault",
            by=by,
            gateway=cluster.gateway,
        )
        cluster.channels.put("gateway", by, message)
    cluster.run_for(1000, turn_ms=10)
    assert len(cluster.channels.lost) == (100 if lost else 0)
    for handoff_id in handoffs:
        result = cluster.results[handoff_id]
        for leg in LEGS:
            assert (result.outcome(leg), result.reason(leg)) == ("failed", "fault")
    aborted = [r for r in cluster.marks(Role.DECODE) if r.mark is Mark.ABORTED]
    assert len(aborted) == 100
    whole(cluster)


@pytest.mark.parametrize(
    ("kind", "receiver"), [(CancelCopies, "transfer"), (CopiesDrained, "decode-0")]
)
def test_lost_drain_leaves_pages_out_of_use_until_it_is_asked_for_again(
    make_cluster: MakeCluster, kind: type[AnyMessage], receiver: str
) -> None:
    cluster = make_cluster(settings=settings())
    handoff_id = cluster.submit(prompt(6), faults={"prefill.queue": 60_000})
    cluster.run_for(20)

    def lost(to: str, message: AnyMessage) -> bool:
        about = getattr(message, "handoff_id", "") == handoff_id
        return to == receiver and type(message) is kind and about and not cluster.channels.lost

    cluster.channels.loses = lost
    cluster.cancel(handoff_id)
    cluster.settle()
    assert len(cluster.channels.lost) == 1
    assert cluster.results[handoff_id].outcome("decode-0") == "cancelled"
    assert cluster.decode.quarantine.num_pages == 3
    cluster.run_for(11_000, turn_ms=250)
    assert cluster.decode.quarantine.num_pages == 0
    whole(cluster)


def test_lost_failure_of_a_copy_ends_by_the_deadline_of_the_transfer(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(transfer_s=3)))
    cluster.channels.loses = lambda _receiver, message: isinstance(message, CopyFailed)
    cluster.transfer.fail_next = "peer_lost"
    begun_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(prompt(6))
    cluster.settle()
    result = cluster.results[handoff_id]
    assert [(closed.outcome, closed.by) for closed in result.closed["decode-0"]] == [
        ("timed_out", "prefill-0")
    ]
    assert result.closed["prefill-0"][0].message == "prefill-0: transfer took longer than allowed"
    assert cluster.clock.monotonic_ns() - begun_ns < 4 * S
    whole(cluster)


def test_lost_registration_of_a_running_transfer_process_costs_nothing(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings())
    lose(cluster, RegisterPool, "transfer", count=3)
    cluster.run_for(4000, turn_ms=100)
    assert len(cluster.channels.lost) == 3
    whole(cluster)


def test_handoff_that_never_arrives_fails_decode_soon_and_says_what_is_lacking(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings())
    lose(cluster, Handoff, "decode-0", count=1000)
    begun_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(prompt(6))
    cluster.settle()
    result = cluster.results[handoff_id]
    assert result.outcome("prefill-0") == "completed"
    (closed,) = result.closed["decode-0"]
    assert (closed.outcome, closed.reason) == ("failed", "handoff_lost")
    assert closed.message == "prefill-0 has sent everything, the handoff did not arrive"
    assert cluster.clock.monotonic_ns() - begun_ns < 4 * S
    whole(cluster)


def test_what_waits_long_and_well_is_sent_nothing_twice(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=settings())
    faults = {"decode.reserve": 4000, "prefill.queue": 4000, "prefill.compute": 4000}
    handoff_id = cluster.submit(prompt(6), faults=faults)
    cluster.settle()
    assert cluster.results[handoff_id].outcome("decode-0") == "completed"
    assert not cluster.prefill.ignored
    assert not cluster.decode.ignored
    probes = [m for _, m in cluster.delivered if isinstance(m, LegProbe)]
    assert 20 <= len(probes) <= 100
