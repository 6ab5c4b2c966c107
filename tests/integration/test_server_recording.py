"""What every recording of a whole server keeps."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pdtrace import Gauge, RingReader, Role, scan_rings
from pdtrace import semconv as a
from pdtrace.analysis.sources import Recording, read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.spans import Span, Trace
from pdtrace.stages import CHAINS, Outcome
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Answer, Ask, ask, ask_all
from tests.support.jaeger_critical_path import critical_path
from tests.support.server import running_server

pytestmark = pytest.mark.server

CALLER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Answer]]:
    """A run under load, with refusals, a cancellation and a continued trace among the requests."""
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    with running_server(run_dir, "--allow-faults", model=FAST_FAKE) as server:
        asks = [
            Ask(
                prompt="p" * (7 + 53 * i % 900),
                max_tokens=4 + i % 20,
                stream=i % 2 == 0,
                request_id=f"load-{i}",
            )
            for i in range(40)
        ]
        asks.append(
            Ask(
                request_id="continued",
                headers={"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"},
            )
        )
        asks.append(Ask(request_id="refused", more={"temperature": -1}))
        answers = ask_all(server, asks, at_once=12)
        _leave_early(server.url, server.model)
        # One more round trip: the abandoned request has ended when the pool serves this one.
        answers.append(ask(server, Ask(prompt="z" * 7000, request_id="after")))
        ids = [*(request.request_id or "" for request in asks), "after"]
    return run_dir, dict(zip(ids, answers, strict=True))


def _leave_early(url: str, model: str) -> None:
    import httpx

    body = {"model": model, "prompt": "q" * 80, "max_tokens": 3000, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
        client.stream(
            "POST",
            "/v1/completions",
            json={**body, "ignore_eos": True},
            headers={"X-Request-Id": "left"},
        ) as response,
    ):
        next(response.iter_lines())


@pytest.fixture(scope="module")
def recording(run: tuple[Path, dict[str, Answer]]) -> Recording:
    return read_source(run[0])


@pytest.fixture(scope="module")
def timelines(recording: Recording) -> dict[str, Timeline]:
    return {t.request_id or t.trace_id: t for t in build_timelines(recording.traces)}


def spans_of(trace: Trace, service: str) -> list[Span]:
    return [span for span in trace.spans if span.resource.service_name == service]


def is_step(trace: Trace) -> bool:
    """Whether it is the trace of a forward pass, which is no request's."""
    return all(a.STEP_KIND.key in span.attributes for span in trace.spans)


def test_every_request_is_recorded_once(
    run: tuple[Path, dict[str, Answer]], recording: Recording, timelines: dict[str, Timeline]
) -> None:
    assert set(timelines) == {*run[1], "left"}
    steps = [trace for trace in recording.traces if is_step(trace)]
    assert len(recording.traces) - len(steps) == len(timelines)
    assert not recording.problems


def test_every_request_partitions_exactly(timelines: dict[str, Timeline]) -> None:
    for name, timeline in timelines.items():
        assert all(part.ns >= 0 for part in timeline.parts), name
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns, name
        assert timeline.violations == (), name


def test_jaegers_critical_path_is_the_chain(
    recording: Recording, timelines: dict[str, Timeline]
) -> None:
    by_trace = {t.trace_id: t for t in timelines.values() if t.outcome is Outcome.COMPLETED}
    for trace in recording.traces:
        timeline = by_trace.get(trace.trace_id)
        if timeline is None or timeline.attempts > 1:
            continue
        on_path = {name for name, _, _ in critical_path(trace.spans)}
        chain = {stage.name for stage in CHAINS[timeline.mode]}
        seen = {s.name for s in trace.spans if s.name in chain and s.end_ns - s.start_ns >= 1_000}
        # The first token travels beside generation: the longer of the two is on the path.
        beside = {"hop.token", "decode.generate"}
        assert seen - beside <= on_path, timeline.request_id
        assert beside & on_path, timeline.request_id


def test_unexplained_time_is_below_one_percent(timelines: dict[str, Timeline]) -> None:
    total = sum(timeline.total_ns for timeline in timelines.values())
    assert sum(t.unexplained_ns for t in timelines.values()) <= 0.01 * total


