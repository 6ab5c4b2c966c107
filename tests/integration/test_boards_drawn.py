"""The boards, drawn in a browser with the data of a real run: no panel has an error or lacks data.

Real server, Jaeger and Prometheus; the project's own page on Grafana's component library.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dashboards.boards import against_baseline
from dashboards.build import GENERATED
from dashboards.render.page import HERE, NPM, find_programs, missing_programs, prepare
from tests.integration.conftest import FAST_FAKE
from tests.support.real_stack import RealStack, complete, need_programs, real_stack, wait_for
from tests.support.server import ROOT, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(420)]

STAGE = "transfer"
STALL_MS = 600
BASELINE = 24
"""Requests before a verdict on one that stalls."""
PNG = b"\x89PNG\r\n\x1a\n"
COLOURS = 32

ONE_VALUE = {"model": "fake", "role": "decode", "worker": "decode-0"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one run of the renderer left."""

    report: dict[str, Any]
    code: int
    said: str

    @property
    def failures(self) -> list[str]:
        return self.report["failures"]

    def page(self, board: str) -> dict[str, Any]:
        return next(page for page in self.report["pages"] if page["name"].startswith(board))

    def panel(self, board: str, title: str) -> dict[str, Any]:
        panels = self.page(board)["report"]["panels"]
        return next(panel for panel in panels if panel["title"] == title)


def _need_browser() -> None:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (.ci/programs installs them)")


@dataclass(frozen=True, slots=True)
class Drawings:
    """Of the same time: with all chosen, with one value of each variable, and what has to fail."""

    every: Drawn
    one: Drawn
    wrong: Drawn


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drawings]:
    need_programs()
    _need_browser()
    base = tmp_path_factory.mktemp("drawn")
    with (
        real_stack(base / "stack") as stack,
        running_server(
            base / "run", "--allow-faults", "--stack", str(base / "stack"), model=FAST_FAKE
        ) as server,
    ):
        started_s = time.time()
        for n in range(BASELINE):
            complete(server, f"usual-{n}", stream=True)
        for n in range(3):
            complete(server, f"held-{n}", stalls=f"{STAGE}={STALL_MS}", stream=True)
        _wait_for_data(stack)
        for n in range(BASELINE):  # counters have to grow between two scrapes to have a rate
            complete(server, f"later-{n}", stream=True, max_tokens=24)
        complete(server, "later-held", stalls=f"{STAGE}={STALL_MS}", stream=True)
        _wait_for_rates(stack)
        sources = [f"--prometheus={stack.urls['prometheus']}", f"--from={started_s - 5}"]
        jaeger = f"--jaeger={stack.urls['jaeger']}"
        as_chosen = [f"--var=stage={STAGE}", "--var=step=5s"]
        one = [f"--var={name}={value}" for name, value in ONE_VALUE.items()]
        # And no Jaeger.
        wrong = ["--board=pd-slow", "--var=worker=nobody", f"--colours={COLOURS}"]
        yield Drawings(
            every=_draw(base / "every", *sources, jaeger, *as_chosen, "--theme=dark"),
            one=_draw(base / "one", *sources, jaeger, *as_chosen, "--theme=light", *one),
            wrong=_draw(base / "wrong", *sources, "--theme=dark", *wrong),
        )


@pytest.fixture(params=["every", "one"])
def drawn(drawings: Drawings, request: pytest.FixtureRequest) -> Drawn:
    return getattr(drawings, request.param)


def _wait_for_data(stack: RealStack) -> None:
    for query in (
        "pd_stage_duration_seconds_count",
        "traces_span_metrics_calls_total",
        "pd_request_duration_seconds_count",
        "gen_ai_server_request_duration_seconds_count",
    ):
        wait_for(lambda query=query: stack.query(query), query)


def _wait_for_rates(stack: RealStack) -> None:
    """Both paths have counted the last request that stalled, early enough for a point of the
    panels, which look back 20 s every 5 s; and the rules were evaluated."""
    window = "[20s] offset 5s"
    for query in (
        f'increase(pd_stall_total{{stage="{STAGE}"}}{window}) > 0',
        f'increase(traces_span_metrics_calls_total{{pd_stall_stage="{STAGE}"}}{window}) > 0',
        "count(pdtrace:slo_error:ratio_rate1h offset 5s) == 3",
    ):
        wait_for(lambda query=query: stack.query(query), query)


