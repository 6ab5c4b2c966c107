"""Where spans go: the OpenTelemetry SDK's exporters as targets of the export queue.

Owns the one place where SDK exporters are built and called, and what an answer means: taken, to be
tried again, or refused for good. Settings beyond the endpoint (headers, timeout, compression,
certificates) are read by the SDK's own constructors from the environment.

OTLP goes through the SDK's connections but past its own retries, which hide the collector's answer
and hold a batch for ten seconds: the queue repeats. That, and the fast encoder, use parts of the
SDK that are not public; each is checked once, and what does not fit is done by the SDK itself.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from pdtrace.export.queue import TAKEN, Answer, Sent, Target
from pdtrace.export.span_limits import Dropped, SpanLimits, limit_span
from pdtrace.logtext import one_line
from pdtrace.otlp.protobuf import encode_request, readable_spans, serialize_request
from pdtrace.spans import Event, Link, Resource, Span, SpanKind, StatusCode

RETRYABLE_HTTP = frozenset({429, 502, 503, 504})
RETRYABLE_GRPC = frozenset(
    {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNAVAILABLE",
        "DATA_LOSS",
    }
)
"""As the OTLP specification has them; what is not here is refused for good."""

MAX_REASON_CHARS = 300
"""Of a collector's own words."""

MAX_ANSWER_BYTES = 64 * 1024
ANSWER_BODY_S = 1.0
"""What is read of an answer beside its status, and how long that may go on."""

MAX_TIMEOUT_S = 60.0
"""Of one send. Like the SDK we read OTEL_EXPORTER_OTLP_TIMEOUT in seconds; the specification has
milliseconds, and who means these would wait for hours."""

GRPC_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
GRPC_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
"""Unset, a connection that was refused is not tried again for up to two minutes."""

_CHATTY_LOGGERS = (
    "opentelemetry.attributes",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.common._internal",
    "opentelemetry.exporter.otlp.proto.http._common",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "urllib3.connectionpool",
)
_log = logging.getLogger(__name__)


class _LastMessage(logging.Filter):
    """Takes the SDK's log lines: one line for each outage, written by the queue, says enough."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.text = record.getMessage()
            return False
        return True


class _SdkTarget:
    """Any SDK span exporter, fed ReadableSpans."""

    def __init__(self, kind: str, name: str, exporter: Any, limits: SpanLimits | None) -> None:
        self.kind = kind
        self.name = name
        self._exporter = exporter
        self._limits = limits
        self._said = _LastMessage()
        self._shut = False

    def send(self, spans: Sequence[Span]) -> Answer:
        with self._quietly():
            return self._send(spans)

    def shutdown(self) -> None:
        if not self._shut:
            self._shut = True
            with self._quietly():
                self._exporter.shutdown()

    def _send(self, spans: Sequence[Span]) -> Answer:
        readable = limited_readable_spans(spans, self._limits)
        try:
            result = self._exporter.export(readable)
        except OSError as error:  # OTLP over HTTP before 1.40 lets connections' errors through
            return Answer(sent=Sent.RETRY, reason=one_line(str(error)), code="unreachable")
        if result.name == "SUCCESS":
            return TAKEN
        # The SDK does not say why; it has tried again by itself already.
        return Answer(sent=Sent.RETRY, reason=one_line(self._said.text))

    @contextmanager
    def _quietly(self) -> Generator[None]:
        self._said.text = ""
        loggers = [logging.getLogger(name) for name in _CHATTY_LOGGERS]
        for logger in loggers:
            logger.addFilter(self._said)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(self._said)


Encoder = Callable[[Sequence[Span]], bytes]


def _take_bounded_answers(client: Any) -> None:
    """Of an answer's body no more is read than says something, and its status counts even if the
    body does not arrive whole: a batch that was taken must not be sent again."""
    session = getattr(getattr(client, "_transport", None), "_session", None)
    if session is None or not hasattr(session, "mount"):
        return  # not the client we know: it reads what there is
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 the exporter has brought it

    class Bounded(HTTPAdapter):
        def send(self, *arguments: Any, **options: Any) -> Any:
            response: Any = super().send(*arguments, **options)
            response._content = _begin_of(response.raw)
            response._content_consumed = True
            return response

    for prefix in ("http://", "https://"):
        session.mount(prefix, Bounded())


def _begin_of(raw: Any) -> bytes:
    until_s = time.monotonic() + ANSWER_BODY_S
    body = b""
    try:
        while piece := raw.read1(MAX_ANSWER_BYTES, decode_content=True):
            body += piece
            if len(body) >= MAX_ANSWER_BYTES or time.monotonic() >= until_s:
                raw.close()  # there may be more of it without end
                break
    except Exception:  # cut off, or not what its headers say
        raw.close()
    return body[:MAX_ANSWER_BYTES]


class _HttpTarget(_SdkTarget):
    """The SDK's HTTP client, one request for each send."""

    def __init__(self, name: str, exporter: Any, encode: Encoder) -> None:
        super().__init__("otlp", name, exporter, None)
        self._encode = encode
        self._client = exporter._client
        _take_bounded_answers(self._client)
        self._gzip = getattr(getattr(exporter._client, "_compression", None), "value", "") == "gzip"
        self._timeout_s = _timeout_s(exporter._client._timeout)

    def _send(self, spans: Sequence[Span]) -> Answer:
        data = self._encode(spans)
        # The SDK packs at level 9: four times the work for the same size.
        data = _gzip(data) if self._gzip else self._client._compress(data)
        result = self._client._submit(data, self._timeout_s)
        if result.status_code is None:
            reason = connection_fault(result.error, self._timeout_s)
            return Answer(sent=Sent.RETRY, reason=reason, code="unreachable")
        return http_answer(
            result.status_code, str(result.reason or ""), result.headers(), result.content()
        )


