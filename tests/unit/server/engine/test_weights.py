"""Prepared weights are written once, checked and rebuilt; broken files say what is wrong."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.disk_cache import DiskCache
from server.engine import weights as weights_module
from server.engine.config import load_config
from server.engine.errors import BrokenModelError
from server.engine.weights import Weights, load_weights
from server.models import locate_model
from tests.support.tiny_models import save_tiny_gguf, save_tiny_model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return save_tiny_model("llama", folder), folder


@pytest.fixture
def gguf_path(reference: tuple[Any, Path], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(reference[0], path)
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that a GGUF file's tensors are read."""
    entries: list[str] = []
    real = weights_module._gguf_reader  # pyright: ignore[reportPrivateUsage]

    def counting(source: Any, config: Any) -> Any:
        entries.append(str(source.path))
        return real(source, config)

    monkeypatch.setattr(weights_module, "_gguf_reader", counting)
    return entries


def load(path: Path, cache: DiskCache, dtype: torch.dtype = torch.float32) -> Weights:
    source = locate_model(str(path))
    return load_weights(source, load_config(source, cache), dtype, cache)


def prepared_file(cache: DiskCache) -> Path:
    (path,) = cache.root.glob("weights-*.safetensors")
    return path


def assert_same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gguf_and_folder_give_the_same_weights(
    reference: tuple[Any, Path], gguf_path: Path, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache")
    assert_same(load(gguf_path, cache), load(reference[1], cache))


def test_a_second_load_does_not_read_the_gguf(
    gguf_path: Path, tmp_path: Path, builds: list[str]
) -> None:
    cache = DiskCache(tmp_path / "cache")
    first = load(gguf_path, cache)
    second = load(gguf_path, cache)
    assert_same(first, second)
    assert len(builds) == 1
    assert str(prepared_file(cache)) in Path("/proc/self/maps").read_text()


def test_a_changed_model_is_prepared_anew(
    reference: tuple[Any, Path], gguf_path: Path, tmp_path: Path, builds: list[str]
) -> None:
    cache = DiskCache(tmp_path / "cache")
    load(gguf_path, cache)
    save_tiny_gguf(reference[0], gguf_path, extra={"general.name": "another"})
    load(gguf_path, cache)
    assert len(builds) == 2


def test_each_dtype_is_prepared_on_its_own(gguf_path: Path, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    full, half = load(gguf_path, cache), load(gguf_path, cache, torch.bfloat16)
    assert half["0.qkv"].dtype == torch.bfloat16
    assert torch.equal(full["0.qkv"].bfloat16(), half["0.qkv"])


@pytest.mark.parametrize("damage", ["truncated", "emptied", "garbage", "bit flipped", "no sums"])
def test_a_damaged_prepared_file_is_rebuilt(
    gguf_path: Path, tmp_path: Path, builds: list[str], damage: str
) -> None:
    cache = DiskCache(tmp_path / "cache")
    intact = {name: tensor.clone() for name, tensor in load(gguf_path, cache).items()}
    path = prepared_file(cache)
    content = bytearray(path.read_bytes())
    path.unlink()  # the loaded tensors map the old file
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "garbage":
        path.write_bytes(b"\xff" * 100)
    elif damage == "bit flipped":
        content[-1000] ^= 0x10
        path.write_bytes(content)
    else:
        save_file(intact, path)
    assert_same(load(gguf_path, cache), intact)
    assert len(builds) == 2
    assert_same(load(gguf_path, cache), intact)
    assert len(builds) == 2


def test_processes_that_start_together_prepare_once(
    gguf_path: Path, tmp_path: Path, builds: list[str]
) -> None:
    """Each thread has its own DiskCache, so they exclude each other as processes do."""
    loaded: list[Weights] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        cache = DiskCache(tmp_path / "cache")
        barrier.wait(timeout=60)
        loaded.append(load(gguf_path, cache))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(loaded) == 4
    assert len(builds) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_without_a_writable_cache_the_model_loads_all_the_same(
    gguf_path: Path, tmp_path: Path, builds: list[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = DiskCache(tmp_path / "file" / "cache")
    assert_same(load(gguf_path, cache), load(gguf_path, cache))
    assert len(builds) == 2


def test_a_missing_gguf_tensor_is_named(reference: tuple[Any, Path], tmp_path: Path) -> None:
    path = tmp_path / "partial.gguf"
    save_tiny_gguf(reference[0], path, omit="blk.1.ffn_up.weight")
    with pytest.raises(BrokenModelError, match=r"has no tensor blk\.1\.ffn_up\.weight"):
        load(path, DiskCache(tmp_path / "cache"))


@pytest.fixture
def folder(reference: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of the reference's folder that a test may spoil."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in reference[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_missing_safetensors_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(BrokenModelError, match=r"no tensor model\.layers\.0\.mlp\.up_proj"):
        load(folder, DiskCache(tmp_path / "cache"))


def test_a_tensor_of_another_shape_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, path)
    with pytest.raises(
        BrokenModelError, match=r"model\.norm\.weight has shape \[3\], expected \[48\]"
    ):
        load(folder, DiskCache(tmp_path / "cache"))


def test_a_damaged_safetensors_file_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(BrokenModelError, match=r"model\.safetensors cannot be read"):
        load(folder, DiskCache(tmp_path / "cache"))


def test_tensors_may_be_spread_over_files(folder: Path, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    whole = {name: tensor.clone() for name, tensor in load(folder, cache).items()}
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    save_file({name: tensors[name].clone() for name in names[::2]}, folder / "a.safetensors")
    save_file({name: tensors[name].clone() for name in names[1::2]}, folder / "b.safetensors")
    path.unlink()
    assert_same(load(folder, cache), whole)
