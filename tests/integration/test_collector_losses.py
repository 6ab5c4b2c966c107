"""What the alert PDCollectorLosing asks for is what a real collector counts when it loses spans.

Each way to lose some is made to happen: limits are made small in copies of the shipped files.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards import names, promql
from dashboards.rules.telemetry import LOSSES
from server.listening import free_loopback_port
from server.stack.programs import COLLECTOR, jaeger_path
from tests.support.real_stack import need_programs, wait_for

pytestmark = pytest.mark.timeout(240)

HOST = "127.0.0.1"
RETRIES_S = {"max_elapsed_time": 2, "initial_interval": 1, "max_interval": 1}
RETRIES = "\n      ".join(f"{name}: {s}s" for name, s in RETRIES_S.items())
NO_ROOM = {
    "num_traces: 100000": "num_traces: 20",
    "aggregation_cardinality_limit: 5000": "aggregation_cardinality_limit: 3",
    "queue_size: 5000": "queue_size: 1\n      num_consumers: 1",
    "max_elapsed_time: 10m": RETRIES,
    "timeout: 1s": "timeout: 100ms",
}
NO_MEMORY = {"limit_mib: 1536": "limit_mib: 1", "spike_limit_mib: 256": "spike_limit_mib: 0"}


@dataclass(slots=True)
class Collector:
    client: httpx.Client
    otlp: str
    pages: tuple[str, str]

    def send(self, count: int = 1) -> bool:
        """Spans of as many requests, each of another name. Whether they were taken."""
        now = time.time_ns()
        spans = [
            {
                "traceId": secrets.token_hex(16),
                "spanId": secrets.token_hex(8),
                "name": f"operation {secrets.token_hex(4)}",
                "kind": 2,
                "startTimeUnixNano": str(now - 1_000_000),
                "endTimeUnixNano": str(now),
            }
            for _ in range(count)
        ]
        service = {"key": "service.name", "value": {"stringValue": "pd-gateway"}}
        resource: dict[str, Any] = {"attributes": [service]}
        body = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]}
        return self.client.post(f"{self.otlp}/v1/traces", json=body).is_success

    def counted(self, counter: str) -> float | None:
        """Of a counter as the alert names it; None where it is not exposed."""
        [selector] = promql.selectors(promql.parse(counter))
        wanted = {label: value for label, _, value in selector.matchers}
        found = [
            sample.value
            for page in self.pages
            for family in text_string_to_metric_families(self.client.get(page).text)
            for sample in family.samples
            if sample.name == selector.name and wanted.items() <= sample.labels.items()
        ]
        return sum(found) if found else None


@contextmanager
def collector(folder: Path, changes: Mapping[str, str]) -> Generator[Collector]:
    """`otel-collector.yaml` with changes, run by Jaeger, which is a collector; nobody stores."""
    need_programs()
    text = (COLLECTOR / "otel-collector.yaml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "collector.yaml").write_text(text)
    grpc, http, health, own, spans = (free_loopback_port() for _ in range(5))
    environment = {
        "PD_OTLP_GRPC": f"{HOST}:{grpc}",
        "PD_OTLP_HTTP": f"{HOST}:{http}",
        "PD_COLLECTOR_HEALTH": f"{HOST}:{health}",
        "PD_COLLECTOR_METRICS_PORT": str(own),
        "PD_SPAN_METRICS": f"{HOST}:{spans}",
        "PD_STORE": f"{HOST}:1",
        "PD_DECISION_WAIT": "1s",
        "PD_KEEP_PERCENT": "100",
    }
    command = [jaeger_path(), "--config", folder / "collector.yaml"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log
        ) as process,
        httpx.Client(timeout=30, trust_env=False) as client,
    ):
        pages = (f"http://{HOST}:{own}/metrics", f"http://{HOST}:{spans}/metrics")
        running = Collector(client, f"http://{HOST}:{http}", pages)

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()[-600:]
            try:
                return client.get(f"http://{HOST}:{health}/status").is_success
            except httpx.HTTPError:
                return False

        try:
            wait_for(answers, "the collector answers")
            yield running
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, float]]:
    """Every counter that the alert asks for, after all of it was lost."""
    folder = tmp_path_factory.mktemp("losses")
    found: dict[str, float] = {}
    with collector(folder / "room", NO_ROOM) as small:
        assert small.send(60)  # more than are remembered until they are decided

        def lost() -> bool:
            assert small.send()  # one by one they are decided, and go to a store that is away
            found.update(
                (loss.what, value)
                for loss in LOSSES
                if (value := small.counted(loss.counter)) is not None
            )
            wanted = {loss.what for loss in LOSSES} - {"refused", "failed inside"}
            return all(found.get(what) for what in wanted)

        wait_for(lost, "spans are lost in each way")
    with collector(folder / "memory", NO_MEMORY) as full:
        # It looks at its memory once a second.
        wait_for(lambda: not full.send(), "the collector refuses spans")
        found["refused"] = full.counted(names.COLLECTOR_REFUSED) or 0
    yield found


@pytest.mark.parametrize(
    "what", [loss.what for loss in LOSSES if loss.counter != names.COLLECTOR_FAILED]
)
def test_each_loss_is_counted_where_the_alert_looks(counted: dict[str, float], what: str) -> None:
    assert counted[what] > 0


def test_receivers_own_faults_are_a_counter_too(counted: dict[str, float]) -> None:
    """Nothing made one happen."""
    assert counted["failed inside"] == 0
