"""Greedy output of the default model is the same however it is served, and equal to transformers'.

Twenty prompts of token ids: short ones, some of several chunks, a group with a shared prefix, eight
at once. Float32 everywhere; the engine is the real one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.models import locate_model
from server.tokenizer import load_tokenizer
from tests.support.completions import Ask, ask_all
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
def reference() -> list[str]:
    """What transformers generates, greedily, from the same file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and its imports, not ours
        import torch
        from transformers import AutoModelForCausalLM

        source = locate_model(None)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.path.parent, gguf_file=source.path.name, dtype=torch.float32
        )
        model.eval()
        model.generation_config.eos_token_id = None
        tokenizer = load_tokenizer(None)
        texts: list[str] = []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more than one, on a busy machine, spin for each other
        try:
            for prompt in prompts():
                ids = torch.tensor([prompt])
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )
                texts.append(tokenizer.decode(output[0, len(prompt) :].tolist()))
        finally:
            torch.set_num_threads(threads)
    return texts


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
