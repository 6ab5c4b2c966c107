"""The OpenTelemetry span limits: how many attributes, events and links, and how long texts may be.

Owns what is left of a span under limits, and what was left out. The first ones stay, as the
specification has it; texts are cut, which does not count as dropped. Resources have no limit. Knows
nothing of encoders: `pdtrace.export.targets` puts the counts into the message. Files have all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from pdtrace.spans import AttrValue, Event, Link, Span

VARIABLES = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLimits:
    """Counts, and lengths in characters; None is no limit."""

    attributes: int | None = None
    attribute_chars: int | None = None
    events: int | None = None
    links: int | None = None
    event_attributes: int | None = None
    link_attributes: int | None = None
    inner_chars: int | None = None  # of the attributes of events and links


class Dropped(NamedTuple):
    """What was left out of one span; of events and links one number for each that is left."""

    attributes: int = 0
    events: int = 0
    links: int = 0
    event_attributes: Sequence[int] = ()
    link_attributes: Sequence[int] = ()


def limits_from_env(environ: Mapping[str, str]) -> SpanLimits | None:
    """Limits that are set; None when none is. Raises ValueError with what was set."""
    count = _limit(environ, "OTEL_ATTRIBUTE_COUNT_LIMIT")
    chars = _limit(environ, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
    limits = SpanLimits(
        attributes=_limit(environ, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", count),
        attribute_chars=_limit(environ, "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", chars),
        events=_limit(environ, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
        links=_limit(environ, "OTEL_SPAN_LINK_COUNT_LIMIT"),
        event_attributes=_limit(environ, "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", count),
        link_attributes=_limit(environ, "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", count),
        inner_chars=chars,
    )
    return None if limits == SpanLimits() else limits


def limit_span(span: Span, limits: SpanLimits) -> tuple[Span, Dropped]:
    """The span within its limits, and what was left out."""
    attributes = _limited(span.attributes, limits.attributes, limits.attribute_chars)
    events = span.events[: limits.events]
    links = span.links[: limits.links]
    inner = limits.inner_chars
    event_attributes = [_limited(e.attributes, limits.event_attributes, inner) for e in events]
    link_attributes = [_limited(k.attributes, limits.link_attributes, inner) for k in links]
    limited = replace(
        span,
        attributes=attributes,
        events=tuple(
            Event(name=event.name, time_ns=event.time_ns, attributes=left)
            for event, left in zip(events, event_attributes, strict=True)
        ),
        links=tuple(
            Link(trace_id=link.trace_id, span_id=link.span_id, attributes=left)
            for link, left in zip(links, link_attributes, strict=True)
        ),
    )
    return limited, Dropped(
        attributes=len(span.attributes) - len(attributes),
        events=len(span.events) - len(events),
        links=len(span.links) - len(links),
        event_attributes=[
            len(event.attributes) - len(left)
            for event, left in zip(events, event_attributes, strict=True)
        ],
        link_attributes=[
            len(link.attributes) - len(left)
            for link, left in zip(links, link_attributes, strict=True)
        ],
    )


def _limited(
    attributes: Mapping[str, AttrValue], count: int | None, chars: int | None
) -> Mapping[str, AttrValue]:
    if chars is None and (count is None or len(attributes) <= count):
        return attributes
    items = list(attributes.items())[:count]
    return {key: value if chars is None else _cut(value, chars) for key, value in items}


def _cut(value: AttrValue, chars: int) -> AttrValue:
    if isinstance(value, str):
        return value[:chars]
    if isinstance(value, list | tuple):
        return [item[:chars] if isinstance(item, str) else item for item in value]  # pyright: ignore[reportReturnType] each keeps its type
    return value


def _limit(environ: Mapping[str, str], variable: str, default: int | None = None) -> int | None:
    given = environ.get(variable, "").strip()
    if not given:
        return default
    if not given.isdecimal():
        raise ValueError(f"{variable} is {given!r}: it must be a number of at least 0")
    return int(given)
