"""Steps and windows as Grafana works them out."""

from __future__ import annotations

import pytest

from dashboards import intervals


@pytest.mark.parametrize(
    ("range_s", "points", "least_s", "step_s"),
    [
        (300, 700, 15, 15),
        (300, 700, 0.1, 0.5),  # 429 ms
        (1_800, 700, 1, 2),  # 2.6 s
        (3_600, 700, 1, 5),
        (6 * 3_600, 700, 15, 30),  # 31 s
        (7 * 86_400, 700, 15, 900),  # 864 s
        (7 * 86_400, 200_000, 1, 60),  # 11,000 points at most: 55 s
        (365 * 86_400, 10, 15, 86_400),
    ],
)
def test_steps_are_rounded_and_never_below_the_least(
    range_s: float, points: int, least_s: float, step_s: float
) -> None:
    assert intervals.step_s(range_s=range_s, points=points, least_s=least_s) == step_s


def test_a_rate_looks_back_four_least_steps_or_to_the_point_before() -> None:
    near = intervals.windows(range_s=300, points=700, least="30s")
    assert near == {"__interval": "30s", "__rate_interval": "120s", "__range": "300s"}
    far = intervals.windows(range_s=7 * 86_400, points=700, least="1m")
    assert far["__rate_interval"] == "960s"


def test_a_query_without_a_least_step_takes_the_data_sources() -> None:
    assert intervals.windows(range_s=300, points=700)["__rate_interval"] == "60s"
    slow = intervals.windows(range_s=300, points=700, source_s=60)
    assert slow["__rate_interval"] == "240s"


def test_units_of_time() -> None:
    assert [intervals.seconds(text) for text in ("500ms", "15s", "1m")] == [0.5, 15.0, 60.0]
    with pytest.raises(ValueError, match="1y"):
        intervals.seconds("1y")