class _GrpcTarget(_SdkTarget):
    """The SDK's gRPC channel, one call for each send."""

    def __init__(self, name: str, exporter: Any, encode: Encoder) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415
            ExportTraceServiceResponse,
        )

        super().__init__("otlp", name, exporter, None)
        self._encode = encode
        self._call = exporter._channel.unary_unary(
            GRPC_EXPORT,
            request_serializer=None,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )
        self._timeout_s = _timeout_s(exporter._timeout)

    def _send(self, spans: Sequence[Span]) -> Answer:
        from grpc import RpcError  # noqa: PLC0415 the exporter has brought it

        data = self._encode(spans)
        try:
            metadata = self._exporter._headers
            response = self._call(data, metadata=metadata, timeout=self._timeout_s)
        except RpcError as error:
            return _grpc_answer(error, self._timeout_s)
        except ValueError as error:  # the channel was closed meanwhile
            return Answer(sent=Sent.RETRY, reason=one_line(str(error)), code="closed")
        return _taken(response)


def otlp_http_target(endpoint: str, limits: SpanLimits | None = None) -> Target:
    """OTLP over HTTP with protobuf; `endpoint` is the full URL, path included."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 175 ms
        OTLPSpanExporter,
    )

    exporter = OTLPSpanExporter(endpoint=endpoint)
    name = f"OTLP over HTTP to {endpoint}"
    client = getattr(exporter, "_client", None)
    if _has(client, "_submit", "_compress", "_timeout"):
        return _HttpTarget(name, exporter, _encoder(limits))
    return _SdkTarget("otlp", name, exporter, limits)


def otlp_grpc_target(endpoint: str, limits: SpanLimits | None = None) -> Target:
    """OTLP over gRPC; `http://` is plaintext, `https://` TLS, else OTEL_EXPORTER_OTLP_INSECURE."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 175 ms
        OTLPSpanExporter,
    )

    make: Any = OTLPSpanExporter  # it takes any number of channel options of any type, or none yet
    if "channel_options" in inspect.signature(make).parameters:
        exporter = make(endpoint=endpoint, channel_options=GRPC_CHANNEL_OPTIONS)
    else:
        exporter = make(endpoint=endpoint)
    name = f"OTLP over gRPC to {endpoint}"
    if _has(exporter, "_channel", "_headers", "_timeout"):
        return _GrpcTarget(name, exporter, _encoder(limits))
    return _SdkTarget("otlp", name, exporter, limits)


def console_target(limits: SpanLimits | None = None) -> Target:
    """The SDK's console exporter: JSON on stdout, for a look at single spans."""
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

    return _SdkTarget("console", "the console", ConsoleSpanExporter(out=sys.stdout), limits)


def sdk_target(name: str, exporter: Any, limits: SpanLimits | None = None) -> Target:
    """Any `opentelemetry.sdk.trace.export.SpanExporter`, on the compatible path."""
    return _SdkTarget(name, name, exporter, limits)


def _timeout_s(given_s: float) -> float:
    if given_s <= MAX_TIMEOUT_S:
        return given_s
    _log.warning(
        "OTEL_EXPORTER_OTLP_TIMEOUT is in seconds, as in the Python SDK: %g is taken as %g",
        given_s,
        MAX_TIMEOUT_S,
    )
    return MAX_TIMEOUT_S


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(data) + packer.flush()


