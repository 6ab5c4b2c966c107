"""Streams of tokens become whole characters and end before a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.detokenize import IncrementalDetokenizer, StopMatcher
from server.fake_tokenizer import FAKE_EOS_TOKEN_ID, FakeTokenizer

TOKENIZER = FakeTokenizer()


def cut(items: list[int], sizes: list[int]) -> list[list[int]]:
    """`items` cut into consecutive pieces of the given sizes, the rest as the last."""
    pieces: list[list[int]] = []
    for size in sizes:
        pieces.append(items[:size])
        items = items[size:]
    return [*pieces, items]


def matched(stop: list[str], deltas: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stop)
    out = [matcher.append(delta) for delta in deltas]
    return [*out, matcher.flush()], matcher.matched


@given(data=st.binary(max_size=60), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_deltas_concatenate_to_the_full_decode_of_any_bytes(data: bytes, sizes: list[int]) -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    text = "".join(stream.append(piece) for piece in cut(list(data), sizes)) + stream.flush()
    assert text == TOKENIZER.decode(list(data))


@given(text=st.text(max_size=30))
def test_no_delta_of_valid_text_has_a_broken_character(text: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    deltas = [stream.append([token_id]) for token_id in TOKENIZER.encode(text)]
    assert "".join(deltas) == text
    assert all(delta in text for delta in deltas)
    assert stream.flush() == ""


def test_a_character_waits_for_its_last_byte() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    *first, last = "🙂".encode()
    assert [stream.append([byte]) for byte in first] == ["", "", ""]
    assert stream.append([last]) == "🙂"


def test_flush_replaces_an_incomplete_character() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    assert stream.append([*b"a", 0xF0, 0x9F]) == "a"
    assert stream.flush() == "\ufffd"


def test_control_tokens_add_no_text_and_do_not_split_a_character() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    first, second = "é".encode()
    assert stream.append([first, FAKE_EOS_TOKEN_ID, second]) == "é"


@given(
    text=st.text("abc", max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 3), max_size=12),
)
def test_stopping_does_not_depend_on_how_text_is_cut(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    found = [(text.find(s), len(s), s) for s in stop if s in text]
    expected = (text[: min(found)[0]], min(found)[2]) if found else (text, None)
    deltas = ["".join(map(chr, piece)) for piece in cut(list(map(ord, text)), sizes)]
    pieces, stop_string = matched(stop, deltas)
    assert ("".join(pieces), stop_string) == expected


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.append("hi\nUs") == "hi"
    assert matcher.append("ual") == "\nUsual"
    assert matcher.append("\nUser: and more") == ""
    assert matcher.matched == "\nUser:"
    assert matcher.append("ignored") == matcher.flush() == ""


def test_held_text_is_given_out_at_the_end() -> None:
    assert matched(["END"], ["the EN"]) == (["the ", "EN"], None)


def test_an_earlier_longer_stop_string_wins_over_one_inside_it() -> None:
    assert matched(["abcd", "bc"], ["ab", "c", "d"]) == (["", "", "", ""], "abcd")
    assert matched(["abcd", "bc"], ["ab", "c", "x"]) == (["", "", "a", ""], "bc")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert matched([], ["a", "b"]) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        StopMatcher(["x", ""])
