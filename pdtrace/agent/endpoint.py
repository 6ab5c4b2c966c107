"""The agent's HTTP endpoint: what is in flight, metrics, and whether the agent keeps up.

Owns the routes, the bounds on what a client may cost, and where the address is written. What is
served comes from three callables, so it answers while a worker is stopped or an export hangs.

    GET /inflight   JSON of `pdtrace.inflight.Look`; ?id=REQUEST, ?stage=STAGE, ?limit=N (1000)
    GET /metrics    Prometheus text, or OpenMetrics with exemplars where Accept asks for it
    GET /health     JSON; 200 while the agent's loop polls and keeps up, 503 otherwise

There is no authentication: it binds to loopback unless told otherwise. A page in a browser could
still reach it under a name that resolves to loopback, so on loopback the Host header must name it.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import IO, Any, ClassVar, cast
from urllib.parse import parse_qs
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec

from pdtrace.errors import PdtraceError
from pdtrace.inflight import Look
from pdtrace.live.address import ADDRESS_NAME, Address, read_address
from pdtrace.stages import STAGE_BY_NAME

DEFAULT_LIMIT = 1_000
MAX_THREADS = 8
"""Requests answered at a time; a further one gets 503."""
MAX_REQUEST_BYTES = 16 * 1024
"""Request line and headers."""
IDLE_S = 5.0
"""A client may leave its connection silent for so long."""
HEAD_S = 2.0
"""A client may take so long to send its request: those who dawdle take the places of others."""
REQUEST_S = 15.0
"""A request may take so long in all, however slowly a client reads."""
_LOOK_S = 0.1
"""Between looks at those that take too long, while anybody is answered."""

_JSON = "application/json"
_log = logging.getLogger(__name__)


class HttpError(PdtraceError):
    """The endpoint cannot be opened where it was asked for."""

    code = "agent_http"


Reply = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""


class AgentApp:
    """The WSGI application.

    look     what is in flight
    metrics  (Accept header) → exposition and its content type
    health   whether the agent keeps up, and what /health says
    hosts    names that a Host header may carry; None: any
    """

    def __init__(
        self,
        *,
        look: Callable[[], Look],
        metrics: Callable[[str], tuple[bytes, str]],
        health: Callable[[], tuple[bool, Mapping[str, object]]],
        hosts: frozenset[str] | None,
    ) -> None:
        self._look, self._metrics, self._health, self._hosts = look, metrics, health, hosts
        self._said: set[str] = set()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, content_type, body = self._answer(environ)
        headers = [
            ("Content-Type", content_type),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ]
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: WSGIEnvironment) -> Reply:
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered here")
        host = environ.get("HTTP_HOST", "")
        if self._hosts is not None and _hostname(host) not in self._hosts:
            return _error(
                HTTPStatus.FORBIDDEN,
                f"Host {host[:100]!r} does not name this endpoint: use its address",
            )
        path = environ.get("PATH_INFO", "")
        try:
            query = parse_qs(
                environ.get("QUERY_STRING", ""), keep_blank_values=True, max_num_fields=8
            )
            if path == "/inflight":
                return self._inflight(query)
            if path == "/metrics":
                body, content_type = self._metrics(environ.get("HTTP_ACCEPT", ""))
                return HTTPStatus.OK, content_type, body
            if path == "/health":
                healthy, document = self._health()
                status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
                return status, _JSON, json.dumps(document).encode()
        except ValueError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:  # a fault of ours: the client learns that it was one
            kind = f"{path} {type(error).__name__}"
            if kind not in self._said:
                self._said.add(kind)
                _log.exception("GET %s failed; further faults like it are not logged", path)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}, see the log")
        return _error(HTTPStatus.NOT_FOUND, "there are /inflight, /metrics and /health")

    def _inflight(self, query: Mapping[str, list[str]]) -> Reply:
        if unknown := set(query) - {"id", "stage", "limit"}:
            raise ValueError(f"{sorted(unknown)[0]!r} is no filter; there are id, stage and limit")
        stages = query.get("stage", ())
        for stage in stages:
            if stage not in STAGE_BY_NAME:
                known = ", ".join(STAGE_BY_NAME)
                raise ValueError(f"{stage[:64]!r} is no stage; there are {known}")
        look = self._look()
        requests = look.requests
        if wanted := query.get("id"):
            requests = tuple(r for r in requests if r.request_id in wanted or r.trace_id in wanted)
        if stages:
            requests = tuple(r for r in requests if r.stage in stages)
        limit = _limit(query.get("limit", [str(DEFAULT_LIMIT)])[-1])
        problems = look.problems
        if len(requests) > limit:
            problems = (*problems, f"the {limit} oldest of {len(requests)} requests are shown")
            requests = tuple(sorted(requests, key=lambda r: -r.age_s)[:limit])
        shown = msgspec.structs.replace(look, requests=requests, problems=problems)
        return HTTPStatus.OK, _JSON, msgspec.json.encode(shown)


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"limit {text[:20]!r} must be a whole number of requests, 0 or more")
    return int(text)


def _error(status: HTTPStatus, message: str) -> Reply:
    return status, _JSON, json.dumps({"error": message}).encode()


def _hostname(host: str) -> str:
    """The name in a Host header, without its port, as `Address` names compare."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


class AgentHttp:
    """The endpoint, answering in threads of its own until closed.

    bind      `HOST:PORT`, `[HOST]:PORT` for IPv6; port 0 takes a free one
    any_host  allow an address that is not loopback
    out       run directory for ADDRESS_NAME; None: it is written nowhere

    Raises HttpError when the address cannot be used.
    """

    def __init__(
        self,
        bind: str,
        *,
        look: Callable[[], Look],
        metrics: Callable[[str], tuple[bytes, str]],
        health: Callable[[], tuple[bool, Mapping[str, object]]],
        any_host: bool = False,
        out: Path | None = None,
    ) -> None:
        host, port = parse_bind(bind, any_host=any_host)
        loopback = _is_loopback(host)
        hosts = frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if loopback else None
        app = AgentApp(look=look, metrics=metrics, health=health, hosts=hosts)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type("_Bound", (_Server,), {"address_family": family})
        try:
            server = cast(_Server, server_class((host, port), _Handler))
        except OSError as error:
            raise HttpError(f"cannot listen on {bind}: {error.strerror}") from error
        server.set_app(app)
        self._server = server
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{server.server_address[1]}"
        self._thread = threading.Thread(target=server.serve_forever, name="agent-http", daemon=True)
        self._thread.start()
        self._address_path = None if out is None else out / ADDRESS_NAME
        self._write_address()
        _log.info("answering at %s/inflight, /metrics and /health", self.url)

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if self._address_path is not None and read_address(self._address_path.parent) == Address(
            url=self.url, pid=os.getpid()
        ):
            self._address_path.unlink(missing_ok=True)

    def _write_address(self) -> None:
        path = self._address_path
        if path is None:
            return
        draft = path.with_suffix(".draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(Address(url=self.url, pid=os.getpid())))
            draft.replace(path)
        except OSError as error:
            _log.warning("cannot write %s: %s; others must be told %s", path, error, self.url)


def parse_bind(bind: str, *, any_host: bool = False) -> tuple[str, int]:
    """Host and port to bind to. Raises HttpError for what is no address, or not loopback."""
    host, colon, port = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise HttpError(f"{bind!r} is no address: give HOST:PORT, such as 127.0.0.1:0")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise HttpError(f"{host!r} is no IP address: give one, such as 127.0.0.1") from error
    if not any_host and not _is_loopback(host):
        raise HttpError(
            f"{host} is not loopback, and whoever reaches it reads request ids: bind to 127.0.0.1, "
            "or say --http-any"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


class _Server(ThreadingMixIn, WSGIServer):
    """At most MAX_THREADS requests at a time, none longer than REQUEST_S, read within HEAD_S."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(MAX_THREADS)
        self._until: dict[socket.socket, float] = {}
        self._woken, self._wake = socket.socketpair()
        super().__init__(address, handler)  # which closes all if it cannot be bound

    def serve_forever(self, poll_interval: float = _LOOK_S) -> None:
        """Sleeps until somebody asks, or `shutdown` is called; looks after those that are being
        answered every `poll_interval` seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                # Who is answered is entered by this thread alone.
                ready = selector.select(poll_interval if self._until else None)
                sources = [key.fileobj for key, _ in ready]
                if self._woken in sources:
                    return
                if sources:
                    self._accept()
                self.service_actions()

    def _accept(self) -> None:
        try:
            request, address = self.get_request()
        except OSError:
            return  # it left while it waited
        try:
            self.process_request(request, address)
        except Exception:  # no thread for it; others are answered
            self.shutdown_request(request)

    def shutdown(self) -> None:
        """Let `serve_forever` return; who calls joins its thread."""
        self._wake.send(b"\0")

    def server_close(self) -> None:
        super().server_close()
        self._woken.close()
        self._wake.close()

    def server_bind(self) -> None:
        # HTTPServer's looks the host's name up, which may ask a name server that does not answer.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            request.settimeout(0.1)
            try:
                request.sendall(_BUSY)
            except OSError:
                pass  # it left; nothing is owed
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + HEAD_S
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: socket.socket) -> None:
        self._until.pop(request, None)
        self._places.release()

    def head_read(self, request: socket.socket) -> None:
        """A client has sent its request."""
        self._until[request] = time.monotonic() + REQUEST_S - HEAD_S

    def service_actions(self) -> None:
        """Cut off who takes too long. Called by the accepting loop."""
        now_s = time.monotonic()
        for request, until_s in list(self._until.items()):
            if until_s < now_s:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has just ended

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left or was cut off is no news."""


_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b'Connection: close\r\nRetry-After: 1\r\n\r\n{"error": "too many requests at a time"}'
)


class _Bounded:
    """The head of a request, of which no more than MAX_REQUEST_BYTES are read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MAX_REQUEST_BYTES

    def readline(self, size: int = -1) -> bytes:
        size = self._left + 1 if size < 0 else min(size, self._left + 1)
        line: bytes = self._file.readline(size)
        self._left -= len(line)
        if self._left < 0:
            raise OverflowError
        return line

    def read(self, size: int = -1) -> bytes:
        return b""  # no request here has a body

    def close(self) -> None:
        self._file.close()


class _QuietHandler(ServerHandler):
    server_software = "pdtrace"

    def log_exception(self, exc_info: object) -> None:
        """The application catches its own faults; what is left is a client that went away."""


class _Handler(WSGIRequestHandler):
    timeout: ClassVar[float | None] = IDLE_S

    def handle(self) -> None:
        self.rfile = cast(Any, _Bounded(self.rfile))
        try:
            self.raw_requestline = self.rfile.readline()
            if not self.parse_request():
                return  # it has answered what was wrong
            cast(_Server, self.server).head_read(cast(socket.socket, self.request))
        except OverflowError:
            self.request_version = self.command = self.requestline = ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        handler = _QuietHandler(
            self.rfile,
            cast(IO[bytes], self.wfile),
            self.get_stderr(),
            self.get_environ(),
            multithread=True,
        )
        cast(Any, handler).request_handler = self
        application = cast(_Server, self.server).get_app()
        assert application is not None
        handler.run(application)

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: whoever scrapes asks every few seconds."""
