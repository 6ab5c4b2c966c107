"""A span in the making: exact times on the request's clock, attributes, and how it becomes a span.

Owns alignment (ADR 001) and which of a mark's attributes go on a span. Knows nothing of stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdtrace import semconv as a
from pdtrace.alignment import SAME_CLOCK, Alignment
from pdtrace.collected import CollectedRequest, Leg
from pdtrace.evidence import End, Stamp
from pdtrace.ring.codec import ID_SEPARATOR
from pdtrace.ring.records import Value
from pdtrace.spans import AttrValue, Event, Link, Span, SpanKind, StatusCode
from pdtrace.stages import MARKS

CHAIN_GAP_NS = 1_000
SIDE_GAP_NS = 2_000
"""How far before its end mark a span ends: chain stages and stages beside the chain (ADR 001)."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A span in the making, on the common clock.

    wall_offset_ns  from the common clock to Unix time: by the gateway's anchor or, for a process of
                    another host, by its own, so that its clock shows as it stood
    alignment       from the process's own clock to the common one
    """

    name: str
    span_id: str
    parent_id: str | None
    leg: Leg
    begin_ns: int
    end_ns: int
    gap_ns: int
    wall_offset_ns: int
    alignment: Alignment = SAME_CLOCK
    shown_until_ns: int | None = None
    """Where the exported span ends at the latest; its exact end is recorded all the same."""
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, AttrValue] = field(default_factory=dict[str, AttrValue])
    events: list[Event] = field(default_factory=list[Event])
    links: list[Link] = field(default_factory=list[Link])
    status: StatusCode = StatusCode.UNSET
    status_message: str = ""

    def conclude(self, end: End, *, guilty: bool) -> None:
        """Records an outcome; only the stage that was active when it happened bears the error."""
        if end.is_open:
            self.attributes[a.OPEN.key] = True
            return
        self.attributes[a.OUTCOME.key] = end.outcome
        if end.reason:
            self.attributes[a.OUTCOME_REASON.key] = end.reason
        if end.by:
            self.attributes[a.OUTCOME_BY.key] = end.by
        if guilty and end.is_error:
            self.status = StatusCode.ERROR
            self.status_message = end.reason or end.outcome
            self.attributes[a.ERROR_TYPE.key] = end.reason or end.outcome

    @property
    def shown_end_ns(self) -> int:
        """Where the exported span ends unless that is before its start: Unix time, whole
        microseconds, `gap_ns` before its mark."""
        until_ns = self.end_ns
        if self.shown_until_ns is not None:
            until_ns = min(until_ns, self.shown_until_ns)
        return max(until_ns + self.wall_offset_ns, 0) // 1_000 * 1_000 - self.gap_ns

    def add_event(self, name: str, t_ns: int, attributes: dict[str, AttrValue]) -> None:
        """Something that happened at `t_ns` of the common clock."""
        wall_ns = t_ns + self.wall_offset_ns
        self.events.append(Event(name=name, time_ns=wall_ns, attributes=attributes))

    def span(self, request: CollectedRequest) -> Span:
        """The finished span: in wall time, aligned to microseconds."""
        start_ns = max(self.begin_ns + self.wall_offset_ns, 0) // 1_000 * 1_000
        end_ns = self.shown_end_ns
        self.attributes[a.BEGIN_NS.key] = self.begin_ns
        self.attributes[a.END_NS.key] = self.end_ns
        if self.alignment is not SAME_CLOCK:
            self.attributes[a.CLOCK_OFFSET_NS.key] = self.alignment.offset_ns
            if self.alignment.error_ns is not None:
                self.attributes[a.CLOCK_ERROR_NS.key] = self.alignment.error_ns
        return Span(
            trace_id=request.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            name=self.name,
            kind=self.kind,
            start_ns=start_ns,
            end_ns=max(end_ns, start_ns),
            resource=self.leg.process.resource,
            attributes=self.attributes,
            events=tuple(self.events),
            links=tuple(self.links),
            status=self.status,
            status_message=self.status_message,
            trace_state=request.trace_state,
        )


def set_attribute(attributes: dict[str, AttrValue], attr: a.Attr, value: Value) -> None:
    """Sets an attribute unless nothing was recorded for it."""
    if value is None:
        return
    if attr is a.FINISH_REASON:  # the convention's type is string[]; a request has one choice here
        attributes[attr.key] = (str(value),)
    elif attr is a.WAIT_BLOCKERS:
        attributes[attr.key] = tuple(str(value).split(ID_SEPARATOR))
    else:
        attributes[attr.key] = value


def put_attributes(draft: Draft, stamp: Stamp, *, overwrite: bool = True) -> None:
    """Copies a mark's attributes. gen_ai.* and http.* describe the request, so only the root's."""
    for attr, value in zip(MARKS[stamp.mark].attrs, stamp.values, strict=False):
        if attr.key.startswith(("gen_ai.", "http.")):
            continue
        if overwrite or attr.key not in draft.attributes:
            set_attribute(draft.attributes, attr, value)


def mark_attributes(stamp: Stamp, *, leave_out: a.Attr | None = None) -> dict[str, AttrValue]:
    """All that a mark carries, by attribute key."""
    attributes: dict[str, AttrValue] = {}
    for attr, value in zip(MARKS[stamp.mark].attrs, stamp.values, strict=False):
        if attr is not leave_out:
            set_attribute(attributes, attr, value)
    return attributes
