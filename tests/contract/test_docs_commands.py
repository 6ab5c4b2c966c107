"""Commands of the pages work as they stand: URLs are quoted, and it is said where commands are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shell_lines(page: Path) -> list[str]:
    blocks = re.findall(r"^```(?:sh|bash)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_urls_that_a_shell_would_expand_are_quoted(page: Path) -> None:
    bare = [
        line
        for line in shell_lines(page)
        if line.startswith("curl") and re.search(r"(?:^|\s)http\S*[?&*]", line)
    ]
    assert bare == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_with_bare_commands_says_where_they_are_in_a_checkout(page: Path) -> None:
    text = page.read_text()
    bare = [line for line in shell_lines(page) if re.match(r"(pdtrace|python)\s", line)]
    if bare:
        before, _, _ = text.partition(bare[0])
        assert ".venv/bin/pdtrace" in before


def test_commands_of_the_readme_need_no_active_environment() -> None:
    readme = PAGES[0].read_text()
    assert re.findall(r"`(?:pdtrace|python) [^`]* --?[a-z][^`]*`", readme) == []
