"""What reaches the client, and when a client counts as gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.errors import InvalidRequest, Overloaded, WorkerLost
from server.gateway.body import BodyTooLarge, check_headers, discard_body, read_body
from server.gateway.errors import ClientGone
from server.gateway.openai_bodies import ChatBodies, Usage
from server.gateway.responder import Responder, StreamResponder, WholeResponder

USAGE = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0)


class Wire:
    """Collects what is sent; stops taking anything when told to."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.blocked = False

    async def send(self, message: Any) -> None:
        if self.blocked:
            await asyncio.sleep(60)
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.messages if "status" in message]


def bodies() -> ChatBodies:
    return ChatBodies(model="m", created_s=0, fingerprint="f", include_usage=False)


def stream(wire: Wire, *, timeout_s: float = 5.0) -> StreamResponder:
    return StreamResponder(
        wire.send, [(b"x", b"y")], bodies=bodies(), include_usage=False, timeout_s=timeout_s
    )


def test_error_before_anything_was_written_is_an_http_error() -> None:
    wire = Wire()
    asyncio.run(stream(wire).fail(Overloaded("full", retry_after_s=7, status=429)))
    assert wire.statuses == [429]
    assert (b"retry-after", b"7") in wire.messages[0]["headers"]
    assert (b"x", b"y") in wire.messages[0]["headers"]
    assert not wire.messages[-1]["more_body"]


def test_error_in_a_stream_is_an_event_and_done() -> None:
    async def scenario(wire: Wire) -> None:
        responder = stream(wire)
        await responder.write("a")
        await responder.fail(WorkerLost("gone"))
        await responder.fail(WorkerLost("again"))

    wire = Wire()
    asyncio.run(scenario(wire))
    assert wire.statuses == [200]
    *_, error, done, rest = wire.body.split(b"\n\n")
    assert error.startswith(b'data: {"error":{"message":"gone"')
    assert (done, rest) == (b"data: [DONE]", b"")


def test_whole_answer_is_written_at_the_end_and_only_then() -> None:
    async def scenario(wire: Wire) -> None:
        responder = WholeResponder(wire.send, [], bodies=bodies(), timeout_s=5)
        assert not await responder.write("ab")
        assert not await responder.write("c")
        assert wire.messages == []
        assert await responder.finish("stop", USAGE)

    wire = Wire()
    asyncio.run(scenario(wire))
    assert b'"content":"abc"' in wire.body


def test_client_that_does_not_read_is_gone() -> None:
    async def scenario() -> None:
        wire = Wire()
        responder = stream(wire, timeout_s=0.05)
        await responder.write("a")
        wire.blocked = True
        with pytest.raises(ClientGone) as gone:
            await responder.write("b")
        assert gone.value.code == "client_stalled"
        await responder.fail(gone.value)  # nothing more is tried

    asyncio.run(scenario())


def test_responder_of_an_unparsed_request_can_fail() -> None:
    wire = Wire()
    asyncio.run(Responder(wire.send, [], timeout_s=5).fail(InvalidRequest("no", param="p")))
    assert wire.statuses == [400]
    assert b'"param":"p"' in wire.body


def chunks(*messages: Any) -> Any:
    pending = list(messages)

    async def receive() -> Any:
        if not pending:
            await asyncio.sleep(60)
        return pending.pop(0)

    return receive


def part(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def test_body_is_read_whole_within_its_limit() -> None:
    receive = chunks(part(b"ab", more=True), part(b"c", more=False))
    assert asyncio.run(read_body(receive, limit=3, timeout_s=5)) == b"abc"


def test_body_beyond_its_limit_is_refused_at_once() -> None:
    receive = chunks(part(b"ab", more=True), part(b"cd", more=True))
    with pytest.raises(BodyTooLarge) as refusal:
        asyncio.run(read_body(receive, limit=3, timeout_s=5))
    assert refusal.value.http_status == 413


def test_slow_body_is_408_and_a_client_that_leaves_is_gone() -> None:
    with pytest.raises(InvalidRequest) as slow:
        asyncio.run(read_body(chunks(part(b"a", more=True)), limit=9, timeout_s=0.02))
    assert slow.value.http_status == 408
    with pytest.raises(ClientGone):
        asyncio.run(read_body(chunks({"type": "http.disconnect"}), limit=9, timeout_s=5))


def test_rest_of_a_refused_body_is_dropped() -> None:
    asyncio.run(discard_body(chunks(part(b"a", more=True), part(b"b", more=False))))


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "APPLICATION/JSON; charset=UTF-8",
        'application/json; charset="utf-8"',
        "application/vnd.api+json",
    ],
)
def test_json_in_utf_8_is_accepted(content_type: str) -> None:
    check_headers({"content-type": content_type, "content-length": "10"}, limit=10)
    check_headers({}, limit=10)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-length": "11"}, 413),
        ({"content-length": "9" * 4000}, 413),
    ],
)
def test_headers_alone_can_be_refused(headers: dict[str, str], status: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_headers(headers, limit=10)
    assert refusal.value.http_status == status
