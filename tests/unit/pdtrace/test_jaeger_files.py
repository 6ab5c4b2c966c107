"""Files in Jaeger's JSON: what its page saves, its APIs answer and its storages keep."""

from __future__ import annotations

import copy
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pdtrace import semconv as a
from pdtrace.analysis.sources import Recording, read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.cli import app
from pdtrace.otlp import json_lines
from pdtrace.spans import SpanKind, StatusCode
from tests.support.jaeger_doubles import ANSWERS, REQUEST_ID, TRACE_ID
from tests.support.pd_traces import Story

OLDER = (ANSWERS / "trace.json").read_bytes()
V3 = (ANSWERS / "v3_trace.json").read_bytes()
SPANS = 23

Document = dict[str, Any]


def saved() -> Document:
    return json.loads(OLDER)


def read(data: bytes) -> Recording:
    return read_source("-", stdin=io.BytesIO(data))


def as_json(document: object) -> bytes:
    return json.dumps(document).encode()


def the_request(recording: Recording) -> Timeline:
    [timeline] = build_timelines(recording.traces)
    return timeline


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


WHOLE = the_request(read(OLDER))


# -- forms ----------------------------------------------------------------------------------------


def bare(document: Document) -> object:
    return document["data"][0]


def list_of_traces(document: Document) -> object:
    return document["data"]


def one_trace_as_data(document: Document) -> object:
    return {"data": document["data"][0]}


def stored_spans(document: Document) -> list[Document]:
    """As storages and the anonymizer write them: the process inside each span."""
    [trace] = document["data"]
    return [
        {key: value for key, value in span.items() if key != "processID"}
        | {"process": trace["processes"][span["processID"]]}
        for span in trace["spans"]
    ]


