"""Request ids in and out, and what the public description promises."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.identity import RequestIdentity


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128))
def test_printable_id_is_kept(text: str) -> None:
    identity = RequestIdentity.of([(b"X-Request-ID", text.encode())])
    assert (identity.request_id, identity.replaced) == (text, False)


@given(st.binary(max_size=200))
def test_whatever_comes_in_goes_out_as_a_safe_header(raw: bytes) -> None:
    identity = RequestIdentity.of([(b"x-request-id", raw)])
    for _, value in identity.response_headers():
        assert re.fullmatch(rb"[\x20-\x7e]{1,128}", value)
    assert identity.replaced is (identity.request_id.encode() != raw.strip(b" \t"))


def test_missing_id_is_made_and_not_called_replaced() -> None:
    first, second = RequestIdentity.of([]), RequestIdentity.of([])
    assert first.request_id != second.request_id
    assert not first.replaced


@pytest.mark.parametrize("values", [(b"a", b"b"), (b"a", b"")])
def test_first_of_several_counts(values: tuple[bytes, ...]) -> None:
    headers = [(b"x-request-id", value) for value in values]
    assert RequestIdentity.of(headers).request_id == "a"
