"""What a drawn board is judged by, and the times a user may give."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dashboards.build import boards
from dashboards.render.__main__ import main
from dashboards.render.drawing import Drawing, failures
from dashboards.render.page import RenderError, run_told
from dashboards.render.times import milliseconds

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def _page(**changes: Any) -> dict[str, Any]:
    report = {"problems": [], "panels": changes.pop("panels", [])}
    return {"name": "b-dark", "failure": None, "console": [], "report": report, **changes}


def _panel(verdict: str, *, may_be_empty: bool = False) -> dict[str, Any]:
    return {"title": "T", "verdict": verdict, "mayBeEmpty": may_be_empty, "message": "boom"}


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (_page(panels=[_panel("drawn")]), []),
        (_page(panels=[_panel("no data")]), ["b-dark: panel 'T': no data"]),
        (_page(panels=[_panel("no data", may_be_empty=True)]), []),
        (_page(panels=[_panel("error", may_be_empty=True)]), ["b-dark: panel 'T': boom"]),
        (_page(report=None, failure="late\nstack"), ["b-dark: late"]),
        (_page(console=["oops"]), ["b-dark: the browser says oops"]),
    ],
)
def test_what_makes_a_run_fail(page: dict[str, Any], wrong: list[str]) -> None:
    assert list(failures([page])) == wrong


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("now", 1769860800000),
        ("now-30m", 1769859000000),
        ("1769860800.5", 1769860800500),
        ("2026-01-31T12:00:00Z", 1769860800000),
        ("2026-01-31T12:00", 1769860800000),
        ("2026-01-31T13:00+01:00", 1769860800000),
    ],
)
def test_times(text: str, ms: int) -> None:
    assert milliseconds(text, NOW) == ms


@pytest.mark.parametrize("text", ["", "yesterday", "now+1h", "-5"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(RenderError, match="a time is"):
        milliseconds(text, NOW)


def test_a_board_is_given_its_own_variables_only() -> None:
    made = boards()
    drawing = Drawing(
        boards=made, chosen=list(made), themes=["dark"], prometheus="http://x", jaeger=None,
        from_ms=0, to_ms=1, out=Path(), variables={"stage": ["transfer"], "worker": ["a", "b"]},
    )  # fmt: skip
    given = {page["name"]: page["settings"]["variables"] for page in drawing.pages()}
    assert given["pd-overview-dark"] == {"worker": ["a", "b"]}
    assert given["pd-slow-dark"] == {"stage": ["transfer"], "worker": ["a", "b"]}


@pytest.mark.parametrize("colours", ["1", "257", "many"])
def test_colours_are_as_many_as_a_palette_holds(
    colours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--prometheus=http://x", f"--out={tmp_path}", "--colours", colours])
    assert f"2 to 256, not '{colours}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "timeout_s", "says"),
    [
        ("print('why'); raise SystemExit(3)", 60.0, "failed: why"),
        ("import time; time.sleep(600)", 0.2, "did not end within 0.2 s"),
    ],
)
def test_program_that_fails_or_hangs_is_an_error(program: str, timeout_s: float, says: str) -> None:
    with pytest.raises(RenderError, match=says):
        run_told([sys.executable, "-c", program], print, timeout_s=timeout_s, tell_s=0.05)


def test_long_program_is_told_of_while_it_runs() -> None:
    told = list[str]()
    program = "import sys; sys.stdin.read(); import time; time.sleep(1)"
    run_told([sys.executable, "-c", program], told.append, timeout_s=60.0, tell_s=0.05)
    assert told
    assert all("60 s at most" in line for line in told)
