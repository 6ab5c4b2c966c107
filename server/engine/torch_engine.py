"""The engine that runs real models with torch, on a CPU or a CUDA device.

Owns the model, its view of the KV pool and the order of a step: check, plan attention, forward,
sample. On a CPU the KV lies in the shared pool itself, so a transfer reads and writes what the
model computes on. On CUDA it lies in device memory, of which the host pool is no mirror: such an
engine serves both phases in one process, and `offload` and `restore` read device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from server.disk_cache import DiskCache
from server.engine.attention import AttentionRow, PagedAttention, make_attention
from server.engine.base import DecodeSlot, ModelInfo, PrefillChunk
from server.engine.config import ModelConfig, load_config
from server.engine.errors import UnsupportedDeviceError, UnsupportedModelError
from server.engine.model import DecoderModel
from server.engine.page_copy import copy_pages_in, copy_pages_out
from server.engine.sampling import sample
from server.engine.validation import StepLimits
from server.engine.weights import load_weights
from server.kv.layout import KvLayout
from server.kv.pool import KvPool
from server.models import fingerprint, locate_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine:
    """See `Engine`. Make one with `TorchEngine.load`."""

    def __init__(self, *, model: DecoderModel, info: ModelInfo, pool: KvPool) -> None:
        layout = pool.descriptor.layout
        num_pages = pool.descriptor.num_pages
        self._model = model
        self._info = info
        self._layout = layout
        self._pool = pool
        self._limits = StepLimits(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            num_pages=num_pages,
            layout=layout,
        )
        kv = _kv_tensor(pool, model.device)
        self._kv: torch.Tensor | None = kv
        self._attention: PagedAttention | None = make_attention(
            kv, layout, num_heads=model.config.num_heads
        )

    @classmethod
    def load(
        cls,
        model: str | None,
        *,
        pool_path: Path,
        owner: str,
        num_pages: int,
        page_size: int = 16,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "cpu",
        cache: DiskCache | None = None,
    ) -> TorchEngine:
        """Load `model` (see `server.models.locate_model`) and create its pool at `pool_path`.

        `dtype` is that of weights and KV. `threads` sets torch's intra-op threads of the whole
        process. Raises ModelError: no such model, unsupported or broken files, dtype or device.
        """
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"dtype is {dtype!r}, expected one of {list(DTYPES)}")
        target = _device(device)
        set_threads(threads)
        cache = cache or DiskCache.default()
        source = locate_model(model)
        config = load_config(source, cache)
        weights = load_weights(source, config, DTYPES[dtype], cache)
        decoder = DecoderModel(config, weights, device=target)
        info = ModelInfo(
            name=source.name,
            fingerprint=fingerprint(source, cache),
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            eos_token_ids=config.eos_token_ids,
        )
        layout = kv_layout(config, page_size=page_size, dtype=dtype)
        pool = KvPool.create(pool_path, owner=owner, layout=layout, num_pages=num_pages)
        return cls(model=decoder, info=info, pool=pool)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def pool(self) -> KvPool:
        return self._pool

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        """See `Engine.prefill`."""
        if not chunks:
            return []
        self._limits.check_prefill(chunks)
        rows = [
            AttentionRow(pages=chunk.pages, start=chunk.start, count=len(chunk.token_ids))
            for chunk in chunks
        ]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        ends: list[int] = []
        offset = 0
        for row in rows:
            offset += row.count
            ends.append(offset - 1)
        sampled = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        logits = self._forward(token_ids, rows, [ends[index] for index in sampled])
        params = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
        places = [rows[index].start + rows[index].count for index in sampled]
        drawn = sample(logits, params, places) if sampled else []
        result: list[int | None] = [None] * len(chunks)
        for index, token_id in zip(sampled, drawn, strict=True):
            result[index] = token_id
        return result

    def decode(self, slots: Sequence[DecodeSlot]) -> list[int]:
        """See `Engine.decode`."""
        if not slots:
            return []
        self._limits.check_decode(slots)
        rows = [AttentionRow(pages=slot.pages, start=slot.position, count=1) for slot in slots]
        logits = self._forward([slot.token_id for slot in slots], rows, range(len(slots)))
        return sample(
            logits, [slot.sampling for slot in slots], [slot.position + 1 for slot in slots]
        )

    def offload(self, pages: Sequence[int]) -> bytes:
        """See `Engine.offload`."""
        self._limits.check_pages_exist(pages)
        if self._kv is None or self._kv.device.type == "cpu":
            return copy_pages_out(self._pool, pages)
        copied = self._kv[torch.tensor(pages, device=self._kv.device)].cpu()
        return copied.view(torch.uint8).numpy().tobytes()

    def restore(self, saved: bytes, pages: Sequence[int]) -> None:
        """See `Engine.restore`."""
        self._limits.check_pages_exist(pages)
        if self._kv is None or self._kv.device.type == "cpu":
            copy_pages_in(self._pool, saved, pages)
            return
        if len(saved) != len(pages) * self._layout.page_bytes:
            raise ValueError(f"saved copy has {len(saved)} bytes, not {len(pages)} pages")
        copy = torch.frombuffer(bytearray(saved), dtype=self._kv.dtype)
        copy = copy.view(self._layout.shape(len(pages))).to(self._kv.device)
        self._kv[torch.tensor(pages, device=self._kv.device)] = copy

    def close(self) -> None:
        """Unmap the pool and remove its file. Idempotent; no step may follow."""
        # The tensors must go first: they keep the mapping alive.
        self._kv = None
        self._attention = None
        self._pool.close()
        self._pool.unlink()

    def _forward(
        self, token_ids: Sequence[int], rows: Sequence[AttentionRow], last: Sequence[int]
    ) -> torch.Tensor:
        if self._attention is None:
            raise RuntimeError("the engine is closed")
        device = self._model.device
        positions = [p for row in rows for p in range(row.start, row.start + row.count)]
        with torch.inference_mode():
            step = self._attention.plan(rows)
        return self._model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            step,
            torch.tensor(last, dtype=torch.int64, device=device),
        )


def kv_layout(config: ModelConfig, *, page_size: int, dtype: str) -> KvLayout:
    """Layout of the KV pages of a model."""
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
    )


def set_threads(threads: int) -> None:
    """Give torch `threads` threads per operator and no pool between operators."""
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    torch.set_num_threads(threads)
    # torch allows this once and before any parallel work; a later engine finds it set.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)


def _device(name: str) -> torch.device:
    if name not in {"cpu", "cuda"}:
        raise UnsupportedDeviceError(f"device is {name!r}, expected cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedDeviceError("device is cuda, but torch finds no CUDA device")
    return torch.device(name)


def _kv_tensor(pool: KvPool, device: torch.device) -> torch.Tensor:
    """The pool as [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]."""
    layout = pool.descriptor.layout
    shape = layout.shape(pool.descriptor.num_pages)
    dtype = DTYPES[layout.dtype]
    if device.type == "cpu":
        return torch.frombuffer(pool.memory, dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
