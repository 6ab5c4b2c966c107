"""The bucket ladder: its edges, and thresholds on edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.agent.buckets import (
    COUNT_EDGES,
    DURATION_EDGES_S,
    SLO_VARIABLE,
    duration_edges,
    duration_edges_from,
    edge_of,
)


def test_no_edge_is_a_whole_number_and_edges_ascend() -> None:
    for edges in (DURATION_EDGES_S, COUNT_EDGES):
        assert list(edges) == sorted(set(edges))
        assert not [edge for edge in edges if float(edge).is_integer()]


@given(st.lists(st.floats(min_value=1e-6, max_value=1e5), max_size=16))
def test_every_threshold_is_on_an_edge_that_is_no_whole_number(thresholds: list[float]) -> None:
    edges = duration_edges(thresholds)
    assert {edge_of(threshold) for threshold in thresholds} <= set(edges)
    assert set(DURATION_EDGES_S) <= set(edges)
    assert list(edges) == sorted(edges)
    assert not [edge for edge in edges if edge.is_integer()]


def test_edge_of_a_whole_threshold_is_a_microsecond_above() -> None:
    assert edge_of(2.0) == 2.000001
    assert edge_of(0.2) == 0.2


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        duration_edges([threshold])


def test_too_many_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        duration_edges(value + 0.01 for value in range(17))


def test_environment_puts_thresholds_on_edges() -> None:
    edges = duration_edges_from({SLO_VARIABLE: "0.21, 4"})
    assert {0.21, 4.000001} <= set(edges)
    assert duration_edges_from({}) == DURATION_EDGES_S


@pytest.mark.parametrize("text", ["fast", "0.2,", "-1", "0.2;0.3"])
def test_setting_that_cannot_be_used_is_said_in_one_line(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert duration_edges_from({SLO_VARIABLE: text}) == DURATION_EDGES_S
    [record] = caplog.records
    assert repr(text) in record.getMessage()
    assert "Give seconds above 0" in record.getMessage()
