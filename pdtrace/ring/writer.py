"""Appends record bodies to a ring. Knows nothing of what a body means, nor of files.

One thread writes; there is no lock and no system call on the way. The oldest block is recycled when
the ring is full: writing never waits and never fails for lack of space.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from threading import get_ident
from zlib import crc32

import msgspec

from pdtrace.errors import RecordError, RingClosedError, RingCreateError
from pdtrace.ring.cursor import NOBODY, Buffer, Cursor
from pdtrace.ring.layout import (
    BLOCK_HEADER,
    COUNTER_SLOTS,
    COUNTERS_OFFSET,
    FIXED_HEADER,
    FORMAT_VERSION,
    GAUGE_SLOTS,
    GAUGE_UNSET,
    GAUGES_OFFSET,
    HEADER_BYTES,
    IDENTITY_OFFSET,
    MAGIC,
    MAX_IDENTITY_BYTES,
    Counter,
    RingCapacity,
    RingIdentity,
    block_checksum,
)


class RingWriter(Cursor):
    """The one writer of a ring in `buffer`, which is zero and `capacity.file_bytes` long.

    append() belongs to the first thread that calls it; gauges belong to any. It raises RecordError
    from a second thread or when a body is larger than a block, and RingClosedError after close().

    Raises RingCreateError when the identity does not fit its header.
    """

    __slots__ = (
        "_block_bytes",
        "_buffer",
        "_closed",
        "_counters",
        "_heads",
        "_release_storage",
        "_turning",
        "block",
        "blocks",
        "gauges",
        "identity",
        "on_block",
    )

    def __init__(
        self,
        buffer: Buffer,
        identity: RingIdentity,
        capacity: RingCapacity,
        *,
        release_storage: Callable[[], None] | None = None,
    ) -> None:
        assert len(buffer) == capacity.file_bytes
        if sys.byteorder != "little":
            raise RingCreateError("rings need a little-endian machine")
        encoded = msgspec.json.encode(identity)
        if len(encoded) > MAX_IDENTITY_BYTES:
            raise RingCreateError(
                f"resource attributes take {len(encoded)} bytes of JSON, at most "
                f"{MAX_IDENTITY_BYTES} fit a ring header: set fewer or shorter ones"
            )
        buffer[: FIXED_HEADER.size] = FIXED_HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            capacity.block_bytes,
            capacity.blocks,
            len(encoded),
            crc32(encoded),
        )
        buffer[IDENTITY_OFFSET : IDENTITY_OFFSET + len(encoded)] = encoded

        self.identity = identity
        self._buffer = buffer
        self._release_storage = release_storage
        super().__init__(buffer)
        view = memoryview(buffer)
        self._heads = view.cast("Q")  # of blocks
        counters_end = COUNTERS_OFFSET + COUNTER_SLOTS * 8
        self._counters = view[COUNTERS_OFFSET:counters_end].cast("Q")
        # Each store to a gauge is one aligned 8-byte write, so readers never see half of one.
        self.gauges = view[GAUGES_OFFSET : GAUGES_OFFSET + GAUGE_SLOTS * 8].cast("q")
        for slot in range(GAUGE_SLOTS):
            self.gauges[slot] = GAUGE_UNSET

        self.blocks = capacity.blocks
        self.block = -1  # index of the block in writing, counted since the ring was made
        self.on_block: Callable[[], None] | None = None  # called when a block begins
        self._block_bytes = capacity.block_bytes
        self._closed = False
        self._turning = False
        self._turn_block()

    @property
    def written(self) -> int:
        """Records appended since the ring was made."""
        return self._number

    @property
    def reach(self) -> int:
        """Bytes of blocks used since the ring was made, what was recycled among them."""
        return (self.block + 1) * self._block_bytes - self.block_room

    @property
    def block_room(self) -> int:
        """Bytes left in the block in writing."""
        return self._end - self._pos

    def count(self, counter: Counter, amount: int = 1) -> None:
        """Add to a header counter; does nothing once closed."""
        if not self._closed:
            self._counters[counter] += amount

    def close(self) -> None:
        """Mark the ring as closed cleanly and let go of its storage. Idempotent."""
        if self._closed:
            return
        self._counters[Counter.WRITTEN] = self._number
        self._counters[Counter.CLOSED] = 1
        self.abandon()

    def abandon(self) -> None:
        """Let go of the storage without a trace in it: it belongs to another process."""
        if self._closed:
            return
        self._closed = True
        self.let_go()
        for view in (self._heads, self._counters, self.gauges):
            view.release()
        if isinstance(self._buffer, mmap.mmap):
            self._buffer.close()
        if self._release_storage is not None:
            self._release_storage()

    def _take_ownership(self) -> None:
        if self._closed:
            raise RingClosedError(
                f"the ring of {self.identity.instance} is closed: record before close()"
            )
        if self._owner != NOBODY:
            raise RecordError(
                f"the recorder of {self.identity.instance} belongs to another thread: "
                "open one recorder for each thread that records"
            )
        self._owner = get_ident()

    def _make_room(self, size: int) -> bool:
        """Begin a block for a record of `size` bytes, its header included. False: it is dropped."""
        if size > self._block_bytes - BLOCK_HEADER.size:
            raise RecordError(f"a record of {size - 8} bytes is larger than a block")
        if not self._turn_block():
            return False
        if self._pos + (size + 7 & -8) <= self._end:
            return True
        # What is written when a block begins left too little: without that, in the next one. Else
        # a record above half a block would turn blocks for ever.
        return self._turn_block(whole=True)

    def _turn_block(self, *, whole: bool = False) -> bool:
        """Begin the next block, recycling the oldest. False (record dropped) when re-entered.

        whole  leave all of it to the record to come: `on_block` is not called
        """
        if self._turning:
            self._counters[Counter.DROPPED] += 1
            return False
        self._turning = True
        # A signal handler's record would still fit behind the block's last, and the one that the
        # next block begins with would not have the number that its head says.
        self._end = 0
        block = self.block + 1
        start = HEADER_BYTES + block % self.blocks * self._block_bytes
        first = start >> 3
        self._heads[first] = 0  # readers of the old block give up from here on
        self._heads[first + 1] = self._number
        self._heads[first + 2] = block_checksum(block + 1, self._number)
        self._heads[first] = block + 1
        self._pos = start + BLOCK_HEADER.size
        self._end = start + self._block_bytes
        self.block = block
        self._counters[Counter.WRITTEN] = self._number
        self._turning = False
        if self.on_block is not None and not whole:
            self.on_block()
        return True
