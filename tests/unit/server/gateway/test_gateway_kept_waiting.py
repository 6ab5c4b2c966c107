"""A gateway that stood still says so in the traces of the requests that waited for it."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from pdtrace import semconv as a
from pdtrace.spans import Span
from tests.support.memory_traces import spans_by_request
from tests.support.whole_server import Client, WholeServer, scarce_settings

PAUSE_MS = 600
PAUSED = "process_paused"


@pytest.fixture
def server(tmp_path: Path) -> Generator[WholeServer]:
    server = WholeServer(
        tmp_path, scarce_settings(max_concurrency=1, dead_after_s=5.0, decode_pages=64)
    )
    yield server
    server.close()


def serve(server: WholeServer) -> None:
    server.run(until=lambda: not server.what_is_open(), limit_s=20.0)
    assert [(client.status, client.text) for client in server.clients] == [
        (200, client.right_text) for client in server.clients
    ]


def waits(server: WholeServer, client: Client) -> dict[str, Span]:
    """Spans of the request's trace that name a pause as what they waited for."""
    trace = spans_by_request(server.rings)[client.request_id]
    return {s.name: s for s in trace if s.attributes.get(a.WAIT_REASON.key) == PAUSED}


def check_length(span: Span) -> None:
    assert span.attributes[a.WAIT_NEEDED.key] == pytest.approx(PAUSE_MS, abs=1)


def test_request_in_the_gateways_queue(server: WholeServer) -> None:
    server.ask([3, 1, 4, 1, 5, 9], 24, stream=True)
    second = server.ask([2, 7, 1, 8, 2, 8], 6, stream=True)
    server.run(until=lambda: bool(server.clients[0].text), limit_s=5.0)
    server.pause_gateway(ms=PAUSE_MS)
    serve(server)
    trace = spans_by_request(server.rings)[second.request_id]
    (queue,) = [span for span in trace if span.name == "gateway.queue"]
    (told,) = [e for e in queue.events if e.attributes[a.WAIT_REASON.key] == PAUSED]
    assert told.attributes[a.WAIT_NEEDED.key] == pytest.approx(PAUSE_MS, abs=1)


@pytest.mark.parametrize("stream", [True, False])
def test_end_of_the_answer(server: WholeServer, stream: bool) -> None:
    client = server.ask([3, 1, 4, 1, 5, 9], 6, stream=stream)
    server.run(until=lambda: bool(client.text) or not stream, limit_s=5.0)
    server.pause_gateway(ms=PAUSE_MS)
    serve(server)
    found = waits(server, client)
    assert "gateway.finish" in found
    check_length(found["gateway.finish"])
    assert ("hop.token" in found) == (not stream)  # it all came behind the pause


def test_first_token(server: WholeServer) -> None:
    client = server.ask([3, 1, 4, 1, 5, 9], 60, stream=True)
    server.pause_gateway(ms=PAUSE_MS)
    serve(server)
    found = waits(server, client)
    assert set(found) == {"hop.token"}
    check_length(found["hop.token"])


def test_pause_in_which_nothing_waited_for_the_gateway_is_nobodys_cause(
    server: WholeServer,
) -> None:
    client = server.ask([3, 1, 4, 1, 5, 9], 120, stream=True)
    server.run(until=lambda: bool(client.text), limit_s=5.0)
    server.pause_gateway(ms=PAUSE_MS)
    serve(server)
    assert waits(server, client) == {}
    later = server.ask([1, 2, 3], 6, stream=True)
    serve(server)
    assert waits(server, later) == {}
