"""Pages out of a pool and back into it as bytes: what preemption keeps of a sequence.

Owns the byte order of a saved copy (pages in the given order, each as `KvLayout` lays it out);
knows nothing of who holds the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.kv.pool import KvPool


def copy_pages_out(pool: KvPool, pages: Sequence[int]) -> bytes:
    """Concatenated bytes of `pages`: len(pages) × layout.page_bytes bytes."""
    layout = pool.descriptor.layout
    return b"".join(pool.memory[layout.page_range(page)] for page in pages)


def copy_pages_in(pool: KvPool, saved: bytes, pages: Sequence[int]) -> None:
    """Write what `copy_pages_out` returned to `pages`, as many as it was taken from.

    Raises ValueError when `saved` is not exactly that many pages.
    """
    layout = pool.descriptor.layout
    if len(saved) != len(pages) * layout.page_bytes:
        raise ValueError(
            f"saved copy has {len(saved)} bytes, "
            f"{len(pages)} pages of {layout.page_bytes} bytes were given"
        )
    view = memoryview(saved)
    for index, page in enumerate(pages):
        pool.memory[layout.page_range(page)] = view[layout.page_range(index)]
