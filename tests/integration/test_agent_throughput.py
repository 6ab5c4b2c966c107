"""The benchmark of the agent runs, loses nothing, and prints what it promises."""

from __future__ import annotations

from tests.support.benchmark_runs import last_line, refusal


def test_a_short_run_ends_with_one_json_line_of_all_cases() -> None:
    result = last_line("agent_throughput", "--repeats", "1", "--requests", "100")
    assert result["spans"] >= 100 * 20  # root, attempt, 16 stages, and what is beside them
    for case in ("agent", "agent, files", "agent, SDK's way", "SDK alone"):
        assert result[case]["spans_per_s_core"]["median"] > 0
        assert result[case]["ratio_to_sdk"]["median"] > 0
    assert {"read", "track", "assemble", "judge", "protobuf"} < set(result["us_per_span"])


def test_requests_that_are_no_multiple_of_a_slice_are_refused_in_one_line() -> None:
    told = refusal("agent_throughput", "--requests", "150")
    assert told.endswith("--requests a multiple of 100")
