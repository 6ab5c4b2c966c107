"""Export by the OTEL_* variables to real receivers, and to ones that are down, slow or refuse."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdtrace.agent.command import run_agent
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.assembly.request_spans import assemble
from pdtrace.export import targets
from pdtrace.export.delivery import Delivery
from pdtrace.export.queue import TAKEN, Answer, ExportQueue, QueueLimits, Sent
from pdtrace.export.settings import (
    ExportConfigError,
    OtlpDestination,
    exporter_names,
    limits_from_env,
    otlp_destination,
    plan_from_env,
)
from pdtrace.export.targets import (
    otlp_grpc_target,
    otlp_http_target,
    sdk_target,
)
from pdtrace.otlp.protobuf import encode_request, readable_spans
from pdtrace.spans import Span
from pdtrace.testing import open_recorders, record_request
from tests.support.copies import replace
from tests.support.marked_requests import pd_moments, request_of
from tests.support.otlp_receivers import (
    Received,
    grpc_receiver,
    http_receiver,
    refusing_receiver,
    silent_receiver,
)

Receiver = Callable[[], AbstractContextManager[Received]]
REQUEST = request_of(pd_moments())
SPANS = assemble(REQUEST)
EAGER = QueueLimits(delay_s=0.001)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


def exporter() -> Delivery:
    plan = plan_from_env()
    assert plan is not None
    return Delivery(out=None, plan=plan)


def eventually(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def numbered(count: int) -> list[tuple[CollectedRequest, list[Span]]]:
    return [(REQUEST, SPANS)] * count


# -- configuration ---------------------------------------------------------------------------


BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({BASE: "http://h:4318"}, "http://h:4318/v1/traces"),
        ({BASE: "http://h:4318/"}, "http://h:4318/v1/traces"),
        ({BASE: "http://h:4318/v1/traces"}, "http://h:4318/v1/traces"),
        ({BASE: "http://h:4318/v1/traces/"}, "http://h:4318/v1/traces"),
        ({BASE: "https://h/otel"}, "https://h/otel/v1/traces"),
        ({BASE: "https://h/otel/?key=1"}, "https://h/otel/v1/traces?key=1"),
        ({TRACES: "http://h:4318"}, "http://h:4318/v1/traces"),
        ({TRACES: "http://h:4318/"}, "http://h:4318/v1/traces"),
        ({TRACES: "http://h:4318/v1/traces"}, "http://h:4318/v1/traces"),
        ({TRACES: "http://h:4318/v1/traces/"}, "http://h:4318/v1/traces"),
        ({TRACES: "http://h:4318/custom"}, "http://h:4318/custom"),
        ({TRACES: "http://t:1/x", BASE: "http://b:2"}, "http://t:1/x"),
        ({}, "http://localhost:4318/v1/traces"),
    ],
)
def test_http_endpoint_is_completed(environ: dict[str, str], expected: str) -> None:
    assert otlp_destination(environ) == OtlpDestination("http/protobuf", expected)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({BASE: "http://h:4317"}, ("grpc", "http://h:4317")),
        ({BASE: "h:4317"}, ("grpc", "h:4317")),
        (
            {BASE: "http://h:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ("grpc", "http://h:4318"),
        ),
        (
            {BASE: "http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http/protobuf", "http://h:4317/v1/traces"),
        ),
        (
            {
                BASE: "http://h:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            ("http/protobuf", "http://h:4318/v1/traces"),
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("grpc", "http://localhost:4317")),
    ],
)
def test_protocol_is_the_set_one_or_follows_the_port(
    environ: dict[str, str], expected: tuple[str, str]
) -> None:
    assert otlp_destination(environ) == OtlpDestination(*expected)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({BASE: "localhost:4318"}, r"OTEL_EXPORTER_OTLP_ENDPOINT is 'localhost:4318'.*http://"),
        ({TRACES: "ftp://h"}, r"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is 'ftp://h'"),
        ({BASE: "http://"}, r"needs a URL"),
        ({BASE: "http://h:port"}, r"OTEL_EXPORTER_OTLP_ENDPOINT is 'http://h:port'"),
        ({BASE: "http://[::1"}, r"OTEL_EXPORTER_OTLP_ENDPOINT"),
        (
            {BASE: "tcp://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            r"gRPC needs http://host:4317",
        ),
        (
            {BASE: "http://h", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            r"OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': .* grpc or http/protobuf",
        ),
    ],
)
def test_endpoint_that_cannot_be_meant_is_one_clear_error(
    environ: dict[str, str], says: str
) -> None:
    with pytest.raises(ExportConfigError, match=says):
        otlp_destination(environ)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({BASE: "http://h"}, ["otlp"]),
        ({BASE: "http://h", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({BASE: "http://h", "OTEL_SDK_DISABLED": "TRUE"}, []),
        ({BASE: "http://h", "OTEL_SDK_DISABLED": "false"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console,otlp"}, ["otlp", "console"]),
    ],
)
def test_exporters_are_those_asked_for(environ: dict[str, str], names: list[str]) -> None:
    assert exporter_names(environ) == names


def test_unknown_exporter_is_refused_with_what_is_possible() -> None:
    with pytest.raises(ExportConfigError, match="'zipkin' is none of otlp, console, none"):
        exporter_names({"OTEL_TRACES_EXPORTER": "otlp,zipkin"})


def test_queue_bounds_come_from_the_environment() -> None:
    environ = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "200",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
    }
    assert limits_from_env(environ) == QueueLimits(max_queued=100, max_batch=100, delay_s=0.25)
    with pytest.raises(ExportConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE is '-1'"):
        limits_from_env({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"})


def test_missing_certificate_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, "https://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")
    with pytest.raises(ExportConfigError, match=r"/nowhere/ca\.pem"):
        plan_from_env()


def test_settings_the_sdk_rejects_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(ExportConfigError, match=r"cannot export with OTLP \(grpc\).*soon"):
        plan_from_env()


def test_settings_that_the_sdk_could_not_even_be_loaded_with_are_one_clear_error(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdtrace.agent", "--rings", str(tmp_path), "--until-closed"],
        cwd=Path(__file__).resolve().parents[3],
        env={
            **os.environ,
            "OTEL_TRACES_EXPORTER": "console",
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("pdtrace agent: OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT is 'many'")


def test_nothing_set_means_no_exporter() -> None:
    assert plan_from_env() is None


# -- on the wire -----------------------------------------------------------------------------


@pytest.mark.parametrize("variable", [BASE, TRACES])
@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces", "/v1/traces/"])
def test_http_spans_arrive_whole_however_the_endpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, variable: str, suffix: str
) -> None:
    with http_receiver() as received:
        monkeypatch.setenv(variable, received.endpoint + suffix)
        queue = exporter()
        queue.deliver([(REQUEST, SPANS)])
        queue.close(5)
    assert received.paths == ["/v1/traces"]
    assert received.requests == [encode_spans(readable_spans(SPANS))]
    assert queue.totals() == {
        "spans_exported": len(SPANS),
        "spans_replayed": 0,
        "spans_unsampled": 0,
        "spans_waiting": 0,
        "spans_dropped": 0,
    }


def test_grpc_spans_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_receiver() as received:
        monkeypatch.setenv(BASE, received.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        queue = exporter()
        queue.deliver([(REQUEST, SPANS)])
        queue.close(5)
    assert received.requests == [encode_spans(readable_spans(SPANS))]
    assert queue.totals()["spans_exported"] == len(SPANS)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_grpc_endpoint_without_scheme_is_plaintext_when_insecure_is_set(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with grpc_receiver() as received:
        monkeypatch.setenv(BASE, f"{scheme}127.0.0.1:{received.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        queue = exporter()
        queue.deliver([(REQUEST, SPANS)])
        queue.close(5)
    assert len(received.span_names()) == len(SPANS)


@pytest.mark.parametrize(
    ("receiver", "protocol"), [(http_receiver, "http/protobuf"), (grpc_receiver, "grpc")]
)
def test_headers_and_compression_are_honoured(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, protocol: str
) -> None:
    with receiver() as received:
        monkeypatch.setenv(BASE, received.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret,x-team=pd")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        queue = exporter()
        queue.deliver([(REQUEST, SPANS)])
        queue.close(5)
    [headers] = received.headers
    assert (headers["x-api-key"], headers["x-team"]) == ("secret", "pd")
    if protocol != "grpc":
        assert headers["content-encoding"] == "gzip"
    assert len(received.span_names()) == len(SPANS)


def test_console_prints_spans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    queue = exporter()
    queue.deliver([(REQUEST, SPANS)])
    queue.close(5)
    assert '"name": "decode.reserve"' in capsys.readouterr().out


def test_start_says_exporter_and_endpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with http_receiver() as received, caplog.at_level(logging.INFO):
        monkeypatch.setenv(BASE, received.endpoint)
        exporter().close(1)
        assert f"OTLP over HTTP to {received.endpoint}/v1/traces" in caplog.text


def test_batches_are_bounded_and_requests_stay_together() -> None:
    with http_receiver() as received:
        target = otlp_http_target(f"{received.endpoint}/v1/traces")
        queue = ExportQueue([target], limits=QueueLimits(max_batch=60, delay_s=0.05))
        for _, spans in numbered(7):
            queue.submit(spans)
        queue.close(5)
    sizes = [
        sum(len(r.scope_spans[0].spans) for r in request.resource_spans)
        for request in received.requests
    ]
    assert sum(sizes) == 7 * len(SPANS)
    assert all(size <= 60 and size % len(SPANS) == 0 for size in sizes)


def test_bad_attribute_types_never_lose_a_batch() -> None:
    attributes: dict[str, Any] = {"good": 1, "path": Path("/tmp"), "none": None}
    odd = replace(SPANS[0], attributes=attributes)
    with http_receiver() as by_http, grpc_receiver() as by_grpc:
        targets = [
            otlp_http_target(f"{by_http.endpoint}/v1/traces"),
            otlp_grpc_target(by_grpc.endpoint),
        ]
        queue = ExportQueue(targets, limits=EAGER)
        queue.submit([odd, *SPANS[1:]])
        queue.close(5)
    assert by_http.requests == by_grpc.requests
    assert len(by_http.span_names()) == len(SPANS)


# -- sampling --------------------------------------------------------------------------------


def sampled_request(trace_id: str, *, parent: str | None, sampled: bool = True) -> CollectedRequest:
    request = request_of(pd_moments())
    request.trace_id = trace_id
    request.client_parent_span_id = parent
    request.sampled = sampled
    return request


LOW, HIGH = "0" * 31 + "1", "f" * 32
PARENT = "c" * 16


@pytest.mark.parametrize(
    ("sampler", "argument", "request_", "exported"),
    [
        (None, None, sampled_request(HIGH, parent=None), True),
        (None, None, sampled_request(HIGH, parent=PARENT), True),
        (None, None, sampled_request(HIGH, parent=PARENT, sampled=False), False),
        ("always_off", None, sampled_request(LOW, parent=PARENT), False),
        ("always_on", None, sampled_request(HIGH, parent=PARENT, sampled=False), True),
        ("parentbased_always_off", None, sampled_request(LOW, parent=None), False),
        ("parentbased_always_off", None, sampled_request(LOW, parent=PARENT), True),
        ("traceidratio", "0.5", sampled_request(LOW, parent=None), True),
        ("traceidratio", "0.5", sampled_request(HIGH, parent=None), False),
        ("parentbased_traceidratio", "0.5", sampled_request(HIGH, parent=None), False),
        ("parentbased_traceidratio", "0.5", sampled_request(HIGH, parent=PARENT), True),
    ],
)
def test_sampler_decides_per_request(
    monkeypatch: pytest.MonkeyPatch,
    sampler: str | None,
    argument: str | None,
    request_: CollectedRequest,
    exported: bool,
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    if argument:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    spans = assemble(request_)
    with http_receiver() as received:
        monkeypatch.setenv(BASE, received.endpoint)
        queue = exporter()
        queue.deliver([(request_, spans)])
        queue.close(5)
    assert len(received.span_names()) == (len(spans) if exported else 0)
    assert queue.totals()["spans_unsampled"] == (0 if exported else len(spans))


def test_unsampled_requests_stay_in_the_local_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorders = open_recorders(tmp_path / "rings")
    record_request(recorders)
    for recorder in recorders.values():
        recorder.close()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with http_receiver() as received:
        monkeypatch.setenv(BASE, received.endpoint)
        summary = run_agent(tmp_path / "rings", out=tmp_path, until_closed=True)
    assert received.requests == []
    assert summary.spans == summary.export["spans_unsampled"] > 0
    assert (tmp_path / "traces" / "spans-000001.jsonl").stat().st_size > 0


# -- collectors that misbehave ---------------------------------------------------------------


@pytest.mark.parametrize("receiver", [silent_receiver, refusing_receiver])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_collector_that_is_down_or_hangs_never_blocks_and_exit_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    receiver: Receiver,
    protocol: str,
) -> None:
    with receiver() as received:
        monkeypatch.setenv(BASE, received.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        queue = exporter()
        begin_s = time.monotonic()
        for request, spans in numbered(200):
            queue.deliver([(request, spans)])
        assert time.monotonic() - begin_s < 5, "no time, and a busy machine"
        begin_s = time.monotonic()
        queue.close(0.5)
        assert time.monotonic() - begin_s < 5, "0.5 s, and a busy machine"
    assert queue.totals()["spans_dropped"] == 200 * len(SPANS)
    assert queue.totals()["spans_exported"] == 0
    assert caplog.text.count("were not exported") == 1


def test_agent_with_a_hanging_collector_writes_its_files_and_exits_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorders = open_recorders(tmp_path / "rings")
    for number in range(20):
        record_request(recorders, request_id=f"req-{number}")
    for recorder in recorders.values():
        recorder.close()
    with silent_receiver() as received:
        monkeypatch.setenv(BASE, received.endpoint)
        begin_s = time.monotonic()
        summary = run_agent(tmp_path / "rings", out=tmp_path, until_closed=True)
        assert time.monotonic() - begin_s < 5
    assert summary.requests == 20
    assert summary.export["spans_waiting"] == summary.spans
    assert summary.export["spans_dropped"] == 0
    assert summary.lines_lost == 0


def test_collector_that_comes_back_gets_what_was_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with http_receiver([503, 503, 200]) as received:
        queue = ExportQueue([otlp_http_target(f"{received.endpoint}/v1/traces")], limits=EAGER)
        queue.submit(SPANS)
        eventually(lambda: bool(received.requests), within_s=20)
        queue.close(5)
    assert received.calls == 3
    assert len(received.span_names()) == len(SPANS)
    assert queue.totals()["spans_dropped"] == 0
    assert "opentelemetry" not in {record.name.split(".")[0] for record in caplog.records}


def test_batch_that_is_refused_is_dropped_counted_and_said_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with http_receiver([400, 400, 200]) as received:
        queue = ExportQueue([otlp_http_target(f"{received.endpoint}/v1/traces")], limits=EAGER)
        for count in (1, 2, 3):
            queue.submit(SPANS)
            eventually(lambda count=count: received.calls == count)
        queue.close(5)
    assert queue.totals()["spans_dropped"] == 2 * len(SPANS)
    assert queue.totals()["spans_exported"] == len(SPANS)
    assert caplog.text.count("does not take spans: 400") == 1
    assert len(caplog.records) == 1


def test_wrong_path_says_what_to_look_at(caplog: pytest.LogCaptureFixture) -> None:
    with http_receiver() as received:
        queue = ExportQueue([otlp_http_target(f"{received.endpoint}/wrong")], limits=EAGER)
        queue.submit(SPANS)
        queue.close(5)
    assert "404" in caplog.text
    assert "OTLP/HTTP receiver" in caplog.text


def test_redirect_is_not_taken_for_success() -> None:
    with http_receiver([302]) as received:
        answer = otlp_http_target(f"{received.endpoint}/v1/traces").send(SPANS)
    assert answer.sent is Sent.REFUSED
    assert "redirects" in answer.reason


def test_grpc_refusal_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_receiver([400]) as received:
        queue = ExportQueue([otlp_grpc_target(received.endpoint)], limits=EAGER)
        queue.submit(SPANS)
        eventually(lambda: received.calls > 0)
        queue.close(0.2)
    assert queue.totals()["spans_dropped"] == len(SPANS)
    assert caplog.text.count("does not take spans") == 1
    assert "refused by the test" in caplog.text


class BlockedTarget:
    """Holds each batch until released."""

    name = kind = "blocked"

    def __init__(self) -> None:
        self.batches: list[Sequence[Span]] = []
        self.released = threading.Event()

    def send(self, spans: Sequence[Span]) -> Answer:
        self.batches.append(spans)
        self.released.wait(60)
        return TAKEN

    def shutdown(self) -> None:
        self.released.set()


def test_full_queue_drops_whole_requests_counts_them_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = BlockedTarget()
    limits = QueueLimits(max_queued=3 * len(SPANS), max_batch=1, delay_s=0.001)
    queue = ExportQueue([target], limits=limits)
    queue.submit(SPANS)
    eventually(lambda: len(target.batches) == 1)
    for _, spans in numbered(10):
        queue.submit(spans)
    assert queue.totals()["spans_dropped"] == 7 * len(SPANS)
    assert caplog.text.count("spans are dropped (queue full)") == 1
    target.released.set()
    queue.close(5)
    assert queue.totals()["spans_exported"] == 4 * len(SPANS)
    assert queue.totals()["spans_dropped"] == 7 * len(SPANS)
    assert all(len(batch) == len(SPANS) for batch in target.batches)


def test_exporter_that_raises_costs_its_batch_only(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(BlockedTarget):
        def send(self, spans: Sequence[Span]) -> Answer:
            self.batches.append(spans)
            if len(self.batches) == 1:
                raise KeyError("bug")
            return TAKEN

    target = Raising()
    queue = ExportQueue([target], limits=EAGER)
    queue.submit(SPANS)
    eventually(lambda: len(target.batches) == 1)
    queue.submit(SPANS)
    queue.close(5)
    assert queue.totals()["spans_exported"] == queue.totals()["spans_dropped"] == len(SPANS)
    assert "KeyError" in caplog.text


def test_submit_after_close_is_counted_as_dropped() -> None:
    target = BlockedTarget()
    queue = ExportQueue([target], limits=EAGER)
    queue.close(1)
    queue.submit(SPANS)
    assert queue.totals()["spans_dropped"] == len(SPANS)


# -- the compatible path ---------------------------------------------------------------------


class KeepingSdkExporter(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_any_sdk_exporter_can_be_a_target() -> None:
    exporter = KeepingSdkExporter()
    queue = ExportQueue([sdk_target("mine", exporter)], limits=EAGER)
    queue.submit(SPANS)
    queue.close(5)
    assert encode_spans(exporter.spans) == encode_request(SPANS)


def test_sdk_exporter_that_raises_a_connections_error_gets_the_spans_again() -> None:
    """As OTLP over HTTP of OpenTelemetry 1.39 and older does when nobody listens."""

    class Refused(KeepingSdkExporter):
        refusals = 2

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if self.refusals:
                self.refusals -= 1
                raise ConnectionRefusedError(111, "Connection refused")
            return super().export(spans)

    exporter = Refused()
    target = sdk_target("mine", exporter)
    refused = target.send(SPANS)
    assert (refused.sent, refused.code) == (Sent.RETRY, "unreachable")
    assert "Connection refused" in refused.reason
    queue = ExportQueue([target], limits=EAGER)
    queue.submit(SPANS)
    queue.close(30)
    assert len(exporter.spans) == len(SPANS)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_encoder_that_does_not_fit_the_sdk_falls_back_to_the_compatible_path(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr(targets, "_agrees", lambda: False)
    with (http_receiver if protocol == "http" else grpc_receiver)() as received:
        target = (
            otlp_http_target(f"{received.endpoint}/v1/traces")
            if protocol == "http"
            else otlp_grpc_target(received.endpoint)
        )
        assert target.send(SPANS) == TAKEN
        target.shutdown()
    assert received.requests == [encode_request(SPANS)]


def test_self_check_notices_an_encoder_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    agrees = targets._agrees  # pyright: ignore[reportPrivateUsage] the check itself
    assert agrees()
    assert not agrees(lambda spans: encode_request(list(spans)[:0]))
    assert "differs" in caplog.text

    def broken(spans: Sequence[Span]) -> object:
        raise AttributeError("gone")

    assert not agrees(broken)
