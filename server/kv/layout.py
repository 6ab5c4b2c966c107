"""How KV bytes lie in a pool: the one fact both ends of a transfer must agree on.

Owns sizes and offsets; knows nothing of who holds a page (`server.kv.pages`) or of torch.

A pool is page-major, so one page of all layers is one contiguous run of bytes:
``[num_pages, num_layers, 2 (k, v), page_size, num_kv_heads, head_dim]``, C order (docs/adr/003).
"""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one KV page. Two pools may exchange pages only if their layouts are equal.

    page_size     tokens per page
    dtype         "float32", "bfloat16" or "float16"
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"KvLayout.{name} is {value}, expected at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"KvLayout.dtype is {self.dtype!r}, expected one of {list(DTYPE_BYTES)}"
            )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer (k and v) in one page."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes per token, all layers."""
        return self.page_bytes // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def page_range(self, page: int) -> slice:
        """Byte range of `page` in a pool."""
        return slice(page * self.page_bytes, (page + 1) * self.page_bytes)

    def layer_range(self, page: int, layer: int) -> slice:
        """Byte range of one layer (k then v) of `page` in a pool."""
        start = page * self.page_bytes + layer * self.layer_bytes
        return slice(start, start + self.layer_bytes)

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        """Pool shape as an array of `dtype`."""
        return (
            num_pages,
            self.num_layers,
            2,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
        )
