"""uvicorn's HTTP/1.1 protocol, with what a tracing gateway needs beside it.

Owns the instant of a request's first byte, the time a client may take to send a request's head, and
the answer to bytes that are no HTTP. Knows nothing of requests' meaning.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import InvalidRequest
from server.gateway.identity import RequestIdentity
from server.gateway.openai_bodies import error_body, json_bytes

RECEIVED_NS = "received_ns"
"""Key in the ASGI scope's state: CLOCK_MONOTONIC instant of the request's first byte."""

HEAD_TIMEOUT_S = 20.0
"""From a connection's opening, or a request's first byte, to the end of its headers."""


class GatewayProtocol(H11Protocol):
    """One connection."""

    head_timeout_s: ClassVar[float] = HEAD_TIMEOUT_S

    _head_timer: asyncio.TimerHandle | None = None
    _stamped: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as uvicorn has it
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._stamped and self.conn.their_state is h11.IDLE:
            self._stamped = True
            # The next request's scope gets a copy of this.
            self.app_state = {**self.app_state, RECEIVED_NS: time.monotonic_ns()}
            self._await_head()
        cycle: object = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._head_arrived()
            # A pipelined request was read with the one before: its time begins when it is its turn.
            self._stamped = False
            state: dict[str, Any] = {**self.app_state}
            del state[RECEIVED_NS]
            self.app_state = state

    def send_400_response(self, msg: str) -> None:
        body = json_bytes(error_body(InvalidRequest(msg, code="invalid_http")))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *RequestIdentity.of(()).response_headers(),
        ]
        try:
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # a response is under way: the connection ends in its middle
        self.transport.close()

    def _await_head(self) -> None:
        self._head_arrived()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
