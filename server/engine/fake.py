"""An engine without a model: its tokens are a hash of what lies in the KV pages.

For tests and demos of the control plane. Each position's token id is written to its slot in every
layer's k and v, and the next token is computed from all ids read back out of the pages. So a KV
page that was not transferred, transferred to the wrong place or overwritten changes the output,
while `FakeModel.expected_tokens` tells what the output should have been. Needs no torch.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.engine.base import DecodeSlot, ModelInfo, PrefillChunk, SamplingParams
from server.engine.page_copy import copy_pages_in, copy_pages_out
from server.engine.validation import StepLimits
from server.fake_tokenizer import FAKE_EOS_TOKEN_ID, FAKE_VOCAB_SIZE
from server.kv.layout import KvLayout
from server.kv.pool import KvPool

_WORD_BYTES = 4
_FIRST_PRINTABLE, _NUM_PRINTABLE = 32, 95  # generated text is printable ASCII
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Size of one step, from which its simulated duration follows.

    num_tokens    positions computed in the step
    num_seqs      sequences in the step
    kv_tokens     positions attended to, over all sequences
    """

    num_tokens: int
    num_seqs: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """The function that stands in for a model, and the shape of its KV.

    eos_permille  how many of 1000 draws end the sequence
    """

    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 4
    context_length: int = 8192
    eos_permille: int = 0

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="fake",
            fingerprint=hashlib.sha256(repr(self).encode()).hexdigest(),
            vocab_size=FAKE_VOCAB_SIZE,
            context_length=self.context_length,
            eos_token_ids=(FAKE_EOS_TOKEN_ID,),
        )

    def layout(self, page_size: int) -> KvLayout:
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype="float32",
        )

    def plane_word(self, token_id: int, plane: int) -> int:
        """What position holds for `token_id` in `plane`: layer × 2 + (0 for k, 1 for v).

        Planes hold different words, so that one copied over another is noticed.
        """
        return 1 + token_id + plane * FAKE_VOCAB_SIZE

    def next_token(self, planes: Sequence[bytes], sampling: SamplingParams) -> int:
        """Token after the positions whose words `planes` hold (int32, one bytes per plane)."""
        digest = hashlib.blake2b(digest_size=16)
        for words in planes:
            digest.update(words)
        if sampling.temperature > 0:
            position = len(planes[0]) // _WORD_BYTES
            digest.update(f"sampled {sampling.seed} {position}".encode())
        draw = digest.digest()
        if int.from_bytes(draw[:8]) % 1000 < self.eos_permille:
            return FAKE_EOS_TOKEN_ID
        return _FIRST_PRINTABLE + int.from_bytes(draw[8:]) % _NUM_PRINTABLE

    def expected_tokens(
        self, prompt: Sequence[int], count: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """The first `count` tokens after `prompt`, computed without pages or an engine."""
        token_ids = list(prompt)
        for _ in range(count):
            planes = [
                array("i", [self.plane_word(t, plane) for t in token_ids]).tobytes()
                for plane in range(2 * self.num_layers)
            ]
            token_ids.append(self.next_token(planes, sampling))
        return token_ids[len(prompt) :]


def expected_tokens(
    prompt: Sequence[int], count: int, sampling: SamplingParams = GREEDY
) -> list[int]:
    """What an intact server with the default `FakeModel` generates after `prompt`."""
    return FakeModel().expected_tokens(prompt, count, sampling)


def no_step_time(_: StepShape) -> float:
    return 0.0


class FakeEngine:
    """Engine over a `FakeModel`.

    A step takes `step_time(shape)` seconds, spent in `sleep`; pass a fake clock's sleep to run
    without waiting. The pool file is removed by `close`.
    """

    def __init__(
        self,
        *,
        pool_path: Path,
        owner: str,
        num_pages: int,
        page_size: int = 16,
        model: FakeModel | None = None,
        step_time: Callable[[StepShape], float] = no_step_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model or FakeModel()
        self._info = self._model.info
        self._layout = self._model.layout(page_size)
        self._step_time = step_time
        self._sleep = sleep
        self._limits = StepLimits(
            vocab_size=self._info.vocab_size,
            context_length=self._info.context_length,
            num_pages=num_pages,
            layout=self._layout,
        )
        self._pool = KvPool.create(pool_path, owner=owner, layout=self._layout, num_pages=num_pages)
        self._words = self._pool.memory.cast("B").cast("i")

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
        self._limits.check_prefill(chunks)
        self._spend([(chunk.start, len(chunk.token_ids)) for chunk in chunks])
        sampled: list[int | None] = []
        for chunk in chunks:
            self._write(chunk.pages, chunk.start, chunk.token_ids)
            end = chunk.start + len(chunk.token_ids)
            sampled.append(
                None if chunk.sampling is None else self._next(chunk.pages, end, chunk.sampling)
            )
        return sampled

    def decode(self, slots: Sequence[DecodeSlot]) -> list[int]:
        """See `Engine.decode`."""
        self._limits.check_decode(slots)
        self._spend([(slot.position, 1) for slot in slots])
        sampled: list[int] = []
        for slot in slots:
            self._write(slot.pages, slot.position, (slot.token_id,))
            sampled.append(self._next(slot.pages, slot.position + 1, slot.sampling))
        return sampled

    def offload(self, pages: Sequence[int]) -> bytes:
        """See `Engine.offload`."""
        self._limits.check_pages_exist(pages)
        return copy_pages_out(self._pool, pages)

    def restore(self, saved: bytes, pages: Sequence[int]) -> None:
        """See `Engine.restore`."""
        self._limits.check_pages_exist(pages)
        copy_pages_in(self._pool, saved, pages)

    def close(self) -> None:
        """Unmap the pool and remove its file. Idempotent."""
        self._words.release()  # the view must go first: it keeps the mapping alive
        self._pool.close()
        self._pool.unlink()

    def _spend(self, rows: Sequence[tuple[int, int]]) -> None:
        shape = StepShape(
            num_tokens=sum(count for _, count in rows),
            num_seqs=len(rows),
            kv_tokens=sum(start + count for start, count in rows),
        )
        seconds = self._step_time(shape)
        if seconds > 0:
            self._sleep(seconds)

    def _write(self, pages: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for plane in range(2 * self._layout.num_layers):
            done = 0
            for run in self._runs(pages, plane, start, start + len(token_ids)):
                count = (run.stop - run.start) // self._slot_words
                words = [
                    self._model.plane_word(token_id, plane)
                    for token_id in token_ids[done : done + count]
                    for _ in range(self._slot_words)
                ]
                self._words[run] = memoryview(array("i", words))
                done += count

    def _next(self, pages: Sequence[int], end: int, sampling: SamplingParams) -> int:
        # Every word of a slot is the same when intact; one of them, chosen by plane, is read.
        step = self._slot_words
        planes = [
            b"".join(
                self._words[run.start + plane % step : run.stop : step].tobytes()
                for run in self._runs(pages, plane, 0, end)
            )
            for plane in range(2 * self._layout.num_layers)
        ]
        return self._model.next_token(planes, sampling)

    @property
    def _slot_words(self) -> int:
        """int32 words that one position has in one plane."""
        return self._layout.num_kv_heads * self._layout.head_dim

    def _runs(self, pages: Sequence[int], plane: int, start: int, end: int) -> Iterator[slice]:
        """Word ranges of positions start … end - 1 in `plane`, one per page."""
        size = self._layout.page_size
        plane_words = size * self._slot_words
        for index in range(start // size, self._layout.pages_for(end)):
            base = pages[index] * self._layout.page_bytes // _WORD_BYTES + plane * plane_words
            first = max(start - index * size, 0)
            last = min(end - index * size, size)
            yield slice(base + first * self._slot_words, base + last * self._slot_words)
