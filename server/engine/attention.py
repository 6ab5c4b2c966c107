"""The attention seam: one step's paged attention, whatever computes it.

Owns the protocol between the model and an attention back end, and the choice of back end by
device. A back end writes the step's keys and values to the pages and attends over them; it knows
nothing of weights, RoPE or sampling. The torch back end is `server.engine.torch_attention`, the
CUDA one `server.engine.flashinfer_attention`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from server.kv.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Consecutive positions of one sequence in a step.

    pages   page table, covering at least start + count positions
    start   position of the first token; earlier positions are in `pages` already
    count   positions in this step; 1 for decode
    """

    pages: Sequence[int]
    start: int
    count: int


class StepAttention(Protocol):
    """Attention of one planned step, called once per layer in layer order."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k and v to the pages, then attend causally over each row's whole sequence.

        q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim] in the layout's dtype,
        q and k rotated; n is the sum of the rows' counts, rows in the planned order. Returns
        [n, num_heads × head_dim], contiguous. Scores are scaled by 1 / sqrt(head_dim).
        """
        ...


class PagedAttention(Protocol):
    """A back end bound to one KV tensor."""

    def plan(self, rows: Sequence[AttentionRow]) -> StepAttention:
        """Prepare what all layers of a step share: indices, masks, kernel schedules."""
        ...


def make_attention(kv: torch.Tensor, layout: KvLayout, *, num_heads: int) -> PagedAttention:
    """The best back end for where `kv` lies.

    kv [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]. FlashInfer is taken on CUDA
    where it is installed and computes the dtype (it has no float32 kernels), torch otherwise.
    """
    # Imported here: either back end imports this module for the protocol.
    if (
        kv.device.type == "cuda"
        and kv.dtype in {torch.float16, torch.bfloat16}
        and importlib.util.find_spec("flashinfer") is not None
    ):
        from server.engine.flashinfer_attention import FlashInferAttention  # noqa: PLC0415

        return FlashInferAttention(kv, layout, num_heads=num_heads)
    from server.engine.torch_attention import TorchAttention  # noqa: PLC0415

    return TorchAttention(kv, layout, num_heads=num_heads)
