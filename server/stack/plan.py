"""What is started with which addresses, and what the files beside it say. Pure.

The configuration files themselves are those of `collector/`, unchanged but for the webhook that
somebody asks for: what differs from place to place goes through the environment (Jaeger) and
through lists of targets (Prometheus).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from pdtrace.agent.slo_environment import sampling_environment
from pdtrace.slo import DEFAULT_SLO, Slo
from server.errors import StartError
from server.stack.programs import ALERTMANAGER, JAEGER, PROMETHEUS, Programs

HOST = "127.0.0.1"
AGENT_JOB, GATEWAY_JOB, SPANS_JOB, COLLECTOR_JOB = (
    "pdtrace-agent",
    "pdtrace-gateway",
    "span-metrics",
    "collector",
)
"""Scrape jobs of `collector/prometheus.yml`; a list of targets is `targets/<job>-<name>.json`."""
ONE_AGENT_WAIT = "5s"
"""Decision wait where one agent sends each request whole, when it has ended."""
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h))+")
_NO_WEBHOOK = "webhook_configs: []"
_RETENTION = "7d"
_RUN_DIR_LABEL = "__meta_pdtrace_run_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All on loopback. The defaults are those that everybody knows."""

    otlp_grpc: int = 4317
    otlp_http: int = 4318
    jaeger: int = 16686
    jaeger_grpc: int = 16685
    jaeger_health: int = 13133
    jaeger_metrics: int = 8888
    span_metrics: int = 8889
    prometheus: int = 9090
    alertmanager: int = 9093


def free_ports(free_port: Callable[[], int]) -> Ports:
    """Ports that nobody uses now."""
    found: dict[int, str] = {}
    for name in port_names():
        while (port := free_port()) in found:
            pass
        found[port] = name
    return Ports(**{name: port for port, name in found.items()})


def port_names() -> list[str]:
    return [field.name for field in fields(Ports)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What Jaeger's tail sampling keeps.

    keep_percent   of requests that nothing is wrong with
    decision_wait  a duration as Go writes it
    slo            limits above which something is wrong

    Raises StartError for what is no duration.
    """

    keep_percent: float = 100.0
    decision_wait: str = ONE_AGENT_WAIT
    slo: Slo = DEFAULT_SLO

    def __post_init__(self) -> None:
        if not (_DURATION.fullmatch(self.decision_wait) and re.search("[1-9]", self.decision_wait)):
            raise StartError(
                f"--decision-wait {self.decision_wait!r} is no duration: give one such as 660s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program to start. `ready_url` answers 200 once it serves; `url` is for people."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    url: str
    ready_url: str


def plan_programs(
    programs: Programs, folder: Path, ports: Ports, sampling: Sampling
) -> tuple[Program, ...]:
    """`folder`: where `plan_files` were written, absolute."""

    def url(port: int) -> str:
        return f"http://{HOST}:{port}"

    return (
        Program(
            name=PROMETHEUS,
            command=(
                str(programs.prometheus),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--storage.tsdb.retention.time={_RETENTION}",
                f"--web.listen-address={HOST}:{ports.prometheus}",
                "--enable-feature=exemplar-storage",
            ),
            environment={},
            url=url(ports.prometheus),
            ready_url=f"{url(ports.prometheus)}/-/ready",
        ),
        Program(
            name=ALERTMANAGER,
            command=(
                str(programs.alertmanager),
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address={HOST}:{ports.alertmanager}",
                "--cluster.listen-address=",
            ),
            environment={},
            url=url(ports.alertmanager),
            ready_url=f"{url(ports.alertmanager)}/-/ready",
        ),
        Program(
            name=JAEGER,
            command=(str(programs.jaeger), "--config", str(folder / "jaeger.yaml")),
            environment={
                "PD_OTLP_GRPC": f"{HOST}:{ports.otlp_grpc}",
                "PD_OTLP_HTTP": f"{HOST}:{ports.otlp_http}",
                "PD_JAEGER_HTTP": f"{HOST}:{ports.jaeger}",
                "PD_JAEGER_GRPC": f"{HOST}:{ports.jaeger_grpc}",
                "PD_JAEGER_HEALTH": f"{HOST}:{ports.jaeger_health}",
                "PD_JAEGER_METRICS_HOST": HOST,
                "PD_JAEGER_METRICS_PORT": str(ports.jaeger_metrics),
                "PD_SPAN_METRICS": f"{HOST}:{ports.span_metrics}",
                "PD_PROMETHEUS_URL": url(ports.prometheus),
                "PD_KEEP_PERCENT": f"{sampling.keep_percent:g}",
                "PD_DECISION_WAIT": sampling.decision_wait,
                **sampling_environment(sampling.slo),
            },
            url=url(ports.jaeger),
            ready_url=f"{url(ports.jaeger)}/api/v3/services",
        ),
    )


def plan_targets(ports: Ports) -> dict[str, str]:
    """Lists of targets that are there as long as the stack is: path → text."""
    return {
        f"targets/{job}-stack.json": target_list(HOST, port)
        for job, port in (
            (SPANS_JOB, ports.span_metrics),
            (COLLECTOR_JOB, ports.jaeger_metrics),
            ("alertmanager", ports.alertmanager),
        )
    }


def target_list(host: str, port: int, *, run_dir: Path | None = None) -> str:
    """A list of one target in the form that Prometheus reads. `run_dir` of a server is kept in a
    label that no time series gets."""
    shown = f"[{host}]" if ":" in host else host
    labels = {} if run_dir is None else {_RUN_DIR_LABEL: str(run_dir)}
    return json.dumps([{"targets": [f"{shown}:{port}"], "labels": labels}]) + "\n"


def run_dir_of(text: str) -> Path | None:
    """The run directory that a list was written for."""
    try:
        return Path(json.loads(text)[0]["labels"][_RUN_DIR_LABEL])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def with_webhook(alertmanager_yml: str, url: str | None) -> str:
    """Alertmanager's file with a webhook in its receiver. Raises StartError if it has no place for
    one, because somebody changed it."""
    if url is None:
        return alertmanager_yml
    if alertmanager_yml.count(_NO_WEBHOOK) != 1:
        raise StartError(
            f"collector/alertmanager.yml has receivers of its own (no {_NO_WEBHOOK!r}): "
            "add the webhook there, and leave --webhook out"
        )
    webhook = json.dumps([{"url": url, "send_resolved": True}])
    return alertmanager_yml.replace(_NO_WEBHOOK, f"webhook_configs: {webhook}")
