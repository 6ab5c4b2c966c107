"""What an alert is, whatever it is about.

`docs/alerts/<name>.md` is the runbook of each. No value ever becomes a label: each value would be
another alert.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dashboards import links
from dashboards.sdk import stable_id
from pdtrace.alert_links import DASHBOARD, PATHS, RUNBOOK, Places


class Severity(StrEnum):
    """What is asked of whoever is told."""

    PAGE = "page"  # somebody looks now
    TICKET = "ticket"  # somebody looks today


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    expr      has series only while the condition holds; their labels become the alert's
    hold      how long it has to hold, and `keep` how long the alert goes on after it ended
    stage, worker  templates of these labels; None where the alert has none
    board, panel   which panel shows it
    chosen    variables of the board and their templates, for the link
    places    where boards and runbooks are
    """

    name: str
    expr: str
    severity: Severity
    hold: str
    keep: str
    summary: str
    description: str
    board: str
    panel: str
    stage: str | None = None
    worker: str | None = None
    chosen: tuple[tuple[str, str], ...] = ()
    places: Places = PATHS

    @property
    def panel_id(self) -> int:
        return stable_id(self.panel)

    @property
    def labels(self) -> dict[str, str]:
        own = {"stage": self.stage, "worker": self.worker}
        return {
            "component": "pdtrace",
            "severity": self.severity.value,
            **{name: value for name, value in own.items() if value is not None},
        }

    @property
    def annotations(self) -> dict[str, str]:
        return {
            "summary": self.summary,
            "description": self.description,
            DASHBOARD: self.places.panel(
                links.alert_url(self.board, self.panel_id, **dict(self.chosen))
            ),
            RUNBOOK: self.places.runbook(self.name),
        }
