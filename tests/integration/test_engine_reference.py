"""The engine's greedy output is that of transformers on the same weights, token for token.

Float32, the default model, 24 prompts of 24 tokens: short, of several chunks, sharing a prefix,
alone and in batches. A control token does not end a sequence here, so all are compared in full.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.torch_engine import TorchEngine
from server.tokenizer import load_tokenizer
from tests.support.reference_model import greedy_continuation, load_reference

# One module-wide reference and engine: loading both takes longer than any single test.
pytestmark = pytest.mark.timeout(400)

GREEDY = SamplingParams()
COUNT = 24
PAGE_SIZE = 16
NUM_PAGES = 240

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "12 x 9 =",
    "Translate to German: good morning",
    "Why is the sky blue?",
    "List three fruits.",
    "你好，你是谁？",
    "Name a prime number above 100.",
    "Who wrote Hamlet?",
    "def fibonacci(n):",
    "Say hello 🙂",
    "Is water wet?",
]
STORY = (
    "The lighthouse keeper climbed the stairs every evening at the same hour. He carried a lamp, "
    "a loaf of bread and a notebook in which he wrote down the names of the ships that passed. "
)
ENDINGS = [
    "One night no ship came.",
    "In winter the sea froze, and",
    "His daughter asked him why",
    "The notebook of 1887 says:",
]


def prompts_of(kind: str) -> list[list[int]]:
    tokenizer = load_tokenizer(None)
    if kind == "short":
        return [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    if kind == "one token":
        return [tokenizer.encode("Once"), tokenizer.encode("The")]
    if kind == "several chunks":
        return [tokenizer.encode(STORY * times + ENDINGS[0]) for times in (3, 4)]
    if kind == "random":
        draw = random.Random(0)
        return [draw.choices(range(49152), k=length) for length in (16, 33, 64, 127)]
    return [tokenizer.encode(STORY + ending) for ending in ENDINGS]


KINDS = ["short", "one token", "several chunks", "random", "shared prefix"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt for kind in KINDS for prompt in prompts_of(kind)]


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.set_num_threads(1)
    return load_reference()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    engine = TorchEngine.load(
        None,
        pool_path=tmp_path_factory.mktemp("pool") / "pool",
        owner="test",
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )
    yield engine
    engine.close()


def scattered_tables(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Disjoint page tables in no order, each for a prompt and its output."""
    free = list(range(NUM_PAGES))
    random.Random(1).shuffle(free)
    return [
        [free.pop() for _ in range(-(-(len(prompt) + COUNT) // PAGE_SIZE))] for prompt in prompts
    ]


def prefill_whole(
    engine: TorchEngine, prompts: Sequence[list[int]], tables: Sequence[list[int]]
) -> list[int]:
    """First tokens, each prompt in one chunk and one step."""
    first: list[int] = []
    for prompt, pages in zip(prompts, tables, strict=True):
        chunk = PrefillChunk(token_ids=prompt, start=0, pages=pages, sampling=GREEDY)
        first += [token for token in engine.prefill([chunk]) if token is not None]
    return first


def prefill_chunked(
    engine: TorchEngine,
    prompts: Sequence[list[int]],
    tables: Sequence[list[int]],
    *,
    starts: Sequence[int] | None = None,
    budget: int = 96,
    longest: int = 40,
) -> list[int]:
    """First tokens; every step fills a token budget with pieces of several prompts."""
    done = list(starts or [0] * len(prompts))
    first: dict[int, int] = {}
    while len(first) < len(prompts):
        left = budget
        chunks: list[PrefillChunk] = []
        members: list[int] = []
        for i, prompt in enumerate(prompts):
            size = min(left, longest, len(prompt) - done[i])
            if not size:
                continue
            piece = prompt[done[i] : done[i] + size]
            last = done[i] + size == len(prompt)
            chunks.append(
                PrefillChunk(
                    token_ids=piece,
                    start=done[i],
                    pages=tables[i],
                    sampling=GREEDY if last else None,
                )
            )
            members.append(i)
            done[i] += size
            left -= size
        sampled = zip(members, engine.prefill(chunks), strict=True)
        first.update({i: token for i, token in sampled if token is not None})
    return [first[i] for i in range(len(prompts))]


def decode_batch(
    engine: TorchEngine,
    prompts: Sequence[list[int]],
    tables: Sequence[list[int]],
    first: Sequence[int],
) -> list[list[int]]:
    """Outputs of COUNT tokens, all sequences decoded together."""
    outputs = [[token] for token in first]
    for step in range(COUNT - 1):
        slots = [
            DecodeSlot(
                token_id=output[-1], position=len(prompt) + step, pages=pages, sampling=GREEDY
            )
            for prompt, pages, output in zip(prompts, tables, outputs, strict=True)
        ]
        for output, token in zip(outputs, engine.decode(slots), strict=True):
            output.append(token)
    return outputs


@pytest.fixture(scope="module")
def outputs(engine: TorchEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Whole-prompt prefill, then batches of 8."""
    tables = scattered_tables(prompts)
    first = prefill_whole(engine, prompts, tables)
    out: list[list[int]] = []
    for start in range(0, len(prompts), 8):
        span = slice(start, start + 8)
        out += decode_batch(engine, prompts[span], tables[span], first[span])
    return out


def test_batches_of_eight_equal_transformers(
    reference: Any, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    assert len(prompts) == 24
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == greedy_continuation(reference, prompt, output)


def test_generate_of_transformers_gives_the_same(
    reference: Any, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    for prompt, output in zip(prompts[:2], outputs[:2], strict=True):
        token_ids = torch.tensor([prompt])
        generated = reference.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=COUNT,
        )[0, len(prompt) :].tolist()
        assert len(generated) >= 5
        assert output[: len(generated)] == generated


def test_chunks_of_several_prompts_change_nothing(
    engine: TorchEngine, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """All 24 prompts chunked together, then decoded as one batch of ragged lengths."""
    tables = scattered_tables(prompts)
    first = prefill_chunked(engine, prompts, tables)
    assert decode_batch(engine, prompts, tables, first) == outputs


def test_a_sequence_alone_gives_the_same(
    engine: TorchEngine, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    for index in (0, 13, 15):
        prompt, tables = prompts[index], scattered_tables(prompts)[index : index + 1]
        first = prefill_chunked(engine, [prompt], tables, longest=17)
        assert decode_batch(engine, [prompt], tables, first) == [outputs[index]]


def test_sequences_on_shared_prefix_pages_give_the_same(
    engine: TorchEngine, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """The prefix is computed once; each sequence continues on the same pages and its own."""
    family, expected = prompts[-4:], outputs[-4:]
    common = min(
        next(i for i, (a, b) in enumerate(zip(family[0], other, strict=False)) if a != b)
        for other in family[1:]
    )
    shared = common // PAGE_SIZE
    assert shared >= 2
    tables = scattered_tables(family)
    prefix = PrefillChunk(
        token_ids=family[0][: shared * PAGE_SIZE], start=0, pages=tables[0], sampling=None
    )
    engine.prefill([prefix])
    tables = [tables[0][:shared] + table[shared:] for table in tables]
    before = engine.offload(tables[0][:shared])
    starts = [shared * PAGE_SIZE] * len(family)
    first = prefill_chunked(engine, family, tables, starts=starts)
    assert decode_batch(engine, family, tables, first) == expected
    assert engine.offload(tables[0][:shared]) == before
