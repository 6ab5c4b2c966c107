"""The public endpoint's connections: how many there may be, who makes room, what was counted.

Owns the table of open connections and the metrics of their ends; knows nothing of HTTP. A place
taken by a connection without a request is given to one that has just been opened: an idle one's
client opens another when it needs it, and one that only holds places must not keep others out.
"""

from __future__ import annotations

import logging
import resource
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

FILES_APART = 128
"""Descriptors that a gateway needs beside its clients' connections: rings, sockets, logs."""
REFUSALS_AT_ONCE = 64
"""Connections beyond the limit that may be told so at one time; those beyond are just closed."""
HEAD_GRACE_S = 1.0
"""A connection without a whole request that is younger than this is nobody's to close."""

_logger = logging.getLogger(__name__)


class End(StrEnum):
    """Why the gateway ended a connection, or refused what came over it."""

    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    UNREAD = "unread"
    EVICTED = "evicted"
    TOO_MANY = "too_many"
    HEAD_TOO_LARGE = "head_too_large"
    INVALID_HTTP = "invalid_http"


class Connection(Protocol):
    """What this table asks of one connection."""

    @property
    def without_request_since(self) -> float | None:
        """Loop time since when no request is in progress; None while one is."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a further request has come."""
        ...

    def evict(self) -> None:
        """Close at once."""
        ...


class Connections:
    """Open connections, at most `limit` and REFUSALS_AT_ONCE that are being refused."""

    def __init__(self, limit: int, registry: CollectorRegistry) -> None:
        self.limit = limit
        self._open: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._ends = Counter(
            "pd_gateway_connections_ended",
            "Connections that the gateway ended, by reason; a client's own goodbye is none.",
            ["reason"],
            registry=registry,
        )
        for reason in End:  # a series that appears with its first event hides that event
            self._ends.labels(reason)
        Gauge(
            "pd_gateway_connections", "Open connections of clients.", registry=registry
        ).set_function(lambda: len(self._open))
        Gauge(
            "pd_gateway_connections_limit", "Connections that may be open.", registry=registry
        ).set(limit)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, connection: Connection, now_s: float) -> bool:
        """Take in a connection; False when there is no place for it and nobody makes room."""
        if len(self._open) >= self.limit:
            longest = self._longest_without_request(now_s)
            if longest is None:
                self.ended(End.TOO_MANY)
                return False
            self.ended(End.EVICTED)
            self._open.discard(longest)
            longest.evict()
        self._open.add(connection)
        return True

    def may_tell(self, connection: Connection) -> bool:
        """Whether one that was refused may stay for its answer."""
        if len(self._refused) >= REFUSALS_AT_ONCE:
            return False
        self._refused.add(connection)
        return True

    def close(self, connection: Connection) -> None:
        """It is gone. Idempotent."""
        self._open.discard(connection)
        self._refused.discard(connection)

    def ended(self, reason: End) -> None:
        """Count an end."""
        self._ends.labels(reason).inc()

    def _longest_without_request(self, now_s: float) -> Connection | None:
        found: tuple[float, Connection] | None = None
        for connection in self._open:
            since_s = connection.without_request_since
            if since_s is None or (not connection.is_idle and now_s - since_s < HEAD_GRACE_S):
                continue
            if found is None or since_s < found[0]:
                found = since_s, connection
        return None if found is None else found[1]


def affordable(wanted: int) -> int:
    """How many connections this process can have: `wanted`, or what its limit of open files allows
    once that is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + REFUSALS_AT_ONCE + FILES_APART
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError) as error:
            _logger.warning("the limit of open files cannot be raised: %s", error)
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == unlimited or soft >= needed:
        return wanted
    fitting = max(1, soft - REFUSALS_AT_ONCE - FILES_APART)
    _logger.warning(
        "%d connections are allowed in place of %d: the limit of open files is %d",
        fitting,
        wanted,
        soft,
    )
    return fitting
