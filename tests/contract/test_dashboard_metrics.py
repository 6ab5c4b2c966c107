"""Boards and rules query metrics and labels that are exposed, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.samples import Sample

from dashboards import names, promql, targets
from dashboards.build import boards
from dashboards.rules.alerts import alerts
from dashboards.rules.recordings import recordings
from dashboards.rules.telemetry import LOSSES
from pdtrace.slo import DEFAULT_SLO
from pdtrace.stages import Outcome
from tests.support import expositions
from tests.support.marked_requests import (
    TRANSFER,
    aborted,
    completed,
    pd_moments,
    request_of,
    until,
)

BOARDS = boards()
WINDOWS = targets.windows(range_s=3600, step_s=15, scrape_s=5)
VALUES = {**targets.ALL, **WINDOWS, "stage": "transfer"}

OPTIONAL = frozenset({names.OPEN_OLDEST_BY_WORKER})
"""There only while a worker has a request in flight."""
PROMETHEUS_OWN = {
    names.UP: {"job", "instance"},
    names.ALERTS: {"alertname", "alertstate", "component"},
}
TARGET_LABELS = {"job", "instance"}
"""What a scrape adds, unless the exposition has it."""
SPANS = {
    f"{names.SPAN_DURATION}_bucket": {"le"},
    f"{names.SPAN_DURATION}_count": set[str](),
    names.SPAN_CALLS: set[str](),
}
SPAN_LABELS = {
    "service_name",
    "span_name",
    "span_kind",
    "status_code",
    names.SPAN_OVERFLOW.partition("=")[0],
    *TARGET_LABELS,
    *(names.label_of(attr) for attr in names.DIMENSIONS),
}
COLLECTOR = {loss.counter.partition("{")[0] for loss in LOSSES}
"""Of a real one in tests/integration/test_collector_losses.py."""


def exposed() -> dict[str, set[str]]:
    """Sample name → labels, of an agent and a gateway that served a mixed load."""
    agent, gateway = expositions.fresh_agent(), expositions.fresh_gateway()
    failed = [
        *until(pd_moments(), 1_200),
        aborted(TRANSFER, 1_200, "failed", "checksum_mismatch", "transfer-0"),
        completed(2_000, "failed", "checksum_mismatch", "transfer-0", 502),
    ]
    expositions.serve(agent, request_of(pd_moments()), request_of(failed))
    agent.stuck("transfer", "transfer-0")
    expositions.serve_at_gateway(gateway)
    expositions.serve_at_gateway(gateway, Outcome.FAILED)
    found: dict[str, set[str]] = {}
    samples: list[Sample] = [
        *expositions.agent_samples(agent),
        *expositions.gateway_samples(gateway),
    ]
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    for name in OPTIONAL:
        found[name] = {"stage", "instance"}
    for labels in found.values():
        labels.update(TARGET_LABELS)
    spans = {name: SPAN_LABELS | own for name, own in SPANS.items()}
    collector = dict.fromkeys(COLLECTOR, TARGET_LABELS)
    recorded = {
        recording.name: {names.MODEL, "slo", "stage", "role", "source", "destination", "instance"}
        for group in recordings(DEFAULT_SLO).values()
        for recording in group
    }
    return {**collector, **found, **PROMETHEUS_OWN, **spans, **recorded}


EXPOSED = exposed()


def queries() -> Iterator[tuple[str, str]]:
    for target in targets.targets(BOARDS):
        if target.kind == "prometheus":
            yield f"{target.board} {target.panel} {target.ref}", target.filled(VALUES)["expr"]
    for board, name, expr in targets.annotation_queries(BOARDS):
        yield f"{board} annotation {name}", targets.fill(expr, VALUES)
    for query in targets.values_queries(BOARDS):
        selector = targets.fill(query.selector, VALUES)
        yield f"{query.board} variable {query.variable}", f"count by ({query.label}) ({selector})"
    for group in recordings(DEFAULT_SLO).values():
        for recording in group:
            yield f"recording {recording.name}", recording.expr
    for alert in alerts(DEFAULT_SLO):
        yield f"alert {alert.name}", alert.expr


QUERIES = dict(queries())


@pytest.mark.case("DSH-02")
@pytest.mark.parametrize("where", QUERIES)
def test_query_names_metrics_and_labels_that_are_exposed(where: str) -> None:
    tree = promql.parse(QUERIES[where])
    selectors = list(promql.selectors(tree))
    assert selectors
    labels: set[str] = set()
    for selector in selectors:
        assert selector.name in EXPOSED, f"nothing exposes {selector.name}"
        known = EXPOSED[selector.name]
        wrong = {label for label, _, _ in selector.matchers} - known
        assert not wrong, f"{selector.name} has no {wrong}, it has {known}"
        labels |= known
    for node in promql.walk(tree):
        if isinstance(node, promql.Aggregation):
            made = {"queue"} if "label_replace" in QUERIES[where] else set[str]()
            assert set(node.by) <= labels | made


@pytest.mark.case("DSH-02")
def test_no_name_is_declared_that_nobody_exposes_or_queries() -> None:
    declared = {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and value.startswith(("pd_", "gen_ai_server"))
    } - SPAN_LABELS
    suffixes = ("", "_bucket", "_count", "_sum")
    for name in declared:
        assert any(f"{name}{suffix}" in EXPOSED for suffix in suffixes), name
        assert any(name in expr for expr in QUERIES.values()), f"{name} is queried nowhere"


def test_dimensions_are_attributes_of_the_root() -> None:
    """Or of the verdict, which the agent puts there: span metrics of roots have them."""
    for attr in names.DIMENSIONS:
        assert attr.on_root or attr.key == "pd.stall.stage", attr.key
