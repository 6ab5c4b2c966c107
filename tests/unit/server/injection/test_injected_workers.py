"""Real workers on a bus, with faults: what is hit, and that nothing leaks whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from server.injection.fault import Delay, Direction, Drop, Fault, Pause, Place, Raise, Repeat
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
