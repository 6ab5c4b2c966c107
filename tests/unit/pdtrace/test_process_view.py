"""How a process stands, from its ring's header."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from pdtrace.clock import ClockAnchor
from pdtrace.inflight import Halt, InFlight, ProcessNow, ProcessState
from pdtrace.live.process_view import (
    STALLED_AFTER_S,
    needed_by,
    process_now,
    processes_gone,
    standing,
)
from pdtrace.ring import WriterState
from pdtrace.ring.identity import make_identity
from pdtrace.ring.losses import RingLosses, WriterEnd
from pdtrace.stages import Gauge, Role

IDENTITY = make_identity(role=Role.DECODE, instance="decode-0", resource={})


def old(seconds: float) -> dict[Gauge, int]:
    return {Gauge.LAST_PROGRESS_NS: time.monotonic_ns() - round(seconds * 1e9)}


@pytest.mark.parametrize(
    ("age_s", "work", "open_requests", "is_needed", "state"),
    [
        (STALLED_AFTER_S * 50, {}, 0, False, ProcessState.ALIVE),
        (STALLED_AFTER_S * 50, {}, 1, False, ProcessState.STALLED),
        (STALLED_AFTER_S * 50, {}, 0, True, ProcessState.STALLED),
        (STALLED_AFTER_S * 50, {Gauge.RUNNING: 1}, 0, False, ProcessState.STALLED),
        (STALLED_AFTER_S * 50, {Gauge.COPY_JOBS_WAITING: 2}, 0, False, ProcessState.STALLED),
        (0.0, {Gauge.RUNNING: 1}, 1, True, ProcessState.ALIVE),
    ],
)
def test_process_with_work_that_does_not_go_round_is_stalled(
    age_s: float,
    work: dict[Gauge, int],
    open_requests: int,
    is_needed: bool,
    state: ProcessState,
) -> None:
    gauges = {**old(age_s), **work}
    shown = process_now(
        IDENTITY,
        WriterState.ALIVE,
        gauges,
        open_requests=open_requests,
        is_needed=is_needed,
    )
    assert shown.state is state
    assert shown.progress_age_s == pytest.approx(age_s, abs=60)


def test_process_that_says_nothing_of_its_progress_is_alive() -> None:
    shown = process_now(IDENTITY, WriterState.ALIVE, {Gauge.RUNNING: 3}, open_requests=9)
    assert (shown.state, shown.progress_age_s) == (ProcessState.ALIVE, None)
    assert shown.gauges == {"running": 3}


def test_ended_processes() -> None:
    for writer, state in (
        (WriterState.CLOSED, ProcessState.CLOSED),
        (WriterState.DEAD, ProcessState.LOST),
    ):
        shown = process_now(IDENTITY, writer, old(900), open_requests=2)
        assert (shown.state, shown.progress_age_s, shown.open_requests) == (state, None, 2)


def test_progress_on_another_host_is_told_by_wall_time() -> None:
    now_ns = time.time_ns()
    anchor = ClockAnchor(monotonic_ns=5_000_000_000, wall_ns=now_ns - 100_000_000_000)
    other = msgspec.structs.replace(IDENTITY, host_id="another", anchor=anchor)
    gauges = {Gauge.LAST_PROGRESS_NS: 5_000_000_000}
    shown = process_now(other, WriterState.ALIVE, gauges, open_requests=0)
    assert shown.progress_age_s == pytest.approx(100, abs=60)


def test_latest_end_of_each_name_is_shown_unless_it_is_back() -> None:
    def ring(made_ns: int, instance: str, ended: WriterEnd | None) -> RingLosses:
        return RingLosses(made_ns=made_ns, role="decode", instance=instance, ended=ended)

    gone = processes_gone(
        [
            ring(1, "decode-0", WriterEnd.CLOSED),
            ring(3, "decode-0", WriterEnd.LOST),
            ring(2, "decode-0", WriterEnd.CLOSED),
            ring(1, "decode-1", WriterEnd.LOST),
            ring(2, "decode-2", None),
        ],
        {("decode", "decode-1")},
    )
    assert [(p.instance, p.state) for p in gone] == [("decode-0", ProcessState.LOST)]


def test_workers_that_requests_were_sent_to_are_needed() -> None:
    request = InFlight(
        request_id="r",
        trace_id="t",
        root_span_id="s",
        attempt=1,
        mode="pd",
        age_s=1.0,
        worker="decode-0",
        prefill_worker="prefill-1",
    )
    assert needed_by([request]) == {"decode-0", "prefill-1"}


@pytest.mark.parametrize("gauges", [old(STALLED_AFTER_S * 2), {}])
def test_idle_process_that_was_stopped_is_stalled(gauges: dict[Gauge, int]) -> None:
    """It cannot say so itself, and nobody waits for it yet; also one that tells no progress."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        made = make_identity(role=Role.DECODE, instance="decode-0", resource={})
        identity = msgspec.structs.replace(made, pid=process.pid)

        def shown() -> ProcessNow:
            return process_now(identity, WriterState.ALIVE, gauges, open_requests=0)

        assert (shown().state, shown().halt, standing(shown())) == (ProcessState.ALIVE, None, None)
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while shown().state is not ProcessState.STALLED:
            assert time.monotonic() < deadline
        assert shown().halt is Halt.STOPPED
        sentence = standing(shown()) or ""
        assert sentence.startswith(f"decode-0 (pid {process.pid}) is stopped by a signal (SIGSTOP)")
        assert (": no progress for " in sentence) is bool(gauges)
        elsewhere = msgspec.structs.replace(identity, host_id="other")
        far = process_now(elsewhere, WriterState.ALIVE, gauges, open_requests=0)
        assert (far.state, far.halt) == (ProcessState.ALIVE, None)
        ended = process_now(identity, WriterState.DEAD, gauges, open_requests=0)
        assert (ended.state, ended.halt) == (ProcessState.LOST, None)
    finally:
        process.kill()
        process.wait(timeout=60)


def test_look_of_an_agent_that_says_nothing_of_halts_is_read() -> None:
    """Agents of former versions do not."""
    now = process_now(IDENTITY, WriterState.CLOSED, {}, open_requests=0)
    told = {key: value for key, value in msgspec.to_builtins(now).items() if key != "halt"}
    assert msgspec.convert(told, ProcessNow) == now
