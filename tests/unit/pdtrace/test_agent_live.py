"""What an agent shows and says while requests are in flight: looks, metrics, stuck reports."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pdtrace import semconv as a
from pdtrace.agent.command import STATE_NAME, Agent, AgentConfig, main, run_agent
from pdtrace.agent.endpoint import read_address
from pdtrace.agent.loop import MAX_STUCK_LINES
from pdtrace.agent.metrics import AgentMetrics
from pdtrace.export.delivery import TRACES_NAME, Delivery
from pdtrace.export.sink import lines_since
from pdtrace.inflight import Look, ProcessNow, ProcessState
from pdtrace.live.stuck import StuckPolicy
from pdtrace.otlp.json_lines import decode_line
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.spans import Span
from pdtrace.stages import Gauge, Mark, Mode, Outcome, Role, StepKind, WaitReason
from pdtrace.testing import open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 60.0
QUICK = AgentConfig(
    poll_s=0.01, idle_poll_s=0.02, grace_s=0.2, flush_s=0.5, state_s=0.02, stuck_s=0.02
)
_T = TypeVar("_T")


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings")
    yield opened
    for recorder in opened.values():
        recorder.close()


def until(ask: Callable[[], _T], holds: Callable[[_T], bool]) -> _T:
    deadline = time.monotonic() + WITHIN_S
    while True:
        answer = ask()
        if holds(answer):
            return answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)


def written(tmp_path: Path) -> list[list[Span]]:
    return [decode_line(line) for line in lines_since(tmp_path / TRACES_NAME)]


def reserving(recorders: Mapping[Role, Recorder], request_id: str) -> list[Any]:
    """A request that waits for pages on decode-0."""
    context = RequestContext.create(request_id=request_id, mode=Mode.PD)
    gateway = recorders[Role.GATEWAY].begin(context)
    gateway.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    gateway.mark(Mark.TOKENIZED, "m", 96, 4, True, Mode.PD)
    gateway.mark(Mark.ADMITTED, 1)
    gateway.mark(Mark.ROUTED, "prefill-0", "decode-0", "round_robin", 1, "")
    gateway.mark(Mark.DISPATCHED)
    decode = recorders[Role.DECODE].begin(context)
    decode.mark(Mark.RESERVE_RECEIVED)
    decode.wait("decode.reserve", WaitReason.KV_PAGES, needed=9, free=1, blocker="req-0")
    return [gateway, decode]


def finish(traces: Sequence[Any]) -> None:
    gateway, decode = traces
    decode.mark(Mark.PAGES_RESERVED, 4, 9)
    decode.end()
    gateway.mark(Mark.COMPLETED, Outcome.CANCELLED, "client_gone", "client")
    gateway.end()


def test_look_shows_where_a_request_is_what_it_waits_for_and_what_is_usual(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for number in range(25):
        record_request(recorders, request_id=f"done-{number}", stage_ms={"decode.reserve": 4.0})
    traces = reserving(recorders, "waits")
    agent = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    agent.poll()
    [request] = agent.look().requests
    assert (request.request_id, request.stage, request.worker) == (
        "waits",
        "decode.reserve",
        "decode-0",
    )
    assert request.usual_s == pytest.approx(0.004)
    assert request.p99_s == pytest.approx(0.004)
    assert request.wait is not None
    assert (request.wait.reason, request.wait.blockers) == ("kv_pages", ("req-0",))
    assert not request.stuck
    age_s = request.stage_age_s
    # It grows without a poll, and without a word from the worker.
    assert agent.look().requests[0].stage_age_s > age_s
    finish(traces)
    until(lambda: (agent.poll(), agent.look().requests)[1], lambda requests: not requests)
    agent.close()


def test_look_shows_processes_by_what_their_rings_say(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    now_ns = time.monotonic_ns()
    decode = recorders[Role.DECODE]
    decode.gauge(Gauge.LAST_PROGRESS_NS, now_ns - 60_000_000_000)
    decode.gauge(Gauge.KV_PAGES_FREE, 3)
    for role in (Role.PREFILL, Role.TRANSFER):
        recorders[role].gauge(Gauge.LAST_PROGRESS_NS, now_ns - 60_000_000_000)
    traces = reserving(recorders, "waits")
    recorders[Role.WORKER].close()
    agent = Agent(tmp_path / "rings", config=QUICK)
    agent.poll()

    def by_name() -> dict[str, ProcessNow]:
        return {process.instance: process for process in agent.look().processes}

    shown = by_name()
    assert shown["decode-0"].state is ProcessState.STALLED
    assert shown["decode-0"].progress_age_s == pytest.approx(60, abs=30)
    assert shown["decode-0"].open_requests == 1
    assert shown["decode-0"].gauges["kv_pages_free"] == 3
    assert shown["prefill-0"].state is ProcessState.STALLED, "the request was sent to it"
    assert shown["transfer-0"].state is ProcessState.ALIVE, "it has nothing to do"
    assert shown["gateway-0"].state is ProcessState.ALIVE
    assert shown["gateway-0"].progress_age_s is None
    assert shown["worker-0"].state is ProcessState.CLOSED
    decode.gauge(Gauge.LAST_PROGRESS_NS, time.monotonic_ns())
    assert by_name()["decode-0"].state is ProcessState.ALIVE
    finish(traces)
    agent.close()


def test_look_and_health_answer_while_delivery_hangs(
    tmp_path: Path, recorders: Mapping[Role, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def deliver(self: Delivery, built: object) -> None:
        hangs.set()
        assert go_on.wait(WITHIN_S)

    monkeypatch.setattr(Delivery, "deliver", deliver)
    monkeypatch.setattr("pdtrace.agent.loop.KEEPS_UP_S", 0.2)
    record_request(recorders, request_id="done")
    traces = reserving(recorders, "waits")
    agent = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    poller = threading.Thread(target=agent.poll)
    poller.start()
    assert hangs.wait(WITHIN_S)
    assert [request.request_id for request in agent.look().requests] == ["waits"]
    healthy, facts = until(agent.health, lambda health: not health[0])
    assert (healthy, facts["status"]) == (False, "stopped")
    go_on.set()
    poller.join(WITHIN_S)
    until(lambda: (agent.poll(), agent.health())[1], lambda health: health[0])
    finish(traces)
    agent.close()


def test_look_at_many_is_taken_in_parts_and_shared_while_it_is_fresh(
    tmp_path: Path, recorders: Mapping[Role, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdtrace.agent.loop._LOOK_AT_ONCE", 2)
    agent = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    for number in range(5):
        reserving(recorders, f"r-{number}")
    agent.poll()
    first = agent.look()
    assert [request.request_id for request in first.requests] == [f"r-{n}" for n in range(5)]
    assert agent.look() is not first  # a quick one is never shown again
    monkeypatch.setattr("pdtrace.agent.loop._LONG_LOOK_S", -1.0)
    monkeypatch.setattr("pdtrace.agent.loop._LOOK_KEEPS", 1e9)
    second = agent.look()
    assert agent.look() is second
    agent.close()


def test_stuck_request_is_reported_once_and_its_span_says_so(
    tmp_path: Path, recorders: Mapping[Role, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    policy = StuckPolicy(floor_s=0.01, deadlines={"decode.reserve": 0.1})
    metrics = AgentMetrics()
    agent = Agent(
        tmp_path / "rings",
        out=tmp_path,
        metrics=metrics,
        config=dataclasses.replace(QUICK, stuck=policy),
    )
    record_request(recorders, request_id="healthy")
    traces = reserving(recorders, "stuck")
    trace_id = traces[0].context.trace_id
    until(lambda: (agent.poll(), agent.summary().stuck)[1], lambda stuck: stuck == 1)
    assert agent.look().requests[0].stuck
    for _ in range(5):
        time.sleep(0.03)
        agent.poll()
    lines = [r.getMessage() for r in caplog.records if "is stuck in" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"request stuck (trace {trace_id}, attempt 1) is stuck in decode.reserve on decode-0: "
    )
    assert "waits for kv_pages (needed 9, free 1), blocked by req-0" in lines[0]
    assert agent.summary().stuck == 1
    finish(traces)
    until(lambda: (agent.poll(), len(written(tmp_path)))[1], lambda count: count == 2)
    agent.close()
    marked = {
        (span.attributes[a.REQUEST_ID.key], span.name, event.name)
        for spans in written(tmp_path)
        for span in spans
        for event in span.events
        if event.name == "pd.stuck"
    }
    assert marked == {("stuck", "decode.reserve", "pd.stuck")}


def test_stuck_request_is_reported_once_over_restarts_and_its_span_says_so(
    tmp_path: Path, recorders: Mapping[Role, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    policy = StuckPolicy(floor_s=0.01, deadlines={"decode.reserve": 0.1})
    config = dataclasses.replace(QUICK, stuck=policy)
    traces = reserving(recorders, "stuck")
    for _ in range(3):
        agent = Agent(tmp_path / "rings", out=tmp_path, config=config)
        until(
            lambda agent=agent: (agent.poll(), agent.look().requests)[1],
            # It is looked for less often than it is looked at.
            lambda requests: (
                len(requests) == 1 and requests[0].stuck and "is stuck in" in caplog.text
            ),
        )
        agent.close()
    assert caplog.text.count("is stuck in") == 1
    finish(traces)
    agent = Agent(tmp_path / "rings", out=tmp_path, config=config)
    until(lambda: (agent.poll(), len(written(tmp_path)))[1], lambda count: count == 1)
    agent.close()
    [spans] = written(tmp_path)
    marked = [(span.name, event.name) for span in spans for event in span.events]
    assert marked.count(("decode.reserve", "pd.stuck")) == 1
    assert not json.loads((tmp_path / STATE_NAME).read_bytes()).get("reported")


def test_many_requests_that_become_stuck_at_once_are_a_few_lines(
    tmp_path: Path, recorders: Mapping[Role, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    policy = StuckPolicy(floor_s=0.01, deadlines={"decode.reserve": 0.1})
    config = dataclasses.replace(QUICK, stuck=policy, stuck_s=0.5)
    metrics = AgentMetrics()
    agent = Agent(tmp_path / "rings", out=tmp_path, metrics=metrics, config=config)
    for number in range(50):
        reserving(recorders, f"stuck-{number}")
    time.sleep(0.2)
    until(lambda: (agent.poll(), agent.summary().stuck)[1], lambda stuck: stuck == 50)
    assert all(request.stuck for request in agent.look().requests)
    agent.close()
    assert caplog.text.count("is stuck in") == MAX_STUCK_LINES
    assert "30 further requests are stuck: 30 in decode.reserve on decode-0" in caplog.text


def test_forward_passes_become_spans_once_over_restarts(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    decode = recorders[Role.DECODE]
    context = RequestContext.create(request_id="member")
    trace = decode.begin(context)
    now_ns = time.monotonic_ns()

    def passes(first: int, count: int) -> None:
        for number in range(first, first + count):
            begin_ns = now_ns + number * 10**9
            slow = number % 40 == 39
            length_ns = 90_000_000 if slow else 2_000_000
            decode.step(
                StepKind.DECODE, [trace], tokens=1, begin_ns=begin_ns, end_ns=begin_ns + length_ns
            )

    passes(0, 100)
    agent = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    agent.poll()
    agent.close()
    passes(100, 60)
    for _ in range(2):
        agent = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
        agent.poll()
        agent.close()
        # A state as old as can be: what was delivered since stands in the files.
        (tmp_path / "agent-state.json").unlink()
    steps = [s for spans in written(tmp_path) for s in spans if s.name == "step.decode"]
    numbers = [span.attributes[a.STEP_NUMBER.key] for span in steps]
    assert numbers == [40, 80, 120, 160]
    assert steps[0].links[0].trace_id == context.trace_id
    assert steps[0].links[0].span_id == context.attempt_span_id
    trace.end()


def test_members_that_begin_and_end_with_the_pass_are_named(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    decode = recorders[Role.DECODE]
    begin_ns = time.monotonic_ns()
    for number in range(30):
        trace = decode.begin(RequestContext.create(request_id=f"req-{number}"))
        length_ns = 90_000_000 if number == 29 else 1_000_000
        decode.step(
            StepKind.DECODE, [trace], tokens=1, begin_ns=begin_ns, end_ns=begin_ns + length_ns
        )
        trace.end()
    agent = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    agent.poll()
    agent.close()
    [step] = [s for spans in written(tmp_path) for s in spans if s.name == "step.decode"]
    assert list(step.attributes[a.STEP_MEMBERS.key]) == ["req-29"]  # pyright: ignore[reportArgumentType]


# -- a whole agent process -------------------------------------------------------------------


@contextlib.contextmanager
def agent_process(
    tmp_path: Path, *more: str, **environ: str
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """An agent that answers, and its URL."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pdtrace.agent", "--rings", str(tmp_path / "rings")),
            *("--out", str(tmp_path), "--http", "127.0.0.1:0", *more),
        ],
        cwd=ROOT,
        env={**os.environ, **environ},
        text=True,
        stderr=subprocess.PIPE,
    )
    try:
        address = until(lambda: read_address(tmp_path), lambda found: found is not None)
        assert address is not None
        assert address.pid == process.pid
        yield process, address.url
    finally:
        process.kill()
        process.communicate()


