"""A span in the making: exact times on the request's clock, attributes, and how it becomes a span.

Owns alignment (ADR 001) and which of a mark's attributes go on a span. Knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from pdtrace import semconv as a
from pdtrace.assembly.alignment import SAME_CLOCK, Alignment
from pdtrace.assembly.collected import CollectedRequest, Leg
from pdtrace.assembly.evidence import End, Stamp
from pdtrace.ring.codec import ID_SEPARATOR
from pdtrace.ring.records import Value
from pdtrace.spans import AttrValue, Event, Link, Span, SpanKind, StatusCode
from pdtrace.stages import MARKS, ROOT_SPAN, Mark

CHAIN_GAP_NS = 1_000
SIDE_GAP_NS = 2_000
"""How far before its end mark a span ends: chain stages and stages beside the chain (ADR 001)."""

_BEGIN_KEY, _END_KEY = a.BEGIN_NS.key, a.END_NS.key


class Marked(Protocol):
    """A mark on the request's clock."""

    @property
    def mark(self) -> Mark: ...
    @property
    def t_ns(self) -> int: ...
    @property
    def values(self) -> tuple[Value, ...]: ...


class Draft(msgspec.Struct, eq=False, gc=False):
    """A span in the making, on the common clock.

    wall_offset_ns  from the common clock to Unix time: by the gateway's anchor or, for a process of
                    another host, by its own, so that its clock shows as it stood
    alignment       from the process's own clock to the common one
    shown_until_ns  where the exported span ends at the latest; its exact end is recorded all the
                    same
    shown_end_ns    where the exported span ends, once that is known (`ends_shown_at`)
    events, links   empty until there is one: most spans have none
    """

    name: str
    span_id: str
    parent_id: str | None
    leg: Leg
    begin_ns: int
    end_ns: int
    gap_ns: int
    wall_offset_ns: int
    attributes: dict[str, AttrValue]
    kind: SpanKind = SpanKind.INTERNAL
    alignment: Alignment = SAME_CLOCK
    shown_until_ns: int | None = None
    shown_end_ns: int | None = None
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()
    status: StatusCode = StatusCode.UNSET
    status_message: str = ""

    def conclude(self, end: End, *, guilty: bool) -> None:
        """Records an outcome; only the stage that was active when it happened bears the error."""
        if end.is_open:
            self.attributes[a.OPEN.key] = True
            return
        if end.outcome:
            self.attributes[a.OUTCOME.key] = end.outcome
        if end.reason:
            self.attributes[a.OUTCOME_REASON.key] = end.reason
        if end.by:
            self.attributes[a.OUTCOME_BY.key] = end.by
        if guilty and end.is_error:
            self.status = StatusCode.ERROR
            self.status_message = end.reason or end.outcome
            self.attributes[a.ERROR_TYPE.key] = end.reason or end.outcome

    def ends_shown_at(self) -> int:
        """Where the exported span ends unless that is before its start: Unix time, whole
        microseconds, `gap_ns` before its mark."""
        until_ns = self.end_ns
        if self.shown_until_ns is not None and self.shown_until_ns < until_ns:
            until_ns = self.shown_until_ns
        wall_ns = until_ns + self.wall_offset_ns
        shown_ns = (wall_ns - wall_ns % 1_000 if wall_ns > 0 else 0) - self.gap_ns
        self.shown_end_ns = shown_ns
        return shown_ns

    def add_event(self, name: str, t_ns: int, attributes: dict[str, AttrValue]) -> None:
        """Something that happened at `t_ns` of the common clock."""
        self.events += (Event(name, t_ns + self.wall_offset_ns, attributes),)

    def span(self, request: CollectedRequest) -> Span:
        """The finished span: in wall time, aligned to microseconds."""
        start_ns = self.begin_ns + self.wall_offset_ns
        start_ns = start_ns - start_ns % 1_000 if start_ns > 0 else 0
        end_ns = self.shown_end_ns
        if end_ns is None:
            end_ns = self.ends_shown_at()
        attributes = self.attributes
        attributes[_BEGIN_KEY] = self.begin_ns
        attributes[_END_KEY] = self.end_ns
        if self.alignment is not SAME_CLOCK:
            attributes[a.CLOCK_OFFSET_NS.key] = self.alignment.offset_ns
            if self.alignment.error_ns is not None:
                attributes[a.CLOCK_ERROR_NS.key] = self.alignment.error_ns
        return Span(
            request.trace_id,
            self.span_id,
            self.parent_id,
            self.name,
            self.kind,
            start_ns,
            end_ns if end_ns > start_ns else start_ns,
            self.leg.process.resource,
            attributes,
            self.events,
            self.links,
            self.status,
            self.status_message,
            request.trace_state,
        )


