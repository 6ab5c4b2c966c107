"""The key/value part of a GGUF file, read once and remembered.

Owns reading and caching of metadata; tensors are `server.engine.weights`' business. Parsing a
vocabulary of 49 thousand tokens takes about two seconds, so the result is kept on disk under the
file's content digest.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from server.disk_cache import DiskCache
from server.engine.errors import BrokenModelError, UnsupportedModelError
from server.models import file_digest

Scalar = str | int | float | bool

_CACHE_FORMAT = 1


class GgufMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata by key. `values` holds what is not a list; `lists` the vocabulary and the like.

    `tensors` names the tensors in the file. The typed getters raise BrokenModelError when the key
    is missing or of another type.
    """

    values: dict[str, Scalar]
    lists: dict[str, list[Scalar]]
    tensors: frozenset[str]

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise BrokenModelError(f"GGUF metadata {key} is {value!r}, expected a string")
        return value

    def integer(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BrokenModelError(f"GGUF metadata {key} is {value!r}, expected an integer")
        return value

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BrokenModelError(f"GGUF metadata {key} is {value!r}, expected a number")
        return float(value)

    def strings(self, key: str) -> list[str]:
        items = self.lists.get(key)
        if items is None:
            raise BrokenModelError(f"GGUF metadata {key} is missing, expected a list of strings")
        return [str(item) for item in items]

    def integers(self, key: str) -> list[int]:
        items = self.lists.get(key)
        if items is None:
            raise BrokenModelError(f"GGUF metadata {key} is missing, expected a list of integers")
        return [int(item) for item in items]


def load_gguf_metadata(path: Path, cache: DiskCache) -> GgufMetadata:
    """Metadata of the GGUF file at `path`. Raises BrokenModelError when it cannot be parsed."""
    name = f"gguf-metadata-{_CACHE_FORMAT}-{file_digest(path, cache)[:32]}.msgpack"
    remembered = cache.read(name)
    if remembered is not None:
        try:
            return msgspec.msgpack.decode(remembered, type=GgufMetadata)
        except msgspec.MsgspecError:
            cache.discard(name)
    metadata = _read(path)
    cache.try_write_bytes(name, msgspec.msgpack.encode(metadata))
    return metadata


def _read(path: Path) -> GgufMetadata:
    # Imported here: numpy and gguf cost 0.2 s that a warm start does not pay.
    from gguf import GGUFReader  # noqa: PLC0415

    try:
        reader = GGUFReader(path)
        contents = {key: field.contents() for key, field in reader.fields.items()}
        tensors = frozenset(tensor.name for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise BrokenModelError(f"{path} cannot be read as GGUF: {error}") from error
    values: dict[str, Scalar] = {}
    lists: dict[str, list[Scalar]] = {}
    for key, content in contents.items():
        if isinstance(content, list):
            lists[key] = content
        elif isinstance(content, str | int | float | bool):
            values[key] = content
        else:
            raise UnsupportedModelError(
                f"GGUF metadata {key} of {path} is {type(content).__name__}"
            )
    return GgufMetadata(values=values, lists=lists, tensors=tensors)
