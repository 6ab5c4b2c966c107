"""The benchmark of the agent runs, loses nothing, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_run_ends_with_one_json_line_of_all_cases() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.agent_throughput"),
            *("--json", "--repeats", "1", "--requests", "100"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["spans"] >= 100 * 20  # root, attempt, 16 stages, and what is beside them
    for case in ("agent", "agent, files", "agent, SDK's way", "SDK alone"):
        assert result[case]["spans_per_s_core"]["median"] > 0
        assert result[case]["ratio_to_sdk"]["median"] > 0
    assert {"read", "track", "assemble", "judge", "protobuf"} < set(result["us_per_span"])


def test_requests_that_are_no_multiple_of_a_slice_are_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.agent_throughput", "--requests", "150"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--requests a multiple of 100")
