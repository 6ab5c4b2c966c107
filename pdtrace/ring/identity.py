"""Who records: this process, its host and its OpenTelemetry resource. Knows nothing of files."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import msgspec

from pdtrace.clock import SYSTEM_CLOCK, Clock, take_anchor
from pdtrace.ring.codec import SCHEMA
from pdtrace.ring.layout import ResourceValue, RingIdentity
from pdtrace.stages import Role

HOST_ID_VARIABLE = "PDTRACE_HOST_ID"
_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def resource_from_env(environ: Mapping[str, str]) -> dict[str, ResourceValue]:
    """Resource attributes of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which wins."""
    attributes: dict[str, ResourceValue] = {}
    for item in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, separator, value = item.partition("=")
        if separator and key.strip():
            attributes[key.strip()] = unquote(value.strip())
    if environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = environ["OTEL_SERVICE_NAME"]
    return attributes


def make_identity(
    *,
    role: Role,
    instance: str,
    resource: Mapping[str, ResourceValue],
    clock: Clock = SYSTEM_CLOCK,
) -> RingIdentity:
    """Identity of this process at this instant; keys of `resource` that have a field move there.

    The host's id is PDTRACE_HOST_ID where it is set, else the resource's `host.id`, else the
    machine's. Containers of one host may share it, as they share CLOCK_MONOTONIC.
    """
    attributes = dict(resource)
    attributes.pop("service.instance.id", None)
    own_host_id = str(attributes.pop("host.id", ""))
    identity = RingIdentity(
        role=role,
        instance=instance,
        pid=os.getpid(),
        host_id=os.environ.get(HOST_ID_VARIABLE, "").strip() or own_host_id or read_host_id(),
        host_name=str(attributes.pop("host.name", "")) or socket.gethostname(),
        boot_id=read_boot_id(),
        anchor=take_anchor(clock),
        service_name=str(attributes.pop("service.name", "")) or role.service_name,
        service_namespace=str(attributes.pop("service.namespace", "")),
        service_version=str(attributes.pop("service.version", "")),
        resource=attributes,
        schema=SCHEMA,
    )
    # An environment variable may hold any bytes, as lone surrogates: no reason not to serve.
    texts = {
        name: _valid(value)
        for name, value in msgspec.structs.asdict(identity).items()
        if type(value) is str
    }
    valid_resource = {
        _valid(key): _valid(value) if isinstance(value, str) else value
        for key, value in identity.resource.items()
    }
    return msgspec.structs.replace(identity, **texts, resource=valid_resource)


def _valid(text: str) -> str:
    """Text that UTF-8 can carry: lone surrogates become `?`."""
    return text.encode(errors="replace").decode()


def read_host_id() -> str:
    """The machine's id, the same in all its processes, and over reboots where it has one.

    A container without one gets an id of its name and the boot: network addresses come and go, and
    `uuid.getnode` makes one up, in each process another, where there is none.
    """
    for path in _MACHINE_ID_FILES:
        try:
            machine_id = path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if machine_id:
            return machine_id
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()}-{read_boot_id()}").hex


def read_boot_id() -> str:
    """Id of the current boot, "" where the kernel does not say."""
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""
