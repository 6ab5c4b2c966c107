"""The KV pools that a transfer process has mapped, and the checks before pages are touched.

Owns mappings and their replacement; knows nothing of copies' order or of peers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.kv.layout import KvLayout
from server.kv.pool import KvPool, PoolDescriptor
from server.kv.transfer.base import Reason, TransferError
from server.wire.messages import PoolRef

MAX_POOLS = 256


@dataclass(slots=True)
class MappedPool:
    """A mapped pool.

    address    where the mapping begins; valid until `replaced`
    replaced   a later incarnation took its place, its worker is gone, or the table was closed:
               whoever still works on it must stop
    """

    ref: PoolRef
    pool: KvPool
    address: int
    replaced: bool = False

    @property
    def layout(self) -> KvLayout:
        return self.pool.descriptor.layout

    @property
    def memory(self) -> memoryview:
        """Writable bytes of the whole pool."""
        return self.pool.memory

    def retire(self) -> None:
        """Unmap it, and say so to whoever works on it."""
        self.replaced = True
        self.pool.close()


class PoolTable:
    """Mapped pools, one per owner."""

    def __init__(self) -> None:
        self._by_owner: dict[str, MappedPool] = {}

    def register(self, ref: PoolRef, descriptor: PoolDescriptor) -> None:
        """Map a pool; a no-op for one that is mapped. Raises TransferError, with what was mapped
        before left in place, when it cannot be mapped.

        Unmaps other pools whose files are gone: their workers are, and the room is wanted by those
        that take their place.
        """
        self._drop_gone(but=ref.owner)
        known = self._by_owner.get(ref.owner)
        if known is not None and known.ref == ref and known.pool.descriptor == descriptor:
            return
        if known is None and len(self._by_owner) >= MAX_POOLS:
            raise TransferError(
                Reason.UNKNOWN_POOL,
                f"pool of {ref.owner} is not mapped: {MAX_POOLS} pools are mapped already",
            )
        try:
            pool = KvPool.attach(descriptor)
        except (OSError, ValueError) as error:
            raise TransferError(
                Reason.UNKNOWN_POOL, f"pool of {ref.owner} cannot be mapped: {error}"
            ) from error
        if known is not None:
            known.retire()
        address = ctypes.addressof(ctypes.c_char.from_buffer(pool.memory))
        self._by_owner[ref.owner] = MappedPool(ref, pool, address)

    def get(self, ref: PoolRef) -> MappedPool:
        """The pool that `ref` names. Raises TransferError for an unknown owner or incarnation."""
        mapped = self._by_owner.get(ref.owner)
        if mapped is None:
            known = ", ".join(sorted(self._by_owner)) or "none"
            raise TransferError(
                Reason.UNKNOWN_POOL,
                f"no pool of {ref.owner} is registered here; registered are: {known}",
            )
        if mapped.ref.incarnation != ref.incarnation:
            raise TransferError(
                Reason.UNKNOWN_POOL,
                f"the pool of {ref.owner} is of incarnation {mapped.ref.incarnation}, "
                f"the copy names {ref.incarnation}: the worker has restarted",
            )
        return mapped

    def close(self) -> None:
        """Unmap all. Idempotent."""
        for mapped in self._by_owner.values():
            mapped.retire()
        self._by_owner.clear()

    def _drop_gone(self, *, but: str) -> None:
        for owner, mapped in list(self._by_owner.items()):
            if owner != but and not Path(mapped.pool.descriptor.path).exists():
                mapped.retire()
                del self._by_owner[owner]


def check_pages(pages: Sequence[int], mapped: MappedPool) -> None:
    """Raises TransferError unless `pages` are distinct pages of the pool, at least one."""
    num_pages = mapped.pool.descriptor.num_pages
    if not pages:
        raise TransferError(Reason.BAD_PAGES, "the copy names no pages")
    if min(pages) < 0 or max(pages) >= num_pages:
        raise TransferError(
            Reason.BAD_PAGES,
            f"pages {min(pages)} … {max(pages)}, the pool of {mapped.ref.owner} has "
            f"0 … {num_pages - 1}",
        )
    if len(set(pages)) != len(pages):
        raise TransferError(Reason.BAD_PAGES, "the copy names a page twice")


def check_pair(source_pages: Sequence[int], destination_pages: Sequence[int]) -> None:
    """Raises TransferError unless both sides have as many pages."""
    if len(source_pages) != len(destination_pages):
        raise TransferError(
            Reason.BAD_PAGES,
            f"{len(source_pages)} source pages for {len(destination_pages)} destination pages",
        )


def check_layouts(source: KvLayout, destination: KvLayout) -> None:
    """Raises TransferError unless pages of both layouts are exchangeable."""
    if source != destination:
        raise TransferError(
            Reason.LAYOUT_MISMATCH, f"source pages are {source}, destination pages {destination}"
        )
