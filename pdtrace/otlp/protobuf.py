"""Spans → OTLP protobuf, and → the OpenTelemetry SDK's ReadableSpan.

Two ways to one result: `serialize_request` writes the bytes itself, `readable_spans` feeds any SDK
exporter or processor at ten times the cost. Tests hold them equal message for message. Knows
nothing of endpoints (`pdtrace.export.settings`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, Status, TraceFlags, TraceState
from opentelemetry.trace import SpanKind as SdkKind
from opentelemetry.trace import StatusCode as SdkStatusCode

from pdtrace import __version__
from pdtrace import semconv as a
from pdtrace.otlp.json_lines import (
    FLAG_HAS_IS_REMOTE,
    SCOPE_NAME,
    Known,
    KnownPairs,
    PerResource,
    by_resource,
    parent_is_remote,
    span_flags,
    valid_attributes,
    valid_pair,
    valid_text,
)
from pdtrace.spans import AttrValue, Event, Link, Resource, Span, SpanKind, StatusCode

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SDK_KINDS = {
    SpanKind.UNSPECIFIED: SdkKind.INTERNAL,
    SpanKind.INTERNAL: SdkKind.INTERNAL,
    SpanKind.SERVER: SdkKind.SERVER,
    SpanKind.CLIENT: SdkKind.CLIENT,
    SpanKind.PRODUCER: SdkKind.PRODUCER,
    SpanKind.CONSUMER: SdkKind.CONSUMER,
}
_SDK_STATUS = {
    StatusCode.UNSET: SdkStatusCode.UNSET,
    StatusCode.OK: SdkStatusCode.OK,
    StatusCode.ERROR: SdkStatusCode.ERROR,
}


def encode_request(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """The export request that the SDK's encoder would build from `readable_spans(spans)`."""
    return ExportTraceServiceRequest.FromString(serialize_request(spans))


def serialize_request(spans: Iterable[Span]) -> bytes:
    """The export request in bytes. Raises ValueError for ids and times that OTLP cannot carry."""
    parts: list[bytes] = []  # joined once: a message is large, and copying it takes time
    for resource, group in by_resource(spans):
        scope_spans = [_SCOPE]
        _add_spans(scope_spans, group)
        scope_spans.append(_SCHEMA)
        size = sum(map(len, scope_spans))
        head = _resources[resource] + b"\x12" + _varint(size)
        parts += (b"\x0a", _varint(len(head) + size + len(_SCHEMA)), head)
        parts += scope_spans
        parts.append(_SCHEMA)
    return b"".join(parts)


# The wire format: a field is a tag (number << 3 | wire type), for bytes and messages their length,
# and the payload; integers are varints, seven bits a byte, the lowest first.

_GROUPS = range(1 << 14)
_LAST = [bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7)) for n in _GROUPS]
"""Fourteen bits as the end of a varint."""
_MORE = [bytes((n & 127 | 128, n >> 7 | 128)) for n in _GROUPS]
"""Fourteen bits of a varint that goes on."""


_TIMES_BEGIN, _TIMES_END = 1 << 42, 1 << 56
"""Nanoseconds of a monotonic clock, from about an hour after the machine started."""
_MAX_PREFIXED_KEYS = 1_000
_FEW = 1_000
"""Integers below are remembered."""
_SHORT = 120
"""Characters of a text whose length, with two bytes more, is still a varint of one byte."""


def _varint(n: int) -> bytes:
    """Any integer of 64 bits; negative ones take ten bytes."""
    if 0 <= n <= 0x3FFF:
        return _LAST[n]
    n &= 0xFFFF_FFFF_FFFF_FFFF
    encoded = b""
    while n > 0x3FFF:
        encoded += _MORE[n & 0x3FFF]
        n >>= 14
    return encoded + _LAST[n]


