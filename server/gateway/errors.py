"""Ends of a request that only the gateway knows, as exceptions that carry what to answer.

Part of the tree in `server.errors`; each has its stable `code` and HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdtrace.stages import Outcome
from server.errors import (
    DeadlineExceeded,
    HandshakeMismatch,
    InvalidRequest,
    Overloaded,
    RequestError,
    ServerError,
    TransferFailed,
    WorkerLost,
)
from server.gateway.pairing import Refusal
from server.wire.messages import LegClosed

CLIENT_DISCONNECTED = "client_disconnected"
CLIENT_STALLED = "client_stalled"
NO_WORKER = "no_worker"
QUEUE_TIMEOUT = "queue_timeout"
SHUTTING_DOWN = "shutting_down"
STREAM_INCOMPLETE = "stream_incomplete"
GATEWAY = "gateway"
CLIENT = "client"
MAX_NAMED = 4
"""Refused pairings that one message names."""
NO_PAIR_RETRY_S = 5
"""Retry-After where somebody has to mend or restart a worker first."""


class ClientGone(RequestError):  # noqa: N818 -- an end, not an error
    """The client closed its connection, or stopped reading. Nobody is left to answer."""

    code = CLIENT_DISCONNECTED

    def __init__(self, message: str, *, code: str = CLIENT_DISCONNECTED) -> None:
        super().__init__(message)
        self.code = code


class QueueTimedOut(DeadlineExceeded):
    """The request waited in the gateway's queue for longer than `gateway_queue_s`."""

    http_status = 503

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, stage="gateway.queue")
        self.code = code


class WorkerVanished(WorkerLost):
    """A worker is gone, or takes no messages; `by` names it."""

    def __init__(self, message: str, *, by: str) -> None:
        super().__init__(message)
        self.by = by


class RequestLost(RequestError):  # noqa: N818 -- named after what happened, as its siblings are
    """A worker is well and did not get its part of the request; `by` names it."""

    code = "request_lost"
    http_status = 502

    def __init__(self, message: str, *, by: str) -> None:
        super().__init__(message)
        self.by = by


class NoPair(Overloaded):
    """No pair of workers can take the request, and waiting for one would be in vain."""

    @classmethod
    def refused(cls, refusals: Sequence[Refusal]) -> NoPair:
        """Every pairing of the workers that are there was refused."""
        named = "; ".join(refusal.sentence for refusal in refusals[:MAX_NAMED])
        more = f"; and {len(refusals) - MAX_NAMED} more" if len(refusals) > MAX_NAMED else ""
        return cls(
            f"No two workers fit together: {named}{more}.",
            code=HandshakeMismatch.code,
            retry_after_s=NO_PAIR_RETRY_S,
        )


class LegFailed(RequestError):  # noqa: N818 -- named after what happened, as its siblings are
    """A worker ended its leg without completing it.

    outcome   `failed`, `timed_out`, `cancelled`, … as the worker said
    by        who ended it
    """

    def __init__(self, message: str, *, code: str, outcome: Outcome, by: str) -> None:
        super().__init__(message)
        self.code = code
        self.outcome = outcome
        self.by = by
        self.http_status = _STATUS_BY_CODE.get(code, _STATUS_BY_OUTCOME.get(outcome, 502))

    @classmethod
    def incomplete(cls, instance: str) -> LegFailed:
        """Every leg completed, and yet the last token never came."""
        return cls(
            f"{instance} closed the request before its last token.",
            code=STREAM_INCOMPLETE,
            outcome=Outcome.FAILED,
            by=instance,
        )

    @classmethod
    def of(cls, closed: LegClosed) -> LegFailed:
        """The failure that `closed` reports."""
        try:
            outcome = Outcome(closed.outcome)
        except ValueError:
            outcome = Outcome.FAILED
        return cls(
            closed.message or f"{closed.instance} closed the request: {closed.reason}",
            code=closed.reason or "request_failed",
            outcome=outcome,
            by=closed.by or closed.instance,
        )


AttemptFailure = LegFailed | WorkerVanished | RequestLost
"""What ends an attempt, and need not end its request. `by`: the process with which it ended."""

_STATUS_BY_CODE: Mapping[str, int] = {
    error.code: error.http_status
    for error in (HandshakeMismatch, DeadlineExceeded, TransferFailed, WorkerLost, Overloaded)
} | {
    SHUTTING_DOWN: 503,
    "draining": 503,
    "transfer_stopping": 503,
    "invalid_request": 400,
    "context_length": 400,
    "kv_capacity": 400,
}
_STATUS_BY_OUTCOME: Mapping[str, int] = {
    Outcome.TIMED_OUT: 504,
    Outcome.FAILED: 502,
    Outcome.LOST: 502,
    Outcome.CANCELLED: 502,
    Outcome.REJECTED: 503,
}


USUAL_ENDS: Sequence[tuple[Outcome, str]] = (
    (Outcome.COMPLETED, ""),
    (Outcome.CANCELLED, CLIENT_DISCONNECTED),
    (Outcome.TIMED_OUT, DeadlineExceeded.code),
    (Outcome.TIMED_OUT, NO_WORKER),
    (Outcome.TIMED_OUT, QUEUE_TIMEOUT),
    (Outcome.REJECTED, InvalidRequest.code),
    (Outcome.REJECTED, Overloaded.code),
    *(
        (Outcome.FAILED, code)
        for code in (
            *(WorkerLost.code, RequestLost.code, TransferFailed.code, HandshakeMismatch.code),
            *(ServerError.code, STREAM_INCOMPLETE, SHUTTING_DOWN),
        )
    ),
)
"""Outcomes with the reasons that they mostly have."""


def outcome_of(error: RequestError, *, dispatched: bool) -> tuple[Outcome, str]:
    """The terminal outcome that `error` means, and who ended the request."""
    if isinstance(error, ClientGone):
        return Outcome.CANCELLED, CLIENT
    if isinstance(error, DeadlineExceeded):
        return Outcome.TIMED_OUT, GATEWAY
    if isinstance(error, LegFailed):
        # A worker's cancel that nobody here asked for is a failure of this request.
        failed = error.outcome in (Outcome.CANCELLED, Outcome.COMPLETED)
        return (Outcome.FAILED if failed else error.outcome), error.by
    if isinstance(error, InvalidRequest):
        return Outcome.REJECTED, CLIENT
    if isinstance(error, Overloaded) and not dispatched:
        return Outcome.REJECTED, GATEWAY
    return Outcome.FAILED, GATEWAY
