"""What the benchmarks of recording print as their last line, for programs."""

from __future__ import annotations

import sys

import pytest

from benchmarks import bench_overhead
from pdtrace.native import hot_path
from tests.support.benchmark_runs import last_line, refusal


def test_a_mark_beside_an_sdk_span() -> None:
    found = last_line("bench_recording", "--repeats", "2", "--calls", "400")
    for key in ("mark_ns", "mark_4_attrs_ns", "mark_8_attrs_ns", "no_op_ns", "sdk_span_ns"):
        assert found[key] > 0, key
    of_repeats = found["ratio_spread"]
    assert 1 < of_repeats["min"] <= found["ratio"] <= of_repeats["max"], "the span is dearer"
    assert found["ratio"] == of_repeats["median"]
    assert found["hot_path"] == hot_path()


def test_too_few_calls_are_refused_in_one_line() -> None:
    assert refusal("bench_recording", "--calls", "399").endswith("--calls 400 or more")


def test_a_loop_with_marks_beside_one_with_sdk_spans() -> None:
    options = ("--part", "loop", "--rounds", "1", "--seconds", "0.1")
    found = last_line("bench_overhead", *options)
    assert found["hot_path"] == hot_path()
    assert set(found["loop"]) == {"1000", "5000", "20000"}
    for rate, variants in found["loop"].items():
        assert {"off again", "recorder", "recorder, apart", "SDK"} <= set(variants), rate
        for kinds in variants.values():
            for kind in ("median", "mean", "p99", "cpu"):
                median, low, high = kinds[kind]
                assert low <= median <= high


def test_a_part_that_prints_no_result_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match=r"agent_throughput ended with 1 and printed no result"):
        bench_overhead.bench_agent(1)
