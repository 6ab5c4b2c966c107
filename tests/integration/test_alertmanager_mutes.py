"""The real Alertmanager with the shipped file: one trouble is one page, and mutes nothing else."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dashboards.rules.alert import Severity
from dashboards.rules.alerts import SILENT_S, alerts
from dashboards.rules.timing import seconds
from pdtrace.slo import DEFAULT_SLO
from server.config import Settings
from server.listening import free_loopback_port
from server.stack.programs import COLLECTOR, find_programs
from tests.support.real_stack import Webhook, need_programs, wait_for, webhook_receiver

pytestmark = pytest.mark.timeout(180)

SHIPPED = {alert.name: alert for alert in alerts(DEFAULT_SLO)}
_numbers = itertools.count()


@dataclass(slots=True)
class Alertmanager:
    client: httpx.Client
    webhook: Webhook

    def fire(self, *firing: Mapping[str, str]) -> None:
        """As Prometheus does: with the labels that the shipped rules give."""
        now = datetime.now(UTC)
        sent = [
            {
                "labels": {**_fixed(labels["alertname"]), **labels},
                "startsAt": now.isoformat(),
                "endsAt": (now + timedelta(minutes=10)).isoformat(),
            }
            for labels in firing
        ]
        self.client.post("/api/v2/alerts", json=sent).raise_for_status()

    def muted(self, mark: str) -> dict[str, bool] | None:
        """Of the alerts with this mark, by name, once Alertmanager has made up its mind."""
        answer: list[dict[str, Any]] = self.client.get("/api/v2/alerts").json()
        mine = [one for one in answer if one["labels"]["mark"] == mark]
        if any(one["status"]["state"] == "unprocessed" for one in mine):
            return None
        return {one["labels"]["alertname"]: one["status"]["state"] == "suppressed" for one in mine}


def _fixed(name: str) -> dict[str, str]:
    """Labels that an alert has whatever it is about."""
    return {name: value for name, value in SHIPPED[name].labels.items() if "{{" not in value}


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    need_programs()
    folder = tmp_path_factory.mktemp("alertmanager")
    address = f"127.0.0.1:{free_loopback_port()}"
    with webhook_receiver() as webhook:
        config = yaml.safe_load((COLLECTOR / "alertmanager.yml").read_text())
        config["receivers"][0]["webhook_configs"] = [{"url": webhook.url}]
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
        command = [
            str(find_programs().alertmanager),
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
        ]
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as process,
            httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client,
        ):
            try:
                wait_for(lambda: _is_ready(client), f"Alertmanager answers ({_end(folder)})")
                yield Alertmanager(client, webhook)
            finally:
                process.terminate()
                process.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").is_success
    except httpx.HTTPError:
        return False


def _end(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-300:]


def about(names: Iterable[str], **labels: str) -> list[dict[str, str]]:
    mark = f"case-{next(_numbers)}"
    return [{"alertname": name, "mark": mark, **labels} for name in names]


def settled(alertmanager: Alertmanager, fired: list[dict[str, str]]) -> dict[str, bool]:
    """Muted or not, by name."""
    alertmanager.fire(*fired)
    wanted = {labels["alertname"] for labels in fired}

    def look() -> dict[str, bool] | None:
        found = alertmanager.muted(fired[0]["mark"])
        return found if found is not None and set(found) == wanted else None

    return wait_for(look, "Alertmanager has looked at all of them")


FROZEN = (
    "PDWorkerNotProgressing",
    "PDProcessDown",
    "PDOldestRequestTooOld",
)
TICKETS = ("PDStageStalledOnWorker", "PDStageStalledOnPair", "PDKvLeaking")


def test_one_frozen_worker_is_one_message(alertmanager: Alertmanager) -> None:
    fired = about(FROZEN, worker="decode-1")
    muted = settled(alertmanager, fired)
    assert [name for name in FROZEN if not muted[name]] == ["PDProcessDown"]

    def told() -> set[str]:
        messages = list(alertmanager.webhook.messages)
        return {
            alert["labels"]["alertname"]
            for message in messages
            for alert in message["alerts"]
            if alert["labels"]["mark"] == fired[0]["mark"]
        }

    wait_for(told, "the page goes out")
    # What comes a group_wait later would have gone out before this one.
    later = about(["PDTelemetryAbsent"])
    alertmanager.fire(*later)
    wait_for(lambda: alertmanager.webhook.alerts("PDTelemetryAbsent"), "the next page goes out")
    assert told() == {"PDProcessDown"}


def test_a_loop_that_stands_still_is_the_page_where_the_process_is_ready(
    alertmanager: Alertmanager,
) -> None:
    names = [name for name in FROZEN if name != "PDProcessDown"]
    muted = settled(alertmanager, about(names, worker="decode-2"))
    assert [name for name in names if not muted[name]] == ["PDWorkerNotProgressing"]


def test_another_worker_and_what_is_of_no_worker_are_not_muted(alertmanager: Alertmanager) -> None:
    down = about(["PDProcessDown"], worker="decode-3")
    mark = down[0]["mark"]
    others = [
        {"alertname": "PDWorkerNotProgressing", "worker": "decode-4", "mark": mark},
        {"alertname": "PDOldestRequestTooOld", "stage": "gateway.queue", "mark": mark},
        {"alertname": "PDRequestsStalling", "stage": "transfer", "mark": mark},
        {"alertname": "PDTtftBudgetBurnFast", "slo": "ttft", "mark": mark},
    ]
    assert not any(settled(alertmanager, [*down, *others]).values())


def test_tickets_are_not_muted(alertmanager: Alertmanager) -> None:
    """One that was sent before and ends while it is muted would never be said to be resolved."""
    assert {SHIPPED[name].severity for name in TICKETS} == {Severity.TICKET}
    fired = about([*TICKETS, "PDProcessDown", "PDWorkerNotProgressing"], worker="decode-5")
    muted = settled(alertmanager, fired)
    assert {name for name in muted if muted[name]} == {"PDWorkerNotProgressing"}


def test_fast_burn_mutes_the_slow_one_of_its_own_objective_and_model(
    alertmanager: Alertmanager,
) -> None:
    fast = about(["PDTtftBudgetBurnFast"], slo="ttft", gen_ai_request_model="a")
    mark = fast[0]["mark"]
    own = {"alertname": "PDTtftBudgetBurnSlow", "slo": "ttft"}
    other = {"alertname": "PDErrorBudgetBurnSlow", "slo": "errors"}
    fired = [{**one, "gen_ai_request_model": "a", "mark": mark} for one in (own, other)]
    assert settled(alertmanager, [*fast, *fired]) == {
        "PDTtftBudgetBurnFast": False,
        "PDTtftBudgetBurnSlow": True,
        "PDErrorBudgetBurnSlow": False,
    }


def test_file_names_alerts_that_there_are() -> None:
    named = {
        name
        for rule in yaml.safe_load((COLLECTOR / "alertmanager.yml").read_text())["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        if matcher.startswith("alertname")
        for name in matcher.partition('"')[2].rstrip('"').split("|")
    }
    assert named
    assert named <= set(SHIPPED)


def test_what_mutes_a_page_ends_after_it() -> None:
    """Or the page would go out when all is over."""
    ends = {name: seconds(alert.keep) for name, alert in SHIPPED.items()}
    assert ends["PDProcessDown"] > ends["PDWorkerNotProgressing"] > ends["PDOldestRequestTooOld"]


def test_process_is_down_for_the_gateway_before_its_loop_is_called_silent() -> None:
    """What mutes has to be there first."""
    settings = Settings()
    assert max(settings.dead_after_s, settings.stalled_after_s) < SILENT_S
