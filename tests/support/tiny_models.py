"""Small random models on disk, as transformers and llama.cpp's converter write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
CONTEXT_LENGTH = 256
# Two layers, four heads on two KV heads; head_dim × heads is not hidden_size, as in Qwen3.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    # Weights large enough that attention is far from uniform: a wrong position shows.
    "initializer_range": 0.3,
    "eos_token_id": 3,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save_tiny_model(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Any:
    """Write a random model of `family` to `folder` and return it, in evaluation mode."""
    import transformers

    classes: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    head_dim = {"head_dim": 16} if family != "qwen2" else {}
    config = config_class(**{**_SHAPE, **head_dim, **overrides})
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith(".bias"):
                # Fresh norms are all ones and biases all zero, which would hide a mix-up.
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.eval()
    model.save_pretrained(folder)
    return model


def save_tiny_gguf(
    model: Any, path: Path, *, omit: str | None = None, extra: dict[str, Any] | None = None
) -> None:
    """Write a transformers model to a GGUF file with llama.cpp's names and row order.

    omit   name of a GGUF tensor to leave out
    extra  string metadata that replaces or adds to what is written
    """
    config = model.config
    family = str(config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", **(extra or {})}
    for key, value in metadata.items():
        writer.add_string(key, value)
    tokens = gguf_tokens(config.vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(config.eos_token_id)
    renamed = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers.": "blk.",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if family == "llama" and part in name:
                array = _llama_cpp_rows(array, count)
        gguf_name = name
        for old, new in renamed.items():
            gguf_name = gguf_name.replace(old, new)
        if gguf_name != omit:
            writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    if config.rope_parameters["rope_type"] == "llama3":
        # llama.cpp keeps the scaling as what each frequency is divided by.
        factors = _rope_factors(config.rope_parameters, head_dim)
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """llama.cpp's divisors [head_dim / 2] for Llama 3's rule of scaling."""
    context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors: list[float] = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * index / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _llama_cpp_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k: rotated halves interleaved."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(array.shape)


def gguf_tokens(vocab_size: int) -> list[str]:
    """A byte-level vocabulary: control tokens, the 256 bytes, "he", then unused ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|zero|>", "<|one|>", "<|two|>", "<|im_end|>", *alphabet, "he"]
    return tokens + [f"[unused{index}]" for index in range(vocab_size - len(tokens))]


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json, tokenizer_config.json and a config.json to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user and the assistant say hello to each other"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (folder / "config.json").is_file():
        config = {"model_type": "llama", **_SHAPE}
        (folder / "config.json").write_text(json.dumps(config))
