"""The alerts as Grafana-managed rules, for provisioning from a file.

Owns the form that Grafana reads. The expressions are the same; the series that the recording rules
make have to be there, so Prometheus loads `prometheus/pdtrace.rules.yml` either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dashboards import links
from dashboards.rules.alerts import Alert
from dashboards.rules.yaml_text import document

HEADER = """\
Grafana-managed alert rules of pdtrace, for provisioning/alerting. Generated: change
dashboards/rules and run make fix. They need the recording rules of
prometheus/pdtrace.rules.yml in the data source with the uid prometheus. Use these or the Prometheus
alerts, not both: each would notify.
"""

_LOOK_BACK_S = 600


def rule_file(alerts: Iterable[Alert]) -> str:
    """The file's text."""
    group = {
        "orgId": 1,
        "name": "pdtrace",
        "folder": links.FOLDER,
        "interval": "30s",
        "rules": [_rule(alert) for alert in alerts],
    }
    return document({"apiVersion": 1, "groups": [group]}, HEADER)


def _rule(alert: Alert) -> dict[str, object]:
    return {
        "uid": f"pd-{alert.name.removeprefix('PD').lower()}",
        "title": alert.name,
        "condition": "B",
        "data": [_query(alert), _threshold()],
        # No series: the condition does not hold anywhere.
        "noDataState": "OK",
        "execErrState": "Error",
        "for": alert.hold,
        # In this case, as dashboardUid: Grafana ignores keep_firing_for, and does not say so.
        "keepFiringFor": alert.keep,
        "labels": {name: _escaped(value) for name, value in alert.labels.items()},
        "annotations": alert.annotations,
        "dashboardUid": alert.board,
        "panelId": alert.panel_id,
    }


def _query(alert: Alert) -> Mapping[str, object]:
    """1 for each series of the alert, whatever its value, which may be 0."""
    return {
        "refId": "A",
        "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
        "datasourceUid": links.PROMETHEUS_UID,
        "model": {
            "refId": "A",
            "datasource": {"type": "prometheus", "uid": links.PROMETHEUS_UID},
            "editorMode": "code",
            "expr": f"group without () ({alert.expr})",
            "instant": True,
            "range": False,
        },
    }


def _threshold() -> Mapping[str, object]:
    return {
        "refId": "B",
        "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
        "datasourceUid": "__expr__",
        "model": {
            "refId": "B",
            "type": "threshold",
            "datasource": {"type": "__expr__", "uid": "__expr__"},
            "expression": "A",
            "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
        },
    }


def _escaped(label: str) -> str:
    """Provisioning expands $ in labels, though not in annotations and models."""
    return label.replace("$", "$$")