def _on_span(attr: a.Attr) -> bool:
    """gen_ai.* and http.* describe the request, so they stand on the root alone."""
    return not attr.key.startswith(("gen_ai.", "http."))


STRING_LISTS = frozenset({a.FINISH_REASON.key, a.WAIT_BLOCKERS.key})
"""Keys whose values are lists, recorded as text (`set_attribute`)."""
_KEYS = {mark: tuple(attr.key for attr in spec.attrs) for mark, spec in MARKS.items()}
SPAN_KEYS: dict[Mark, tuple[str | None, ...]] = {
    mark: tuple(attr.key if _on_span(attr) else None for attr in spec.attrs)
    if any(map(_on_span, spec.attrs))
    else ()
    for mark, spec in MARKS.items()
}
"""Keys by place; None for what does not belong on a stage's span."""
_PLAIN = frozenset(mark for mark, keys in SPAN_KEYS.items() if STRING_LISTS.isdisjoint(keys))
"""Marks none of whose values is a list in the shape of a text."""


_OUTCOME_ATTRS = frozenset({a.OUTCOME, a.OUTCOME_REASON, a.OUTCOME_BY})
ROOT_KEYS: Mapping[Mark, tuple[str | None, ...]] = {
    mark: tuple(
        attr.key if attr.on_root and attr not in _OUTCOME_ATTRS else None for attr in spec.attrs
    )
    for mark, spec in MARKS.items()
    if mark is not Mark.ABORTED and any(attr.on_root for attr in spec.attrs)
}
"""Keys by place, for the marks that tell of the whole request; None for what is not copied."""


def set_attribute(attributes: dict[str, AttrValue], key: str, value: Value) -> None:
    """Sets an attribute unless nothing was recorded for it."""
    if value is None:
        return
    if key not in STRING_LISTS:
        attributes[key] = value
    elif key == a.WAIT_BLOCKERS.key:
        attributes[key] = tuple(str(value).split(ID_SEPARATOR))
    else:  # the convention's type is string[]; a request has one choice here
        attributes[key] = (str(value),)


def put_attributes(draft: Draft, stamp: Stamp, *, overwrite: bool = True) -> None:
    """Copies those of a mark's attributes that belong on a stage's span."""
    keys = SPAN_KEYS[stamp.mark]
    if not keys:
        return
    attributes = draft.attributes
    plain = stamp.mark in _PLAIN
    for key, value in zip(keys, stamp.values, strict=False):
        if value is not None and key is not None and (overwrite or key not in attributes):
            if plain:
                attributes[key] = value
            else:
                set_attribute(attributes, key, value)


def mark_attributes(stamp: Marked) -> dict[str, AttrValue]:
    """All that a mark carries, by attribute key."""
    attributes: dict[str, AttrValue] = {}
    for key, value in zip(_KEYS[stamp.mark], stamp.values, strict=False):
        if value is not None:
            if key in STRING_LISTS:
                set_attribute(attributes, key, value)
            else:
                attributes[key] = value
    return attributes


def root_name(attributes: Mapping[str, AttrValue]) -> str:
    """`{operation} {model}` as the GenAI conventions ask; never anything the caller can vary."""
    operation = attributes.get(a.OPERATION.key)
    model = attributes.get(a.REQUEST_MODEL.key)
    if not operation:
        return ROOT_SPAN
    return f"{operation} {model}" if model else str(operation)
