"""The alerts as promtool sees them: each fires, its healthy twin does not, and it resolves."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import yaml
from prometheus_client.samples import Sample

from dashboards import names, promql
from dashboards.build import GENERATED
from dashboards.build import main as build
from dashboards.rules import grafana, prometheus
from dashboards.rules.alerts import STALLED_ABOVE_S, Alert, Severity, alerts
from dashboards.rules.recordings import recordings
from dashboards.rules.timing import Timing, duration, seconds
from pdtrace.agent.buckets import DURATION_EDGES_S
from pdtrace.alert_links import Places, placed
from pdtrace.slo import DEFAULT_SLO
from pdtrace.stages import Outcome
from server.gateway.registry import MemberState
from tests.support import expositions
from tests.support.marked_requests import (
    TRANSFER,
    aborted,
    completed,
    pd_moments,
    request_of,
    until,
)
from tests.support.programs import program

RULES = GENERATED / "prometheus" / "pdtrace.rules.yml"
TESTS = GENERATED.parent / "rules" / "tests"
TOLD: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("told.yml").read_text()
)
ALERTS = alerts(DEFAULT_SLO)

each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_promtool_accepts_the_rules() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def scenarios_of(alert: Alert) -> list[dict[str, Any]]:
    """As they stand there: 0x20 is a value twenty times, and no number."""
    return yaml.load((TESTS / f"{alert.name}.yml").read_text(), yaml.BaseLoader)["tests"]


def own_cases(alert: Alert, scenario: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in scenario["promql_expr_test"] if f'"{alert.name}"' in case["expr"]]


@each_alert
def test_each_alert_is_tested_before_while_and_after(alert: Alert) -> None:
    """So that the test below cannot pass with nothing in it."""
    fires_in = 0
    for scenario in scenarios_of(alert):
        fires = [bool(case["exp_samples"]) for case in own_cases(alert, scenario)]
        if any(fires):
            fires_in += 1
            assert (fires[0], fires[-1]) == (False, False), scenario.get("name")
    assert fires_in


@each_alert
def test_alert_fires_tells_all_that_it_knows_spares_its_twin_and_resolves(
    alert: Alert, tmp_path: Path
) -> None:
    """What is in `dashboards/rules/tests`; and, at each moment at which it fires there, what
    Prometheus makes of its templates."""
    scenarios = scenarios_of(alert)
    moments = [
        (at, case["eval_time"])
        for at, scenario in enumerate(scenarios)
        for case in own_cases(alert, scenario)
        if case["exp_samples"]
    ]
    assert [(moment["in"], moment["at"]) for moment in TOLD[alert.name]] == moments
    for moment in TOLD[alert.name]:
        scenarios[moment["in"]].setdefault("alert_rule_test", []).append(
            {
                "eval_time": moment["at"],
                "alertname": alert.name,
                "exp_alerts": [as_told(alert, **told) for told in moment["told"]],
            }
        )
    for scenario in scenarios:
        for case in scenario["promql_expr_test"]:
            for sample in case["exp_samples"]:
                sample["value"] = float(sample["value"])
    document = {
        **yaml.safe_load((TESTS / f"{alert.name}.yml").read_text()),
        "rule_files": [str(RULES)],
        "tests": scenarios,
    }
    path = tmp_path / "told.yml"
    path.write_text(yaml.safe_dump(document))
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def as_told(alert: Alert, labels: dict[str, str], summary: str) -> dict[str, Any]:
    """In promtool's form. Raises KeyError for a template that asks for a label that is not there,
    which Prometheus would leave out in silence."""

    def value(found: re.Match[str]) -> str:
        return quote_plus(labels[found[1]]) if found[2] else labels[found[1]]

    def filled(template: str) -> str:
        return re.sub(r"\{\{ \$labels\.(\w+)( \| urlquery)? \}\}", value, template)

    fixed = {name: alert.labels[name] for name in ("component", "severity")}
    annotations = {name: filled(text) for name, text in alert.annotations.items()}
    return {
        "exp_labels": {**labels, **fixed},
        "exp_annotations": {**annotations, "summary": summary},
    }


@each_alert
def test_each_alert_has_a_healthy_twin(alert: Alert) -> None:
    """Something with the same metric of which the alert says nothing: another worker, model or pair
    in the same test; or, for an alert that is about everything, a test in which all is well."""
    scenarios = scenarios_of(alert)
    twins, ill = set[str](), set[str]()
    for moment in TOLD[alert.name]:
        told = [one["labels"] for one in moment["told"]]
        for one in scenarios[moment["in"]]["input_series"]:
            name, labels = _series(one["series"])
            is_ill = not any(told) or any(_is_of(labels, about) for about in told)
            (ill if is_ill else twins).add(name)
    for scenario in scenarios:
        own = own_cases(alert, scenario)
        if own and not any(case["exp_samples"] for case in own):
            twins |= {_series(one["series"])[0] for one in scenario["input_series"]}
    assert twins & ill, f"nothing in {alert.name}.yml is well"


def _series(text: str) -> tuple[str, dict[str, str]]:
    [selector] = promql.selectors(promql.parse(text))
    return selector.name, {label: value for label, _, value in selector.matchers}


def _is_of(labels: Mapping[str, str], told: Mapping[str, str]) -> bool:
    """Whether a series is about what an alert tells of."""
    common = labels.keys() & told.keys()
    return bool(common) and all(labels[name] == told[name] for name in common)


def test_no_test_is_left_of_an_alert_that_is_gone() -> None:
    assert {path.stem for path in TESTS.glob("*.yml")} == {alert.name for alert in ALERTS}


# -- ALR-01 and ALR-02: what a real start exposes, and next to no traffic --------------------------


def series_of(
    before: Iterable[Sample], after: Iterable[Sample], *, job: str, target: str
) -> list[dict[str, str]]:
    """Scraped samples as promtool reads them: for ten minutes `before`, from then on `after`."""
    first = {key(sample): f"{sample.value:g}x19" for sample in before}
    then = {key(sample): f"{sample.value:g}x121" for sample in after}
    made: list[dict[str, str]] = []
    for name, labels in first.keys() | then.keys():
        told = {"job": job, "instance": target, **dict(labels)}  # honor_labels
        inner = ",".join(f'{label}="{value}"' for label, value in sorted(told.items()))
        values = first.get((name, labels), "_x19"), then.get((name, labels), "stale")
        made.append({"series": f"{name}{{{inner}}}", "values": " ".join(values)})
    return made


def key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    return sample.name, tuple(sorted(sample.labels.items()))


def up(job: str, target: str) -> dict[str, str]:
    return {"series": f'up{{job="{job}",instance="{target}"}}', "values": "1x142"}


def alerts_over_an_hour(tmp_path: Path, series: list[dict[str, str]]) -> str:
    """What promtool says to "no alert is as much as pending", every five minutes."""
    none = [
        {"expr": "ALERTS", "eval_time": f"{minute}m", "exp_samples": []}
        for minute in range(0, 71, 5)
    ]
    tests = [{"interval": "30s", "input_series": series, "promql_expr_test": none}]
    document = {"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(document))
    tested = promtool("test", "rules", path)
    return "" if tested.returncode == 0 else tested.stdout + tested.stderr


AGENT, GATEWAY = "127.0.0.1:9464", "127.0.0.1:8321"
UP = [up(names.AGENT_JOB, AGENT), up(names.GATEWAY_JOB, GATEWAY)]


@pytest.mark.case("ALR-02")
def test_nothing_fires_after_a_fresh_start(tmp_path: Path) -> None:
    """Series that come with the first request are not there, the others are 0."""
    agent = expositions.agent_samples(expositions.fresh_agent())
    gateway = expositions.gateway_samples(expositions.fresh_gateway())
    series = [
        *UP,
        *series_of(agent, agent, job=names.AGENT_JOB, target=AGENT),
        *series_of(gateway, gateway, job=names.GATEWAY_JOB, target=GATEWAY),
    ]
    assert len(series) > 200
    assert alerts_over_an_hour(tmp_path, series) == ""


@pytest.mark.case("ALR-02")
def test_only_missing_targets_fire_where_nothing_is_scraped(tmp_path: Path) -> None:
    every_minute = [
        {
            "expr": 'count by (alertname, job) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [
                {"labels": f'{{alertname="PDTelemetryAbsent",job="{job}"}}', "value": 1}
                for job in (names.AGENT_JOB, names.GATEWAY_JOB)
            ],
        }
        for minute in range(5, 60, 5)
    ]
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": 'up{job="other"}', "values": "1x120"}],
                "promql_expr_test": every_minute,
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(document))
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.case("ALR-02")
@pytest.mark.parametrize("what", ["workers load", "a worker is told to stop", "all is restarted"])
def test_what_is_done_on_purpose_alerts_nobody(tmp_path: Path, what: str) -> None:
    """A model takes its time, a worker is taken out, and counters begin anew."""
    agent, gateway = expositions.fresh_agent(), expositions.fresh_gateway()
    before = expositions.agent_samples(agent), expositions.gateway_samples(gateway)
    after = before
    if what == "workers load":
        loading = {"prefill-0": MemberState.LOADING, "decode-0": MemberState.LOADING}
        before = before[0], expositions.gateway_samples(expositions.fresh_gateway(loading))
    elif what == "a worker is told to stop":
        left = expositions.fresh_gateway({"decode-0": MemberState.LEFT})
        after = (
            expositions.agent_samples(agent, closed={"decode-0"}),
            expositions.gateway_samples(left),
        )
    else:
        expositions.serve(agent, *(request_of(pd_moments()) for _ in range(50)))
        for _ in range(50):
            expositions.serve_at_gateway(gateway)
        before = (
            expositions.agent_samples(agent, finished=50),
            expositions.gateway_samples(gateway),
        )
    assert before != after
    series = [
        *UP,
        *series_of(before[0], after[0], job=names.AGENT_JOB, target=AGENT),
        *series_of(before[1], after[1], job=names.GATEWAY_JOB, target=GATEWAY),
    ]
    assert alerts_over_an_hour(tmp_path, series) == ""


@pytest.mark.case("ALR-01")
@pytest.mark.parametrize("what", ["no traffic", "one request", "one failed request"])
def test_next_to_no_traffic_alerts_nobody(tmp_path: Path, what: str) -> None:
    """Quantiles and ratios of nothing are not a number, and one request is no rate: documented in
    docs/dashboards.md. Buckets are all zero before."""
    agent, gateway = expositions.fresh_agent(), expositions.fresh_gateway()
    before = expositions.agent_samples(agent), expositions.gateway_samples(gateway)
    if what == "one request":
        expositions.serve(agent, request_of(pd_moments()))
        expositions.serve_at_gateway(gateway)
    elif what == "one failed request":
        failed = [
            *until(pd_moments(), 1_200),
            aborted(TRANSFER, 1_200, "failed", "engine_error", "prefill-0"),
            completed(9_000_000, "failed", "engine_error", "prefill-0", 500),
        ]
        expositions.serve(agent, request_of(failed))
        expositions.serve_at_gateway(gateway, Outcome.FAILED)
    finished = int(what != "no traffic")
    after = (
        expositions.agent_samples(agent, finished=finished),
        expositions.gateway_samples(gateway),
    )
    if finished:
        assert after[0] != before[0]
        assert after[1] != before[1]
    series = [
        *UP,
        *series_of(before[0], after[0], job=names.AGENT_JOB, target=AGENT),
        *series_of(before[1], after[1], job=names.GATEWAY_JOB, target=GATEWAY),
    ]
    assert alerts_over_an_hour(tmp_path, series) == ""


# -- the objects -----------------------------------------------------------------------------------


@each_alert
def test_alert_leads_somewhere_and_never_labels_a_value(alert: Alert) -> None:
    assert {"component", "severity"} <= set(alert.labels)
    assert not [value for value in alert.labels.values() if "$value" in value]
    assert set(alert.annotations) == {"summary", "description", "dashboard", "runbook_url"}
    assert "$value" not in "".join(alert.annotations.values())
    assert alert.annotations["dashboard"].startswith(f"/d/{alert.board}?viewPanel=")


def test_links_of_alerts_become_whole_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--grafana", "https://grafana.example/", "--runbooks", "https://wiki.example/alerts")
    elsewhere = Places(grafana=places[1], runbooks=places[3])
    assert build(places) == 2
    assert "need --out DIR" in capsys.readouterr().err
    assert build((*places, "--out", str(tmp_path))) == 0
    for path in ("prometheus/pdtrace.rules.yml", "grafana/alerts.yaml"):
        text = (tmp_path / path).read_text()
        assert text.count("https://grafana.example/d/pd-") == len(ALERTS)
        assert text.count("https://wiki.example/alerts/PD") == len(ALERTS)
        assert "runbook_url: runbooks/" not in text
        # `pdtrace export` has the text alone, and makes the same of it.
        exported = placed((GENERATED / path).read_text(), elsewhere)
        assert yaml.safe_load(exported) == yaml.safe_load(text)
    assert promtool("check", "rules", tmp_path / "prometheus" / "pdtrace.rules.yml").returncode == 0


def test_what_counts_as_slow_is_an_edge_of_the_histograms() -> None:
    assert STALLED_ABOVE_S in DURATION_EDGES_S


def test_causes_make_no_more_noise_than_users_do() -> None:
    """Who is paged: users suffer, or something stands still."""
    paged = {alert.name for alert in ALERTS if alert.severity is Severity.PAGE}
    assert paged == {
        "PDTtftBudgetBurnFast",
        "PDTokenGapBudgetBurnFast",
        "PDErrorBudgetBurnFast",
        "PDOldestRequestTooOld",
        "PDWorkerNotProgressing",
        "PDProcessDown",
        "PDTelemetryAbsent",
    }


def test_shorter_timing_shrinks_every_window_and_no_name() -> None:
    short = Timing(scale=1 / 60)
    nominal = yaml.safe_load(prometheus.rule_file(recordings(DEFAULT_SLO), ALERTS))
    shrunk = yaml.safe_load(
        prometheus.rule_file(recordings(DEFAULT_SLO, short), alerts(DEFAULT_SLO, short), short)
    )
    for before, after in zip(rules_of(nominal), rules_of(shrunk), strict=True):
        assert before.get("record") == after.get("record")
        assert before.get("alert") == after.get("alert")
        assert promql.parse(after["expr"]) == promql.parse(before["expr"])
        for long, brief in zip(windows(before["expr"]), windows(after["expr"]), strict=True):
            assert seconds(brief) < seconds(long)
            assert seconds(brief) >= short.least_s
    assert seconds(shrunk["groups"][0]["interval"]) < seconds(nominal["groups"][0]["interval"])


def rules_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in document["groups"] for rule in group["rules"]]


def windows(expr: str) -> list[str]:
    return re.findall(r"\[(\d+[smhd]):?\]", expr)


def test_shorter_timing_still_waits_and_evaluates() -> None:
    brief = Timing(scale=1 / 240, least_hold_s=3)
    assert [brief.hold(nominal) for nominal in ("0s", "1m", "1h")] == ["0s", "3s", "15s"]
    assert brief.every == "1s"
    assert (Timing().hold("2m"), Timing().every) == ("2m", "30s")


@pytest.mark.parametrize(
    ("text", "is_s"), [("20s", 20), ("5m", 300), ("6h", 21_600), ("3d", 259_200)]
)
def test_durations_are_read_and_written_alike(text: str, is_s: int) -> None:
    assert seconds(text) == is_s
    assert duration(is_s) == text


def test_grafana_managed_rules_are_the_same_alerts() -> None:
    """All that Prometheus's file says of an alert is in Grafana's, under Grafana's names."""
    told = {
        rule["alert"]: rule
        for rule in rules_of(yaml.safe_load(RULES.read_text()))
        if "alert" in rule
    }
    [group] = yaml.safe_load(grafana.rule_file(ALERTS))["groups"]
    rules = {rule["title"]: rule for rule in group["rules"]}
    assert list(rules) == [alert.name for alert in ALERTS]
    assert len({rule["uid"] for rule in rules.values()}) == len(ALERTS)
    for alert in ALERTS:
        rule = rules[alert.name]
        same = told[alert.name]
        assert set(same) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        query, threshold = rule["data"]
        inner = promql.parse(query["model"]["expr"])
        assert isinstance(inner, promql.Aggregation)
        assert inner.op == "group"
        assert inner.inner == promql.parse(same["expr"])
        assert threshold["model"]["expression"] == query["refId"]
        assert rule["condition"] == threshold["refId"]
        assert rule["dashboardUid"] == alert.board
        assert rule["for"] == same.get("for", "0s")
        assert rule["keepFiringFor"] == same.get("keep_firing_for", "0s")
        # Provisioning expands a single $ in labels, and leaves annotations alone.
        assert {n: v.replace("$$", "$") for n, v in rule["labels"].items()} == same["labels"]
        assert not re.search(r"(?<!\$)\$(?!\$)", "".join(rule["labels"].values()))
        assert rule["annotations"] == same["annotations"]


def test_grafana_gets_one_for_each_series_also_where_the_value_is_zero() -> None:
    """`up == 0` has the value 0, and a threshold on it would never be reached."""
    expr = grafana.rule_file(ALERTS)
    assert expr.count("group without () (") == len(ALERTS)
