"""A KV pool in shared memory: created by the worker that owns it, mapped by transfer processes.

Owns the mapping and its lifetime; knows nothing of which pages are free (`server.kv.pages`).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec

from server.kv.layout import KvLayout


class PoolDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Everything another process on the host needs to map a pool."""

    owner: str  # instance id of the worker that created it
    path: str
    num_pages: int
    layout: KvLayout

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes


class KvPool:
    """A mapped pool. `memory` is a writable byte view of `descriptor.num_bytes` bytes.

    `create` makes the backing file with mode 0600 in place of an old one: a worker that starts
    again gets another file, so that what still maps the old one neither reads nor writes its pages.
    `attach` maps an existing file and raises ValueError when its size is not what the descriptor
    says.
    """

    def __init__(self, descriptor: PoolDescriptor, mapping: mmap.mmap) -> None:
        self.descriptor = descriptor
        self._mapping = mapping
        self.memory = memoryview(mapping)

    @classmethod
    def create(cls, path: Path, *, owner: str, layout: KvLayout, num_pages: int) -> KvPool:
        descriptor = PoolDescriptor(owner=owner, path=str(path), num_pages=num_pages, layout=layout)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, descriptor.num_bytes)
            mapping = mmap.mmap(fd, descriptor.num_bytes)
        finally:
            os.close(fd)
        return cls(descriptor, mapping)

    @classmethod
    def attach(cls, descriptor: PoolDescriptor) -> KvPool:
        fd = os.open(descriptor.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            if size != descriptor.num_bytes:
                raise ValueError(
                    f"pool {descriptor.path} of {descriptor.owner} has {size} bytes, "
                    f"its descriptor says {descriptor.num_bytes}"
                )
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        return cls(descriptor, mapping)

    def close(self) -> None:
        """Unmap. A caller that still holds views of `memory` keeps the mapping alive."""
        try:
            self.memory.release()
            self._mapping.close()
        except BufferError:
            pass  # an array still refers to the mapping; it goes with the process

    def unlink(self) -> None:
        """Remove the backing file; mappings stay valid until closed."""
        Path(self.descriptor.path).unlink(missing_ok=True)
