"""Exports finished requests as the standard OTEL_* variables say; never holds up the agent.

Owns which exporters run, what is sampled, and a bounded queue with a thread for each exporter. The
exporters themselves are the SDK's (`pdtrace.export_targets`).

Variables, beyond those that the SDK's exporters read by themselves (headers, timeout in seconds,
compression, certificates, OTEL_EXPORTER_OTLP_INSECURE):

    OTEL_SDK_DISABLED              true: nothing is exported
    OTEL_TRACES_EXPORTER           otlp, console, none; several with commas. Unset: otlp if an
                                   endpoint is set, else none
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT
                                   HTTP: the first is used as it is, but for a URL without a path,
                                   which gets /v1/traces; the second gets it unless it ends so
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL
                                   grpc or http/protobuf. Unset: grpc for port 4317, else HTTP
    OTEL_TRACES_SAMPLER(_ARG)      parentbased_always_on when unset: the caller's decision counts.
                                   Requests that are not sampled stay in the local files: these are
                                   the flight recorder, and leave the host with nobody
    OTEL_BSP_MAX_QUEUE_SIZE        spans queued for each exporter (65536)
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE spans sent at once (512)
    OTEL_BSP_SCHEDULE_DELAY        milliseconds before an incomplete batch is sent (1000)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from pdtrace import semconv as a
from pdtrace.collected import CollectedRequest
from pdtrace.errors import PdtraceError
from pdtrace.spans import Span
from pdtrace.stages import ROOT_SPAN

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from pdtrace.export_targets import Target

DEFAULT_HTTP_ENDPOINT = "http://localhost:4318/v1/traces"
DEFAULT_GRPC_ENDPOINT = "http://localhost:4317"
TRACES_PATH = "/v1/traces"
GRPC_PORT = 4317

MAX_QUEUED_SPANS = 65_536
MAX_BATCH_SPANS = 512
BATCH_DELAY_S = 1.0
MAX_TRIES = 5
"""Sends of one batch that nobody takes, unless the queue overflows or the agent exits before."""
MAX_BACKOFF_S = 5.0

_PROTOCOLS = ("grpc", "http/protobuf")
_log = logging.getLogger(__name__)


class ExportConfigError(PdtraceError):
    """OTEL_* variables contradict each other or name something that does not exist."""

    code: ClassVar[str] = "bad_export_config"


@dataclass(frozen=True, slots=True)
class OtlpDestination:
    """Where OTLP goes. `endpoint` is complete: for HTTP with its path."""

    protocol: str
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of an export queue: spans, spans, seconds."""

    max_queued: int = MAX_QUEUED_SPANS
    max_batch: int = MAX_BATCH_SPANS
    delay_s: float = BATCH_DELAY_S


def exporter_from_env() -> ExportQueue | None:
    """The queue that the process's OTEL_* variables ask for; None when nothing is to be exported.

    Logs the exporters and their endpoints. Raises ExportConfigError with what was set and what
    is possible.
    """
    environ = os.environ
    names = exporter_names(environ)
    if not names:
        _log.info("no OTLP endpoint is set: traces are not exported")
        return None
    limits = limits_from_env(environ)
    sampler = _sampler()
    targets = [_make_target(name, environ) for name in names]
    for target in targets:
        _log.info("exporting traces with %s", target.name)
    return ExportQueue(targets, limits=limits, sampler=sampler)


