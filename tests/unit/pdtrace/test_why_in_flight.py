"""`why` on requests that have no trace: in flight, or lost with their process, from rings alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdtrace.agent.command import run_agent
from pdtrace.cli import app
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.stages import Mark, Outcome, Role, WaitReason
from pdtrace.stopping import StopFlag
from pdtrace.testing import Wait, open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]
ROLES = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)
FULL: Wait = {
    "reason": WaitReason.KV_PAGES,
    "needed": 12,
    "free": 3,
    "blocker": ["req-7", "req-8"],
}


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings", roles=ROLES)
    yield opened
    for recorder in opened.values():
        recorder.close()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ago(seconds: float) -> int:
    return time.monotonic_ns() - round(seconds * 1e9)


def hold(
    recorders: Mapping[Role, Recorder],
    request_id: str = "req-9",
    *,
    seconds: float = 12.3,
    stage: str = "decode.reserve",
) -> None:
    record_request(
        recorders,
        request_id=request_id,
        start_ns=ago(seconds),
        stop_in=stage,
        outcome=None,
        waits={stage: FULL} if stage == "decode.reserve" else None,
    )


def test_request_in_flight_is_explained_without_agent_and_traces(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for index in range(6):
        record_request(recorders, request_id=f"done-{index}")
    hold(recorders)
    result = invoke("why", "req-9", "--from", tmp_path)
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    sentence = (
        r"req-9 has been in flight for ([\d.]+) s, in decode\.reserve for ([\d.]+) s "
        r"\(usual 400 µs\): needed 12 KV pages, 3 free; behind req-7 and req-8\. "
    )
    found = re.match(sentence, text)
    assert found, text
    assert 12.2 < float(found[2]) <= float(found[1])
    assert "in flight · pd · prefill-0 → decode-0" in text
    assert re.search(r"so far [\d.]+ s ", text)
    lane = next(line for line in result.stdout.splitlines() if line.startswith("decode  "))
    assert lane.rstrip().endswith("░▶")
    assert re.search(r"for [\d.]+ s so far: needed 12 KV pages", text)
    assert "outcome" not in text


def test_json_says_that_it_is_open(tmp_path: Path, recorders: Mapping[Role, Recorder]) -> None:
    hold(recorders)
    document = json.loads(invoke("why", "req-9", "--json", "--from", tmp_path).stdout)
    [request] = document["requests"]
    assert request["open"] is True
    assert request["outcome"] is None
    assert request["verdict"]["kind"] == "in_flight"
    assert request["verdict"]["stage"] == "decode.reserve"
    assert request["verdict"]["wait"]["blockers"] == ["req-7", "req-8"]
    assert sum(part["ns"] for part in request["parts"]) == request["total_ns"] > 12e9
    assert request["violations"] == []
    assert request["standing"] == []


@pytest.mark.parametrize(
    "stage", ["gateway.queue", "prefill.compute", "transfer", "decode.queue", "decode.generate"]
)
def test_each_stage_is_the_one_named(
    tmp_path: Path, recorders: Mapping[Role, Recorder], stage: str
) -> None:
    hold(recorders, stage=stage)
    text = invoke("why", "req-9", "--from", tmp_path).stdout
    assert f", in {stage} for " in text.replace("\n", " ")


def test_traces_come_first_and_an_exact_id_in_flight_beats_a_beginning(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for name in ("req-1", "req-90"):
        record_request(recorders, request_id=name)
    run_once(tmp_path)
    hold(recorders, "req-9")
    assert invoke("why", "req-1", "--from", tmp_path).stdout.startswith("req-1 is not stalled")
    assert invoke("why", "req-9", "--from", tmp_path).stdout.startswith("req-9 has been in flight")
    ambiguous = invoke("why", "req", "--from", tmp_path)
    assert ambiguous.exit_code == 2
    assert "names 3 requests" in ambiguous.stderr
    assert " so far" in ambiguous.stderr
    nobody = invoke("why", "nobody", "--from", tmp_path)
    assert nobody.exit_code == 2
    assert nobody.stderr == (
        "pdtrace: no request has an id that begins with 'nobody': looked through 2 finished in "
        f"{tmp_path} and 1 in flight\n"
    )
    assert "; the closest: 'req-9'" in invoke("why", "eq-9", "--from", tmp_path).stderr


def test_id_that_came_again_is_not_only_the_finished_one(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders, request_id="again")
    run_once(tmp_path)
    hold(recorders, "again")
    result = invoke("why", "again", "--from", tmp_path)
    assert result.exit_code == 2
    assert "'again' names 2 requests; give a trace id" in result.stderr
    assert result.stderr.count("so far") == 1
    [line] = [line for line in result.stderr.splitlines() if "so far" in line]
    trace_id = line.split("trace ")[1].split()[0]
    assert invoke("why", trace_id, "--from", tmp_path).stdout.startswith("again has been in flight")


@pytest.mark.parametrize("damage", ["format", "cut", "foreign"])
def test_rings_that_cannot_be_read_do_not_pass_for_an_idle_server(
    tmp_path: Path, damage: str
) -> None:
    for recorder in open_recorders(tmp_path / "rings", roles=ROLES).values():
        recorder.close()
    for path in (tmp_path / "rings").glob("*.ring"):
        data = bytearray(path.read_bytes())
        if damage == "format":
            data[8] = 255
        path.write_bytes({"format": data, "cut": data[:5000], "foreign": b"hello" * 2000}[damage])
    for arguments in (["why", "--in-flight"], ["why"], ["why", "x"]):
        result = invoke(*arguments, "--from", tmp_path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "what is in flight cannot be told: " in result.stderr
        assert ".ring " in result.stderr
    result = invoke("top", "--once", "--from", tmp_path)
    assert result.stdout.startswith("What is in flight cannot be told.\n")


def run_once(directory: Path) -> None:
    """An agent that reads what is there and stops."""
    stop = StopFlag()
    stop.set()
    run_agent(directory / "rings", out=directory, stop=stop)


def test_in_flight_takes_the_worst_and_as_many_as_asked_for(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for index in range(6):
        record_request(recorders, request_id=f"done-{index}")
    hold(recorders, "fresh", seconds=0.5, stage="decode.generate")
    hold(recorders, "old", seconds=40)
    hold(recorders, "older", seconds=60)
    result = invoke("why", "--in-flight", "--from", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.startswith("older has been in flight for")
    both = invoke("why", "--in-flight", "--slowest", "2", "--json", "--from", tmp_path)
    assert [r["request_id"] for r in json.loads(both.stdout)["requests"]] == ["older", "old"]


def test_nothing_in_flight_is_no_error(tmp_path: Path, recorders: Mapping[Role, Recorder]) -> None:
    record_request(recorders)
    result = invoke("why", "--in-flight", "--from", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"No request is in flight in {tmp_path}.\n")
    document = json.loads(invoke("why", "--in-flight", "--json", "--from", tmp_path).stdout)
    assert document["requests"] == []


def test_in_flight_needs_rings_and_excludes_an_id(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    result = invoke("why", "--in-flight", "--from", tmp_path)
    assert result.exit_code == 2
    assert "holds no rings, so nothing can be in flight" in result.stderr
    result = invoke("why", "--in-flight", "--from", tmp_path / "nothing")
    assert (result.exit_code, "no such directory" in result.stderr) == (2, True)
    assert invoke("why", "x", "--in-flight").stderr == (
        "pdtrace: give an ID or --in-flight, not both\n"
    )


def test_answered_request_that_a_worker_still_holds_is_no_longer_in_flight(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    hold(recorders)
    context = RequestContext.create(request_id="answered")
    gateway, worker = recorders[Role.GATEWAY].begin(context), recorders[Role.DECODE].begin(context)
    gateway.mark(Mark.RECEIVED, "POST", "/", "chat")
    worker.mark(Mark.RESERVE_RECEIVED)
    gateway.mark(Mark.COMPLETED, Outcome.FAILED, "kv_timeout", "gateway-0", 504)
    gateway.end()
    result = invoke("why", "--in-flight", "--slowest", "5", "--json", "--from", tmp_path)
    assert [r["request_id"] for r in json.loads(result.stdout)["requests"]] == ["req-9"]
    assert "answered failed" in invoke("why", "answered", "--from", tmp_path).stdout
    worker.end()


def test_request_of_a_killed_process_is_lost_with_it(tmp_path: Path) -> None:
    code = """
        import os, sys
        from pathlib import Path
        from pdtrace.stages import Role
        from pdtrace.testing import open_recorders, record_request
        recorders = open_recorders(Path(sys.argv[1]), roles=[
            Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE])
        record_request(recorders, request_id="whole")
        record_request(recorders, request_id="gone", stop_in="prefill.compute", outcome=None)
        os.kill(os.getpid(), 9)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "rings")]
    assert subprocess.run(arguments, cwd=ROOT, timeout=60, check=False).returncode == -9
    result = invoke("why", "gone", "--from", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(
        "gone was lost with gateway-0 (process_lost) in prefill.compute"
    )
    document = json.loads(invoke("why", "gone", "--json", "--from", tmp_path).stdout)
    [request] = document["requests"]
    assert (request["open"], request["outcome"]) == (False, "lost")
    assert (request["outcome_reason"], request["outcome_by"]) == ("process_lost", "gateway-0")
    checked = invoke("check", "--from", tmp_path)
    assert checked.exit_code == 1
    text = " ".join(checked.stdout.split())
    assert "decode-0 (pid" in text
    assert "was killed, or ended without a word, with 1 request open" in text
    assert "transfer-0 (pid" in text


DECODE_DIES = """
    import os, sys, time
    from pdtrace.stages import Mark, Outcome, Role
    from pdtrace.testing import open_recorders, record_request

    class Keeping:
        def __init__(self, recorder):
            self.recorder = recorder

        def __getattr__(self, name):
            return getattr(self.recorder, name)

        def begin(self, *arguments, **options):
            self.trace = self.recorder.begin(*arguments, **options)
            return self.trace

    opened = open_recorders(sys.argv[1], roles=[
        Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE])
    record_request(opened, request_id="whole")
    kept = {role: Keeping(recorder) for role, recorder in opened.items()}
    record_request(kept, request_id="kill-1", start_ns=time.monotonic_ns() - 3_000_000_000,
        stop_in="decode.generate", outcome=None)
    kept[Role.GATEWAY].trace.mark(
        Mark.COMPLETED, Outcome.FAILED, "worker_lost", "gateway", 502, 0)
    for role in (Role.GATEWAY, Role.PREFILL, Role.TRANSFER):
        kept[role].trace.end()
        opened[role].close()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("with_agent", [True, False])
def test_killed_worker_is_named_in_the_headline_the_table_and_the_picture(
    tmp_path: Path, with_agent: bool
) -> None:
    """The gateway lived on, and only said that the worker did not answer."""
    arguments = [sys.executable, "-c", textwrap.dedent(DECODE_DIES), str(tmp_path / "rings")]
    process = subprocess.Popen(arguments, cwd=ROOT)
    assert process.wait(timeout=60) == -9
    if with_agent:
        run_agent(tmp_path / "rings", out=tmp_path, until_closed=True)
    result = invoke("why", "kill-1", "--from", tmp_path)
    text = " ".join(result.stdout.split())
    assert re.match(
        r"kill-1 failed \(worker_lost\) in decode\.generate: decode-0 was lost with it \(killed, "
        r"or ended without a word\); [\d.]+ s in that stage, [\d.]+ s in all\. decode-0 "
        rf"\(pid {process.pid}\) was killed, or ended without a word, with 1 request open\. ",
        text,
    ), text
    lane = next(line for line in result.stdout.splitlines() if line.startswith("decode  "))
    assert re.search(r"G▒{20,}✗$", lane.rstrip()), lane
    assert re.search(r"^G +decode\.generate \(lost\) ", result.stdout, re.MULTILINE)
    [request] = json.loads(invoke("why", "kill-1", "--json", "--from", tmp_path).stdout)["requests"]
    assert request["verdict"]["cause"] == "decode-0 was lost"
    assert len(request["standing"]) == 1
    table = invoke("why", "--slowest", "2", "--from", tmp_path).stdout
    assert re.search(r"^kill-1 .* decode-0 was lost *$", table, re.MULTILINE), table
    if with_agent:
        checked = " ".join(invoke("check", "--from", tmp_path).stdout.split())
        assert "lost: kill-1: decode.generate was lost with decode-0" in checked


def test_rings_alone_have_the_slowest_where_no_agent_wrote_traces(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for index in range(6):
        record_request(recorders, request_id=f"done-{index}")
    record_request(recorders, request_id="slow", stage_ms={"transfer": 3_000.0})
    result = invoke("why", "--from", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("slow stalled in transfer (mostly transfer.copy): 3.00 s ")


def test_rings_of_several_hosts_are_one_request(tmp_path: Path) -> None:
    here = open_recorders(tmp_path / "a" / "rings", roles=ROLES[:2])
    there = open_recorders(tmp_path / "b" / "rings", roles=ROLES[2:])
    hold({**here, **there}, stage="decode.generate")
    both = ("--from", tmp_path / "a", "--from", tmp_path / "b")
    for arguments in (("req-9",), ("--in-flight",)):
        result = invoke("why", *arguments, *both, "--json")
        assert result.exit_code == 0, result.stderr
        [request] = json.loads(result.stdout)["requests"]
        assert request["verdict"]["stage"] == "decode.generate"
        assert request["unexplained_ns"] == 0
    for recorder in (*here.values(), *there.values()):
        recorder.close()


def test_pause_that_goes_on_is_what_a_request_is_held_up_by(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    context = RequestContext.create(request_id="paused")
    record_request(
        recorders, context=context, start_ns=ago(30), stop_in="decode.generate", outcome=None
    )
    worker = recorders[Role.DECODE].begin(context)
    worker.mark(Mark.PREEMPTED, 7, 0, at_ns=ago(10))
    worker.wait("decode.preempted", WaitReason.PREEMPTED, needed=7, free=0)
    [request] = json.loads(invoke("why", "paused", "--json", "--from", tmp_path).stdout)["requests"]
    verdict = request["verdict"]
    assert (verdict["stage"], verdict["chain_stage"]) == ("decode.preempted", "decode.generate")
    assert 10e9 <= verdict["stage_ns"] < request["total_ns"]
    assert "its pages went to running requests; needed 7 KV pages, 0 free" in verdict["sentence"]
    assert "(usual" not in verdict["sentence"]
    worker.end()


def test_stage_is_as_old_as_its_own_attempt(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    """What an earlier attempt spent in the same stage is told among the attempts."""
    first = RequestContext.create(request_id="again")
    record_request(
        recorders, context=first, start_ns=ago(60), stop_in="prefill.queue", outcome=None
    )
    second = first.next_attempt()
    gateway, worker = recorders[Role.GATEWAY].begin(second), recorders[Role.DECODE].begin(second)
    prefill = recorders[Role.PREFILL].begin(second)
    gateway.mark(Mark.ROUTED, "prefill-0", "decode-0", at_ns=ago(9))
    gateway.mark(Mark.DISPATCHED, at_ns=ago(9))
    worker.mark(Mark.RESERVE_RECEIVED, at_ns=ago(8.5))
    worker.mark(Mark.PAGES_RESERVED, 7, 0, at_ns=ago(8.4))
    prefill.mark(Mark.HANDSHAKE_DONE, 7, at_ns=ago(8))
    [request] = json.loads(invoke("why", "again", "--json", "--from", tmp_path).stdout)["requests"]
    assert request["verdict"]["stage"] == "prefill.queue"
    assert 8e9 <= request["verdict"]["stage_ns"] < 50e9
    assert [one["number"] for one in request["tries"]] == [1, 2]
    for trace in (gateway, worker, prefill):
        trace.end()


def test_folder_of_rings_is_a_source(tmp_path: Path, recorders: Mapping[Role, Recorder]) -> None:
    for index in range(6):
        record_request(recorders, request_id=f"done-{index}")
    hold(recorders)
    rings = tmp_path / "rings"
    for arguments in (["why", "--in-flight"], ["why", "req-9"]):
        result = invoke(*arguments, "--from", rings)
        assert result.stdout.startswith("req-9 has been in flight"), result.stderr
    assert invoke("why", "done-3", "--from", rings).exit_code == 0
    assert invoke("why", "--from", rings).exit_code == 0
    result = invoke("why", "--in-flight", "--from", rings / "none")
    assert "no such directory" in result.stderr
