"""Answers over HTTP: whole, in time, with nothing shown that is secret."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator

import pytest
from typer.testing import CliRunner

from pdtrace.analysis.jaeger import Jaeger, is_jaeger, read_jaeger
from pdtrace.analysis.time_range import TraceQuery, instant_text, parse_instant
from pdtrace.analysis.web_answers import MAX_ANSWER_BYTES, Web, without_credentials
from pdtrace.cli import app
from pdtrace.errors import SourceError
from tests.support.jaeger_doubles import jaeger_double

Handler = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\n"
GIVEN_S = 60.0
"""More than any of these tests takes where nothing hangs."""


@contextlib.contextmanager
def _place(handler: Handler) -> Generator[tuple[str, list[bytes]]]:
    """One that answers each request with what `handler` sends; and what was asked."""
    asked: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            asked.append(connection.recv(65536))
            handler(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def _drips(head: bytes) -> Handler:
    """Never silent for long, and never done."""

    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b" ")
            time.sleep(0.02)

    return send


def _endless(connection: socket.socket) -> None:
    connection.sendall(OK + b"\r\n{")
    while True:
        connection.sendall(b" " * 65536)


@pytest.mark.parametrize(
    "head",
    [
        OK + b"Content-Type: application/json\r\n\r\n{",
        OK + b"X-Slow: ",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 1000000\r\n\r\n{",
    ],
)
def test_whole_answer_has_to_come_in_time(head: bytes) -> None:
    began = time.monotonic()
    with (
        _place(_drips(head)) as (url, _),
        pytest.raises(SourceError, match=r"/x: no answer within 0\.3 s"),
    ):
        Web(url, timeout_s=0.3).get("/x")
    assert time.monotonic() - began < GIVEN_S


@pytest.mark.parametrize(
    "answer",
    [
        OK + b'Content-Length: 100\r\n\r\n{"services":["pd-gateway"]}',
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    ],
)
def test_answer_without_its_end_is_none(answer: bytes) -> None:
    with (
        _place(lambda to: to.sendall(answer)) as (url, _),
        pytest.raises(SourceError, match="/api/v3/services: its answer is cut"),
    ):
        Jaeger(url, timeout_s=GIVEN_S).services()


def test_endless_answer_is_left() -> None:
    with (
        _place(_endless) as (url, _),
        pytest.raises(SourceError, match=f"more than {MAX_ANSWER_BYTES >> 20} MiB"),
    ):
        Web(url, timeout_s=GIVEN_S).get("/x")


def test_refusal_whose_words_are_cut_is_one() -> None:
    refusal = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nabc"
    with _place(lambda to: to.sendall(refusal)) as (url, _):
        found = Web(url, timeout_s=GIVEN_S).get("/x")
    assert (found.status, found.reason) == (503, "Busy")


@pytest.mark.parametrize("deep", [b'{"result":' + b"[" * 200_000, b"[" * 200_000])
def test_deep_answers_are_no_jaeger(deep: bytes) -> None:
    with jaeger_double(override={"/api/v3/services": (200, deep)}, older=False) as jaeger:
        assert not is_jaeger(jaeger.url)
    override = {"/api/v3/traces": (200, deep), "/api/traces": (200, b"<html>")}
    with (
        jaeger_double(override=override) as jaeger,
        pytest.raises(SourceError, match="lists services, but neither"),
    ):
        read_jaeger(jaeger.url, TraceQuery(since_ns=1, until_ns=2**62))


def test_credentials_go_to_the_place_alone_and_are_never_shown() -> None:
    with _place(lambda to: to.sendall(OK + b"Content-Length: 2\r\n\r\n{}")) as (other, elsewhere):
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}/y\r\nContent-Length: 0\r\n\r\n".encode()
        with _place(lambda to: to.sendall(moved)) as (url, asked):
            web = Web(url.replace("://", "://me:s%40cret@"), timeout_s=GIVEN_S)
            assert web.get("/x").body == b"{}"
    assert web.url == url
    told = base64.b64encode(b"me:s@cret")
    assert b"Authorization: Basic " + told in asked[0]
    assert b"Authorization" not in elsewhere[0]


def test_commands_do_not_show_credentials() -> None:
    runner = CliRunner()
    with jaeger_double() as jaeger:
        url = jaeger.url.replace("://", "://me:hush@")
        found = runner.invoke(app, ["slo", "--from", url, "--since", "3000d", "--json"])
        none = runner.invoke(app, ["slo", "--from", url, "--until", "2001-01-01"])
    gone = runner.invoke(app, ["slo", "--from", url])
    assert (found.exit_code, none.exit_code, gone.exit_code) == (0, 2, 2)
    assert jaeger.url in found.stdout
    assert "no trace between" in none.stderr
    assert "refused" in gone.stderr
    for one in found, none, gone:
        assert "hush" not in one.output
    assert without_credentials("http://a:b@c@[::1") == "http://[::1"


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:abc",
        "http://127.0.0.1:0",
        "http://",
        "http:///x",
        "http://ex ample:80",
        "http://127.0.0.1:1/\x01",
        "file:///etc/passwd",
    ],
)
def test_what_is_no_address_is_told_in_a_line(url: str) -> None:
    result = CliRunner().invoke(app, ["check", "--from", url])
    assert result.exit_code == 2
    assert "give http://HOST:PORT of a Jaeger" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("page", ["/search?service=pd-gateway&limit=20", "/trace/332f81", "/#x"])
def test_address_of_a_page_is_that_of_its_jaeger(page: str) -> None:
    with jaeger_double() as jaeger:
        assert is_jaeger(f"{jaeger.url}{page}")


def test_proxy_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:hush@127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(SourceError, match=r"refused \(by the proxy of http_proxy\)"):
        Web("http://192.0.2.1", timeout_s=GIVEN_S).get("/x")
    with jaeger_double() as jaeger:
        assert is_jaeger(jaeger.url)  # of this host: no proxy is asked


def test_times_beyond_all_clocks_are_the_last_ones() -> None:
    now_ns = time.time_ns()
    for early in ("9999999d", f"{'9' * 400}d", "0001-01-01T00:00:00+23:59"):
        assert parse_instant(early, now_ns) == 0
    late = parse_instant("9999-12-31T23:59:59-23:59", now_ns)
    assert instant_text(late).startswith("2262-04-11T")