def exporter_names(environ: Mapping[str, str]) -> list[str]:
    """Exporters asked for: `otlp`, `console`. Raises ExportConfigError for others."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    given = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not given:
        return ["otlp"] if _endpoint_given(environ)[1] else []
    names = [name.strip().lower() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in ("otlp", "console", "none"):
            raise ExportConfigError(
                f"OTEL_TRACES_EXPORTER is {given!r}: {name!r} is none of otlp, console, none"
            )
    return [name for name in dict.fromkeys(names) if name != "none"]


def otlp_destination(environ: Mapping[str, str]) -> OtlpDestination:
    """Protocol and complete endpoint. Raises ExportConfigError when they cannot be meant."""
    variable, endpoint = _endpoint_given(environ)
    protocol = _protocol(environ, endpoint)
    if not endpoint:
        default = DEFAULT_GRPC_ENDPOINT if protocol == "grpc" else DEFAULT_HTTP_ENDPOINT
        return OtlpDestination(protocol, default)
    if protocol == "grpc":
        _check_grpc(variable, endpoint)
        return OtlpDestination(protocol, endpoint)
    url = _split(variable, endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ExportConfigError(
            f"{variable} is {endpoint!r}: OTLP over HTTP needs a URL such as "
            f"http://localhost:4318 (or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc)"
        )
    path = url.path.rstrip("/")
    specific = variable == "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    # Nobody receives OTLP at "/": a URL without a path means the receiver's usual one.
    if not path or not (specific or path.endswith(TRACES_PATH)):
        path += TRACES_PATH
    return OtlpDestination(protocol, urlunsplit(url._replace(path=path)))


def limits_from_env(environ: Mapping[str, str]) -> QueueLimits:
    """Bounds from OTEL_BSP_*. Raises ExportConfigError for what is no positive integer."""
    max_queued = _positive(environ, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED_SPANS)
    return QueueLimits(
        max_queued=max_queued,
        max_batch=min(
            _positive(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_BATCH_SPANS), max_queued
        ),
        delay_s=_positive(environ, "OTEL_BSP_SCHEDULE_DELAY", round(BATCH_DELAY_S * 1e3)) / 1e3,
    )


def _endpoint_given(environ: Mapping[str, str]) -> tuple[str, str]:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        value = environ.get(variable, "").strip()
        if value:
            return variable, value
    return "OTEL_EXPORTER_OTLP_ENDPOINT", ""


def _protocol(environ: Mapping[str, str], endpoint: str) -> str:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = environ.get(variable, "").strip().lower()
        if not value:
            continue
        if value not in _PROTOCOLS:
            raise ExportConfigError(
                f"{variable} is {value!r}: pdtrace exports with {' or '.join(_PROTOCOLS)}"
            )
        return value
    variable, _ = _endpoint_given(environ)
    with_scheme = endpoint if "://" in endpoint else f"//{endpoint}"
    return "grpc" if _port(_split(variable, with_scheme)) == GRPC_PORT else "http/protobuf"


def _check_grpc(variable: str, endpoint: str) -> None:
    if "://" not in endpoint:
        return
    scheme = _split(variable, endpoint).scheme
    if scheme not in ("http", "https"):
        raise ExportConfigError(
            f"{variable} is {endpoint!r}: OTLP over gRPC needs http://host:4317 (plaintext), "
            "https://host:4317 (TLS) or host:4317"
        )


def _split(variable: str, endpoint: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        _ = url.port
    except ValueError as error:
        raise ExportConfigError(f"{variable} is {endpoint!r}: {error}") from None
    return url


def _port(url: SplitResult) -> int | None:
    return url.port


def _positive(environ: Mapping[str, str], variable: str, default: int) -> int:
    value = environ.get(variable, "").strip()
    if not value:
        return default
    if not value.isdecimal() or int(value) == 0:
        raise ExportConfigError(f"{variable} is {value!r}: it must be a positive integer")
    return int(value)


def _make_target(name: str, environ: Mapping[str, str]) -> Target:
    from pdtrace import export_targets  # noqa: PLC0415 the SDK's exporters take 200 ms to import

    if name == "console":
        return export_targets.console_target()
    destination = otlp_destination(environ)
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"):
        path = environ.get(variable)
        if path and not Path(path).is_file():
            raise ExportConfigError(f"{variable} is {path!r}: there is no such file")
    make = (
        export_targets.otlp_grpc_target
        if destination.protocol == "grpc"
        else export_targets.otlp_http_target
    )
    try:
        return make(destination.endpoint)
    except Exception as error:  # the SDK raises whatever its parsing of OTEL_* raises
        raise ExportConfigError(
            f"cannot export with OTLP ({destination.protocol}) to {destination.endpoint}: {error}"
        ) from error


def _sampler() -> Sampler:
    try:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 60 ms

        return TracerProvider(shutdown_on_exit=False).sampler
    except Exception as error:  # the SDK raises whatever its parsing of OTEL_* raises
        raise ExportConfigError(f"the OpenTelemetry SDK refuses the settings: {error}") from error


class ExportQueue:
    """Queues finished requests for each target and sends them from threads of its own.

    A request is queued whole or dropped whole. submit() neither waits nor raises. What nobody
    takes is kept while there is room and sent again, so that a collector may restart.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        limits: QueueLimits | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._sampler = sampler
        self._unsampled = 0
        self._lanes = [_Lane(target, limits or QueueLimits()) for target in targets]

    def submit(self, request: CollectedRequest, spans: Sequence[Span]) -> None:
        """Queues a request's spans if they are sampled."""
        if not self._is_sampled(request, spans):
            self._unsampled += len(spans)
            return
        for lane in self._lanes:
            lane.put(list(spans))

    def close(self, timeout_s: float) -> None:
        """Sends what is queued for at most `timeout_s`; the rest is dropped, counted and logged."""
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.begin_closing()
        for lane in self._lanes:
            lane.finish_closing(deadline_s)

    def totals(self) -> Mapping[str, int]:
        """Spans exported, dropped (by reason) and not sampled."""
        return {
            "spans exported": sum(lane.exported for lane in self._lanes),
            "spans dropped": sum(lane.dropped for lane in self._lanes),
            "spans unsampled": self._unsampled,
        }

    def _is_sampled(self, request: CollectedRequest, spans: Sequence[Span]) -> bool:
        if self._sampler is None:
            return request.sampled
        if request.client_parent_span_id is None and not request.sampled:
            return False
        try:
            return _decide(self._sampler, request, spans)
        except Exception as error:  # a sampler that fails must not cost the traces
            _say_once(f"the sampler failed, everything is exported: {error}")
            return True


