"""Lifecycle and KV handling of the torch engine, on a tiny random model."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from server.disk_cache import DiskCache
from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.errors import UnsupportedDeviceError, UnsupportedModelError
from server.engine.loader import EngineConfig, load_engine, load_model_info
from server.engine.torch_engine import TorchEngine, set_threads
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

GREEDY = SamplingParams()
PROMPT = random.Random(0).choices(range(VOCAB_SIZE), k=37)
PAGES = [4, 9, 1, 7, 2, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_tiny_model("llama", folder)
    return folder


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[TorchEngine]:
    engine = make_engine(folder, tmp_path / "pool")
    yield engine
    engine.close()


def make_engine(folder: Path, pool_path: Path, **options: Any) -> TorchEngine:
    return TorchEngine.load(
        str(folder),
        pool_path=pool_path,
        owner="p0",
        num_pages=16,
        page_size=8,
        cache=DiskCache(folder / "cache"),
        **options,
    )


def prefill(engine: TorchEngine, pages: list[int], sampling: SamplingParams = GREEDY) -> int:
    chunk = PrefillChunk(token_ids=PROMPT, start=0, pages=pages, sampling=sampling)
    (token,) = engine.prefill([chunk])
    assert token is not None
    return token


def decode(
    engine: TorchEngine,
    token: int,
    pages: list[int],
    count: int = 6,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    tokens = [token]
    for step in range(count):
        slot = DecodeSlot(
            token_id=tokens[-1], position=len(PROMPT) + step, pages=pages, sampling=sampling
        )
        tokens += engine.decode([slot])
    return tokens[1:]


def test_kv_written_by_one_engine_is_continued_by_another(
    engine: TorchEngine, folder: Path, tmp_path: Path
) -> None:
    token = prefill(engine, PAGES)
    other = make_engine(folder, tmp_path / "other")
    there = [0, 2, 4, 6, 8, 10]
    for source, destination in zip(PAGES, there, strict=True):
        copied = engine.pool.memory[engine.layout.page_range(source)]
        other.pool.memory[other.layout.page_range(destination)] = copied
    assert decode(other, token, there) == decode(engine, token, PAGES)
    other.close()


def test_offloaded_pages_continue_after_restore_elsewhere(engine: TorchEngine) -> None:
    token = prefill(engine, PAGES)
    saved = engine.offload(PAGES)
    expected = decode(engine, token, PAGES)
    engine.restore(bytes(len(saved)), PAGES)
    elsewhere = [3, 5, 6, 10, 11, 12]
    engine.restore(saved, elsewhere)
    assert decode(engine, token, elsewhere) == expected


def test_sampled_output_is_the_same_in_every_engine_and_batch(
    engine: TorchEngine, folder: Path, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=7)
    token = prefill(engine, PAGES, sampling)
    alone = decode(engine, token, PAGES, sampling=sampling)
    other = make_engine(folder, tmp_path / "other")
    assert prefill(other, PAGES, sampling) == token
    neighbour_pages = [0, 3, 5, 6, 10, 11]
    neighbour = prefill(other, neighbour_pages)
    together: list[int] = [token]
    for step in range(6):
        slots = [
            DecodeSlot(
                token_id=neighbour,
                position=len(PROMPT) + step,
                pages=neighbour_pages,
                sampling=GREEDY,
            ),
            DecodeSlot(
                token_id=together[-1],
                position=len(PROMPT) + step,
                pages=PAGES,
                sampling=sampling,
            ),
        ]
        neighbour, sampled = other.decode(slots)
        together.append(sampled)
    other.close()
    assert together[1:] == alone


def test_other_pages_are_not_touched(engine: TorchEngine) -> None:
    untouched = [page for page in range(16) if page not in PAGES]
    marker = random.Random(3).randbytes(len(untouched) * engine.layout.page_bytes)
    engine.restore(marker, untouched)
    decode(engine, prefill(engine, PAGES), PAGES)
    assert engine.offload(untouched) == marker


def test_foreign_garbage_does_not_reach_a_batch_of_unequal_lengths(engine: TorchEngine) -> None:
    """Padding is masked, but NaN would pass a mask: a row may only read its own pages."""
    token = prefill(engine, PAGES)
    short = DecodeSlot(token_id=6, position=1, pages=[3], sampling=GREEDY)
    long = DecodeSlot(token_id=token, position=len(PROMPT), pages=PAGES, sampling=GREEDY)
    engine.prefill([PrefillChunk(token_ids=[5], start=0, pages=[3], sampling=None)])
    expected = engine.decode([short]) + engine.decode([long])
    others = [page for page in range(16) if page not in {3, *PAGES}]
    nan = torch.full((len(others) * engine.layout.page_bytes // 4,), float("nan"))
    engine.restore(nan.numpy().tobytes(), others)
    assert engine.decode([short, long]) == expected


def test_empty_steps_are_allowed(engine: TorchEngine) -> None:
    assert engine.prefill([]) == []
    assert engine.decode([]) == []


def test_bad_calls_raise_and_leave_the_engine_usable(engine: TorchEngine) -> None:
    expected = prefill(engine, PAGES)
    with pytest.raises(ValueError, match="positions up to 37 need 5"):
        engine.prefill([PrefillChunk(token_ids=PROMPT, start=0, pages=[1], sampling=None)])
    with pytest.raises(ValueError, match="token id 320"):
        engine.decode([DecodeSlot(token_id=320, position=0, pages=[1], sampling=GREEDY)])
    with pytest.raises(ValueError, match="page 16"):
        engine.offload([16])
    with pytest.raises(ValueError, match="saved copy has 3 bytes"):
        engine.restore(b"abc", [1])
    assert prefill(engine, PAGES) == expected


def test_bfloat16_halves_the_pages_and_stays_near_float32(
    engine: TorchEngine, folder: Path, tmp_path: Path
) -> None:
    half = make_engine(folder, tmp_path / "half", dtype="bfloat16")
    assert half.layout.page_bytes * 2 == engine.layout.page_bytes
    prefill(engine, PAGES)
    prefill(half, PAGES)
    full_kv = torch.frombuffer(bytearray(engine.offload(PAGES)), dtype=torch.float32)
    half_kv = torch.frombuffer(bytearray(half.offload(PAGES)), dtype=torch.bfloat16).float()
    assert (half_kv - full_kv).norm() / full_kv.norm() < 0.05
    half.close()


def test_close_unmaps_and_removes_the_pool(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    engine = make_engine(folder, path)
    decode(engine, prefill(engine, PAGES), PAGES)
    assert str(path) in Path("/proc/self/maps").read_text()
    engine.close()
    engine.close()
    assert not path.exists()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_info_is_the_same_without_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = load_engine(
        EngineConfig(model=str(folder), pool_path=str(tmp_path / "pool"), owner="d0", num_pages=2)
    )
    assert engine.info == load_model_info(str(folder))
    assert engine.info.name == folder.name
    assert engine.pool.descriptor.owner == "d0"
    engine.close()


def test_unknown_dtype_and_device_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="dtype is 'int8'"):
        make_engine(folder, tmp_path / "pool", dtype="int8")
    with pytest.raises(UnsupportedDeviceError, match="expected cpu or cuda"):
        make_engine(folder, tmp_path / "pool", device="tpu")
    assert not (tmp_path / "pool").exists()


def test_cuda_without_a_device_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="finds no CUDA device"):
        make_engine(folder, tmp_path / "pool", device="cuda")


def test_threads_are_set_explicitly(folder: Path, tmp_path: Path) -> None:
    set_threads(2)
    engine = make_engine(folder, tmp_path / "pool", threads=1)
    engine.close()
    assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="threads is 0"):
        set_threads(0)
