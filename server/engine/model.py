"""The forward pass of a Llama-like decoder over paged KV.

Owns the order of operations; linear algebra is `server.engine.linear`, attention the given step's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from server.engine.attention import StepAttention
from server.engine.config import ModelConfig
from server.engine.linear import Linear, make_linear
from server.engine.rope import RotaryEmbedding, rotate
from server.engine.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attn_out: Linear
    ffn_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


class DecoderModel:
    """Llama, Qwen2 and Qwen3: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    weights  what `server.engine.weights.load_weights` returned; copied to `device`
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, device: torch.device) -> None:
        self.config = config
        self.device = device

        def tensor(name: str) -> torch.Tensor:
            return weights[name].to(device)

        def linear(name: str, bias: str | None = None) -> Linear:
            return make_linear(tensor(name), None if bias is None else tensor(bias))

        self._embed = tensor("embed")
        self.dtype = self._embed.dtype
        self._norm = tensor("norm")
        self._lm_head = linear("embed" if config.tied else "lm_head")
        self._layers = [
            _Layer(
                attn_norm=tensor(f"{i}.attn_norm"),
                qkv=linear(f"{i}.qkv", f"{i}.qkv_bias" if config.attention_bias else None),
                q_norm=tensor(f"{i}.q_norm") if config.qk_norm else None,
                k_norm=tensor(f"{i}.k_norm") if config.qk_norm else None,
                attn_out=linear(f"{i}.attn_out"),
                ffn_norm=tensor(f"{i}.ffn_norm"),
                gate=linear(f"{i}.gate"),
                up=linear(f"{i}.up"),
                down=linear(f"{i}.down"),
            )
            for i in range(config.num_layers)
        ]
        factors = weights["rope_factors"] if config.rope_factors else None
        self._rope = RotaryEmbedding(config, factors=factors, dtype=self.dtype, device=device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """Write the step's KV and return logits of the rows `last`, [len(last), vocab_size].

        token_ids, positions  [n] int64, rows of the planned step one after another
        last                  [m] int64, indices into them; may be empty
        """
        x = functional.embedding(token_ids, self._embed)
        cos, sin = self._rope.angles(positions)
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            attended = attention(index, q, k, v)
            if index == final:
                # Beyond the last KV write only rows that are sampled from matter.
                x, attended = x.index_select(0, last), attended.index_select(0, last)
                if not last.numel():
                    return x.new_empty(0, self.config.vocab_size)
            x = layer.attn_out.plus(attended, x)
            h = self._rms_norm(x, layer.ffn_norm)
            x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
        return self._lm_head(self._rms_norm(x, self._norm))

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v heads of the layer's normalized input; q and k rotated."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(self._rms_norm(x, layer.attn_norm))
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, self.config.head_dim)
        qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._rms_norm(qk[:, :num_heads], layer.q_norm)
            k = self._rms_norm(qk[:, num_heads:], layer.k_norm)
            return rotate(q, cos, sin), rotate(k, cos, sin), v
        qk = rotate(qk, cos, sin)
        return qk[:, :num_heads], qk[:, num_heads:], v

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