def get(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WITHIN_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def look_at(url: str, query: str = "") -> Look:
    status, body = get(url, f"/inflight{query}")
    assert status == 200, body
    return msgspec.json.decode(body, type=Look)


def metric(url: str, name: str, **labels: str) -> float:
    _, body = get(url, "/metrics")
    samples = [s for family in parse_text(body.decode()) for s in family.samples]
    [found] = [s.value for s in samples if s.name == name and s.labels == labels]
    return found


STOPPABLE = """
    import sys
    from pdtrace.propagation import RequestContext
    from pdtrace.stages import Gauge, Mark, Role, WaitReason
    from pdtrace.testing import open_recorders
    import time
    recorders = open_recorders(sys.argv[1], roles=(Role.GATEWAY, Role.DECODE))
    context = RequestContext.create(request_id="frozen")
    gateway = recorders[Role.GATEWAY].begin(context)
    gateway.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    gateway.mark(Mark.TOKENIZED, "m", 96, 4, True, "pd")
    gateway.mark(Mark.ADMITTED, 1)
    gateway.mark(Mark.ROUTED, "prefill-0", "decode-0", "round_robin", 1, "")
    gateway.mark(Mark.DISPATCHED)
    decode = recorders[Role.DECODE].begin(context)
    decode.mark(Mark.RESERVE_RECEIVED)
    recorders[Role.DECODE].gauge(Gauge.LAST_PROGRESS_NS, time.monotonic_ns())
    print("ready", flush=True)
    while True:
        recorders[Role.DECODE].gauge(Gauge.LAST_PROGRESS_NS, time.monotonic_ns())
        time.sleep(0.01)
    """


def test_everything_moves_while_the_recording_process_is_stopped_and_exports_hang(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, answers nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STOPPABLE), str(tmp_path / "rings")],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
        )
        assert writer.stdout
        try:
            assert writer.stdout.readline() == "ready\n"
            others = open_recorders(tmp_path / "rings", roles=(Role.GATEWAY, Role.WORKER))
            for number in range(3):
                record_request(others, request_id=f"done-{number}", mode=Mode.COLOCATED)
            os.kill(writer.pid, signal.SIGSTOP)
            with agent_process(
                tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_SCHEDULE_DELAY="10"
            ) as (_, url):
                until(lambda: look_at(url), lambda look: len(look.requests) == 1)
                until(lambda: len(written(tmp_path)), lambda count: count == 3)
                first = look_at(url, "?id=frozen").requests[0]
                assert (first.stage, first.worker) == ("decode.reserve", "decode-0")

                def ages() -> tuple[float, float]:
                    oldest = "pd_open_request_oldest_age_seconds"
                    progress = "pd_process_progress_age_seconds"
                    return (
                        metric(url, oldest, stage="decode.reserve"),
                        metric(url, progress, role="decode", instance="decode-0"),
                    )

                before = ages()
                assert metric(url, "pd_open_requests", stage="decode.reserve") == 1
                after = until(
                    ages, lambda now: now[0] > before[0] + 0.2 and now[1] > before[1] + 0.2
                )
                assert look_at(url).requests[0].stage_age_s >= after[0]
                until(
                    lambda: {p.instance: p.state for p in look_at(url).processes},
                    lambda states: states["decode-0"] is ProcessState.STALLED,
                )
                status, body = get(url, "/health")
                assert (status, json.loads(body)["status"]) == (200, "ok")
                status, body = get(url, "/metrics", Accept="application/openmetrics-text")
                assert b"# {" in body, "exemplars lead to the traces"
                assert b"frozen" not in body, "request ids are never labels"
            for recorder in others.values():
                recorder.close()
        finally:
            os.kill(writer.pid, signal.SIGCONT)
            writer.kill()
            writer.communicate()


