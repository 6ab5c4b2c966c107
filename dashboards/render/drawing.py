"""One run: which boards, of what time, with which data and variables; and what became of it.

Owns what the page is told and how its answer is judged; the page owns how things look.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashboards.render.page import CHROMIUM, HERE, NODE, RenderError
from dashboards.sdk import Json

THEMES = ("dark", "light")
WIDTH_PX = 1600
MOST_COLOURS = 256
"""Of a PNG with a palette."""
SCRAPE_MS = 5000
"""The interval of `collector/prometheus.yml`, which Grafana's data source is told as well."""
_PAGE_MS = 60_000
_MARGIN_S = 60.0
_TOLD = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is asked for.

    boards       all of them, by uid
    chosen       uids of those to draw
    variables    values by variable; a board takes those that it has
    from_ms, to_ms   Unix time
    colours      of a picture, at most: it is smaller; None is all
    """

    boards: Mapping[str, Json]
    chosen: Sequence[str]
    themes: Sequence[str]
    prometheus: str
    jaeger: str | None
    from_ms: int
    to_ms: int
    out: Path
    variables: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    colours: int | None = None

    def pages(self) -> list[Json]:
        """What the page is told, for each picture."""
        others = [
            {"uid": uid, "title": board["title"], "tags": board["tags"]}
            for uid, board in self.boards.items()
        ]
        return [
            {
                "name": f"{uid}-{theme}",
                "settings": {
                    "board": self.boards[uid],
                    "others": others,
                    "fromMs": self.from_ms,
                    "toMs": self.to_ms,
                    "theme": theme,
                    "timeZone": "utc",
                    "widthPx": WIDTH_PX,
                    "scrapeMs": SCRAPE_MS,
                    "variables": self._of(uid),
                },
            }
            for uid in self.chosen
            for theme in self.themes
        ]

    def _of(self, uid: str) -> dict[str, list[str]]:
        has = variables_of(self.boards[uid])
        return {name: list(values) for name, values in self.variables.items() if name in has}


def variables_of(board: Json) -> set[str]:
    return {variable["name"] for variable in board["templating"]["list"]}


def draw(drawing: Drawing, programs: Mapping[str, str]) -> list[Json]:
    """Take every picture; what became of each. The page has to be built (`page.prepare`).

    Raises RenderError when the browser cannot be run.
    """
    drawing.out.mkdir(parents=True, exist_ok=True)
    pages = drawing.pages()
    asked = {
        "chromium": programs[CHROMIUM],
        "out": str(drawing.out.resolve()),
        "sources": {"prometheus": drawing.prometheus, "jaeger": drawing.jaeger},
        "timeoutMs": _PAGE_MS,
        "colours": drawing.colours,
        "pages": pages,
    }
    try:
        done = subprocess.run(
            [programs[NODE], str(HERE / "draw.mjs")],
            input=json.dumps(asked), capture_output=True, text=True, check=False,
            timeout=_MARGIN_S + 3 * len(pages) * _PAGE_MS / 1000,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RenderError(f"the browser did not end within {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise RenderError(f"the browser could not be run: {done.stderr.strip()[-_TOLD:]}")
    return json.loads(done.stdout)["pages"]


def failures(pages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each thing that makes a run fail: a page that was not drawn, what it complained
    of, a panel with an error, and one without data that does not say when it is empty.
    """
    for page in pages:
        name, report = page["name"], page["report"]
        if page["failure"]:
            yield f"{name}: {str(page['failure']).splitlines()[0]}"
        yield from (f"{name}: the browser says {said}" for said in page["console"])
        if report is None:
            continue
        yield from (f"{name}: {problem}" for problem in report["problems"])
        for panel in report["panels"]:
            if panel["verdict"] == "error":
                yield f"{name}: panel {panel['title']!r}: {panel['message']}"
            elif panel["verdict"] == "no data" and not panel["mayBeEmpty"]:
                yield f"{name}: panel {panel['title']!r}: no data"
