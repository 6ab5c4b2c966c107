"""What became of processes and records, from the agent's totals and the rings' headers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdtrace.agent.command import Agent, run_agent
from pdtrace.analysis.sources import Problems, Recording
from pdtrace.check import CheckReport, check_recording
from pdtrace.live.health import ProcessHealth, RunHealth, read_health
from pdtrace.ring import scan_rings
from pdtrace.ring.losses import STATE_NAME, Losses, RingLosses, WriterEnd
from pdtrace.stages import Outcome, Role
from pdtrace.testing import open_recorders, record_request
from tests.support.pd_traces import Story

ROOT = Path(__file__).resolve().parents[3]
ROLES = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)

DIES = textwrap.dedent(
    """
    import os, sys, time
    from pdtrace.stages import Gauge, Role
    from pdtrace.testing import open_recorders, record_request
    recorders = open_recorders(sys.argv[1], roles=[
        Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE])
    for index in range(3):
        record_request(recorders, request_id=f"gone-{index}", stop_in="decode.queue", outcome=None)
    for role in (Role.GATEWAY, Role.PREFILL, Role.TRANSFER):
        recorders[role].close()
    recorders[Role.DECODE].gauge(Gauge.LAST_PROGRESS_NS, time.monotonic_ns())
    os.kill(os.getpid(), 9)
    """
)


def die(directory: Path) -> None:
    """A run in which decode is killed with three requests open; the others close in order."""
    arguments = [sys.executable, "-c", DIES, str(directory / "rings")]
    assert subprocess.run(arguments, cwd=ROOT, timeout=60, check=False).returncode == -9


def recording(*stories: Story) -> Recording:
    traces = tuple(story.trace() for story in stories or (Story(),))
    spans = sum(len(trace.spans) for trace in traces)
    return Recording(source="t", traces=traces, files=1, lines=1, spans=spans, problems=Problems())


def broken(report: CheckReport) -> dict[str, tuple[str, ...]]:
    return {rule.name: rule.examples for rule in report.rules if rule.broken}


def health(*processes: ProcessHealth, **fields: object) -> RunHealth:
    whole = RunHealth(run="r", processes=processes, unreadable={}, losses=Losses(requests=7))
    return replace(whole, **fields)  # pyright: ignore[reportArgumentType]


def decode(**fields: object) -> ProcessHealth:
    process = ProcessHealth(role="decode", instance="decode-0", pid=12)
    return replace(process, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("with_agent", [True, False])
def test_killed_process_is_named_with_what_it_held(tmp_path: Path, with_agent: bool) -> None:
    """Also where no agent was there to notice."""
    began_ns = time.time_ns()
    die(tmp_path)
    if with_agent:
        run_agent(tmp_path / "rings", out=tmp_path, until_closed=True)
    found = read_health(tmp_path)
    ends = {process.instance: process.ended for process in found.processes}
    assert ends["decode-0"] is WriterEnd.LOST
    assert {ends[name] for name in ("gateway-0", "prefill-0", "transfer-0")} <= {
        WriterEnd.CLOSED,
        None,
    }
    [gone] = [process for process in found.processes if process.ended is WriterEnd.LOST]
    assert gone.last_sign_ns is not None
    assert began_ns <= gone.last_sign_ns <= time.time_ns()
    [line] = broken(check_recording(recording(), [found]))["processes"]
    assert line.startswith("decode-0 (pid ")
    assert "was killed, or ended without a word, with 3 requests open" in line
    assert ("gone-0" in line) is with_agent


def test_process_that_was_stopped_is_named_and_breaks_no_rule(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys, time
        from pdtrace.stages import Gauge, Role
        from pdtrace.testing import open_recorders
        recorders = open_recorders(sys.argv[1], roles=[Role.DECODE])
        recorders[Role.DECODE].gauge(Gauge.LAST_PROGRESS_NS, time.monotonic_ns() - 9 * 10**9)
        os.kill(os.getpid(), signal.SIGSTOP)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "rings")], cwd=ROOT)
    try:
        os.waitpid(child.pid, os.WUNTRACED)  # until it has stopped itself
        found = read_health(tmp_path)
        report = check_recording(recording(), [found])
        assert broken(report) == {}
        [note] = [note for note in report.notes if note.startswith("decode-0")]
        start = f"decode-0 (pid {child.pid}) is stopped by a signal (SIGSTOP): no progress for "
        assert note.startswith(start)
        assert report.document()["processes"][0]["standing"] == note.removesuffix(".")
        [process] = found.processes
        assert process.last_sign_ns is not None
        assert time.time_ns() - process.last_sign_ns >= 9 * 10**9
    finally:
        child.kill()
        child.wait(timeout=60)


def test_run_that_ended_in_order_keeps_every_rule(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", roles=ROLES)
    for index in range(5):
        record_request(recorders, request_id=f"r-{index}")
    alive = read_health(tmp_path)
    assert not alive.is_ill
    for recorder in recorders.values():
        recorder.close()
    run_agent(tmp_path / "rings", out=tmp_path, until_closed=True)
    found = read_health(tmp_path)
    assert not found.is_ill
    assert len(found.processes) == 4
    report = check_recording(recording(), [found])
    assert broken(report) == {}
    assert report.notes == ()


def test_rings_that_the_agent_had_not_read_to_their_end_are_named(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", roles=ROLES)
    record_request(recorders, request_id="read")
    agent = Agent(tmp_path / "rings", out=tmp_path)
    agent.poll()
    agent.close()  # it is gone while they go on
    record_request(recorders, request_id="unread")
    for recorder in recorders.values():
        recorder.close()
    found = read_health(tmp_path)
    names = {path.name for path in scan_rings(tmp_path / "rings")}
    assert set(found.unreadable) == names
    assert all("--until-closed" in why for why in found.unreadable.values())
    assert found.is_ill
    run_agent(tmp_path / "rings", out=tmp_path, until_closed=True)
    assert not read_health(tmp_path).unreadable


def test_unreadable_rings_are_named_with_the_reason(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", roles=[Role.GATEWAY])
    recorders[Role.GATEWAY].close()
    (tmp_path / "rings" / "x.ring").write_bytes(b"nothing of ours")
    ring = scan_rings(tmp_path / "rings")[0].read_bytes()
    (tmp_path / "rings" / "y.ring").write_bytes(ring[:8] + (9).to_bytes(4, "little") + ring[12:])
    lines = broken(check_recording(recording(), [read_health(tmp_path)]))["rings"]
    assert len(lines) == 2
    assert "x.ring is not a pdtrace ring" in lines[0]
    assert "y.ring has ring format 9, this pdtrace reads format 2" in lines[1]


def test_ring_that_goes_away_while_rings_are_read_is_no_unreadable_one(tmp_path: Path) -> None:
    """An agent deletes rings whose requests are delivered at any time."""
    recorders = open_recorders(tmp_path / "rings", roles=[Role.GATEWAY])
    recorders[Role.GATEWAY].close()
    (tmp_path / "rings" / "gone.ring").symlink_to("deleted")  # listed, and not there
    assert not read_health(tmp_path).unreadable


def test_recording_without_requests_has_facts_all_the_same() -> None:
    none = Recording(source="test", traces=(), files=1, lines=0, spans=0, problems=Problems())
    assert check_recording(none).facts[0] == "0 requests in 0 traces, 0 spans."


def test_lost_records_are_counted_by_how_they_were_lost() -> None:
    lossy = decode(losses={"missed": 97, "torn": 1, "dropped": 25, "errors": 2})
    assert lossy.lost == (
        "lost 123 records (97 overwritten before they were read, 1 torn, 25 that could not be "
        "written) and swallowed 2 recording errors"
    )
    report = check_recording(recording(), [health(lossy)])
    assert set(broken(report)) == {"records"}
    assert broken(report)["records"] == (f"decode-0 (pid 12) {lossy.lost}",)
    assert report.document()["processes"][0]["losses"]["missed"] == 97


def test_what_was_shed_or_cut_is_a_note_and_breaks_nothing() -> None:
    frugal = decode(losses={"shed_steps": 40, "shed_waits": 3, "truncated": 1})
    report = check_recording(recording(), [health(frugal)])
    assert report.ok
    assert report.notes == (
        "decode-0 (pid 12) left out 40 steps, 3 waits to keep within its budget.",
        "decode-0 (pid 12) cut 1 long text.",
    )


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ({"faults": 2}, "2 requests cost pdtrace an error of its own"),
        ({"evicted": 3}, "3 requests were given up because too many were in flight"),
        ({"lines_lost": 4}, "4 requests could not be written to the files"),
        ({"spans_dropped": 5}, "5 spans were exported to nobody"),
    ],
)
def test_what_the_agent_could_not_deliver_breaks_a_rule(totals: dict[str, int], words: str) -> None:
    losses = Losses(requests=9, **totals)  # pyright: ignore[reportArgumentType]
    report = check_recording(recording(), [health(losses=losses)])
    [line] = broken(report)["delivered"]
    assert words in line


def test_run_without_an_agent_says_that_losses_are_not_known(tmp_path: Path) -> None:
    open_recorders(tmp_path / "rings", roles=[Role.GATEWAY])[Role.GATEWAY].close()
    report = check_recording(recording(), [read_health(tmp_path)])
    assert report.ok
    [note] = report.notes
    assert "no agent has written" in note


def test_totals_of_rings_that_are_gone_still_count(tmp_path: Path) -> None:
    ring = RingLosses(
        role="decode",
        instance="decode-0",
        pid=7,
        missed=5,
        ended=WriterEnd.LOST,
        open_requests=1,
        open_ids=("req-1",),
    )
    earlier = RingLosses(role="prefill", instance="prefill-0", torn=2)
    losses = Losses(rings={"decode-0-7.ring": ring}, earlier={"prefill-0": earlier})
    (tmp_path / STATE_NAME).write_bytes(msgspec.json.encode({"losses": losses}))
    found = broken(check_recording(recording(), [read_health(tmp_path)]))
    assert "decode-0 (pid 7)" in found["processes"][0]
    assert "1 request open: req-1" in found["processes"][0]
    assert len(found["records"]) == 2


def test_request_lost_with_its_process_breaks_a_rule() -> None:
    story = Story(
        request_id="gone",
        outcome=Outcome.LOST,
        ends_in="decode.queue",
        reason="process_lost",
        by="decode-0",
    )
    assert broken(check_recording(recording(Story(), story))) == {
        "lost": ("gone: lost with decode-0 in decode.queue (process_lost)",)
    }
