"""The OpenTelemetry resource of a recording process, from what its ring's header says.

Owns which resource attributes every span has. The recording process's own settings win: its
OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME and what the program gave its recorder; then the agent's
OTEL_RESOURCE_ATTRIBUTES add what is missing, except who the process is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from pdtrace import __version__
from pdtrace import semconv as a
from pdtrace.assembly.collected import Process
from pdtrace.otlp.json_lines import SCOPE_NAME
from pdtrace.recorder import resource_from_env
from pdtrace.ring import RingIdentity
from pdtrace.spans import AttrValue, Resource

DEFAULT_NAMESPACE = "pdtrace"

_IDENTITY = frozenset(
    {"service.name", "service.instance.id", "host.id", "host.name", "process.pid"}
)


def process_of(identity: RingIdentity, environ: Mapping[str, str] = os.environ) -> Process:
    """The recorder of a ring, as assembly knows it."""
    return Process(
        role=identity.role,
        instance=identity.instance,
        clock_id=f"{identity.host_id}/{identity.boot_id}",
        anchor=identity.anchor,
        resource=resource_of(identity, environ),
    )


def resource_of(identity: RingIdentity, environ: Mapping[str, str] = os.environ) -> Resource:
    """Resource attributes of a recording process."""
    added = {k: v for k, v in resource_from_env(environ).items() if k not in _IDENTITY}
    attributes: dict[str, AttrValue] = {
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": _sdk_version(),
        "telemetry.distro.name": SCOPE_NAME,
        "telemetry.distro.version": __version__,
        "service.namespace": DEFAULT_NAMESPACE,
        "service.version": __version__,
        **added,
        **identity.resource,
        "service.name": identity.service_name,
        "service.instance.id": identity.instance,
        "host.id": identity.host_id,
        "host.name": identity.host_name,
        "process.pid": identity.pid,
        a.ROLE.key: identity.role.value,
    }
    if identity.service_namespace:
        attributes["service.namespace"] = identity.service_namespace
    if identity.service_version:
        attributes["service.version"] = identity.service_version
    return Resource(attributes=attributes)


@cache
def _sdk_version() -> str:
    try:
        return version("opentelemetry-sdk")
    except PackageNotFoundError:
        return "0"
