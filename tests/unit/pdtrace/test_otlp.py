"""OTLP JSON lines and protobuf, checked against the official definitions and the SDK's encoder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from pdtrace.assembly.request_spans import assemble
from pdtrace.otlp import json_lines
from pdtrace.otlp.json_lines import decode_heads, decode_line, encode_line
from pdtrace.otlp.protobuf import encode_request, readable_spans
from pdtrace.spans import (
    AttrValue,
    Event,
    Link,
    Resource,
    Span,
    SpanKind,
    StatusCode,
)
from tests.support.marked_requests import (
    Mode,
    colocated_moments,
    completed,
    pd_moments,
    request_of,
    until,
)
from tests.support.official_otlp import official

RESOURCE = Resource(attributes={"service.name": "pd-decode", "process.pid": 7})


def span_of(attributes: dict[str, Any] | None = None, **changes: Any) -> Span:
    fields: dict[str, Any] = {
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "parent_id": "00f067aa0ba902b7",
        "name": "decode.queue",
        "kind": SpanKind.INTERNAL,
        "start_ns": 1_800_000_000_000_001_000,
        "end_ns": 1_800_000_000_000_002_000,
        "resource": RESOURCE,
        "attributes": attributes or {},
    }
    return Span(**(fields | changes))


def samples() -> list[Span]:
    failed = [*until(pd_moments(), 5_000), completed(5_000, "failed", "engine_error", "p", 500)]
    spans = [
        span
        for moments in (pd_moments(), pd_moments(Mode.PD_EARLY), colocated_moments(), failed)
        for span in assemble(request_of(moments))
    ]
    spans.append(
        span_of(
            {
                "text": '日本語 \u0000 "quoted"',
                "empty": "",
                "int": -(2**63),
                "big": 2**63 - 1,
                "float": 0.1,
                "whole": 2.0,
                "nan": math.nan,
                "inf": -math.inf,
                "true": True,
                "list": ("a", "b"),
                "numbers": (1, 2),
                "floats": (1.5, 2.0),
                "none of them": (),
            },
            events=(Event(name="pd.wait", time_ns=1_800_000_000_000_001_500, attributes={"n": 1}),),
            links=(Link(trace_id="a" * 32, span_id="b" * 16, attributes={"pd.link": "retry_of"}),),
            status=StatusCode.ERROR,
            status_message="kv_timeout",
            trace_state="vendor=1,other=2",
        )
    )
    spans.append(
        span_of({"pd.span": "request"}, parent_id="c" * 16, name="chat m", kind=SpanKind.SERVER)
    )
    return spans


def test_lines_parse_with_the_official_definitions_to_what_the_sdk_would_send() -> None:
    spans = samples()
    assert official(encode_line(spans)).resource_spans == encode_request(spans).resource_spans


def test_fast_encoder_equals_the_sdk_encoder() -> None:
    spans = samples()
    assert encode_request(spans) == encode_spans(readable_spans(spans))


def test_fast_encoder_groups_equal_resources_like_the_sdk() -> None:
    twin = Resource(attributes=dict(reversed(list(RESOURCE.attributes.items()))))
    other = Resource(attributes={"service.name": "pd-prefill", "tags": ("a", "b")})
    spans = [span_of(), span_of(resource=other), span_of(resource=twin)]
    request = encode_request(spans)
    assert [len(r.scope_spans[0].spans) for r in request.resource_spans] == [2, 1]
    assert request == encode_spans(readable_spans(spans))


def test_line_is_one_line_with_hex_ids_string_integers_and_numeric_enums() -> None:
    line = encode_line([span_of({"text": "two\nlines", "n": 7}, status=StatusCode.ERROR)])
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    [resource_spans] = json.loads(line)["resourceSpans"]
    [encoded] = resource_spans["scopeSpans"][0]["spans"]
    assert encoded["traceId"] == "0af7651916cd43dd8448eb211c80319c"
    assert encoded["parentSpanId"] == "00f067aa0ba902b7"
    assert encoded["startTimeUnixNano"] == "1800000000000001000"
    assert encoded["kind"] == 1
    assert encoded["status"] == {"code": 2}
    assert {"key": "n", "value": {"intValue": "7"}} in encoded["attributes"]


def test_decoding_gives_the_spans_back() -> None:
    spans = [span for span in samples() if "nan" not in span.attributes]
    assert decode_line(encode_line(spans)) == sorted(
        spans, key=lambda span: [s.resource for s in spans].index(span.resource)
    )


def test_heads_are_those_of_the_spans_in_their_order() -> None:
    spans = samples()
    heads = decode_heads(encode_line(spans))
    decoded = decode_line(encode_line(spans))
    assert [(head.span_id, head.parent_id, head.keys) for head in heads] == [
        (span.span_id, span.parent_id, set(span.attributes)) for span in decoded
    ]
    for line in (b"{", b"[]", b"{}", b'{"resourceSpans":[{"scopeSpans":[{"spans":[{}]}]}]}'):
        with pytest.raises(ValueError, match="not OTLP"):
            decode_heads(line)


def test_not_a_number_survives() -> None:
    [span] = decode_line(encode_line([span_of({"nan": math.nan, "inf": math.inf})]))
    assert isinstance(span.attributes["nan"], float)
    assert math.isnan(span.attributes["nan"])
    assert span.attributes["inf"] == math.inf


@pytest.mark.parametrize("bad", [None, Path("/tmp"), b"bytes", {"a": 1}, object(), [1, None]])
def test_value_of_a_bad_type_costs_itself_only(bad: object) -> None:
    spans = [span_of({"good": 1, "bad": bad}), span_of({"other": "x"}, span_id="1" * 16)]
    for encoded in (official(encode_line(spans)), encode_request(spans)):
        first, second = encoded.resource_spans[0].scope_spans[0].spans
        assert [pair.key for pair in first.attributes] == ["good"]
        assert first.dropped_attributes_count == 1
        assert [pair.key for pair in second.attributes] == ["other"]
    sdk = encode_spans(readable_spans(spans)).resource_spans[0].scope_spans[0].spans
    assert [[pair.key for pair in span.attributes] for span in sdk] == [["good"], ["other"]]


def test_lone_surrogates_and_huge_integers_do_not_break_a_batch() -> None:
    spans = [span_of({"s\ud800": "x\udfff", "huge": 2**70}, name="n\ud800")]
    [span] = decode_line(encode_line(spans))
    assert span.attributes == {"s?": "x?", "huge": str(2**70)}
    assert span.name == "n?"
    assert encode_request(spans) == encode_spans(readable_spans(spans))


def test_subclasses_of_scalars_are_written_as_what_they_are() -> None:
    [span] = decode_line(encode_line([span_of({"mode": Mode.PD, "kind": SpanKind.SERVER})]))
    assert span.attributes == {"mode": "pd", "kind": 2}


def test_lines_of_other_writers_are_understood() -> None:
    line = json.dumps(
        {
            "resourceSpans": [
                {
                    "scopeSpans": [
                        {
                            "spans": [
                                {
                                    "traceId": "0AF7651916CD43DD8448EB211C80319C",
                                    "spanId": "B7AD6B7169203331",
                                    "parentSpanId": "",
                                    "name": "x",
                                    "kind": "SPAN_KIND_SERVER",
                                    "startTimeUnixNano": 1,
                                    "endTimeUnixNano": "2",
                                    "attributes": [
                                        {"key": "n", "value": {"intValue": 3}},
                                        {"key": "unset", "value": {}},
                                        {"key": "kv", "value": {"kvlistValue": {"values": []}}},
                                    ],
                                    "status": {"code": "STATUS_CODE_ERROR"},
                                }
                            ]
                        }
                    ]
                }
            ]
        }
    )
    [span] = decode_line(line)
    assert span.parent_id is None
    assert span.kind is SpanKind.SERVER
    assert span.status is StatusCode.ERROR
    assert span.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes == {"n": 3, "kv": "{}"}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"resourceSpans": 7}',
        b'{"resourceSpans": [7]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xx"}]}]}]}',
        b'{"resourceLogs": []}',
    ],
)
def test_other_lines_are_refused_with_a_reason(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"not (JSON|OTLP)"):
        decode_line(line)


VALUES: st.SearchStrategy[AttrValue] = st.one_of(
    st.text(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.text(), max_size=3).map(tuple),
    st.lists(st.integers(-9, 9), max_size=3).map(tuple),
)


@given(attributes=st.dictionaries(st.text(min_size=1), VALUES, max_size=6), name=st.text())
@settings(max_examples=200, deadline=None)
def test_any_attributes_survive_and_all_encoders_agree(
    attributes: dict[str, AttrValue], name: str
) -> None:
    spans = [span_of(attributes, name=name)]
    assert decode_line(encode_line(spans)) == spans
    assert encode_request(spans) == encode_spans(readable_spans(spans))
    assert official(encode_line(spans)).resource_spans == encode_request(spans).resource_spans


ODD: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        found += [(value, key) for key in cast("dict[str, Any]", value)]
    elif isinstance(value, list):
        found += [(value, index) for index in range(len(cast("list[Any]", value)))]
    return found + [deep for container, key in found for deep in places(container[key])]


def decoded(line: bytes) -> list[Span] | None:
    try:
        return decode_line(line)
    except ValueError:
        return None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_plain_lines_are_decoded_as_any_other(data: st.DataObject) -> None:
    """The quick way gives what the way for all forms gives, or leaves the line to that one."""
    document = json.loads(encode_line(samples()[-3:]))
    for _ in range(data.draw(st.integers(0, 2))):
        left = places(document)
        if not left:
            break
        container, key = data.draw(st.sampled_from(left))
        what = data.draw(st.sampled_from(["odd", "gone", "text"]))
        if what == "gone":
            del container[key]
        else:
            container[key] = str(container[key]) if what == "text" else data.draw(ODD)
    line = json.dumps(document).encode()
    quick = decoded(line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_decode_plain_document", refuse)
        assert repr(decoded(line)) == repr(quick)


def refuse(line: bytes) -> None:
    raise ValueError(line)


def test_own_lines_are_decoded_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_decode_document", refuse)
    for spans in (samples()[:-2], samples()[-1:]):
        assert sorted(decode_line(encode_line(spans)), key=repr) == sorted(spans, key=repr)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"aa","spanId":"bb","attributes":'
        b'[{"key":"k","value":' + b'{"arrayValue":{"values":[' * 300 + b"]}}" * 300 + b"}]}]}]}]}",
        b'{"resourceSpans":' + b'[{"scopeSpans":' * 2_000 + b"]" * 10,
    ],
)
def test_nesting_without_end_is_no_document(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"not (JSON|OTLP)"):
        decode_line(line)
