"""What is shown of work that takes long, and where."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from pdtrace.analysis.sources import read_sources
from pdtrace.otlp import json_lines
from pdtrace.patience import EVERY_S, FIRST_S, Patience
from tests.support.pd_traces import Story


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setenv("TERM", "xterm")
    return [0.0]


def test_short_work_shows_nothing(clock: list[float]) -> None:
    terminal = Terminal()
    patience = Patience(terminal, clock=lambda: clock[0])
    clock[0] = FIRST_S / 2
    patience("reading", 0.5)
    patience.clear()
    assert terminal.getvalue() == ""


def test_long_work_shows_how_far_it_is_and_leaves_nothing_behind(clock: list[float]) -> None:
    terminal = Terminal()
    patience = Patience(terminal, clock=lambda: clock[0])
    clock[0] = FIRST_S
    patience("reading", 0.25)
    patience("reading", 0.26)
    clock[0] += EVERY_S
    patience("reading", 0.5)
    patience("comparing", None)
    patience.clear()
    patience.clear()
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown == [
        "",
        "pdtrace: reading 25 %",
        "pdtrace: reading 50 %",
        "pdtrace: comparing",
        "",
    ]


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_anything_but_a_terminal_stays_clean(
    clock: list[float], stream: io.StringIO | None
) -> None:
    patience = Patience(stream, clock=lambda: clock[0])
    clock[0] = 100.0
    patience("reading", 0.5)
    patience.clear()
    assert stream is None or stream.getvalue() == ""


def test_terminal_that_cannot_erase_stays_clean(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    patience = Patience(terminal, clock=lambda: clock[0])
    clock[0] = 100.0
    patience("reading", 0.5)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("packed", [False, True])
def test_reading_tells_how_far_it_is_over_all_files(tmp_path: Path, packed: bool) -> None:
    data = json_lines.encode_line(Story().trace().spans) * 400
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(data) if packed else data)
    told: list[tuple[str, float | None]] = []
    read_sources([tmp_path], progress=lambda doing, share: told.append((doing, share)))
    shares = [share for doing, share in told if doing == "reading traces" and share is not None]
    assert shares == sorted(shares)
    assert len(shares) == 8
    assert 0 < shares[0] <= 1
    assert shares[-1] <= 1.0001
