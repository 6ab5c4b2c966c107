"""What a running server has recorded so far: waits until a request is written, reads its spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from pdtrace.errors import SourceError
from pdtrace.spans import Span
from pdtrace.stages import ROOT_SPAN
from tests.support.server import RunningServer

WAIT_S = 60.0


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
    """Raises AssertionError when `condition` does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.02)


def is_root(span: Span) -> bool:
    """Whether this is a request's first span."""
    return span.attributes.get(a.SPAN.key) == ROOT_SPAN


def spans_by_request(server: RunningServer) -> Mapping[str, Sequence[Span]]:
    """Spans of every request written so far, by root span id."""
    try:
        traces = read_source(server.run_dir).traces
    except SourceError:  # nothing is there yet
        return {}
    found: dict[str, list[Span]] = {}
    for trace in traces:
        spans = {span.span_id: span for span in trace.spans}
        for span in trace.spans:
            top = span
            while top.parent_id in spans:
                top = spans[top.parent_id]
            found.setdefault(top.span_id, []).append(span)
    return found


def recorded(server: RunningServer, request_id: str, *, count: int = 1) -> list[list[Span]]:
    """Spans of each of the `count` requests with this id, root first, once all are written."""
    found: list[list[Span]] = []

    def written() -> bool:
        found[:] = [
            sorted(spans, key=lambda span: not is_root(span))
            for spans in spans_by_request(server).values()
            if any(
                is_root(span) and span.attributes[a.REQUEST_ID.key] == request_id for span in spans
            )
        ]
        return len(found) >= count

    wait_for(written, f"{count} recorded requests {request_id!r}")
    return found


def spans_of(server: RunningServer, request_id: str) -> list[Span]:
    """Spans of the one request with this id, root first, once it is written."""
    (spans,) = recorded(server, request_id)
    return spans


def requests_in_flight(server: RunningServer, **parameters: str) -> list[dict[str, Any]]:
    """What the agent says of requests that have not finished. An agent that was just started
    answers a little later than it is said to be there: it is waited for."""
    url = f"{server.state['agent_url']}/inflight"
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            answer = httpx.get(url, params=parameters, timeout=WAIT_S, trust_env=False)
        except httpx.TransportError:
            assert time.monotonic() < deadline, f"no agent answers at {url}"
            time.sleep(0.05)
        else:
            return answer.raise_for_status().json()["requests"]


def in_flight(server: RunningServer, request_id: str) -> dict[str, Any] | None:
    """What the agent says of a request that has not finished."""
    return next(iter(requests_in_flight(server, id=request_id)), None)
