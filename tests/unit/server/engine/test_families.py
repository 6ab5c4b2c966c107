"""Llama, Qwen2 and Qwen3 compute what transformers computes, from safetensors and from GGUF."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from server.disk_cache import DiskCache
from server.engine.attention import AttentionRow, make_attention
from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.config import load_config
from server.engine.model import DecoderModel
from server.engine.torch_engine import TorchEngine, kv_layout
from server.engine.weights import load_weights
from server.models import locate_model
from tests.support.tiny_models import (
    CONTEXT_LENGTH,
    LLAMA3_ROPE,
    VOCAB_SIZE,
    save_tiny_gguf,
    save_tiny_model,
)

GREEDY = SamplingParams()
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-scaled-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The same random weights in transformers and on disk."""

    reference: Any
    folder: Path
    cache: DiskCache

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), VOCAB_SIZE] by transformers."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(count):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    family, overrides = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = save_tiny_model(family, folder, **overrides)
    return TinyModel(reference, folder, DiskCache(folder / "cache"))


@pytest.fixture
def engine(tiny: TinyModel, tmp_path: Path) -> Iterator[TorchEngine]:
    engine = load_engine(tiny, str(tiny.folder), tmp_path / "pool")
    yield engine
    engine.close()


def load_engine(tiny: TinyModel, model: str, pool_path: Path) -> TorchEngine:
    return TorchEngine.load(
        model,
        pool_path=pool_path,
        owner="p0",
        num_pages=64,
        page_size=8,
        cache=tiny.cache,
    )


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def test_logits_equal_those_of_transformers(tiny: TinyModel) -> None:
    source = locate_model(str(tiny.folder))
    config = load_config(source, tiny.cache)
    weights = load_weights(source, config, torch.float32, tiny.cache)
    model = DecoderModel(config, weights, device=torch.device("cpu"))
    layout = kv_layout(config, page_size=8, dtype="float32")
    attention = make_attention(torch.zeros(layout.shape(16)), layout, num_heads=config.num_heads)
    token_ids = random_tokens(70)
    with torch.inference_mode():
        step = attention.plan([AttentionRow(pages=range(9), start=0, count=70)])
    logits = model.forward(torch.tensor(token_ids), torch.arange(70), step, torch.arange(70))
    torch.testing.assert_close(logits, tiny.logits(token_ids), rtol=1e-4, atol=1e-3)


def test_greedy_tokens_equal_those_of_transformers(tiny: TinyModel, engine: TorchEngine) -> None:
    """A batch of ragged prompts, cut into chunks of different sizes, then decoded together."""
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 8, 9, 40, 65)]
    tables = [list(range(10 * i, 10 * i + 10)) for i in range(6)]
    random.Random(1).shuffle(tables[4])
    for start in (0, 20, 40, 60):
        chunks = [
            PrefillChunk(
                token_ids=prompt[start : start + 20],
                start=start,
                pages=pages,
                sampling=GREEDY if len(prompt) <= start + 20 else None,
            )
            for prompt, pages in zip(prompts, tables, strict=True)
            if len(prompt) > start
        ]
        for chunk, token in zip(chunks, engine.prefill(chunks), strict=True):
            assert (token is None) == (chunk.sampling is None)
            if token is not None:
                prompts[tables.index(list(chunk.pages))].append(token)
    for _ in range(7):
        slots = [
            DecodeSlot(token_id=tokens[-1], position=len(tokens) - 1, pages=pages, sampling=GREEDY)
            for tokens, pages in zip(prompts, tables, strict=True)
        ]
        for tokens, token in zip(prompts, engine.decode(slots), strict=True):
            tokens.append(token)
    assert [tokens[-8:] for tokens in prompts] == [
        tiny.greedy(tokens[:-8], 8) for tokens in prompts
    ]


def test_gguf_computes_what_the_folder_does(
    tiny: TinyModel, engine: TorchEngine, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    save_tiny_gguf(tiny.reference, path)
    from_gguf = load_engine(tiny, str(path), tmp_path / "pool of gguf")
    chunk = PrefillChunk(
        token_ids=random_tokens(30), start=0, pages=[3, 1, 2, 0, 4], sampling=GREEDY
    )
    (first,) = engine.prefill([chunk])
    assert from_gguf.prefill([chunk]) == [first] == tiny.greedy(random_tokens(30), 1)
    kv, kv_of_gguf = (
        torch.frombuffer(bytearray(each.offload(chunk.pages)), dtype=torch.float32)
        for each in (engine, from_gguf)
    )
    # Not bit for bit: llama.cpp's rounded RoPE factors differ in the last bit.
    torch.testing.assert_close(kv_of_gguf, kv, rtol=1e-4, atol=1e-4)
    from_gguf.close()


def test_a_sequence_may_fill_the_context_but_not_more(engine: TorchEngine) -> None:
    pages = list(range(CONTEXT_LENGTH // 8))
    tokens = random_tokens(CONTEXT_LENGTH)
    chunk = PrefillChunk(token_ids=tokens[:-1], start=0, pages=pages, sampling=None)
    assert engine.prefill([chunk]) == [None]
    slot = DecodeSlot(
        token_id=tokens[-1], position=CONTEXT_LENGTH - 1, pages=pages, sampling=GREEDY
    )
    assert 0 <= engine.decode([slot])[0] < VOCAB_SIZE
    beyond = DecodeSlot(token_id=1, position=CONTEXT_LENGTH, pages=[*pages, 40], sampling=GREEDY)
    with pytest.raises(ValueError, match="the context length is 256"):
        engine.decode([beyond])