def _has(thing: object, *parts: str) -> bool:
    return all(hasattr(thing, part) for part in parts)


# -- what an answer means --------------------------------------------------------------------


def http_answer(status: int, phrase: str, headers: Mapping[str, str], body: bytes) -> Answer:
    """What an HTTP response says. Header names are taken in lower case or as the server wrote them
    if the mapping ignores case."""
    code = str(status)
    kind = headers.get("content-type", "")
    if 200 <= status < 300:
        return _taken_http(kind, body)
    reason = " ".join(part for part in (code, phrase, _words(kind, body)) if part)
    if status in RETRYABLE_HTTP:
        retry_after_s = _retry_after(headers.get("retry-after"))
        return Answer(sent=Sent.RETRY, reason=reason, code=code, retry_after_s=retry_after_s)
    if status == 413 or "request body too large" in reason:
        return Answer(sent=Sent.TOO_LARGE, reason=reason, code=code)
    if status in (404, 405):
        reason += ": is this the address of an OTLP/HTTP receiver?"
    elif 300 <= status < 400:
        reason += ": redirects are not followed"
    return Answer(sent=Sent.REFUSED, reason=reason, code=code)


def _taken_http(kind: str, body: bytes) -> Answer:
    if not body or "json" in kind:
        return TAKEN
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415
        ExportTraceServiceResponse,
    )

    try:
        return _taken(ExportTraceServiceResponse.FromString(body))
    except Exception:  # some receivers answer with words; 200 is what counts
        return TAKEN


def _taken(response: Any) -> Answer:
    partial = response.partial_success
    if not partial.rejected_spans and not partial.error_message:
        return TAKEN
    return Answer(
        sent=Sent.OK,
        reason=one_line(partial.error_message),
        code="partial",
        rejected=max(partial.rejected_spans, 0),
    )


def _words(kind: str, body: bytes) -> str:
    """What the server says is wrong: the message of a google.rpc.Status, or the text."""
    if "protobuf" in kind:
        try:
            from google.rpc.status_pb2 import Status  # noqa: PLC0415

            return one_line(Status.FromString(body).message)
        except Exception:  # not the message that the specification asks for
            return ""
    return one_line(body[: 4 * MAX_REASON_CHARS].decode(errors="replace"), MAX_REASON_CHARS)


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _grpc_answer(error: Any, timeout_s: float) -> Answer:
    code = str(error.code().name)
    words = one_line(error.details() or "")
    reason = f"{code}: {words}" if words else code
    if code == "DEADLINE_EXCEEDED":
        reason = f"no answer within {timeout_s:g} s ({code})"
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in words:
        return Answer(sent=Sent.TOO_LARGE, reason=reason, code=code)
    if code not in RETRYABLE_GRPC:
        return Answer(sent=Sent.REFUSED, reason=reason, code=code)
    return Answer(sent=Sent.RETRY, reason=reason, code=code, retry_after_s=_retry_delay(error))


def _retry_delay(error: Any) -> float | None:
    """Seconds of a RetryInfo, in the rich status or, as some servers have it, on its own."""
    from google.rpc.error_details_pb2 import RetryInfo  # noqa: PLC0415
    from google.rpc.status_pb2 import Status  # noqa: PLC0415

    info = RetryInfo()
    try:
        trailers = dict(error.trailing_metadata() or ())
        if "grpc-status-details-bin" in trailers:
            details = Status.FromString(trailers["grpc-status-details-bin"]).details
            if not any(detail.Unpack(info) for detail in details):
                return None
        elif "google.rpc.retryinfo-bin" in trailers:
            info = RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"])
        else:
            return None
    except Exception:  # trailers are whatever the server puts there
        return None
    return max(info.retry_delay.seconds + info.retry_delay.nanos / 1e9, 0.0)


def connection_fault(error: BaseException | None, timeout_s: float) -> str:
    """Why there was no answer, from the bottom of the libraries' chain of errors."""
    if error is None:
        return "no answer"
    seen: list[BaseException] = []
    deepest: BaseException | None = error
    while deepest is not None and deepest not in seen:
        seen.append(deepest)
        deepest = deepest.__cause__ or deepest.__context__
    if any("timeout" in type(fault).__name__.lower() for fault in seen):
        return f"no answer within {timeout_s:g} s"
    last = seen[-1]
    words = last.strerror if isinstance(last, OSError) and last.strerror else str(last)
    return one_line(words) or type(last).__name__


