"""Spans ↔ OTLP JSON lines: the OpenTelemetry file-exporter format, one TracesData object per line.

Owns the JSON mapping (ids in hex, 64-bit integers as strings, enums as numbers) and which attribute
values are valid. Knows nothing of files, protobuf (`pdtrace.otlp_proto`) or the OpenTelemetry SDK.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import intern
from typing import Any, cast

import msgspec

from pdtrace import __version__
from pdtrace import semconv as a
from pdtrace.spans import (
    AttrScalar,
    AttrValue,
    Event,
    Link,
    Resource,
    Span,
    SpanKind,
    StatusCode,
)
from pdtrace.stages import ROOT_SPAN

SCOPE_NAME = "pdtrace"

FLAG_HAS_IS_REMOTE = 0x100
FLAG_IS_REMOTE = 0x200

_SMALL = 2**62
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_TIME_MAX = 2**64 - 1
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KINDS = {int(kind): kind for kind in SpanKind}
_STATUSES = {int(code): code for code in StatusCode}
_KIND_NAMES = {f"SPAN_KIND_{kind.name}": kind for kind in SpanKind}
_STATUS_NAMES = {f"STATUS_CODE_{code.name}": code for code in StatusCode}

_HEX = re.compile("[0-9a-f]+").fullmatch
_encode_json = msgspec.json.Encoder().encode

_MAX_ENCODED_RESOURCES = 1_000
_encoded_resources: dict[int, tuple[Resource, msgspec.Raw]] = {}
"""By identity; the resource is kept so that its identity stays taken."""


def parent_is_remote(span: Span) -> bool:
    """Whether the parent is the caller's span rather than one of ours."""
    return span.parent_id is not None and span.attributes.get(a.SPAN.key) == ROOT_SPAN


def valid_attributes(attributes: Mapping[str, Any]) -> tuple[list[tuple[str, AttrValue]], int]:
    """The attributes that OTLP can carry, and how many were left out.

    A value of another type (None, a path object, bytes, a dict) costs itself, never the span or
    the batch. Lone surrogates become `?`; integers beyond 64 bits become text.
    """
    valid: list[tuple[str, AttrValue]] = []
    dropped = 0
    for key, raw in attributes.items():
        value: AttrValue | None
        # By type first: nearly every value is plain text or a plain integer.
        kind = type(raw)
        plain = (kind is str and raw.isascii()) or (kind is int and -_SMALL < raw < _SMALL)
        if plain and key and key.isascii():
            valid.append((key, raw))
            continue
        if isinstance(raw, list | tuple):
            items = [_valid_scalar(item) for item in cast("Sequence[Any]", raw)]
            value = None if None in items else cast("AttrValue", tuple(items))
        else:
            value = _valid_scalar(raw)
        if value is None or not key:
            dropped += 1
        else:
            valid.append((_valid_text(key), value))
    return valid, dropped


def _valid_scalar(value: Any) -> AttrScalar | None:
    kind = type(value)
    if kind is str:
        return _valid_text(value)
    if kind is int:
        return value if _INT64_MIN <= value <= _INT64_MAX else str(value)
    if kind is float or kind is bool:
        return value
    if isinstance(value, str):
        return _valid_text(str(value))
    if isinstance(value, int | float):
        return _valid_scalar(int(value) if isinstance(value, int) else float(value))
    return None


def _valid_text(text: str) -> str:
    if text.isascii():
        return text
    return text.encode(errors="replace").decode()


def by_resource(spans: Iterable[Span]) -> list[tuple[Resource, list[Span]]]:
    """Spans grouped by equal resources, in order of first appearance."""
    groups: dict[str, tuple[Resource, list[Span]]] = {}
    by_identity: dict[int, list[Span]] = {}
    for span in spans:
        resource = span.resource
        group = by_identity.get(id(resource))
        if group is None:
            key = repr(sorted(resource.attributes.items()))
            group = by_identity[id(resource)] = groups.setdefault(key, (resource, []))[1]
        group.append(span)
    return list(groups.values())


def encode_line(spans: Iterable[Span]) -> bytes:
    """One TracesData object as a line of UTF-8 JSON, newline included."""
    scope = {"name": SCOPE_NAME, "version": __version__}
    resource_spans = [
        {
            "resource": _encode_resource(resource),
            "scopeSpans": [
                {
                    "scope": scope,
                    "spans": [_encode_span(span) for span in group],
                    "schemaUrl": a.SCHEMA_URL,
                }
            ],
            "schemaUrl": a.SCHEMA_URL,
        }
        for resource, group in by_resource(spans)
    ]
    return _encode_json({"resourceSpans": resource_spans}) + b"\n"


def _encode_resource(resource: Resource) -> msgspec.Raw:
    """A resource's JSON, made once: it is a quarter of a line, and the same in all of them."""
    known = _encoded_resources.get(id(resource))
    if known is not None and known[0] is resource:
        return known[1]
    encoded = msgspec.Raw(_encode_json({"attributes": _encode_attributes(resource.attributes)[0]}))
    if len(_encoded_resources) >= _MAX_ENCODED_RESOURCES:
        _encoded_resources.clear()
    _encoded_resources[id(resource)] = (resource, encoded)
    return encoded


