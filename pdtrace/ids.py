"""Trace, span, request and handoff ids. Never zero, never derived from anything else.

Every id is drawn from the kernel's generator, so there is no state in the process: `random.seed`
does not touch it, and a forked child cannot repeat its parent's ids. A draw costs under 1 µs and
happens a few times per request, in the gateway only.
"""

from __future__ import annotations

import os
from typing import Protocol

TRACE_ID_BYTES = 16
SPAN_ID_BYTES = 8


class Ids(Protocol):
    """Maker of ids; `pdtrace.testing.SequentialIds` makes predictable ones."""

    def trace_id(self) -> str:
        """32 lowercase hex digits, not all zero."""
        ...

    def span_id(self) -> str:
        """16 lowercase hex digits, not all zero."""
        ...

    def request_id(self) -> str:
        """An id for a request whose caller sent none."""
        ...

    def handoff_id(self) -> str:
        """An id for one attempt's handoff from prefill to decode."""
        ...


def new_trace_id() -> str:
    """128 random bits as 32 lowercase hex digits, not all zero."""
    return _nonzero_hex(TRACE_ID_BYTES)


def new_span_id() -> str:
    """64 random bits as 16 lowercase hex digits, not all zero."""
    return _nonzero_hex(SPAN_ID_BYTES)


def new_request_id() -> str:
    """`req-` and 96 random bits."""
    return f"req-{os.urandom(12).hex()}"


def new_handoff_id() -> str:
    """`ho-` and 64 random bits."""
    return f"ho-{os.urandom(8).hex()}"


def _nonzero_hex(num_bytes: int) -> str:
    raw = os.urandom(num_bytes)
    while not any(raw):
        raw = os.urandom(num_bytes)
    return raw.hex()


class RandomIds:
    """Ids from OS entropy."""

    trace_id = staticmethod(new_trace_id)
    span_id = staticmethod(new_span_id)
    request_id = staticmethod(new_request_id)
    handoff_id = staticmethod(new_handoff_id)


RANDOM_IDS = RandomIds()