def _field(tag: bytes, payload: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return tag + _varint(len(payload)) + payload


def _text_field(tag: bytes, text: str) -> bytes:
    return _field(tag, valid_text(text).encode())


class _Attributes:
    """Attributes as repeated KeyValue fields of one message; what comes again is encoded once."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._known = KnownPairs[bytes]()
        # What stands before an integer, by key and length of its varint.
        self._prefixes: dict[str, list[bytes]] = {}
        self._before_doubles: dict[str, bytes] = {}
        self._keys: dict[str, bytes] = {}

    def add(self, parts: list[bytes], attributes: Mapping[str, Any]) -> int:
        """Appends all that OTLP can carry; returns how many were left out."""
        append, known, prefixes = parts.append, self._known.by_key, self._prefixes
        dropped = 0
        for key, value in attributes.items():
            # By type: nearly every value is plain text, a small integer or a time.
            kind = type(value)
            try:
                if kind is str or (kind is int and 0 <= value < _FEW):
                    append(known[key][value])
                    continue
                if kind is int and 0 <= value < _TIMES_END:
                    if value >= _TIMES_BEGIN:
                        last = _LAST[value >> 42]
                        parts += (
                            prefixes[key][6 + len(last)],
                            _MORE[value & 0x3FFF],
                            _MORE[value >> 14 & 0x3FFF],
                            _MORE[value >> 28 & 0x3FFF],
                            last,
                        )
                    else:
                        varint = _varint(value)
                        parts += (prefixes[key][len(varint)], varint)
                    continue
                if kind is float:
                    parts += (self._before_doubles[key], _pack_double(value))
                    continue
            except KeyError:
                pass
            pair = self._pair(key, value)
            if pair is None:
                dropped += 1
            else:
                append(pair)
        return dropped

    def _pair(self, key: str, value: Any) -> bytes | None:
        """One attribute, and what is remembered of it; None if it cannot be carried."""
        if type(value) is str and len(value) < _SHORT and key in self._keys and value.isascii():
            # Ids of requests: new ones come all the time.
            before, text = self._keys[key], value.encode()
            size = len(text)
            lengths = bytes((0x12, size + 2, 0x0A, size))
            encoded = b"".join((self._tag, _LAST[len(before) + size + 4], before, lengths, text))
            self._known.keep(key, value, encoded)
            return encoded
        pair = valid_pair(key, value)
        if pair is None:
            return None
        encoded = self._field(pair[0], _value(pair[1]))
        if type(value) is str or (type(value) is int and 0 <= value < _FEW):
            self._known.keep(key, value, encoded)
            if len(self._keys) >= _MAX_PREFIXED_KEYS:
                self._keys.clear()
            if len(key) < _SHORT:
                self._keys[key] = _text_field(b"\x0a", pair[0])
        elif type(value) is int and 0 <= value < _TIMES_END:
            if len(self._prefixes) >= _MAX_PREFIXED_KEYS:
                self._prefixes.clear()
            whole = [self._field(pair[0], b"\x18" + bytes(length)) for length in range(9)]
            self._prefixes[key] = [field[: len(field) - at] for at, field in enumerate(whole)]
        elif type(value) is float:
            if len(self._before_doubles) >= _MAX_PREFIXED_KEYS:
                self._before_doubles.clear()
            self._before_doubles[key] = encoded[:-8]
        return encoded

    def _field(self, key: str, value: bytes) -> bytes:
        return _field(self._tag, _text_field(b"\x0a", key) + _field(b"\x12", value))


def _value(value: AttrValue) -> bytes:
    """An AnyValue."""
    if isinstance(value, str):
        return _text_field(b"\x0a", value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value)
    if isinstance(value, float):
        return b"\x21" + _pack_double(value)
    return _field(b"\x2a", b"".join(_field(b"\x0a", _value(item)) for item in value))


_pack_double = struct.Struct("<d").pack
_pack_times = struct.Struct("<BQBQHI").pack
"""start_time_unix_nano, end_time_unix_nano and flags, each behind its tag."""
_START, _END, _FLAGS = 0x39, 0x41, 0x0185

_SPAN_ATTRIBUTES = _Attributes(b"\x4a")
_EVENT_ATTRIBUTES = _Attributes(b"\x1a")
_LINK_ATTRIBUTES = _Attributes(b"\x22")
_RESOURCE_ATTRIBUTES = _Attributes(b"\x0a")

_names = Known(lambda name: _text_field(b"\x2a", name))
_event_names = Known(lambda name: _text_field(b"\x12", name))
_KINDS = {int(kind): b"\x30" + _varint(kind or SpanKind.INTERNAL) for kind in SpanKind}

_SCOPE = _field(b"\x0a", _text_field(b"\x0a", SCOPE_NAME) + _text_field(b"\x12", __version__))
_SCHEMA = _text_field(b"\x1a", a.SCHEMA_URL)


def _resource(resource: Resource) -> bytes:
    parts: list[bytes] = []
    _RESOURCE_ATTRIBUTES.add(parts, resource.attributes)
    return _field(b"\x0a", b"".join(parts))


_resources = PerResource(_resource)


def _add_spans(parts: list[bytes], spans: Iterable[Span]) -> None:
    trace_id, trace_head = "", b""
    add_attributes, unhex = _SPAN_ATTRIBUTES.add, bytes.fromhex
    for span in spans:
        parent_id = span.parent_id
        if span.trace_id != trace_id:
            trace_id = span.trace_id
            trace_head = unhex(f"0a10{trace_id}1208")
        if parent_id:
            ids = unhex(f"{span.span_id}2208{parent_id}")
            flags = span_flags(span)
        else:
            ids, flags = unhex(span.span_id), FLAG_HAS_IS_REMOTE
        if len(trace_head) != 20 or len(ids) != (18 if parent_id else 8):
            raise ValueError(f"ids {trace_id}, {span.span_id}, {parent_id} have no OTLP form")
        try:
            times = _pack_times(_START, span.start_ns, _END, span.end_ns, _FLAGS, flags)
        except struct.error:
            raise ValueError(f"times {span.start_ns}, {span.end_ns} have no OTLP form") from None
        body = [trace_head, ids, times, _names[span.name], _KINDS[span.kind]]
        dropped = add_attributes(body, span.attributes)
        if dropped:
            body.append(b"\x50" + _varint(dropped))
        if span.trace_state:
            body.append(_text_field(b"\x1a", span.trace_state))
        if span.events:
            body += [_field(b"\x5a", _event(event)) for event in span.events]
        if span.links:
            body += [_field(b"\x6a", _link(link)) for link in span.links]
        body.append(_status(span) if span.status else b"\x7a\x00")
        payload = b"".join(body)
        parts += (b"\x12", _varint(len(payload)), payload)


def _event(event: Event) -> bytes:
    parts = [_pack_event_time(0x09, event.time_ns), _event_names[event.name]]
    dropped = _EVENT_ATTRIBUTES.add(parts, event.attributes)
    if dropped:
        parts.append(b"\x20" + _varint(dropped))
    return b"".join(parts)


_pack_event_time = struct.Struct("<BQ").pack


def _link(link: Link) -> bytes:
    head = bytes.fromhex(f"0a10{link.trace_id}1208{link.span_id}")
    if len(head) != 28:
        raise ValueError(f"ids {link.trace_id}, {link.span_id} have no OTLP form")
    parts = [head, _LINK_FLAGS]
    dropped = _LINK_ATTRIBUTES.add(parts, link.attributes)
    if dropped:
        parts.append(b"\x28" + _varint(dropped))
    return b"".join(parts)


_LINK_FLAGS = struct.pack("<BI", 0x35, FLAG_HAS_IS_REMOTE)


def _status(span: Span) -> bytes:
    message = b""
    if span.status is StatusCode.ERROR:
        message = _text_field(b"\x12", span.status_message)
    return _field(b"\x7a", message + b"\x18" + _varint(span.status))


def readable_spans(spans: Iterable[Span]) -> list[ReadableSpan]:
    """The SDK's view of finished spans, for any exporter or span processor."""
    scope = InstrumentationScope(SCOPE_NAME, __version__, a.SCHEMA_URL)
    resources: dict[int, SdkResource] = {}
    readable: list[ReadableSpan] = []
    for span in spans:
        resource = resources.get(id(span.resource))
        if resource is None:
            attributes = dict(valid_attributes(span.resource.attributes)[0])
            resource = resources[id(span.resource)] = SdkResource(attributes, a.SCHEMA_URL)
        readable.append(_readable(span, resource, scope))
    return readable


def _readable(span: Span, resource: SdkResource, scope: InstrumentationScope) -> ReadableSpan:
    state = TraceState.from_header([span.trace_state]) if span.trace_state else TraceState()
    trace_id = int(span.trace_id, 16)
    parent = None
    if span.parent_id:
        remote = parent_is_remote(span)
        parent = SpanContext(trace_id, int(span.parent_id, 16), remote, _SAMPLED, state)
    description = valid_text(span.status_message) if span.status is StatusCode.ERROR else None
    return ReadableSpan(
        name=valid_text(span.name),
        context=SpanContext(trace_id, int(span.span_id, 16), False, _SAMPLED, state),
        parent=parent,
        resource=resource,
        attributes=dict(valid_attributes(span.attributes)[0]),
        events=[
            SdkEvent(valid_text(event.name), _sdk_attributes(event.attributes), event.time_ns)
            for event in span.events
        ],
        links=_sdk_links(span),
        kind=_SDK_KINDS[span.kind],
        status=Status(_SDK_STATUS[span.status], description),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=scope,
    )


def _sdk_links(span: Span) -> Sequence[SdkLink]:
    return [
        SdkLink(
            SpanContext(int(link.trace_id, 16), int(link.span_id, 16), False, _SAMPLED),
            _sdk_attributes(link.attributes),
        )
        for link in span.links
    ]


def _sdk_attributes(attributes: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
    return dict(valid_attributes(attributes)[0])
