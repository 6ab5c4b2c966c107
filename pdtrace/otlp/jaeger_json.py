"""Traces in Jaeger's own JSON, as its older HTTP API (`/api/traces`) answers and its pages save.

Owns that form only. It knows microseconds, so a span's exact nanoseconds are those of `pd.begin_ns`
and `pd.end_ns`; lists come as JSON text, links without their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdtrace.spans import AttrValue, Event, Link, Resource, Span, SpanKind, StatusCode

_KIND, _STATUS, _MESSAGE, _ERROR = (
    "span.kind",
    "otel.status_code",
    "otel.status_description",
    "error",
)
_SCOPE = frozenset({"otel.scope.name", "otel.scope.version"})
_TRACE_STATE = "w3c.tracestate"
_KINDS: Mapping[str, SpanKind] = {kind.name.lower(): kind for kind in SpanKind}
_STATUSES: Mapping[str, StatusCode] = {code.name: code for code in StatusCode}
_PARENT = "CHILD_OF"
_NS_PER_US = 1_000


class _Tag(msgspec.Struct):
    key: str
    value: Any
    type: str = ""


class _Reference(msgspec.Struct, rename="camel"):
    ref_type: str
    trace_id: str = msgspec.field(name="traceID")
    span_id: str = msgspec.field(name="spanID")


class _Log(msgspec.Struct):
    timestamp: int
    fields: list[_Tag] = msgspec.field(default_factory=list[_Tag])


class _Span(msgspec.Struct, rename="camel"):
    operation_name: str
    start_time: int
    duration: int
    trace_id: str = msgspec.field(name="traceID")
    span_id: str = msgspec.field(name="spanID")
    process_id: str = msgspec.field(name="processID", default="")
    references: list[_Reference] | None = None
    tags: list[_Tag] | None = None
    logs: list[_Log] | None = None


class _Process(msgspec.Struct, rename="camel"):
    service_name: str
    tags: list[_Tag] | None = None


class _Trace(msgspec.Struct):
    spans: list[msgspec.Raw]
    processes: dict[str, _Process] = msgspec.field(default_factory=dict[str, _Process])


class _Answer(msgspec.Struct):
    data: list[_Trace] | None = None


@dataclass(slots=True)
class JaegerSpans:
    """Spans of one document, and how many were left out because their fields were unusable."""

    spans: list[Span] = field(default_factory=list[Span])
    bad_spans: int = 0


def decode_jaeger(document: bytes) -> JaegerSpans:
    """The spans of an answer `{"data": [trace, …]}`. Raises ValueError if it is none."""
    found = JaegerSpans()
    for trace in msgspec.json.decode(document, type=_Answer).data or ():
        resources = {name: _resource(process) for name, process in trace.processes.items()}
        for raw in trace.spans:
            try:
                span = msgspec.json.decode(raw, type=_Span)
                found.spans.append(_span(span, resources.get(span.process_id, _NOBODY)))
            except ValueError:
                found.bad_spans += 1
    return found


_NOBODY = Resource(attributes={})


def _resource(process: _Process) -> Resource:
    tags = _attributes(process.tags or ())
    return Resource(attributes={**tags, "service.name": process.service_name})


def _span(span: _Span, resource: Resource) -> Span:
    attributes = _attributes(span.tags or ())
    kind = _KINDS.get(str(attributes.pop(_KIND, "")), SpanKind.UNSPECIFIED)
    status = _STATUSES.get(str(attributes.pop(_STATUS, "")), StatusCode.UNSET)
    if attributes.pop(_ERROR, False) is True:
        status = StatusCode.ERROR
    message = str(attributes.pop(_MESSAGE, ""))
    trace_state = str(attributes.pop(_TRACE_STATE, ""))
    for key in _SCOPE:
        attributes.pop(key, None)
    trace_id, span_id = _id(span.trace_id, 32), _id(span.span_id, 16)
    parent: str | None = None
    links: list[Link] = []
    for reference in span.references or ():
        other = _id(reference.trace_id, 32), _id(reference.span_id, 16)
        if parent is None and reference.ref_type == _PARENT and other[0] == trace_id:
            parent = other[1]
        else:
            links.append(Link(*other))
    if span.start_time < 0 or span.duration < 0:
        raise ValueError(f"span {span_id} has a negative time")
    start_ns = span.start_time * _NS_PER_US
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent,
        name=span.operation_name,
        kind=kind,
        start_ns=start_ns,
        end_ns=start_ns + span.duration * _NS_PER_US,
        resource=resource,
        attributes=attributes,
        events=tuple(map(_event, span.logs or ())),
        links=tuple(links),
        status=status,
        status_message=message,
        trace_state=trace_state,
    )


def _event(log: _Log) -> Event:
    attributes = _attributes(log.fields)
    name = str(attributes.pop("event", ""))
    return Event(name=name, time_ns=log.timestamp * _NS_PER_US, attributes=attributes)


def _attributes(tags: Sequence[_Tag]) -> dict[str, AttrValue]:
    return {tag.key: value for tag in tags if (value := _value(tag)) is not None}


def _value(tag: _Tag) -> AttrValue | None:
    value = tag.value
    if tag.type == "int64" and isinstance(value, str):
        return int(value)
    if tag.type == "float64" and isinstance(value, int | str):
        return float(value)
    if isinstance(value, str) and value.startswith('["'):
        try:
            return tuple(msgspec.json.decode(value, type=list[str]))
        except msgspec.DecodeError:
            return value
    return value if isinstance(value, str | int | float | bool) else None


def _id(value: str, digits: int) -> str:
    """Jaeger leaves out leading zeros. Raises ValueError."""
    if len(value) > digits or not int(value, 16):
        raise ValueError(f"{value!r} is no id")
    return value.lower().zfill(digits)
