"""Places that answer over HTTP as none should: slowly, without end, cut, or with what nobody asked
for. Raw sockets, so that no library puts it right."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

Handler = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def place(handler: Handler) -> Generator[tuple[str, list[bytes]]]:
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


def drips(head: bytes) -> Handler:
    """Never silent for long, and never done."""

    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b" ")
            time.sleep(0.02)

    return send


def endless(connection: socket.socket) -> None:
    """As fast as it is read, and never done."""
    connection.sendall(OK + b"\r\n{")
    while True:
        connection.sendall(b" " * 65536)


def hangs(connection: socket.socket) -> None:
    """Until the other side has gone."""
    connection.recv(1)


def says(answer: bytes) -> Handler:
    """Just that, and the end."""
    return lambda connection: connection.sendall(answer)


def body(content: bytes, head: bytes = OK) -> Handler:
    """A whole answer."""
    return says(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)


def moved(where: bytes) -> Handler:
    """A redirection."""
    return body(b"", b"HTTP/1.1 302 Found\r\nLocation: " + where + b"\r\n")


class Hostile(NamedTuple):
    """What a place does, and what is to be said of it (a pattern)."""

    handler: Handler
    said: str


LATE = "no answer within"
OTHER = "answers, but "
_BOMB = gzip.compress(b" " * 50_000_000)

HOSTILE: dict[str, Hostile] = {
    "hang": Hostile(hangs, LATE),
    "drip of a body": Hostile(drips(OK + b"Content-Type: application/json\r\n\r\n{"), LATE),
    "drip of a head": Hostile(drips(OK + b"X-Slow: "), LATE),
    "drip of a refusal": Hostile(
        drips(b"HTTP/1.1 500 Oops\r\nContent-Length: 1000000\r\n\r\n{"), LATE
    ),
    "endless": Hostile(endless, "answers more than 1 MiB"),
    "absurd length": Hostile(
        says(OK + b"Content-Length: 999999999999999999999999\r\n\r\n{}"), "its answer is cut"
    ),
    "cut body": Hostile(says(OK + b"Content-Length: 100\r\n\r\n{"), "its answer is cut"),
    "cut chunk": Hostile(
        says(OK + b"Transfer-Encoding: chunked\r\n\r\n100\r\n{}"), "its answer is cut"
    ),
    "no chunk": Hostile(
        says(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}"), "its answer is cut"
    ),
    "no word": Hostile(says(b""), "Remote end closed connection without response"),
    "no HTTP": Hostile(says(b"SSH-2.0-Open\r\n"), r"does not answer in HTTP \(SSH-2\.0-Open"),
    "heads without end": Hostile(
        says(OK + b"".join(b"X-%d: y\r\n" % i for i in range(500)) + b"\r\n"), "not answer in HTTP"
    ),
    "long head": Hostile(says(OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n"), "not answer in HTTP"),
    "gzip bomb": Hostile(body(_BOMB, OK + b"Content-Encoding: gzip\r\n"), OTHER),
    "empty": Hostile(body(b""), OTHER),
    "page": Hostile(body(b"<!DOCTYPE html>\n<html></html>"), OTHER),
    "list": Hostile(body(b"[]"), OTHER),
    "null": Hostile(body(b"null"), OTHER),
    "number": Hostile(body(b"7"), OTHER),
    "deep": Hostile(body(b'{"at_ns":1,"services":' + b"[" * 200_000), OTHER),
    "no UTF-8": Hostile(body(b'{"at_ns":1,"services":["\xff"],"problems":["\xff"]}'), OTHER),
    "401": Hostile(body(b"{}", b"HTTP/1.1 401 Unauthorized\r\n"), "401 Unauthorized"),
    "404": Hostile(body(b"", b"HTTP/1.1 404 Not Found\r\n"), "answers"),
    "429": Hostile(body(b"x", b"HTTP/1.1 429 Slow\r\nRetry-After: 99\r\n"), "429 Slow"),
    "500": Hostile(body(b"\x1b[31m", b"HTTP/1.1 500 \x1b[31mred\r\n"), r"500 \\x1b\[31mred"),
    "503": Hostile(body(b"{", b"HTTP/1.1 503 " + b"busy " * 9_000 + b"\r\n"), "503 busy busy"),
    "redirected round": Hostile(moved(b"/again"), "302 The HTTP server returned a redirect error"),
    "redirected nowhere": Hostile(body(b"", b"HTTP/1.1 302 Found\r\n"), "302 Found"),
    "redirected to a file": Hostile(moved(b"file:///etc/passwd"), "302 Found - Redirection to url"),
    "redirected to FTP": Hostile(moved(b"ftp://127.0.0.1:1/x"), "unknown url type: ftp"),
    "redirected to nobody": Hostile(moved(b"http://127.0.0.1:1/"), "refused"),
    "redirected to no address": Hostile(
        moved(b"http://u:hush@[::1"), "redirects to what is no address"
    ),
    "redirected with a password": Hostile(moved(b"http://127.0.0.1:hush@x/"), "nonnumeric port"),
}
"""By what is wrong. Nobody answers so whom pdtrace asks: neither an agent nor a Jaeger."""
