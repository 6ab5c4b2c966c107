"""The server's error tree. Each class has a stable `code`: error.type on spans, `code` in HTTP
bodies, a label in metrics.

ServerError
├── StartError          the server cannot start: one line, exit code 2
├── IntegrityError      bookkeeping of pages or states contradicts itself: a bug of ours
└── RequestError        one request cannot be served
    ├── InvalidRequest      400, the caller's fault
    ├── Overloaded          429/503, try again later
    ├── HandshakeMismatch   the two legs do not fit together
    ├── DeadlineExceeded    a state's deadline passed
    ├── TransferFailed      the KV did not arrive whole
    └── WorkerLost          a worker vanished while it held the request
"""

from __future__ import annotations


class ServerError(Exception):
    """Base of all errors of the server."""

    code = "internal"


class StartError(ServerError):
    """The server cannot start; the message says what was found and what to do."""

    code = "start_failed"


class IntegrityError(ServerError):
    """Bookkeeping contradicts itself (a page released twice, owned twice, lost); names the ids."""

    code = "integrity"


class RequestError(ServerError):
    """One request cannot be served; `http_status` is what the gateway answers.

    retry_after_s   for the Retry-After header of 429 and 503; None: the gateway knows best
    """

    code = "request_failed"
    http_status = 500
    retry_after_s: int | None = None


class InvalidRequest(RequestError):
    """The request is malformed or asks for what the model cannot do.

    param   name of the offending field, where there is one
    """

    code = "invalid_request"
    http_status = 400

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.http_status = status
        if code is not None:
            self.code = code


class Overloaded(RequestError):
    """No room."""

    code = "overloaded"
    http_status = 503

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int | None = None,
        status: int = 503,
        code: str = "overloaded",
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.http_status = status
        self.code = code


class HandshakeMismatch(RequestError):
    """Model, layout or protocol of the two legs differ; the message names both values."""

    code = "handshake_mismatch"
    http_status = 502


class DeadlineExceeded(RequestError):
    """A state's deadline passed. `stage` is the stage that was open."""

    code = "deadline_exceeded"
    http_status = 504

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class TransferFailed(RequestError):
    """The KV did not arrive whole."""

    code = "transfer_failed"
    http_status = 502


class WorkerLost(RequestError):
    """A worker vanished while it held the request."""

    code = "worker_lost"
    http_status = 502
