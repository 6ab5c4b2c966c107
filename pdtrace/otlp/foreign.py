"""Trace documents as other writers put them, brought to the form that `json_lines` reads.

Of OTLP it accepts base64 and upper-case ids, short ids, enum names, snake_case keys, the old
`instrumentationLibrarySpans`, an envelope around the object, unknown fields and missing ones;
Jaeger's own form is `pdtrace.otlp.jaeger_json`'s. A span that stays unusable costs itself only.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from pdtrace.otlp import json_lines
from pdtrace.otlp.jaeger_json import WARNINGS, jaeger_spans, put_back
from pdtrace.spans import Span, SpanKind, StatusCode

_SNAKE = re.compile(r"_([a-z])")
_HEX = re.compile(r"[0-9a-fA-F]+")
_FORMATS = (
    ("batches", "looks like a Tempo trace"),
    ("traceEvents", "looks like Chrome trace events"),
    ("results", "looks like a Grafana panel's data"),
)
_READABLE = "only OTLP JSON and Jaeger's can be read"


class NotTraces(ValueError):  # noqa: N818 - it may be a regular file of another signal
    """The object holds no OTLP traces. `hint` names the format where it is known."""

    def __init__(
        self, message: str, *, hint: str | None = None, other_signal: bool = False
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.other_signal = other_signal


@dataclass(frozen=True, slots=True)
class ForeignSpans:
    """Spans of one object, and how many were left out.

    from_jaeger  whether it is a Jaeger's answer, in its own form or in API v3's
    warnings     what a Jaeger says of spans and traces, with how often
    errors       what it says of the query that gave them
    """

    spans: list[Span]
    bad_spans: int
    from_jaeger: bool = False
    warnings: Counter[str] = field(default_factory=Counter[str])
    errors: Sequence[str] = ()


def decode_foreign(document: object) -> ForeignSpans:
    """The spans of one decoded JSON value. Raises NotTraces if it is neither OTLP nor Jaeger's."""
    if (jaeger := jaeger_spans(document)) is not None:
        return ForeignSpans(
            jaeger.spans,
            jaeger.bad_spans,
            from_jaeger=True,
            warnings=jaeger.warnings,
            errors=jaeger.errors,
        )
    if not isinstance(document, dict):
        raise _not_traces(document)
    envelope = _camel_keys(cast("dict[str, Any]", document))
    from_jaeger = "result" in envelope
    if isinstance(inner := envelope.get("result", envelope.get("trace")), dict):
        envelope = _camel_keys(cast("dict[str, Any]", inner))
    resource_spans = envelope.get("resourceSpans")
    if not isinstance(resource_spans, list):
        raise _not_traces(envelope)
    spans: list[Span] = []
    bad = 0
    for resource, span in _each_span(cast("list[object]", resource_spans)):
        try:
            decoded = json_lines.decode_line(_one_span(resource, _normalised(span)))
        except (ValueError, TypeError, KeyError, AttributeError):
            bad += 1
        else:
            spans += decoded
    warnings: Counter[str] = Counter()
    for number, span in enumerate(spans):
        told = span.attributes.get(WARNINGS)
        if isinstance(told, list | tuple):
            spans[number] = put_back(span, [str(one) for one in told], warnings)
    return ForeignSpans(spans, bad, from_jaeger=from_jaeger, warnings=warnings)


def _not_traces(value: object) -> NotTraces:
    if isinstance(value, dict):
        keys = cast("dict[str, Any]", value)
        if "resourceMetrics" in keys or "resourceLogs" in keys:
            return NotTraces("metrics or logs", other_signal=True)
        for key, what in _FORMATS:
            if key in keys:
                hint = f"{what}; {_READABLE}"
                return NotTraces(hint, hint=hint)
        if "data" in keys:
            hint = f"holds data, but no list of a Jaeger's traces; {_READABLE}"
            return NotTraces(hint, hint=hint)
        return NotTraces("not OTLP: no resourceSpans")
    if isinstance(value, list) and value:
        hint = f"is a JSON list (Zipkin? Chrome events?); {_READABLE}"
        return NotTraces(hint, hint=hint)
    return NotTraces(f"not OTLP: {type(value).__name__} instead of an object")


def _each_span(resource_spans: Sequence[object]) -> Iterator[tuple[object, object]]:
    for entry in resource_spans:
        if not isinstance(entry, dict):
            continue
        fields = _camel_keys(cast("dict[str, Any]", entry))
        scopes = fields.get("scopeSpans") or fields.get("instrumentationLibrarySpans") or ()
        if not isinstance(scopes, list):
            continue
        for scope in cast("list[object]", scopes):
            if isinstance(scope, dict):
                spans = cast("dict[str, Any]", scope).get("spans")
                if isinstance(spans, list):
                    for span in cast("list[object]", spans):
                        yield fields.get("resource"), span


