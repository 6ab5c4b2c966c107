"""Both attention back ends compute plain causal attention over paged sequences."""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.attention import AttentionRow, PagedAttention, make_attention
from server.engine.flashinfer_attention import FlashInferAttention
from server.engine.torch_attention import TorchAttention
from server.kv.layout import KvLayout

NUM_HEADS = 6
NUM_PAGES = 40
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, page_size=4, dtype="float32")


def new_kv() -> torch.Tensor:
    return torch.zeros(LAYOUT.shape(NUM_PAGES))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Last len(q) positions of causal attention over k, v [n, num_kv_heads, head_dim]."""
    repeats = NUM_HEADS // LAYOUT.num_kv_heads
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(LAYOUT.head_dim)
    first = k.shape[0] - q.shape[0]
    hidden = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + first
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def check_steps(attention: PagedAttention, steps: list[list[int]]) -> None:
    """Run steps in which sequence i gets steps[·][i] positions; compare every output."""
    count = len(steps[0])
    shuffled = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).tolist()
    per_seq = NUM_PAGES // count
    tables = [shuffled[i * per_seq : (i + 1) * per_seq] for i in range(count)]
    history: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    lengths = [0] * count
    for number, step in enumerate(steps):
        active = [i for i in range(count) if step[i]]
        if not active:
            continue
        rows = [AttentionRow(pages=tables[i], start=lengths[i], count=step[i]) for i in active]
        planned = attention.plan(rows)
        total = sum(step)
        for layer in range(LAYOUT.num_layers):
            seed = number * 10 + layer
            q = random(total, NUM_HEADS, LAYOUT.head_dim, seed=seed)
            k = random(total, LAYOUT.num_kv_heads, LAYOUT.head_dim, seed=seed + 1000)
            v = random(total, LAYOUT.num_kv_heads, LAYOUT.head_dim, seed=seed + 2000)
            out = planned(layer, q, k, v)
            assert out.shape == (total, NUM_HEADS * LAYOUT.head_dim)
            at = 0
            for i in active:
                span = slice(at, at + step[i])
                at += step[i]
                empty = (k[:0], v[:0])
                old_k, old_v = history.get((i, layer), empty)
                keys, values = torch.cat((old_k, k[span])), torch.cat((old_v, v[span]))
                history[i, layer] = keys, values
                torch.testing.assert_close(
                    out[span], expected(q[span], keys, values), rtol=1e-4, atol=1e-5
                )
        lengths = [length + added for length, added in zip(lengths, step, strict=True)]


STEPS = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 1, 3, 9]), min_size=3, max_size=3), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=40)
@given(steps=STEPS)
def test_torch_attention_over_any_mix_of_rows(steps: list[list[int]]) -> None:
    check_steps(TorchAttention(new_kv(), LAYOUT, num_heads=NUM_HEADS), steps)


def test_torch_attention_over_very_unequal_lengths() -> None:
    """Decode rows of 1 and 50 positions fall into different groups."""
    check_steps(
        TorchAttention(new_kv(), LAYOUT, num_heads=NUM_HEADS), [[1, 50], [1, 1], [1, 1], [9, 1]]
    )


def test_a_step_writes_its_own_slots_only() -> None:
    kv = torch.full(LAYOUT.shape(NUM_PAGES), 7.0)
    planned = TorchAttention(kv, LAYOUT, num_heads=NUM_HEADS).plan(
        [AttentionRow(pages=[5, 3], start=3, count=3)]
    )
    k, v = random(3, 2, 4, seed=1), random(3, 2, 4, seed=2)
    planned(1, random(3, NUM_HEADS, 4, seed=3), k, v)
    slots = [(5, 3), (3, 0), (3, 1)]
    for row, (page, offset) in enumerate(slots):
        assert torch.equal(kv[page, 1, 0, offset], k[row])
        assert torch.equal(kv[page, 1, 1, offset], v[row])
        kv[page, 1, :, offset] = 7.0
    assert (kv == 7.0).all()


class PagedKernels:
    """FlashInfer's documented behaviour in plain torch: NHD pages, CSR page tables."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.table: dict[str, list[int]] = {}

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(q)
        for i, (start, end) in enumerate(pairs(self.table["qo_indptr"])):
            first, last = self.table["indptr"][i : i + 2]
            pages = self.table["indices"][first:last]
            length = (len(pages) - 1) * LAYOUT.page_size + self.table["last_page_len"][i]
            k, v = (side[pages].flatten(0, 1)[:length] for side in cache)
            out[start:end] = expected(q[start:end], k, v).view_as(q[start:end])
        return out


class PrefillKernels(PagedKernels):
    def plan(
        self,
        *,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        causal: bool,
        **shape: Any,
    ) -> None:
        assert causal
        check_shape(shape, "head_dim_qk")
        self.table = int_lists(
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
        )


class DecodeKernels(PagedKernels):
    def plan(
        self,
        *,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        **shape: Any,
    ) -> None:
        check_shape(shape, "head_dim")
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        self.table = int_lists(
            qo_indptr=one_each, indptr=indptr, indices=indices, last_page_len=last_page_len
        )


def check_shape(shape: dict[str, Any], head_dim: str) -> None:
    assert shape == {
        "num_qo_heads": NUM_HEADS,
        "num_kv_heads": LAYOUT.num_kv_heads,
        head_dim: LAYOUT.head_dim,
        "page_size": LAYOUT.page_size,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
    }


def int_lists(**tensors: torch.Tensor) -> dict[str, list[int]]:
    assert all(tensor.dtype == torch.int32 for tensor in tensors.values())
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def pairs(indptr: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(indptr))


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = pairs(append_indptr.tolist())
    places = [
        (i, int(seq_lens[i]) - (end - start) + offset)
        for i, (start, end) in enumerate(rows)
        for offset in range(end - start)
    ]
    assert len(places) == nnz
    batch, positions = zip(*places, strict=True)
    return torch.tensor(batch), torch.tensor(positions)


def append_paged_kv_cache(
    *,
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str,
) -> None:
    assert kv_layout == "NHD"
    assert len(kv_last_page_len) == len(kv_indptr) - 1
    for row, (i, position) in enumerate(zip(batch_indices, positions, strict=True)):
        page = kv_indices[int(kv_indptr[i]) + int(position) // LAYOUT.page_size]
        offset = int(position) % LAYOUT.page_size
        paged_kv_cache[0][page, offset] = append_key[row]
        paged_kv_cache[1][page, offset] = append_value[row]


@pytest.fixture
def documented_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=PrefillKernels,
        BatchDecodeWithPagedKVCacheWrapper=DecodeKernels,
        get_batch_indices_positions=get_batch_indices_positions,
        append_paged_kv_cache=append_paged_kv_cache,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("documented_flashinfer")
@pytest.mark.parametrize(
    "steps",
    [
        [[5, 1, 8], [1, 1, 1], [1, 1, 1]],
        [[4, 0, 3], [9, 2, 0], [1, 1, 1], [0, 1, 1]],
        [[1, 1, 1], [1, 3, 1]],
    ],
)
def test_flashinfer_is_given_tables_that_mean_the_same(steps: list[list[int]]) -> None:
    """Kernels are stood in for by their documented meaning; only a GPU can run the real ones."""
    check_steps(FlashInferAttention(new_kv(), LAYOUT, num_heads=NUM_HEADS), steps)


def test_torch_is_chosen_on_a_cpu() -> None:
    attention = make_attention(new_kv(), LAYOUT, num_heads=NUM_HEADS)
    assert isinstance(attention, TorchAttention)
