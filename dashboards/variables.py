"""The boards' variables. Owns their names and where their values come from."""

from __future__ import annotations

from collections.abc import Iterable

from dashboards import names, queries, sdk
from dashboards.sdk import Variable

PROMETHEUS, JAEGER, JAEGER_UI = "prometheus", "jaeger", "jaeger_ui"
MODEL, ROLE, WORKER = "model", "role", "worker"
STEP = sdk.STEP
STAGE, MIN_DURATION, TRACE = "stage", "min_duration", "trace"

BY_ROLE = queries.chosen("role", ROLE)
BY_WORKER = queries.chosen("instance", WORKER)
BY_MODEL = queries.chosen(names.MODEL, MODEL)

_JAEGER_PAGES = "http://127.0.0.1:16686"
_STEPS = ("5s", "15s", "30s", "1m")
_LEAST_STEP = "30s"
"""Its window of two minutes has two scrapes also where Prometheus scrapes once a minute."""
_DURATIONS = ("1ms", "100ms", "500ms", "1s", "2s", "5s")


def everywhere() -> tuple[Variable, ...]:
    """What every board has: data sources, which are never written into it; model, role, worker;
    the least step of rates, the scrape interval or more; and the address of Jaeger's own pages, for
    those who may not explore in Grafana."""
    model = f"label_values({names.GATEWAY_DURATION}_count, {names.MODEL})"
    worker = f"label_values({queries.series(names.PROCESS_STATE, BY_ROLE)}, instance)"
    return (
        sdk.datasource_variable(PROMETHEUS, "Metrics", "prometheus"),
        sdk.datasource_variable(JAEGER, "Traces", "jaeger"),
        sdk.query_variable(MODEL, "Model", model),
        sdk.query_variable(ROLE, "Role", f"label_values({names.PROCESS_STATE}, role)"),
        sdk.query_variable(WORKER, "Worker", worker),
        sdk.choice_variable(STEP, "Least step", _STEPS, _LEAST_STEP),
        sdk.text_variable(JAEGER_UI, "Jaeger UI", _JAEGER_PAGES),
    )


def stage(stages: Iterable[str], first: str) -> Variable:
    """One stage: Jaeger finds tags by their exact value only."""
    return sdk.choice_variable(STAGE, "Stalled in", stages, first)


def min_duration() -> Variable:
    return sdk.choice_variable(MIN_DURATION, "At least", _DURATIONS, _DURATIONS[0])


def trace() -> Variable:
    return sdk.text_variable(TRACE, "Trace id", "")
