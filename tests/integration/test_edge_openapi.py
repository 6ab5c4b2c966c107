"""schemathesis against the served description of the API: every answer is one that it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import EDGE_KEY
from tests.support.completions import Ask, ask
from tests.support.server import ROOT, RunningServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

MOST_S = 30
PHASES = "examples,coverage,fuzzing,stateful"


def test_answers_are_what_the_description_promises(
    edge_server: RunningServer, tmp_path: Path
) -> None:
    """No undocumented status (so no 500 either), no other shape or type; good requests are served,
    bad ones refused, without a key nobody is."""
    report = tmp_path / "report.ndjson"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{edge_server.url}/openapi.json"),
            *("-H", f"Authorization: Bearer {EDGE_KEY}", "--phases", PHASES, "--no-color"),
            *("--max-examples", "15", "--max-time", str(MOST_S), "--generation-deterministic"),
            *("--request-timeout", "30"),
            *("--report-ndjson-path", str(report)),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": "tests.support.schemathesis_hooks",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    with edge_server.client() as client:
        described = set(client.get("/openapi.json").json()["paths"]) - {"/openapi.json"}
    assert described - {path for path in described if path in report.read_text()} == set()
    answer = ask(edge_server, Ask(headers={"authorization": f"Bearer {EDGE_KEY}"}))
    assert answer.status == 200
    assert json.loads(report.read_text().splitlines()[0])
