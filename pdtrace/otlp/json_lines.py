"""Spans ↔ OTLP JSON lines: the OpenTelemetry file-exporter format, one TracesData object per line.

Owns the JSON mapping (ids in hex, 64-bit integers as strings, enums as numbers) and which attribute
values are valid. Knows nothing of files, protobuf (`pdtrace.otlp.protobuf`) or the OpenTelemetry
SDK.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import intern
from typing import Any, Generic, TypeVar, cast

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

FLAG_SAMPLED = 0x1
FLAG_HAS_IS_REMOTE = 0x100
FLAG_IS_REMOTE = 0x200
_FLAGS_REMOTE = FLAG_HAS_IS_REMOTE | FLAG_IS_REMOTE
_SPAN = a.SPAN.key

_SMALL = 2**62
_FEW = 1_000
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_TIME_MAX = 2**64 - 1
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KINDS = {int(kind): kind for kind in SpanKind}
_STATUSES = {int(code): code for code in StatusCode}
_KIND_NAMES = {f"SPAN_KIND_{kind.name}": kind for kind in SpanKind}
_STATUS_NAMES = {f"STATUS_CODE_{code.name}": code for code in StatusCode}

_HEX = re.compile("[0-9a-f]+").fullmatch
_encode_json = msgspec.json.Encoder().encode

_MAX_KNOWN_RESOURCES = 1_000
_MAX_KNOWN_KEYS = 1_000
_MAX_KNOWN_VALUES = 1_000
_MAX_KNOWN_CHARS = 256

Piece = TypeVar("Piece")


def parent_is_remote(span: Span) -> bool:
    """Whether the parent is the caller's span rather than one of ours."""
    return span.attributes.get(_SPAN) == ROOT_SPAN and span.parent_id is not None


def span_flags(span: Span) -> int:
    """The `flags` field of a span."""
    return _FLAGS_REMOTE if parent_is_remote(span) else FLAG_HAS_IS_REMOTE


def valid_attributes(attributes: Mapping[str, Any]) -> tuple[list[tuple[str, AttrValue]], int]:
    """The attributes that OTLP can carry, and how many were left out.

    A value of another type (None, a path object, bytes, a dict) costs itself, never the span or
    the batch. Lone surrogates become `?`; integers beyond 64 bits become text.
    """
    valid = [pair for key, raw in attributes.items() if (pair := valid_pair(key, raw))]
    return valid, len(attributes) - len(valid)


def valid_pair(key: str, raw: Any) -> tuple[str, AttrValue] | None:
    """One attribute as OTLP can carry it, as `valid_attributes` says; None if it cannot."""
    value: AttrValue | None
    if isinstance(raw, list | tuple):
        items = [_valid_scalar(item) for item in cast("Sequence[Any]", raw)]
        value = None if None in items else cast("AttrValue", tuple(items))
    else:
        value = _valid_scalar(raw)
    return None if value is None or not key else (valid_text(key), value)


def _valid_scalar(value: Any) -> AttrScalar | None:
    kind = type(value)
    if kind is str:
        return valid_text(value)
    if kind is int:
        return value if INT64_MIN <= value <= INT64_MAX else str(value)
    if kind is float or kind is bool:
        return value
    if isinstance(value, str):
        return valid_text(str(value))
    if isinstance(value, int | float):
        return _valid_scalar(int(value) if isinstance(value, int) else float(value))
    return None


def valid_text(text: str) -> str:
    """Text that UTF-8 can carry: lone surrogates become `?`."""
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
            key = resource_keys[resource]
            group = by_identity[id(resource)] = groups.setdefault(key, (resource, []))[1]
        group.append(span)
    return list(groups.values())


class PerResource(Generic[Piece]):
    """What is made of a resource, made once: there are few, and each comes again in every span."""

    def __init__(self, make: Callable[[Resource], Piece]) -> None:
        self._make = make
        # By identity; the resource is kept so that its identity stays taken.
        self._made: dict[int, tuple[Resource, Piece]] = {}

    def __getitem__(self, resource: Resource) -> Piece:
        known = self._made.get(id(resource))
        if known is None:
            if len(self._made) >= _MAX_KNOWN_RESOURCES:
                self._made.clear()
            known = self._made[id(resource)] = (resource, self._make(resource))
        return known[1]


resource_keys = PerResource(lambda resource: repr(sorted(resource.attributes.items())))
"""Equal for equal resources."""


