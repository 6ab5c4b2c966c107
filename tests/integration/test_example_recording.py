"""The example that records a foreign engine runs as its reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pdtrace import RingReader, scan_rings

EXAMPLE = Path("examples/01_record_your_engine.py")


def run_command(arguments: list[str]) -> str:
    return subprocess.run(
        [sys.executable, "-m", "pdtrace", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_the_example_explains_where_each_requests_time_went(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(Path.cwd()), "PDTRACE_RAISE": "1"},
    )
    lines = re.findall(
        r"^ +(\w+): +([\d.]+) ms, of which +([\d.]+) ms in ([\w.]+)$", done.stdout, re.M
    )
    assert [line[0] for line in lines] == ["short", "long", "third", "fourth"]
    assert all(0 < float(most) <= float(total) for _, total, most, _ in lines)
    assert lines[2][3] == lines[3][3] == "prefill.queue"  # no slot was free
    assert done.stdout.count("waited for slots, behind 'long'") >= 1
    agent, why = (line.split() for line in done.stdout.splitlines()[-2:])
    assert agent[:2] + why[:2] == ["pdtrace", "agent", "pdtrace", "why"]
    run_command(agent[1:])
    shown = " ".join(run_command([*why[1:], "third"]).split())
    assert "third is not stalled" in shown
    assert "prefill.queue" in shown
    assert "Needed 1 slot in the running batch, 0 free; behind long." in shown
    rings = scan_rings(tmp_path)
    assert [path.name.split("-")[0] for path in rings] == ["gateway", "worker"]
    for path in rings:
        with RingReader(path) as reader:
            assert reader.closed
            assert reader.read()


def test_ten_lines_are_enough_to_record_an_engine():
    assert EXAMPLE.read_text().count("# ←\n") <= 10
