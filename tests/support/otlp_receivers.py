"""OTLP receivers on loopback that decode with the official definitions, and ones that misbehave."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received:
    """What a receiver got. `statuses` are answered in turn; the last one for ever."""

    def __init__(self, statuses: list[int] | None = None) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.endpoint = ""
        self.port = 0
        self.calls = 0
        self._statuses = statuses or [200]

    def next_status(self) -> int:
        status = self._statuses[min(self.calls, len(self._statuses) - 1)]
        self.calls += 1
        return status

    def span_names(self) -> list[str]:
        return [
            span.name
            for request in self.requests
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]


@contextmanager
def http_receiver(statuses: list[int] | None = None) -> Generator[Received]:
    """OTLP/HTTP; answers 404 to other paths than /v1/traces."""
    received = Received(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.paths.append(self.path)
            received.headers.append({key.lower(): value for key, value in self.headers.items()})
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            status = received.next_status() if self.path == "/v1/traces" else 404
            if status == 200:
                received.requests.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
        if self._received.next_status() != 200:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused by the test")
        self._received.requests.append(request)
        return ExportTraceServiceResponse()


@contextmanager
def grpc_receiver(statuses: list[int] | None = None) -> Generator[Received]:
    """OTLP/gRPC, plaintext. A status other than 200 is INVALID_ARGUMENT."""
    received = Received(statuses)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(received), server)
    received.port = server.add_insecure_port("127.0.0.1:0")
    received.endpoint = f"http://127.0.0.1:{received.port}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


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
