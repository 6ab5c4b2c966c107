"""Reads a request's body within limits of size and time.

Owns what is refused before and while reading; knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive

from server.errors import InvalidRequest
from server.gateway.errors import ClientGone

LINGER_BYTES = 64 * 1024 * 1024
LINGER_S = 5.0


class BodyTooLarge(InvalidRequest):
    """413. The rest of the body is on its way: see `discard_body`."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit} bytes.", code="body_too_large", status=413
        )


class BodyTooSlow(InvalidRequest):
    """408."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"The request body did not arrive within {timeout_s:g} s.",
            code="request_timeout",
            status=408,
        )


def check_headers(headers: Mapping[str, str], *, limit: int) -> None:
    """Refuse by the headers alone. Raises InvalidRequest (411 to 415)."""
    media_type, _, parameters = headers.get("content-type", "application/json").partition(";")
    media_type = media_type.strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequest(
            f"Content-Type is {media_type[:100]!r}, expected application/json.",
            code="unsupported_media_type",
            status=415,
        )
    charset = parameters.strip().lower().replace('"', "").replace(" ", "")
    if charset.startswith("charset=") and charset not in ("charset=utf-8", "charset=utf8"):
        raise InvalidRequest(
            f"{charset[:100]} is not supported, expected UTF-8.",
            code="unsupported_media_type",
            status=415,
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            f"Content-Encoding {encoding[:100]!r} is not supported.",
            code="unsupported_media_type",
            status=415,
        )
    length = headers.get("content-length", "")
    # Its syntax was checked by the HTTP parser; int() of a very long one would be slow.
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise BodyTooLarge(limit)


async def read_body(receive: Receive, *, limit: int, timeout_s: float) -> bytearray:
    """The whole body. Raises BodyTooLarge, BodyTooSlow or ClientGone."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("The client closed the connection.")
                chunk: bytes = message.get("body", b"")
                if len(body) + len(chunk) > limit:
                    raise BodyTooLarge(limit)
                body += chunk
                if not message.get("more_body", False):
                    return body
    except TimeoutError as error:
        raise BodyTooSlow(timeout_s) from error


async def discard_body(receive: Receive) -> None:
    """Read on for a moment after a refusal, keeping nothing.

    A client that is still sending would see the connection reset, not the answer.
    """
    size = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while size < LINGER_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        return
