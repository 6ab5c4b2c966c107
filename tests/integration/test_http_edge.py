"""What clients may take of the public endpoint, with raw sockets: slow, deaf, gone, too many."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdtrace.stages import Mark, Outcome
from server.client_limits import ClientLimits
from server.gateway.connections import End
from server.gateway.protocol import GatewayProtocol
from tests.support.gateway_doubles import (
    GatewayUnderTest,
    LegDouble,
    gateway_under_test,
    speak,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

WAIT_S = 40.0
SHORT_S = 0.3
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class RawClient:
    """A connection to which bytes are written as they are; nothing is read unless asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._read = b""

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._loop.sock_sendall(self._socket, data)

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        while await self._more():
            pass
        return self._read

    async def line(self) -> bytes:
        while b"\r\n" not in self._read:
            assert await self._more(), "the connection ended"
        line, _, self._read = self._read.partition(b"\r\n")
        return line

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON body of the next response."""
        status = int((await self.line()).split()[1])
        headers: dict[str, str] = {}
        while line := await self.line():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        length = int(headers["content-length"])
        while len(self._read) < length:
            assert await self._more(), "the connection ended"
        body, self._read = self._read[:length], self._read[length:]
        return status, headers, json.loads(body)

    async def trickle(self, data: bytes) -> None:
        """A byte now and then until the server has had enough."""
        async with asyncio.timeout(WAIT_S):
            for byte in itertools.cycle(data):
                try:
                    await self._loop.sock_sendall(self._socket, bytes([byte]))
                except ConnectionError:
                    return
                await asyncio.sleep(SHORT_S / 10)

    async def _more(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            try:
                data = await self._loop.sock_recv(self._socket, 65536)
            except ConnectionError:
                return False
        self._read += data
        return bool(data)


@contextlib.asynccontextmanager
async def raw(
    g: GatewayUnderTest, *, receive_bytes: int | None = None
) -> AsyncGenerator[RawClient]:
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, g.address)
        yield RawClient(connection)


def limits(**changes: Any) -> ClientLimits:
    return ClientLimits(**{"head_s": 30, "body_s": 30, "idle_s": 30, "unread_s": 30, **changes})


async def metric(g: GatewayUnderTest, name: str) -> float:
    lines = (await g.client.get("/metrics")).text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


async def ends(g: GatewayUnderTest, reason: End) -> float:
    return await metric(g, f'pd_gateway_connections_ended_total{{reason="{reason}"}}')


def keep_little(g: GatewayUnderTest) -> None:
    """Let the kernel hold only a little of what a client does not read, from here on."""
    for server in g.server.servers:
        for listener in server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)


async def until_unread(g: GatewayUnderTest) -> None:
    async with asyncio.timeout(WAIT_S):
        while await ends(g, End.UNREAD) < 1:  # noqa: ASYNC110 -- asked over HTTP
            await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 -- the server tells nobody
            await asyncio.sleep(0.01)


async def test_head_that_never_ends_is_given_up_however_it_trickles(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, client_limits=limits(head_s=SHORT_S)) as g:
        async with raw(g) as silent:
            assert await silent.rest() == b""
        async with raw(g) as slow:
            await slow.trickle(b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000)
            status, headers, body = await slow.answer()
        async with raw(g) as second:  # the first request of a connection earns no more time
            await second.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await second.answer())[0] == 200
            await second.trickle(b"GET /ready HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000)
            assert (await second.answer())[0] == 408
        assert await ends(g, End.HEAD_TIMEOUT) == 3
        # A stream that is longer than that is none of its business.
        g.decode.script = speak("abcde", gap_s=SHORT_S / 3)
        assert (await g.complete(stream=True)).status_code == 200
    assert status == 408
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    assert body["error"]["code"] == "request_timeout"


async def test_body_that_trickles_is_given_up_and_traced(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, client_limits=limits(body_s=SHORT_S)) as g:
        async with raw(g) as client:
            await client.send(POST + b"content-length: 5000\r\n\r\n")
            sending = asyncio.create_task(client.trickle(b" " * 5000))
            status, headers, body = await client.answer()
            await sending
        assert await ends(g, End.BODY_TIMEOUT) == 1
        (completed,) = g.marks(Mark.COMPLETED)
        assert (await g.complete()).status_code == 200
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert headers["connection"] == "close"
    assert completed[:4] == (Outcome.REJECTED, "request_timeout", "client", 408)


@pytest.mark.parametrize("framing", [b"content-length: 500000", b"transfer-encoding: chunked"])
async def test_body_behind_an_answer_keeps_no_connection(tmp_path: Path, framing: bytes) -> None:
    async with gateway_under_test(tmp_path, client_limits=limits(body_s=SHORT_S)) as g:
        async with raw(g) as client:
            await client.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
            assert (await client.answer())[0] == 200
            await client.trickle(b"1\r\nx\r\n" if b"chunked" in framing else b"x")
        assert await ends(g, End.BODY_TIMEOUT) == 1


async def test_connection_is_idle_only_so_long(tmp_path: Path) -> None:
    """Also behind a body that ended after its answer, when the server's own timer is gone."""
    async with gateway_under_test(tmp_path, client_limits=limits(idle_s=SHORT_S)) as g:
        async with raw(g) as client, raw(g) as late:
            await client.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            await late.send(b"GET /ready HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
            assert (await client.answer())[0] == (await late.answer())[0] == 200
            await late.send(b"abc")
            assert await client.rest() == await late.rest() == b""
        assert await ends(g, End.IDLE_TIMEOUT) >= 2


async def test_client_that_reads_nothing_ends_its_request_and_its_connection(
    tmp_path: Path,
) -> None:
    async def chatter(leg: LegDouble) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(8000):
                leg.say(b"x" * 400)
                await asyncio.sleep(0.005)

    async with gateway_under_test(
        tmp_path, decode_script=chatter, client_limits=limits(unread_s=SHORT_S)
    ) as g:
        keep_little(g)
        body = json.dumps({"model": "fake", "prompt": "hi", "stream": True}).encode()
        async with raw(g, receive_bytes=4096) as client:
            await client.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: bool(g.marks(Mark.COMPLETED)))
            await until_unread(g)
            assert await metric(g, "pd_gateway_connections") == 1
        (completed,) = g.marks(Mark.COMPLETED)
    assert completed[:3] == (Outcome.CANCELLED, "client_stalled", "client")


