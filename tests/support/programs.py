"""Programs beside Python that some tests run. Where one is missing the test is skipped, and says
how to get it; `.ci/run` takes a skipped test for a failure."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FROM: dict[str, str] = {
    "promtool": "Debian's package prometheus",
    "prometheus": "Debian's package prometheus",
    "node": "Debian's package nodejs",
    "npm": "Debian's package npm",
}


def program(name: str) -> str:
    """Its path. Skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed ({FROM[name]}; .ci/programs installs it)")
    return path


def otelcol() -> Path:
    """The OpenTelemetry Collector of collector/tools. Skips the test where it is not built."""
    asked = [str(ROOT / ".ci" / "built-path"), "otelcol"]
    answer = subprocess.run(
        asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    path = Path(answer.stdout.rstrip("\n"))
    if not path.is_file():
        pytest.skip("the OpenTelemetry Collector is not built (.ci/programs builds it, with Go)")
    return path
