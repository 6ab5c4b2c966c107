"""The real server's processes and a collector: who arrives there, and that one which hangs holds up
neither answers nor a stop."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import decode_line
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Ask, ask
from tests.support.otlp_receivers import http_receiver, silent_receiver
from tests.support.recorded import wait_for
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
EXIT_S = 30.0
"""A server stops in a few seconds; a collector that is waited for takes 30 s and more."""
ANSWER_S = 30.0
"""A request takes milliseconds; one that waits for the collector takes its timeout, a minute."""


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def complete(server: RunningServer, *, request_id: str) -> None:
    with server.client() as client:
        answer = client.post(
            "/v1/completions",
            json={"model": server.model, "prompt": "one two three", "max_tokens": 4},
            headers={"X-Request-Id": request_id},
        )
    assert answer.status_code == 200, answer.text


@pytest.mark.case("CFG-04")
@pytest.mark.case("CFG-06")
def test_every_process_of_a_server_arrives_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    with http_receiver() as collector:
        monkeypatch.setenv(ENDPOINT, collector.endpoint)
        with running_server(tmp_path / "run", model=FAST_FAKE) as server:
            complete(server, request_id="r1")
            assert server.stop() == 0
            [log] = [
                line for line in server.log("agent").splitlines() if "exporting traces with" in line
            ]
        assert log.endswith(
            f"exporting traces with OTLP over HTTP to {collector.endpoint}/v1/traces"
        )
        resources = collector.resources()
    names = {(r["service.name"], r["service.instance.id"]) for r in resources}
    assert names == {
        ("pd-gateway", "gateway-0"),
        ("pd-prefill", "prefill-0"),
        ("pd-transfer", "transfer-0"),
        ("pd-decode", "decode-0"),
    }
    assert {r["deployment.environment.name"] for r in resources} == {"lab"}
    assert len({r["host.id"] for r in resources}) == 1


def spans_waiting(server: RunningServer) -> int:
    """Spans that the collector has not taken, as the agent says."""
    answer = httpx.get(f"{server.state['agent_url']}/health", trust_env=False)
    [exporter] = answer.json()["exporters"]
    return int(exporter["spans_waiting"])


@pytest.mark.case("EXP-01")
@pytest.mark.case("EXP-02")
def test_server_answers_and_stops_in_time_while_its_collector_hangs_and_keeps_every_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with silent_receiver() as collector:
        monkeypatch.setenv(ENDPOINT, collector.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with running_server(run, model=FAST_FAKE) as server:
            complete(server, request_id="r0")
            wait_for(lambda: spans_waiting(server) > 0, "spans that the collector does not take")
            for number in range(1, 5):
                begin_s = time.monotonic()
                answer = ask(server, Ask(request_id=f"r{number}", max_tokens=4, stream=True))
                assert time.monotonic() - begin_s < ANSWER_S
                assert answer.status == 200
            begin_s = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin_s < EXIT_S
            log = server.log("agent")
    spans = [span for line in lines_since(run / "traces") for span in decode_line(line)]
    assert len({span.trace_id for span in spans if "pd.request.id" in span.attributes}) == 5
    assert f"{len(spans)} spans were not exported and wait in {run / 'traces'}" in log
    assert "it did not answer in time" in log
