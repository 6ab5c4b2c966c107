"""Spans of a request in which all went in order → protobuf, without making the spans.

Owns a shortcut: the bytes are those that `pdtrace.otlp.span_fields` writes of the same spans, but
for the order of fields. What all spans of a request say, what all spans of a stage say, and each
time of a mark are encoded once and used again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pdtrace import semconv as a
from pdtrace.assembly.request_plans import MAX_SHAPES, More, RequestPlan, SpanPlan, Told
from pdtrace.otlp.json_lines import FLAG_HAS_IS_REMOTE
from pdtrace.otlp.span_fields import (
    KIND_FIELDS,
    SPAN_ATTRIBUTES,
    UNSET_STATUS,
    add_spans,
    event_field,
    link_field,
    name_fields,
)
from pdtrace.otlp.wire import num_bytes, text_field, varint, varints
from pdtrace.spans import Resource

if TYPE_CHECKING:
    from pdtrace.assembly.orderly import OrderlySpans

_FLAGS = struct.pack("<HI", 0x0185, FLAG_HAS_IS_REMOTE)
_pack_own = struct.Struct("<H8sH8sBQBQ").pack
"""Span id, parent id, start and end time, each behind its tag and the length of the ids."""
_ID, _PARENT, _START, _END = 0x0812, 0x0822, 0x39, 0x41
_OWN_BYTES = 38

_MAX_HEADS = 4_096
_HEADS = [b"\x12" + varint(size) for size in range(_MAX_HEADS)]
"""What stands before a span, by its size."""


class _Stage(NamedTuple):
    """A stage span of a plan, as far as it is the same in every request whose times are as long.

    parent        place of the span that it is a child of; behind the stages the root, the attempt
    before_begin  all fields of one content, and what stands before the time of its begin
    size          of the span but for what all spans of the request have in common, and what only
                  some of its kind have
    told          what marks put on it
    """

    begin: int
    end: int
    leg: int
    parent: int
    before_begin: bytes
    before_end: bytes
    size: int
    told: tuple[Told, ...]


@lru_cache(maxsize=MAX_SHAPES)
def _stages(plan: RequestPlan, time_bytes: int) -> tuple[_Stage, ...]:
    return tuple(_stage(span, len(plan.spans), time_bytes) for span in plan.spans)


def _stage(span: SpanPlan, num_stages: int, time_bytes: int) -> _Stage:
    fields = [name_fields[span.name], KIND_FIELDS[span.kind], _FLAGS, UNSET_STATUS]
    SPAN_ATTRIBUTES.add(fields, {a.STAGE.key: span.name, a.STAGE_KIND.key: span.kind_of_time})
    fields.append(SPAN_ATTRIBUTES.before_ints(a.BEGIN_NS.key)[time_bytes])
    before_begin = b"".join(fields)
    before_end = SPAN_ATTRIBUTES.before_ints(a.END_NS.key)[time_bytes]
    return _Stage(
        begin=span.begin,
        end=span.end,
        leg=span.leg,
        parent=num_stages + (not span.at_root) if span.nested_in is None else span.nested_in,
        before_begin=before_begin,
        before_end=before_end,
        size=_OWN_BYTES + len(before_begin) + len(before_end) + 2 * time_bytes,
        told=span.told,
    )


@lru_cache(maxsize=MAX_SHAPES)
def _told(plan: RequestPlan) -> tuple[tuple[Told, ...], ...]:
    return tuple(span.told for span in plan.spans)


def add_orderly_fields(spans: OrderlySpans, parts_of: Callable[[Resource], list[bytes]]) -> bool:
    """Appends each span as a field of ScopeSpans to the parts of its resource; False if that is
    for `add_spans` to do, as the times are not of one length. Raises ValueError for what has no
    OTLP form."""
    time_bytes = num_bytes(min(spans.times))
    if num_bytes(max(spans.times)) != time_bytes:
        return False
    times = varints(spans.times)
    common = _common(spans)
    root_id, attempt_id = bytes.fromhex(spans.root_id), bytes.fromhex(spans.attempt_id)
    if len(root_id) != 8 or len(attempt_id) != 8:
        raise ValueError(f"ids {spans.root_id}, {spans.attempt_id} have no OTLP form")
    resources, plan = spans.resources, spans.plan
    add_spans(parts_of(resources[plan.gateway]), (spans.root, spans.make_attempt()))
    base, walls, shown, more = spans.id_base, spans.walls, spans.shown_ends, spans.more
    ids = [((base ^ span.salt) or 1).to_bytes(8) for span in plan.spans]
    ids += (root_id, attempt_id)
    stages = _stages(plan, time_bytes)
    known = SPAN_ATTRIBUTES.told(spans.records, _told(plan))
    common_size = len(common)
    legs: list[list[bytes] | None] = [None] * len(resources)
    for at in spans.order:
        begin, end, leg, parent, before_begin, before_end, size, told = stages[at]
        start_ns, end_ns = walls[begin], shown[at]
        if end_ns < start_ns:  # noqa: PLR1730 -- a call of max() takes three times as long
            end_ns = start_ns
        own = _pack_own(_ID, ids[at], _PARENT, ids[parent], _START, start_ns, _END, end_ns)
        parts = legs[leg]
        if parts is None:  # not before: resources come in the order of their first spans
            parts = legs[leg] = parts_of(resources[leg])
        further = known[at]
        if further is None or at in more:
            further = _further(spans, told, more.get(at)) if told or at in more else b""
        size += common_size + len(further)
        head = _HEADS[size] if size < _MAX_HEADS else b"\x12" + varint(size)
        parts += (head, common, own, before_begin, times[begin], before_end, times[end], further)
    return True


def _common(spans: OrderlySpans) -> bytes:
    """What all spans of a request say."""
    trace_id = bytes.fromhex(spans.trace_id)
    if len(trace_id) != 16:
        raise ValueError(f"trace id {spans.trace_id} has no OTLP form")
    parts = [b"\x0a\x10", trace_id]
    if spans.trace_state:
        parts.append(text_field(b"\x1a", spans.trace_state))
    SPAN_ATTRIBUTES.add(parts, spans.identity)
    return b"".join(parts)


def _further(spans: OrderlySpans, told: Iterable[Told], more: More | None) -> bytes:
    """What only some spans have: attributes of marks, waits, forward passes."""
    parts: list[bytes] = []
    records = spans.records
    attributes: dict[str, Any] = {}
    for one in told:
        key, number, place, _ = one
        value = records[number].values[place]
        if value is None:
            value = spans.value(one)
            if value is None:
                continue
        attributes[key] = value
    if more is not None:
        attributes.update(more.attributes)
    dropped = SPAN_ATTRIBUTES.add(parts, attributes)
    if more is not None:
        parts += [event_field(event) for event in more.events]
        parts += [link_field(link) for link in more.links]
    if dropped:
        parts.append(b"\x50" + varint(dropped))
    return b"".join(parts)
