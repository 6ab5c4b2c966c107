"""Each alert leads to a panel that draws all that it asks: why it fires can be seen there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from dashboards import build, names, promql, targets
from dashboards.promql import Selector
from dashboards.rules import recordings as rec
from dashboards.rules.alerts import Alert, alerts
from pdtrace.slo import DEFAULT_SLO

BOARDS = build.boards()
ALERTS = {alert.name: alert for alert in alerts(DEFAULT_SLO)}
VALUES = {**targets.ALL, **targets.windows(range_s=3600, step_s=15, scrape_s=15)}

ENOUGH = "how much happened: where it is too little there is no alert, whatever the panel shows"
GUARDS: Mapping[str, str] = {
    **{rec.events(window): ENOUGH for window in rec.LONG_WINDOWS},
    f"{names.STAGE_DURATION}_count": ENOUGH,
    f"{names.PAIR_STAGE_DURATION}_count": ENOUGH,
    f"{names.STAGE_DURATION}_bucket": ENOUGH,
    f"{names.PAIR_STAGE_DURATION}_bucket": ENOUGH,
}
"""What is asked and need not be drawn, and why."""


def asked(alert: Alert) -> list[Selector]:
    return [one for one in selectors(alert.expr) if one.name not in GUARDS]


def drawn(alert: Alert) -> list[Selector]:
    found = [
        target.filled(VALUES)["expr"]
        for target in targets.targets({alert.board: BOARDS[alert.board]})
        if target.panel == alert.panel and target.kind == "prometheus"
    ]
    return [one for expr in found for one in selectors(expr)]


def selectors(expr: str) -> Iterable[Selector]:
    return promql.selectors(promql.parse(expr))


def measured(selector: Selector) -> str:
    """A histogram by its name, whichever part of it is asked."""
    return re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", selector.name)


def shows(panel: Selector, alert: Selector) -> bool:
    """Whether what the panel draws has all series that the alert asks."""
    wanted = {label: value for label, operator, value in alert.matchers if operator in {"=", "=~"}}
    return measured(panel) == measured(alert) and all(
        (label, operator, value) in alert.matchers
        or value == ".*"
        or (label in wanted and operator in {"=", "=~"} and within(wanted[label], value))
        for label, operator, value in panel.matchers
    )


def within(values: str, pattern: str) -> bool:
    return all(re.fullmatch(pattern, value) for value in values.split("|"))


def missing(alert: Alert) -> set[str]:
    there = drawn(alert)
    return {one.name for one in asked(alert) if not any(shows(panel, one) for panel in there)}


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_linked_panel_draws_all_that_the_alert_asks(alert: Alert) -> None:
    assert asked(alert)
    assert missing(alert) == set()


@pytest.mark.parametrize(
    ("name", "board", "panel", "lacks"),
    [
        ("PDStageStalledOnWorker", "pd-stages", "Waits by worker", rec.STAGE_BASELINE),
        ("PDStageStalledOnPair", "pd-workers", "KV transfer by pair", rec.PAIR_MEAN),
        ("PDRequestsStalling", "pd-stages", "Requests by dominant stage", names.FINISHED),
        ("PDWorkerNotProgressing", "pd-workers", "Running batch by worker", names.STEPS),
        ("PDAgentLagging", "pd-overview", "Agent lag", names.AGENT_POLL_AGE),
        ("PDPoolsOutOfBalance", "pd-stages", "Open requests by stage", names.PROCESS_STATE),
        ("PDSpanMetricsMissing", "pd-slow", "Request duration by model", names.FINISHED),
    ],
)
def test_a_panel_of_something_else_is_found(name: str, board: str, panel: str, lacks: str) -> None:
    """So that the test above cannot pass by seeing everything everywhere."""
    assert lacks in missing(replace(ALERTS[name], board=board, panel=panel))


def test_a_panel_that_leaves_series_out_is_found() -> None:
    one = Selector("pd_pair_stage_duration_seconds_sum", (("stage", "=", "transfer"),), True)
    every = Selector("pd_pair_stage_duration_seconds_sum", (("stage", "=~", "transfer|hop"),), True)
    assert shows(every, one)
    assert not shows(one, every)
    assert not shows(one, Selector("pd_pair_stage_duration_seconds_count", (), True))


def test_nothing_is_excused_that_no_alert_asks() -> None:
    names_asked = {one.name for alert in ALERTS.values() for one in selectors(alert.expr)}
    assert set(GUARDS) <= names_asked
