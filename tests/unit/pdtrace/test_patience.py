"""What is shown of work that takes long, and where."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from pdtrace.analysis.sources import read_sources
from pdtrace.otlp import json_lines
from pdtrace.patience import EVERY_S, FIRST_S, LINE_EVERY_S, LINE_FIRST_S, Patience
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


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_what_cannot_erase_gets_few_lines_of_their_own(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]
) -> None:
    """A file, a pipe, or a dumb terminal."""
    monkeypatch.setenv("TERM", "dumb")
    stream = kind()
    patience = Patience(stream, clock=lambda: clock[0])
    for doing, at_s in (
        ("reading", LINE_FIRST_S - 1),
        ("reading", LINE_FIRST_S),
        ("joining", LINE_FIRST_S + 1),
        ("joining", LINE_FIRST_S + LINE_EVERY_S),
    ):
        clock[0] = at_s
        patience(doing, 0.5)
    patience.clear()
    assert stream.getvalue() == "pdtrace: reading 50 %\npdtrace: joining 50 %\n"


def test_nothing_is_shown_without_a_stream_or_once_it_is_closed(clock: list[float]) -> None:
    closed = io.StringIO()
    nowhere, gone = Patience(None, clock=lambda: clock[0]), Patience(closed, clock=lambda: clock[0])
    closed.close()
    for at_s in (100.0, 200.0):
        clock[0] = at_s
        for patience in (nowhere, gone):
            patience("reading", 0.5)
            patience.clear()


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
