"""The page that draws: its packages installed and its program built, each only when it changed.

Owns what is run of npm and node for that; knows nothing of boards.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pdtrace.errors import PdtraceError

HERE = Path(__file__).resolve().parent
NODE, NPM, CHROMIUM = "node", "npm", "chromium"
_NAMES = {
    NODE: ("node", "nodejs"),
    NPM: ("npm",),
    CHROMIUM: ("chromium", "chromium-browser", "google-chrome"),
}
_INSTALL_S, _BUILD_S = 1800.0, 600.0
"""With an empty cache npm fetches 100 MB; a slow line and a busy machine are no failure."""
_TELL_S = 15.0
_TOLD = 2000
"""Characters of a failed program's output that are passed on: its end, where the cause stands."""


class RenderError(PdtraceError):
    """The boards cannot be drawn, and why."""


def missing_programs() -> list[str]:
    """Names of the programs that are not on this machine."""
    return [name for name, names in _NAMES.items() if _which(names) is None]


def find_programs() -> dict[str, str]:
    """Paths by name. Raises RenderError that says what is missing."""
    if missing := missing_programs():
        raise RenderError(
            f"not installed: {', '.join(missing)}; Debian has nodejs, npm and chromium "
            "(.ci/programs installs them)"
        )
    found = {name: _which(names) for name, names in _NAMES.items()}
    return {name: path for name, path in found.items() if path is not None}


def prepare(programs: dict[str, str], say: Callable[[str], None]) -> None:
    """Install and build what is not up to date. Raises RenderError where npm or the build fails."""
    lock = (HERE / "package-lock.json", HERE / "package.json")
    install = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    _once(
        HERE / "node_modules" / ".pdtrace-installed",
        _digest(lock),
        lambda: run_told([programs[NPM], *install], say, timeout_s=_INSTALL_S),
        lambda: say("installing the page's packages (npm ci)"),
    )
    _once(
        HERE / "dist" / ".pdtrace-built",
        _digest((*lock, HERE / "build.mjs", *sorted((HERE / "src").rglob("*.*")))),
        lambda: run_told([programs[NODE], "build.mjs"], say, timeout_s=_BUILD_S),
        lambda: say("building the page"),
    )


def _once(stamp: Path, wanted: str, do: Callable[[], None], tell: Callable[[], None]) -> None:
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    tell()
    do()
    stamp.write_text(wanted)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(HERE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def run_told(
    command: list[str], say: Callable[[str], None], *, timeout_s: float, tell_s: float = _TELL_S
) -> None:
    """Run a program in this folder, and say every `tell_s` seconds that it still runs.

    Raises RenderError with the end of what it wrote, where it fails or does not end in time.
    """
    shown = f"{Path(command[0]).name} {command[1]}"
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=HERE, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=tell_s)
                    break
                except subprocess.TimeoutExpired:
                    took_s = time.monotonic() - started_s
                    if took_s >= timeout_s:
                        raise RenderError(f"{shown} did not end within {timeout_s:g} s") from None
                    say(f"{shown}: {took_s:.0f} s so far, {timeout_s:g} s at most")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            output.seek(0)
            written = output.read().decode(errors="replace").strip()
            raise RenderError(f"{shown} failed: {written[-_TOLD:]}")


def _which(names: Iterable[str]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)