async def test_answer_that_nobody_takes_does_not_outlive_its_connection(tmp_path: Path) -> None:
    """No request is in progress any more; what is left is bytes for a client that does not read."""
    async with (
        gateway_under_test(tmp_path, client_limits=limits(unread_s=SHORT_S)) as g,
        raw(g, receive_bytes=4096) as client,
    ):
        await client.send(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
        await until_unread(g)
        assert await metric(g, "pd_gateway_connections") == 1


async def test_connections_are_bounded_and_idle_ones_make_room(tmp_path: Path) -> None:
    async def forever(leg: LegDouble) -> None:
        leg.say(b"x")
        await asyncio.sleep(WAIT_S)

    body = json.dumps({"model": "fake", "prompt": "hi", "stream": True}).encode()
    ask = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    async with gateway_under_test(
        tmp_path, decode_script=forever, client_limits=limits(max_connections=3)
    ) as g:
        assert (await g.client.get("/ready")).status_code == 200  # one idle connection
        async with raw(g) as first, raw(g) as second, raw(g) as third:
            for client in (first, second, third):
                await client.send(ask)
                assert (await client.line()).startswith(b"HTTP/1.1 200")
            # The idle one has made room; those with a request do not.
            async with raw(g) as one_too_many:
                await one_too_many.send(ask)
                status, headers, refused = await one_too_many.answer()
                assert await one_too_many.rest() == b""
        lines = (await g.client.get("/metrics")).text.splitlines()
    assert (status, refused["error"]["code"]) == (503, "too_many_connections")
    assert int(headers["retry-after"]) >= 1
    assert 'pd_gateway_connections_ended_total{reason="evicted"} 1.0' in lines
    assert 'pd_gateway_connections_ended_total{reason="too_many"} 1.0' in lines
    assert "pd_gateway_connections_limit 3.0" in lines


async def test_crowd_of_unfinished_heads_does_not_keep_others_out(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, client_limits=limits(max_connections=5)) as g:
        async with contextlib.AsyncExitStack() as stack:
            crowd = [await stack.enter_async_context(raw(g)) for _ in range(5)]
            for client in crowd:
                await client.send(b"GET /ready HTTP/1.1\r\n")
            await asyncio.sleep(1.5)  # how long the youngest of them may not be thrown out
            assert (await g.complete()).status_code == 200
        assert await ends(g, End.EVICTED) >= 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-a: b\r\n" * 200 + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 150_000 + b"\r\n\r\n",
        b"GET /health?" + b"q" * 150_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-endless: " + b"y" * 150_000,
    ],
    ids=["many", "long", "long target", "endless"],
)
async def test_head_that_is_too_large_is_refused_whole(tmp_path: Path, head: bytes) -> None:
    async with gateway_under_test(tmp_path) as g:
        async with raw(g) as client:
            await client.send(head)
            status, headers, body = await client.answer()
        assert await ends(g, End.HEAD_TOO_LARGE) == 1
    assert (status, body["error"]["code"]) == (431, "head_too_large")
    assert headers["connection"] == "close"


