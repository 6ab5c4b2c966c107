"""Whether a request is tried again after an attempt failed. Pure.

Owns the table of reasons: which are safe to try again, whom a further attempt avoids, and what else
the failure says. An attempt is tried again only while nothing was written to the client: two
attempts are never stitched together.

Safe is a reason that lies with the workers on this attempt's way, not with the request, and after
which nothing of the attempt can reach the client. A step that raised is not: the request itself may
be what no engine survives, and would take a second worker with it. A deadline is not: the time is
spent, and under overload a retry is one more request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Blame(StrEnum):
    """Who is to be avoided by a further attempt."""

    NOBODY = "nobody"
    WORKER = "worker"  # who ended the leg
    PARTNER = "partner"  # the other one of the two: who ended the leg could not reach it
    PAIR = "pair"  # both
    TRANSFER = "transfer"  # the transfer processes: without them there is no pair at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What follows from a reason that is safe to try again.

    blame      who is avoided where there is a choice
    elsewhere  with the same workers it would end the same way: others, or no further attempt
    doubt      who is blamed gets no work at all until its next heartbeat
    refuse     if the prefill worker says so, whose handshake it is, the pairing is remembered, and
               chosen for nobody
    """

    blame: Blame = Blame.NOBODY
    elsewhere: bool = False
    doubt: bool = False
    refuse: bool = False


_COPY_FAILED = Rule(blame=Blame.PAIR)
_FULL = Rule(blame=Blame.WORKER, elsewhere=True)
_LEAVING = Rule(blame=Blame.WORKER, doubt=True)
_PARTNER_GONE = Rule(blame=Blame.PARTNER, doubt=True)
_TRANSFER_GONE = Rule(blame=Blame.TRANSFER, doubt=True)

RULES: Mapping[str, Rule | None] = MappingProxyType(
    {
        # a worker or the transfer process died, starts again or stops
        "worker_lost": _PARTNER_GONE,
        "peer_unreachable": _PARTNER_GONE,
        "shutting_down": _LEAVING,
        "draining": _LEAVING,
        "transfer_lost": _TRANSFER_GONE,
        "transfer_unreachable": _TRANSFER_GONE,
        "peer_lost": _TRANSFER_GONE,
        "transfer_stopping": _TRANSFER_GONE,
        "request_lost": Rule(blame=Blame.WORKER),  # it lives, but does not have its part
        "gateway_lost": Rule(),  # a worker took this gateway for dead
        # the two do not fit together
        "handshake_mismatch": Rule(blame=Blame.PAIR, refuse=True),
        "layout_mismatch": Rule(blame=Blame.PAIR, elsewhere=True),
        # a worker is full
        "overloaded": _FULL,
        "host_memory": _FULL,
        # the KV did not arrive whole: what was written is never read
        "transfer_failed": _COPY_FAILED,
        "transfer_incomplete": _COPY_FAILED,
        "transfer_timeout": _COPY_FAILED,
        "checksum_mismatch": _COPY_FAILED,
        "unauthenticated": _COPY_FAILED,
        "unknown_pool": _COPY_FAILED,
        "pool_replaced": _COPY_FAILED,
        "no_route": _COPY_FAILED,
        "bad_pages": _COPY_FAILED,
        "jobs_missing": _COPY_FAILED,
        "protocol_error": _COPY_FAILED,
        "handoff_lost": _COPY_FAILED,
        # both legs completed, but tokens of it were lost on the way
        "stream_incomplete": Rule(),
        # not safe
        "deadline_exceeded": None,
        "engine_error": None,
        "internal": None,
        "cancelled": None,
        "invalid_request": None,
        "context_length": None,
        "kv_capacity": None,
    }
)
"""By the reason of an attempt's end. What is not named is not safe."""


def rule_of(reason: str) -> Rule | None:
    """What follows from `reason`; None where another attempt is not safe."""
    return RULES.get(reason)


def may_retry(reason: str, *, attempt: int, max_retries: int, written: bool) -> bool:
    """Whether attempt number `attempt` (from 1), which ended for `reason`, is followed by another.

    written  something of the answer has gone to the client
    """
    return not written and attempt <= max_retries and rule_of(reason) is not None