def encode_line(spans: Iterable[Span], *, sampled: bool = False) -> bytes:
    """One TracesData object as a line of UTF-8 JSON, newline included.

    `sampled` becomes bit 0 of each span's flags, the W3C trace flag: `count_sampled` reads it.
    """
    flag = FLAG_SAMPLED if sampled else 0
    resource_spans = ",".join(
        f'{{"resource":{_resources[resource]},"scopeSpans":[{{"scope":{_SCOPE},'
        f'"spans":[{",".join([_encode_span(s, flag) for s in group])}],"schemaUrl":{_SCHEMA}}}],'
        f'"schemaUrl":{_SCHEMA}}}'
        for resource, group in by_resource(spans)
    )
    return f'{{"resourceSpans":[{resource_spans}]}}\n'.encode()


def _json(value: Any) -> str:
    return _encode_json(value).decode()


_SCOPE = _json({"name": SCOPE_NAME, "version": __version__})
_SCHEMA = _json(a.SCHEMA_URL)


_resources = PerResource(
    lambda resource: f'{{"attributes":[{_encode_attributes(resource.attributes)[0]}]}}'
)


class Known(dict[str, Piece]):
    """Encoded pieces by the text that they stand for; makes those it lacks. Bounded: it forgets all
    when it is full, and keeps no long text."""

    def __init__(self, encode: Callable[[str], Piece]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, text: str) -> Piece:
        piece = self._encode(text)
        if len(text) <= _MAX_KNOWN_CHARS:
            if len(self) >= _MAX_KNOWN_VALUES:
                self.clear()
            self[text] = piece
        return piece


class KnownPairs(Generic[Piece]):
    """Encoded attributes by key and value: most of a span's come again in the next one. Bounded.

    by_key  holds values of the types `str` and `int` alone: ask for no others, True is equal to 1
    """

    def __init__(self) -> None:
        self.by_key: dict[str, dict[str | int, Piece]] = {}

    def keep(self, key: str, value: str | int, piece: Piece) -> None:
        """Remembers a pair unless it is long."""
        if isinstance(value, str) and len(value) > _MAX_KNOWN_CHARS:
            return
        values = self.by_key.get(key)
        if values is None:
            if len(self.by_key) >= _MAX_KNOWN_KEYS:
                self.by_key.clear()
            values = self.by_key[key] = {}
        elif len(values) >= _MAX_KNOWN_VALUES:
            values.clear()
        values[value] = piece


def _quote(text: str) -> str:
    return _json(valid_text(text))


_quoted = Known(_quote)
_known_pairs = KnownPairs[str]()
_known_ints: dict[str, str] = {}
"""What stands before the digits of an integer, by key."""
_KIND_TEXTS = {int(kind): str(int(kind)) for kind in SpanKind}


def _encode_span(span: Span, flag: int) -> str:
    attributes, dropped = _encode_attributes(span.attributes)
    trace_id, span_id, parent_id = span.trace_id, span.span_id, span.parent_id
    if not (trace_id.isalnum() and span_id.isalnum() and (not parent_id or parent_id.isalnum())):
        raise ValueError(f"ids {trace_id!r}, {span_id!r}, {parent_id!r} are not hex")
    more = ""
    if span.trace_state:
        more = f'"traceState":{_quote(span.trace_state)},'
    if parent_id:
        more += f'"parentSpanId":"{parent_id}",'
    after = f'"droppedAttributesCount":{dropped},' if dropped else ""
    if span.events:
        after += f'"events":[{",".join(map(_encode_event, span.events))}],'
    if span.links:
        after += f'"links":[{",".join(map(_encode_link, span.links))}],'
    status = ""
    if span.status_message:
        status = f'"message":{_quote(span.status_message)}'
    if span.status:
        status += f'{"," if status else ""}"code":{int(span.status)}'
    return (
        f'{{"traceId":"{trace_id}","spanId":"{span_id}",{more}"flags":{span_flags(span) | flag},'
        f'"name":{_quoted[span.name]},"kind":{_KIND_TEXTS[span.kind]},'
        f'"startTimeUnixNano":"{span.start_ns}","endTimeUnixNano":"{span.end_ns}",'
        f'"attributes":[{attributes}],{after}"status":{{{status}}}}}'
    )


def _encode_event(event: Event) -> str:
    attributes, dropped = _encode_attributes(event.attributes)
    after = f',"droppedAttributesCount":{dropped}' if dropped else ""
    return (
        f'{{"timeUnixNano":"{event.time_ns}","name":{_quoted[event.name]},'
        f'"attributes":[{attributes}]{after}}}'
    )


def _encode_link(link: Link) -> str:
    attributes, dropped = _encode_attributes(link.attributes)
    after = f'"droppedAttributesCount":{dropped},' if dropped else ""
    return (
        f'{{"traceId":{_quote(link.trace_id)},"spanId":{_quote(link.span_id)},'
        f'"attributes":[{attributes}],{after}"flags":{FLAG_HAS_IS_REMOTE}}}'
    )


