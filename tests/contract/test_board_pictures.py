"""The pictures of the boards: one of each, dark and light, shown by the pages, not too large."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dashboards.build import GENERATED
from dashboards.render.drawing import THEMES, WIDTH_PX
from tests.pictures.__main__ import IMAGES

ROOT = Path(__file__).resolve().parents[2]
BOARDS = sorted(path.stem for path in (GENERATED / "boards").glob("*.json"))
NAMES = [f"{board}-{theme}.png" for board in BOARDS for theme in THEMES]
MOST_BYTES = 400_000
"""Each set of pictures stays in the repository for good."""


def test_each_board_has_its_pictures_and_there_are_no_others() -> None:
    assert sorted(path.name for path in IMAGES.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_as_the_renderer_makes_it_and_small(name: str) -> None:
    picture = (IMAGES / name).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(picture[16:20], "big") == WIDTH_PX
    assert len(picture) <= MOST_BYTES


def test_the_page_of_the_boards_leads_to_each_picture() -> None:
    page = (ROOT / "docs" / "dashboards.md").read_text()
    assert set(re.findall(r"\]\(images/([^)]+)\)", page)) == set(NAMES)


def test_pictures_in_the_readme_are_there() -> None:
    shown = re.findall(r"\]\(docs/images/([^)]+)\)", (ROOT / "README.md").read_text())
    assert shown
    assert set(shown) <= set(NAMES)
