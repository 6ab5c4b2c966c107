"""From logits to a token: exact argmax, or a draw that any process repeats.

A draw is the inverse of the cumulative distribution at a number that depends on the seed and the
token's position alone; no generator state exists that a handoff or preemption could lose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from server.engine.base import SamplingParams


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position`, the same in every process."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """One token id per row of `logits` [n, vocab_size].

    positions  place of each sampled token in its sequence
    """
    token_ids: list[int] = logits.argmax(-1).tolist()
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        if param.temperature > 0:
            token_ids[row] = _draw(logits[row], param, uniform(param.seed, position))
    return token_ids


def _draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """Token of one row: temperature, then the top_k largest, then the top_p nucleus."""
    # Subtracting the maximum first keeps tiny temperatures finite.
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / params.temperature
    probs, order = torch.softmax(scaled, -1), None
    if 0 < params.top_k < probs.numel():
        probs, order = probs.topk(params.top_k)
        probs = probs / probs.sum()
    if params.top_p < 1:
        if order is None:
            probs, order = probs.sort(descending=True, stable=True)
        # The nucleus is the smallest set of most likely tokens that reaches top_p.
        before = probs.cumsum(-1) - probs
        probs = torch.where(before < params.top_p, probs, 0.0)
    cumulative = probs.cumsum(-1)
    target = torch.tensor(u, dtype=cumulative.dtype, device=cumulative.device) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding may leave the target at the very end, past the last token that can be drawn.
    index = min(index, int(probs.nonzero()[-1]))
    return index if order is None else int(order[index])
