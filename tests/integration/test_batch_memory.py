"""The benchmark of `slo` and `check` over many requests runs, and says what it promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import batch_memory


def test_all_requests_are_looked_at_and_their_cost_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert batch_memory.main(["--requests", "1000", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("times the memory" in line for line in lines) == len(batch_memory.CASES)
    costs = json.loads(lines[-1])["costs"]
    assert [cost["case"] for cost in costs] == list(batch_memory.CASES)
    for cost in costs:
        assert cost["cpu_ms_per_request"] > 0
        assert cost["peak_bytes"] > 1e7


def test_other_numbers_of_requests_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        batch_memory.main(["--requests", "1500"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("--requests takes multiples of 1000, got [1500]")
