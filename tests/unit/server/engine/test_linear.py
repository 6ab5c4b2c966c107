"""Packed linear layers compute what plain ones do, and plain ones stand in for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from server.engine import linear
from server.engine.linear import PackedLinear, PlainLinear, make_linear, packing_works

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """Probe again in the test, and again after it."""
    packing_works.cache_clear()
    yield
    packing_works.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_packed_layers_equal_plain_ones(dtype: torch.dtype, with_bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight, bias = random(96, 48), random(96) if with_bias else None
    x, other = random(rows, 48), random(rows, 96)
    plain, packed = PlainLinear(weight, bias), PackedLinear(weight, bias)
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (0.05, 0.2)
    before = other.clone()
    torch.testing.assert_close(packed(x), plain(x), rtol=rtol, atol=atol)
    torch.testing.assert_close(packed.silu(x), plain.silu(x), rtol=rtol, atol=atol)
    torch.testing.assert_close(packed.times(x, other), plain.times(x, other), rtol=rtol, atol=atol)
    torch.testing.assert_close(packed.plus(x, other), plain.plus(x, other), rtol=rtol, atol=atol)
    assert torch.equal(other, before)


@pytest.mark.usefixtures("fresh_probe")
def test_a_torch_without_the_private_operators_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear.PackedLinear, "__init__", missing)
    weight = torch.randn(4, 3)
    layer = make_linear(weight)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(torch.eye(3)), weight.T)


@pytest.mark.usefixtures("fresh_probe")
def test_operators_with_other_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.PackedLinear, "silu", linear.PackedLinear.__call__)
    assert isinstance(make_linear(torch.randn(4, 3)), PlainLinear)
