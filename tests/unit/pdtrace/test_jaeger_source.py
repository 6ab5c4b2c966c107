"""Reading out of a Jaeger: each version's API, what is asked, and errors in words."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdtrace.analysis.jaeger import is_jaeger, read_jaeger
from pdtrace.analysis.sources import read_sources
from pdtrace.analysis.time_range import TimeRangeError, TraceQuery, instant_text, parse_instant
from pdtrace.analysis.timeline import build_timelines
from pdtrace.errors import SourceError
from pdtrace.otlp.jaeger_json import decode_jaeger
from pdtrace.otlp.json_lines import encode_line
from pdtrace.spans import SpanKind, StatusCode
from tests.support.jaeger_doubles import ANSWERS, REQUEST_ID, TRACE_ID, jaeger_double

ERAS = [
    {"older": True, "v3": True},  # 1.x with v3, and 2.0 to 2.18
    {"older": True, "v3": True, "by_attribute": True},  # 2.19, 2.20
    {"older": False, "v3": True, "by_attribute": True},  # later
    {"older": True, "v3": False},  # before v3
]
WIDE = TraceQuery(since_ns=1, until_ns=2**62)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("wanted", [None, REQUEST_ID, TRACE_ID, TRACE_ID.upper()])
def test_every_version_gives_the_trace(era: dict[str, bool], wanted: str | None) -> None:
    with jaeger_double(**era) as jaeger:
        assert is_jaeger(jaeger.url)
        found = read_jaeger(jaeger.url, replace(WIDE, wanted=wanted))
    assert list(found.traces) == [TRACE_ID]
    assert found.bad_spans == 0
    assert len(found.traces[TRACE_ID]) == 23


def test_both_apis_make_the_same_timeline() -> None:
    timelines = []
    for era in ERAS[0], ERAS[3]:
        with jaeger_double(**era) as jaeger:
            recording = read_sources([jaeger.url], query=WIDE)
        assert not recording.problems
        [timeline] = build_timelines(recording.traces)
        timelines.append(timeline)
    assert timelines[0].request_id == REQUEST_ID
    assert timelines[0].parts == timelines[1].parts
    assert timelines[0].violations == timelines[1].violations == ()


def test_older_json_keeps_what_it_can() -> None:
    older = {
        span.span_id: span for span in decode_jaeger((ANSWERS / "trace.json").read_bytes()).spans
    }
    with jaeger_double() as jaeger:
        newer = {s.span_id: s for s in read_jaeger(jaeger.url, WIDE).traces[TRACE_ID]}
    assert older.keys() == newer.keys()
    for span_id, span in older.items():
        other = newer[span_id]
        assert (span.name, span.kind, span.parent_id) == (other.name, other.kind, other.parent_id)
        assert span.status == other.status
        assert span.attributes == other.attributes
        assert span.resource.attributes == other.resource.attributes
        assert abs(span.start_ns - other.start_ns) < 1_000
        assert abs((span.end_ns - span.start_ns) - (other.end_ns - other.start_ns)) < 1_000
        assert [event.name for event in span.events] == [event.name for event in other.events]


def test_unusable_span_of_the_older_json_costs_itself_only() -> None:
    answer = json.loads((ANSWERS / "trace.json").read_bytes())
    spans = answer["data"][0]["spans"]
    spans[0]["spanID"] = "0"
    spans[1]["duration"] = "long"
    spans[2]["startTime"] = -5
    spans[3]["tags"] = [
        {"key": "error", "type": "bool", "value": True},
        {"key": "span.kind", "type": "string", "value": "client"},
        {"key": "big", "type": "int64", "value": str(2**60)},
        {"key": "list", "type": "string", "value": '["a", "b"'},
    ]
    found = decode_jaeger(json.dumps(answer).encode())
    assert found.bad_spans == 3
    assert len(found.spans) == len(spans) - 3
    odd = found.spans[0]
    assert (odd.status, odd.kind) == (StatusCode.ERROR, SpanKind.CLIENT)
    assert odd.attributes == {"big": 2**60, "list": '["a", "b"'}
    assert encode_line(found.spans)  # as any span


def test_what_is_asked_for() -> None:
    query = TraceQuery(since_ns=10**18, until_ns=2 * 10**18, limit=7)
    with jaeger_double() as jaeger:
        read_jaeger(jaeger.url + "/", query)
        [(path, asked)] = [r for r in jaeger.requests if r[0].endswith("traces")]
    assert path == "/api/v3/traces"
    assert asked["query.service_name"] == asked["query.serviceName"] == "pd-gateway"
    assert asked["query.num_traces"] == asked["query.searchDepth"] == "7"
    assert asked["query.start_time_min"] == "2001-09-09T01:46:40.000000Z"
    assert asked["query.startTimeMax"] == "2033-05-18T03:33:20.000000Z"


def test_limit_that_was_reached_is_told() -> None:
    with jaeger_double() as jaeger:
        query = TraceQuery(since_ns=1, until_ns=2**62, limit=1)
        recording = read_sources([jaeger.url], query=query)
    [sentence] = recording.problems.sentences()
    assert "its latest 1 traces" in sentence
    assert not recording.problems.lossy


def test_trace_in_a_recording_and_in_jaeger_is_one(tmp_path: Path) -> None:
    with jaeger_double() as jaeger:
        spans = read_jaeger(jaeger.url, WIDE).traces[TRACE_ID]
        (tmp_path / "spans.jsonl").write_bytes(encode_line(spans[:9]))
        recording = read_sources([tmp_path, jaeger.url], query=WIDE)
    [trace] = recording.traces
    assert len(trace.spans) == 23
    assert (recording.problems.duplicates, recording.problems.conflicts) == (9, 0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"/api/v3/services": (200, b"<html>"), "/api/services": (200, b"<html>")}, "is no Jaeger"),
        ({"/api/v3/services": (403, b"no")}, "403 Forbidden"),
        ({"/api/v3/services": (200, b'{"services":[]}')}, "no trace between .*services: none yet"),
        (
            {"/api/v3/traces": (500, b'{"error":{"httpCode":500,"message":"search depth"}}')},
            "/api/v3/traces: 500 search depth",
        ),
        ({"/api/v3/traces": (200, b'{"result":{"resourceSpans":[{"scopeSpans":3}]}}')}, "no trace"),
    ],
)
def test_error_says_what_was_found(override: dict[str, tuple[int, bytes]], message: str) -> None:
    with jaeger_double(override=override) as jaeger, pytest.raises(SourceError, match=message):
        read_jaeger(jaeger.url, WIDE)


def test_nothing_in_the_time_range() -> None:
    with jaeger_double() as jaeger, pytest.raises(SourceError, match="look further back"):
        read_jaeger(jaeger.url, TraceQuery(since_ns=1, until_ns=2))
    with jaeger_double() as jaeger, pytest.raises(SourceError, match="before it begins"):
        read_jaeger(jaeger.url, TraceQuery(since_ns=3, until_ns=2))


def test_nobody_and_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SourceError, match=r"no answer within 0\.2 s"):
            read_jaeger(url, TraceQuery(timeout_s=0.2))
    with pytest.raises(SourceError, match="refused"):
        read_jaeger(url, TraceQuery())
    assert not is_jaeger(url)
    with pytest.raises(SourceError, match="give http://HOST:PORT"):
        read_jaeger("ftp://somewhere", TraceQuery())


def test_times_are_read_as_people_write_them() -> None:
    now_ns = time.time_ns()
    assert parse_instant("15m", now_ns) == now_ns - 900 * 10**9
    assert parse_instant("1.5h", now_ns) == now_ns - 5400 * 10**9
    at = parse_instant("2026-11-30T12:00:00Z", now_ns)
    assert at == parse_instant("2026-11-30T13:00:00+01:00", now_ns)
    assert at == parse_instant("2026-11-30T12:00", now_ns)
    assert instant_text(at) == "2026-11-30T12:00:00.000000Z"
    for odd in ("", "5x", "yesterday", "-3m"):
        with pytest.raises(TimeRangeError, match="is no time"):
            parse_instant(odd, now_ns)