def _encode_attributes(attributes: Mapping[str, Any]) -> tuple[str, int]:
    """The items of a JSON list of attributes, and how many could not be carried."""
    pairs: list[str] = []
    append, known, ints = pairs.append, _known_pairs.by_key, _known_ints
    dropped = 0
    for key, value in attributes.items():
        # By type: nearly every value is plain text, a small integer or a time.
        kind = type(value)
        try:
            if kind is str or (kind is int and 0 <= value < _FEW):
                append(known[key][value])
                continue
            if kind is int and -_SMALL < value < _SMALL:
                append(f'{ints[key]}{value}"}}}}')
                continue
        except KeyError:
            pass
        pair = _encode_pair(key, value)
        if pair is None:
            dropped += 1
        else:
            append(pair)
    return ",".join(pairs), dropped


def _encode_pair(key: str, value: Any) -> str | None:
    """One item, and what is remembered of it; None if it cannot be carried."""
    pair = valid_pair(key, value)
    if pair is None:
        return None
    encoded = _json({"key": pair[0], "value": _encode_value(pair[1])})
    if type(value) is str or (type(value) is int and 0 <= value < _FEW):
        _known_pairs.keep(key, value, encoded)
    elif type(value) is int and type(pair[1]) is int:
        if len(_known_ints) >= _MAX_KNOWN_KEYS:
            _known_ints.clear()
        _known_ints[key] = f'{{"key":{_quote(key)},"value":{{"intValue":"'
    return encoded


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
        return _decode_plain(_decode_plain_document(line))
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass  # another writer's, or none at all
    try:
        document = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("resourceSpans"), list):
        raise ValueError("not OTLP: no list named resourceSpans")  # noqa: TRY004 a matter of values
    try:
        return list(_decode_document(cast("dict[str, Any]", document)))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not OTLP: {type(error).__name__}: {error}") from error


class _SpanFlags(msgspec.Struct):
    flags: int = 0


class _ScopeFlags(msgspec.Struct):
    spans: list[_SpanFlags] = []


class _ResourceFlags(msgspec.Struct):
    scope_spans: list[_ScopeFlags] = msgspec.field(name="scopeSpans", default_factory=list)


class _DocumentFlags(msgspec.Struct):
    resource_spans: list[_ResourceFlags] = msgspec.field(name="resourceSpans", default_factory=list)


_decode_flags = msgspec.json.Decoder(_DocumentFlags).decode


def count_sampled(line: bytes) -> int:
    """How many spans of an `encode_line` line are sampled, without decoding the rest of it.

    Raises ValueError when it is no such line.
    """
    try:
        document = _decode_flags(line)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not OTLP: {error}") from None
    return sum(
        span.flags & FLAG_SAMPLED
        for resource_spans in document.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    )


class _AttributeKey(msgspec.Struct, gc=False):
    key: str


class SpanHead(msgspec.Struct):
    """What tells a span of an `encode_line` line, without the rest of it."""

    span_id: str = msgspec.field(name="spanId")
    parent_id: str | None = msgspec.field(name="parentSpanId", default=None)
    attributes: list[_AttributeKey] = []

    @property
    def keys(self) -> set[str]:
        """Of its attributes."""
        return {attribute.key for attribute in self.attributes}


class _ScopeHeads(msgspec.Struct):
    spans: list[SpanHead] = []


class _ResourceHeads(msgspec.Struct):
    scope_spans: list[_ScopeHeads] = msgspec.field(name="scopeSpans", default_factory=list)


class _DocumentHeads(msgspec.Struct):
    resource_spans: list[_ResourceHeads] = msgspec.field(name="resourceSpans")


_decode_heads = msgspec.json.Decoder(_DocumentHeads).decode