def _decide(sampler: Sampler, request: CollectedRequest, spans: Sequence[Span]) -> bool:
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace import (  # noqa: PLC0415
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        TraceFlags,
        set_span_in_context,
    )

    trace_id = int(request.trace_id, 16)
    context = Context()
    if request.client_parent_span_id is not None:
        flags = TraceFlags(TraceFlags.SAMPLED if request.sampled else TraceFlags.DEFAULT)
        parent = SpanContext(trace_id, int(request.client_parent_span_id, 16), True, flags)
        context = set_span_in_context(NonRecordingSpan(parent), context)
    root = next((s for s in spans if s.attributes.get(a.SPAN.key) == ROOT_SPAN), None)
    result = sampler.should_sample(
        context,
        trace_id,
        root.name if root else "",
        SpanKind.SERVER,
        dict(root.attributes) if root else {},
    )
    return result.decision.is_sampled()


class _Lane:
    """One target, its queue and its thread."""

    def __init__(self, target: Target, limits: QueueLimits) -> None:
        self.exported = 0
        self.dropped = 0
        self._target = target
        self._limits = limits
        self._queue: deque[list[Span]] = deque()
        self._num_queued = 0
        self._num_sending = 0
        self._overflowing = False
        self._failing = False
        self._closing = threading.Event()
        self._abandoned = False
        self._changed = threading.Condition()
        # A daemon: a send that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="pdtrace-export", daemon=True)
        self._thread.start()

    def put(self, spans: list[Span]) -> None:
        with self._changed:
            if self._closing.is_set():
                self.dropped += len(spans)
                first = False
            elif self._num_queued + len(spans) > self._limits.max_queued:
                self.dropped += len(spans)
                first = not self._overflowing
                self._overflowing = True
            else:
                first = False
                self._queue.append(spans)
                self._num_queued += len(spans)
                self._changed.notify()
        if first:
            _log.warning(
                "%s does not keep up: %d spans are waiting, further ones are dropped and counted",
                self._target.name,
                self._num_queued,
            )

    def begin_closing(self) -> None:
        with self._changed:
            self._closing.set()
            self._changed.notify()

    def finish_closing(self, deadline_s: float) -> None:
        self._thread.join(max(deadline_s - time.monotonic(), 0))
        self._abandoned = True
        _guarded(self._target.shutdown)
        self._thread.join(0.1)
        with self._changed:
            unsent = self._num_queued + self._num_sending
            self.dropped += unsent
            self._queue.clear()
            self._num_queued = self._num_sending = 0
        if unsent:
            _log.warning("%s took too long: %d spans were not exported", self._target.name, unsent)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._send(batch)

    def _next_batch(self) -> list[Span] | None:
        """Waits for a full batch or the delay; None when closing and empty, or abandoned."""
        limits = self._limits
        with self._changed:
            while not self._queue:
                if self._closing.is_set():
                    return None
                self._changed.wait()
            due_s = time.monotonic() + limits.delay_s
            while self._num_queued < limits.max_batch and not self._closing.is_set():
                if not self._changed.wait(max(due_s - time.monotonic(), 0)):
                    break
            if self._abandoned:
                return None
            batch: list[Span] = []
            while self._queue and (
                not batch or len(batch) + len(self._queue[0]) <= limits.max_batch
            ):
                batch += self._queue.popleft()
            self._num_queued -= len(batch)
            self._num_sending = len(batch)
            return batch

    def _send(self, batch: list[Span]) -> None:
        for number in range(1, MAX_TRIES + 1):
            try:
                sent, reason = self._target.send(batch)
            except Exception as error:  # an exporter's bug costs its batch, not the thread
                sent, reason = None, f"{type(error).__name__}: {error}"
            if self._abandoned:
                return
            if sent is not None and sent.name == "OK":
                self._sent(len(batch))
                return
            self._say_failing(reason)
            if sent is None or sent.name == "REFUSED" or number == MAX_TRIES:
                break
            self._closing.wait(min(0.5 * 2**number, MAX_BACKOFF_S))
            if self._abandoned:
                return
        with self._changed:
            self.dropped += len(batch)
            self._num_sending = 0

    def _sent(self, num_spans: int) -> None:
        with self._changed:
            self.exported += num_spans
            self._num_sending = 0
            recovered = self._failing or self._overflowing
            self._failing = self._overflowing = False
            dropped = self.dropped
        if recovered:
            _log.warning("%s takes spans again; %d were dropped so far", self._target.name, dropped)

    def _say_failing(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            _log.error("%s does not take spans: %s", self._target.name, reason or "no reason given")


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)


def _guarded(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # nothing that an exporter does at its end may stop the agent's
        _log.warning("an exporter failed at its end: %s", error)
