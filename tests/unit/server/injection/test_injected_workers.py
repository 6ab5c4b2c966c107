"""Real workers on a bus, with faults: what is hit, and that nothing leaks whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, Role, WaitReason
from server.injection.fault import (
    Delay,
    Direction,
    Drop,
    Fault,
    Freeze,
    Pause,
    Place,
    Raise,
    Repeat,
    Shrink,
)
from server.injection.injector import InjectedError
from server.wire.messages import InjectFaults
from tests.support.scheduler_bus import Cluster

PROMPT = (3, 1, 4, 1, 5, 9)
MS = 1_000_000


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(faulty=True)


def test_a_cluster_without_armed_faults_serves_as_ever(cluster: Cluster) -> None:
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 4)
    assert not any(injector.injected for injector in cluster.injectors.values())


@pytest.mark.parametrize(
    "fault",
    [
        Delay(at="decode-0", message="CopyDone", ms=40),
        Delay(at="decode-0", message="Handoff", ms=40),
        Repeat(at="decode-0", message="CopyDone"),
        Repeat(at="prefill-0", message="PagesReserved", ms=3),
        Delay(at="decode-0", message="PagesReserved", direction=Direction.SENT, ms=40),
        Repeat(at="prefill-0", message="CopyJob", direction=Direction.SENT),
        Repeat(at="prefill-0", message="Handoff", direction=Direction.SENT, ms=30),
    ],
    ids=lambda fault: f"{type(fault).__name__}-{fault.message}-{fault.direction}",
)
def test_late_and_repeated_messages_change_no_answer(cluster: Cluster, fault: Fault) -> None:
    cluster.inject(fault)
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 4)
    assert sum(cluster.injectors[fault.at].injected.values()) == 1


def test_a_message_that_is_lost_each_time_ends_the_leg_and_no_other(cluster: Cluster) -> None:
    cluster.inject(Drop(at="decode-0", message="Handoff", count=None))
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[handoff_id].outcome("decode-0") in {"failed", "timed_out"}
    assert cluster.results[handoff_id].token_at == {}
    cluster.injectors["decode-0"].obey(InjectFaults(clear=True))
    after = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[after].tokens == cluster.expected(PROMPT, 4)


@pytest.mark.parametrize("instance", ["prefill-0", "decode-0"])
def test_a_raise_in_a_messages_handling_fails_that_request_alone(
    cluster: Cluster, instance: str
) -> None:
    message = {"prefill-0": "PagesReserved", "decode-0": "Handoff"}[instance]
    cluster.inject(Raise(at=instance, place=Place.MESSAGE, message=message))
    first, second = cluster.submit(PROMPT), cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[first].reason(instance) == "internal"
    assert cluster.results[second].tokens == cluster.expected(PROMPT, 4)


def test_a_cancel_that_raises_ends_its_request_and_is_answered(cluster: Cluster) -> None:
    cluster.inject(Raise(place=Place.MESSAGE, message="Cancel"))
    first, second = cluster.submit(PROMPT, max_tokens=20), cluster.submit(PROMPT)
    cluster.step()
    cluster.cancel(first)
    cluster.settle()
    result = cluster.results[first]
    assert [result.reason(name) for name in cluster.workers] == ["internal", "internal"]
    assert cluster.results[second].tokens == cluster.expected(PROMPT, 4)


def test_an_answer_to_a_heartbeat_that_raises_is_lost_alone(cluster: Cluster) -> None:
    cluster.inject(Raise(place=Place.MESSAGE, message="HeartbeatAck"))
    handoff_id = cluster.submit(PROMPT)
    cluster.answer_beats()
    cluster.settle()
    assert [injector.injected for injector in cluster.injectors.values()] == [
        {"raise.message": 1},
        {"raise.message": 1},
    ]
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 4)


HELD_BY = {
    "hop.dispatch": "decode-0",
    "decode.reserve": "decode-0",
    "hop.publish": "prefill-0",
    "prefill.queue": "prefill-0",
    "prefill.compute": "prefill-0",
    "hop.notice": "decode-0",
    "decode.queue": "decode-0",
    "decode.first": "decode-0",
    "decode.generate": "decode-0",
    "decode.gap": "decode-0",
}


@pytest.mark.parametrize("stage", HELD_BY)
def test_a_frozen_stage_holds_one_request_in_whoever_owns_it(cluster: Cluster, stage: str) -> None:
    began_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    usual_ns = cluster.clock.monotonic_ns() - began_ns

    cluster.inject(Freeze(stage=stage, ms=700))
    began_ns = cluster.clock.monotonic_ns()
    handoff_id = cluster.submit((9, *PROMPT[1:]))
    cluster.settle()
    took_ns = cluster.clock.monotonic_ns() - began_ns
    assert 700 * MS <= took_ns <= 700 * MS + usual_ns + 500 * MS
    assert cluster.results[handoff_id].tokens == cluster.expected((9, *PROMPT[1:]), 4)
    assert {name: dict(injector.injected) for name, injector in cluster.injectors.items()} == {
        name: {f"freeze.{stage}": 1} if name == HELD_BY[stage] else {} for name in cluster.workers
    }


def test_a_frozen_stage_holds_the_requests_that_match_and_no_other(cluster: Cluster) -> None:
    cluster.inject(Freeze(stage="decode.queue", ms=5000, request="r2"))
    handoffs = [cluster.submit((n, *PROMPT)) for n in range(3)]
    cluster.run_for(1000)
    done = [bool(cluster.results[handoff_id].finish_reasons) for handoff_id in handoffs]
    assert done == [True, False, True]
    waits = [
        record.values[:2]
        for record in cluster.rings.records(Role.DECODE)
        if isinstance(record, MarkRecord) and record.mark is Mark.WAITING
    ]
    assert ("decode.queue", WaitReason.INJECTED) in waits
    cluster.settle()
    assert cluster.results[handoffs[1]].tokens == cluster.expected((1, *PROMPT), 4)


def test_a_request_that_is_in_a_stage_already_can_be_frozen_and_let_go(cluster: Cluster) -> None:
    cluster.inject(Freeze(stage="prefill.queue", ms=3_600_000))
    handoff_id = cluster.submit(PROMPT)
    cluster.run_for(500, turn_ms=50)
    assert cluster.results[handoff_id].tokens == []
    cluster.injectors["prefill-0"].obey(InjectFaults(clear=True))
    cluster.inject(Freeze(stage="prefill.queue", ms=600))  # the same request, anew
    cluster.run_for(500, turn_ms=50)
    assert cluster.results[handoff_id].tokens == []
    began_ns = cluster.clock.monotonic_ns()
    cluster.settle()
    assert cluster.clock.monotonic_ns() - began_ns < 1000 * MS
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 4)


def test_a_stage_frozen_for_longer_than_its_deadline_times_out(cluster: Cluster) -> None:
    cluster.inject(Freeze(stage="decode.queue", ms=3_600_000))
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[handoff_id].outcome("decode-0") == "timed_out"


@pytest.mark.parametrize("at", ["prefill-0", "decode-0"])
def test_a_pool_that_has_shrunk_keeps_requests_waiting_until_it_is_whole_again(
    cluster: Cluster, at: str
) -> None:
    warm = cluster.submit(PROMPT)  # leaves pages in the prefix cache
    cluster.settle()
    assert cluster.results[warm].tokens == cluster.expected(PROMPT, 4)
    cluster.inject(Shrink(at=at, pages=1000))
    handoff_id = cluster.submit((7, *PROMPT))
    cluster.run_for(1000, turn_ms=50)
    worker = cluster.workers[at]
    assert worker.allocator.num_free == 0
    assert cluster.injectors[at].injected == {"shrink": 1}
    assert cluster.results[handoff_id].tokens == []
    worker.check_integrity()
    cluster.injectors[at].obey(InjectFaults(clear=True))
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected((7, *PROMPT), 4)


def test_pages_in_use_go_once_they_are_free(cluster: Cluster) -> None:
    allocator = cluster.decode.allocator
    handoff_id = cluster.submit(PROMPT, max_tokens=12)
    while cluster.decode.allocator.num_used == 0:
        cluster.step()
    in_use = allocator.num_used
    cluster.inject(Shrink(at="decode", pages=allocator.num_pages - 1))
    cluster.step()
    assert allocator.num_free == 0
    cluster.settle()
    assert allocator.num_free == 1
    assert in_use > 1
    assert cluster.results[handoff_id].outcome("decode-0") in {"completed", "timed_out"}
    cluster.injectors["decode-0"].obey(InjectFaults(clear=True))
    cluster.step()
    assert allocator.num_free == allocator.num_pages


def test_colocated_workers_freeze_and_shrink_alike(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(faulty=True, colocated=True)
    cluster.inject(Freeze(stage="prefill.queue", ms=300), Shrink(pages=1000, after_ms=400))
    began_ns = cluster.clock.monotonic_ns()
    first = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.clock.monotonic_ns() - began_ns >= 300 * MS
    assert cluster.results[first].tokens == cluster.expected(PROMPT, 4)
    cluster.clock.advance(ms=400)
    second = cluster.submit((7, *PROMPT))
    cluster.run_for(500, turn_ms=50)
    assert cluster.results[second].tokens == []
    cluster.injectors["worker-0"].obey(InjectFaults(clear=True))
    cluster.settle()
    assert cluster.results[second].tokens == cluster.expected((7, *PROMPT), 4)


def test_a_raise_in_the_engine_fails_the_step_s_requests(cluster: Cluster) -> None:
    cluster.inject(Raise(at="prefill-0", place=Place.ENGINE))
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[handoff_id].reason("prefill-0") == "engine_error"


def test_a_raise_in_a_turn_comes_before_anything_is_taken_in(cluster: Cluster) -> None:
    cluster.inject(Raise(at="decode-0", place=Place.STEP))
    handoff_id = cluster.submit(PROMPT)
    cluster.deliver_all()
    with pytest.raises(InjectedError, match="injected in step"):
        cluster.decode.step(0)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 4)


def test_a_paused_loop_stands_still_for_as_long(cluster: Cluster) -> None:
    begin_ns = cluster.clock.monotonic_ns()
    cluster.inject(Pause(at="decode", ms=250, after_ms=20))
    cluster.decode.step(0)
    assert cluster.clock.monotonic_ns() == begin_ns
    cluster.clock.advance(ms=20)
    cluster.decode.step(0)
    assert cluster.clock.monotonic_ns() == begin_ns + 270 * MS
    cluster.decode.step(0)
    assert cluster.clock.monotonic_ns() == begin_ns + 270 * MS


def test_everything_injected_is_a_line_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.inject(
        Repeat(at="decode-0", message="CopyDone"),
        Raise(at="prefill-0", place=Place.ENGINE, nth=2),
        Pause(at="decode", ms=250),
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="server.injection"):
        cluster.submit(PROMPT)
        cluster.submit((2, *PROMPT))
        cluster.settle()
    lines = [r.message for r in caplog.records if r.name.startswith("server.injection")]
    assert sorted(lines) == [
        "injected: CopyDone received number 1 comes again, 0 ms later",
        "injected: call number 2 of engine raises",
        "injected: the loop stands still for 250 ms",
    ]


def test_a_worker_that_allows_no_faults_ignores_them_and_says_so(
    make_cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster()
    cluster.hand("decode-0", InjectFaults(faults=(Drop(message="CopyDone"),)))
    handoff_id = cluster.submit(PROMPT)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 4)
    assert cluster.decode.ignored == {"unexpected.InjectFaults": 1}
    assert "decode-0 does not allow faults: InjectFaults is ignored" in caplog.text
