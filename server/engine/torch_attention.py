"""Paged attention in plain torch: pages are gathered and given to SDPA.

The reference back end for every device and the fast one on a CPU. Sequences with one position are
computed together, padded to the longest of a group of similar lengths; longer runs are computed
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from server.engine.attention import AttentionRow
from server.kv.layout import KvLayout

# A decode row joins a group when padding it to the group's longest at most doubles it, or adds
# no more than this many pages: gathering little is cheaper than another kernel call.
_FREE_PADDING_PAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Single positions of several sequences, padded to one length.

    rows      positions in the step, [g]; None when the group is the whole step in order
    gather    [num_layers, 2 × g × num_pages] run indices: all k runs, then all v runs
    mask      [g, 1, 1, num_pages × page_size], 0 or -inf; None when nothing is padded
    """

    rows: torch.Tensor | None
    gather: torch.Tensor
    mask: torch.Tensor | None
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Several positions of one sequence.

    span      place in the step
    gather    as in `_Group` with g = 1; None when the run starts at position 0, because then its
              own k and v are the whole sequence
    mask      [count, start + count], 0 or -inf
    """

    span: slice
    gather: torch.Tensor | None
    mask: torch.Tensor | None
    length: int


class TorchAttention:
    """See `PagedAttention`. `kv` is [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim],
    contiguous, on any device; it is read and written in place.
    """

    def __init__(self, kv: torch.Tensor, layout: KvLayout, *, num_heads: int) -> None:
        self.layout = layout
        self.num_heads = num_heads
        # One run is one layer's k or v in one page; one slot is one position in a run. Rows of
        # contiguous 2-D views are what index_select and index_copy_ copy fastest.
        width = layout.num_kv_heads * layout.head_dim
        self.runs = kv.view(-1, layout.page_size * width)
        self.slots = kv.view(-1, width)
        layers = torch.arange(layout.num_layers, device=kv.device)
        self._layer_runs = (layers * 2).unsqueeze(1)

    def plan(self, rows: Sequence[AttentionRow]) -> TorchStepAttention:
        """See `PagedAttention.plan`."""
        layout = self.layout
        size = layout.page_size
        runs_per_page = 2 * layout.num_layers
        slots: list[int] = []
        singles: list[tuple[int, AttentionRow]] = []
        runs: list[_Run] = []
        offset = 0
        for row in rows:
            end = row.start + row.count
            slots += [
                row.pages[position // size] * runs_per_page * size + position % size
                for position in range(row.start, end)
            ]
            if row.count == 1:
                singles.append((offset, row))
            else:
                runs.append(self._plan_run(row, offset))
            offset += row.count
        device = self.runs.device
        k_slots = torch.tensor(slots, device=device) + self._layer_runs * size
        groups = [self._plan_group(group, whole=offset) for group in _group(singles, layout)]
        return TorchStepAttention(self, k_slots, k_slots + size, groups, runs)

    def _plan_run(self, row: AttentionRow, offset: int) -> _Run:
        span = slice(offset, offset + row.count)
        length = row.start + row.count
        if row.start == 0:
            return _Run(span=span, gather=None, mask=None, length=length)
        pages = row.pages[: self.layout.pages_for(length)]
        mask = torch.full(
            (row.count, length), float("-inf"), dtype=self.runs.dtype, device=self.runs.device
        ).triu_(row.start + 1)
        return _Run(span=span, gather=self._gather_index([pages]), mask=mask, length=length)

    def _plan_group(self, members: Sequence[tuple[int, AttentionRow]], whole: int) -> _Group:
        size = self.layout.page_size
        device = self.runs.device
        offsets = [offset for offset, _ in members]
        lengths = [row.start + 1 for _, row in members]
        num_pages = self.layout.pages_for(max(lengths))
        tables: list[list[int]] = []
        for (_, row), length in zip(members, lengths, strict=True):
            own = list(row.pages[: self.layout.pages_for(length)])
            # Padding repeats the row's own last page, so that whatever lies in other
            # sequences' pages (even NaN) cannot reach this one through masked positions.
            tables.append(own + own[-1:] * (num_pages - len(own)))
        mask = None
        if min(lengths) < num_pages * size:
            positions = torch.arange(num_pages * size, device=device)
            hidden = positions.unsqueeze(0) >= torch.tensor(lengths, device=device).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=self.runs.dtype, device=device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        in_order = offsets == list(range(whole))
        return _Group(
            rows=None if in_order else torch.tensor(offsets, device=device),
            gather=self._gather_index(tables),
            mask=mask,
            size=len(members),
        )

    def _gather_index(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """[num_layers, 2 × pages] run indices of `tables`, flattened: k runs, then v runs."""
        pages = torch.tensor([page for table in tables for page in table])
        k_runs = pages.to(self.runs.device) * (2 * self.layout.num_layers)
        return torch.cat((k_runs, k_runs + 1)) + self._layer_runs


class TorchStepAttention:
    """See `StepAttention`."""

    def __init__(
        self,
        attention: TorchAttention,
        k_slots: torch.Tensor,
        v_slots: torch.Tensor,
        groups: list[_Group],
        runs: list[_Run],
    ) -> None:
        self._runs_view = attention.runs
        self._slots_view = attention.slots
        self._num_kv_heads = attention.layout.num_kv_heads
        self._head_dim = attention.layout.head_dim
        self._heads_per_kv = attention.num_heads // attention.layout.num_kv_heads
        self._k_slots = k_slots  # [num_layers, n]
        self._v_slots = v_slots
        self._groups = groups
        self._runs = runs

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `StepAttention.__call__`."""
        self._slots_view.index_copy_(0, self._k_slots[layer], k.flatten(1))
        self._slots_view.index_copy_(0, self._v_slots[layer], v.flatten(1))
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._attend_group(self._groups[0], layer, q)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in self._groups:
            assert group.rows is not None
            attended = self._attend_group(group, layer, q.index_select(0, group.rows))
            out.index_copy_(0, group.rows, attended)
        for run in self._runs:
            out[run.span] = self._attend_run(run, layer, q, k, v)
        return out

    def _attend_group(self, group: _Group, layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v = self._gathered(group.gather[layer], group.size)
        # The query heads that share a KV head become rows of one query, so that k and v are
        # read once for all of them.
        grouped = q.reshape(group.size, self._num_kv_heads, self._heads_per_kv, self._head_dim)
        out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask)
        return out.reshape(group.size, -1)

    def _attend_run(
        self, run: _Run, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        queries = q[run.span].transpose(0, 1).unsqueeze(0)
        if run.gather is None:
            keys = k[run.span].transpose(0, 1).unsqueeze(0)
            values = v[run.span].transpose(0, 1).unsqueeze(0)
        else:
            keys, values = self._gathered(run.gather[layer], 1)
            keys, values = keys[:, :, : run.length], values[:, :, : run.length]
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=run.mask, is_causal=run.mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    def _gathered(self, index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of `size` sequences, each [size, num_kv_heads, positions, head_dim]."""
        both = self._runs_view.index_select(0, index)
        both = both.view(2, size, -1, self._num_kv_heads, self._head_dim).transpose(2, 3)
        return both[0], both[1]


def _group(
    singles: list[tuple[int, AttentionRow]], layout: KvLayout
) -> list[list[tuple[int, AttentionRow]]]:
    """Cut rows into groups of similar length, so that little of what is gathered is padding."""
    if not singles:
        return []

    def pages(single: tuple[int, AttentionRow]) -> int:
        return layout.pages_for(single[1].start + 1)

    groups: list[list[tuple[int, AttentionRow]]] = []
    longest = 0
    for single in sorted(singles, key=pages, reverse=True):
        needed = pages(single)
        if not groups or (needed * 2 < longest and needed + _FREE_PADDING_PAGES < longest):
            groups.append([])
            longest = needed
        groups[-1].append(single)
    # Order within a group is free; the step's order spares an index on the common single group.
    return [sorted(group, key=lambda single: single[0]) for group in groups]
