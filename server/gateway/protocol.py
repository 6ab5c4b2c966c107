"""uvicorn's HTTP/1.1 protocol, with what a tracing gateway needs beside it.

Owns the instant of a request's first byte, how long each phase of a connection may last, and the
answer to bytes that are no HTTP or too much of it. Knows nothing of requests' meaning.

    phase      begins                                      ends within
    HEAD       the connection opens; again: a first byte   head_s      408 if anything had come
    REQUEST    its head is complete                        (the request's own deadlines)
    LEFTOVER   answered, but its body is still coming      body_s
    IDLE       answered, nothing further has come          idle_s
    LEAVING    the last answer is sent                     LEAVING_S

A connection with unread bytes that is closed would be reset, and its last answer lost: what still
comes is read and dropped for a moment.

What was written and is not taken ends a connection in every phase, `unread_s` later. A peer that
vanished without a goodbye is noticed by the kernel: by keep-alive probes while nothing is sent, by
unacknowledged bytes otherwise.
"""

from __future__ import annotations

import asyncio
import socket
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.client_limits import ClientLimits
from server.errors import InvalidRequest, Overloaded, RequestError
from server.gateway.connections import Connections, End
from server.gateway.identity import RequestIdentity
from server.gateway.now import SYSTEM_NOW, Now
from server.gateway.openai_bodies import error_body, json_bytes
from server.gateway.responder import error_headers

RECEIVED_NS = "received_ns"
"""Key in the ASGI scope's state: CLOCK_MONOTONIC instant of the request's first byte."""

CONNECTIONS = "connections"
"""Key in the ASGI scope's state: the table in which ends of connections are counted."""

LEAVING_S = 1.0
UNREAD_MARGIN_S = 1.0
"""The one who writes gives up first, and can say why; the connection follows."""

_KERNEL_MARGIN_S = 30.0
_PROBE_AFTER_S = 30
_PROBE_EVERY_S = 10
_PROBES = 3


class Phase(Enum):
    HEAD = auto()
    REQUEST = auto()
    LEFTOVER = auto()
    IDLE = auto()
    LEAVING = auto()


class LimitedConnection(h11.Connection):
    """h11's parser that also refuses heads with too much in them, or with two lengths of a body.

    h11 bounds what it buffers, which is less than what may arrive in one piece. Of two lengths it
    believes one; a proxy in front that believes the other would take a body for a request.
    """

    def __init__(self, limits: ClientLimits) -> None:
        super().__init__(h11.SERVER, limits.max_head_bytes)
        self._limits = limits
        self.too_large = False
        """Whether the error that was raised is about size."""

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.too_large = error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request) and self._is_too_large(event):
            self.too_large = True
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        if isinstance(event, h11.Request) and _has_two_lengths(event):
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event

    def _is_too_large(self, request: h11.Request) -> bool:
        if len(request.headers) > self._limits.max_headers:
            return True
        num_bytes = len(request.target)
        num_bytes += sum(len(name) + len(value) + 4 for name, value in request.headers)
        return num_bytes > self._limits.max_head_bytes


def _has_two_lengths(request: h11.Request) -> bool:
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}


