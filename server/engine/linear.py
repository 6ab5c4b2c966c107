"""Linear layers with fused tails, in the form that a device computes fastest.

On a CPU the weights are reordered once into oneDNN's blocked layout: functional.linear repacks
them on every call, which makes a decode step of 8 rows 1.7 times slower. The operators for that
are torch's own but private, so they are probed at start, and functional.linear is the fallback.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch.nn import functional

# Rows that the blocked layout is tuned for. A layout made for 1 row is slower from 2 rows on;
# one made for 8 is within a few percent of the best at every size.
_LAYOUT_ROWS = 8


class Linear(Protocol):
    """x [n, in] → [n, out], in the weight's dtype; the bias, if any, is part of it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(linear(x))"""
        ...

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """linear(x) × factor, factor [n, out]"""
        ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """linear(x) + residual, residual [n, out]"""
        ...


class PlainLinear:
    """See `Linear`: functional.linear and a second operator."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.linear(x, self._weight, self._bias), inplace=True)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias).mul_(factor)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias).add_(residual)


class PackedLinear:
    """See `Linear`: oneDNN with reordered weights and fused tails. CPU only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed: torch.Tensor = ops._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._bias = bias
        self._unary = ops._linear_pointwise.default
        self._binary = ops._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, self._packed, self._bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, self._packed, self._bias, "swish", [], "")

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self._binary(x, factor, self._packed, self._bias, "mul")

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._binary(x, residual, self._packed, self._bias, "add")


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer of `weight` [out, in] and `bias` [out] on the weight's device."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this torch build packs `dtype` and gives functional.linear's results."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 32), (48, 32), (48,))
    )
    other = torch.randn(3, 48, generator=generator).to(dtype)
    plain = PlainLinear(weight, bias)
    try:
        packed = PackedLinear(weight, bias)
        pairs = (
            (packed(x), plain(x)),
            (packed.silu(x), plain.silu(x)),
            (packed.times(x, other), plain.times(x, other)),
            (packed.plus(x, other), plain.plus(x, other)),
        )
    except (AttributeError, RuntimeError, TypeError):
        return False  # another torch version: the operators are private
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)
