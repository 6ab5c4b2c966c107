"""Whatever order, form or damage traces arrive in, what can be read is read, the rest counted."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace.analysis.sources import (
    Recording,
    default_source,
    read_source,
    resolve_run,
    run_directories,
)
from pdtrace.analysis.timeline import build_timelines
from pdtrace.analysis.trace_store import join_spans
from pdtrace.errors import SourceError
from pdtrace.otlp import json_lines
from pdtrace.recorder import Recorder
from pdtrace.spans import SpanKind, StatusCode
from pdtrace.stages import Role
from pdtrace.testing import SMALL_RING
from tests.support.pd_traces import Story, noisy

TRACES = [noisy(f"req-{index}", random.Random(index)).trace() for index in range(3)]
LINES = [json_lines.encode_line(trace.spans) for trace in TRACES]
DATA = b"".join(LINES)
SPANS = sum(len(trace.spans) for trace in TRACES)


def read(data: bytes) -> Recording:
    return read_source("-", stdin=io.BytesIO(data))


def edited(edit: Callable[[dict[str, Any]], None], line: bytes = LINES[0]) -> bytes:
    """A line with each of its span objects changed."""
    document = json.loads(line)
    for resource_spans in document["resourceSpans"]:
        for scope in resource_spans["scopeSpans"]:
            for span in scope["spans"]:
                edit(span)
    return json.dumps(document).encode() + b"\n"


def test_spans_come_back_as_they_were_written() -> None:
    recording = read(DATA)
    assert recording.traces == join_spans(span for trace in TRACES for span in trace.spans)
    assert (recording.lines, recording.spans, recording.files) == (3, SPANS, 1)
    assert not recording.problems


def test_order_of_lines_does_not_matter() -> None:
    one_span_per_line = [json_lines.encode_line([span]) for trace in TRACES for span in trace.spans]
    random.Random(1).shuffle(one_span_per_line)
    assert read(b"".join(one_span_per_line)).traces == read(DATA).traces


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    for name in ("t.json", "t.jsonl", "t.txt", "t", "t.gz"):
        path = tmp_path / name
        path.write_bytes(DATA)
        assert read_source(path).traces == read(DATA).traces
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(DATA))
    assert read_source(packed).traces == read(DATA).traces


def test_run_directory_holds_its_traces_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "agent-state.json").write_text("{}")
    (tmp_path / "traces" / ".writer.lock").write_text("")
    (tmp_path / "traces" / "spans-000001.jsonl").write_bytes(LINES[0])
    (tmp_path / "traces" / "spans-000002.jsonl").write_bytes(LINES[1] + LINES[2])
    recording = read_source(tmp_path)
    assert recording.traces == read(DATA).traces
    assert recording.files == 2


def test_folder_of_files_skips_what_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES[0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES[1] + LINES[2]))
    (tmp_path / "README.md").write_text("# traces")
    recording = read_source(tmp_path)
    assert recording.traces == read(DATA).traces
    assert recording.problems.skipped_files == [str(tmp_path / "README.md")]


def test_spans_that_come_again_count_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(DATA)
    (tmp_path / "b.jsonl").write_bytes(LINES[1] + LINES[1])
    recording = read_source(tmp_path)
    assert recording.traces == read(DATA).traces
    assert recording.problems.duplicates == 2 * len(TRACES[1].spans)


def test_span_id_with_two_contents_keeps_the_longer_span_in_any_order() -> None:
    def lengthen(span: dict[str, Any]) -> None:
        span["endTimeUnixNano"] = str(int(span["endTimeUnixNano"]) + 1000)

    longer = edited(lengthen)
    one, other = read(LINES[0] + longer), read(longer + LINES[0])
    assert one.traces == other.traces == read(longer).traces
    assert one.problems.conflicts == len(TRACES[0].spans)


@pytest.mark.parametrize(
    "broken",
    [
        b"{nonsense\n",
        LINES[0][:200] + b"\n",
        b'{"a": NaN}\n',
        b'{"resourceSpans": [{"x": "\xff\xfe"}]}\n',
        b"\x00\x01\x02\n",
        b"null\n",
        b'{"spans": []}\n',
        b'{"resourceSpans": 3}\n',
        b'[{"traceId": "1"}]\n',
    ],
)
def test_broken_line_is_counted_with_its_number(broken: bytes) -> None:
    recording = read(LINES[0] + LINES[1] + broken + LINES[2])
    assert recording.traces == read(DATA).traces
    assert recording.problems.bad_line_count == 1
    assert recording.problems.bad_lines[0].line == 3
    assert recording.problems.lossy


def test_broken_first_line_costs_only_itself() -> None:
    recording = read(b'{"cut": \n' + DATA)
    assert recording.traces == read(DATA).traces
    assert [bad.line for bad in recording.problems.bad_lines] == [1]


def test_last_line_may_be_cut_at_any_byte() -> None:
    whole = join_spans(span for trace in TRACES[:2] for span in trace.spans)
    for cut in range(1, len(LINES[2]) - 1, 97):
        recording = read(LINES[0] + LINES[1] + LINES[2][:cut])
        assert recording.traces == whole
        assert recording.problems.bad_line_count == 1
        assert recording.problems.cut_files == ["standard input"]


def test_missing_newline_at_the_end_is_no_problem() -> None:
    assert not read(DATA.rstrip()).problems


def test_cut_gzip_stream_gives_what_was_readable(tmp_path: Path) -> None:
    lines = [
        json_lines.encode_line(noisy(f"r{i}", random.Random(i)).trace().spans) for i in range(30)
    ]
    path = tmp_path / "cut"
    path.write_bytes(gzip.compress(b"".join(lines))[:-3000])
    recording = read_source(path)
    assert 0 < len(recording.traces) < 30
    assert recording.problems.cut_files == [str(path)]


def test_mark_at_the_beginning_blank_lines_and_carriage_returns_are_fine() -> None:
    data = b"\xef\xbb\xbf" + DATA.replace(b"\n", b"\r\n\r\n")
    recording = read(data)
    assert recording.traces == read(DATA).traces
    assert (recording.lines, bool(recording.problems)) == (3, False)


def test_one_document_over_several_lines_is_read() -> None:
    document = json.dumps(json.loads(LINES[0]), indent=2).encode()
    recording = read(document)
    assert recording.traces == join_spans(TRACES[0].spans)
    assert recording.lines == 1


def test_documents_may_lie_in_an_envelope() -> None:
    wrapped = json.dumps({"result": json.loads(LINES[0])}).encode()
    assert read(wrapped).traces == join_spans(TRACES[0].spans)


def base64_ids(span: dict[str, Any]) -> None:
    import base64

    for key in ("traceId", "spanId", "parentSpanId"):
        if key in span:
            span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()


def upper_ids(span: dict[str, Any]) -> None:
    for key in ("traceId", "spanId", "parentSpanId"):
        if key in span:
            span[key] = span[key].upper()


def number_times(span: dict[str, Any]) -> None:
    for key in ("startTimeUnixNano", "endTimeUnixNano"):
        span[key] = int(span[key])
    for attribute in span["attributes"]:
        if "intValue" in attribute["value"]:
            attribute["value"]["intValue"] = int(attribute["value"]["intValue"])


def enum_names(span: dict[str, Any]) -> None:
    span["kind"] = {1: "SPAN_KIND_INTERNAL", 2: "server"}[span["kind"]]
    code = span["status"].get("code")
    if code:
        span["status"]["code"] = "STATUS_CODE_ERROR"


def unknown_fields(span: dict[str, Any]) -> None:
    span["newField"] = {"x": [1]}
    span["attributes"].append({"key": "none", "value": {}})
    span["status"]["detail"] = 3


def snake_keys(span: dict[str, Any]) -> None:
    for key in ("traceId", "spanId", "parentSpanId"):
        if key in span:
            span[{"traceId": "trace_id", "spanId": "span_id"}.get(key, "parent_span_id")] = (
                span.pop(key)
            )
    span["start_time_unix_nano"] = span.pop("startTimeUnixNano")
    span["end_time_unix_nano"] = span.pop("endTimeUnixNano")


def empty_parent(span: dict[str, Any]) -> None:
    span.setdefault("parentSpanId", "0" * 16)


def own_parent(span: dict[str, Any]) -> None:
    span.setdefault("parentSpanId", span["spanId"])


@pytest.mark.parametrize(
    "form",
    [
        base64_ids,
        upper_ids,
        number_times,
        enum_names,
        unknown_fields,
        snake_keys,
        empty_parent,
        own_parent,
    ],
)
def test_forms_of_other_writers_give_the_same_spans(form: Callable[[dict[str, Any]], None]) -> None:
    recording = read(edited(form))
    assert recording.traces == join_spans(TRACES[0].spans)
    assert not recording.problems


def test_old_names_of_scopes_are_understood() -> None:
    line = LINES[0].replace(b'"scopeSpans"', b'"instrumentationLibrarySpans"')
    assert read(line).traces == join_spans(TRACES[0].spans)


def test_short_trace_ids_are_padded() -> None:
    def shorten(span: dict[str, Any]) -> None:
        span["traceId"] = "1a2b"

    assert [t.trace_id for t in read(edited(shorten)).traces] == ["1a2b".zfill(32)]


def test_absent_fields_have_defaults() -> None:
    span = {"traceId": "ab" * 16, "spanId": "cd" * 8, "startTimeUnixNano": "1"}
    whole = {**span, "endTimeUnixNano": "2"}
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [whole]}]}]}).encode()
    ((found,),) = [trace.spans for trace in read(line).traces]
    assert (found.name, found.kind, found.status) == ("", SpanKind.UNSPECIFIED, StatusCode.UNSET)
    assert (found.parent_id, found.resource.service_name) == (None, "unknown")


def test_spans_without_ids_or_times_are_left_out_of_their_line() -> None:
    document = json.loads(LINES[0])
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans += [
        {"traceId": "ab" * 16, "spanId": "cd" * 8},
        {"traceId": "zz", "spanId": "cd" * 8, "startTimeUnixNano": 1, "endTimeUnixNano": 2},
        {"traceId": "0" * 32, "spanId": "c" * 16, "startTimeUnixNano": 1, "endTimeUnixNano": 2},
        "text",
    ]
    recording = read(json.dumps(document).encode())
    assert recording.traces == join_spans(TRACES[0].spans)
    assert recording.problems.bad_spans == 4


@pytest.mark.parametrize("time_ns", [-1, "-1", 2**64, str(2**80), 1e300, "soon", None])
def test_spans_with_times_that_no_clock_shows_are_left_out(time_ns: object) -> None:
    document = json.loads(LINES[0])
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans.append({**spans[0], "spanId": "cd" * 8, "endTimeUnixNano": time_ns})
    recording = read(json.dumps(document).encode())
    assert recording.traces == join_spans(TRACES[0].spans)
    assert recording.problems.bad_spans == 1


def test_metrics_and_logs_are_passed_over() -> None:
    recording = read(b'{"resourceMetrics": []}\n' + DATA + b'{"resourceLogs": []}\n')
    assert recording.traces == read(DATA).traces
    assert recording.problems.other_signals == 2
    assert not recording.problems.lossy


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"null", "NoneType instead of an object"),
        (b"123", "int instead of an object"),
        (b"[]", "list instead of an object"),
        (b"{}", "no resourceSpans"),
        (b'{"data": null}', "holds data, but no list of a Jaeger's traces"),
        (b'{"data": ["pd-gateway"], "total": 1}', "holds data, but no list of a Jaeger's traces"),
        (b'{"status": "success", "data": {"result": []}}', "holds data, but no list"),
        (
            b'{"data": null, "errors": [{"msg": "trace not found"}]}',
            "answer whole: trace not found",
        ),
        (b'{"batches": []}', "looks like a Tempo trace"),
        (b'{"traceEvents": []}', "looks like Chrome trace events"),
        (b'[{"traceId": "1", "id": "2"}]', "is a JSON list"),
        (b'{"resourceMetrics": []}', "holds metrics or logs, no traces"),
        (bytes(range(256)), "not JSON"),
        (b'{"resourceSpans": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"resourceSpans": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"\x28\xb5\x2f\xfd____", "compressed with zstd"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (b"\x1f\x8bxxxxxxxxxxxx", "gzip stream is damaged"),
    ],
)
def test_nothing_usable_is_one_clear_line(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read(data)
    assert "\n" not in str(caught.value)


def test_valid_but_empty_container_has_no_traces() -> None:
    recording = read(b'{"resourceSpans": []}\n')
    assert (recording.traces, recording.lines) == ((), 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "No such file or directory; give a run directory"),
        ("ftp://localhost", "give http://HOST:PORT of a Jaeger"),
    ],
)
def test_unusable_source_says_what_is_supported(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message):
        read_source(source)


def test_run_without_traces_says_so(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    with pytest.raises(SourceError, match="no trace was recorded yet"):
        read_source(tmp_path)


@pytest.mark.parametrize("source", ["", "rings"])
def test_rings_without_traces_say_what_is_to_be_done(tmp_path: Path, source: str) -> None:
    Recorder.open(tmp_path / "rings", role=Role.GATEWAY, instance="g", capacity=SMALL_RING).close()
    command = f"run `pdtrace agent --rings {tmp_path / 'rings'} --out DIR` first"
    with pytest.raises(SourceError, match=re.escape(command)):
        read_source(tmp_path / source)


def test_default_source_is_the_environments_then_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_source({"PDTRACE_RUN": "/a"}) == "/a"
    assert default_source({"PDTRACE_RUN": ""}) == "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PDTRACE_RUN", raising=False)
    (tmp_path / "run" / "traces").mkdir(parents=True)
    (tmp_path / "run" / "traces" / "spans-000001.jsonl").write_bytes(DATA)
    assert read_source().traces == read(DATA).traces


def test_problems_are_told_in_sentences() -> None:
    recording = read(LINES[0] + LINES[0] + b"x\n" + LINES[1][:50])
    text = " ".join(recording.problems.sentences())
    assert "2 lines could not be read; the first: standard input:3: not JSON" in text
    assert "The end of standard input is missing." in text
    assert f"{len(TRACES[0].spans)} spans came more than once, counted once." in text


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "resourceSpans",
                    "scopeSpans",
                    "spans",
                    "resource",
                    "attributes",
                    "traceId",
                    "spanId",
                    "key",
                    "value",
                    "intValue",
                    "status",
                    "events",
                    "links",
                    "kind",
                    "data",
                    "result",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@settings(max_examples=200, deadline=None)
@given(_json)
def test_any_json_is_read_or_counted(value: object) -> None:
    recording = read(DATA + json.dumps(value).encode() + b"\n")
    assert len(recording.traces) >= 3
    build_timelines(recording.traces)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_counted(noise: bytes) -> None:
    recording = read(DATA + noise)
    assert recording.traces == read(DATA).traces
    assert bool(recording.problems) is bool(noise.strip())


def test_stories_read_back_keep_every_rule() -> None:
    data = json_lines.encode_line(Story().trace().spans)
    assert [t.violations for t in build_timelines(read(data).traces)] == [()]


def run_in(folder: Path, name: str, *, at_s: int, data: bytes = DATA) -> Path:
    """A run directory with traces, last written to at that time."""
    traces = folder / name / "traces"
    traces.mkdir(parents=True)
    (traces / "spans-000001.jsonl").write_bytes(data)
    os.utime(traces, (at_s, at_s))
    return folder / name


def test_folder_of_runs_without_a_link_means_the_newest(tmp_path: Path) -> None:
    run_in(tmp_path, "b-older", at_s=1_000, data=LINES[0])
    newest = run_in(tmp_path, "a-newer", at_s=2_000, data=LINES[1])
    (tmp_path / "notes").mkdir()
    (tmp_path / "latest").symlink_to("gone")
    recording = read_source(tmp_path)
    assert recording.traces == join_spans(TRACES[1].spans)
    assert recording.source == str(newest)
    assert run_directories([newest]) == [], "no rings, no agent"
    assert resolve_run(tmp_path) == newest


def test_run_that_recorded_nothing_does_not_stand_for_the_newest(tmp_path: Path) -> None:
    """Nor does one whose traces wait in rings stand behind one that is empty."""
    with Recorder.open(
        tmp_path / "one" / "rings", role=Role.GATEWAY, instance="g", capacity=SMALL_RING
    ):
        pass
    (tmp_path / "two" / "traces").mkdir(parents=True)
    assert resolve_run(tmp_path) == tmp_path / "one"
    (tmp_path / "one").rename(tmp_path / ".hidden")
    assert resolve_run(tmp_path) == tmp_path / "two"


def test_empty_traces_of_an_agent_that_read_nothing_hide_no_run(tmp_path: Path) -> None:
    run = run_in(tmp_path, "2026-11-29-1", at_s=1_000)
    (tmp_path / "latest").symlink_to(run.name)
    (tmp_path / "rings").mkdir()
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "spans-000001.jsonl").touch()
    (tmp_path / "traces" / ".writer.lock").touch()
    (tmp_path / "agent-state.json").write_text("{}")
    recording = read_source(tmp_path)
    assert recording.spans == SPANS
    assert recording.source == str(run), "the run is named, not the link"
    (tmp_path / "latest").unlink()
    assert read_source(tmp_path).spans == SPANS
    (tmp_path / "traces" / "spans-000001.jsonl").write_bytes(LINES[0])
    own = read_source(tmp_path)
    assert own.traces == join_spans(TRACES[0].spans), "a recording of its own counts"
    assert own.source == str(tmp_path)


def test_files_of_a_folder_come_before_runs_in_it(tmp_path: Path) -> None:
    run_in(tmp_path, "older", at_s=1_000)
    (tmp_path / "server.json").write_text("{}")
    assert resolve_run(tmp_path) == tmp_path / "older"
    (tmp_path / "export.jsonl").write_bytes(LINES[2])
    recording = read_source(tmp_path)
    assert (recording.traces, recording.source) == (join_spans(TRACES[2].spans), str(tmp_path))


def test_link_out_of_the_folder_is_named_as_it_is(tmp_path: Path) -> None:
    elsewhere = run_in(tmp_path, "elsewhere", at_s=1_000)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(elsewhere)
    assert read_source(tmp_path / "runs").source == str(tmp_path / "runs" / "latest")