class GatewayProtocol(H11Protocol):
    """One connection. `protocol_class` binds the limits, the table of connections, the time."""

    limits: ClassVar[ClientLimits]
    table: ClassVar[Connections]
    now: ClassVar[Now]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = LimitedConnection(self.limits)
        self.app_state = {**self.app_state, CONNECTIONS: self.table}
        self._phase = Phase.HEAD
        self._phase_since_s = 0.0
        self._phase_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._stamped = False

    # -- the table's view of it ---------------------------------------------------------------

    @property
    def without_request_since(self) -> float | None:
        return self._phase_since_s if self._phase in (Phase.HEAD, Phase.IDLE) else None

    @property
    def is_idle(self) -> bool:
        return self._phase is Phase.IDLE

    def evict(self) -> None:
        self.transport.close()

    # -- events -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as uvicorn has it
        super().connection_made(transport)
        # Paused means: the kernel takes no more, for the client does not.
        transport.set_write_buffer_limits(high=0)
        _notice_vanished_peer(transport.get_extra_info("socket"), self.limits.unread_s)
        if self.table.open(self, self.loop.time()):
            self._enter(Phase.HEAD)
        else:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.close(self)
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.LEAVING:
            return
        if not self._stamped and self.conn.their_state is h11.IDLE:
            self._stamped = True
            # The next request's scope gets a copy of this.
            self.app_state = {**self.app_state, RECEIVED_NS: self.now.ns()}
            self._enter(Phase.HEAD)
        cycle: object = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            # A pipelined request was read with the one before: its time begins when it is its turn.
            self._stamped = False
            state: dict[str, Any] = {**self.app_state}
            state.pop(RECEIVED_NS, None)
            self.app_state = state
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(
                self.limits.unread_s + UNREAD_MARGIN_S, self._give_up_writing
            )

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    # -- phases -------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Enter the phase in which the parser and the answer are, if it is another one."""
        phase = self._phase_now()
        if phase is not self._phase and not self.transport.is_closing():
            self._enter(phase)

    def _phase_now(self) -> Phase:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            return Phase.REQUEST
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.LEFTOVER
        if self._stamped or cycle is None or self.conn.trailing_data[0]:
            return Phase.HEAD
        return Phase.IDLE

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_since_s = self.loop.time()
        if self._phase_timer is not None:
            self._phase_timer.cancel()
            self._phase_timer = None
        seconds = {
            Phase.HEAD: self.limits.head_s,
            Phase.LEFTOVER: self.limits.body_s,
            Phase.IDLE: self.limits.idle_s,
            Phase.LEAVING: LEAVING_S,
        }.get(phase)
        if seconds is not None:
            self._phase_timer = self.loop.call_later(seconds, self._give_up_phase)

    def _give_up_phase(self) -> None:
        if self.transport.is_closing():
            return
        match self._phase:
            case Phase.HEAD:
                self.table.ended(End.HEAD_TIMEOUT)
                if self._stamped:
                    self._leave(
                        InvalidRequest(
                            f"The request's head did not arrive within {self.limits.head_s:g} s.",
                            code="request_timeout",
                            status=408,
                        )
                    )
                    return
            case Phase.LEFTOVER:
                self.table.ended(End.BODY_TIMEOUT)
            case Phase.IDLE:
                self.table.ended(End.IDLE_TIMEOUT)
            case Phase.REQUEST | Phase.LEAVING:
                pass
        self.transport.close()

    def _give_up_writing(self) -> None:
        """Closing would wait for the client to take the rest."""
        self.table.ended(End.UNREAD)
        self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._phase_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._phase_timer = self._unread_timer = None

    # -- answers without a request ------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        limits = self.limits
        error = InvalidRequest(msg, code="invalid_http")
        if self.conn.too_large:
            self.table.ended(End.HEAD_TOO_LARGE)
            error = InvalidRequest(
                f"The request's head is too large: at most {limits.max_headers} headers and "
                f"{limits.max_head_bytes} bytes are allowed.",
                code="head_too_large",
                status=431,
            )
        else:
            self.table.ended(End.INVALID_HTTP)
        self._leave(error)

    def _refuse(self) -> None:
        if not self.table.may_tell(self):
            self.transport.abort()
            return
        self._leave(
            Overloaded(
                f"{self.table.limit} connections are open, which is the limit.",
                code="too_many_connections",
            )
        )

    def _leave(self, error: RequestError) -> None:
        """Say a last word, if one can still be said, and close."""
        body = json_bytes(error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *error_headers(error),
            *RequestIdentity.of(()).response_headers(),
        ]
        try:
            for event in (
                h11.Response(
                    status_code=error.http_status,
                    headers=headers,
                    reason=HTTPStatus(error.http_status).phrase.encode(),
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.close()  # a response is under way: it ends in its middle
            return
        self.flow.resume_reading()
        self._enter(Phase.LEAVING)
        self.transport.write_eof()


def protocol_class(
    limits: ClientLimits, table: Connections, now: Now = SYSTEM_NOW
) -> type[GatewayProtocol]:
    """The protocol of a server with these limits. `now` stamps what arrives."""

    class BoundProtocol(GatewayProtocol):
        pass

    BoundProtocol.limits = limits
    BoundProtocol.table = table
    BoundProtocol.now = now
    return BoundProtocol


def _notice_vanished_peer(connection: socket.socket, unread_s: float) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # Later than our own timers: they know more of what was going on.
    milliseconds = round((unread_s + _KERNEL_MARGIN_S) * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
