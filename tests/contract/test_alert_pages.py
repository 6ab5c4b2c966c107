"""Each alert has a page that says what to do, and docs/dashboards.md lists them all."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dashboards import links
from dashboards.build import boards
from dashboards.rules.alerts import Alert, alerts
from pdtrace.cli import app
from pdtrace.slo import DEFAULT_SLO

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALERTS = {alert.name: alert for alert in alerts(DEFAULT_SLO)}
TITLES = {board["title"] for board in boards().values()}
PANELS = {panel["title"] for board in boards().values() for panel in board["panels"]}
COMMANDS = {
    command.name or command.callback.__name__
    for command in app.registered_commands
    if command.callback is not None
}


def page(alert: Alert) -> str:
    return (DOCS / "alerts" / Path(alert.annotations["runbook_url"]).name).read_text()


def test_pages_are_of_the_alerts_that_there_are() -> None:
    assert {path.stem for path in (DOCS / "alerts").glob("*.md")} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_page_says_what_it_means_where_to_look_why_and_what_to_do(alert: Alert) -> None:
    text = page(alert)
    assert text.startswith(f"# {alert.name}\n\n")
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    assert sections[1::2] == ["Look at", "Likely causes", "What to do"]
    assert all(len(section.split()) > 15 for section in sections[::2])
    look = " ".join(sections[2].split())
    assert f"`{alert.panel}`" in look, "the panel that the alert links to"
    assert any(title in look for title in TITLES)
    commands = set(re.findall(r"`pdtrace (\w+)", text))
    assert commands & {"why", "top", "check"}
    assert commands <= COMMANDS
    assert set(re.findall(r"\bPD(?!TRACE_)[A-Z]\w+", text)) <= set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_page_names_panels_that_exist(alert: Alert) -> None:
    """A capitalised name in backquotes is a panel's title."""
    text = " ".join(page(alert).split())
    named = set(re.findall(r"`([A-Z][a-z][^`]*)`", text))
    assert named <= PANELS


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_link_leads_to_a_panel_and_sets_variables_of_its_board(alert: Alert) -> None:
    url = urlsplit(alert.annotations["dashboard"])
    asked = parse_qs(url.query, strict_parsing=True)
    board = boards()[url.path.removeprefix("/d/")]
    titles = {panel["id"]: panel["title"] for panel in board["panels"]}
    assert titles[int(asked.pop("viewPanel")[0])] == alert.panel
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {name.removeprefix("var-") for name in asked} <= variables


def test_dashboards_page_lists_every_alert_and_board() -> None:
    text = (DOCS / "dashboards.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(alerts/\1\.md\) \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(alert.name, alert.severity.value) for alert in ALERTS.values()]
    for uid in (links.OVERVIEW, links.STAGES, links.SLOW, links.REQUEST, links.WORKERS):
        assert f"`{uid}`" in text
