"""Generated pages are up to date; `make fix` writes them anew."""

from __future__ import annotations

from dashboards.build import main as dashboards
from pdtrace.glossary import main as glossary
from tests.support.module_index import main as module_index


def test_stage_glossary_is_up_to_date() -> None:
    assert glossary(["--check"]) == 0


def test_boards_and_rules_are_up_to_date() -> None:
    assert dashboards(["--check"]) == 0


def test_module_index_is_up_to_date() -> None:
    assert module_index(["--check"]) == 0
