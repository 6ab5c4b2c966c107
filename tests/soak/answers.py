"""What a client makes of the bytes that it got: how its request ended, with which text. Pure."""

from __future__ import annotations

import http.client
import io
import json
from enum import StrEnum
from typing import Any

import msgspec


class End(StrEnum):
    """How a request ended, as its client saw it.

    completed   with a whole answer
    refused     at once, because there was no room: 429 or 503
    failed      with an error, in the body or as the stream's last event
    dropped     the client went away
    broken      the connection ended before the answer did
    stuck       nothing came for longer than any deadline
    """

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    DROPPED = "dropped"
    BROKEN = "broken"
    STUCK = "stuck"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is over. Instants in seconds on the monotonic clock.

    code    of the error; empty where there was none
    wrong   what is wrong with the answer; empty where nothing is
    """

    request_id: str
    question: int
    stream: bool
    begun_s: float
    ended_s: float
    end: End
    status: int | None = None
    code: str = ""
    wrong: str = ""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of one response say."""

    end: End
    status: int | None = None
    code: str = ""
    text: str = ""


class _Bytes:
    """A socket that has everything already, for http.client."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object, **__: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def read_response(data: bytes, *, stream: bool) -> Reading:
    """The response in `data`, which ends where the connection did."""
    if not data:
        return Reading(end=End.BROKEN)
    response = http.client.HTTPResponse(_Bytes(data))  # pyright: ignore[reportArgumentType]
    try:
        response.begin()
        body, whole = response.read(), True
    except http.client.IncompleteRead as error:
        body, whole = error.partial, False
    except (http.client.HTTPException, ValueError):
        return Reading(end=End.BROKEN)
    status = response.status
    if status != 200:
        if not whole:
            return Reading(end=End.BROKEN, status=status)
        code = str(json.loads(body)["error"]["code"])
        return Reading(end=_refused_or_failed(status), status=status, code=code)
    if stream:
        return _read_events(body.decode(errors="replace"), status)
    if not whole:
        return Reading(end=End.BROKEN, status=status)
    answer = json.loads(body)
    return Reading(end=End.COMPLETED, status=status, text=answer["choices"][0]["text"])


def _refused_or_failed(status: int) -> End:
    return End.REFUSED if status in (429, 503) else End.FAILED


def _read_events(body: str, status: int) -> Reading:
    text, code, done = "", "", False
    for block in body.split("\n\n")[:-1]:  # what stands behind the last separator is cut
        event = block.removeprefix("data: ")
        if event == "[DONE]":
            done = True
            continue
        chunk: dict[str, Any] = json.loads(event)
        if "error" in chunk:
            code = str(chunk["error"]["code"])
        for choice in chunk.get("choices", ()):
            text += choice["text"]
    end = End.BROKEN if not done else End.FAILED if code else End.COMPLETED
    return Reading(end=end, status=status, code=code, text=text)


def what_is_wrong(reading: Reading, right: str) -> str:
    """What distinguishes an answer from the right one, as far as it came; empty: nothing."""
    if reading.end is End.COMPLETED and reading.text != right:
        return f"got {reading.text!r}, expected {right!r}"
    if not right.startswith(reading.text):
        return f"got {reading.text!r} before the end, expected the beginning of {right!r}"
    return ""