FORMS: dict[str, Callable[[Document], object]] = {
    "answer": lambda document: document,
    "bare trace": bare,
    "list of traces": list_of_traces,
    "one trace as data": one_trace_as_data,
    "stored spans": stored_spans,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("indent", [None, 2])
def test_every_form_gives_the_same_request(
    form: Callable[[Document], object], indent: int | None
) -> None:
    recording = read(json.dumps(form(saved()), indent=indent).encode())
    assert (recording.spans, recording.lines) == (SPANS, 1)
    assert recording.from_jaeger == ("standard input",)
    assert not recording.problems
    assert the_request(recording) == WHOLE


def test_answer_of_api_v3_gives_the_same_parts() -> None:
    recording = read(V3)
    assert recording.from_jaeger == ("standard input",)
    assert the_request(recording).parts == WHOLE.parts
    assert read(V3.rstrip(b"\n") + b"\n" + V3).problems.duplicates == SPANS


@pytest.mark.case("PAR-01")
@pytest.mark.case("PAR-02")
@pytest.mark.parametrize("name", ["t.json", "t.jsonl", "t.txt", "t", "t.json.gz"])
def test_content_decides_and_lines_may_hold_anything(tmp_path: Path, name: str) -> None:
    """Children before parents: the spans of a trace in lines of their own, last first."""
    lines = b"".join(as_json(span) + b"\n" for span in reversed(stored_spans(saved())))
    for data in (OLDER, V3, lines, b"\xef\xbb\xbf" + OLDER, gzip.compress(OLDER)):
        path = tmp_path / name
        path.write_bytes(data)
        recording = read_source(path)
        assert recording.spans == SPANS
        assert not recording.problems
        assert the_request(recording).parts == WHOLE.parts


def test_download_of_a_search_holds_several_traces(tmp_path: Path) -> None:
    document = saved()
    other = json.loads(OLDER.replace(TRACE_ID.encode(), b"ab" * 16))["data"][0]
    document["data"].append(other)
    recording = read(as_json(document))
    assert [trace.trace_id for trace in recording.traces] == [TRACE_ID, "ab" * 16]
    assert len(build_timelines(recording.traces)) == 2
    # A folder may hold files of both kinds.
    (tmp_path / "jaeger.json").write_bytes(OLDER)
    (tmp_path / "otlp.jsonl").write_bytes(json_lines.encode_line(Story().trace().spans))
    both = read_source(tmp_path)
    assert len(both.traces) == 2
    assert both.from_jaeger == (str(tmp_path / "jaeger.json"),)


# -- odd parts ------------------------------------------------------------------------------------


def edited(edit: Callable[[Document], None]) -> Recording:
    """The one trace with each of its spans changed."""
    document = saved()
    for span in document["data"][0]["spans"]:
        edit(span)
    return read(as_json(document))


def numbers_as_text(span: Document) -> None:
    span["startTime"], span["duration"] = str(span["startTime"]), str(span["duration"])
    for tag in span["tags"]:
        if tag["type"] in {"int64", "float64"}:
            tag["value"] = str(tag["value"])
        elif tag["type"] == "bool":
            tag["value"] = "true" if tag["value"] else "false"
    for log in span["logs"]:
        log["timestamp"] = str(log["timestamp"])


def numbers_as_floats(span: Document) -> None:
    span["startTime"], span["duration"] = float(span["startTime"]), float(span["duration"])


def upper_case_ids(span: Document) -> None:
    for owner in (span, *span["references"]):
        owner["traceID"], owner["spanID"] = owner["traceID"].upper(), owner["spanID"].upper()


def parent_in_a_field(span: Document) -> None:
    for reference in span.pop("references"):
        span["parentSpanID"] = reference["spanID"]


def no_trace_id(span: Document) -> None:
    del span["traceID"]
    for reference in span["references"]:
        del reference["traceID"]


def null_lists(span: Document) -> None:
    for key in ("logs", "tags", "references", "warnings"):
        if not span[key]:
            span[key] = None


def absent_lists(span: Document) -> None:
    for key in ("logs", "tags", "references", "warnings", "flags"):
        if not span.get(key):
            span.pop(key, None)


def unknown_fields(span: Document) -> None:
    span["futureField"] = {"a": [1, None]}
    span["references"] += [{"refType": "CHILD_OF"}, None, 3]
    span["tags"] += [{"key": "odd", "value": None}, {"value": 1}, "text"]
    span["logs"] += [{"fields": []}, None]


@pytest.mark.parametrize(
    "edit",
    [
        *(numbers_as_text, numbers_as_floats, upper_case_ids, parent_in_a_field, no_trace_id),
        *(null_lists, absent_lists, unknown_fields),
    ],
)
def test_odd_forms_of_fields_give_the_same_request(edit: Callable[[Document], None]) -> None:
    recording = edited(edit)
    assert not recording.problems
    timeline = the_request(recording)
    assert (timeline.parts, timeline.request_id) == (WHOLE.parts, REQUEST_ID)
    assert timeline.violations == ()


def test_several_references_name_one_parent_and_links() -> None:
    """As Jaeger's own fixture `ui_01.json` has them."""
    document = saved()
    spans = document["data"][0]["spans"]
    child = next(span for span in spans if span["references"])
    parent = child["references"][0]
    elsewhere = {"refType": "CHILD_OF", "traceID": "cd" * 16, "spanID": "12"}
    follows = {**parent, "refType": "FOLLOWS_FROM"}
    child["references"] = [follows, elsewhere, parent, {**parent, "spanID": "34"}]
    [trace] = read(as_json(document)).traces
    found = next(span for span in trace.spans if span.span_id == child["spanID"])
    assert found.parent_id == parent["spanID"]
    assert [(link.trace_id, link.span_id) for link in found.links] == [
        (TRACE_ID, parent["spanID"]),
        ("cd" * 16, "12".zfill(16)),
        (TRACE_ID, "34".zfill(16)),
    ]


def test_tags_have_their_declared_type() -> None:
    document = saved()
    document["data"][0]["spans"][0]["tags"] = [
        {"key": "room", "type": "int64", "value": "7000000000000000123"},
        {"key": "share", "type": "float64", "value": 1},
        {"key": "half", "type": "float64", "value": "0.5"},
        {"key": "is", "type": "bool", "value": "false"},
        {"key": "word", "type": "int64", "value": "many"},
        {"key": "bytes", "type": "binary", "value": "AAE="},
        {"key": "names", "type": "string", "value": '["a","b"]'},
        {"key": "span.kind", "type": "string", "value": "Server"},
        {"key": "otel.status_code", "type": "string", "value": "error"},
    ]
    recording = read(as_json(document))
    span_id = document["data"][0]["spans"][0]["spanID"]
    [span] = [s for s in recording.traces[0].spans if s.span_id == span_id]
    assert span.attributes == {
        "room": 7000000000000000123,
        "share": 1.0,
        "half": 0.5,
        "is": False,
        "word": "many",
        "bytes": "AAE=",
        "names": ("a", "b"),
    }
    assert (span.kind, span.status) == (SpanKind.SERVER, StatusCode.ERROR)


@pytest.mark.case("ID-06")
def test_short_ids_are_padded_and_found_by_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(OLDER.replace(TRACE_ID.encode(), b"1a2b"))
    for wanted in ("1a2b", "1a2b".zfill(32), REQUEST_ID):
        result = invoke("why", wanted, "--from", path, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["requests"][0]["trace_id"] == "1a2b".zfill(32)


@pytest.mark.parametrize("processes", [{}, None, [], {"p1": None}, "absent"])
def test_missing_processes_make_unknown_services(processes: object) -> None:
    document = saved()
    document["data"][0]["processes"] = processes
    if processes == "absent":
        del document["data"][0]["processes"]
    recording = read(as_json(document))
    timeline = the_request(recording)
    assert timeline.parts == WHOLE.parts
    assert timeline.roles == frozenset()
    assert {span.resource.service_name for span in recording.traces[0].spans} == {"unknown"}


def test_hand_made_sample_with_its_quirks() -> None:
    """Short id, remote parent of the root, a span twice, an unknown process, an old parent field,
    null tags, a warning, and a query that failed in part."""
    trace_id, root = "a0001b0002", "a000000000000001"

    def span(number: int, name: str, at: int, took: int, **more: object) -> Document:
        times = {"startTime": 1760000000000000 + at, "duration": took}
        return (
            {"traceID": trace_id, "spanID": f"a{number:015}", "operationName": name} | times | more
        )

    inside = [{"refType": "CHILD_OF", "traceID": trace_id, "spanID": root}]
    remote = [{"refType": "CHILD_OF", "traceID": trace_id, "spanID": "ffff000000000001"}]
    room = {"key": "bootstrap_room", "type": "int64", "value": "7000000000000000123"}
    kind = {"key": "span.kind", "type": "string", "value": "server"}
    request = span(1, "request", 0, 900_000, references=remote, tags=[kind, room], processID="p1")
    prefill = span(3, "prefill.compute", 105_000, 200_000, references=inside, processID="p2")
    decode = span(5, "decode.generate", 705_000, 185_000, parentSpanID=root, tags=None)
    trace = {
        "traceID": trace_id,
        "spans": [request, prefill, copy.deepcopy(prefill), {**decode, "processID": "p9"}],
        "processes": {
            "p1": {"serviceName": "gateway"},
            "p2": {"serviceName": "prefill", "tags": None},
        },
        "warnings": ["clock skew adjustment skipped"],
    }
    document = {"data": [trace], "errors": [{"code": 500, "msg": "partial result"}]}
    recording = read(as_json(document))
    [found] = recording.traces
    assert found.trace_id == trace_id.zfill(32)
    assert [(s.name, s.resource.service_name) for s in found.spans] == [
        ("request", "gateway"),
        ("prefill.compute", "prefill"),
        ("decode.generate", "unknown"),
    ]
    assert found.spans[0].attributes["bootstrap_room"] == 7000000000000000123
    assert recording.problems.duplicates == 1
    assert recording.problems.lossy
    told = " ".join(recording.problems.sentences())
    assert "Jaeger could not answer whole: partial result" in told
    assert "Jaeger warns: clock skew adjustment skipped." in told


@pytest.mark.parametrize(
    ("said", "moved_us"),
    [("250ms", 250_000), ("-1.5s", -1_500_000), ("1m2.5s", 62_500_000), ("408.5µs", 408)],
)
def test_spans_that_jaeger_moved_are_put_back_and_told(said: str, moved_us: int) -> None:
    """With its skew adjustment on, Jaeger moves the spans of a process, and says so."""
    warning = f"This span's timestamps were adjusted by {said}"

    def adjust(span: Document) -> None:
        if span["operationName"].startswith("decode."):
            span["startTime"] += moved_us
            span["warnings"] = [warning]
            for log in span["logs"]:
                log["timestamp"] += moved_us

    recording = edited(adjust)
    decode = [s for s in saved()["data"][0]["spans"] if s["operationName"].startswith("decode.")]
    assert recording.problems.sentences() == [
        f"Jaeger warns {len(decode)} times: {warning} (put back here)."
    ]
    assert not recording.problems.lossy
    assert the_request(recording) == WHOLE


def test_spans_that_api_v3_moved_are_put_back() -> None:
    document = json.loads(V3)
    moved_ns, values = (
        123_456,
        [{"stringValue": "This span's timestamps were adjusted by 123.456µs"}],
    )
    told = {"key": "@jaeger@warnings", "value": {"arrayValue": {"values": values}}}
    for resource in document["result"]["resourceSpans"]:
        for span in resource["scopeSpans"][0]["spans"]:
            if span["name"].startswith("prefill."):
                for key in ("startTimeUnixNano", "endTimeUnixNano"):
                    span[key] = str(int(span[key]) + moved_ns)
                span["attributes"].append(told)
    moved = read(as_json(document))
    plain = read(V3)
    times = [[(s.start_ns, s.end_ns) for s in one.traces[0].spans] for one in (moved, plain)]
    assert times[0] == times[1]
    assert the_request(moved).parts == the_request(plain).parts
    assert "(put back here)" in moved.problems.sentences()[0]


def test_warnings_in_api_v3_are_told() -> None:
    document = json.loads(V3)
    span = document["result"]["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    values = [{"stringValue": f"trace was truncated, {n}"} for n in range(5)]
    span["attributes"].append(
        {"key": "@jaeger@warnings", "value": {"arrayValue": {"values": values}}}
    )
    told = read(as_json(document)).problems.sentences()
    assert told[0] == "Jaeger warns: trace was truncated, 0."
    assert told[-1] == "Jaeger has 2 further warnings."


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("spanID", "0"), ("spanID", None), ("spanID", "no hex"), ("traceID", "f" * 33)),
        *(("duration", -1), ("duration", "long"), ("duration", None), ("startTime", -5)),
        *(("startTime", 2**70), ("startTime", 1.5), ("startTime", True), ("duration", 2**62)),
    ],
)
def test_unusable_span_costs_itself_only(field: str, value: object) -> None:
    document = saved()
    document["data"][0]["spans"][3][field] = value
    recording = read(as_json(document))
    assert (recording.spans, recording.problems.bad_spans) == (SPANS - 1, 1)


