"""The numbers that make a Llama-like model, from `config.json` or GGUF metadata.

Owns which architectures are served and under which conditions; reads no weights and no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import msgspec

from server.disk_cache import DiskCache
from server.engine.errors import BrokenModelError, UnsupportedModelError
from server.gguf_metadata import GgufMetadata, load_gguf_metadata
from server.models import ModelFormat, ModelSource

FAMILIES = ("llama", "qwen2", "qwen3")

# Ends of a turn or text by name: GGUF metadata lists one id, models emit either.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3.1's frequency bands: long waves are slowed by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model with RMSNorm, RoPE (half-rotate), GQA and SwiGLU.

    family          "llama", "qwen2" (bias on q, k, v) or "qwen3" (RMSNorm on each q and k head)
    attention_bias  q, k and v have a bias
    qk_norm         q and k heads are normalized before RoPE
    tied            lm_head is the embedding
    rope_scaling    how frequencies are scaled, where the config says so by rule
    rope_factors    the weights hold a divisor per frequency instead (GGUF)
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    tied: bool
    rope_scaling: RopeScaling | None
    rope_factors: bool
    eos_token_ids: tuple[int, ...]

    @property
    def attention_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "context_length",
        ):
            if getattr(self, name) < 1:
                raise BrokenModelError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BrokenModelError(
                f"{self.num_heads} heads do not divide by {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise BrokenModelError(f"head_dim is {self.head_dim}, RoPE needs an even number")


def load_config(source: ModelSource, cache: DiskCache) -> ModelConfig:
    """Read the model's config. Raises UnsupportedModelError or BrokenModelError."""
    if source.format is ModelFormat.GGUF:
        return _from_gguf(source.path, load_gguf_metadata(source.path, cache))
    return _from_hugging_face(source.path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; {} when the file is absent. Raises BrokenModelError."""
    try:
        loaded: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BrokenModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise BrokenModelError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", loaded)


def _from_hugging_face(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{folder / 'config.json'} has model_type {family!r}, expected one of {FAMILIES}"
        )
    _refuse(folder, raw, "quantization_config", None)
    _refuse(folder, raw, "hidden_act", "silu")
    _refuse(folder, raw, "mlp_bias", False)
    _refuse(folder, raw, "attention_bias", False, "qwen2 alone has bias")
    if raw.get("use_sliding_window"):
        raise UnsupportedModelError(f"{folder}: use_sliding_window is on, expected off")
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UnsupportedModelError(
            f"{folder}: layer_types are {sorted(layer_types)}, expected full_attention alone"
        )
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    try:
        num_heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        return ModelConfig(
            family=str(family),
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or _default_head_dim(str(family), raw)),
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            context_length=int(raw["max_position_embeddings"]),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope_scaling=_rope_scaling(folder, rope),
            rope_factors=False,
            eos_token_ids=_hugging_face_eos(folder, raw),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BrokenModelError | UnsupportedModelError):
            raise
        raise BrokenModelError(f"{folder / 'config.json'}: {error!r}") from error


def _default_head_dim(family: str, raw: dict[str, Any]) -> int:
    # Qwen3's head_dim is not hidden_size / heads; its config class defaults to 128.
    return 128 if family == "qwen3" else raw["hidden_size"] // raw["num_attention_heads"]


def _refuse(
    folder: Path, raw: dict[str, Any], key: str, expected: object, why: str = "unsupported"
) -> None:
    value = raw.get(key, expected)
    if value is not None and value != expected:
        raise UnsupportedModelError(f"{folder}: {key} is {value!r}, expected {expected!r} ({why})")


def _rope_scaling(folder: Path, rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(f"{folder}: rope scaling {kind!r}, expected default or llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def _hugging_face_eos(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    ids = cast("list[Any]", eos) if isinstance(eos, list) else [eos]
    return tuple(int(token_id) for token_id in ids)


def _from_gguf(path: Path, meta: GgufMetadata) -> ModelConfig:
    family = meta.text("general.architecture")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{path} has architecture {family!r}, expected one of {FAMILIES}"
        )
    scaling = meta.values.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModelError(f"{path}: rope scaling {scaling!r} in GGUF, expected none")
    tokens = meta.strings("tokenizer.ggml.tokens")
    hidden_size = meta.integer(f"{family}.embedding_length")
    num_heads = meta.integer(f"{family}.attention.head_count")
    head_dim = int(meta.values.get(f"{family}.attention.key_length", hidden_size // num_heads))
    rope_dim = int(meta.values.get(f"{family}.rope.dimension_count", head_dim))
    if rope_dim != head_dim:
        raise UnsupportedModelError(
            f"{path}: RoPE covers {rope_dim} of {head_dim} dimensions, expected all"
        )
    if f"{family}.expert_count" in meta.values:
        raise UnsupportedModelError(f"{path} is a mixture of experts, expected a dense model")
    return ModelConfig(
        family=family,
        num_layers=meta.integer(f"{family}.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(meta.values.get(f"{family}.attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        intermediate_size=meta.integer(f"{family}.feed_forward_length"),
        vocab_size=len(tokens),
        context_length=meta.integer(f"{family}.context_length"),
        rope_theta=float(meta.values.get(f"{family}.rope.freq_base", 10000.0)),
        rms_norm_eps=meta.number(f"{family}.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in meta.tensors,
        rope_scaling=None,
        rope_factors="rope_freqs.weight" in meta.tensors,
        eos_token_ids=_gguf_eos(meta, tokens),
    )


def _gguf_eos(meta: GgufMetadata, tokens: list[str]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [meta.integer(key) for key in keys if key in meta.values]
    by_text = {token: token_id for token_id, token in enumerate(tokens)}
    ids += [by_text[token] for token in _END_TOKENS if token in by_text]
    return tuple(dict.fromkeys(ids))
