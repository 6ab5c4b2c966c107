"""Writes one generation's answer to the client: as a stream of events, or as one body.

Owns when the status line goes out and what follows an error; knows nothing of tokens or workers.
Nothing is written before there is something to say, so that until then an error is a plain HTTP
error. After that an error is one event, followed by `[DONE]`: the client's parser ends cleanly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from starlette.types import Send

from server.errors import RequestError
from server.gateway.errors import CLIENT_STALLED, ClientGone
from server.gateway.openai_bodies import DONE, Bodies, Usage, error_body, event, json_bytes
from server.gateway.retry_after import MIN_S

RawHeaders = Sequence[tuple[bytes, bytes]]
_SSE_HEADERS: RawHeaders = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class Responder:
    """One response. `status` is None until the status line is written.

    headers     identity of the request; sent with every status line
    timeout_s   how long the client may leave its socket full before it counts as gone
    streams     whether tokens are written as they come; otherwise all at the end
    """

    streams: ClassVar[bool] = False

    def __init__(self, send: Send, headers: RawHeaders, *, timeout_s: float) -> None:
        self._send = send
        self._headers = list(headers)
        self._timeout_s = timeout_s
        self.status: int | None = None
        self.finished = False

    def add_headers(self, headers: RawHeaders) -> None:
        """More headers for the status line that is not written yet."""
        self._headers += headers

    async def write(self, text: str) -> bool:
        """More of the answer; whether its bytes are in the client's socket on return."""
        raise NotImplementedError

    async def finish(self, reason: str, usage: Usage) -> bool:
        """The end of the answer; whether text reached the socket with it for the first time."""
        raise NotImplementedError

    async def fail(self, error: RequestError) -> None:
        """End the response with `error`, in the way that is still possible."""
        if self.finished:
            return
        if self.status is None:
            await self.send_json(error.http_status, error_body(error), error_headers(error))
        else:
            await self.send_body(event(error_body(error)) + DONE, last=True)

    async def send_json(self, status: int, body: object, headers: RawHeaders = ()) -> None:
        """A whole response."""
        await self.send_whole(status, json_bytes(body), headers)

    async def send_whole(self, status: int, data: bytes, headers: RawHeaders = ()) -> None:
        await self.start(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(data)).encode()),
                *headers,
            ],
        )
        await self.send_body(data, last=True)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """The status line and headers."""
        self.status = status
        await self._put(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*self._headers, *headers],
            }
        )

    async def send_body(self, data: bytes, *, last: bool = False) -> None:
        self.finished = self.finished or last
        await self._put({"type": "http.response.body", "body": data, "more_body": not last})

    async def _put(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as error:
            self.finished = True
            raise ClientGone(
                f"the client did not read for {self._timeout_s:g} s", code=CLIENT_STALLED
            ) from error
        except OSError as error:  # some ASGI servers say so when the client is gone
            self.finished = True
            raise ClientGone("the client closed the connection") from error


class StreamResponder(Responder):
    """Server-sent events: opening, deltas, finish, usage if asked for, `[DONE]`."""

    streams = True

    def __init__(
        self,
        send: Send,
        headers: RawHeaders,
        *,
        bodies: Bodies,
        include_usage: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(send, headers, timeout_s=timeout_s)
        self._bodies = bodies
        self._include_usage = include_usage

    async def write(self, text: str) -> bool:
        """See `Responder.write`."""
        await self.send_body(await self._opening() + self._bodies.delta(text))
        return True

    async def finish(self, reason: str, usage: Usage) -> bool:
        """See `Responder.finish`. All text went out by `write`."""
        data = await self._opening() + self._bodies.finish(reason)
        if self._include_usage:
            data += self._bodies.usage(usage)
        await self.send_body(data + DONE, last=True)
        return False

    async def _opening(self) -> bytes:
        if self.status is not None:
            return b""
        await self.start(200, _SSE_HEADERS)
        return self._bodies.opening()


class WholeResponder(Responder):
    """One JSON body, written when the last token is there."""

    def __init__(
        self,
        send: Send,
        headers: RawHeaders,
        *,
        bodies: Bodies,
        timeout_s: float,
    ) -> None:
        super().__init__(send, headers, timeout_s=timeout_s)
        self._bodies = bodies
        self._texts: list[str] = []

    async def write(self, text: str) -> bool:
        """See `Responder.write`."""
        self._texts.append(text)
        return False

    async def finish(self, reason: str, usage: Usage) -> bool:
        """See `Responder.finish`."""
        text = "".join(self._texts)
        await self.send_whole(200, self._bodies.whole(text, reason, usage))
        return bool(text)


def error_headers(error: RequestError) -> RawHeaders:
    """Headers that belong to an error's status."""
    if error.http_status in (429, 503):
        return [(b"retry-after", str(error.retry_after_s or MIN_S).encode())]
    if error.http_status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []
