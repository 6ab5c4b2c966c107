"""OTLP receivers on loopback that decode with the official definitions, and ones that misbehave."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as PbSpan


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a receiver answers. `body` None: the OTLP response, with the partial success if there is
    one. gRPC takes `code` and `trailers`, HTTP `status` and `headers`."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    code: grpc.StatusCode = grpc.StatusCode.OK
    trailers: Sequence[tuple[str, bytes]] = ()
    text: str = ""
    rejected: int = 0

    @property
    def takes(self) -> bool:
        return self.status == 200 and self.code is grpc.StatusCode.OK

    def response(self) -> ExportTraceServiceResponse:
        response = ExportTraceServiceResponse()
        if self.rejected or self.text:
            response.partial_success.rejected_spans = self.rejected
            response.partial_success.error_message = self.text
        return response


OK = Reply()


class Received:
    """What a receiver got. `replies` are given in turn, the last one for ever; a number is an HTTP
    status, for gRPC anything but 200 is INVALID_ARGUMENT."""

    def __init__(self, replies: Sequence[int | Reply] | None = None) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.endpoint = ""
        self.port = 0
        self.calls = 0
        self._replies: list[Reply] = []
        self.answer(*(replies or [OK]))

    def answer(self, *replies: int | Reply) -> None:
        """From now on."""
        self._replies = [
            reply
            if isinstance(reply, Reply)
            else Reply(status=reply, code=_CODES.get(reply, grpc.StatusCode.INVALID_ARGUMENT))
            for reply in replies
        ]

    def next_reply(self) -> Reply:
        self.calls += 1
        self.times.append(time.monotonic())
        return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]

    def spans(self) -> list[PbSpan]:
        return [
            span
            for request in self.requests
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]

    def span_names(self) -> list[str]:
        return [span.name for span in self.spans()]

    def span_ids(self) -> list[str]:
        return [span.span_id.hex() for span in self.spans()]

    def resources(self) -> list[dict[str, str]]:
        """Text attributes of the resources, one for each group of spans."""
        return [
            {item.key: item.value.string_value for item in resource_spans.resource.attributes}
            for request in self.requests
            for resource_spans in request.resource_spans
        ]


_CODES = {
    200: grpc.StatusCode.OK,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


@contextmanager
def http_receiver(
    replies: Sequence[int | Reply] | None = None, *, port: int = 0
) -> Generator[Received]:
    """OTLP/HTTP; answers 404 to other paths than /v1/traces."""
    received = Received(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.paths.append(self.path)
            received.headers.append({key.lower(): value for key, value in self.headers.items()})
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            reply = received.next_reply() if self.path == "/v1/traces" else Reply(status=404)
            if reply.status == 200:
                received.requests.append(ExportTraceServiceRequest.FromString(body))
            answer = reply.response().SerializeToString() if reply.body is None else reply.body
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    received.port = server.server_address[1]
    received.endpoint = f"http://127.0.0.1:{received.port}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        self._received.headers.append(metadata)
        reply = self._received.next_reply()
        if not reply.takes:
            context.set_trailing_metadata(tuple(reply.trailers))
            context.abort(reply.code, reply.text or "refused by the test")
        self._received.requests.append(request)
        return reply.response()


@contextmanager
def grpc_receiver(
    replies: Sequence[int | Reply] | None = None,
    *,
    port: int = 0,
    max_message_bytes: int = 4 * 1024 * 1024,
) -> Generator[Received]:
    """OTLP/gRPC, plaintext."""
    received = Received(replies)
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=2),
        options=[("grpc.max_receive_message_length", max_message_bytes)],
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(received), server)
    received.port = server.add_insecure_port(f"127.0.0.1:{port}")
    received.endpoint = f"http://127.0.0.1:{received.port}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def black_hole() -> Generator[Received]:
    """A port at which packets vanish: its queue of connections is full and nobody accepts."""
    received = Received()
    with socket.socket() as listener, ExitStack() as clients:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        received.port = listener.getsockname()[1]
        received.endpoint = f"http://127.0.0.1:{received.port}"
        for _ in range(16):
            client = clients.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(("127.0.0.1", received.port))
            except TimeoutError:
                break
        else:
            raise AssertionError("the queue of connections has no end")
        yield received


@contextmanager
def _answering(answer: Callable[[socket.socket], None], received: Received) -> Generator[None]:
    """Hands each connection to a thread of its own; `received` learns the address."""

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        received.port = listener.getsockname()[1]
        received.endpoint = f"http://127.0.0.1:{received.port}"
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def raw_receiver(
    head: bytes, body: Sequence[bytes], *, endless: bool = False
) -> Generator[Received]:
    """Takes each batch, answers with these bytes, the pieces of the body again and again if
    `endless`, and closes. Counts the batches."""
    received = Received()
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                length = 0
                while (line := file.readline().strip()) != b"":
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                if len(file.read(length)) < length or not length:
                    return
                received.calls += 1
                connection.sendall(head)
                while not over.is_set():
                    for piece in body:
                        connection.sendall(piece)
                        over.wait(0.001)
                    if not endless:
                        return
            except OSError:
                pass  # the client has gone

    with _answering(answer, received):
        try:
            yield received
        finally:
            over.set()


@contextmanager
def trickling_receiver(interval_s: float = 0.2) -> Generator[Received]:
    """Accepts, reads, and answers one byte at a time, for ever."""
    received = Received()
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        received.calls += 1
        with connection:
            connection.settimeout(0.1)
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not over.wait(interval_s):
                    connection.sendall(b"x")
                    try:
                        connection.recv(1 << 16)
                    except TimeoutError:
                        pass
            except OSError:
                pass  # the client has gone

    with _answering(answer, received):
        try:
            yield received
        finally:
            over.set()


@contextmanager
def silent_receiver() -> Generator[Received]:
    """Accepts connections and never answers."""
    received = Received()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        received.port = listener.getsockname()[1]
        received.endpoint = f"http://127.0.0.1:{received.port}"
        yield received


@contextmanager
def refusing_receiver() -> Generator[Received]:
    """A port on which nobody listens."""
    received = Received()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        received.port = reserved.getsockname()[1]
        received.endpoint = f"http://127.0.0.1:{received.port}"
        yield received
