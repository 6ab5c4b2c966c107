"""An OTLP/HTTP receiver in a process of its own that takes everything at once and keeps nothing."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        while length > 0:
            read = len(self.rfile.read(min(length, 1 << 20)))
            if not read:
                return
            length -= read
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def running() -> Generator[str]:
    """Base URL of a receiver that lives as long as the context."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.otlp_sink"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serves until killed; the first line printed is the base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
