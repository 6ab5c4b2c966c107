"""The neutral span model that assembly produces, exporters encode and readers return.

Owns shapes only. Ids are lowercase hex (32 and 16 digits); times are Unix nanoseconds. Span names
are stage names and `attempt`; the root, named after operation and model, has `pd.span` = `request`.
Meaning lives in `pdtrace.stages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import overload

import msgspec

AttrScalar = str | int | float | bool
AttrValue = AttrScalar | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]


class SpanKind(IntEnum):
    """OTLP span kinds (opentelemetry/proto/trace/v1)."""

    UNSPECIFIED = 0
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


class StatusCode(IntEnum):
    """OTLP status codes."""

    UNSET = 0
    OK = 1
    ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Who recorded: `service.name`, `service.instance.id`, `host.id`, `process.pid`, …"""

    attributes: Mapping[str, AttrValue]

    @property
    def service_name(self) -> str:
        return str(self.attributes.get("service.name", "unknown"))

    @property
    def instance_id(self) -> str | None:
        value = self.attributes.get("service.instance.id")
        return None if value is None else str(value)


class Event(msgspec.Struct, frozen=True, gc=False):
    """A point in a span's time."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttrValue] = msgspec.field(default_factory=dict[str, AttrValue])


class Link(msgspec.Struct, frozen=True, gc=False):
    """A reference to another span."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, AttrValue] = msgspec.field(default_factory=dict[str, AttrValue])


class Span(msgspec.Struct, frozen=True, gc=False):
    """One span. `parent_id` is None for a trace's first span; a remote parent keeps its id.

    Structs rather than dataclasses: those take four times as long to make. Nothing in one leads
    back to it, so the garbage collector need not follow them.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    resource: Resource
    attributes: Mapping[str, AttrValue] = msgspec.field(default_factory=dict[str, AttrValue])
    events: Sequence[Event] = ()
    links: Sequence[Link] = ()
    status: StatusCode = StatusCode.UNSET
    status_message: str = ""
    trace_state: str = ""


class SpanBatch(Sequence[Span]):
    """The spans of several requests, one request after the other.

    requests  the spans of each, for who need not see them one by one: some are made when asked for
    """

    def __init__(self, requests: Sequence[Sequence[Span]]) -> None:
        self.requests = requests
        self._all: list[Span] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.requests))

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if self._all is None:
            self._all = list(self)
        return self._all[index]

    def __iter__(self) -> Iterator[Span]:
        return chain.from_iterable(self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All spans known of one trace, in no particular order, each span id once."""

    trace_id: str
    spans: Sequence[Span]
