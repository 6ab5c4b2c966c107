"""Who a request is: the caller's id and trace in, the server's answer out.

Owns the header rules; knows nothing of bodies or workers.

    X-Request-Id   in: 1 to 128 printable ASCII characters, spaces only inside. Anything else is
                   replaced by a generated id, and `X-Request-Id-Replaced: true` says so, because
                   an id that was silently changed cannot be found again. Two requests may carry the
                   same id: everything inside is keyed by ids that the server makes.
    traceparent    in: continued (W3C trace context) unless callers' traces are not wanted; out:
                   names the server's root span
    X-Trace-Id     out: the trace id alone, for a look-up
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pdtrace.ids import new_request_id
from pdtrace.propagation import RequestContext, format_traceparent

RawHeaders = Iterable[tuple[bytes, bytes]]

_VALID_ID = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """`replaced`: the caller sent an id that cannot be used."""

    request_id: str
    replaced: bool = False

    @classmethod
    def of(cls, headers: RawHeaders) -> RequestIdentity:
        """The caller's id, or a generated one. Of several headers the first counts."""
        for name, value in headers:
            if name.lower() == b"x-request-id":
                if _VALID_ID.fullmatch(value.strip(b" \t")):
                    return cls(value.strip(b" \t").decode("ascii"))
                return cls(new_request_id(), replaced=True)
        return cls(new_request_id())

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """Sent with every response."""
        headers = [(b"x-request-id", self.request_id.encode("ascii"))]
        if self.replaced:
            headers.append((b"x-request-id-replaced", b"true"))
        return headers


def trace_headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    """Sent with every response to a request that has a trace."""
    parent = format_traceparent(context.trace_id, context.root_span_id, sampled=context.sampled)
    return [
        (b"x-trace-id", context.trace_id.encode("ascii")),
        (b"traceparent", parent.encode("ascii")),
    ]
