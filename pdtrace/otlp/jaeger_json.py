"""Traces in Jaeger's own JSON, as its older HTTP API (`/api/traces`) answers and its pages save.

Owns that form only, as lenient as files in the wild need: an answer with many traces or one, a bare
trace, a list of spans as storages keep them, one of these in a line; numbers as text, parts that
are missing or null, short ids. It knows microseconds, so a span's exact nanoseconds are those of
`pd.begin_ns` and `pd.end_ns`; lists come as JSON text, links without their attributes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from pdtrace.spans import AttrValue, Event, Link, Resource, Span, SpanKind, StatusCode

WARNINGS = "@jaeger@warnings"
"""Attribute in which Jaeger's storage and its API v3 keep what its page shows as warnings."""

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
_ADJUSTED = re.compile(r"timestamps were adjusted by (-?)((?:[0-9.]+(?:h|ms|m|s|µs|us|ns))+)")
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|m|s|µs|us|ns)")
_NS = {"h": 3600e9, "m": 60e9, "s": 1e9, "ms": 1e6, "µs": 1e3, "us": 1e3, "ns": 1}
_HEX = re.compile("[0-9a-f]+")
_MAX_DURATION_US = 2**62 // _NS_PER_US
_MAX_SHIFT_NS = 1e9 * 86400 * 366
"""No clock is off by more than a year."""
_NOBODY = Resource(attributes={})
_Object = dict[str, Any]


@dataclass(slots=True)
class JaegerSpans:
    """Spans of one document.

    bad_spans  spans that were left out because their fields were unusable
    warnings   what Jaeger says of spans and traces, with how often; as it came
    errors     what it says of the query that gave them
    """

    spans: list[Span] = field(default_factory=list[Span])
    bad_spans: int = 0
    warnings: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])


def decode_jaeger(document: bytes) -> JaegerSpans:
    """The spans of an answer `{"data": [trace, …]}`. Raises ValueError if it is none."""
    found = jaeger_spans(msgspec.json.decode(document))
    if found is None:
        raise ValueError("no traces in Jaeger's form: no list named data")
    return found


def jaeger_spans(value: object) -> JaegerSpans | None:
    """The spans of a decoded document in any of Jaeger's forms; None if it is in none of them."""
    found = JaegerSpans()
    answer = cast("_Object", value) if isinstance(value, dict) else {}
    traces = _traces(value)
    if "data" in answer:
        found.errors = [_message(error) for error in _listed(answer.get("errors"))]
        traces = _traces(answer["data"])
        if answer["data"] == [] or (answer["data"] is None and found.errors):
            traces = []
    if traces is None:
        return None
    for trace in traces:
        _add_trace(trace, found)
    return found


def _traces(value: object) -> list[_Object] | None:
    """Of a list of traces or of spans, or of one; None if there is none of either in it."""
    items = cast("list[object]", value if isinstance(value, list) else [value])
    objects = [cast("_Object", item) for item in items if isinstance(item, dict)]
    traces = [one for one in objects if isinstance(one.get("spans"), list) and _is_jaeger(one)]
    if traces:
        # What else is in the list stands for a span that cannot be used.
        return [*traces, {"spans": [None] * (len(items) - len(traces))}]
    if any("operationName" in one and "spanID" in one for one in objects):
        return [{"spans": items}]
    return None


def _is_jaeger(trace: _Object) -> bool:
    spans = cast("list[object]", trace["spans"])
    return "traceID" in trace or any(
        isinstance(span, dict) and "operationName" in span for span in spans
    )


def _message(error: object) -> str:
    return str(cast("_Object", error).get("msg", "")) if isinstance(error, dict) else str(error)