@pytest.mark.parametrize("head", [b"GET /ready HTTP/1.1\r\nhost: x\r\n", POST])
async def test_body_with_two_lengths_is_refused_and_nothing_behind_it_is_read(
    tmp_path: Path, head: bytes
) -> None:
    """Who stands in front may believe the other length, and take what follows for a body."""
    behind = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    length = b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % (5 + len(behind))
    async with gateway_under_test(tmp_path) as g:
        async with raw(g) as client:
            await client.send(head + length + b"0\r\n\r\n" + behind)
            status, headers, body = await client.answer()
            assert await client.rest() == b""
        assert await ends(g, End.INVALID_HTTP) == 1
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert headers["connection"] == "close"


JSON_BODY = b"content-length: 2\r\n\r\n{}"
HOSTILE_HEADS = [
    b"GET http://evil/health HTTP/1.1\r\nhost: [\r\n\r\n",
    b"GET //evil//%0a%00%ff HTTP/1.1\r\nhost: [::1\r\n\r\n",
    b"GET /v1/models/%0d%0aset-cookie:%20a=b HTTP/1.1\r\nhost: x]\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nhost: \xff\xfe@:99999999\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: x\r\naccept: application/openmetrics-text;version=9\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: x\r\naccept: text/plain;escaping=;;,*/*;q=\xff\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: x\r\naccept: application/openmetrics-text;version=2.x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: x\r\naccept: text/plain;version=\xff\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: [\r\n\r\n",
    b"DELETE /v1/completions HTTP/1.1\r\nhost: [\r\n\r\n",
    POST + b"content-type: \xff\xff\r\n" + JSON_BODY,
    POST + b"content-encoding: \xff\r\n" + JSON_BODY,
    POST + b"x-pd-faults: \xff=1\r\n" + JSON_BODY,
    POST + b"authorization: \xff\xff\r\n" + JSON_BODY,
    b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
]


async def test_hostile_heads_are_answered_and_never_with_a_500(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_under_test(tmp_path) as g:
        for head in HOSTILE_HEADS:
            async with raw(g) as client:
                await client.send(head)
                status_line = await client.line()
            assert 200 <= int(status_line.split()[1]) < 500, (head, status_line)
        assert (await g.complete()).status_code == 200
    assert "Traceback" not in caplog.text


async def test_vanished_client_is_noticed_by_the_kernel(tmp_path: Path) -> None:
    async with (
        gateway_under_test(tmp_path, client_limits=limits(unread_s=4)) as g,
        raw(g) as client,
    ):
        await client.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.answer()
        for connection in g.server.server_state.connections:
            assert isinstance(connection, GatewayProtocol)
            found = connection.transport.get_extra_info("socket")
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 34_000
