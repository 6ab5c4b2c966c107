"""Rules and runbook pages for a stack's objectives: those that are shipped, or generated for one's
own, with boards.

The generator is another program, which nothing that serves imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from pdtrace.alert_links import RUNBOOKS, Places
from pdtrace.errors import PdtraceError
from pdtrace.shipped import Shipped, write
from pdtrace.slo import DEFAULT_SLO, Slo
from server.errors import StartError
from server.stack.programs import PROJECT_ROOT

GENERATED, OBJECTIVES = "generated", "slo.toml"
"""Within the folder of the stack."""


def write_rules(folder: Path, slo: Slo) -> list[Path]:
    """Write all of it below `folder`, which is absolute; returns Prometheus's files.

    Alerts lead to the pages by `file:` addresses: programs and pages are on one machine. Raises
    StartError.
    """
    out = folder / GENERATED
    pages = (out / RUNBOOKS).as_uri()
    if slo == DEFAULT_SLO:
        try:
            write(Shipped.RULES, out, replace=True, places=Places(runbooks=pages))
        except PdtraceError as error:
            raise StartError(str(error)) from error
    else:
        _generate(folder, slo, out, pages)
    return sorted((out / "prometheus").glob("*.yml"))


def _generate(folder: Path, slo: Slo, out: Path, pages: str) -> None:
    objectives = folder / OBJECTIVES
    settings = {name: x for name, x in msgspec.to_builtins(slo).items() if x is not None}
    objectives.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    command = [sys.executable, "-m", "dashboards.build", "--slo", objectives, "--out", out]
    done = subprocess.run(
        [*command, "--runbooks", pages],
        cwd=PROJECT_ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.splitlines()[-1:]) or f"exit code {done.returncode}"
        raise StartError(f"rules for these objectives cannot be generated: {said}")