def test_what_is_no_span_among_spans_is_counted() -> None:
    document = saved()
    document["data"][0]["spans"] += [None, 3, "span", []]
    document["data"] += [None, {"traceID": "1"}]
    recording = read(as_json(document))
    assert (recording.spans, recording.problems.bad_spans) == (SPANS, 6)
    none_left = {"data": [{"traceID": "1", "spans": [{"spanID": "2"}], "processes": {}}]}
    with pytest.raises(Exception, match="no span has usable ids and times"):
        read(as_json(none_left))


@pytest.mark.case("PAR-20")
def test_span_that_comes_again_counts_once(tmp_path: Path) -> None:
    document = saved()
    document["data"].append(copy.deepcopy(document["data"][0]))
    assert read(as_json(document)).problems.duplicates == SPANS
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_bytes(OLDER)
    again = read_source(tmp_path)
    assert (again.spans, again.problems.duplicates) == (SPANS, SPANS)
    assert "came more than once" in again.problems.sentences()[0]


@pytest.mark.case("PAR-17")
def test_parent_that_is_not_in_the_file_leaves_orphans_and_is_told(tmp_path: Path) -> None:
    document = saved()
    spans = document["data"][0]["spans"]
    attempt = next(span for span in spans if span["operationName"] == "attempt")
    spans.remove(attempt)
    path = tmp_path / "t.json"
    path.write_bytes(as_json(document))
    timeline = the_request(read_source(path))
    assert timeline.parts == WHOLE.parts
    checked = invoke("check", "--from", path, "--json")
    assert checked.exit_code == 1
    assert json.loads(checked.stdout)["orphans"] > 0
    # A caller of the request that is elsewhere makes no orphan.
    root = next(span for span in spans if not span["references"])
    attempt_again = saved()
    [of_root] = [s for s in attempt_again["data"][0]["spans"] if s["spanID"] == root["spanID"]]
    of_root["references"] = [{"refType": "CHILD_OF", "traceID": TRACE_ID, "spanID": "ff" * 8}]
    path.write_bytes(as_json(attempt_again))
    assert json.loads(invoke("check", "--from", path, "--json").stdout)["orphans"] == 0


