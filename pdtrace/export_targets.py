"""The OpenTelemetry SDK's exporters as targets of the export queue.

Owns the one place where SDK exporters are built and called. Settings beyond the endpoint (headers,
timeout, compression, certificates) are read by the SDK's own constructors from the environment.
OTLP takes the fast encoder through hooks of the SDK's exporters that are not public; each is
checked once, with the encoder, and the compatible path is taken when something differs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from pdtrace.otlp_proto import encode_request, readable_spans
from pdtrace.spans import Event, Link, Resource, Span, SpanKind, StatusCode

RETRYABLE_HTTP = frozenset({429, 502, 503, 504})

_SDK_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)
_log = logging.getLogger(__name__)


class Sent(Enum):
    """What became of a batch."""

    OK = "ok"
    RETRY = "retry"  # nobody took it; may be sent again
    REFUSED = "refused"  # sending it again cannot help


class Target(Protocol):
    """A place that takes spans. send() belongs to one thread; shutdown() may be called from another
    and makes a send() in progress return soon."""

    name: str

    def send(self, spans: Sequence[Span]) -> tuple[Sent, str]:
        """What became of the batch, and the reason if it was not taken."""
        ...

    def shutdown(self) -> None:
        """Lets go of connections."""
        ...


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

    def __init__(self, name: str, exporter: Any) -> None:
        self.name = name
        self._exporter = exporter
        self._said = _LastMessage()
        self._shut = False

    def send(self, spans: Sequence[Span]) -> tuple[Sent, str]:
        with self._quietly():
            return self._send(spans)

    def shutdown(self) -> None:
        if not self._shut:
            self._shut = True
            with self._quietly():
                self._exporter.shutdown()

    def _send(self, spans: Sequence[Span]) -> tuple[Sent, str]:
        return self._outcome(self._exporter.export(readable_spans(spans)))

    def _outcome(self, result: Any) -> tuple[Sent, str]:
        # The SDK does not say why; it has tried again by itself already.
        return (Sent.OK, "") if result.name == "SUCCESS" else (Sent.RETRY, self._said.text)

    @contextmanager
    def _quietly(self) -> Generator[None]:
        loggers = [logging.getLogger(name) for name in _SDK_LOGGERS]
        for logger in loggers:
            logger.addFilter(self._said)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(self._said)


class _FastHttpTarget(_SdkTarget):
    """The SDK's HTTP exporter with its client fed by our encoder."""

    def _send(self, spans: Sequence[Span]) -> tuple[Sent, str]:
        result = self._exporter._client.export(encode_request(spans).SerializeToString())
        status: int | None = result.status_code
        if result.success and (status is None or status < 300):
            return Sent.OK, ""
        reason = " ".join(str(part) for part in (status, result.reason or result.error) if part)
        if status is not None and status not in RETRYABLE_HTTP:
            if status in (404, 405):
                reason += ": is this the address of an OTLP/HTTP receiver?"
            elif 300 <= status < 400:
                reason += ": redirects are not followed"
            return Sent.REFUSED, reason
        return Sent.RETRY, reason or self._said.text


class _FastGrpcTarget(_SdkTarget):
    """The SDK's gRPC exporter with its translation step replaced."""

    def _send(self, spans: Sequence[Span]) -> tuple[Sent, str]:
        return self._outcome(self._exporter.export(spans))


def otlp_http_target(endpoint: str) -> Target:
    """OTLP over HTTP with protobuf; `endpoint` is the full URL, path included."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 175 ms
        OTLPSpanExporter,
    )

    exporter = OTLPSpanExporter(endpoint=endpoint)
    name = f"OTLP over HTTP to {endpoint}"
    if callable(getattr(getattr(exporter, "_client", None), "export", None)) and _agrees():
        return _FastHttpTarget(name, exporter)
    return _SdkTarget(name, exporter)


def otlp_grpc_target(endpoint: str) -> Target:
    """OTLP over gRPC; `http://` is plaintext, `https://` TLS, else OTEL_EXPORTER_OTLP_INSECURE."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 175 ms
        OTLPSpanExporter,
    )

    class FastExporter(OTLPSpanExporter):
        def _translate_data(self, data: Any) -> Any:
            return encode_request(data)

    hooked = callable(getattr(OTLPSpanExporter, "_translate_data", None)) and _agrees()
    exporter = (FastExporter if hooked else OTLPSpanExporter)(endpoint=endpoint)
    name = f"OTLP over gRPC to {endpoint}"
    return _FastGrpcTarget(name, exporter) if hooked else _SdkTarget(name, exporter)


def console_target() -> Target:
    """The SDK's console exporter: JSON on stdout, for a look at single spans."""
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

    return _SdkTarget("the console", ConsoleSpanExporter(out=sys.stdout))


def sdk_target(name: str, exporter: Any) -> Target:
    """Any `opentelemetry.sdk.trace.export.SpanExporter`, on the compatible path."""
    return _SdkTarget(name, exporter)


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
