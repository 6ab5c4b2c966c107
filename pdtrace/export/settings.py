"""What the standard OTEL_* variables ask for: which exporters, to where, with which sampling.

Owns reading and checking the variables. The exporters are the SDK's (`pdtrace.export.targets`),
their queues `pdtrace.export.queue`'s.

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
                                   the flight recorder, and leave the host with nobody.
                                   always_on exports whatever the caller said
    OTEL_BSP_MAX_QUEUE_SIZE        spans queued for each exporter (65536)
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE spans sent at once (2048); fewer if they have many events
    OTEL_BSP_SCHEDULE_DELAY        milliseconds before an incomplete batch is sent (1000)
    OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT, OTEL_SPAN_EVENT_COUNT_LIMIT,
    OTEL_SPAN_LINK_COUNT_LIMIT, …  on export (`pdtrace.export.span_limits`); unset: no limit
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from pdtrace import semconv as a
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.errors import PdtraceError
from pdtrace.export.queue import BATCH_DELAY_S, MAX_BATCH_SPANS, MAX_QUEUED_SPANS, QueueLimits
from pdtrace.export.span_limits import SpanLimits
from pdtrace.export.span_limits import limits_from_env as span_limits_from_env
from pdtrace.spans import Span
from pdtrace.stages import ROOT_SPAN

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from pdtrace.export.queue import Target

DEFAULT_HTTP_ENDPOINT = "http://localhost:4318/v1/traces"
DEFAULT_GRPC_ENDPOINT = "http://localhost:4317"
TRACES_PATH = "/v1/traces"
GRPC_PORT = 4317

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
class ExportPlan:
    """What to export with. Targets hold connections, no threads: `pdtrace.export.delivery` runs
    them.

    sampler  None: the caller's decision alone
    """

    targets: Sequence[Target]
    limits: QueueLimits = field(default_factory=QueueLimits)
    sampler: Sampler | None = None

    def is_sampled(self, request: CollectedRequest, spans: Sequence[Span]) -> bool:
        """Whether a request is to be exported."""
        if self.sampler is None:
            return request.sampled
        if request.client_parent_span_id is None and not request.sampled:
            return False
        try:
            return _decide(self.sampler, request, spans)
        except Exception as error:  # a sampler that fails must not cost the traces
            _say_once(f"the sampler failed, everything is exported: {error}")
            return True


def plan_from_env(environ: Mapping[str, str] = os.environ) -> ExportPlan | None:
    """What the OTEL_* variables ask for; None when nothing is to be exported.

    The SDK reads its part from the process's environment, whatever `environ` is. Logs the exporters
    and their endpoints. Raises ExportConfigError with what was set and what is possible.
    """
    names = exporter_names(environ)
    if not names:
        _log.info("no OTLP endpoint is set: traces are not exported")
        return None
    limits = limits_from_env(environ)
    try:
        span_limits = span_limits_from_env(environ)
    except ValueError as error:
        raise ExportConfigError(str(error)) from None
    sampler = _sampler()
    targets = [_make_target(name, environ, span_limits) for name in names]
    for target in targets:
        _log.info("exporting traces with %s", target.name)
    return ExportPlan(targets=targets, limits=limits, sampler=sampler)


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


def _make_target(name: str, environ: Mapping[str, str], limits: SpanLimits | None) -> Target:
    try:
        from pdtrace.export import targets  # noqa: PLC0415 the SDK takes 200 ms to import
    except ImportError as error:
        raise _missing(error) from error
    if name == "console":
        return targets.console_target(limits)
    destination = otlp_destination(environ)
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"):
        path = environ.get(variable)
        if path and not Path(path).is_file():
            raise ExportConfigError(f"{variable} is {path!r}: there is no such file")
    make = targets.otlp_grpc_target if destination.protocol == "grpc" else targets.otlp_http_target
    try:
        return make(destination.endpoint, limits)
    except ImportError as error:
        raise _missing(error) from error
    except Exception as error:  # the SDK raises whatever its parsing of OTEL_* raises
        raise ExportConfigError(
            f"cannot export with OTLP ({destination.protocol}) to {destination.endpoint}: {error}"
        ) from error


def _sampler() -> Sampler:
    try:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 60 ms

        return TracerProvider(shutdown_on_exit=False).sampler
    except ImportError as error:
        raise _missing(error) from error
    except Exception as error:  # the SDK raises whatever its parsing of OTEL_* raises
        raise ExportConfigError(f"the OpenTelemetry SDK refuses the settings: {error}") from error


def _missing(error: ImportError) -> ExportConfigError:
    if (error.name or "").partition(".")[0] == "pdtrace":
        raise error  # our own fault, and no package to install
    return ExportConfigError(
        f"the OTEL_* variables ask for export, but a package is missing or another one ({error}): "
        "pip install opentelemetry-sdk opentelemetry-exporter-otlp, "
        "or set OTEL_TRACES_EXPORTER=none"
    )


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


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
