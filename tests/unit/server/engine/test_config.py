"""What the engine does not implement is refused by name, in one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from server.disk_cache import DiskCache
from server.engine.config import ModelConfig, RopeScaling, load_config
from server.engine.errors import BrokenModelError, ModelError, UnsupportedModelError
from server.models import locate_model
from server.tokenizer import ModelTokenizer, load_tokenizer
from tests.support.tiny_models import LLAMA3_ROPE, save_tiny_gguf, save_tiny_model

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def load(folder: Path) -> ModelConfig:
    return load_config(locate_model(str(folder)), DiskCache(folder / "cache"))


def load_changed(folder: Path, **changes: Any) -> ModelConfig:
    config = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder)


def test_defaults_of_a_bare_llama_config(tmp_path: Path) -> None:
    config = load_changed(tmp_path)
    assert (config.head_dim, config.rope_theta, config.tied) == (16, 10000.0, False)
    assert config.rope_scaling is None
    assert config.eos_token_ids == ()


def test_qwen3_head_dim_is_not_derived_from_the_hidden_size(tmp_path: Path) -> None:
    assert load_changed(tmp_path, model_type="qwen3").head_dim == 128


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_in_both_spellings(tmp_path: Path, key: str) -> None:
    config = load_changed(tmp_path, **{key: LLAMA3_ROPE})
    assert config.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba', expected one of"),
        ({"model_type": ...}, "model_type None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling 'linear'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_unsupported_configs_are_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        load_changed(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"vocab_size": "many"}, "many"),
        ({"num_attention_heads": 5, "head_dim": 16}, "5 heads do not divide by 2 KV heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
    ],
)
def test_contradictory_configs_are_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(BrokenModelError, match=complaint) as caught:
        load_changed(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_an_unreadable_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BrokenModelError, match=r"config\.json"):
        load(tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return save_tiny_model("llama", tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
    ],
)
def test_unsupported_gguf_files_are_refused(
    reference: Any, tmp_path: Path, extra: dict[str, str], complaint: str
) -> None:
    path = tmp_path / "model.gguf"
    save_tiny_gguf(reference, path, extra=extra)
    with pytest.raises(UnsupportedModelError, match=complaint):
        load_config(locate_model(str(path)), DiskCache(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model is 'llama', expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer is 'tekken', expected one of"),
    ],
)
def test_unsupported_gguf_tokenizers_are_refused(
    reference: Any, tmp_path: Path, extra: dict[str, str], complaint: str
) -> None:
    path = tmp_path / "model.gguf"
    save_tiny_gguf(reference, path, extra=extra)
    with pytest.raises(UnsupportedModelError, match=complaint):
        load_tokenizer(str(path), DiskCache(tmp_path / "cache"))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_known_pre_tokenizers_round_trip(reference: Any, tmp_path: Path, pre: str) -> None:
    path = tmp_path / "model.gguf"
    save_tiny_gguf(reference, path, extra={"tokenizer.ggml.pre": pre})
    tokenizer = load_tokenizer(str(path), DiskCache(tmp_path / "cache"))
    assert isinstance(tokenizer, ModelTokenizer)
    text = "It's 2024,  you'll\n\n see: 你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + bytes(100), b"GGUF\x03\x00\x00\x00"])
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf") as caught:
        load_config(locate_model(str(path)), DiskCache(tmp_path / "cache"))
    assert "\n" not in str(caught.value)
