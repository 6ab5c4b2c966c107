"""Typed, forgiving reads of recorded attribute values.

Values may come from any writer: a number may arrive as text, a text may be empty.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdtrace.semconv import ROLE, Attr
from pdtrace.spans import AttrValue, Resource, Span
from pdtrace.stages import Role

_LEAST, _MOST = -(2**63), 2**63 - 1
_MAX_DIGITS = 20
_ROLES = {role.value: role for role in Role}
_ROLES_BY_SERVICE = {role.service_name: role for role in Role}


def text(attributes: Mapping[str, AttrValue], attr: Attr) -> str | None:
    """An attribute as text; None if it is absent or empty. Lists are joined with commas."""
    value = attributes.get(attr.key)
    if value is None or value == "":
        return None
    if type(value) is str:  # nearly always; this runs for every span
        return value
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or None
    return str(value)


def integer(attributes: Mapping[str, AttrValue], attr: Attr) -> int | None:
    """An attribute as an integer; None if it is absent or no integer of 64 bits."""
    value = attributes.get(attr.key)
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    elif isinstance(value, str):
        try:
            value = int(value) if len(value) <= _MAX_DIGITS else None
        except ValueError:
            return None
    return value if isinstance(value, int) and _LEAST <= value <= _MOST else None


def role_of(span: Span) -> Role | None:
    """The recorder's role: as it says, else the one whose usual `service.name` it has."""
    resource = span.resource
    said = resource.attributes.get(ROLE.key)
    return _ROLES.get(str(said)) if said else _ROLES_BY_SERVICE.get(resource.service_name)


def host_id(span: Span) -> str | None:
    """`host.id` of the recorder; spans of one host share a monotonic clock."""
    return host_of(span.resource)


def host_of(resource: Resource) -> str | None:
    """The same of a resource."""
    value = resource.attributes.get("host.id")
    return None if value is None or value == "" else str(value)
