"""Whole spans of any content: what the encoders write is what the SDK's encoder would send."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pdtrace import semconv as a
from pdtrace.otlp.json_lines import decode_line, encode_line
from pdtrace.otlp.protobuf import encode_request, readable_spans, serialize_request
from pdtrace.spans import AttrValue, Event, Link, Resource, Span, SpanKind, StatusCode
from tests.support.official_otlp import official

INT64 = st.integers(-(2**63), 2**63 - 1)
EDGES = st.sampled_from(
    [
        edge + step
        for bits in (0, 7, 14, 21, 28, 35, 42, 49, 56, 62, 63)
        for edge in (2**bits, -(2**bits))
        for step in (-1, 0, 1)
        if -(2**63) <= edge + step < 2**63
    ]
)
TEXTS = st.text(st.characters(), max_size=40) | st.text('aé\ud800日\U0001f600\x00"\\', max_size=5)
LONG_TEXTS = st.integers(100, 20_000).map(lambda size: "ü" * size)
VALUES: st.SearchStrategy[AttrValue] = st.one_of(
    TEXTS,
    LONG_TEXTS,
    INT64,
    EDGES,
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(TEXTS, max_size=3).map(tuple),
    st.lists(INT64, max_size=3).map(tuple),
    st.lists(st.booleans(), max_size=3).map(tuple),
    st.lists(st.floats(allow_nan=False), max_size=3),
)
# Few keys, so that values of all types meet under one key in the encoders' memories.
KEYS = st.sampled_from(["pd.begin_ns", "pd.attempt", a.SPAN.key, "schlüssel", "k"]) | TEXTS.filter(
    bool
)
ATTRIBUTES = st.dictionaries(KEYS, VALUES, max_size=6).filter(
    lambda found: len({key.encode(errors="replace") for key in found}) == len(found)
)
"""Lone surrogates become `?`: two keys may not become one by that."""
TRACE_IDS = st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}")
SPAN_IDS = st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}")
TIMES = st.integers(0, 2**64 - 1)
RESOURCES = [
    Resource(attributes={"service.name": "pd-decode", "process.pid": 7, "host.id": "h"}),
    Resource(attributes={"host.id": "h", "process.pid": 7, "service.name": "pd-decode"}),
    Resource(attributes={"service.name": "é", "tags": ("a", "b"), "ratio": 0.5, "on": True}),
]
SPANS = st.builds(
    Span,
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
    parent_id=st.none() | SPAN_IDS,
    name=TEXTS,
    kind=st.sampled_from(SpanKind),
    start_ns=TIMES,
    end_ns=TIMES,
    resource=st.sampled_from(RESOURCES),
    attributes=ATTRIBUTES,
    events=st.lists(st.builds(Event, name=TEXTS, time_ns=TIMES, attributes=ATTRIBUTES), max_size=2),
    links=st.lists(
        st.builds(Link, trace_id=TRACE_IDS, span_id=SPAN_IDS, attributes=ATTRIBUTES), max_size=2
    ),
    status=st.sampled_from(StatusCode),
    status_message=TEXTS,
    trace_state=st.sampled_from(["", "vendor=1", "a=1,b=2"]),
)


@given(st.lists(SPANS, max_size=4))
@settings(max_examples=300, deadline=None)
def test_bytes_parse_to_the_message_that_the_sdk_would_send(spans: list[Span]) -> None:
    message = ExportTraceServiceRequest.FromString(serialize_request(spans))
    assert message == encode_spans(readable_spans(spans))
    assert message == encode_request(spans)


@given(st.lists(SPANS, max_size=4))
@settings(max_examples=150, deadline=None)
def test_lines_parse_to_the_same_message_but_for_what_only_errors_say(spans: list[Span]) -> None:
    """OTLP allows a message beside any status, and a kind that is not given; the SDK does not."""
    told = [
        span
        for span in spans
        if span.kind is not SpanKind.UNSPECIFIED
        and (span.status is StatusCode.ERROR or not span.status_message)
    ]
    assert official(encode_line(told)).resource_spans == encode_request(told).resource_spans


def listed(span: Span) -> dict[str, Any]:
    """A span in plain values; text as UTF-8 can carry it, lists and tuples alike."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode(errors="replace").decode()
        if isinstance(value, dict):
            return {plain(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    as_they_are = (
        *("trace_id", "span_id", "parent_id", "name", "kind", "start_ns", "end_ns"),
        *("attributes", "status", "status_message", "trace_state"),
    )
    return {name: plain(getattr(span, name)) for name in as_they_are} | {
        "resource": plain(dict(span.resource.attributes)),
        "events": [
            (plain(event.name), event.time_ns, plain(dict(event.attributes)))
            for event in span.events
        ],
        "links": [
            (link.trace_id, link.span_id, plain(dict(link.attributes))) for link in span.links
        ],
    }


@given(st.lists(SPANS, max_size=4, unique_by=lambda span: span.span_id))
@settings(max_examples=300, deadline=None)
def test_lines_decode_to_the_spans_they_were_made_of(spans: list[Span]) -> None:
    decoded = {span.span_id: listed(span) for span in decode_line(encode_line(spans))}
    assert decoded == {span.span_id: listed(span) for span in spans}


def span_of(**changes: Any) -> Span:
    fields: dict[str, Any] = {
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "parent_id": None,
        "name": "x",
        "kind": SpanKind.INTERNAL,
        "start_ns": 1,
        "end_ns": 2,
        "resource": RESOURCES[0],
    }
    return Span(**(fields | changes))


@pytest.mark.parametrize("first", [1, True, 1.0, "1"])
@pytest.mark.parametrize("second", [1, True, 1.0, "1"])
def test_values_that_python_takes_for_equal_keep_their_types(first: Any, second: Any) -> None:
    spans = [span_of(attributes={"fresh": first}), span_of(attributes={"fresh": second})]
    assert encode_request(spans) == encode_spans(readable_spans(spans))
    decoded = [span.attributes["fresh"] for span in decode_line(encode_line(spans))]
    assert [(type(value), value) for value in decoded] == [(type(v), v) for v in (first, second)]


@pytest.mark.parametrize("key", ["k", "é" * 60, "k" * 119, "k" * 120, "k" * 20_000])
def test_new_texts_of_a_known_key_of_any_length_are_right(key: str) -> None:
    spans = [
        span_of(attributes={key: letter * size})
        for size in (0, 1, 100, 119, 120, 126, 127, 128, 16_000, 17_000)
        for letter in "aé"
    ]
    assert encode_request(spans) == encode_spans(readable_spans(spans))


def test_more_values_keys_and_resources_than_are_remembered_change_nothing() -> None:
    rng = random.Random(0)
    spans = [
        span_of(
            span_id=f"{number + 1:016x}",
            name=f"name {number}",
            attributes={"text": f"t{rng.random()}", f"key {number}": number, "n": number * 7},
            resource=Resource(attributes={"service.name": f"s{number % 1_500}"}),
        )
        for number in range(3_000)
    ]
    expected = encode_spans(readable_spans(spans))
    for _ in range(2):
        assert encode_request(spans) == expected
        assert official(encode_line(spans)).resource_spans == expected.resource_spans


@pytest.mark.parametrize(
    "broken",
    [
        {"trace_id": "a" * 31},
        {"trace_id": "a" * 34},
        {"trace_id": "g" * 32},
        {"trace_id": "a" * 30 + "  "},
        {"span_id": ""},
        {"parent_id": "b" * 14},
        {"start_ns": -1},
        {"end_ns": 2**64},
        {"links": (Link(trace_id="a", span_id="b" * 16),)},
    ],
)
def test_ids_and_times_that_have_no_form_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"OTLP form|hex"):
        serialize_request([span_of(**broken)])


@pytest.mark.parametrize("broken", ['a"', "", "a b", "\\u0061"])
def test_ids_that_would_break_the_line_are_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="are not hex"):
        encode_line([span_of(trace_id=broken)])
