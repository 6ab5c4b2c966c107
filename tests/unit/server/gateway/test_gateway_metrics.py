"""What the gateway's metrics say before anything has happened, and after."""

from __future__ import annotations

from pdtrace.stages import Outcome
from server.gateway.errors import USUAL_ENDS
from server.gateway.metrics import GatewayMetrics
from server.gateway.openai_api import Operation


def ends(metrics: GatewayMetrics) -> dict[tuple[str, str, str], float]:
    return {
        (
            sample.labels["gen_ai_operation_name"],
            sample.labels["outcome"],
            sample.labels["reason"],
        ): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pd_requests_total"
    }


def test_the_first_request_of_each_usual_end_can_be_seen_by_a_rate() -> None:
    """A series that appears with its first event has 1 from the start: it never grew."""
    metrics = GatewayMetrics(model="m", in_flight=lambda: 0, waiting=lambda: 0, members=lambda: ())
    before = ends(metrics)
    assert set(before.values()) == {0.0}
    assert {(outcome, reason) for _, outcome, reason in before} == set(USUAL_ENDS)
    assert {operation for operation, _, _ in before} == set(Operation)
    assert {outcome for outcome, _ in USUAL_ENDS} == set(Outcome) - {Outcome.LOST}
    for operation in Operation:
        for outcome, reason in USUAL_ENDS:
            metrics.ended(operation, outcome, reason, 0.1)
    assert ends(metrics).keys() == before.keys()
    assert set(ends(metrics).values()) == {1.0}
