"""The agent on real rings: recorders in this and in other processes, deaths, restarts, signals."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from pdtrace import semconv as a
from pdtrace.agent import tails
from pdtrace.agent.command import (
    STATE_NAME,
    Agent,
    AgentConfig,
    RollingJudge,
    agent_command,
    main,
    run_agent,
)
from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import build_timelines
from pdtrace.check import check_recording
from pdtrace.export.delivery import TRACES_NAME
from pdtrace.export.queue import TAKEN, Answer
from pdtrace.export.settings import ExportPlan
from pdtrace.export.sink import SinkError, lines_since
from pdtrace.live.stuck import StuckPolicy
from pdtrace.otlp.json_lines import decode_line
from pdtrace.propagation import RemoteParent, RequestContext
from pdtrace.recorder import Recorder
from pdtrace.ring import RingCapacity, scan_rings
from pdtrace.spans import Span, StatusCode
from pdtrace.stages import CHAINS, Mark, Mode, Outcome, Role, WaitReason
from pdtrace.testing import open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]
QUICK = AgentConfig(poll_s=0.01, idle_poll_s=0.02, grace_s=0.2, flush_s=0.5, state_s=0.02)


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings")
    yield opened
    close(opened)


def close(recorders: Mapping[Role, Recorder]) -> None:
    for recorder in recorders.values():
        recorder.close()


def agent_of(tmp_path: Path, *, config: AgentConfig = QUICK) -> Agent:
    return Agent(tmp_path / "rings", out=tmp_path, config=config)


def written(tmp_path: Path) -> list[list[Span]]:
    return [decode_line(line) for line in lines_since(tmp_path / TRACES_NAME)]


def roots(tmp_path: Path) -> list[Span]:
    found = [span for spans in written(tmp_path) for span in spans if a.SPAN.key in span.attributes]
    return [span for span in found if span.attributes[a.SPAN.key] == "request"]


def request_ids(tmp_path: Path) -> list[str]:
    return sorted(str(root.attributes[a.REQUEST_ID.key]) for root in roots(tmp_path))


def drain(agent: Agent, *, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    agent.poll()
    while not agent.is_drained:
        agent.poll()
        assert time.monotonic() < deadline, agent.summary().line()
        time.sleep(0.005)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def agent_process(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pdtrace.agent"),
            *("--rings", str(tmp_path / "rings"), "--out", str(tmp_path), "--json", *more),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until_written(tmp_path: Path, count: int, *, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while len(request_ids(tmp_path)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("mode", list(Mode))
def test_recorded_request_becomes_its_spans(
    tmp_path: Path, recorders: Mapping[Role, Recorder], mode: Mode
) -> None:
    recorded = record_request(recorders, mode=mode, chunks=3)
    agent = agent_of(tmp_path)
    agent.poll()
    [spans] = written(tmp_path)
    assert {span.trace_id for span in spans} == {recorded.context.trace_id}
    by_name = {span.name: span for span in spans}
    after_token = CHAINS[mode][[s.name for s in CHAINS[mode]].index("hop.token") + 1].name
    for stage, (begin_ns, end_ns) in recorded.stages.items():
        attributes = by_name[stage].attributes
        assert attributes[a.END_NS.key] == end_ns
        if stage != after_token:  # runs beside the token's way to the client
            assert attributes[a.BEGIN_NS.key] == begin_ns
    assert set(recorded.stages) == {stage.name for stage in CHAINS[mode]}
    [root] = roots(tmp_path)
    assert root.span_id == recorded.context.root_span_id
    assert by_name["attempt"].span_id == recorded.context.attempt_span_id
    assert a.INCOMPLETE.key not in root.attributes
    summary = agent.close()
    assert (summary.requests, summary.spans, summary.incomplete) == (1, len(spans), 0)
    assert summary.records > len(recorded.marks)


def test_every_span_says_who_recorded_it(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders)
    agent = agent_of(tmp_path)
    agent.poll()
    agent.close()
    [spans] = written(tmp_path)
    by_role = {span.resource.service_name: span.resource.attributes for span in spans}
    assert set(by_role) == {"pd-gateway", "pd-prefill", "pd-transfer", "pd-decode"}
    for service, attributes in by_role.items():
        assert attributes["service.instance.id"] == f"{service.removeprefix('pd-')}-0"
        assert attributes["process.pid"] == os.getpid()
        assert attributes["service.namespace"] == "pdtrace"
        assert attributes["telemetry.sdk.language"] == "python"
        for key in ("host.id", "host.name", "service.version", "telemetry.sdk.version"):
            assert attributes[key]
    assert len({attributes["host.id"] for attributes in by_role.values()}) == 1


def test_users_resource_attributes_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.version=9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    recorders = open_recorders(tmp_path / "rings")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=agents,team=x,host.id=agents")
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    record_request(recorders)
    close(recorders)
    agent = agent_of(tmp_path)
    drain(agent)
    agent.close()
    attributes = roots(tmp_path)[0].resource.attributes
    assert attributes["service.name"] == "mine"
    assert attributes["service.version"] == "9"
    assert attributes["deployment.environment"] == "test"
    assert attributes["team"] == "x"
    assert attributes["host.id"] != "agents"


@pytest.mark.parametrize("mode", list(Mode))
def test_processes_that_share_a_service_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    recorders = open_recorders(tmp_path / "rings")
    record_request(recorders, mode=mode)
    close(recorders)
    agent = agent_of(tmp_path)
    drain(agent)
    agent.close()
    recording = read_source(tmp_path)
    report = check_recording(recording)
    assert report.ok, [rule for rule in report.rules if rule.broken]
    (timeline,) = build_timelines(recording.traces)
    assert timeline.mode is mode
    worker = mode is Mode.COLOCATED
    assert timeline.roles == ({Role.GATEWAY, Role.WORKER} if worker else set(Role) - {Role.WORKER})


def test_callers_trace_is_continued(tmp_path: Path, recorders: Mapping[Role, Recorder]) -> None:
    parent = RemoteParent(trace_id="a" * 32, span_id="b" * 16, sampled=True, tracestate="v=1")
    record_request(recorders, parent=parent)
    agent = agent_of(tmp_path)
    agent.poll()
    agent.close()
    [root] = roots(tmp_path)
    assert (root.trace_id, root.parent_id, root.trace_state) == ("a" * 32, "b" * 16, "v=1")


def test_request_in_flight_is_not_written_until_it_ends(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    gateway = recorders[Role.GATEWAY].begin(RequestContext.create())
    gateway.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    agent = agent_of(tmp_path)
    agent.poll()
    assert written(tmp_path) == []
    assert agent.summary().open == 1
    gateway.mark(Mark.COMPLETED, Outcome.REJECTED, "invalid_json", "gateway", 400)
    gateway.end()
    agent.poll()
    [[root, ingest]] = written(tmp_path)
    assert ingest.name == "gateway.ingest"
    assert root.status is ingest.status is StatusCode.ERROR
    assert agent.close().open == 0


def test_rings_of_processes_started_later_are_found_and_finished_ones_forgotten(
    tmp_path: Path,
) -> None:
    agent = agent_of(tmp_path)
    agent.poll()
    for number in range(3):
        recorders = open_recorders(tmp_path / "rings")
        record_request(recorders, request_id=f"req-{number}")
        agent.poll()
        close(recorders)
        drain(agent)
    assert request_ids(tmp_path) == ["req-0", "req-1", "req-2"]
    assert agent.close().rings == 3 * len(Role)


def test_ring_that_appears_while_the_gateway_is_read_is_not_overlooked(
    tmp_path: Path, recorders: Mapping[Role, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_request(recorders)
    scans = 0

    def scan(directory: Path) -> list[Path]:
        nonlocal scans
        scans += 1
        hidden = "transfer-" if scans == 1 else "-"
        return [path for path in scan_rings(directory) if not path.name.startswith(hidden)]

    monkeypatch.setattr(tails, "scan_rings", scan)
    agent = agent_of(tmp_path)
    agent.poll()
    summary = agent.close()
    assert (summary.requests, summary.incomplete, summary.late) == (1, 0, 0)
    assert "transfer" in {span.name for span in written(tmp_path)[0]}


RECORD = """
    import sys, time
    from pdtrace.testing import open_recorders, record_request
    recorders = open_recorders(sys.argv[1])
    for number in range(int(sys.argv[3])):
        record_request(recorders, request_id=f"{sys.argv[2]}-{number}")
        time.sleep(float(sys.argv[4]))
    for recorder in recorders.values():
        recorder.close()
    """


def test_rings_of_other_processes_are_tailed_while_they_record(tmp_path: Path) -> None:
    writers = [
        python(RECORD, str(tmp_path / "rings"), name, "40", "0.002") for name in ("one", "two")
    ]
    agent = agent_of(tmp_path)
    while any(writer.poll() is None for writer in writers):
        agent.poll()
        time.sleep(0.005)
    drain(agent)
    summary = agent.close()
    for writer in writers:
        out, err = writer.communicate()
        assert writer.returncode == 0, out + err
    assert request_ids(tmp_path) == sorted(f"{w}-{n}" for w in ("one", "two") for n in range(40))
    assert (summary.incomplete, summary.missed, summary.late, summary.errors) == (0, 0, 0, 0)


DIE_DECODING = """
    import os, signal, sys, msgspec
    from pdtrace.propagation import RequestContext
    from pdtrace.recorder import Recorder
    from pdtrace.stages import Mark, Role
    recorder = Recorder.open(sys.argv[1], role=Role.DECODE, instance="decode-7")
    trace = recorder.begin(msgspec.json.decode(sys.argv[2], type=RequestContext))
    trace.mark(Mark.RESERVE_RECEIVED)
    print("ready", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
    """


def test_killed_worker_is_lost_in_the_stage_where_it_was(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    context = RequestContext.create(request_id="req-killed")
    gateway = recorders[Role.GATEWAY].begin(context)
    gateway.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    gateway.mark(Mark.TOKENIZED, "m", 4, 4, True, Mode.PD)
    gateway.mark(Mark.ADMITTED, 1)
    gateway.mark(Mark.ROUTED, "prefill-0", "decode-7", "round_robin", 1, "")
    gateway.mark(Mark.DISPATCHED)
    worker = subprocess.Popen(
        [
            *(sys.executable, "-c", textwrap.dedent(DIE_DECODING), str(tmp_path / "rings")),
            msgspec.json.encode(context).decode(),
        ],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin
    assert worker.stdout
    assert worker.stdout.readline() == "ready\n"
    agent = agent_of(tmp_path)
    agent.poll()
    before_ns = time.monotonic_ns()
    worker.communicate("die\n")
    agent.poll()
    gateway.mark(Mark.COMPLETED, Outcome.FAILED, "worker_lost", "decode-7", 502)
    gateway.end()
    agent.poll()
    assert written(tmp_path) == [], "prefill-0 was chosen and may yet be heard"
    time.sleep(QUICK.grace_s)
    agent.poll()
    agent.close()
    [spans] = written(tmp_path)
    reserve = next(span for span in spans if span.name == "decode.reserve")
    assert reserve.status is StatusCode.ERROR
    assert reserve.attributes[a.OUTCOME.key] == "lost"
    assert reserve.attributes[a.OUTCOME_REASON.key] == "process_lost"
    assert reserve.attributes[a.OUTCOME_BY.key] == "decode-7"
    end_ns = reserve.attributes[a.END_NS.key]
    assert isinstance(end_ns, int)
    assert end_ns > before_ns
    assert reserve.resource.instance_id == "decode-7"


DIE_WHOLE = """
    import os, signal, sys
    from pdtrace.testing import open_recorders, record_request
    recorders = open_recorders(sys.argv[1])
    record_request(recorders, request_id="whole")
    record_request(recorders, request_id="stuck", outcome=None, stop_in="prefill.compute")
    os.kill(os.getpid(), signal.SIGKILL)
    """


def test_everything_written_before_kill_9_of_the_whole_server_is_exported(tmp_path: Path) -> None:
    writer = python(DIE_WHOLE, str(tmp_path / "rings"))
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    summary = run_agent(tmp_path / "rings", out=tmp_path, until_closed=True, config=QUICK)
    assert request_ids(tmp_path) == ["stuck", "whole"]
    assert (summary.requests, summary.missed, summary.torn, summary.open) == (2, 0, 0, 0)
    by_id = {root.attributes[a.REQUEST_ID.key]: root for root in roots(tmp_path)}
    assert by_id["whole"].attributes[a.OUTCOME.key] == "completed"
    stuck = by_id["stuck"].attributes
    assert stuck[a.OUTCOME.key] == "lost"
    assert stuck[a.OUTCOME_STAGE.key] == "prefill.compute"
    assert stuck[a.OUTCOME_BY.key] == "gateway-0"


def test_restarted_agent_goes_on_without_repeating_or_losing(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    context = RequestContext.create(request_id="across")
    traces = {role: recorders[role].begin(context) for role in (Role.GATEWAY, Role.DECODE)}
    traces[Role.GATEWAY].mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    traces[Role.GATEWAY].mark(Mark.TOKENIZED, "m", 4, 4, True, Mode.PD)
    traces[Role.GATEWAY].mark(Mark.ADMITTED, 1)
    traces[Role.GATEWAY].mark(Mark.ROUTED)
    traces[Role.GATEWAY].mark(Mark.DISPATCHED)
    traces[Role.DECODE].mark(Mark.RESERVE_RECEIVED)
    record_request(recorders, request_id="before")
    agent = agent_of(tmp_path)
    agent.poll()
    agent.close()
    assert request_ids(tmp_path) == ["before"]

    record_request(recorders, request_id="between")
    agent = agent_of(tmp_path)
    agent.poll()
    traces[Role.DECODE].mark(Mark.PAGES_RESERVED, 4, 9)
    traces[Role.GATEWAY].mark(Mark.COMPLETED, Outcome.CANCELLED, "client_gone", "client")
    for trace in traces.values():
        trace.end()
    agent.poll()
    agent.close()
    assert request_ids(tmp_path) == ["across", "before", "between"]
    assert agent.summary().unnamed == 0, "what was handled before is not lost"
    across = next(s for s in written(tmp_path) if s[0].attributes[a.REQUEST_ID.key] == "across")
    assert {"gateway.ingest", "hop.dispatch", "decode.reserve"} <= {span.name for span in across}

    close(recorders)
    for _ in range(2):
        agent = agent_of(tmp_path)
        drain(agent)
        agent.close()
    assert request_ids(tmp_path) == ["across", "before", "between"]


def test_request_that_outlasts_many_others_survives_a_restart(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", capacity=RingCapacity())
    context = RequestContext.create(request_id="long")
    trace = recorders[Role.GATEWAY].begin(context)
    trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    agent = agent_of(tmp_path)
    for number in range(1_100):
        record_request(
            recorders,
            request_id=f"r-{number}",
            outcome=Outcome.REJECTED,
            stop_in="gateway.ingest",
            reason="bad_request",
        )
        if number % 100 == 0:
            agent.poll()
    agent.poll()
    agent.close()
    agent = agent_of(tmp_path)
    agent.poll()
    trace.mark(Mark.COMPLETED, Outcome.CANCELLED, "client_gone", "client")
    trace.end()
    close(recorders)
    agent.poll()
    agent.close()
    ids = request_ids(tmp_path)
    assert len(ids) == len(set(ids)) == 1_101
    (spans,) = (s for s in written(tmp_path) if s[0].attributes[a.REQUEST_ID.key] == "long")
    assert "gateway.ingest" in {span.name for span in spans}


def test_agent_killed_at_any_moment_exports_each_request_once(tmp_path: Path) -> None:
    writer = python(RECORD, str(tmp_path / "rings"), "r", "300", "0.004")
    for count in (20, 90):
        agent = agent_process(tmp_path)
        wait_until_written(tmp_path, count)
        agent.kill()
        agent.communicate()
    assert writer.wait(timeout=60) == 0, writer.communicate()
    writer.communicate()
    agent = agent_process(tmp_path, "--until-closed")
    out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    assert json.loads(out)["missed"] == 0
    times = Counter(request_ids(tmp_path))
    assert times == {f"r-{number}": 1 for number in range(300)}


def test_lost_or_damaged_state_costs_nothing_that_the_files_tell(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders, request_id="one")
    agent = agent_of(tmp_path)
    agent.poll()
    agent.close()
    (tmp_path / STATE_NAME).write_text("{ damaged")
    record_request(recorders, request_id="two")
    agent = agent_of(tmp_path)
    agent.poll()
    agent.close()
    assert request_ids(tmp_path) == ["one", "two"]


def test_ring_made_again_under_the_same_name_is_another_ring(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings")
    record_request(recorders, request_id="one")
    close(recorders)
    agent = agent_of(tmp_path)
    drain(agent)
    for path in (tmp_path / "rings").iterdir():
        path.unlink()
    recorders = open_recorders(tmp_path / "rings")
    record_request(recorders, request_id="two")
    agent.poll()
    close(recorders)
    drain(agent)
    agent.close()
    assert request_ids(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_makes_the_agent_read_flush_and_exit_with_one_summary_line(
    tmp_path: Path, recorders: Mapping[Role, Recorder], number: signal.Signals
) -> None:
    agent = agent_process(tmp_path)
    record_request(recorders, request_id="one")
    wait_until_written(tmp_path, 1)
    record_request(recorders, request_id="two")
    gateway = recorders[Role.GATEWAY].begin(RequestContext.create())
    gateway.mark(Mark.RECEIVED)
    begin_s = time.monotonic()
    agent.send_signal(number)
    out, err = agent.communicate(timeout=60)
    assert time.monotonic() - begin_s < 20, "1.4 s, and a busy machine"
    assert agent.returncode == 0, err
    assert request_ids(tmp_path) == ["one", "two"]
    summary = json.loads(out)
    assert (summary["requests"], summary["open"]) == (2, 1)
    assert err.count("agent done: 2 requests") == 1


def test_last_words_of_a_server_that_stops_together_with_the_agent_get_in(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    gateway = recorders[Role.GATEWAY].begin(RequestContext.create(request_id="last"))
    gateway.mark(Mark.RECEIVED)
    stop = threading.Event()
    stop.set()
    config = AgentConfig(poll_s=0.01, grace_s=30, flush_s=60, state_s=0.05)
    agent = agent_of(tmp_path, config=config)
    runner = threading.Thread(target=agent.run, args=(stop,))
    runner.start()
    gateway.mark(Mark.COMPLETED, Outcome.FAILED, "shutting_down", "gateway", 503)
    gateway.end()
    close(recorders)
    runner.join(60)
    assert not runner.is_alive()
    agent.close()
    assert request_ids(tmp_path) == ["last"]


def test_overwritten_records_are_counted_and_said_and_the_trace_is_incomplete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capacity = RingCapacity(blocks=4, block_bytes=4096)
    recorders = open_recorders(tmp_path / "rings", capacity=capacity)
    agent = agent_of(tmp_path)
    context = RequestContext.create(request_id="long")
    trace = recorders[Role.GATEWAY].begin(context)
    trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    agent.poll()
    for number in range(2_000):
        trace.wait("gateway.queue", WaitReason.CONCURRENCY, blocker=f"req-{number}")
    trace.mark(Mark.COMPLETED, Outcome.COMPLETED, None, None, 200)
    trace.end()
    agent.poll()
    summary = agent.close()
    close(recorders)
    assert summary.missed > 1_000
    assert "were overwritten" in caplog.text
    [root] = roots(tmp_path)
    assert f"gateway-0 lost {summary.missed} records" in str(root.attributes[a.INCOMPLETE.key])
    assert summary.incomplete == 1


def test_requests_whose_gateway_records_were_overwritten_say_so_and_are_not_stuck(
    tmp_path: Path,
) -> None:
    rings = tmp_path / "rings"
    tiny = RingCapacity(blocks=4, block_bytes=4096)
    recorders = open_recorders(rings, roles=[Role.PREFILL, Role.TRANSFER, Role.DECODE])
    recorders |= open_recorders(rings, roles=[Role.GATEWAY], capacity=tiny)
    config = dataclasses.replace(
        QUICK, stuck=StuckPolicy(floor_s=1.0, default_s=1.0), stuck_s=0.01, state_s=60.0
    )
    agent = agent_of(tmp_path, config=config)
    begun = {name: RequestContext.create(request_id=name) for name in ("ends", "alive")}
    traces = {name: recorders[Role.GATEWAY].begin(context) for name, context in begun.items()}
    for trace in traces.values():
        trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    agent.poll()
    traces["ends"].mark(Mark.COMPLETED, Outcome.COMPLETED, None, None, 200)
    traces["ends"].end()
    for number in range(100):  # the gateway's ring holds some twenty of them
        record_request(recorders, request_id=f"req-{number}")
    deadline = time.monotonic() + 60
    while agent.summary().stuck < 1 or agent.summary().open > 1:
        agent.poll()
        assert time.monotonic() < deadline, agent.summary()
        time.sleep(0.01)
    assert [request.request_id for request in agent.look().requests if request.stuck] == ["alive"]
    summary = agent.close()
    close(recorders)
    found = {str(spans[0].attributes[a.REQUEST_ID.key]): spans for spans in written(tmp_path)}
    assert found.keys() == {"ends", *(f"req-{number}" for number in range(100))}
    lost = f"gateway-0 lost {summary.missed} records"
    assert lost in str(found.pop("ends")[0].attributes[a.INCOMPLETE.key])
    whole = {name for name, spans in found.items() if a.SPAN.key in spans[0].attributes}
    assert 2 < len(whole) < 90
    for name, spans in found.items():
        told = [span.attributes.get(a.INCOMPLETE.key) for span in spans]
        assert set(told[1:]) == {None}
        assert told[0] == (None if name in whole else lost)
    assert (summary.stuck, summary.incomplete) == (1, 101 - len(whole))


def test_drafts_of_rings_are_deleted_once_their_writers_are_gone(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    rings.mkdir()
    fresh, left, held = (rings / f".{name}-1.ring.draft" for name in ("fresh", "left", "held"))
    for draft in (fresh, left, held):
        draft.touch()
    for draft in (left, held):
        os.utime(draft, (time.time() - 90, time.time() - 90))
    (rings / ".folder-1.ring.draft").mkdir()
    os.utime(rings / ".folder-1.ring.draft", (0, 0))
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        agent = agent_of(tmp_path)
        agent.poll()
        assert (fresh.exists(), left.exists(), held.exists()) == (True, False, True)
    agent.close()
    assert (fresh.exists(), held.exists()) == (True, False)


def test_file_that_is_no_ring_is_said_once_and_does_not_disturb(
    tmp_path: Path, recorders: Mapping[Role, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rings" / "broken.ring").write_bytes(b"not a ring")
    agent = agent_of(tmp_path)
    record_request(recorders)
    for _ in range(3):
        agent.poll()
    summary = agent.close()
    assert (summary.errors, summary.requests) == (1, 1)
    assert caplog.text.count("broken.ring") == 1


def test_ring_cut_short_under_the_agent_does_not_stop_it(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    agent = agent_of(tmp_path)
    record_request(recorders, request_id="one")
    agent.poll()
    path = recorders[Role.WORKER].path
    assert path
    path.chmod(0o600)
    os.truncate(path, 20_000)
    record_request(recorders, request_id="two")
    deadline_s = time.monotonic() + 60
    while not agent.summary().errors and time.monotonic() < deadline_s:
        agent.poll()
        time.sleep(0.05)
    summary = agent.close()
    assert request_ids(tmp_path) == ["one", "two"]
    assert summary.errors == 1


class KeepingTarget:
    name = kind = "kept"

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.shut = 0

    def send(self, spans: Sequence[Span]) -> Answer:
        self.spans += spans
        return TAKEN

    def shutdown(self) -> None:
        self.shut += 1


def test_exporter_gets_what_the_files_get(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders)
    target = KeepingTarget()
    plan = ExportPlan(targets=[target])
    agent = Agent(tmp_path / "rings", out=tmp_path, export=plan, config=QUICK)
    agent.poll()
    summary = agent.close()
    in_files = {span.span_id: span for spans in written(tmp_path) for span in spans}
    assert {span.span_id: span for span in target.spans} == in_files
    assert target.shut == 1
    assert "23 spans exported" in summary.line()


def test_agent_without_out_exports_and_leaves_no_file(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders)
    target = KeepingTarget()
    agent = Agent(tmp_path / "rings", export=ExportPlan(targets=[target]), config=QUICK)
    agent.poll()
    agent.close()
    assert target.spans
    assert [path.name for path in tmp_path.iterdir()] == ["rings"]


def test_agent_that_can_do_nothing_useful_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stop = threading.Event()
    stop.set()
    run_agent(tmp_path / "rings", stop=stop, config=QUICK)
    assert "spans go nowhere: give --out DIR, or set OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text
    assert f"no ring to read in {tmp_path / 'rings'} yet" in caplog.text


def test_stalled_request_names_its_stage_and_reason_on_the_root(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for number in range(30):
        record_request(recorders, request_id=f"healthy-{number}")
    record_request(
        recorders,
        request_id="slow",
        stage_ms={"decode.reserve": 900.0},
        waits={"decode.reserve": {"reason": WaitReason.KV_PAGES, "needed": 9, "free": 1}},
    )
    agent = Agent(tmp_path / "rings", out=tmp_path, judge=RollingJudge(), config=QUICK)
    agent.poll()
    agent.close()
    stalled = {
        str(root.attributes[a.REQUEST_ID.key]): root.attributes
        for root in roots(tmp_path)
        if a.STALL_STAGE.key in root.attributes
    }
    assert list(stalled) == ["slow"]
    slow = stalled["slow"]
    assert slow[a.STALL_STAGE.key] == "decode.reserve"
    assert slow[a.STALL_REASON.key] == "kv_pages"
    assert slow[a.STALL_SECONDS.key] == pytest.approx(0.9, abs=0.01)


def test_bug_in_the_verdict_costs_the_verdict_only(
    tmp_path: Path, recorders: Mapping[Role, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(spans: Sequence[Span]) -> Mapping[str, str]:
        raise ZeroDivisionError

    for number in range(3):
        record_request(recorders, request_id=f"req-{number}")
    agent = Agent(tmp_path / "rings", out=tmp_path, judge=broken, config=QUICK)
    agent.poll()
    summary = agent.close()
    assert len(request_ids(tmp_path)) == summary.errors == 3
    assert caplog.text.count("judging request") == 1


def test_second_agent_on_a_directory_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = agent_of(tmp_path)
    with pytest.raises(SinkError):
        agent_of(tmp_path)
    assert agent_command(tmp_path / "rings", out=tmp_path) == 2
    assert capsys.readouterr().err.startswith("pdtrace agent: another agent writes traces to")
    agent.close()


def test_bad_export_settings_are_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert main(["--rings", str(tmp_path / "rings"), "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "zipkin" in line


def test_agent_that_is_closed_twice_says_the_same(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders)
    agent = agent_of(tmp_path)
    agent.poll()
    assert agent.close() == agent.close()
