"""Estimates from paired windows find what was put in, and say when they cannot tell."""

from __future__ import annotations

import random

import pytest

from benchmarks.paired import Estimate, adjusted, centre, estimate, quantile


def test_centre_is_not_pulled_by_an_outlier() -> None:
    assert centre([1.0, 2.0, 3.0, 4.0, 1000.0]) == pytest.approx(3.0, abs=0.5)


def test_interval_holds_the_value_and_narrows_with_more_blocks() -> None:
    draw = random.Random(3)
    values = [0.02 + draw.gauss(0, 0.05) for _ in range(200)]
    few, many = estimate(values[:20], centre), estimate(values, centre)
    assert many.low < 0.02 < many.high
    assert many.high - many.low < few.high - few.low


def test_adjusting_takes_out_the_disturbance_and_leaves_the_difference() -> None:
    draw = random.Random(5)
    values: list[dict[str, float]] = []
    beside: list[dict[str, list[float]]] = []
    for _ in range(40):
        drift = draw.gauss(0, 1)
        # Neighbours happen to be busier in every window of "on".
        busy = {"off": draw.random(), "on": 0.5 + draw.random()}
        beside.append({name: [value] for name, value in busy.items()})
        values.append({name: drift + 0.9 * b + 0.03 * (name == "on") for name, b in busy.items()})
    found = adjusted(values, beside)
    assert centre([block["on"] - block["off"] for block in found]) == pytest.approx(0.03, abs=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "floor", "verdict"),
    [
        (-0.004, 0.009, 0.005, "within"),
        (-0.004, 0.011, 0.005, "cannot tell"),
        (0.015, 0.03, 0.005, "beyond"),
        (0.015, 0.03, 0.02, "cannot tell"),
        (-0.03, -0.015, 0.005, "cannot tell"),
    ],
)
def test_verdict_needs_the_interval_and_the_floor(
    low: float, high: float, floor: float, verdict: str
) -> None:
    assert Estimate(value=(low + high) / 2, low=low, high=high).verdict(0.01, floor) == verdict


def test_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert quantile([1.0], 0.99) == 1.0
