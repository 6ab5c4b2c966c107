"""The agent's process and its collector: down, hanging, killed, unsampled, half installed."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdtrace import semconv as a
from pdtrace.agent.loop import AgentConfig
from pdtrace.analysis.sources import read_source
from pdtrace.check import check_recording
from pdtrace.export.queue import MAX_BATCH_SPANS
from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import decode_line
from pdtrace.propagation import RequestContext, extract
from pdtrace.recorder import Recorder
from pdtrace.ring import RingCapacity, RingReader, scan_rings
from pdtrace.ring.layout import Counter as RingCounter
from pdtrace.spans import Span
from pdtrace.stages import Mark, Role
from pdtrace.testing import open_recorders, record_request
from tests.support.otlp_receivers import (
    Received,
    black_hole,
    grpc_receiver,
    http_receiver,
    refusing_receiver,
    silent_receiver,
    trickling_receiver,
)

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
EXIT_S = 30.0
"""Two seconds are what the agent takes at most; the rest is for a busy machine. A collector that is
waited for takes 30 s or more."""

Receiver = Callable[..., AbstractContextManager[Received]]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    no_proxy = "127.0.0.1,localhost"
    always = {"NO_PROXY": no_proxy, "no_proxy": no_proxy, "OTEL_BSP_SCHEDULE_DELAY": "20"}
    return {**plain, **always, **more}


@contextmanager
def agent_process(
    run: Path, variables: Mapping[str, str], *options: str, out: bool = True
) -> Generator[subprocess.Popen[str]]:
    """An agent over `run`/rings; killed on leaving if it still runs."""
    command = [sys.executable, "-m", "pdtrace.agent", "--rings", str(run / "rings"), "--json"]
    if out:
        command += ["--out", str(run)]
    process = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=environment(variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], *, within_s: float = 60) -> tuple[dict[str, Any], str]:
    """The totals that it printed, and its log."""
    out, err = process.communicate(timeout=within_s)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return json.loads(out.splitlines()[-1]), err


def run_to_end(run: Path, variables: Mapping[str, str]) -> Mapping[str, Any]:
    with agent_process(run, variables, "--until-closed") as process:
        return finish(process)[0]


@contextmanager
def recording(run: Path) -> Generator[Mapping[Role, Recorder]]:
    recorders = open_recorders(run / "rings", capacity=RingCapacity())
    try:
        yield recorders
    finally:
        for recorder in recorders.values():
            recorder.close()


def eventually(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(run: Path) -> list[Span]:
    return [span for line in lines_since(run / "traces") for span in decode_line(line)]


def num_written(run: Path) -> int:
    return sum(1 for _ in lines_since(run / "traces"))


# -- EXP-01: a collector that cannot be reached ----------------------------------------------


@pytest.mark.case("EXP-01")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize(
    ("receiver", "cause"),
    [
        (refusing_receiver, "Connection refused"),
        (black_hole, "it did not answer in time"),
        (silent_receiver, "it did not answer in time"),
        (trickling_receiver, None),  # for gRPC this is no answer in its protocol
    ],
)
def test_agent_ends_in_time_whatever_the_collector_does_and_the_next_one_sends_all(
    tmp_path: Path, receiver: Receiver, protocol: str, cause: str | None
) -> None:
    with recording(tmp_path) as recorders:
        for number in range(40):
            record_request(recorders, request_id=f"r{number}")
        with (
            receiver() as received,
            agent_process(tmp_path, {ENDPOINT: received.endpoint, PROTOCOL: protocol}) as process,
        ):
            eventually(lambda: num_written(tmp_path) == 40)
            begin_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            totals, log = finish(process)
            took_s = time.monotonic() - begin_s
    assert took_s < EXIT_S
    spans = written(tmp_path)
    assert totals["export"]["spans_waiting"] == len(spans)
    assert totals["export"]["spans_dropped"] == totals["export"]["spans_exported"] == 0
    [line] = [line for line in log.splitlines() if "were not exported and wait in" in line]
    assert received.endpoint in line
    if cause is not None:
        assert line.endswith(cause)
    assert "opentelemetry." not in log
    up: Receiver = grpc_receiver if protocol == "grpc" else http_receiver
    with up() as collector:
        totals = run_to_end(tmp_path, {ENDPOINT: collector.endpoint, PROTOCOL: protocol})
        assert sorted(collector.span_ids()) == sorted(span.span_id for span in spans)
    assert totals["export"]["spans_replayed"] == len(spans)
    assert totals["export"]["spans_waiting"] == 0


def test_time_that_an_agent_gives_itself_to_end_is_within_what_docs_state() -> None:
    page = (ROOT / "docs" / "recording.md").read_text()
    [stated_s] = re.findall(r"Exit takes at most (\d+) s", page)
    assert 0 < AgentConfig().flush_s <= float(stated_s) - 0.5, "the rest is for the process's end"


@pytest.mark.case("EXP-01")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_agent_that_is_told_to_stop_flushes_what_it_has(tmp_path: Path, protocol: str) -> None:
    up: Receiver = grpc_receiver if protocol == "grpc" else http_receiver
    variables = {PROTOCOL: protocol, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    with recording(tmp_path) as recorders, up() as collector:
        with agent_process(tmp_path, {ENDPOINT: collector.endpoint, **variables}) as process:
            for number in range(10):
                record_request(recorders, request_id=f"r{number}")
            eventually(lambda: num_written(tmp_path) == 10)
            assert collector.calls == 0, "the delay of a batch is an hour"
            begin_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            totals, _ = finish(process)
            took_s = time.monotonic() - begin_s
        assert took_s < EXIT_S
        assert sorted(collector.span_ids()) == sorted(span.span_id for span in written(tmp_path))
    assert totals["export"]["spans_waiting"] == 0


def test_agent_that_is_killed_loses_no_span(tmp_path: Path) -> None:
    """Killed again and again under load, with a collector that comes and goes."""
    with recording(tmp_path) as recorders, http_receiver() as collector:
        sent = 0
        kills = 0
        for round_ in range(4):
            collector.answer(503 if round_ % 2 else 200)
            with agent_process(tmp_path, {ENDPOINT: collector.endpoint}) as process:
                for _ in range(60):
                    record_request(recorders, request_id=f"r{sent}")
                    sent += 1
                    time.sleep(0.002)
                process.kill()
                process.wait()
            kills += 1
        collector.answer(200)
        for recorder in recorders.values():
            recorder.close()
        totals = run_to_end(tmp_path, {ENDPOINT: collector.endpoint})
        arrived = Counter(collector.span_ids())
    spans = written(tmp_path)
    assert Counter(span.span_id for span in spans).most_common(1)[0][1] == 1, "once in the files"
    roots = {
        str(s.attributes[a.REQUEST_ID.key])
        for s in spans
        if s.attributes.get(a.SPAN.key) == "request"
    }
    assert roots == {f"r{number}" for number in range(sent)}
    assert set(arrived) == {span.span_id for span in spans}, "nothing lost, nothing made up"
    assert totals["export"]["spans_waiting"] == totals["export"]["spans_dropped"] == 0
    repeated = sum(count - 1 for count in arrived.values())
    assert repeated <= kills * MAX_BATCH_SPANS, (
        "at most the batch whose answer was not noted, each time"
    )


# -- EXP-02: serving does not notice ---------------------------------------------------------


def mark_ns(recorder: Recorder, count: int) -> float:
    """Median nanoseconds of a mark."""
    trace = recorder.begin(RequestContext.create())
    took: list[int] = []
    for _ in range(count):
        begin_ns = time.perf_counter_ns()
        trace.mark(Mark.RESERVE_RECEIVED)
        took.append(time.perf_counter_ns() - begin_ns)
    trace.end()
    return statistics.median(took)


@pytest.mark.case("EXP-02")
@pytest.mark.parametrize("receiver", [refusing_receiver, black_hole, silent_receiver])
def test_recording_process_does_not_notice_a_collector_that_hangs(
    tmp_path: Path, receiver: Receiver
) -> None:
    with recording(tmp_path) as recorders:
        alone_ns = mark_ns(recorders[Role.DECODE], 20_000)
        with (
            receiver() as received,
            agent_process(tmp_path, {ENDPOINT: received.endpoint}) as process,
        ):
            record_request(recorders, request_id="first")
            eventually(lambda: num_written(tmp_path) == 1)
            beside_ns = mark_ns(recorders[Role.DECODE], 20_000)
            for number in range(200):
                record_request(recorders, request_id=f"r{number}")
            eventually(lambda: num_written(tmp_path) == 201)
            process.send_signal(signal.SIGTERM)
            totals, _ = finish(process)
    # The median of a microsecond's work; an export in its way would take milliseconds.
    assert beside_ns < 10 * alone_ns + 20_000
    assert (totals["missed"], totals["torn"], totals["incomplete"]) == (0, 0, 0)
    for path in scan_rings(tmp_path / "rings"):
        with RingReader(path) as reader:
            counters = reader.counters()
            assert (counters[RingCounter.DROPPED], counters[RingCounter.ERRORS]) == (0, 0)


# -- EXP-05: a queue that is too small -------------------------------------------------------


@pytest.mark.case("EXP-05")
def test_queue_that_is_too_small_loses_nothing_with_files(tmp_path: Path) -> None:
    with recording(tmp_path) as recorders:
        for number in range(1_000):
            record_request(recorders, request_id=f"r{number}")
    with http_receiver() as collector:
        totals = run_to_end(
            tmp_path, {ENDPOINT: collector.endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": "10"}
        )
        waiting = totals["export"]["spans_waiting"]
        arrived = set(collector.span_ids())
        assert len(arrived) >= totals["export"]["spans_exported"] > 0
        while waiting:  # an exit is bounded; the rest is the next agent's
            totals = run_to_end(tmp_path, {ENDPOINT: collector.endpoint})
            assert totals["export"]["spans_waiting"] < waiting
            waiting = totals["export"]["spans_waiting"]
    spans = written(tmp_path)
    assert set(collector.span_ids()) == {span.span_id for span in spans}
    assert totals["export"]["spans_dropped"] == 0
    assert len({span.trace_id for span in spans}) == 1_000


@pytest.mark.case("EXP-05")
def test_queue_that_is_too_small_without_files_counts_and_says_what_it_drops(
    tmp_path: Path,
) -> None:
    with recording(tmp_path) as recorders:
        for number in range(1_000):
            record_request(recorders, request_id=f"r{number}")
    with http_receiver() as collector:
        variables = {ENDPOINT: collector.endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": "10"}
        with agent_process(tmp_path, variables, "--until-closed", out=False) as process:
            totals, log = finish(process)
    export = totals["export"]
    assert totals["requests"] == 1_000
    assert export["spans_dropped"] > 0
    assert export["spans_exported"] + export["spans_dropped"] == totals["spans"]
    assert export["spans_dropped"] == export.get("spans_dropped_queue_full", 0) + export.get(
        "spans_dropped_not_taken_before_exit", 0
    )
    assert log.count("spans are dropped (queue full)") == 1
    # Whole requests are dropped: what arrived needs no mark of being incomplete.
    per_trace = Counter(span.trace_id for span in collector.spans())
    assert set(per_trace.values()) == {totals["spans"] // 1_000}


# -- CTX-09: the caller asks for no trace ----------------------------------------------------


@pytest.mark.case("CTX-09")
@pytest.mark.parametrize(
    ("sampler", "exported"), [(None, False), ("always_on", True), ("parentbased_always_on", False)]
)
def test_callers_flag_decides_unless_it_is_overridden_and_the_files_have_all(
    tmp_path: Path, sampler: str | None, exported: bool
) -> None:
    with recording(tmp_path) as recorders:
        for number in range(5):
            header = f"00-{number + 1:032x}-00000000000000ab-00"
            parent = extract({"traceparent": header})
            record_request(recorders, request_id=f"r{number}", parent=parent)
    more = {} if sampler is None else {"OTEL_TRACES_SAMPLER": sampler}
    with http_receiver() as collector:
        totals = run_to_end(tmp_path, {ENDPOINT: collector.endpoint, **more})
        arrived = collector.span_ids()
    spans = written(tmp_path)
    assert sorted(arrived) == (sorted(span.span_id for span in spans) if exported else [])
    assert totals["export"]["spans_unsampled"] == (0 if exported else len(spans))
    assert totals["requests"] == 5
    found = read_source(tmp_path)
    assert len(found.traces) == 5
    assert check_recording(found).ok
    # A later agent does not take the unsampled ones for spans that wait.
    with http_receiver() as collector:
        run_to_end(tmp_path, {ENDPOINT: collector.endpoint})
        assert collector.calls == 0


@pytest.mark.case("CTX-09")
@pytest.mark.parametrize("sampler", ["parentbased_always_on", "always_on"])
def test_metrics_count_requests_whatever_is_exported(tmp_path: Path, sampler: str) -> None:
    with recording(tmp_path) as recorders, http_receiver() as collector:
        variables = {ENDPOINT: collector.endpoint, "OTEL_TRACES_SAMPLER": sampler}
        with agent_process(tmp_path, variables, "--http", "127.0.0.1:0") as process:
            for number in range(5):
                parent = extract({"traceparent": f"00-{number + 1:032x}-00000000000000ab-00"})
                record_request(recorders, request_id=f"r{number}", parent=parent)
            eventually(lambda: num_written(tmp_path) == 5)
            url = json.loads((tmp_path / "agent.json").read_text())["url"]

            def completed() -> float:
                text = httpx.get(f"{url}/metrics", timeout=60.0, trust_env=False).text
                lines = [
                    line
                    for line in text.splitlines()
                    if line.startswith("pd_finished_requests_total{")
                ]
                return sum(float(line.split()[-1]) for line in lines)

            eventually(lambda: completed() == 5)
            process.send_signal(signal.SIGTERM)
            finish(process)
    assert bool(collector.calls) is (sampler == "always_on")


def test_docs_name_the_override() -> None:
    page = (ROOT / "docs" / "recording.md").read_text()
    assert "traceparent" in page
    assert "OTEL_TRACES_SAMPLER=always_on" in page


# -- CFG-01, CFG-04: endpoints, and what the log says of them --------------------------------


@pytest.mark.case("CFG-01")
@pytest.mark.case("CFG-04")
@pytest.mark.parametrize("variable", [ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces", "/v1/traces/"])
def test_spans_of_every_process_arrive_and_the_log_says_where(
    tmp_path: Path, variable: str, suffix: str
) -> None:
    with recording(tmp_path) as recorders:
        record_request(recorders)
    with http_receiver() as collector:
        options = {variable: collector.endpoint + suffix}
        with agent_process(tmp_path, options, "--until-closed") as process:
            _, log = finish(process)
        assert collector.paths == ["/v1/traces"]
        instances = {resource["service.instance.id"] for resource in collector.resources()}
    assert instances == {"gateway-0", "prefill-0", "transfer-0", "decode-0"}
    assert log.count(f"exporting traces with OTLP over HTTP to {collector.endpoint}/v1/traces") == 1


@pytest.mark.case("CFG-01")
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({ENDPOINT: "localhost:4318"}, "needs a URL such as http://localhost:4318"),
        ({ENDPOINT: "ftp://h"}, "ENDPOINT is 'ftp://h'"),
        ({ENDPOINT: "http://h", PROTOCOL: "http/json"}, "PROTOCOL is 'http/json'"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin' is none of"),
        ({ENDPOINT: "http://h", "OTEL_SPAN_LINK_COUNT_LIMIT": "x"}, "LINK_COUNT_LIMIT is 'x'"),
    ],
)
def test_settings_that_cannot_be_meant_are_one_clear_line(
    tmp_path: Path, variables: Mapping[str, str], says: str
) -> None:
    with agent_process(tmp_path, variables, "--until-closed") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("pdtrace agent: ")
    assert says in line


@pytest.mark.case("CFG-01")
def test_path_that_nobody_serves_is_one_clear_line(tmp_path: Path) -> None:
    with recording(tmp_path) as recorders:
        record_request(recorders)
    with http_receiver() as collector:
        endpoint = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.endpoint}/wrong"}
        with agent_process(tmp_path, endpoint, "--until-closed") as process:
            totals, log = finish(process)
        assert collector.paths == ["/wrong"]
    [line] = [line for line in log.splitlines() if "does not take spans" in line]
    assert "404" in line
    assert "is this the address of an OTLP/HTTP receiver?" in line
    assert totals["export"]["spans_dropped_refused"] == totals["spans"]


# -- CFG-03: packages that are missing -------------------------------------------------------


WITHOUT = """
    import importlib.abc, runpy, sys
    hidden = sys.argv.pop(1).split(",")

    class Hide(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if any(name == top or name.startswith(top + ".") for top in hidden):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return None

    sys.meta_path.insert(0, Hide())
    sys.argv[0] = "pdtrace agent"
    from pdtrace.agent.command import main
    sys.exit(main())
    """


def agent_without(
    hidden: str, run: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(WITHOUT), hidden),
            *("--rings", str(run / "rings"), "--out", str(run), "--until-closed", "--json"),
        ],
        cwd=ROOT,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.case("CFG-03")
@pytest.mark.parametrize(
    ("hidden", "protocol"),
    [
        ("opentelemetry", "http/protobuf"),
        ("opentelemetry.sdk", "http/protobuf"),
        ("opentelemetry.exporter", "http/protobuf"),
        ("opentelemetry.exporter.otlp.proto.http", "http/protobuf"),
        ("opentelemetry.exporter.otlp.proto.grpc", "grpc"),
        ("grpc", "grpc"),
    ],
)
def test_export_without_its_packages_fails_at_once_and_says_what_to_install(
    tmp_path: Path, hidden: str, protocol: str
) -> None:
    with recording(tmp_path) as recorders:
        record_request(recorders)
    done = agent_without(hidden, tmp_path, {ENDPOINT: "http://127.0.0.1:1", PROTOCOL: protocol})
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("pdtrace agent: the OTEL_* variables ask for export, but a package is")
    assert f"No module named '{hidden}" in line
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp" in line
    assert not (tmp_path / "traces").exists(), "nothing was begun"


@pytest.mark.case("CFG-03")
@pytest.mark.parametrize(
    "variables", [{}, {ENDPOINT: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}]
)
def test_agent_that_is_not_asked_to_export_needs_no_packages_for_it(
    tmp_path: Path, variables: Mapping[str, str]
) -> None:
    with recording(tmp_path) as recorders:
        record_request(recorders)
    done = agent_without("opentelemetry,grpc,google,requests", tmp_path, variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["requests"] == 1
    assert num_written(tmp_path) == 1


@pytest.mark.case("CFG-03")
def test_export_over_http_does_not_need_grpc(tmp_path: Path) -> None:
    with recording(tmp_path) as recorders:
        record_request(recorders)
    with http_receiver() as collector:
        hidden = "grpc,opentelemetry.exporter.otlp.proto.grpc"
        done = agent_without(hidden, tmp_path, {ENDPOINT: collector.endpoint})
        assert done.returncode == 0, done.stderr
        assert len(collector.spans()) == len(written(tmp_path)) > 0


# -- CFG-06: who the processes are -----------------------------------------------------------


@pytest.mark.case("CFG-06")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"OTEL_SERVICE_NAME": "mine"}, {"service.name": "mine"}),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,deployment.environment.name=lab"},
            {"service.name": "ours", "deployment.environment.name": "lab"},
        ),
        (
            {
                "OTEL_SERVICE_NAME": "mine",
                "OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,service.namespace=team%20a",
            },
            {"service.name": "mine", "service.namespace": "team a"},
        ),
    ],
)
def test_processes_have_names_and_instances_of_their_own_and_the_users_value_wins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: Mapping[str, str],
    expected: Mapping[str, str],
) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with recording(tmp_path) as recorders:
        record_request(recorders)
    with http_receiver() as collector:
        run_to_end(tmp_path, {ENDPOINT: collector.endpoint})
        resources = {r["service.instance.id"]: r for r in collector.resources()}
    roles = ("gateway", "prefill", "transfer", "decode")
    assert set(resources) == {f"{role}-0" for role in roles}
    for role in roles:
        resource = resources[f"{role}-0"]
        named = {"service.name": f"pd-{role}", "service.namespace": "pdtrace", **expected}
        assert {key: resource.get(key) for key in named} == named
        assert resource["host.id"] == resources["gateway-0"]["host.id"] != ""
