"""A real OpenTelemetry Collector and a real Prometheus on free ports of loopback, for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain_text
from prometheus_client.samples import Sample

from pdtrace.otlp.protobuf import serialize_request
from pdtrace.spans import Span
from server.stack.programs import COLLECTOR
from tests.support.programs import otelcol
from tests.support.real_stack import need_programs, wait_for

HOST = "127.0.0.1"
_STOP_S = 60.0


def free_ports(count: int) -> list[int]:
    """Different ones that nobody uses now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def _running(
    command: Sequence[str | Path], environment: Mapping[str, str], ready_url: str, log: Path
) -> Generator[None]:
    """A process from when `ready_url` answers 200 until leaving. AssertionError with its log when
    it ends before."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, f"{command[0]} has ended:\n{log.read_text()}"
            return _answers(ready_url)

        wait_for(ready, f"an answer from {ready_url}")
        yield
        assert process.poll() is None, f"{command[0]} has ended:\n{log.read_text()}"
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=30.0).status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True, slots=True)
class RunningCollector:
    """`otlp` takes OTLP over HTTP. Of the two pages of metrics `spans` is about the spans that came
    and `own` about the collector."""

    otlp: str
    spans_port: int
    own_port: int

    def send(self, spans: Iterable[Span]) -> None:
        """As one export, over a connection of its own."""
        answer = httpx.post(
            f"{self.otlp}/v1/traces",
            content=serialize_request(spans),
            headers={"Content-Type": "application/x-protobuf"},
            trust_env=False,
            timeout=60.0,
        )
        assert answer.status_code == 200, answer.text

    def span_metrics(self) -> list[Sample]:
        return _samples(self.spans_port)

    def own_metric(self, name: str, **labels: str) -> float:
        """Sum of the samples that have these labels."""
        wanted = labels.items()
        return sum(
            sample.value
            for sample in _samples(self.own_port)
            if sample.name == name and wanted <= sample.labels.items()
        )


def _samples(port: int) -> list[Sample]:
    """In OpenMetrics where the page can be had in it: nothing else has exemplars."""
    answer = httpx.get(
        f"http://{HOST}:{port}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
        trust_env=False,
        timeout=60.0,
    )
    assert answer.status_code == 200, answer.text
    is_open = answer.headers["content-type"].startswith("application/openmetrics-text")
    families = (openmetrics if is_open else plain_text)(answer.text)
    return [sample for family in families for sample in family.samples]


@contextlib.contextmanager
def running_collector(
    folder: Path, name: str, environment: Mapping[str, str], *over: Path
) -> Generator[RunningCollector]:
    """With a file of collector/, and with files laid over it. Its addresses are the variables that
    the file has for them."""
    program = otelcol()
    grpc, http, health, spans, own = free_ports(5)
    addresses = {
        "PD_OTLP_GRPC": f"{HOST}:{grpc}",
        "PD_OTLP_HTTP": f"{HOST}:{http}",
        "PD_SPAN_METRICS": f"{HOST}:{spans}",
        **dict.fromkeys(("PD_COLLECTOR_HEALTH", "PD_HEALTH"), f"{HOST}:{health}"),
        **dict.fromkeys(("PD_COLLECTOR_METRICS_PORT", "PD_METRICS_PORT"), str(own)),
    }
    files = [f"--config={path}" for path in (COLLECTOR / name, *over)]
    with _running(
        [program, *files],
        {**addresses, **environment},
        f"http://{HOST}:{health}/status",
        folder / f"{Path(name).stem}.log",
    ):
        yield RunningCollector(f"http://{HOST}:{http}", spans, own)


@dataclass(frozen=True, slots=True)
class RunningPrometheus:
    url: str

    def query(self, promql: str) -> list[dict[str, Any]]:
        """An instant query's series."""
        return self._get("query", query=promql)["result"]

    def exemplars(self, promql: str, start_s: float, end_s: float) -> list[dict[str, str]]:
        """Labels of each."""
        series = self._get("query_exemplars", query=promql, start=start_s, end=end_s)
        return [exemplar["labels"] for one in series for exemplar in one["exemplars"]]

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(
            f"{self.url}/api/v1/{path}", params=parameters, trust_env=False, timeout=60.0
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]


@contextlib.contextmanager
def running_prometheus(folder: Path, config: Path, *options: str) -> Generator[RunningPrometheus]:
    """With exemplars; its data in `folder`."""
    need_programs()
    program = shutil.which("prometheus")
    assert program
    [port] = free_ports(1)
    url = f"http://{HOST}:{port}"
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
        "--enable-feature=exemplar-storage",
        *options,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with _running(command, {}, f"{url}/-/ready", folder / "prometheus.log"):
        yield RunningPrometheus(url)
