"""The fake engine computes its tokens from what lies in the pages, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.errors import UnsupportedModelError
from server.engine.fake import FakeEngine, FakeModel, StepShape, expected_tokens
from server.engine.loader import EngineConfig, fake_step_time, load_engine, load_model_info
from server.fake_tokenizer import FAKE_EOS_TOKEN_ID

GREEDY = SamplingParams()
PAGES = [5, 2, 7, 0, 3]
PROMPT = list(b"The quick brown fox jumps over the dog")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(pool_path=tmp_path / "pool", owner="p0", num_pages=16)
    yield engine
    engine.close()


def prefill(
    engine: FakeEngine,
    prompt: list[int],
    pages: list[int],
    *,
    chunk: int = 10**6,
    sampling: SamplingParams = GREEDY,
) -> int:
    token: int | None = None
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        last = start + len(piece) == len(prompt)
        (token,) = engine.prefill(
            [
                PrefillChunk(
                    token_ids=piece, start=start, pages=pages, sampling=sampling if last else None
                )
            ]
        )
        assert (token is not None) == last
    assert token is not None
    return token


def generate(
    engine: FakeEngine,
    prompt: list[int],
    pages: list[int],
    count: int,
    *,
    chunk: int = 10**6,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    tokens = [prefill(engine, prompt, pages, chunk=chunk, sampling=sampling)]
    while len(tokens) < count:
        slot = DecodeSlot(
            token_id=tokens[-1],
            position=len(prompt) + len(tokens) - 1,
            pages=pages,
            sampling=sampling,
        )
        tokens += engine.decode([slot])
    return tokens


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_output_is_the_expected_one_however_the_prompt_is_cut(
    engine: FakeEngine, chunk: int
) -> None:
    assert generate(engine, PROMPT, PAGES, 20, chunk=chunk) == expected_tokens(PROMPT, 20)


@given(prompt=st.lists(st.integers(0, 259), min_size=1, max_size=40))
def test_prompts_that_differ_give_outputs_that_differ(prompt: list[int]) -> None:
    changed = [(prompt[0] + 1) % 260, *prompt[1:]]
    assert expected_tokens(prompt, 12) != expected_tokens(changed, 12)


def test_sequences_in_one_step_do_not_influence_each_other(engine: FakeEngine) -> None:
    prompts = {(0, 1, 2): [1, 2, 3], (3, 4, 5): list(b"abc" * 10), (6, 7, 8): [9] * 17}
    chunks = [
        PrefillChunk(token_ids=prompt, start=0, pages=pages, sampling=GREEDY)
        for pages, prompt in prompts.items()
    ]
    first = engine.prefill(chunks)
    slots = [
        DecodeSlot(token_id=token, position=len(prompt), pages=pages, sampling=GREEDY)
        for (pages, prompt), token in zip(prompts.items(), first, strict=True)
        if token is not None
    ]
    second = engine.decode(slots)
    assert [list(pair) for pair in zip(first, second, strict=True)] == [
        expected_tokens(prompt, 2) for prompt in prompts.values()
    ]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", [0, 15, 16, len(PROMPT) - 1])
def test_a_byte_lost_in_any_layer_changes_the_output(
    engine: FakeEngine, layer: int, position: int
) -> None:
    prefill(engine, PROMPT, PAGES)
    page, offset = PAGES[position // 16], position % 16
    at = engine.layout.layer_range(page, layer).start
    slot_bytes = engine.layout.layer_bytes // 2 // engine.layout.page_size
    at += offset * slot_bytes
    engine.pool.memory[at : at + slot_bytes] = bytes(slot_bytes)
    slot = DecodeSlot(token_id=65, position=len(PROMPT), pages=PAGES, sampling=GREEDY)
    digits = [engine.decode([slot])[0]]
    for step in range(8):
        slot = DecodeSlot(
            token_id=digits[-1], position=len(PROMPT) + 1 + step, pages=PAGES, sampling=GREEDY
        )
        digits += engine.decode([slot])
    assert digits != expected_tokens([*PROMPT, 65], 9)


def test_pages_in_the_wrong_order_change_the_output(engine: FakeEngine) -> None:
    tokens = generate(engine, PROMPT, PAGES, 1)
    swapped = [PAGES[1], PAGES[0], *PAGES[2:]]
    out = generate_from(engine, tokens[0], swapped)
    assert out != expected_tokens(PROMPT, 9)[1:]
    assert generate_from(engine, tokens[0], PAGES) == expected_tokens(PROMPT, 9)[1:]


def generate_from(engine: FakeEngine, token: int, pages: list[int]) -> list[int]:
    """Eight decode steps after `PROMPT` and `token`."""
    tokens = [token]
    for step in range(8):
        slot = DecodeSlot(
            token_id=tokens[-1], position=len(PROMPT) + step, pages=pages, sampling=GREEDY
        )
        tokens += engine.decode([slot])
    return tokens[1:]


def test_bytes_copied_to_another_pool_continue_the_sequence(
    engine: FakeEngine, tmp_path: Path
) -> None:
    token = prefill(engine, PROMPT, PAGES)
    other = FakeEngine(pool_path=tmp_path / "other", owner="d0", num_pages=8)
    there = [1, 4, 6, 2, 3]
    for source, destination in zip(PAGES, there, strict=True):
        copied = engine.pool.memory[engine.layout.page_range(source)]
        other.pool.memory[other.layout.page_range(destination)] = copied
    assert generate_from(other, token, there) == expected_tokens(PROMPT, 9)[1:]
    other.close()


def test_offloaded_pages_continue_after_restore_elsewhere(engine: FakeEngine) -> None:
    token = prefill(engine, PROMPT, PAGES)
    saved = engine.offload(PAGES)
    assert len(saved) == len(PAGES) * engine.layout.page_bytes
    engine.restore(bytes(len(saved)), PAGES)
    elsewhere = [8, 9, 10, 11, 12]
    engine.restore(saved, elsewhere)
    assert generate_from(engine, token, elsewhere) == expected_tokens(PROMPT, 9)[1:]


def test_restore_refuses_a_copy_of_another_size(engine: FakeEngine) -> None:
    saved = engine.offload([1, 2])
    with pytest.raises(ValueError, match="3 pages of"):
        engine.restore(saved, [1, 2, 3])
    with pytest.raises(ValueError, match="page 16 is not in the pool"):
        engine.restore(saved, [1, 16])


def test_a_sampled_draw_depends_on_the_seed_alone(engine: FakeEngine) -> None:
    def draw(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=0.8, seed=seed)
        return generate(engine, PROMPT, PAGES, 8, sampling=sampling)

    assert draw(1) == draw(1) == expected_tokens(PROMPT, 8, SamplingParams(temperature=0.8, seed=1))
    assert draw(1) != draw(2)


def test_a_step_takes_the_programmed_time(tmp_path: Path) -> None:
    slept: list[float] = []
    shapes: list[StepShape] = []

    def step_time(shape: StepShape) -> float:
        shapes.append(shape)
        return shape.num_tokens * 0.5

    engine = FakeEngine(
        pool_path=tmp_path / "pool",
        owner="p0",
        num_pages=8,
        step_time=step_time,
        sleep=slept.append,
    )
    generate(engine, [1, 2, 3], [0], 3)
    engine.close()
    assert slept == [1.5, 0.5, 0.5]
    assert shapes[0] == StepShape(num_tokens=3, num_seqs=1, kv_tokens=3)
    assert shapes[2] == StepShape(num_tokens=1, num_seqs=1, kv_tokens=5)


def test_end_of_sequence_is_drawn_when_asked_for(tmp_path: Path) -> None:
    model = FakeModel(eos_permille=200)
    tokens = model.expected_tokens(PROMPT, 60)
    assert FAKE_EOS_TOKEN_ID in tokens
    assert FAKE_EOS_TOKEN_ID not in expected_tokens(PROMPT, 60)
    engine = FakeEngine(pool_path=tmp_path / "pool", owner="p0", num_pages=16, model=model)
    assert generate(engine, PROMPT, [*PAGES, 1, 4], 60) == tokens
    engine.close()


def test_close_removes_the_pool_file_and_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    engine = load_engine(
        EngineConfig(model="fake", pool_path=str(path), owner="p0", num_pages=2, page_size=4)
    )
    assert path.stat().st_size == 2 * engine.layout.page_bytes
    assert str(path) in Path("/proc/self/maps").read_text()
    engine.close()
    engine.close()
    assert not path.exists()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_the_info_is_known_without_an_engine(engine: FakeEngine) -> None:
    assert load_model_info("fake") == engine.info


@pytest.mark.parametrize(
    ("model", "shape", "seconds"),
    [
        ("fake", StepShape(num_tokens=100, num_seqs=1, kv_tokens=100), 0.0),
        ("fake:step_ms=5", StepShape(num_tokens=100, num_seqs=1, kv_tokens=100), 0.005),
        ("fake:step_ms=5,token_us=20", StepShape(num_tokens=100, num_seqs=1, kv_tokens=0), 0.007),
    ],
)
def test_step_time_comes_from_the_model_name(model: str, shape: StepShape, seconds: float) -> None:
    assert fake_step_time(model)(shape) == pytest.approx(seconds)


@pytest.mark.parametrize("model", ["fake:speed=5", "fake:step_ms=x", "fake:step_ms=-1"])
def test_a_bad_fake_option_is_refused(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match="fake model option"):
        fake_step_time(model)
