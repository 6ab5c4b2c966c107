"""Rotary position embedding, half-rotate form, with Llama 3's frequency scaling.

Owns angles and rotation; which heads are rotated is the model's business.
"""

from __future__ import annotations

import math

import torch

from server.engine.config import ModelConfig, RopeScaling


class RotaryEmbedding:
    """Angles for any position; computed in float32, returned in the model's dtype.

    factors  [head_dim / 2] float32, divisor of each frequency; None: all 1
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        factors: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequency = 1.0 / (config.rope_theta**exponent)
        if config.rope_scaling is not None:
            frequency = _scale_llama3(frequency, config.rope_scaling)
        if factors is not None:
            frequency = frequency / factors
        self._frequency = frequency.to(device)
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, head_dim] of `positions` [n]; sin's first half is negated."""
        angle = torch.outer(positions.float(), self._frequency)
        cos, sin = angle.cos(), angle.sin()
        return (
            torch.cat((cos, cos), -1).unsqueeze(1).to(self._dtype),
            torch.cat((-sin, sin), -1).unsqueeze(1).to(self._dtype),
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [n, heads, head_dim] by what `RotaryEmbedding.angles` returned."""
    # Rolling by half swaps the halves; the sign of the swapped-in second half is in sin.
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)


def _scale_llama3(frequency: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelength = 2 * math.pi / frequency
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    slowed = torch.where(wavelength > longest, frequency / scaling.factor, frequency)
    blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequency / scaling.factor + blend * frequency
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, slowed)
