"""A benchmark of `benchmarks/` run as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def _run(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def last_line(module: str, *options: str) -> dict[str, Any]:
    """What it prints for programs, at the end. AssertionError where it fails."""
    done = _run(module, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def refusal(module: str, *options: str) -> str:
    """The last line of what it says of a wrong command line. AssertionError where it takes it."""
    done = _run(module, *options)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]