def _add_trace(trace: _Object, found: JaegerSpans) -> None:
    processes = trace.get("processes")
    resources = {
        str(name): _resource(process)
        for name, process in (
            cast("_Object", processes).items() if isinstance(processes, dict) else ()
        )
    }
    found.warnings.update(map(str, _listed(trace.get("warnings"))))
    for one in cast("list[object]", trace["spans"]):
        try:
            if not isinstance(one, dict):
                raise TypeError(f"a span is {type(one).__name__} instead of an object")
            fields = cast("_Object", one)
            own = fields.get("process")
            resource = (
                _resource(own)
                if isinstance(own, dict)
                else resources.get(str(fields.get("processID")), _NOBODY)
            )
            span = _span(fields, trace.get("traceID"), resource)
        except (ValueError, TypeError, KeyError, OverflowError):
            found.bad_spans += 1
            continue
        told = span.attributes.get(WARNINGS)
        warnings = [str(warning) for warning in _listed(fields.get("warnings"))]
        if not warnings and isinstance(told, list | tuple):
            warnings = [str(warning) for warning in told]
        found.spans.append(put_back(span, warnings, found.warnings, unit_ns=_NS_PER_US))


def put_back(span: Span, warnings: Sequence[str], told: Counter[str], *, unit_ns: int = 1) -> Span:
    """The span where its own clock showed it: a Jaeger with its clock-skew adjustment on says in a
    warning by how much it moved one. Counts the warnings in `told`.

    unit_ns  what times are whole numbers of
    """
    shift_ns = 0
    for warning in warnings:
        moved = _ADJUSTED.search(warning)
        told[f"{warning} (put back here)" if moved else warning] += 1
        if moved:
            amounts = _AMOUNT.findall(moved[2])
            ns = sum(float(amount) * _NS[unit] for amount, unit in amounts)
            if abs(shift_ns) + ns < _MAX_SHIFT_NS:
                shift_ns += round(-ns if moved[1] else ns)
    shift_ns = round(shift_ns / unit_ns) * unit_ns
    if not shift_ns or min(span.start_ns, span.start_ns - shift_ns) < 0:
        return span
    return msgspec.structs.replace(
        span,
        start_ns=span.start_ns - shift_ns,
        end_ns=span.end_ns - shift_ns,
        events=tuple(
            msgspec.structs.replace(event, time_ns=event.time_ns - shift_ns)
            for event in span.events
        ),
    )


def _resource(process: object) -> Resource:
    if not isinstance(process, dict):
        return _NOBODY
    fields = cast("_Object", process)
    named = {"service.name": str(fields["serviceName"])} if fields.get("serviceName") else {}
    return Resource(attributes={**_attributes(fields.get("tags")), **named})


def _span(fields: _Object, trace: object, resource: Resource) -> Span:
    """Raises ValueError, TypeError or KeyError for a span without usable ids or times."""
    attributes = _attributes(fields.get("tags"))
    kind = _KINDS.get(str(attributes.pop(_KIND, "")).lower(), SpanKind.UNSPECIFIED)
    status = _STATUSES.get(str(attributes.pop(_STATUS, "")).upper(), StatusCode.UNSET)
    if attributes.pop(_ERROR, False) in {True, "true"}:
        status = StatusCode.ERROR
    message = str(attributes.pop(_MESSAGE, ""))
    trace_state = str(attributes.pop(_TRACE_STATE, ""))
    for key in _SCOPE:
        attributes.pop(key, None)
    trace_id = _id(fields.get("traceID", trace), 32)
    span_id = _id(fields["spanID"], 16)
    parent, links = _references(fields, trace_id)
    start, duration = _integer(fields["startTime"]), _integer(fields["duration"])
    if start < 0 or not 0 <= duration <= _MAX_DURATION_US or start > _MAX_DURATION_US:
        raise ValueError(f"span {span_id} has a time that no clock shows")
    start_ns = start * _NS_PER_US
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent,
        name=str(fields.get("operationName", "")),
        kind=kind,
        start_ns=start_ns,
        end_ns=start_ns + duration * _NS_PER_US,
        resource=resource,
        attributes=attributes,
        events=tuple(event for log in _objects(fields.get("logs")) if (event := _event(log))),
        links=links,
        status=status,
        status_message=message,
        trace_state=trace_state,
    )