def decode_heads(line: bytes) -> list[SpanHead]:
    """The spans of an `encode_line` line in their order, for a tenth of what `decode_line` takes.

    Raises ValueError when it is no such line.
    """
    try:
        document = _decode_heads(line)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not OTLP: {error}") from None
    return [
        span
        for resource_spans in document.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


# What pdtrace and most other writers put into a line, as types: decoding into these takes half of
# what it takes to look for every field in dictionaries. What has another form fails, and is then
# decoded in the way that takes any.


class _Value(msgspec.Struct, gc=False):
    string: str | msgspec.UnsetType = msgspec.field(name="stringValue", default=msgspec.UNSET)
    integer: str | msgspec.UnsetType = msgspec.field(name="intValue", default=msgspec.UNSET)
    double: float | msgspec.UnsetType = msgspec.field(name="doubleValue", default=msgspec.UNSET)
    boolean: bool | msgspec.UnsetType = msgspec.field(name="boolValue", default=msgspec.UNSET)
    array: Any = msgspec.field(name="arrayValue", default=msgspec.UNSET)


class _Attribute(msgspec.Struct, gc=False):
    key: str
    value: _Value


class _PlainEvent(msgspec.Struct, rename="camel"):
    name: str = ""
    time_unix_nano: str = "0"
    attributes: list[_Attribute] = []


class _PlainLink(msgspec.Struct):
    trace_id: str = msgspec.field(name="traceId")
    span_id: str = msgspec.field(name="spanId")
    attributes: list[_Attribute] = []


class _PlainStatus(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _PlainSpan(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    start_time_unix_nano: str
    end_time_unix_nano: str
    parent_span_id: str = ""
    name: str = ""
    kind: int = 0
    attributes: list[_Attribute] = []
    events: list[_PlainEvent] = []
    links: list[_PlainLink] = []
    status: _PlainStatus = _PlainStatus()
    trace_state: str = ""


class _PlainResource(msgspec.Struct, frozen=True):
    attributes: list[_Attribute] = []


class _PlainScope(msgspec.Struct):
    spans: list[_PlainSpan] = []


class _PlainResourceSpans(msgspec.Struct, rename="camel"):
    resource: _PlainResource = _PlainResource()
    scope_spans: list[_PlainScope] = []


class _PlainDocument(msgspec.Struct, rename="camel"):
    resource_spans: list[_PlainResourceSpans]


_decode_plain_document = msgspec.json.Decoder(_PlainDocument).decode


def _decode_plain(document: _PlainDocument) -> list[Span]:
    """Raises KeyError or ValueError for what is not as plain as it seems."""
    spans: list[Span] = []
    for resource_spans in document.resource_spans:
        resource = Resource(attributes=_plain_attributes(resource_spans.resource.attributes))
        for scope_spans in resource_spans.scope_spans:
            spans += [_plain_span(span, resource) for span in scope_spans.spans]
    return spans


def _plain_span(span: _PlainSpan, resource: Resource) -> Span:
    return Span(
        trace_id=_hex(span.trace_id, 32),
        span_id=_hex(span.span_id, 16),
        parent_id=_hex(span.parent_span_id, 16) if span.parent_span_id else None,
        name=span.name,
        kind=_KINDS[span.kind],
        start_ns=_time(span.start_time_unix_nano),
        end_ns=_time(span.end_time_unix_nano),
        resource=resource,
        attributes=_plain_attributes(span.attributes),
        events=tuple(
            [
                Event(
                    name=event.name,
                    time_ns=int(event.time_unix_nano),
                    attributes=_plain_attributes(event.attributes),
                )
                for event in span.events
            ]
        ),
        links=tuple(
            [
                Link(
                    trace_id=_hex(link.trace_id, 32),
                    span_id=_hex(link.span_id, 16),
                    attributes=_plain_attributes(link.attributes),
                )
                for link in span.links
            ]
        ),
        status=_STATUSES[span.status.code],
        status_message=span.status.message,
        trace_state=span.trace_state,
    )


def _plain_attributes(encoded: list[_Attribute]) -> dict[str, AttrValue]:
    unset = msgspec.UNSET
    attributes: dict[str, AttrValue] = {}
    for item in encoded:
        carried = item.value
        if carried.string is not unset:
            value = intern(carried.string)
        elif carried.integer is not unset:
            value = int(carried.integer)
        elif carried.double is not unset:
            value = carried.double
        elif carried.boolean is not unset:
            value = carried.boolean
        elif carried.array is not unset:
            value = _decode_value({"arrayValue": carried.array})
        else:
            raise ValueError("a value of another type")
        if value is not None:
            attributes[intern(item.key)] = value
    return attributes


def _decode_document(document: dict[str, Any]) -> Iterator[Span]:
    for resource_spans in document["resourceSpans"]:
        carried = resource_spans.get("resource") or {}
        resource = Resource(attributes=_decode_attributes(carried.get("attributes")))
        for scope_spans in resource_spans.get("scopeSpans") or ():
            for span in scope_spans.get("spans") or ():
                yield _decode_span(span, resource)


def _decode_span(span: dict[str, Any], resource: Resource) -> Span:
    status = span.get("status") or {}
    return Span(
        trace_id=_hex(span["traceId"], 32),
        span_id=_hex(span["spanId"], 16),
        parent_id=_hex(span["parentSpanId"], 16) if span.get("parentSpanId") else None,
        name=str(span.get("name", "")),
        kind=_KINDS[_enum(span.get("kind", 0), _KIND_NAMES)],
        start_ns=_time(span["startTimeUnixNano"]),
        end_ns=_time(span["endTimeUnixNano"]),
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


def _time(value: Any) -> int:
    time_ns = int(value)
    if not 0 <= time_ns <= _TIME_MAX:
        raise ValueError("a time does not fit 64 bits")
    return time_ns


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