@pytest.mark.case("PAR-33")
@pytest.mark.parametrize("form", [FORMS["answer"], bare, stored_spans])
@pytest.mark.parametrize("indent", [None, 1])
def test_document_may_be_cut_anywhere(
    form: Callable[[Document], object], indent: int | None
) -> None:
    """What is whole of its spans is used, with one word that the end is missing."""
    whole = json.dumps(form(saved()), indent=indent).encode()
    ids = {span["spanID"] for span in saved()["data"][0]["spans"]}
    seen: set[int] = set()
    first = whole.index(b'"operationName"')
    for cut in range(len(whole) * 2 // 5, len(whole) - 1, 307):
        assert cut > first
        recording = read(whole[:cut])
        seen.add(recording.spans)
        assert {s.span_id for s in recording.traces[0].spans} <= ids
        assert len(recording.problems.cut_files) == 1
        assert recording.problems.bad_line_count == 0
        for span in recording.traces[0].spans:
            assert a.STAGE.key in span.attributes or a.SPAN.key in span.attributes
    assert len(seen) > SPANS // 3  # of many lengths
    assert max(seen) >= SPANS - 1


@pytest.mark.case("PAR-33")
def test_trailing_commas_are_passed_over() -> None:
    for data in (OLDER.replace(b"}],", b"},],"), OLDER.replace(b"}]", b"} ,\n ]")):
        assert data != OLDER
        recording = read(data)
        assert the_request(recording) == WHOLE
    # Text is as it was, whatever it looks like.
    odd = 'a ,] b ",}'
    text = OLDER.replace(b'"fake"', json.dumps(odd).encode())
    assert text != OLDER
    models = {s.attributes.get(a.REQUEST_MODEL.key) for s in read(text[:-9]).traces[0].spans}
    assert odd in models


@pytest.mark.case("PAR-22")
def test_cut_gzip_gives_what_was_readable(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    packed = gzip.compress(OLDER, 1)
    path.write_bytes(packed[: len(packed) - 400])
    recording = read_source(path)
    assert 0 < recording.spans <= SPANS
    assert recording.problems.cut_files


@pytest.mark.case("PAR-03")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"data":[]}', "holds no request"),
        (b'{"data":[],"total":0,"limit":0,"offset":0,"errors":null}', "holds no request"),
        (b'{"data":null,"errors":[{"code":404,"msg":"trace not found"}]}', "trace not found"),
        (b'{"data":["pd-gateway"],"total":1}', "no list of a Jaeger's traces"),
        (b'{"result":{"resourceSpans":[]}}', "holds no request"),
        (b'{"error":{"httpCode":404,"message":"No traces found"}}', "no resourceSpans"),
        (b'{"data":[{"traceID":"1","spans":', "not JSON"),
        (b'[{"traceID":"1","spanID":"2"}]', "is a JSON list"),
        (b'"data"', "str instead of an object"),
        (b"\xef\xbb\xbf", "is empty"),
    ],
)
@pytest.mark.parametrize("command", ["why", "check", "slo"])
def test_nothing_to_read_is_one_clear_line(
    tmp_path: Path, data: bytes, message: str, command: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    result = invoke(command, "--from", path)
    if command == "check" and message == "holds no request":
        assert (result.exit_code, "no request was found" in result.stdout) == (1, True)
        return
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [OLDER, V3, gzip.compress(OLDER)])
def test_commands_take_a_saved_trace(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "download"
    path.write_bytes(data)
    shown = invoke("why", REQUEST_ID, "--from", path)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith(REQUEST_ID)
    checked = invoke("check", "--from", path)
    assert checked.exit_code == 0, checked.stdout
    judged = invoke("slo", "--from", path, "--json")
    assert judged.exit_code in {0, 1}, judged.stderr
    assert json.loads(judged.stdout)["requests"] == 1
    assert any("sampl" in warning for warning in json.loads(judged.stdout)["warnings"])


def test_top_says_that_a_saved_trace_has_nothing_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(OLDER)
    result = invoke("top", "--once", "--from", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert f"{path}: a file has nothing in flight; give a run directory" in result.stderr


# -- hostile ones ---------------------------------------------------------------------------------


def moved_by(amount: str) -> Document:
    document = saved()
    document["data"][0]["spans"][0]["warnings"] = [f"timestamps were adjusted by {amount}"]
    return document


@pytest.mark.parametrize("amount", ["9" * 400 + "h", "-" + "9" * 400 + "h", "9" * 30 + "ms"])
def test_shift_that_no_clock_has_is_none(amount: str) -> None:
    assert the_request(read(as_json(moved_by(amount)))).parts == WHOLE.parts


def test_shifts_beyond_all_clocks_do_not_add_up() -> None:
    document = saved()
    warning = f"timestamps were adjusted by -{365 * 24}h"
    document["data"][0]["spans"][0]["warnings"] = [warning] * 1_000
    recording = read(as_json(document))
    assert max(span.start_ns for span in recording.traces[0].spans) < 2**63


@pytest.mark.parametrize("value", [[], {}, None, 3])
def test_tag_of_a_type_that_none_has_costs_itself_only(value: object) -> None:
    document = saved()
    tag = {"key": "odd", "type": "bool", "value": value}
    for process in document["data"][0]["processes"].values():
        process["tags"].append(tag)
    document["data"][0]["spans"][0]["tags"].append(tag)
    recording = read(as_json(document))
    assert recording.problems.bad_spans == 0
    assert the_request(recording).parts == WHOLE.parts


@pytest.mark.parametrize("attribute", [a.OUTPUT_TOKENS, a.BEGIN_NS, a.END_NS, a.ATTEMPT])
@pytest.mark.parametrize("value", ["9" * 4_000, "-" + "9" * 4_000, "9" * 30, 1e300, -5])
@pytest.mark.parametrize("command", ["slo", "why", "check"])
def test_numbers_that_no_counter_shows_end_no_command(
    tmp_path: Path, command: str, attribute: a.Attr, value: object
) -> None:
    document = saved()
    for span in document["data"][0]["spans"]:
        span["tags"] = [tag for tag in span["tags"] if tag["key"] != attribute.key]
        span["tags"].append({"key": attribute.key, "type": "int64", "value": value})
    path = tmp_path / "trace.json"
    path.write_bytes(as_json(document))
    for form in (), ("--json",):
        result = invoke(command, "--from", path, *form)
        assert result.exit_code in {0, 1}, result.output


def test_end_missing_inside_a_long_text_is_found_at_once() -> None:
    spans = OLDER.partition(b',"processes"')[0].removesuffix(b"]")
    text = b'\\"' * 400_000
    recording = read(spans + b',{"traceID":"1","operationName":"' + text)
    assert recording.problems.cut_files
    assert recording.spans == SPANS