def test_agent_that_is_told_to_stop_takes_its_address_away(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders)
    with agent_process(tmp_path) as (process, url):
        assert get(url, "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 0, err
        assert f"answering at {url}" in err
    assert read_address(tmp_path) is None


def test_options_that_cannot_be_are_one_clear_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rings = str(tmp_path / "rings")
    for options, words in (
        (["--http", "0.0.0.0:0"], "0.0.0.0 is not loopback"),
        (["--http", "here"], "'here' is no address"),
        (["--deadline", "transfer"], "must be STAGE=SECONDS"),
        (["--deadline", "decode.sleep=3"], "no stage"),
        (["--stuck-share", "2"], "stuck share is 2.0"),
        (["--stuck-factor", "0.1"], "stuck factor is 0.1"),
        (["--stuck-floor", "0"], "stuck floor is 0.0"),
        (["--keep-rings", "-1"], "keep-rings is -1"),
    ):
        assert main(["--rings", rings, "--out", str(tmp_path), "--until-closed", *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("pdtrace agent: ")
        assert words in line


def test_options_of_the_pdtrace_command_are_those_of_the_agent(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request(recorders, request_id="one")
    for recorder in recorders.values():
        recorder.close()
    command = [sys.executable, "-m", "pdtrace", "agent", "--rings", str(tmp_path / "rings")]
    command += ["--out", str(tmp_path), "--until-closed", "--json"]
    wrong = subprocess.run(
        [*command, "--deadline", "transfer"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines() == [
        "pdtrace: deadline 'transfer' must be STAGE=SECONDS, such as decode.reserve=30"
    ]
    options = ["--deadline", "transfer=5", "--stuck-share", "0.5", "--stuck-factor", "3"]
    options += ["--stuck-floor", "1", "--keep-rings", "2", "--http", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 1
    assert "answering at http://127.0.0.1:" in done.stderr


def test_file_in_place_of_a_directory_of_rings_is_refused(
    tmp_path: Path, recorders: Mapping[Role, Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorders[Role.GATEWAY].path
    assert main(["--rings", str(path), "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"pdtrace agent: {path} is a file, and rings are read from a directory: "
        "give the one it is in"
    )


def test_rings_missing_beside_a_run_that_has_some_are_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "2026-11-29-1" / "rings").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("2026-11-29-1")
    assert main(["--rings", str(tmp_path / "rings"), "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    latest = tmp_path / "latest"
    assert line == (
        f"pdtrace agent: {tmp_path / 'rings'}: no such directory, but the newest run in {tmp_path} "
        f"has one: give --rings {latest / 'rings'} --out {latest}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2026-11-29-1", "latest"]


def test_without_prometheus_client_only_http_is_missing(
    tmp_path: Path,
    recorders: Mapping[Role, Recorder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pdtrace.agent.metrics", "pdtrace.agent.tallies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    record_request(recorders)
    for recorder in recorders.values():
        recorder.close()
    rings = str(tmp_path / "rings")
    assert main(["--rings", rings, "--out", str(tmp_path), "--http", "127.0.0.1:0"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install prometheus-client" in line
    assert run_agent(rings, out=tmp_path, until_closed=True, config=QUICK).requests == 1


def test_request_that_is_stuck_again_later_is_shown_as_stuck(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    policy = StuckPolicy(floor_s=0.05, default_s=0.05)
    agent = Agent(tmp_path / "rings", out=tmp_path, config=dataclasses.replace(QUICK, stuck=policy))
    _, decode = reserving(recorders, "twice")

    def now() -> tuple[str | None, bool]:
        agent.poll()
        [request] = agent.look().requests
        return request.stage, request.stuck

    until(now, lambda seen: seen == ("decode.reserve", True))
    until(lambda: (agent.poll(), agent.summary().stuck)[1], lambda stuck: stuck == 1)
    decode.mark(Mark.PAGES_RESERVED, 4, 9)
    until(now, lambda seen: seen == ("hop.publish", True))
    assert agent.summary().stuck == 1, "one report for a request is enough"
    agent.close()


def test_agent_that_was_started_again_knows_what_is_usual(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for number in range(25):
        record_request(recorders, request_id=f"done-{number}", stage_ms={"decode.reserve": 4.0})
    traces = reserving(recorders, "waits")
    first = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    until(lambda: (first.poll(), first.summary().requests)[1], lambda count: count == 25)
    [before] = first.look().requests
    first.close()
    again = Agent(tmp_path / "rings", out=tmp_path, config=QUICK)
    again.poll()
    [after] = again.look().requests
    assert (after.usual_s, after.p99_s) == (before.usual_s, before.p99_s)
    assert after.p99_s is not None
    finish(traces)
    again.close()
