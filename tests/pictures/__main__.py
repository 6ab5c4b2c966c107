"""`python -m tests.pictures`: a stack, a server, some trouble, and a picture of every board."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dashboards.render import page
from server.stack import programs
from tests.pictures.scenario import MODEL, PHASES, SERVER_OPTIONS, phases
from tests.pictures.traffic import held, play
from tests.support.real_stack import RealStack, real_stack
from tests.support.server import ROOT, RunningServer, running_server

IMAGES = ROOT / "docs" / "images"
VARIABLES = {"stage": "transfer", "step": "5s"}
"""Prometheus scrapes every 5 s here, so rates may have points as near as that."""
COLOURS = 160
"""Of each picture: text and lines look as they did, and the repository grows by less."""
_WHOLE_S = sum(phase.seconds for phase in PHASES)
_SCRAPED_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """What the pictures show: whose data, and of when (Unix time, s)."""

    prometheus: str
    jaeger: str
    from_s: float
    to_s: float


def main() -> int:
    """Exit code 0: the pictures are there; 1: a panel was not drawn; 2: they cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.pictures",
        description="Pictures of all boards, of a real run with trouble in it (15 minutes).",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=IMAGES)
    parser.add_argument(
        "--seconds", type=float, default=_WHOLE_S, help=f"length of the run ({_WHOLE_S:g})"
    )
    parser.add_argument(
        "--stay", action="store_true", help="draw again for each line of input, until it ends"
    )
    chosen = parser.parse_args()
    if chosen.seconds < 60:
        parser.error("--seconds is 60 or more")
    if missing := programs.missing_programs():
        _say(f"error: not installed: {', '.join(missing)} (.ci/programs installs them)")
        return 2
    try:
        page.prepare(page.find_programs(), _say)
    except page.RenderError as error:
        _say(f"error: {error}")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="pdtrace-pictures-"))
    try:
        with (
            real_stack(folder / "stack") as stack,
            running_server(
                folder / "run", "--stack", str(folder / "stack"), *SERVER_OPTIONS, model=MODEL
            ) as server,
        ):
            shot = asyncio.run(_run(stack, server, chosen.seconds))
            code = _draw(shot, folder / "drawn", chosen.out)
            while chosen.stay and sys.stdin.readline():
                code = _draw(shot, folder / "drawn", chosen.out)
            return code
    finally:
        shutil.rmtree(folder)


async def _run(stack: RealStack, server: RunningServer, seconds: float) -> Shot:
    urls = stack.urls
    _say(f"Prometheus is {urls['prometheus']}, Jaeger {urls['jaeger']}")
    from_s = time.time()
    await play(server, phases(seconds), _say)
    async with held(server):
        to_s = time.time()
        await asyncio.sleep(_SCRAPED_S)  # Jaeger decides on traces, Prometheus looks once more
    return Shot(prometheus=urls["prometheus"], jaeger=urls["jaeger"], from_s=from_s, to_s=to_s)


def _draw(shot: Shot, folder: Path, out: Path) -> int:
    """Exit code of the renderer, whose pictures are copied wherever it made all of them."""
    drawn = subprocess.run([*_command(shot, folder)], cwd=ROOT, check=False)
    if drawn.returncode == 2:
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for picture in sorted(folder.glob("*.png")):
        shutil.copyfile(picture, out / picture.name)
        _say(f"{out / picture.name}: {picture.stat().st_size // 1000} kB")
    return drawn.returncode


def _command(shot: Shot, folder: Path) -> Sequence[str]:
    return (
        sys.executable, "-m", "dashboards.render",
        f"--prometheus={shot.prometheus}", f"--jaeger={shot.jaeger}",
        f"--from={shot.from_s:.0f}", f"--to={shot.to_s:.0f}",
        f"--out={folder}", f"--colours={COLOURS}",
        *(f"--var={name}={value}" for name, value in VARIABLES.items()),
    )  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
