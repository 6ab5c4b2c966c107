"""Programs beside Python that some tests run. Where one is missing the test is skipped, and says
how to get it; `.ci/run` takes a skipped test for a failure."""

from __future__ import annotations

import shutil

import pytest

FROM: dict[str, str] = {
    "promtool": "Debian's package prometheus",
    "node": "Debian's package nodejs",
    "npm": "Debian's package npm",
}


def program(name: str) -> str:
    """Its path. Skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed ({FROM[name]}; .ci/programs installs it)")
    return path
