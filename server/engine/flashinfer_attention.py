"""Paged attention by FlashInfer, for CUDA devices.

Unverified on hardware: it follows FlashInfer 0.6/0.7's documented interface (NHD pages, planned
wrappers) and has run on no GPU. FlashInfer is imported when an engine is built on CUDA, not
before; it has no CPU kernels. Owns FlashInfer's workspace and page-table form.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from server.engine.attention import AttentionRow
from server.kv.layout import KvLayout

_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommended split-KV workspace


class FlashInferAttention:
    """See `PagedAttention`. `kv` is [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]
    on CUDA, float16 or bfloat16. A layer's pages are a strided view of it, no copy.
    """

    def __init__(self, kv: torch.Tensor, layout: KvLayout, *, num_heads: int) -> None:
        flashinfer: Any = importlib.import_module("flashinfer")
        self.flashinfer = flashinfer
        self.kv = kv
        self.layout = layout
        self.num_heads = num_heads
        # The two wrappers are never planned for the same step, so they share one workspace.
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv.device)
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, rows: Sequence[AttentionRow]) -> FlashInferStepAttention:
        """See `PagedAttention.plan`."""
        layout, device = self.layout, self.kv.device
        lengths = [row.start + row.count for row in rows]
        num_pages = [layout.pages_for(length) for length in lengths]
        used = zip(rows, num_pages, strict=True)
        indices = [page for row, count in used for page in row.pages[:count]]

        def int32(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        table = {
            "kv_indptr": int32([0, *accumulate(num_pages)]),
            "kv_indices": int32(indices),
            "kv_last_page_len": int32([(n - 1) % layout.page_size + 1 for n in lengths]),
        }
        qo_indptr = int32([0, *accumulate(row.count for row in rows)])
        total = sum(row.count for row in rows)
        batch_indices, positions = self.flashinfer.get_batch_indices_positions(
            qo_indptr, int32(lengths), total
        )
        if all(row.count == 1 for row in rows):
            wrapper = self._decode
            wrapper.plan(
                indptr=table["kv_indptr"],
                indices=table["kv_indices"],
                last_page_len=table["kv_last_page_len"],
                num_qo_heads=self.num_heads,
                num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim,
                page_size=layout.page_size,
                q_data_type=self.kv.dtype,
                kv_data_type=self.kv.dtype,
            )
        else:
            wrapper = self._prefill
            wrapper.plan(
                qo_indptr=qo_indptr,
                paged_kv_indptr=table["kv_indptr"],
                paged_kv_indices=table["kv_indices"],
                paged_kv_last_page_len=table["kv_last_page_len"],
                num_qo_heads=self.num_heads,
                num_kv_heads=layout.num_kv_heads,
                head_dim_qk=layout.head_dim,
                page_size=layout.page_size,
                causal=True,
                q_data_type=self.kv.dtype,
                kv_data_type=self.kv.dtype,
            )
        return FlashInferStepAttention(self, wrapper, table, batch_indices, positions)


class FlashInferStepAttention:
    """See `StepAttention`."""

    def __init__(
        self,
        attention: FlashInferAttention,
        wrapper: Any,
        table: dict[str, torch.Tensor],
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._attention = attention
        self._wrapper = wrapper
        self._table = table
        self._batch_indices = batch_indices
        self._positions = positions

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `StepAttention.__call__`."""
        pages = self._attention.kv[:, layer]
        kv_cache = (pages[:, 0], pages[:, 1])
        self._attention.flashinfer.append_paged_kv_cache(
            append_key=k.contiguous(),
            append_value=v.contiguous(),
            batch_indices=self._batch_indices,
            positions=self._positions,
            paged_kv_cache=kv_cache,
            kv_indices=self._table["kv_indices"],
            kv_indptr=self._table["kv_indptr"],
            kv_last_page_len=self._table["kv_last_page_len"],
            kv_layout="NHD",
        )
        return self._wrapper.run(q.contiguous(), kv_cache).flatten(1)
