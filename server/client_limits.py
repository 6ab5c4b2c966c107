"""What clients may take of the public endpoint: time, bytes and connections.

Owns names, defaults and ranges of these settings, and their spelling on the command line; who
obeys them is the gateway's HTTP side (`server.gateway.protocol`, `connections`, `body`).
"""

from __future__ import annotations

import math

import msgspec

from server.errors import StartError

OPTION = "--client-limits"


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, bytes and counts.

    head_s            from a connection's opening to a first byte, and from there to the head's end
    body_s            from the head's end to the body's
    idle_s            between an answer and the next request
    unread_s          bytes that a client does not take; its connection is gone after that
    max_head_bytes    request line and headers
    max_headers       header fields of a request
    max_connections   open at once; one more takes the place of the longest idle, or is refused
    """

    head_s: float = 20.0
    body_s: float = 60.0
    idle_s: float = 65.0  # longer than the usual 60 s of load balancers, so that they close first
    unread_s: float = 30.0
    max_head_bytes: int = 64 * 1024
    max_headers: int = 100
    max_connections: int = 1024

    def __post_init__(self) -> None:
        for name in ("head_s", "body_s", "idle_s", "unread_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise StartError(f"{OPTION}: {name} is {value}, expected more than 0 seconds")
        for name, low in (("max_head_bytes", 1024), ("max_headers", 8), ("max_connections", 1)):
            value = getattr(self, name)
            if value < low:
                raise StartError(f"{OPTION}: {name} is {value}, expected at least {low}")


NAMES = tuple(field.name for field in msgspec.structs.fields(ClientLimits))


def parse_client_limits(option: str) -> ClientLimits:
    """Limits from `NAME=VALUE,…`; what is not named keeps its default. Raises StartError."""
    values: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in option.split(","))):
        name, _, value = item.partition("=")
        if name not in NAMES or name in values:
            raise StartError(
                f"{OPTION} {option!r}: got {item!r}, expected each of "
                f"{', '.join(f'{known}=' for known in NAMES)} at most once"
            )
        values[name] = value
    try:
        return msgspec.convert(values, ClientLimits, strict=False)
    except msgspec.ValidationError as error:
        raise StartError(f"{OPTION} {option!r}: {error}") from error