# -- encoding --------------------------------------------------------------------------------


def _encoder(limits: SpanLimits | None) -> Encoder:
    if not _agrees():
        return lambda spans: _sdk_message(spans, limits).SerializeToString()
    if limits is None:
        return serialize_request
    return lambda spans: _limited_request(spans, limits).SerializeToString()


def _sdk_message(spans: Sequence[Span], limits: SpanLimits | None) -> Any:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import (  # noqa: PLC0415
        encode_spans,
    )

    return encode_spans(limited_readable_spans(spans, limits))


def _limited_request(spans: Sequence[Span], limits: SpanLimits) -> Any:
    limited = [limit_span(span, limits) for span in spans]
    dropped = {bytes.fromhex(span.span_id): counts for span, counts in limited}
    request = encode_request([span for span, _ in limited])
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                counts = dropped[span.span_id]
                span.dropped_attributes_count += counts.attributes
                span.dropped_events_count += counts.events
                span.dropped_links_count += counts.links
                for event, count in zip(span.events, counts.event_attributes, strict=True):
                    event.dropped_attributes_count += count
                for link, count in zip(span.links, counts.link_attributes, strict=True):
                    link.dropped_attributes_count += count
    return request


def limited_readable_spans(spans: Sequence[Span], limits: SpanLimits | None) -> list[Any]:
    """`readable_spans` within limits, with the SDK's own counts of what was dropped."""
    if limits is None:
        return list(readable_spans(spans))
    limited = [limit_span(span, limits) for span in spans]
    readable = readable_spans([span for span, _ in limited])
    return [_with_counts(span, counts) for span, (_, counts) in zip(readable, limited, strict=True)]


def _with_counts(span: Any, counts: Dropped) -> Any:
    from opentelemetry.attributes import BoundedAttributes  # noqa: PLC0415
    from opentelemetry.sdk.trace import Event as SdkEvent  # noqa: PLC0415
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.util import BoundedList  # noqa: PLC0415
    from opentelemetry.trace import Link as SdkLink  # noqa: PLC0415

    def mapping(attributes: Mapping[str, Any], dropped: int) -> Any:
        bounded = BoundedAttributes(attributes=attributes)
        bounded.dropped = dropped
        return bounded

    def sequence(items: Sequence[Any], dropped: int) -> Any:
        bounded = BoundedList.from_seq(None, items)
        bounded.dropped = dropped
        return bounded

    events = [
        SdkEvent(event.name, mapping(event.attributes, dropped), event.timestamp)
        for event, dropped in zip(span.events, counts.event_attributes, strict=True)
    ]
    links = [
        SdkLink(link.context, mapping(link.attributes, dropped))
        for link, dropped in zip(span.links, counts.link_attributes, strict=True)
    ]
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=mapping(span.attributes, counts.attributes),
        events=sequence(events, counts.events),
        links=sequence(links, counts.links),
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _agrees(encode: Callable[[Sequence[Span]], Any] = encode_request) -> bool:
    """Whether our encoder and the installed SDK's make the same message of a sample."""
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import (  # noqa: PLC0415
            encode_spans,
        )

        spans = _sample()
        agrees = encode(spans) == encode_spans(readable_spans(spans))
    except Exception as error:  # whatever another SDK version does, its own encoder still works
        _log.warning("the fast OTLP encoder does not fit this OpenTelemetry SDK: %s", error)
        return False
    if not agrees:
        _log.warning("the fast OTLP encoder differs from this OpenTelemetry SDK's: not used")
    return agrees


def _sample() -> list[Span]:
    resource = Resource(attributes={"service.name": "pd-gateway", "process.pid": 1})
    return [
        Span(
            trace_id="0af7651916cd43dd8448eb211c80319c",
            span_id="b7ad6b7169203331",
            parent_id="00f067aa0ba902b7",
            name="chat sample",
            kind=SpanKind.SERVER,
            start_ns=1_000,
            end_ns=2_000,
            resource=resource,
            attributes={
                "pd.span": "request",
                "text": "é",
                "int": -1,
                "float": 0.5,
                "bool": True,
                "list": ("a", "b"),
            },
            events=(Event(name="pd.wait", time_ns=1_500, attributes={"n": 1}),),
            links=(Link(trace_id="a" * 32, span_id="b" * 16, attributes={"pd.link": "x"}),),
            status=StatusCode.ERROR,
            status_message="timeout",
            trace_state="vendor=1",
        )
    ]