def _one_span(resource: object, span: Mapping[str, Any]) -> bytes:
    attributes = (
        cast("dict[str, Any]", resource).get("attributes") if isinstance(resource, dict) else None
    )
    return msgspec.json.encode(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(attributes)},
                    "scopeSpans": [{"spans": [span]}],
                }
            ]
        }
    )


def _normalised(span: object) -> dict[str, Any]:
    """Raises ValueError, TypeError or KeyError for a span without usable ids or times."""
    if not isinstance(span, dict):
        raise TypeError(f"a span is {type(span).__name__} instead of an object")
    fields = _camel_keys(cast("dict[str, Any]", span))
    fields["traceId"] = _id(fields["traceId"], 32)
    fields["spanId"] = _id(fields["spanId"], 16)
    parent = fields.get("parentSpanId")
    fields["parentSpanId"] = _id(parent, 16) if parent and str(parent).strip("0") else None
    fields["kind"] = _enum(fields.get("kind"), {kind.name: kind for kind in SpanKind})
    status = fields.get("status")
    status = _camel_keys(cast("dict[str, Any]", status)) if isinstance(status, dict) else {}
    status["code"] = _enum(status.get("code"), {code.name: code for code in StatusCode})
    fields["status"] = status
    for key in ("startTimeUnixNano", "endTimeUnixNano"):
        fields[key] = str(_nanoseconds(fields[key]))
    fields["attributes"] = _attributes(fields.get("attributes"))
    fields["events"] = [_event(event) for event in _objects(fields.get("events"))]
    fields["links"] = [link for each in _objects(fields.get("links")) if (link := _link(each))]
    return fields


def _event(event: dict[str, Any]) -> dict[str, Any]:
    try:
        time_ns = _nanoseconds(event.get("timeUnixNano", 0))
    except ValueError:
        time_ns = 0
    return {
        "name": event.get("name", ""),
        "timeUnixNano": str(time_ns),
        "attributes": _attributes(event.get("attributes")),
    }


def _link(link: dict[str, Any]) -> dict[str, Any] | None:
    try:
        ids = {"traceId": _id(link["traceId"], 32), "spanId": _id(link["spanId"], 16)}
    except (KeyError, ValueError):
        return None
    return {**ids, "attributes": _attributes(link.get("attributes"))}


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    items = cast("list[object]", value)
    return [_camel_keys(cast("dict[str, Any]", item)) for item in items if isinstance(item, dict)]


def _attributes(value: object) -> list[dict[str, Any]]:
    """Attributes with the keys of today; those without a readable value are left out."""
    return [
        {"key": str(item["key"]), "value": _camel_keys(cast("dict[str, Any]", item["value"]))}
        for item in _objects(value)
        if "key" in item and isinstance(item.get("value"), dict) and _readable(item["value"])
    ]


def _readable(value: dict[str, Any]) -> bool:
    number = value.get("intValue", value.get("int_value", 0))
    try:
        int(number)
    except (TypeError, ValueError):
        return False
    return True


def _camel_keys(fields: dict[str, Any]) -> dict[str, Any]:
    return {_SNAKE.sub(lambda m: m[1].upper(), str(key)): value for key, value in fields.items()}


def _id(value: object, digits: int) -> str:
    """Hex of the full length: hex of any case, short hex padded, or base64."""
    text = str(value).removeprefix("0x")
    if _HEX.fullmatch(text) and len(text) <= digits:
        padded = text.lower().zfill(digits)
    else:
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except binascii.Error as error:
            raise ValueError(f"{value!r} is neither hex nor base64") from error
        if len(raw) * 2 != digits:
            raise ValueError(f"{value!r} has {len(raw)} bytes instead of {digits // 2}")
        padded = raw.hex()
    if not padded.strip("0"):
        raise ValueError("an id of zeros names nothing")
    return padded


def _enum(value: object, names: Mapping[str, int]) -> int:
    """Numbers, digits in text, names with or without prefix in any case; others mean unset."""
    if isinstance(value, str):
        text = value.upper().replace("SPANKIND.", "").replace("STATUSCODE.", "")
        text = text.removeprefix("SPAN_KIND_").removeprefix("STATUS_CODE_")
        if text in names:
            return int(names[text])
        value = int(text) if text.isdecimal() else 0
    return value if isinstance(value, int) and value in set(map(int, names.values())) else 0


def _nanoseconds(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is no time")  # noqa: TRY004 - a matter of values
    time_ns = int(value)
    if not 0 <= time_ns < 2**64:
        raise ValueError(f"{value!r} is no time: it does not fit 64 bits")
    return time_ns
