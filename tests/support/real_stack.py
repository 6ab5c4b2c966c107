"""The real Jaeger, Prometheus and Alertmanager, started as users start them, for tests."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from server.stack.programs import missing_programs
from tests.support.server import ROOT, RunningServer

WAIT_S = 90.0
_START_S = 120.0
_POLL_S = 0.25
T = TypeVar("T")


def need_programs() -> None:
    """Skip where the programs are not installed; `.ci/run` installs them, and counts a skip as a
    failure."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (.ci/programs installs them)")


def wait_for(look: Callable[[], T | None], what: str, *, timeout_s: float = WAIT_S) -> T:
    """What `look` returns once that is something. AssertionError when it stays nothing."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(_POLL_S)


@dataclass(slots=True)
class RealStack:
    """A stack that is up."""

    folder: Path
    client: httpx.Client
    urls: dict[str, str]
    pids: dict[str, int]
    otlp: str

    def get(self, program: str, path: str, **parameters: Any) -> Any:
        """JSON of an answer 200."""
        answer = self.client.get(f"{self.urls[program]}{path}", params=parameters)
        assert answer.status_code == 200, f"{answer.url}: {answer.status_code} {answer.text[:300]}"
        return answer.json()

    def jaeger_traces(self, request_id: str) -> list[dict[str, Any]]:
        """By request id, in Jaeger's own JSON."""
        tags = json.dumps({"pd.request.id": request_id})
        return self.get("jaeger", "/api/traces", service="pd-gateway", tags=tags)["data"]

    def wait_for_trace(self, request_id: str) -> dict[str, Any]:
        """The one trace of a request, once it is stored."""
        [trace] = wait_for(lambda: self.jaeger_traces(request_id), f"trace of {request_id}")
        return trace

    def span_names(self, trace_id: str) -> list[str]:
        """Of what is stored of a trace; none where nothing is."""
        answer = self.client.get(f"{self.urls['jaeger']}/api/traces/{trace_id}")
        assert answer.status_code in {200, 404}, answer.text
        traces = answer.json()["data"] or ()
        return [span["operationName"] for trace in traces for span in trace["spans"]]

    def query(self, promql: str) -> list[dict[str, Any]]:
        """An instant query's series."""
        return self.get("prometheus", "/api/v1/query", query=promql)["data"]["result"]

    def value(self, promql: str) -> float | None:
        """Of a query with one series; None where there is none."""
        series = self.query(promql)
        return float(series[0]["value"][1]) if series else None

    def exemplars(self, promql: str) -> list[dict[str, Any]]:
        now = time.time()
        return self.get(
            *("prometheus", "/api/v1/query_exemplars"), query=promql, start=now - 3600, end=now + 60
        )["data"]


@contextlib.contextmanager
def real_stack(folder: Path, *options: str) -> Generator[RealStack]:
    """A stack on free ports; stopped on leaving."""
    need_programs()
    command = [sys.executable, "-m", "server", "stack"]
    up = [*command, "up", "--dir", str(folder), "--free-ports", "--json"]
    started = subprocess.run(
        [*up, "--timeout", str(_START_S), *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    state = json.loads(started.stdout)
    programs = state["programs"]
    try:
        with httpx.Client(timeout=30.0, trust_env=False) as client:
            urls = {one["name"]: one["url"] for one in programs}
            pids = {one["name"]: one["pid"] for one in programs}
            yield RealStack(folder, client, urls, pids, state["otlp"])
    finally:
        subprocess.run(
            [*command, "down", "--dir", str(folder)],
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True,
        )  # fmt: skip


@dataclass(slots=True)
class Webhook:
    """Where Alertmanager sends alerts in a test."""

    url: str
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """Of every message so far, in order."""
        return [
            alert
            for message in list(self.messages)
            for alert in message["alerts"]
            if alert["labels"]["alertname"] == name
        ]


@contextlib.contextmanager
def webhook_receiver() -> Generator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            webhook.messages.append(json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    webhook = Webhook(f"http://127.0.0.1:{server.server_address[1]}/alerts")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield webhook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def complete(
    server: RunningServer,
    request_id: str,
    *,
    stalls: str | None = None,
    max_tokens: int = 6,
    stream: bool = False,
    timeout_s: float = 60.0,
    parent: str | None = None,
) -> httpx.Response:
    """One request; `stalls` as the header X-PD-Faults, `parent` as traceparent."""
    headers = {"X-Request-Id": request_id}
    if stalls is not None:
        headers["X-PD-Faults"] = stalls
    if parent is not None:
        headers["traceparent"] = parent
    body = {
        "model": server.model,
        "prompt": "one two three four five six",
        "max_tokens": max_tokens,
        "stream": stream,
    }
    with server.client(timeout_s=timeout_s) as client:
        return client.post("/v1/completions", json=body, headers=headers)


def pdtrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "pdtrace", *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def tags(span: dict[str, Any]) -> dict[str, Any]:
    """Of a span in Jaeger's own JSON."""
    found: Sequence[dict[str, Any]] = span["tags"]
    return {tag["key"]: tag["value"] for tag in found}