def _draw(folder: Path, *options: str) -> Drawn:
    done = subprocess.run(
        [sys.executable, "-m", "dashboards.render", f"--out={folder}", "--to=now", *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in {0, 1}, done.stderr
    return Drawn(json.loads((folder / "report.json").read_text()), done.returncode, done.stderr)


def test_every_panel_of_every_board_is_drawn(drawn: Drawn) -> None:
    assert drawn.failures == []
    assert drawn.code == 0, drawn.said
    boards = {page["report"]["board"] for page in drawn.report["pages"]}
    assert boards == {path.stem for path in (GENERATED / "boards").glob("*.json")}
    for page in drawn.report["pages"]:
        board = json.loads((GENERATED / "boards" / f"{page['report']['board']}.json").read_text())
        titles = [panel["title"] for panel in board["panels"] if panel["type"] != "row"]
        assert [panel["title"] for panel in page["report"]["panels"]] == titles


def test_a_picture_of_each_is_there(drawn: Drawn) -> None:
    for page in drawn.report["pages"]:
        picture = Path(page["picture"]).read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) > 50_000, page["name"]


def test_a_picture_of_few_colours_has_a_palette(drawings: Drawings) -> None:
    [page] = drawings.wrong.report["pages"]
    picture = Path(page["picture"]).read_bytes()
    assert picture.startswith(PNG)
    at = picture.index(b"PLTE")
    assert int.from_bytes(picture[at - 4 : at], "big") <= 3 * COLOURS


def test_only_panels_that_do_not_concern_the_worker_are_empty(drawings: Drawings) -> None:
    for page in drawings.one.report["pages"]:
        chosen = {v["name"]: v["shown"] for v in page["report"]["variables"]}
        assert {name: chosen[name] for name in ONE_VALUE} == ONE_VALUE
    of_stages = drawings.one.page("pd-stages")["report"]["panels"]
    panels = {panel["title"]: panel["verdict"] for panel in of_stages}
    assert (panels["gateway.queue"], panels["decode.queue"]) == ("no data", "drawn")
    # Nothing is excused where all is chosen, but what needs something out of the ordinary.
    unusual = {against_baseline.BY_WORKER, against_baseline.BY_PAIR}
    for page in drawings.every.report["pages"]:
        empty = {p["title"] for p in page["report"]["panels"] if p["verdict"] != "drawn"}
        assert empty <= {"Alerts firing", "Oldest open request by stage and worker", *unusual}


def test_points_lead_to_traces(drawn: Drawn) -> None:
    assert drawn.panel("pd-overview", "Request duration")["exemplars"] > 0
    assert drawn.panel("pd-stages", "KV transfer time")["exemplars"] > 0
    assert drawn.panel("pd-stages", "decode.queue")["exemplars"] > 0


def test_jaeger_panels_show_the_stalled_requests(drawn: Drawn) -> None:
    table = drawn.panel("pd-slow", "Slowest requests that stalled in this stage")
    assert table["verdict"] == "drawn"
    assert drawn.panel("pd-request", "Trace")["verdict"] == "drawn"
    [trace] = [v for v in drawn.page("pd-request")["report"]["variables"] if v["name"] == "trace"]
    assert len(trace["shown"]) == 32


def test_run_fails_for_an_error_in_a_panel_and_for_a_value_that_nothing_has(
    drawings: Drawings,
) -> None:
    wrong = drawings.wrong
    assert wrong.code == 1
    table = "pd-slow-dark: panel 'Slowest requests': "
    assert any(line.startswith(table) and "no address of jaeger" in line for line in wrong.failures)
    assert any("variable worker does not offer nobody" in line for line in wrong.failures)
    assert all(line in wrong.said for line in wrong.failures)


@pytest.mark.parametrize("script", ["test", "typecheck"])
def test_the_page_passes_its_own_checks(script: str) -> None:
    _need_browser()
    programs = find_programs()
    prepare(programs, lambda _: None)
    done = subprocess.run(
        [programs[NPM], "run", "--silent", script],
        cwd=HERE, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
