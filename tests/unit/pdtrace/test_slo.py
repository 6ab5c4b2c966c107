"""Objectives: defaults on edges of the ladder, and settings that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace.agent.buckets import DURATION_EDGES_S, edge_of
from pdtrace.slo import DEFAULT_SLO, Slo, SloError, read_slo


def test_defaults_are_edges_of_the_ladder() -> None:
    assert {edge_of(threshold) for threshold in DEFAULT_SLO.thresholds_s} <= set(DURATION_EDGES_S)


def test_file_may_leave_out_what_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text("token_gap_s = 0.05\n")
    assert read_slo(path) == Slo(token_gap_s=0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft_s = 0.0", "ttft_s is 0.0; it must be a number of seconds above 0"),
        ("oldest_s = inf", "oldest_s is inf"),
        ("error_objective = 1.0", "error_objective is 1.0; it must be a share between 0 and 1"),
        ("ttft = 1.0", "unknown field `ttft`"),
        ('ttft_s = "fast"', "ttft_s"),
        ("ttft_s = ", "Invalid value"),
        ("ttft_s = 1e300", "ttft_s is 1e\\+300; it must be from 1e-09 to 1e\\+09 seconds"),
        ("e2e_s = 1e-12", "e2e_s is 1e-12"),
        (f"ttft_s = {'[' * 100_000}", "nested too deeply"),
    ],
)
def test_unusable_settings_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(text)
    with pytest.raises(SloError, match=says) as caught:
        read_slo(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SloError, match="No such file"):
        read_slo(tmp_path / "none.toml")
