"""docs/operations.md has every deadline and every bound of a queue, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from server.config import Deadlines, Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def test_page_has_every_deadline_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+_s)` \| ([\d.]+) s \|", PAGE, re.MULTILINE)
    assert {name: float(seconds) for name, seconds in rows} == msgspec.to_builtins(Deadlines())


@pytest.mark.parametrize("name", ["max_concurrency", "max_queue", "max_waiting", "preempted_pages"])
def test_page_has_the_bounds_of_the_queues(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    (row,) = re.findall(rf"^\| ((?:`[-\w]+`(?:, )?)*`{flag}`.*?) \| (.*?) \|", PAGE, re.MULTILINE)
    names = re.findall(r"`([-\w]+)`", row[0])
    assert row[1].split(", ")[names.index(flag)] == str(getattr(Settings(), name))
