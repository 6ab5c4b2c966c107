"""The rules as a Prometheus rule file: the source of truth, which `promtool` checks and tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dashboards.rules.alerts import Alert
from dashboards.rules.recordings import Recording
from dashboards.rules.timing import NOMINAL, Timing
from dashboards.rules.yaml_text import document

HEADER = """\
Recording and alert rules of pdtrace. Generated: change dashboards/rules and run make fix.
What each alert means and what to do: docs/alerts. Tests: dashboards/rules/tests.
"""


def rule_file(
    recordings: Mapping[str, Sequence[Recording]],
    alerts: Iterable[Alert],
    timing: Timing = NOMINAL,
) -> str:
    """The file's text."""
    groups: list[dict[str, object]] = [
        {
            "name": group,
            "interval": timing.every,
            "rules": [
                {
                    "record": recording.name,
                    "expr": recording.expr,
                    **({"labels": dict(recording.labels)} if recording.labels else {}),
                }
                for recording in members
            ],
        }
        for group, members in recordings.items()
    ]
    groups.append(
        {
            "name": "pdtrace-alerts",
            "interval": timing.every,
            "rules": [_alert(alert) for alert in alerts],
        }
    )
    return document({"groups": groups}, HEADER)


def _alert(alert: Alert) -> dict[str, object]:
    rule: dict[str, object] = {"alert": alert.name, "expr": alert.expr}
    if alert.hold != "0s":
        rule["for"] = alert.hold
    if alert.keep != "0s":
        rule["keep_firing_for"] = alert.keep
    return {**rule, "labels": alert.labels, "annotations": alert.annotations}
