"""Where a ring's next record goes, and how it gets there. Knows nothing of blocks beyond the end of
the one in writing; beginning another is its subclass's, as is who may write.

`Cursor` is the class in C where there is one (`pdtrace.native`), else `PlainCursor`.
"""

from __future__ import annotations

import mmap
from threading import get_ident
from typing import TYPE_CHECKING
from zlib import crc32

from pdtrace.native import compiled

Buffer = mmap.mmap | bytearray
NOBODY = 0  # no thread has this id


class PlainCursor:
    """A place in `buffer`, the whole ring, and the room behind it. Let go of the buffer in the end:
    until then it cannot be closed."""

    __slots__ = ("_end", "_number", "_owner", "_pos", "_view", "_words")

    def __init__(self, buffer: Buffer) -> None:
        self._view = memoryview(buffer)
        self._words = self._view.cast("Q")
        self._owner = NOBODY
        self._number = 0
        self._pos = self._end = 0

    def append(self, body: bytes) -> None:
        """Append one record. Raises what `_take_ownership` and `_make_room` raise."""
        if get_ident() != self._owner:
            self._take_ownership()
        size = len(body) + 8
        end = self._pos + (size + 7 & -8)
        while end > self._end:
            if not self._make_room(size):
                return
            end = self._pos + (size + 7 & -8)
        # Reserve, then write: a signal handler or finalizer that records in the middle of this
        # function appends behind this record instead of into it. No call stands between the loads
        # and the stores, so the interpreter does not switch there.
        pos = self._pos
        number = self._number
        self._pos = end
        self._number = number + 1
        self._view[pos + 8 : pos + size] = body
        self._words[pos >> 3] = size | (number & 0xFFFF) << 16 | crc32(body, number) << 32

    def let_go(self) -> None:
        """Touch the ring no more."""
        self._owner = NOBODY
        self._words.release()
        self._view.release()

    def _take_ownership(self) -> None:
        """The calling thread is the one that writes, or may not."""
        raise NotImplementedError

    def _make_room(self, size: int) -> bool:
        """Room for a record of `size` bytes, its header included. False: it is dropped."""
        raise NotImplementedError


Cursor = PlainCursor if TYPE_CHECKING or compiled is None else compiled.Cursor
