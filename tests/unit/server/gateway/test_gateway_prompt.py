"""What fits into the context, and prompts as token ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.base import ModelInfo
from server.errors import InvalidRequest
from server.fake_tokenizer import FakeTokenizer
from server.gateway.openai_api import Operation, parse_request
from server.gateway.prompt import INLINE_CHARS, PromptEncoder, output_budget, prompt_digest
from server.gateway.registry import KvCapacity

MODEL = ModelInfo(
    name="m", fingerprint="f", vocab_size=260, context_length=64, eos_token_ids=(257,)
)
UNKNOWN = KvCapacity(prompt_tokens=None, total_tokens=None)


def budget(prompt_len: int, max_tokens: int | None, capacity: KvCapacity = UNKNOWN) -> int:
    return output_budget(prompt_len, max_tokens, model=MODEL, capacity=capacity, param="prompt")


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"),
    [(1, None, 63), (63, None, 1), (63, 1, 1), (1, 63, 63), (10, 5, 5)],
)
def test_exact_fit_is_allowed(prompt_len: int, max_tokens: int | None, expected: int) -> None:
    assert budget(prompt_len, max_tokens) == expected


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(64, None), (64, 1), (65, None), (63, 2), (1, 64)]
)
def test_one_too_many_is_refused(prompt_len: int, max_tokens: int | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        budget(prompt_len, max_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert "64 tokens" in str(caught.value)


@given(
    st.integers(1, 100),
    st.none() | st.integers(1, 100),
    st.none() | st.integers(1, 80),
    st.none() | st.integers(1, 80),
)
def test_whatever_is_granted_fits(
    prompt_len: int, max_tokens: int | None, prompt_cap: int | None, total_cap: int | None
) -> None:
    capacity = KvCapacity(prompt_tokens=prompt_cap, total_tokens=total_cap)
    try:
        granted = budget(prompt_len, max_tokens, capacity)
    except InvalidRequest:
        return
    assert granted >= 1
    assert max_tokens in (None, granted)
    assert prompt_len + granted <= min(64, total_cap or 64)
    assert prompt_len <= (prompt_cap or 64)


def encode(operation: Operation, **fields: Any) -> tuple[int, ...]:
    body = json.dumps({"model": "m", **fields}).encode()
    encoder = PromptEncoder(FakeTokenizer())
    try:
        request = parse_request(operation, body, served_name="m")
        return asyncio.run(encoder.encode(request))
    finally:
        encoder.close()


def test_long_prompt_has_the_same_ids_as_a_short_one() -> None:
    text = "x" * (INLINE_CHARS + 1)
    assert encode(Operation.TEXT_COMPLETION, prompt=text) == tuple(text.encode())


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    assert encode(Operation.TEXT_COMPLETION, prompt=[259]) == (259,)
    with pytest.raises(InvalidRequest, match="259"):
        encode(Operation.TEXT_COMPLETION, prompt=[1, 260])


def test_developer_is_system_and_parts_are_joined() -> None:
    plain = encode(Operation.CHAT, messages=[{"role": "system", "content": "ab"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert encode(Operation.CHAT, messages=[{"role": "developer", "content": parts}]) == plain


def test_digest_tells_prompts_apart() -> None:
    assert prompt_digest((1, 2)) == prompt_digest([1, 2]) != prompt_digest((2, 1))