def _references(fields: _Object, trace_id: str) -> tuple[str | None, tuple[Link, ...]]:
    """The parent, the first CHILD_OF inside the trace, and all others as links. Old writers name it
    in a field of its own."""
    parent: str | None = None
    links: list[Link] = []
    for reference in _objects(fields.get("references")):
        try:
            other = _id(reference.get("traceID", trace_id), 32), _id(reference["spanID"], 16)
        except (ValueError, TypeError, KeyError):
            continue  # it names nothing
        if parent is None and reference.get("refType") == _PARENT and other[0] == trace_id:
            parent = other[1]
        else:
            links.append(Link(*other))
    if parent is None and str(fields.get("parentSpanID") or "").strip("0"):
        parent = _id(fields["parentSpanID"], 16)
    return parent, tuple(links)


def _event(log: _Object) -> Event | None:
    try:
        time_ns = _integer(log.get("timestamp")) * _NS_PER_US
    except (ValueError, TypeError):
        return None
    attributes = _attributes(log.get("fields"))
    return Event(name=str(attributes.pop("event", "")), time_ns=time_ns, attributes=attributes)


def _listed(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _objects(value: object) -> Iterable[_Object]:
    return (cast("_Object", item) for item in _listed(value) if isinstance(item, dict))


def _attributes(tags: object) -> dict[str, AttrValue]:
    return {
        str(tag["key"]): value
        for tag in _objects(tags)
        if "key" in tag and (value := _value(tag)) is not None
    }


def _value(tag: _Object) -> AttrValue | None:
    """A tag's value in its declared type; as it came where it is not of that type."""
    value, declared = tag.get("value"), tag.get("type")
    try:
        if declared == "int64" and isinstance(value, str):
            number = int(value)
            return number if -(2**63) <= number < 2**63 else value
        if declared == "float64" and isinstance(value, int | str) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        return str(value)
    if declared == "bool" and isinstance(value, str) and value in {"true", "false"}:
        return value == "true"
    if isinstance(value, str) and value.startswith('["'):
        try:
            return tuple(msgspec.json.decode(value, type=list[str]))
        except msgspec.DecodeError:
            return value
    return value if isinstance(value, str | int | float | bool) else None


def _integer(value: object) -> int:
    """Microseconds, also as text. Raises ValueError or TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no number")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value!r} is no whole number of microseconds")
    return int(value)


def _id(value: object, digits: int) -> str:
    """Jaeger leaves out leading zeros. Raises ValueError."""
    text = str(value).lower().removeprefix("0x")
    if len(text) > digits or not _HEX.fullmatch(text) or not text.strip("0"):
        raise ValueError(f"{value!r} is no id")
    return text.zfill(digits)


# Text that never ends is one token to the end, lest each quote in it be tried anew.
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_TOKEN = re.compile(_TEXT + rb"|[\[\]{}]", re.DOTALL)
_TRAILING_COMMA = re.compile(_TEXT + rb"|,(?=\s*+[\]}])", re.DOTALL)
_CLOSERS = {b"[": b"]", b"{": b"}"}
_HOLD_WHOLE = frozenset({b'"spans"', b'"data"', b""})
"""Names of lists whose finished items are of use by themselves; without a name: the outermost."""


def mended(document: bytes) -> bytes | None:
    """A document whose end is missing, or that has a comma before a bracket, with its whole spans.
    None where there is nothing to mend, or it would not help."""
    if b'"traceID"' not in document:
        return None
    text = _TRAILING_COMMA.sub(lambda match: match[0] if match[0] != b"," else b"", document)
    stack: list[bytes] = []
    wholes: list[bool] = []
    name, cut, closers = b"", 0, b""
    for token in _TOKEN.finditer(text):
        found = token[0]
        if found in _CLOSERS:
            wholes.append(found == b"[" and (name in _HOLD_WHOLE if stack else True))
            stack.append(found)
            name = b""
        elif found in {b"]", b"}"}:
            if not stack or _CLOSERS[stack.pop()] != found:
                break
            wholes.pop()
            name = b""
            if not stack:
                cut, closers = token.end(), b""
                break
            if found == b"}" and wholes[-1]:
                cut = token.end()
                closers = b"".join(_CLOSERS[opened] for opened in reversed(stack))
        else:
            name = found
    return text[:cut] + closers if cut else None
