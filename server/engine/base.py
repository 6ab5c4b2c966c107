"""The engine seam: what a scheduler may ask of a model. No torch here.

An engine owns weights and a KV pool (`server.kv.pool.KvPool`, laid out by `server.kv.layout`) and
turns token ids into token ids. It knows nothing of requests, queues, pages' owners or wires: the
scheduler decides which pages a sequence uses and passes them on every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from server.kv.layout import KvLayout
from server.kv.pool import KvPool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0 is off; `top_p` 1 is off.

    A draw depends on (`seed`, position) alone, so it is the same in whichever process it happens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the server must know of a loaded model.

    name          served model name
    fingerprint   hex digest over weights, config and tokenizer; equal on both legs or no handoff
    """

    name: str
    fingerprint: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A run of prompt positions of one sequence, to be computed and written to its pages.

    token_ids   tokens at positions start … start + len(token_ids) - 1; never empty
    start       position of the first token; positions before it are already in `pages`
    pages       page table of the sequence, covering at least start + len(token_ids) positions
    sampling    set on the chunk that ends the prompt: sample the next token; None: do not
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSlot:
    """One sequence in a decode step.

    token_id   last committed token; this step writes its KV at `position` and samples the next
    position   its position: number of tokens before it
    pages      page table, covering at least position + 1 positions
    """

    token_id: int
    position: int
    pages: Sequence[int]
    sampling: SamplingParams


class Engine(Protocol):
    """A model with its KV pool. Calls are synchronous and come from one thread.

    `prefill` computes the chunks (of distinct sequences) in one step and returns, per chunk, the
    sampled token id, or None where `sampling` is None. `decode` returns one token id per slot.
    `offload` copies pages to host memory and `restore` writes such a copy into other pages; both
    serve preemption. Raises ValueError when pages do not cover the positions, or a token id is out
    of the vocabulary: those are scheduler bugs.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def pool(self) -> KvPool: ...

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]: ...

    def decode(self, slots: Sequence[DecodeSlot]) -> list[int]: ...

    def offload(self, pages: Sequence[int]) -> bytes: ...

    def restore(self, saved: bytes, pages: Sequence[int]) -> None: ...

    def close(self) -> None: ...
