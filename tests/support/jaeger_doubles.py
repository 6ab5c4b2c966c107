"""Jaegers of several versions by what they answered when they were real (v1.76.0 = v2.13.0, one
trace of a real server), for tests of the client alone; the real one is in the stack's tests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

ANSWERS = Path(__file__).parent / "jaeger_answers"
TRACE_ID = "332f81c2494344c4d19739ccf039eb58"
REQUEST_ID = "slow-transfer"
SERVICES = ["pd-gateway", "pd-decode", "pd-prefill", "pd-transfer"]
PAGE = b"<!DOCTYPE html>\n<html lang='en'><body>not the page you are looking for</body></html>"

Answer = tuple[int, bytes]


@dataclass(slots=True)
class JaegerDouble:
    """One that answers. `older`, `v3`: which APIs it has; `by_attribute`: v3 finds by attribute.

    override   answers of paths, before everything else
    requests   path and parameters of each request
    """

    url: str = ""
    older: bool = True
    v3: bool = True
    by_attribute: bool = False
    override: dict[str, Answer] = field(default_factory=dict[str, Answer])
    requests: list[tuple[str, dict[str, str]]] = field(
        default_factory=list[tuple[str, dict[str, str]]]
    )

    def answer(self, path: str, parameters: dict[str, str]) -> Answer:
        self.requests.append((path, parameters))
        if path in self.override:
            return self.override[path]
        if path.startswith("/api/v3/"):
            if not self.v3:
                return 404, b"404 page not found\n"
            return self._v3(path.removeprefix("/api/v3/"), parameters)
        if path.startswith("/api/") and self.older:
            return self._older(path.removeprefix("/api/"), parameters)
        return 200, PAGE  # as its pages are answered, wherever one goes

    def _v3(self, what: str, parameters: dict[str, str]) -> Answer:
        whole = (ANSWERS / "v3_trace.json").read_bytes()
        none = 404, b'{"error":{"httpCode":404,"message":"No traces found"}}\n'
        if what == "services":
            return 200, json.dumps({"services": SERVICES}).encode()
        if what == "traces":
            if parameters.get("query.start_time_max", "") < "2026-11-30T03:29:10":
                return none
            wanted = json.loads(parameters.get("query.attributes", "{}"))
            other = self.by_attribute and wanted.get("pd.request.id", REQUEST_ID) != REQUEST_ID
            return none if other else (200, whole)
        return (200, whole) if what == f"traces/{TRACE_ID}" else none

    def _older(self, what: str, parameters: dict[str, str]) -> Answer:
        whole = (ANSWERS / "trace.json").read_bytes()
        if what == "services":
            return 200, json.dumps({"data": SERVICES, "total": len(SERVICES)}).encode()
        if what == "traces":
            wanted = json.loads(parameters.get("tags", "{}"))
            if wanted.get("pd.request.id", REQUEST_ID) != REQUEST_ID:
                return 200, b'{"data":[],"total":0,"limit":0,"offset":0,"errors":null}\n'
            return 200, whole
        if what == f"traces/{TRACE_ID}":
            return 200, whole
        return 404, b'{"data":null,"errors":[{"code":404,"msg":"trace not found"}]}\n'


@dataclass(slots=True)
class OneApi(JaegerDouble):
    """A real Jaeger of which one API alone is to be seen. `real`: its address."""

    real: str = ""

    def answer(self, path: str, parameters: dict[str, str]) -> Answer:
        self.requests.append((path, parameters))
        is_v3 = path.startswith("/api/v3/")
        if not (self.v3 if is_v3 else self.older):
            return 404, b"404 page not found\n"
        asked = httpx.get(f"{self.real}{path}", params=parameters, timeout=60.0, trust_env=False)
        return asked.status_code, asked.content


@contextlib.contextmanager
def jaeger_double(**settings: Any) -> Generator[JaegerDouble]:
    with _serving(JaegerDouble(**settings)) as double:
        yield double


@contextlib.contextmanager
def one_api(real: str, *, v3: bool) -> Generator[JaegerDouble]:
    """The Jaeger at `real` with API v3 alone, or with the older one alone."""
    with _serving(OneApi(real=real, v3=v3, older=not v3)) as double:
        yield double


@contextlib.contextmanager
def _serving(double: JaegerDouble) -> Generator[JaegerDouble]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            parameters = {name: values[0] for name, values in parse_qs(parts.query).items()}
            status, body = double.answer(parts.path, parameters)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
