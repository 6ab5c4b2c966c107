"""What docs/recording.md shows works as written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recording.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(arguments: list[str], folder: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PDTRACE_"))}
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "PDTRACE_RAISE": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader recorded the page's request."""
    folder = tmp_path_factory.mktemp("reader")
    (script,) = blocks("python")
    run([sys.executable, "-c", script], folder)
    return folder


def test_commands_explain_the_request_that_the_page_records(folder: Path) -> None:
    (commands,) = blocks("sh")
    answers: dict[str, str] = {}
    for command in commands.splitlines():
        program, name, *arguments = command.split()
        assert program == "pdtrace"
        answers[name] = run([sys.executable, "-m", "pdtrace", name, *arguments], folder)
    assert list(answers) == ["agent", "why", "check"]
    why = " ".join(answers["why"].split())  # lines are broken to the terminal's width
    assert "needed 1 slot in the running batch, 0 free; behind req-0" in why
    assert "1 request keeps all" in answers["check"]
    document: dict[str, Any] = json.loads(
        run([sys.executable, "-m", "pdtrace", "why", "--json"], folder)
    )
    (request,) = document["requests"]
    assert (request["outcome"], request["mode"]) == ("completed", "colocated")
    assert (request["prompt_tokens"], request["output_tokens"]) == (12, 16)
    assert request["violations"] == []
    assert request["unexplained_ns"] == 0


def test_names_in_the_page_exist() -> None:
    import pdtrace
    from pdtrace.ring import Counter

    for name in re.findall(r"`(?:Recorder|Mode|Outcome|RequestContext|Role)\.(\w+)", PAGE):
        owners = (pdtrace.Recorder, pdtrace.Mode, pdtrace.Outcome, pdtrace.RequestContext)
        assert any(hasattr(owner, name) for owner in (*owners, pdtrace.Role)), name
    for name in ("PREFILL", "TRANSFER", "DECODE"):
        assert name in pdtrace.Role.__members__
    assert {"extract", "inject"} <= set(pdtrace.__all__)
    ours = (ROOT / "pdtrace" / "export" / "settings.py").read_text()
    of_the_sdk = {"OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_HEADERS"}
    for variable in re.findall(r"`(OTEL_[A-Z_]+)`", PAGE):
        assert variable in ours or variable in of_the_sdk
    sources = "".join(path.read_text() for path in (ROOT / "pdtrace").rglob("*.py"))
    for variable in set(re.findall(r"PDTRACE_[A-Z_]+", PAGE)):
        assert f'"{variable}"' in sources
    assert {f"{one}" for one in re.findall(r"`((?:SHED|RECORDING)_[A-Z_]+)`", PAGE)} == {
        *(one.name for one in Counter if one.name.startswith("SHED")),
        *(one.name for one in pdtrace.Gauge if one.name.startswith("RECORDING")),
    }
