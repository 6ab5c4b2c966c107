"""A drawn token obeys temperature, top_k and top_p, and is the same in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.base import SamplingParams
from server.engine.sampling import sample, uniform

VOCAB_SIZE = 50


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, params: SamplingParams, position: int = 0) -> int:
    return sample(logits.unsqueeze(0), [params], [position])[0]


seeds = st.integers(0, 2**31)


@given(seed=seeds)
def test_temperature_zero_is_the_exact_argmax(seed: int) -> None:
    logits = logits_of(seed, rows=3)
    assert sample(logits, [SamplingParams(seed=seed)] * 3, [0, 1, 2]) == logits.argmax(-1).tolist()


def test_equal_logits_give_the_first_token_greedily() -> None:
    assert draw(torch.zeros(VOCAB_SIZE), SamplingParams()) == 0


@settings(deadline=None)
@given(seed=seeds, top_k=st.integers(1, VOCAB_SIZE + 5), temperature=st.floats(0.01, 5))
def test_top_k_draws_one_of_the_k_largest(seed: int, top_k: int, temperature: float) -> None:
    logits = logits_of(seed)[0]
    allowed = logits.topk(min(top_k, VOCAB_SIZE)).indices.tolist()
    for position in range(10):
        params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
        assert draw(logits, params, position) in allowed


@settings(deadline=None)
@given(seed=seeds, top_p=st.floats(0.01, 1), temperature=st.floats(0.05, 3))
def test_top_p_draws_from_the_smallest_sufficient_set(
    seed: int, top_p: float, temperature: float
) -> None:
    logits = logits_of(seed)[0]
    probs, order = torch.softmax(logits.double() / temperature, -1).sort(descending=True)
    before = probs.cumsum(-1) - probs
    allowed = order[before < top_p + 1e-12].tolist()
    for position in range(10):
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        assert draw(logits, params, position) in allowed


@settings(deadline=None)
@given(seed=seeds, top_k=st.integers(2, 20), top_p=st.floats(0.1, 0.9))
def test_top_p_applies_to_what_top_k_left(seed: int, top_k: int, top_p: float) -> None:
    logits = logits_of(seed)[0]
    kept, order = torch.softmax(logits.double(), -1).topk(top_k)
    kept = kept / kept.sum()
    allowed = order[(kept.cumsum(-1) - kept) < top_p + 1e-12].tolist()
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed)
    assert all(draw(logits, params, position) in allowed for position in range(10))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=6),
        SamplingParams(temperature=2.0, top_p=0.9),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -2.0, 0.2])
    probs = torch.softmax(logits.double() / params.temperature, -1)
    if params.top_k:
        probs[probs < probs.topk(params.top_k).values[-1]] = 0
    if params.top_p < 1:
        descending, order = probs.sort(descending=True)
        probs[order[(descending.cumsum(-1) - descending) >= params.top_p]] = 0
    probs = probs / probs.sum()
    count = 4000
    tokens = sample(logits.expand(count, -1), [params] * count, range(count))
    observed = torch.bincount(torch.tensor(tokens), minlength=8) / count
    # Five standard deviations of a binomial share.
    assert ((observed - probs).abs() <= 5 * (probs * (1 - probs) / count).sqrt() + 1e-12).all()


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = logits_of(3, rows=6)
    params = [SamplingParams(temperature=1.0, seed=row) for row in range(6)]
    together = sample(logits, params, range(10, 16))
    alone = [draw(logits[row], params[row], 10 + row) for row in range(6)]
    assert together == alone


def test_a_greedy_row_beside_a_sampled_one_stays_greedy() -> None:
    logits = logits_of(4, rows=2)
    params = [SamplingParams(), SamplingParams(temperature=5.0, seed=1)]
    assert sample(logits, params, [0, 0])[0] == int(logits[0].argmax())


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.5}, {}])
def test_extreme_temperatures_stay_finite(params: dict[str, float]) -> None:
    logits = logits_of(5)[0]
    cold = SamplingParams(temperature=1e-300, **params)  # pyright: ignore[reportArgumentType]
    hot = SamplingParams(temperature=1e300, **params)  # pyright: ignore[reportArgumentType]
    assert draw(logits, cold) == int(logits.argmax())
    assert 0 <= draw(logits, hot) < VOCAB_SIZE


@given(seed=st.integers(-(2**63), 2**64), position=st.integers(0, 2**31))
def test_uniform_lies_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def test_uniform_is_the_same_in_another_process() -> None:
    code = "from server.engine.sampling import uniform; print(uniform(42, 7).hex())"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == uniform(42, 7).hex()


def test_uniform_differs_by_seed_and_by_position() -> None:
    numbers = {uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) == 900
