"""Where the programs of the stack are on this machine, and what to do where one is missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
COLLECTOR = PROJECT_ROOT / "collector"
_BUILT_PATH = PROJECT_ROOT / ".ci" / "built-path"

JAEGER, PROMETHEUS, ALERTMANAGER = "jaeger", "prometheus", "alertmanager"

_DEBIAN: Mapping[str, tuple[str, ...]] = {
    PROMETHEUS: ("prometheus",),
    ALERTMANAGER: ("prometheus-alertmanager", "alertmanager"),
}
"""Names of the executables: Debian's, then the authors' own."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of the three programs."""

    jaeger: Path
    prometheus: Path
    alertmanager: Path


def missing_programs() -> list[str]:
    """Names of the programs that are not here."""
    missing = [] if jaeger_path().is_file() else [JAEGER]
    return missing + [name for name, names in _DEBIAN.items() if _which(names) is None]


def find_programs() -> Programs:
    """Raises StartError that says how to get what is missing."""
    if missing := missing_programs():
        raise StartError(
            f"not installed: {', '.join(missing)}; `make stack` installs them (.ci/programs), or "
            "take the containers of collector/compose.yaml"
        )
    prometheus, alertmanager = (_which(_DEBIAN[name]) for name in (PROMETHEUS, ALERTMANAGER))
    assert prometheus is not None
    assert alertmanager is not None
    return Programs(jaeger_path(), prometheus, alertmanager)


def jaeger_path() -> Path:
    """Where Jaeger is, or is to be built: `$PDTRACE_JAEGER`, or the user's cache."""
    answer = subprocess.run(
        [str(_BUILT_PATH), JAEGER],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if answer.returncode != 0:
        raise StartError(f"{_BUILT_PATH} failed: {answer.stderr.strip()}")
    return Path(answer.stdout.rstrip("\n"))


def _which(names: tuple[str, ...]) -> Path | None:
    found = next((path for name in names if (path := shutil.which(name))), None)
    return None if found is None else Path(found)
