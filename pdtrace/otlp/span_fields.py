"""Spans → fields of an OTLP ScopeSpans message.

Owns the form of one span with its events and links. What surrounds them, and the proof that it is
what the SDK would send, is `pdtrace.otlp.protobuf`'s.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from pdtrace.otlp.json_lines import FLAG_HAS_IS_REMOTE, Known, span_flags
from pdtrace.otlp.wire import Attributes, field, text_field, varint
from pdtrace.spans import Event, Link, Resource, Span, SpanKind, StatusCode

_pack_times = struct.Struct("<BQBQHI").pack
"""start_time_unix_nano, end_time_unix_nano and flags, each behind its tag."""
_START, _END, _FLAGS = 0x39, 0x41, 0x0185

SPAN_ATTRIBUTES = Attributes(b"\x4a")
_EVENT_ATTRIBUTES = Attributes(b"\x1a")
_LINK_ATTRIBUTES = Attributes(b"\x22")

name_fields = Known(lambda name: text_field(b"\x2a", name))
_event_names = Known(lambda name: text_field(b"\x12", name))
KIND_FIELDS = {int(kind): b"\x30" + varint(kind or SpanKind.INTERNAL) for kind in SpanKind}


class SelfEncoding(ABC):
    """Spans of one request that need not be made to be sent."""

    @abstractmethod
    def add_fields(self, parts_of: Callable[[Resource], list[bytes]]) -> bool:
        """Does what `add_spans` would, to the parts of each resource; False where `add_spans` has
        to. Raises ValueError for what has no OTLP form."""


def add_spans(parts: list[bytes], spans: Iterable[Span]) -> None:
    """Appends each span as a field of ScopeSpans. Raises ValueError for what has no OTLP form."""
    trace_id, trace_head = "", b""
    add_attributes, unhex = SPAN_ATTRIBUTES.add, bytes.fromhex
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
        body = [trace_head, ids, times, name_fields[span.name], KIND_FIELDS[span.kind]]
        dropped = add_attributes(body, span.attributes)
        if dropped:
            body.append(b"\x50" + varint(dropped))
        if span.trace_state:
            body.append(text_field(b"\x1a", span.trace_state))
        if span.events:
            body += [event_field(event) for event in span.events]
        if span.links:
            body += [link_field(link) for link in span.links]
        body.append(_status(span) if span.status else UNSET_STATUS)
        payload = b"".join(body)
        parts += (b"\x12", varint(len(payload)), payload)


def event_field(event: Event) -> bytes:
    """An event of a span."""
    parts = [_pack_event_time(0x09, event.time_ns), _event_names[event.name]]
    dropped = _EVENT_ATTRIBUTES.add(parts, event.attributes)
    if dropped:
        parts.append(b"\x20" + varint(dropped))
    return field(b"\x5a", b"".join(parts))


_pack_event_time = struct.Struct("<BQ").pack


def link_field(link: Link) -> bytes:
    """A link of a span."""
    head = bytes.fromhex(f"0a10{link.trace_id}1208{link.span_id}")
    if len(head) != 28:
        raise ValueError(f"ids {link.trace_id}, {link.span_id} have no OTLP form")
    parts = [head, _LINK_FLAGS]
    dropped = _LINK_ATTRIBUTES.add(parts, link.attributes)
    if dropped:
        parts.append(b"\x28" + varint(dropped))
    return field(b"\x6a", b"".join(parts))


_LINK_FLAGS = struct.pack("<BI", 0x35, FLAG_HAS_IS_REMOTE)


UNSET_STATUS = b"\x7a\x00"


def _status(span: Span) -> bytes:
    message = b""
    if span.status is StatusCode.ERROR:
        message = text_field(b"\x12", span.status_message)
    return field(b"\x7a", message + b"\x18" + varint(span.status))
