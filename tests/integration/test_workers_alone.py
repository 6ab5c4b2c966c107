"""Prefill, transfer and decode as real processes that must notice by themselves that another one is
gone or has given up: the test plays a gateway that does not tell them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from pdtrace.ring.reader import RingReader
from pdtrace.ring.records import MarkRecord, OpenRecord
from pdtrace.stages import Gauge, Mark
from server.engine.fake import expected_tokens
from tests.support.scheduler_processes import START_S, Processes, running_processes

pytestmark = pytest.mark.server

HELD_MS = 50_000
GENEROUS_S = 60.0


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with running_processes(
        tmp_path_factory.mktemp("alone"),
        deadlines={"prefill_queue_s": 3.0},
        prefill_pages=512,
        decode_pages=512,
    ) as processes:
        processes.answers_beats = True
        yield processes
        assert set(processes.stop().values()) == {0}
        for instance in processes.legs:
            assert "is not whole" not in processes.log(instance)
            assert "Traceback" not in processes.log(instance)


def gauges(processes: Processes, instance: str) -> dict[Gauge, int]:
    rings = processes.settings.rings_path.glob(f"{instance}-*.ring")
    with RingReader(max(rings, key=lambda path: path.stat().st_ctime_ns)) as reader:
        return reader.gauges()  # of its present life


def aborts(processes: Processes, instance: str) -> dict[str, MarkRecord]:
    """The mark with which each handoff was given up."""
    (path,) = processes.settings.rings_path.glob(f"{instance}-*.ring")
    found: dict[str, MarkRecord] = {}
    names: dict[int, str] = {}
    with RingReader(path) as reader:
        for record in reader.read(limit=10**9):
            if isinstance(record, OpenRecord):
                names[record.key] = record.context.handoff_id
            elif isinstance(record, MarkRecord) and record.mark is Mark.ABORTED:
                found[names[record.key]] = record
    return found


def num_computed(processes: Processes) -> int:
    """Prompts that prefill has computed so far."""
    (path,) = processes.settings.rings_path.glob("prefill-0-*.ring")
    with RingReader(path) as reader:
        records = reader.read(limit=10**9)
    return sum(isinstance(r, MarkRecord) and r.mark is Mark.PREFILL_FINISHED for r in records)


def check_recovered(processes: Processes) -> None:
    """Nothing is held, and requests are served."""
    asked = [processes.submit(prompt(20, first=i), max_tokens=8) for i in range(5)]
    processes.wait_closed(*asked, timeout_s=GENEROUS_S)
    for number, handoff_id in enumerate(asked):
        answer = processes.answers[handoff_id]
        assert answer.endings == {"completed"}
        assert answer.tokens == expected_tokens(prompt(20, first=number), 8)

    def idle() -> bool:
        prefill, decode = (gauges(processes, leg) for leg in processes.legs)
        return (
            decode[Gauge.KV_PAGES_FREE] == decode[Gauge.KV_PAGES_TOTAL]
            and prefill[Gauge.KV_PAGES_USED] == 0
            and prefill[Gauge.HELD_PAGES] == decode[Gauge.HELD_PAGES] == 0
            and prefill[Gauge.IN_FLIGHT] == decode[Gauge.IN_FLIGHT] == 0
            and prefill[Gauge.WAITING] == decode[Gauge.WAITING] == 0
        )

    processes.wait_until(idle, GENEROUS_S)


@pytest.mark.case("CAN-06")
def test_hundred_requests_that_end_on_the_prefill_side_end_on_the_other_at_once(
    processes: Processes,
) -> None:
    """By a deadline of prefill's. Decode would wait for KV for 480 s."""
    asked = [
        processes.submit(prompt(6, first=i), faults={"prefill.queue": HELD_MS}) for i in range(100)
    ]
    processes.wait_closed(*asked, timeout_s=GENEROUS_S)
    for handoff_id in asked:
        for closed in processes.answers[handoff_id].closed.values():
            assert (closed.outcome, closed.reason) == ("timed_out", "deadline_exceeded")
            assert closed.by == "prefill-0"
            assert closed.message == "prefill-0: prefill.queue took longer than allowed"
    here, there = aborts(processes, "prefill-0"), aborts(processes, "decode-0")
    late_s = [(there[handoff_id].t_ns - here[handoff_id].t_ns) / 1e9 for handoff_id in asked]
    assert max(late_s) < GENEROUS_S  # a second on a machine that does nothing else
    check_recovered(processes)


def test_requests_of_a_gateway_that_answers_no_more_end_as_lost(processes: Processes) -> None:
    faults = ({"prefill.compute": HELD_MS}, {"decode.queue": HELD_MS}, {"decode.gap": HELD_MS})
    asked = [processes.submit(prompt(9, first=i), faults=f) for i, f in enumerate(faults)]
    processes.listen(1.0)
    processes.answers_beats = False
    processes.wait_closed(*asked, timeout_s=GENEROUS_S)
    processes.answers_beats = True
    for handoff_id in asked:
        closed = processes.answers[handoff_id].closed["decode-0"]
        assert (closed.outcome, closed.reason, closed.by) == ("lost", "gateway_lost", "gateway-0")
    check_recovered(processes)


def test_transfer_process_that_is_killed_and_started_anew_costs_what_had_copies_open(
    processes: Processes,
) -> None:
    computed = num_computed(processes)
    processes.send_signal("transfer-0", signal.SIGSTOP)
    lost = [processes.submit(prompt(30, first=i)) for i in range(3)]
    processes.wait_until(lambda: num_computed(processes) == computed + len(lost), GENEROUS_S)
    processes.listen(1.0)  # their copy jobs are with the transfer process
    processes.send_signal("transfer-0", signal.SIGKILL)
    assert processes.wait_exit("transfer-0") == -signal.SIGKILL
    del processes.peers["transfer-0"]
    processes.start_some("transfer-0", life=2)
    processes.wait_until(lambda: "transfer-0" in processes.peers, START_S)
    processes.wait_closed(*lost, timeout_s=GENEROUS_S)
    for handoff_id in lost:
        for closed in processes.answers[handoff_id].closed.values():
            assert (closed.outcome, closed.reason, closed.by) == (
                "failed",
                "transfer_lost",
                "prefill-0",
            )
    check_recovered(processes)


def test_prefill_that_is_killed_ends_what_waits_for_it(processes: Processes) -> None:
    waits = processes.submit(prompt(9), faults={"prefill.compute": HELD_MS})
    generates = processes.submit(prompt(9, first=5), max_tokens=400)
    processes.wait_until(lambda: len(processes.answers[generates].token_at) > 2)
    processes.listen(1.0)
    processes.send_signal("prefill-0", signal.SIGKILL)
    processes.wait_exit("prefill-0")
    processes.wait_until(
        lambda: "decode-0" in processes.answers[waits].closed, timeout_s=GENEROUS_S
    )
    closed = processes.answers[waits].closed["decode-0"]
    assert (closed.outcome, closed.reason) == ("failed", "worker_lost")
    assert closed.message == "decode-0: prefill-0 cannot be reached"
    processes.wait_until(
        lambda: "decode-0" in processes.answers[generates].closed, timeout_s=GENEROUS_S
    )
    assert processes.answers[generates].tokens == expected_tokens(prompt(9, first=5), 400)
    processes.start_some("prefill-0", life=2)
    processes.wait_until(
        lambda: processes.peers["prefill-0"].incarnation == "prefill-0-2", timeout_s=START_S
    )
    check_recovered(processes)
