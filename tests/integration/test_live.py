"""What a running server tells of requests in flight while its processes are stopped or killed.

One server; its requests are held in a stage by the fault hooks, its processes by SIGSTOP.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from server.injection.fault import Freeze
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Ask, ask, ask_all
from tests.support.injection import clear, inject
from tests.support.server import ROOT, RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

FOREVER_MS = 3_600_000
PATIENCE_S = 45.0

T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run_dir = tmp_path_factory.mktemp("live") / "run"
    with running_server(run_dir, "--allow-faults", model=FAST_FAKE) as server:
        usual = [
            Ask(prompt="x" * (20 + i), max_tokens=6, stream=True, request_id=f"usual-{i}")
            for i in range(24)
        ]
        answers = ask_all(server, usual, at_once=2)
        assert {answer.status for answer in answers} == {200}
        yield server


def pdtrace(server: RunningServer, *arguments: str, code: int = 0) -> Any:
    command = [sys.executable, "-m", "pdtrace", *arguments, "--from", str(server.run_dir)]
    finished = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == code, (finished.stdout, finished.stderr)
    return json.loads(finished.stdout)


def agent_url(server: RunningServer) -> str:
    return json.loads((server.run_dir / "agent.json").read_text())["url"]


def in_flight(server: RunningServer, request_id: str) -> dict[str, Any] | None:
    look = pdtrace(server, "top", "--once")
    return next((r for r in look["requests"] if r["request_id"] == request_id), None)


def in_stage(server: RunningServer, request_id: str, stage: str) -> dict[str, Any] | None:
    found = in_flight(server, request_id)
    return found if found and found["stage"] == stage else None


def eventually(probe: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


@contextmanager
def held(server: RunningServer, request_id: str, stage: str) -> Generator[None]:
    """A request that stays in `stage` until its client leaves, which is at the end."""
    url = urlsplit(server.url)
    body = json.dumps(
        {"model": server.model, "prompt": "held", "max_tokens": 8, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    inject(server, Freeze(stage=stage, ms=FOREVER_MS, request=request_id))
    with socket.create_connection((url.hostname or "", url.port or 0)) as connection:
        connection.sendall(head.encode() + body)
        yield
    clear(server)
    eventually(lambda: in_flight(server, request_id) is None)


@contextmanager
def stopped(pid: int) -> Generator[None]:
    """A process that stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def metric(server: RunningServer, name: str, **labels: str) -> float:
    """A sample of the agent's /metrics; 0 where it is absent."""
    text = httpx.get(f"{agent_url(server)}/metrics", timeout=PATIENCE_S, trust_env=False).text
    total = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total


@pytest.mark.parametrize(
    ("stage", "worker"),
    [
        ("gateway.dispatch", "gateway-0"),
        ("prefill.queue", "prefill-0"),
        ("decode.queue", "decode-0"),
        ("decode.generate", "decode-0"),
    ],
)
def test_request_that_never_finishes_is_shown_where_it_is(
    server: RunningServer, stage: str, worker: str
) -> None:
    name = f"forever-{stage}"
    with held(server, name, stage):
        found = eventually(lambda: in_stage(server, name, stage))
        assert found["worker"] == worker
        later = in_flight(server, name)
        assert later is not None
        assert later["stage_age_s"] > found["stage_age_s"]
        [why] = pdtrace(server, "why", name)["requests"]
        assert why["open"] is True
        assert why["verdict"]["stage"] == stage


def test_top_why_and_metrics_go_on_while_the_gateway_is_stopped(server: RunningServer) -> None:
    name, stage = "frozen", "gateway.dispatch"
    with held(server, name, stage):
        eventually(lambda: in_stage(server, name, stage))
        with stopped(server.pid("gateway-0")):
            first = metric(server, "pd_open_request_oldest_age_seconds", stage=stage)
            assert first > 0
            assert metric(server, "pd_open_requests", stage=stage) == 1
            assert in_stage(server, name, stage)
            [why] = pdtrace(server, "why", name)["requests"]
            assert why["verdict"]["stage"] == stage
            then = metric(server, "pd_open_request_oldest_age_seconds", stage=stage)
            assert then > first