def _encode_span(span: Span) -> dict[str, Any]:
    attributes, dropped = _encode_attributes(span.attributes)
    encoded: dict[str, Any] = {"traceId": span.trace_id, "spanId": span.span_id}
    if span.trace_state:
        encoded["traceState"] = span.trace_state
    if span.parent_id:
        encoded["parentSpanId"] = span.parent_id
    encoded["flags"] = FLAG_HAS_IS_REMOTE | (FLAG_IS_REMOTE if parent_is_remote(span) else 0)
    encoded["name"] = _valid_text(span.name)
    encoded["kind"] = int(span.kind)
    encoded["startTimeUnixNano"] = str(span.start_ns)
    encoded["endTimeUnixNano"] = str(span.end_ns)
    encoded["attributes"] = attributes
    if dropped:
        encoded["droppedAttributesCount"] = dropped
    if span.events:
        encoded["events"] = [
            {
                "timeUnixNano": str(event.time_ns),
                "name": _valid_text(event.name),
                "attributes": _encode_attributes(event.attributes)[0],
            }
            for event in span.events
        ]
    if span.links:
        encoded["links"] = [
            {
                "traceId": link.trace_id,
                "spanId": link.span_id,
                "attributes": _encode_attributes(link.attributes)[0],
                "flags": FLAG_HAS_IS_REMOTE,
            }
            for link in span.links
        ]
    status: dict[str, Any] = {}
    if span.status_message:
        status["message"] = _valid_text(span.status_message)
    if span.status:
        status["code"] = int(span.status)
    encoded["status"] = status
    return encoded


def _encode_attributes(attributes: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    valid, dropped = valid_attributes(attributes)
    encoded: list[dict[str, Any]] = []
    for key, value in valid:
        kind = type(value)
        if kind is str:
            encoded.append({"key": key, "value": {"stringValue": value}})
        elif kind is int:
            encoded.append({"key": key, "value": {"intValue": str(value)}})
        else:
            encoded.append({"key": key, "value": _encode_value(value)})
    return encoded, dropped


def _encode_value(value: AttrValue) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"doubleValue": value}
        return {"doubleValue": next(n for n, v in _NON_FINITE.items() if repr(v) == repr(value))}
    return {"arrayValue": {"values": [_encode_value(item) for item in value]}}


def decode_line(line: bytes | str) -> list[Span]:
    """The spans of one TracesData line, also as other OTLP JSON writers put it.

    Raises ValueError when the line is no TracesData object, with the reason.
    """
    try:
        document = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("resourceSpans"), list):
        raise ValueError("not OTLP: no list named resourceSpans")  # noqa: TRY004 a matter of values
    try:
        return list(_decode_document(cast("dict[str, Any]", document)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not OTLP: {type(error).__name__}: {error}") from error


def _decode_document(document: dict[str, Any]) -> Iterator[Span]:
    for resource_spans in document["resourceSpans"]:
        carried = resource_spans.get("resource") or {}
        resource = Resource(attributes=_decode_attributes(carried.get("attributes")))
        for scope_spans in resource_spans.get("scopeSpans") or ():
            for span in scope_spans.get("spans") or ():
                yield _decode_span(span, resource)


def _decode_span(span: dict[str, Any], resource: Resource) -> Span:
    status = span.get("status") or {}
    start_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    if not (0 <= start_ns <= _TIME_MAX and 0 <= end_ns <= _TIME_MAX):
        raise ValueError("a time does not fit 64 bits")
    return Span(
        trace_id=_hex(span["traceId"], 32),
        span_id=_hex(span["spanId"], 16),
        parent_id=_hex(span["parentSpanId"], 16) if span.get("parentSpanId") else None,
        name=str(span.get("name", "")),
        kind=_KINDS[_enum(span.get("kind", 0), _KIND_NAMES)],
        start_ns=start_ns,
        end_ns=end_ns,
        resource=resource,
        attributes=_decode_attributes(span.get("attributes")),
        events=tuple(
            Event(
                name=str(event.get("name", "")),
                time_ns=int(event.get("timeUnixNano", 0)),
                attributes=_decode_attributes(event.get("attributes")),
            )
            for event in span.get("events") or ()
        ),
        links=tuple(
            Link(
                trace_id=_hex(link["traceId"], 32),
                span_id=_hex(link["spanId"], 16),
                attributes=_decode_attributes(link.get("attributes")),
            )
            for link in span.get("links") or ()
        ),
        status=_STATUSES[_enum(status.get("code", 0), _STATUS_NAMES)],
        status_message=str(status.get("message", "")),
        trace_state=str(span.get("traceState", "")),
    )


def _hex(value: Any, digits: int) -> str:
    text = str(value).lower()
    if len(text) != digits or not _HEX(text):
        raise ValueError(f"{value!r} does not have {digits} hex digits")
    return intern(text)


def _enum(value: Any, names: Mapping[str, int]) -> int:
    return names[value] if isinstance(value, str) and value in names else int(value)


def _decode_attributes(encoded: Any) -> dict[str, AttrValue]:
    attributes: dict[str, AttrValue] = {}
    for item in encoded or ():
        carried = item.get("value") or {}
        # Nearly every value is text or an integer; the same few texts come again in every span.
        if "stringValue" in carried:
            value = intern(str(carried["stringValue"]))
        elif "intValue" in carried:
            value = int(carried["intValue"])
        else:
            value = _decode_value(carried)
        if value is not None:
            attributes[intern(str(item["key"]))] = value
    return attributes


def _decode_value(value: Mapping[str, Any]) -> AttrValue | None:
    match value:
        case {"stringValue": text}:
            return str(text)
        case {"intValue": number}:
            return int(number)
        case {"doubleValue": number}:
            return _NON_FINITE[number] if number in _NON_FINITE else float(number)
        case {"boolValue": flag}:
            return bool(flag)
        case {"arrayValue": array}:
            items = [_decode_value(item) for item in (array or {}).get("values") or ()]
            return cast("AttrValue", tuple(item for item in items if item is not None))
        case {"bytesValue": text}:
            return str(text)
        case {"kvlistValue": pairs}:
            return msgspec.json.encode(_decode_attributes((pairs or {}).get("values"))).decode()
        case _:
            return None
