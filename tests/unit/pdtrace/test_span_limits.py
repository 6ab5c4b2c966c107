"""The OpenTelemetry span limits, alone and in the messages of both paths."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdtrace.assembly.request_spans import assemble
from pdtrace.export import targets
from pdtrace.export.queue import Target
from pdtrace.export.settings import ExportConfigError, plan_from_env
from pdtrace.export.span_limits import VARIABLES, Dropped, SpanLimits, limit_span, limits_from_env
from pdtrace.export.targets import limited_readable_spans, otlp_grpc_target, otlp_http_target
from pdtrace.spans import Event, Link, Span
from tests.support.copies import replace
from tests.support.marked_requests import pd_moments, request_of
from tests.support.otlp_receivers import Received, grpc_receiver, http_receiver

SPAN = replace(
    assemble(request_of(pd_moments()))[0],
    attributes={"a": "xyz", "b": 1, "c": ("long", "é" * 9), "d": 2.5},
    events=tuple(Event(name=f"e{n}", time_ns=n, attributes={"k": "v", "m": n}) for n in range(4)),
    links=tuple(
        Link(trace_id="a" * 32, span_id=f"{n + 1:016x}", attributes={"p": 1, "q": 2, "r": 3})
        for n in range(3)
    ),
)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({}, None),
        ({"OTEL_SPAN_EVENT_COUNT_LIMIT": ""}, None),
        (
            {"OTEL_ATTRIBUTE_COUNT_LIMIT": "3"},
            SpanLimits(attributes=3, event_attributes=3, link_attributes=3),
        ),
        (
            {"OTEL_ATTRIBUTE_COUNT_LIMIT": "3", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "9"},
            SpanLimits(attributes=9, event_attributes=3, link_attributes=3),
        ),
        (
            {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "8"},
            SpanLimits(attribute_chars=8, inner_chars=8),
        ),
        ({"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "8"}, SpanLimits(attribute_chars=8)),
        (
            {"OTEL_SPAN_EVENT_COUNT_LIMIT": "0", "OTEL_SPAN_LINK_COUNT_LIMIT": "1"},
            SpanLimits(events=0, links=1),
        ),
        (
            {"OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "1", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": "2"},
            SpanLimits(event_attributes=1, link_attributes=2),
        ),
    ],
)
def test_limits_are_the_set_ones(environ: Mapping[str, str], limits: SpanLimits | None) -> None:
    assert limits_from_env(environ) == limits


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_limit_that_is_no_count_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ExportConfigError, match=f"{variable} is '{value}'"):
        plan_from_env()


def test_first_ones_stay_and_the_rest_is_counted() -> None:
    limited, dropped = limit_span(
        SPAN, SpanLimits(attributes=2, events=1, links=2, event_attributes=1, link_attributes=0)
    )
    assert list(limited.attributes) == ["a", "b"]
    assert [event.name for event in limited.events] == ["e0"]
    assert [link.span_id[-1] for link in limited.links] == ["1", "2"]
    assert dropped == Dropped(2, 3, 1, [1], [3, 3])


def test_texts_are_cut_and_not_counted() -> None:
    limited, dropped = limit_span(SPAN, SpanLimits(attribute_chars=2))
    assert limited.attributes == {"a": "xy", "b": 1, "c": ["lo", "éé"], "d": 2.5}
    assert dropped.attributes == 0
    assert limited.events == SPAN.events
    limited, _ = limit_span(SPAN, SpanLimits(inner_chars=0))
    assert limited.attributes == SPAN.attributes
    assert limited.events[0].attributes == {"k": "", "m": 0}


def test_resources_and_names_have_no_limit() -> None:
    limited, _ = limit_span(SPAN, SpanLimits(attributes=0, attribute_chars=0))
    assert (limited.name, limited.resource) == (SPAN.name, SPAN.resource)


LIMITS = SpanLimits(
    attributes=3,
    attribute_chars=3,
    events=2,
    links=1,
    event_attributes=1,
    link_attributes=2,
    inner_chars=0,
)


def sent(target: Target, received: Received) -> list[bytes]:
    target.send([SPAN, replace(SPAN, span_id="b" * 16, events=(), links=())])
    target.shutdown()
    return [span.SerializeToString(deterministic=True) for span in received.spans()]


def test_both_paths_and_protocols_send_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as received:
        fast = sent(otlp_http_target(f"{received.endpoint}/v1/traces", LIMITS), received)
        counted = received.spans()[0]
    assert len(counted.attributes) == 3
    assert counted.dropped_attributes_count == 1
    assert (len(counted.events), counted.dropped_events_count) == (2, 2)
    assert (len(counted.links), counted.dropped_links_count) == (1, 2)
    assert [event.dropped_attributes_count for event in counted.events] == [1, 1]
    assert [link.dropped_attributes_count for link in counted.links] == [1]
    assert counted.attributes[0].value.string_value == "xyz"
    assert [v.string_value for v in counted.attributes[2].value.array_value.values] == [
        "lon",
        "ééé",
    ]
    with grpc_receiver() as received:
        assert sent(otlp_grpc_target(received.endpoint, LIMITS), received) == fast
    monkeypatch.setattr(targets, "_agrees", lambda: False)
    with http_receiver() as received:
        target = otlp_http_target(f"{received.endpoint}/v1/traces", LIMITS)
        assert sent(target, received) == fast
    with grpc_receiver() as received:
        assert sent(otlp_grpc_target(received.endpoint, LIMITS), received) == fast


def test_variables_reach_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "1")
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        plan = plan_from_env()
        assert plan is not None
        [target] = plan.targets
        target.send([SPAN])
        [span] = received.spans()
    assert [(item.key, item.value.string_value) for item in span.attributes] == [
        ("a", "x"),
        ("b", ""),
    ]
    assert span.dropped_attributes_count == 2


def test_any_exporter_sees_the_counts_of_the_sdk() -> None:
    [readable] = limited_readable_spans([SPAN], LIMITS)
    assert readable.dropped_attributes == 1
    assert readable.dropped_events == 2
    assert readable.dropped_links == 2
    assert [event.dropped_attributes for event in readable.events] == [1, 1]


def test_without_limits_spans_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(span: Span, limits: SpanLimits) -> object:
        raise AssertionError("asked without limits")

    monkeypatch.setattr(targets, "limit_span", fail)
    with http_receiver() as received:
        target = otlp_http_target(f"{received.endpoint}/v1/traces")
        assert len(sent(target, received)) == 2
