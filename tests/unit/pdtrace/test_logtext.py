"""Somebody else's words in a log line: one line, printable, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.logtext import MAX_CHARS, one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("decode-0", "decode-0"),
        (" a  b ", "a b"),
        ("a\nb\r\nc", "a b c"),
        ("\x1b[31mred", "[31mred"),
        ("é 🌍", "é 🌍"),
        ("\u202ex\u2028y\ud800", "x y"),
        ("", ""),
    ],
)
def test_what_is_not_printable_becomes_a_space(text: str, line: str) -> None:
    assert one_line(text) == line


@given(st.text(max_size=2000), st.integers(1, 400))
def test_any_text_is_one_printable_line_of_bounded_length(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert line.isprintable()
    assert line == line.strip()
    assert len(line.removesuffix("…")) <= limit


def test_long_text_is_cut_with_a_sign() -> None:
    assert one_line("x" * 10_000) == "x" * MAX_CHARS + "…"
