"""A caller's words in a log line stay one value of one line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.log_fields import MAX_CHARS, logged


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
