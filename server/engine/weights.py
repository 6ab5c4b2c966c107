"""Weights of a model as the forward pass wants them, from GGUF or safetensors.

Owns names, shapes, the fusing of q, k and v into one matrix, and the prepared copy on disk:
dequantizing a GGUF file takes seconds, so the result is kept as safetensors and mapped by every
process that serves the model. Knows nothing of devices or of how a layer computes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from server.disk_cache import DiskCache
from server.engine.config import ModelConfig
from server.engine.errors import BrokenModelError, UnsupportedModelError
from server.models import ModelFormat, ModelSource, fingerprint

logger = logging.getLogger(__name__)

# Part of the prepared file's name: raise it when names, fusing or order change.
_PREPARED_FORMAT = 1
_CHECKSUMS = "checksums"

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Naming:
    """How a file format calls the tensors; `layer` is formatted with the layer's index."""

    embed: str
    norm: str
    lm_head: str
    layer: str
    attn_norm: str
    qkv: tuple[str, str, str]
    qk_norm: tuple[str, str]
    attn_out: str
    ffn_norm: str
    gate: str
    up: str
    down: str


_GGUF = _Naming(
    embed="token_embd",
    norm="output_norm",
    lm_head="output",
    layer="blk.{}.",
    attn_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    qk_norm=("attn_q_norm", "attn_k_norm"),
    attn_out="attn_output",
    ffn_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
_HUGGING_FACE = _Naming(
    embed="model.embed_tokens",
    norm="model.norm",
    lm_head="lm_head",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    qk_norm=("self_attn.q_norm", "self_attn.k_norm"),
    attn_out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)


def load_weights(
    source: ModelSource, config: ModelConfig, dtype: torch.dtype, cache: DiskCache
) -> Weights:
    """All tensors of the model on the CPU, in `dtype`, to be read only.

    Names: `embed`, `norm`, `lm_head` (absent when tied), and per layer i `i.attn_norm`, `i.qkv`
    (rows of q, k, v), `i.qkv_bias`, `i.q_norm`, `i.k_norm`, `i.attn_out`, `i.ffn_norm`, `i.gate`,
    `i.up`, `i.down`; matrices are [out, in]. `rope_factors` [head_dim / 2] is always float32, and
    absent unless the config asks for it. Raises BrokenModelError for a missing tensor or
    another shape, UnsupportedModelError for a quantization that cannot be read.
    """
    if source.format is ModelFormat.HUGGING_FACE:
        return dict(_fused(config, _HUGGING_FACE, _safetensors_reader(source), dtype))
    digest = fingerprint(source, cache)[:32]
    name = f"weights-{_PREPARED_FORMAT}-{digest}-{str(dtype).removeprefix('torch.')}.safetensors"
    prepared = _read_prepared(cache.path(name))
    if prepared is not None:
        return prepared
    with cache.lock(name):
        # Whoever held the lock before has written the file in the meantime.
        prepared = _read_prepared(cache.path(name))
        if prepared is not None:
            return prepared
        cache.discard(name)
        logger.info("preparing %s, a few seconds once", source.path)
        weights = dict(_fused(config, _GGUF, _gguf_reader(source, config), dtype))
        sums = {key: _checksum(tensor) for key, tensor in weights.items()}
        metadata = {_CHECKSUMS: json.dumps(sums)}
        path = cache.try_write(name, lambda path: save_file(weights, path, metadata))
    return weights if path is None else _read_prepared(path) or weights


def _fused(
    config: ModelConfig,
    naming: _Naming,
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def get(name: str, *shape: int) -> torch.Tensor:
        tensor = read(name)
        if tuple(tensor.shape) != shape:
            raise BrokenModelError(
                f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor.to(dtype).contiguous()

    yield "embed", get(f"{naming.embed}.weight", config.vocab_size, hidden)
    yield "norm", get(f"{naming.norm}.weight", hidden)
    if not config.tied:
        yield "lm_head", get(f"{naming.lm_head}.weight", config.vocab_size, hidden)
    if config.rope_factors:
        yield "rope_factors", read("rope_freqs.weight").float().reshape(config.head_dim // 2)
    sizes = (q_size, kv_size, kv_size)
    for index in range(config.num_layers):
        layer = naming.layer.format(index)
        yield f"{index}.attn_norm", get(f"{layer}{naming.attn_norm}.weight", hidden)
        qkv = zip(naming.qkv, sizes, strict=True)
        parts = [get(f"{layer}{name}.weight", size, hidden) for name, size in qkv]
        yield f"{index}.qkv", torch.cat(parts)
        if config.attention_bias:
            qkv = zip(naming.qkv, sizes, strict=True)
            parts = [get(f"{layer}{name}.bias", size) for name, size in qkv]
            yield f"{index}.qkv_bias", torch.cat(parts)
        if config.qk_norm:
            for key, name in zip(("q_norm", "k_norm"), naming.qk_norm, strict=True):
                yield f"{index}.{key}", get(f"{layer}{name}.weight", config.head_dim)
        yield f"{index}.attn_out", get(f"{layer}{naming.attn_out}.weight", hidden, q_size)
        yield f"{index}.ffn_norm", get(f"{layer}{naming.ffn_norm}.weight", hidden)
        yield f"{index}.gate", get(f"{layer}{naming.gate}.weight", ffn, hidden)
        yield f"{index}.up", get(f"{layer}{naming.up}.weight", ffn, hidden)
        yield f"{index}.down", get(f"{layer}{naming.down}.weight", hidden, ffn)


def _safetensors_reader(source: ModelSource) -> Callable[[str], torch.Tensor]:
    files: dict[str, Any] = {}
    for path in source.weight_files():
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise BrokenModelError(f"{path} cannot be read as safetensors: {error}") from error
        files.update(dict.fromkeys(opened.keys(), opened))

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise BrokenModelError(f"{source.path} has no tensor {name}")
        return files[name].get_tensor(name)

    return read


def _gguf_reader(source: ModelSource, config: ModelConfig) -> Callable[[str], torch.Tensor]:
    # Imported here: a start from the prepared copy does without.
    from gguf import GGUFReader, dequantize  # noqa: PLC0415

    try:
        tensors = {tensor.name: tensor for tensor in GGUFReader(source.path).tensors}
    except (ValueError, IndexError, KeyError) as error:
        raise BrokenModelError(f"{source.path} cannot be read as GGUF: {error}") from error
    heads = {
        f"{_GGUF.layer.format(index)}{name}.weight": count
        for index in range(config.num_layers)
        for name, count in zip(_GGUF.qkv, (config.num_heads, config.num_kv_heads), strict=False)
    }

    def read(name: str) -> torch.Tensor:
        if name not in tensors:
            raise BrokenModelError(f"{source.path} has no tensor {name}")
        tensor = tensors[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UnsupportedModelError(f"{source.path}: cannot dequantize {kind}") from error
        weight = torch.from_numpy(array.astype("float32"))
        # llama.cpp interleaves the rotated halves of q and k rows, for llama only.
        if config.family == "llama" and name in heads:
            pairs = weight.view(heads[name], config.head_dim // 2, 2, -1)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        return weight

    return read


def _read_prepared(path: Path) -> dict[str, torch.Tensor] | None:
    """Tensors of a prepared file, mapped; None when it is absent, truncated or altered."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            sums: dict[str, int] = json.loads(metadata.get(_CHECKSUMS, "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return None
    if weights.keys() != sums.keys():
        return None
    if any(_checksum(tensor) != sums[name] for name, tensor in weights.items()):
        logger.warning("%s is damaged, it is prepared again", path)
        return None
    return weights


def _checksum(tensor: torch.Tensor) -> int:
    """Sum of the tensor's bits as integers: at memory speed, and any single change shows."""
    kind = torch.int32 if tensor.element_size() == 4 else torch.int16
    return int(tensor.view(kind).sum(dtype=torch.int64))
