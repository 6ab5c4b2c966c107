"""Metrics of a server's agent and gateway after twenty requests: all that should move has moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdtrace.agent.endpoint import read_address
from pdtrace.stages import CHAINS, STAGE_BY_NAME, Mode
from tests.support.completions import Ask, ask_all
from tests.support.server import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

COUNT = 20
WITHIN_S = 60.0

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(url: str) -> Samples:
    body = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(v for (found, has), v in samples.items() if found == name and wanted <= has)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.case("MET-02")
def test_every_metric_of_a_finished_request_moves_by_the_number_of_requests(
    fake_pd_server: RunningServer,
) -> None:
    wait_for(lambda: read_address(fake_pd_server.run_dir) is not None)
    address = read_address(fake_pd_server.run_dir)
    assert address is not None
    agent = address.url
    wait_for(lambda: total(scraped(agent), "pd_open_requests") == 0)
    before, gateway_before = scraped(agent), scraped(fake_pd_server.url)
    asks = [
        Ask(prompt=f"moved {number} " + "x" * 40, max_tokens=8, stream=True)
        for number in range(COUNT)
    ]
    answers = ask_all(fake_pd_server, asks, at_once=4)
    assert {answer.status for answer in answers} == {200}

    def grown(name: str, **labels: str) -> float:
        return total(scraped(agent), name, **labels) - total(before, name, **labels)

    wait_for(lambda: grown("pd_finished_requests_total", outcome="completed") == COUNT)
    after = scraped(agent)
    for stage in CHAINS[Mode.PD]:
        name = "pd_stage_duration_seconds_count"
        count = total(after, name, stage=stage.name) - total(before, name, stage=stage.name)
        assert count == COUNT, stage.name
    for stage in ("prefill.bootstrap", "prefill.hold", "transfer.queue", "transfer.copy"):
        assert STAGE_BY_NAME[stage]
        name = "pd_stage_duration_seconds_count"
        assert total(after, name, stage=stage) - total(before, name, stage=stage) >= COUNT, stage
    for name in (
        "pd_request_duration_seconds_count",
        "pd_time_to_first_token_seconds_count",
        "pd_requests_by_pair_total",
        "pd_agent_requests_total",
    ):
        assert total(after, name) - total(before, name) == COUNT, name
    for name in (
        "pd_request_duration_seconds_sum",
        "pd_time_to_first_token_seconds_sum",
        "pd_transfer_seconds_count",
        "pd_transfer_bytes_total",
        "pd_copied_bytes_total",
        "pd_step_duration_seconds_count",
        "pd_step_batch_size_sum",
        "pd_steps_total",
        "pd_agent_spans_recorded_total",
        "pd_agent_records_total",
    ):
        assert total(after, name) > total(before, name), name
    # What the gateway counts and what the agent makes of the marks is the same.
    gateway = scraped(fake_pd_server.url)
    name = "pd_requests_total"
    completed = {"outcome": "completed"}
    assert total(gateway, name, **completed) - total(gateway_before, name, **completed) == COUNT
    assert total(after, "pd_agent_errors_total") == 0
    assert total(after, "pd_agent_metrics_errors_total") == 0
