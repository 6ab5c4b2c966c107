"""The page names everything there is, and drift from the code is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace import glossary
from pdtrace.stages import MARKS, STAGES, Mode, Outcome, WaitReason


def test_page_in_the_repository_is_current() -> None:
    assert glossary.main(["--check"]) == 0


def test_page_names_every_stage_mark_reason_outcome_and_chain() -> None:
    page = glossary.page()
    names = [stage.name for stage in STAGES]
    names += [mark.name.lower() for mark in MARKS]
    names += [reason.value for reason in WaitReason] + [outcome.value for outcome in Outcome]
    names += [mode.value for mode in Mode]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert all(stage.advice in page and stage.meaning in page for stage in STAGES)


def test_tables_have_as_many_cells_as_their_header() -> None:
    width = 0
    for line in glossary.page().splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        width = width or cells
        assert cells == width, line


def test_drift_is_found_and_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "docs" / "stages.md"
    assert glossary.main(["--check"], path=path) == 1
    assert "run python -m pdtrace.glossary" in capsys.readouterr().err
    assert glossary.main([], path=path) == 0
    assert glossary.main(["--check"], path=path) == 0
    path.write_text(path.read_text(encoding="utf-8") + "drift\n", encoding="utf-8")
    assert glossary.main(["--check"], path=path) == 1