def test_completed_requests_have_spans_of_all_four_processes_with_one_request_id(
    recording: Recording, timelines: dict[str, Timeline]
) -> None:
    completed = {t.trace_id for t in timelines.values() if t.outcome is Outcome.COMPLETED}
    assert len(completed) >= 42
    for trace in recording.traces:
        if trace.trace_id not in completed:
            continue
        ids = defaultdict[str, set[object]](set)
        for span in trace.spans:
            ids[span.resource.service_name].add(span.attributes.get(a.REQUEST_ID.key))
        assert set(ids) == {"pd-gateway", "pd-prefill", "pd-transfer", "pd-decode"}
        assert len(set.union(*ids.values())) == 1


def test_parents_exist_and_no_span_ends_before_it_starts(recording: Recording) -> None:
    for trace in recording.traces:
        known = {span.span_id for span in trace.spans}
        for span in trace.spans:
            assert span.end_ns >= span.start_ns
            assert span.parent_id is None or span.parent_id in known | {CALLER_SPAN}


def test_callers_trace_is_continued(timelines: dict[str, Timeline]) -> None:
    assert timelines["continued"].trace_id == CALLER_TRACE


def test_response_names_the_trace(
    run: tuple[Path, dict[str, Answer]], timelines: dict[str, Timeline]
) -> None:
    for name in ("load-0", "load-1", "continued"):
        assert timelines[name].trace_id in run[1][name].headers["traceparent"]


@pytest.mark.case("API-09")
def test_refused_request_is_a_gateway_span_with_its_status(
    recording: Recording, timelines: dict[str, Timeline]
) -> None:
    timeline = timelines["refused"]
    assert timeline.outcome is Outcome.REJECTED
    assert timeline.attributes[a.HTTP_STATUS.key] == 400
    (trace,) = (t for t in recording.traces if t.trace_id == timeline.trace_id)
    assert spans_of(trace, "pd-gateway") == list(trace.spans)


@pytest.mark.case("CAN-10")
def test_client_that_left_is_cancelled_by_the_client(timelines: dict[str, Timeline]) -> None:
    assert timelines["left"].outcome is Outcome.CANCELLED
    assert timelines["left"].outcome_by == "client"


def test_lines_parse_with_the_official_protobuf_definitions(
    run: tuple[Path, dict[str, Answer]], recording: Recording
) -> None:
    count = 0
    for path in sorted((run[0] / "traces").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            document = json.loads(line)
            # OTLP JSON writes ids in hex, protobuf's own JSON in base64: the one difference.
            for resource in document["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        for key in ("traceId", "spanId", "parentSpanId"):
                            if key in span:
                                bytes.fromhex(span[key])
                        for link in span.get("links", []):
                            bytes.fromhex(link["traceId"])
            parsed = json_format.ParseDict(document, ExportTraceServiceRequest())
            count += sum(
                len(scope.spans)
                for resource in parsed.resource_spans
                for scope in resource.scope_spans
            )
    assert count == recording.spans


def test_no_prompt_or_completion_text_is_recorded(run: tuple[Path, dict[str, Answer]]) -> None:
    everything = "".join(p.read_text() for p in (run[0] / "traces").glob("*.jsonl"))
    assert "p" * 20 not in everything
    assert not [a.text for a in run[1].values() if len(a.text) > 12 and a.text in everything]


def test_page_pools_are_whole_when_the_server_stopped(
    run: tuple[Path, dict[str, Answer]],
) -> None:
    pools: dict[Role, dict[Gauge, int]] = {}
    for path in scan_rings(run[0] / "rings"):
        reader = RingReader(path)
        pools[reader.identity.role] = reader.gauges()
        reader.close()
    for role in (Role.PREFILL, Role.DECODE):
        gauges = pools[role]
        kept = gauges.get(Gauge.KV_PAGES_CACHED, 0)
        assert gauges[Gauge.KV_PAGES_FREE] + kept == gauges[Gauge.KV_PAGES_TOTAL], role
        assert gauges[Gauge.KV_PAGES_USED] == 0, role
        assert gauges[Gauge.IN_FLIGHT] == 0, role
