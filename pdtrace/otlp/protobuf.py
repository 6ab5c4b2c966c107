"""Spans → OTLP protobuf, and → the OpenTelemetry SDK's ReadableSpan.

Two ways to one result: `serialize_request` writes the bytes itself, `readable_spans` feeds any SDK
exporter or processor at ten times the cost. Tests hold them equal message for message. Knows
nothing of endpoints (`pdtrace.export.settings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    SCOPE_NAME,
    PerResource,
    by_resource,
    parent_is_remote,
    resource_keys,
    valid_attributes,
    valid_text,
)
from pdtrace.otlp.span_fields import SelfEncoding, add_spans
from pdtrace.otlp.wire import Attributes, field, text_field, varint
from pdtrace.spans import AttrValue, Resource, Span, SpanBatch, SpanKind, StatusCode

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
    groups = _Groups()
    for request in spans.requests if isinstance(spans, SpanBatch) else (spans,):
        if isinstance(request, SelfEncoding) and request.add_fields(groups.parts_of):
            continue
        for resource, group in by_resource(request):
            add_spans(groups.parts_of(resource), group)
    return groups.joined()


class _Groups:
    """Fields of spans by the resource that they belong to, in order of first appearance."""

    def __init__(self) -> None:
        self._by_key: dict[str, tuple[Resource, list[bytes]]] = {}
        self._by_identity: dict[int, list[bytes]] = {}

    def parts_of(self, resource: Resource) -> list[bytes]:
        """Where the spans of a resource are added."""
        parts = self._by_identity.get(id(resource))
        if parts is None:
            known = self._by_key.setdefault(resource_keys[resource], (resource, [_SCOPE]))
            parts = self._by_identity[id(resource)] = known[1]
        return parts

    def joined(self) -> bytes:
        """The message."""
        whole: list[bytes] = []
        for resource, parts in self._by_key.values():
            parts.append(_SCHEMA)
            scope_spans = b"".join(parts)
            size = len(scope_spans)
            head = _resources[resource] + b"\x12" + varint(size)
            whole += (b"\x0a", varint(len(head) + size + len(_SCHEMA)), head, scope_spans, _SCHEMA)
        return b"".join(whole)


_RESOURCE_ATTRIBUTES = Attributes(b"\x0a")
_SCOPE = field(b"\x0a", text_field(b"\x0a", SCOPE_NAME) + text_field(b"\x12", __version__))
_SCHEMA = text_field(b"\x1a", a.SCHEMA_URL)


def _resource(resource: Resource) -> bytes:
    parts: list[bytes] = []
    _RESOURCE_ATTRIBUTES.add(parts, resource.attributes)
    return field(b"\x0a", b"".join(parts))


_resources = PerResource(_resource)


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