def test_worker_that_is_stopped_shows_as_stalled_with_what_it_holds(server: RunningServer) -> None:
    def stalled() -> dict[str, Any] | None:
        processes = pdtrace(server, "top", "--once")["processes"]
        [process] = [p for p in processes if p["instance"] == "decode-0"]
        return process if process["state"] == "stalled" else None

    with held(server, "stalled", "decode.queue"):
        eventually(lambda: in_stage(server, "stalled", "decode.queue"))
        with stopped(server.pid("decode-0")):
            process = eventually(stalled)
            assert process["progress_age_s"] > 0.5
            assert process["halt"] == "stopped"
            assert process["open_requests"] == 1
            url = f"{agent_url(server)}/inflight"

            def states_told_by_agent() -> list[str]:
                processes = httpx.get(url, timeout=PATIENCE_S, trust_env=False).json()["processes"]
                return [p["state"] for p in processes if p["instance"] == "decode-0"]

            eventually(lambda: states_told_by_agent() == ["stalled"])
    with server.client() as client:  # the gateway took the worker for dead
        eventually(lambda: client.get("/ready").status_code == 200)


def test_top_and_why_need_no_agent(server: RunningServer) -> None:
    name = "without-agent"
    with held(server, name, "prefill.queue"), stopped(server.pid("agent")):
        eventually(lambda: in_stage(server, name, "prefill.queue"))
        [why] = pdtrace(server, "why", name)["requests"]
        assert why["verdict"]["stage"] == "prefill.queue"


def test_stuck_request_is_reported_once_in_log_metrics_and_span(server: RunningServer) -> None:
    name, stage = "stuck", "gateway.dispatch"
    counted = metric(server, "pd_stuck_total", stage=stage)
    with held(server, name, stage):
        eventually(lambda: in_stage(server, name, stage))
        eventually(lambda: metric(server, "pd_stuck_total", stage=stage) > counted)
        seen = httpx.get(
            f"{agent_url(server)}/inflight?id={name}", timeout=PATIENCE_S, trust_env=False
        )
        [shown] = seen.json()["requests"]
        assert shown["stuck"] is True
    assert metric(server, "pd_stuck_total", stage=stage) == counted + 1
    lines = [line for line in server.log("agent").splitlines() if f"request {name} " in line]
    assert len(lines) == 1
    assert stage in lines[0]
    spans = eventually(
        lambda: [
            span
            for trace in read_source(server.run_dir).traces
            for span in trace.spans
            if span.attributes.get(a.REQUEST_ID.key) == name and span.events
        ]
    )
    events = [(span.name, event.name) for span in spans for event in span.events]
    assert events.count((stage, "pd.stuck")) == 1
    assert [event for _, event in events].count("pd.stuck") == 1


def test_finished_requests_are_in_the_metrics(server: RunningServer) -> None:
    done = metric(server, "pd_finished_requests_total", outcome="completed")
    answer = ask(server, Ask(prompt="one more", max_tokens=4, stream=True, request_id="counted"))
    assert answer.status == 200
    eventually(
        lambda: metric(server, "pd_finished_requests_total", outcome="completed") == done + 1
    )
    counted = metric(server, "pd_stage_duration_seconds_count", stage="prefill.compute")
    assert counted >= done
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    text = httpx.get(
        f"{agent_url(server)}/metrics", headers=accept, timeout=PATIENCE_S, trust_env=False
    ).text
    assert text.endswith("# EOF\n")
    exemplars = set(re.findall(r'trace_id="([0-9a-f]{32})"', text))
    known = {trace.trace_id for trace in read_source(server.run_dir).traces}
    assert exemplars
    assert exemplars <= known


def test_health_says_that_the_agent_keeps_up(server: RunningServer) -> None:
    answer = httpx.get(f"{agent_url(server)}/health", timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200
