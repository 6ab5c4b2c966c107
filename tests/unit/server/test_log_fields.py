"""A caller's words in a log line stay one value of one line."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.log_fields import MAX_CHARS, MAX_LINE_CHARS, OneLine, logged


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("req-1", "req-1"),
        ("ns/model:7b@v1.2", "ns/model:7b@v1.2"),
        ("", '""'),
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ('"', '"\\""'),
        ("a\nb", '"a\\nb"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("é", '"\\u00e9"'),
        ("\ud800", '"\\ud800"'),
    ],
)
def test_plain_words_stand_as_they_are_and_others_quoted(value: str, shown: str) -> None:
    assert logged(value) == shown


def test_long_values_are_cut() -> None:
    assert json.loads(logged("x" * 10_000)) == "x" * MAX_CHARS + "…"


@given(st.text(max_size=400))
def test_any_value_is_one_field_of_one_printable_line(value: str) -> None:
    line = f"request_id={logged(value)} outcome=completed"
    assert line.isascii()
    assert line.isprintable()
    field, _, rest = re.sub(r'"(\\.|[^"\\])*"', "X", line).partition(" ")
    assert "=" not in field.removeprefix("request_id=")
    assert rest == "outcome=completed"


def line_of(message: str, *arguments: object, exc_info: Any = None) -> str:
    record = logging.LogRecord("m", logging.INFO, "", 0, message, arguments, exc_info)
    return OneLine("%(levelname)s %(name)s: %(message)s").format(record)


@given(st.text(max_size=400))
def test_any_message_is_one_printable_line(text: str) -> None:
    """Other processes' words, which nobody has thought of: reasons, handoffs, paths."""
    line = line_of("pool of %s cannot be mapped", text)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    if text.isprintable():
        assert line == f"INFO m: pool of {text} cannot be mapped"


def test_long_message_is_cut_and_a_traceback_is_not() -> None:
    assert len(line_of("%s", "x\n" * 1_000_000)) < 3 * MAX_LINE_CHARS
    try:
        raise ValueError("two\nlines")
    except ValueError:
        lines = line_of("failed\nbadly", exc_info=sys.exc_info()).splitlines()
    assert lines[0] == "INFO m: failed\\nbadly"
    assert lines[1].startswith("Traceback")
    assert lines[-2:] == ["ValueError: two", "lines"]
