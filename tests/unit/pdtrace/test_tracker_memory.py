"""The bound on what a request in flight costs, by the benchmark that states it."""

from __future__ import annotations

import json

import pytest

from benchmarks import tracker_memory


def test_a_request_in_flight_costs_at_most_4_kb(capsys: pytest.CaptureFixture[str]) -> None:
    assert tracker_memory.main(["--requests", "3000", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert cost["requests"] == 3000
    assert 1_000 < cost["bytes_per_request"] <= 4_096
