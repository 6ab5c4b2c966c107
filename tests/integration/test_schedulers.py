"""Prefill, transfer, decode and colocated workers as real processes over real sockets.

The test plays the gateway. Tokens of the fake engine are a hash of the KV pages, so that right
tokens mean that every page was copied whole, to its place, and before it was read.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdtrace.ring.reader import RingReader
from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark
from server.engine.base import SamplingParams
from server.engine.fake import expected_tokens
from tests.support.scheduler_processes import START_S, Processes, running_processes

pytestmark = pytest.mark.server

SAMPLED = SamplingParams(temperature=0.9, seed=3)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def marks(processes: Processes, instance: str) -> list[MarkRecord]:
    (path,) = processes.settings.rings_path.glob(f"{instance}-*.ring")
    reader = RingReader(path)
    try:
        return [record for record in reader.read() if isinstance(record, MarkRecord)]
    finally:
        reader.close()


@pytest.fixture(scope="module")
def pd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    run_dir = tmp_path_factory.mktemp("pd")
    with running_processes(run_dir) as processes:
        yield processes
        assert set(processes.stop().values()) == {0}
        for instance in processes.legs:
            assert "is not whole" not in processes.log(instance)
            assert "Traceback" not in processes.log(instance)


def test_thirty_requests_at_once_get_their_own_tokens(pd: Processes) -> None:
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    for i, length in enumerate([1, 3, 4, 5, 15, 16, 17, 60, 100, 33] * 3):
        token_ids = prompt(length, first=i % 4)
        sampling = SAMPLED if i % 3 == 0 else SamplingParams()
        handoff_id = pd.submit(token_ids, max_tokens=12, sampling=sampling, early=i % 2 == 0)
        asked[handoff_id] = (token_ids, sampling)
    pd.wait_closed(*asked)
    for i, (handoff_id, (token_ids, sampling)) in enumerate(asked.items()):
        answer = pd.answers[handoff_id]
        assert answer.endings == {"completed"}
        assert answer.tokens == expected_tokens(token_ids, 12, sampling)
        assert answer.finish_reason == "length"
        assert answer.first_from == ("prefill-0" if i % 2 == 0 else "decode-0")


def test_more_output_than_the_pool_holds_is_preempted_and_still_right(pd: Processes) -> None:
    asked = {pd.submit(prompt(8, first=i), max_tokens=100): i for i in range(4)}
    pd.wait_closed(*asked)
    for handoff_id, first in asked.items():
        assert pd.answers[handoff_id].endings == {"completed"}
        assert pd.answers[handoff_id].tokens == expected_tokens(prompt(8, first=first), 100)
    assert Mark.PREEMPTED in {record.mark for record in marks(pd, "decode-0")}


@pytest.mark.parametrize(
    "fault", ["decode.reserve", "prefill.queue", "transfer", "decode.queue", "decode.gap"]
)
def test_client_that_leaves_frees_both_legs_wherever_the_request_is(
    pd: Processes, fault: str
) -> None:
    gone = pd.submit(prompt(20), max_tokens=40, faults={fault: 20_000})
    pd.listen(0.3)
    assert pd.answers[gone].closed.keys() < {"prefill-0", "decode-0"}
    pd.cancel(gone)
    pd.wait_closed(gone)
    assert pd.answers[gone].closed["decode-0"].outcome == "cancelled"
    after = pd.submit(prompt(200, first=9), max_tokens=8)  # needs most of the pool
    pd.wait_closed(after)
    assert pd.answers[after].tokens == expected_tokens(prompt(200, first=9), 8)


def test_request_too_large_for_decode_is_refused_at_once_on_both_legs(pd: Processes) -> None:
    handoff_id = pd.submit(prompt(20), max_tokens=1000)
    pd.wait_closed(handoff_id)
    closed = pd.answers[handoff_id].closed
    assert {(leg.outcome, leg.reason) for leg in closed.values()} == {("rejected", "kv_capacity")}


def test_transfer_that_hangs_times_out_and_serving_goes_on_when_it_wakes(tmp_path: Path) -> None:
    deadlines = {"transfer_s": 3.0, "await_kv_s": 6.0, "drain_s": 1.0}
    with running_processes(tmp_path, deadlines=deadlines) as processes:
        processes.wait_closed(processes.submit(prompt(3)))  # the pools are registered
        processes.send_signal("transfer-0", signal.SIGSTOP)
        stuck = processes.submit(prompt(20))
        processes.wait_closed(stuck)
        outcomes = {closed.outcome for closed in processes.answers[stuck].closed.values()}
        assert outcomes == {"timed_out"}
        processes.send_signal("transfer-0", signal.SIGCONT)
        processes.listen(0.5)
        asked = [processes.submit(prompt(60, first=i), max_tokens=8) for i in range(6)]
        processes.wait_closed(*asked)
        for i, handoff_id in enumerate(asked):
            answer = processes.answers[handoff_id]
            assert answer.tokens == expected_tokens(prompt(60, first=i), 8)
        assert set(processes.stop().values()) == {0}


def test_requests_wait_for_a_transfer_process_that_comes_last(tmp_path: Path) -> None:
    with running_processes(tmp_path, start=False) as processes:
        processes.start_some(*processes.legs)
        processes.wait_until(lambda: set(processes.legs) <= set(processes.peers), START_S)
        early = processes.submit(prompt(20))
        processes.listen(1.0)  # by then the workers' sockets retry at long intervals
        processes.start_some("transfer-0")
        processes.wait_until(lambda: "transfer-0" in processes.peers, START_S)
        late = processes.submit(prompt(21))
        processes.wait_closed(early, late)
        for handoff_id, length in ((early, 20), (late, 21)):
            assert processes.answers[handoff_id].endings == {"completed"}
            assert processes.answers[handoff_id].tokens == expected_tokens(prompt(length), 8)


def test_sigterm_answers_requests_in_flight_and_exits_cleanly(tmp_path: Path) -> None:
    with running_processes(tmp_path, deadlines={"stop_s": 6.0}) as processes:
        quick = processes.submit(prompt(9), max_tokens=200)
        stuck = processes.submit(prompt(9), faults={"decode.queue": 50_000})
        processes.wait_until(lambda: len(processes.answers[quick].token_at) > 2)
        processes.send_signal("decode-0", signal.SIGTERM)
        assert processes.wait_exit("decode-0", timeout_s=30) == 0
        assert processes.answers[quick].tokens == expected_tokens(prompt(9), 200)
        closed = processes.answers[stuck].closed
        assert (closed["decode-0"].outcome, closed["decode-0"].reason) == (
            "failed",
            "draining",
        )
        names = [record.mark for record in marks(processes, "decode-0")]
        assert names.count(Mark.DECODE_RELEASED) == names.count(Mark.ABORTED) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_colocated_worker_gives_the_tokens_of_pd(tmp_path: Path, chunked: bool) -> None:
    with running_processes(tmp_path, mode="colocated", chunked=chunked) as processes:
        lengths = [1, 15, 16, 17, 100, 60, 60]
        asked = {
            processes.submit(prompt(length), max_tokens=12, sampling=SAMPLED): length
            for length in lengths
        }
        processes.wait_closed(*asked)
        for handoff_id, length in asked.items():
            answer = processes.answers[handoff_id]
            assert answer.tokens == expected_tokens(prompt(length), 12, SAMPLED)
        assert processes.stop() == {"worker-0": 0}
