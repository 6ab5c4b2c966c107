"""Greedy output of the default model is the same however it is served, and equal to transformers'.

Twenty prompts of token ids: short ones, some of several chunks, a group with a shared prefix, eight
at once. Float32 everywhere; the engine is the real one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.loader import EngineConfig, load_engine
from server.tokenizer import load_tokenizer
from tests.support.completions import Ask, ask_all
from tests.support.reference_model import greedy_continuation, load_reference
from tests.support.server import running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

NEW_TOKENS = 12
BUDGET = 64
WAYS = {
    "pd": (),
    "pd, first token forwarded, tcp, two by two": (
        *("--prefill", "2", "--decode", "2", "--transfer", "tcp", "--first-token", "prefill"),
        *("--policy", "round_robin", "--prefill-pages", "128", "--decode-pages", "128"),
    ),
    "colocated, chunked": ("--mode", "colocated", "--chunked"),
    "colocated, unchunked": ("--mode", "colocated", "--unchunked"),
}
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time",
    "Water boils at",
    "The three primary colours are",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "To make bread you need",
)


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(None)
    rng = random.Random(5)
    words = " ".join(TEXTS).split()

    def long(num_words: int) -> str:
        return " ".join(rng.choices(words, k=num_words))

    prefix = long(90)
    texts = [*TEXTS]  # 8, sent at once
    texts += [long(n) for n in (50, 60, 80, 100, 130, 160)]  # several chunks of 64 tokens
    texts += [f"{prefix} {ending}" for ending in TEXTS[:6]]  # shared prefix
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Text that transformers generates, greedily, from the same file.

    The engine proposes tokens, in this process and without a server; transformers confirms that
    each of them is its own choice (see `greedy_continuation`).
    """
    tokenizer = load_tokenizer(None)
    proposed = generated(tmp_path_factory.mktemp("pool") / "pool")
    model = load_reference()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more, on a busy machine, spin for each other
    try:
        for prompt, tokens in zip(prompts(), proposed, strict=True):
            assert greedy_continuation(model, prompt, tokens) == tokens
    finally:
        torch.set_num_threads(threads)
    return [tokenizer.decode(tokens) for tokens in proposed]


def generated(pool: Path) -> list[list[int]]:
    """What the engine generates for each prompt by itself."""
    engine = load_engine(EngineConfig(pool_path=str(pool), owner="reference", num_pages=64))
    greedy = SamplingParams()
    try:
        found: list[list[int]] = []
        for prompt in prompts():
            pages = list(range(engine.layout.pages_for(len(prompt) + NEW_TOKENS)))
            chunk = PrefillChunk(token_ids=prompt, start=0, pages=pages, sampling=greedy)
            tokens = [token for token in engine.prefill([chunk]) if token is not None]
            while len(tokens) < NEW_TOKENS:
                slot = DecodeSlot(
                    token_id=tokens[-1],
                    position=len(prompt) + len(tokens) - 1,
                    pages=pages,
                    sampling=greedy,
                )
                tokens += engine.decode([slot])
            found.append(tokens)
        return found
    finally:
        engine.close()


@pytest.mark.parametrize("way", list(WAYS))
def test_greedy_output_equals_transformers_token_for_token(
    reference: Sequence[str], tmp_path: Path, way: str
) -> None:
    asked = [Ask(prompt=prompt, max_tokens=NEW_TOKENS) for prompt in prompts()]
    assert len(asked) == 20
    options = ("--prefill-budget", str(BUDGET), *WAYS[way])
    with running_server(tmp_path / "run", *options, model=None) as server:
        answers = ask_all(server, asked[:8], at_once=8)
        answers += ask_all(server, asked[8:], at_once=3)
        cached = [a.usage["prompt_tokens_details"]["cached_tokens"] for a in answers if a.usage]
    assert [answer.text for answer in answers] == list(reference)
    assert [a.usage["completion_tokens"] for a in answers if a.usage] == [NEW_TOKENS] * 20
    # Otherwise the group with a shared prefix would prove nothing.
    assert sum(tokens > 0 for tokens in cached[14:]) >= 3
