"""The boards' queries at short and long ranges, in a real Prometheus that scraped every 15 s or
every minute: filled in by Grafana's rules, each returns data, and no point of it is missing."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.samples import Sample

from dashboards import intervals, names, targets
from dashboards.build import boards
from dashboards.rules import recordings as rec
from dashboards.sdk import EMPTY_WHILE, STEP
from dashboards.targets import Target
from pdtrace.slo import DEFAULT_SLO
from tests.support import expositions
from tests.support.marked_requests import (
    TRANSFER,
    aborted,
    completed,
    pd_moments,
    request_of,
    until,
)
from tests.support.own_prometheus import prometheus_with
from tests.support.programs import program

BOARDS = boards()
END_S = 1_760_000_000
SPAN_S = 1_500
"""How much there is to see before the end: less than the long range, more than its step."""
FIVE_MINUTES_S, WEEK_S = 300, 7 * 86_400
POINTS = 700
"""Pixels of a wide panel."""

pytestmark = [pytest.mark.case("DSH-04"), pytest.mark.timeout(240)]


@dataclass(frozen=True, slots=True)
class Scraped:
    """A Prometheus that was scraped that often."""

    scrape_s: int
    client: httpx.Client

    def ask(self, target: Target, *, range_s: int, least: str | None) -> list[list[float | None]]:
        """Values of each series at each step; None where there is no number."""
        windows = intervals.windows(range_s=range_s, points=POINTS, least=least)
        filled = {**targets.ALL, **windows, "stage": "transfer", STEP: str(least)}
        expr = targets.fill(target.expr, filled)
        step_s = intervals.seconds(windows["__interval"])
        last_s = math.floor(END_S / step_s) * step_s
        if target.instant:
            asked: dict[str, Any] = {"query": expr, "time": END_S}
        else:
            start_s = math.ceil((END_S - range_s) / step_s) * step_s
            asked = {"query": expr, "start": start_s, "end": last_s, "step": step_s}
        path = "query" if target.instant else "query_range"
        answer = self.client.post(f"/api/v1/{path}", data=asked)
        assert answer.status_code == 200, f"{expr}: {answer.text}"
        series = answer.json()["data"]["result"]
        if target.instant:
            return [[number(one["value"])] for one in series]
        times = [last_s - step_s * back for back in range(round(min(range_s, SPAN_S) / step_s))]
        return [
            [known.get(at) for at in times if at >= END_S - SPAN_S + window_s(windows)]
            for known in (
                {float(at): number((at, told)) for at, told in one["values"]} for one in series
            )
        ]


def window_s(windows: Mapping[str, str]) -> float:
    return intervals.seconds(windows["__rate_interval"])


def number(point: tuple[float, str]) -> float | None:
    value = float(point[1])
    return value if math.isfinite(value) else None


@pytest.fixture(scope="module", params=[15, 60], ids=["scrape 15 s", "scrape 60 s"])
def scraped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scraped]:
    program("promtool")
    folder = tmp_path_factory.mktemp("prometheus")
    text = folder / "samples.txt"
    with text.open("w") as out:
        for line in exposition(request.param):
            out.write(line)
    made = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(text)]
    subprocess.run([*made, str(folder / "data")], check=True, capture_output=True, timeout=200)
    with prometheus_with(folder / "data") as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Scraped(request.param, client)


def exposition(scrape_s: int) -> Iterator[str]:
    """What was scraped: counters grow by the same at each scrape, gauges stay."""
    times = range(END_S - SPAN_S, END_S + 1, scrape_s)
    for name, labels, value in samples():
        told = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
        grows = name.endswith(("_total", "_bucket", "_sum", "_count"))
        for at, when_s in enumerate(times, start=1):
            yield f"{name}{{{told}}} {value * at if grows else value} {when_s}\n"
    yield "# EOF\n"


def samples() -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Of an agent and a gateway that serve, and what Jaeger and the rules make of it."""
    agent, gateway = expositions.fresh_agent(), expositions.fresh_gateway()
    failed = [
        *until(pd_moments(), 1_200),
        aborted(TRANSFER, 1_200, "failed", "checksum_mismatch", "transfer-0"),
        completed(2_000, "failed", "checksum_mismatch", "transfer-0", 502),
    ]
    expositions.serve(agent, *(request_of(moments) for moments in (pd_moments(), failed)))
    agent.stuck("transfer", "transfer-0")
    expositions.serve_at_gateway(gateway)
    yield from _of(names.AGENT_JOB, expositions.agent_samples(agent, finished=2))
    yield from _of(names.GATEWAY_JOB, expositions.gateway_samples(gateway))
    root = {
        "service_name": names.ROOT_SERVICE,
        "span_kind": "SPAN_KIND_SERVER",
        names.SPAN_MODEL: "m",
        names.SPAN_STALL_STAGE: "transfer",
        names.SPAN_PREFILL: "prefill-0",
        names.SPAN_DECODE: "decode-0",
    }
    yield names.SPAN_CALLS, root, 1.0
    for edge, below in (("0.1", 0.5), ("0.25", 1.0), ("+Inf", 1.0)):
        yield f"{names.SPAN_DURATION}_bucket", {**root, "le": edge}, below
    for objective in rec.objectives(DEFAULT_SLO):
        for window in rec.BURN_WINDOWS:
            yield rec.error_ratio(window), {"slo": objective.key, names.MODEL: "m"}, 0.001
    for job in (names.AGENT_JOB, names.GATEWAY_JOB):
        yield names.UP, {"job": job, "instance": f"{job}:1"}, 1.0


def _of(job: str, found: list[Sample]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for sample in found:
        if sample.value or not sample.name.endswith("_bucket"):
            yield sample.name, {"job": job, "instance": f"{job}:1", **sample.labels}, sample.value


def every_target() -> list[Target]:
    found = {
        (target.panel, target.ref, target.expr): target
        for target in targets.targets(BOARDS)
        if target.kind == "prometheus" and not may_be_empty(target)
    }
    return list(found.values())


def may_be_empty(target: Target) -> bool:
    [panel] = [one for one in BOARDS[target.board]["panels"] if one["title"] == target.panel]
    return EMPTY_WHILE in panel["description"]


def chosen_by_default() -> str:
    [variable] = [v for v in BOARDS["pd-stages"]["templating"]["list"] if v["name"] == STEP]
    return variable["current"]["value"]


@pytest.mark.parametrize("range_s", [FIVE_MINUTES_S, WEEK_S], ids=["5 min", "7 d"])
def test_every_query_returns_data_without_holes(scraped: Scraped, range_s: int) -> None:
    """With the data source as Grafana makes it, whatever the scrape interval is."""
    asked = every_target()
    assert len(asked) > 60
    for target in asked:
        least = target.fields["interval"].replace(f"${STEP}", chosen_by_default())
        series = scraped.ask(target, range_s=range_s, least=least)
        where = f"{target.board} / {target.panel} {target.ref}"
        assert any(known and None not in known for known in series), f"{where}: {series}"


def test_without_a_least_step_there_would_be_none(scraped: Scraped) -> None:
    """So that the test above cannot pass for another reason."""
    target = next(one for one in every_target() if one.panel == "Requests by outcome")
    series = scraped.ask(target, range_s=FIVE_MINUTES_S, least=None)
    assert bool(series) == (scraped.scrape_s <= intervals.SOURCE_S)
