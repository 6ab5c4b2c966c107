"""Reads a ring while it is being written, or after its writer died. Never writes to it.

Bytes are copied with pread, so a file that somebody cuts short is an error here and not a SIGBUS.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from stat import S_ISREG
from typing import Annotated
from zlib import crc32

import msgspec

from pdtrace.errors import RingClosedError, RingError, RingFormatError, RingVersionError
from pdtrace.native import compiled
from pdtrace.ring.codec import build_decoders
from pdtrace.ring.files import is_locked
from pdtrace.ring.layout import (
    BLOCK_HEADER,
    BODY_HEAD,
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
    RECORD_HEADER,
    Counter,
    RingCapacity,
    RingIdentity,
    block_checksum,
)
from pdtrace.ring.records import LossRecord, MarkRecord, Record
from pdtrace.stages import Gauge

_COUNTERS = struct.Struct(f"<{COUNTER_SLOTS}Q")
_GAUGES = struct.Struct(f"<{GAUGE_SLOTS}q")
_TURNS = struct.Struct(f"<{Counter.WRITTEN + 1}Q")
_MIN_RECORD_BYTES = RECORD_HEADER.size + BODY_HEAD.size
_DEFAULT_LIMIT = 65536

ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> bytes, fewer at the end of the storage."""


class WriterState(StrEnum):
    """What became of the process that writes a ring."""

    ALIVE = "alive"
    CLOSED = "closed"  # it ended in order
    DEAD = "dead"  # it was killed, or ended without close()


class RingPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader stands; keep it to resume later, in this process or another.

    block   index of a block since the ring was made
    offset  bytes into that block
    number  number of the next record: how many came before it since the ring was made
    """

    block: Annotated[int, msgspec.Meta(ge=0)] = 0
    offset: Annotated[int, msgspec.Meta(ge=0)] = BLOCK_HEADER.size
    number: Annotated[int, msgspec.Meta(ge=0)] = 0


class RingReader:
    """Incremental reader of one ring. Any number of readers may read the same ring.

    identity    who writes it
    missed      records overwritten before this reader came to them, exactly
    torn        records found damaged, exactly
    unknown     intact records of kinds that this version does not know
    count_from  number of the first record that these count: a former reader counted those before

    Raises RingFormatError (no ring, damaged header), RingVersionError and OSError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # Without O_NONBLOCK, a FIFO of that name would hold the reader up for ever.
        self._fd: int | None = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        fd = self._fd
        try:
            stat = self.stat()
            if not S_ISREG(stat.st_mode):
                raise RingFormatError(f"{self.path} is not a pdtrace ring: it is no regular file")
            self._load(lambda offset, size: os.pread(fd, size, offset), stat.st_size)
        except BaseException:
            self.close()
            raise

    @classmethod
    def over(cls, buffer: bytearray | bytes, name: str = "memory") -> RingReader:
        """Reader of a ring that lives in this process's memory."""
        reader = cls.__new__(cls)
        reader.path = Path(name)
        reader._fd = None
        reader._load(lambda offset, size: bytes(buffer[offset : offset + size]), len(buffer))
        return reader

    def _load(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self.identity, capacity = _read_header(self.path, read_at, size)
        self._blocks = capacity.blocks
        self._block_bytes = capacity.block_bytes
        self._decoders = build_decoders(self.identity.schema)
        self.missed = 0
        self.torn = 0
        self.unknown = 0
        self.count_from = 0
        self._noting = False
        self._turned_at = -1
        self._block = 0
        self._offset = BLOCK_HEADER.size
        self._number = 0

    def stat(self) -> os.stat_result:
        """Of the file that is read, whatever has its name by now. Not for memory."""
        assert self._fd is not None
        return os.fstat(self._fd)

    # State of the writer

    def counters(self) -> dict[Counter, int]:
        """The header's counters at this instant."""
        values = _COUNTERS.unpack(self._exactly(COUNTERS_OFFSET, _COUNTERS.size))
        return {counter: values[counter] for counter in Counter}

    def gauges(self) -> dict[Gauge, int]:
        """The gauges that the writer has set, at this instant."""
        values = _GAUGES.unpack(self._exactly(GAUGES_OFFSET, _GAUGES.size))
        return {gauge: values[gauge] for gauge in Gauge if values[gauge] != GAUGE_UNSET}

    @property
    def closed(self) -> bool:
        """Whether the writer closed the ring cleanly."""
        return self.counters()[Counter.CLOSED] == 1

    def writer_alive(self) -> bool:
        """Whether the writing process lives and has not closed the ring; False for memory."""
        return self._fd is not None and is_locked(self._fd)

    def writer_state(self) -> WriterState:
        """Whether the writer may still write, and else how it ended."""
        # In this order: a writer says that it closes before it lets go of its lock.
        alive = self.writer_alive()
        if self.closed:
            return WriterState.CLOSED
        return WriterState.ALIVE if alive else WriterState.DEAD

    def glance(self) -> tuple[bool, bool]:
        """Whether there seems to be more to read, and whether the writer has closed the ring.

        For who asks often, a fraction of what read() costs. What was written before the call shows
        as more, once; read until there is nothing, and ask again.
        """
        turns = _TURNS.unpack(self._exactly(COUNTERS_OFFSET, _TURNS.size))
        turned_at = turns[Counter.WRITTEN]
        more = turned_at != self._turned_at  # a block has begun: records may be in further ones
        self._turned_at = turned_at
        start = self._start(self._block) + self._offset
        return more or self._has_more(start), turns[Counter.CLOSED] == 1

    # Position

    def position(self) -> RingPosition:
        """Where the next read() begins."""
        return RingPosition(block=self._block, offset=self._offset, number=self._number)

    def seek(self, position: RingPosition) -> None:
        """Continue from a position of this ring. Raises RingError when it cannot be one."""
        if (
            position.block < 0
            or position.number < 0
            or position.offset % 8
            or not BLOCK_HEADER.size <= position.offset <= self._block_bytes
            or position.block > max(self._block_header(slot)[0] for slot in range(self._blocks))
        ):
            raise RingError(f"{position} is no position of {self.path}")
        self._block = position.block
        self._offset = position.offset
        self._number = position.number
        self._turned_at = -1

    # Records

    def read(
        self, *, limit: int = _DEFAULT_LIMIT, final: bool = False, losses: bool = False
    ) -> list[Record]:
        """Records written since the last call, oldest first; stops after the block passing `limit`.

        final   the writer is gone: look behind what it left half written or damaged
        losses  put a LossRecord where records are missing
        """
        self._noting = losses
        records: list[Record] = []
        more = True
        while more and len(records) < limit:
            more = self._read_block(records, final) or (final and self._resync(records))
        if final and not more:
            self._count_tail(records)
        return records

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._read_at = _closed

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_block(self, records: list[Record], final: bool) -> bool:
        """Read what the current block holds beyond the position; whether to go on."""
        sequence = self._block + 1
        if self._block_header(self._block)[0] != sequence:
            return self._resync(records)
        # Asked before copying: if the next block had begun by then, the copy holds all of this one.
        next_sequence, next_number = self._block_header(sequence)
        complete = next_sequence == sequence + 1
        start = self._start(self._block) + self._offset
        if not (complete or final) and not self._has_more(start):
            return False
        data = self._exactly(start, self._block_bytes - self._offset)
        if self._block_header(self._block)[0] != sequence:
            return self._resync(records)
        self._parse(data, records, complete or final)
        if not complete:
            return False
        self._tear(records, self._number, next_number - self._number)
        self._block = sequence
        self._offset = BLOCK_HEADER.size
        self._number = next_number
        return True

    def _has_more(self, start: int) -> bool:
        """Whether the block in writing seems to hold the next record, at byte `start`."""
        if self._offset > self._block_bytes - _MIN_RECORD_BYTES:
            return False
        low, _ = RECORD_HEADER.unpack(self._exactly(start, RECORD_HEADER.size))
        # Of zeros, where nothing was written yet, the number would be that of the first record.
        return low != 0 and low >> 16 == self._number & 0xFFFF

    def _resync(self, records: list[Record]) -> bool:
        """Go to the oldest intact block; False when there is nothing ahead."""
        headers = [self._block_header(slot) for slot in range(self._blocks)]
        ahead = [
            (sequence, number)
            for slot, (sequence, number) in enumerate(headers)
            if sequence > self._block + 1 and (sequence - 1) % self._blocks == slot
        ]
        if not ahead:
            return False
        sequence, number = min(ahead)
        if number > self._number:
            self.missed += max(0, number - max(self._number, self.count_from))
            if self._noting:
                # A writer that is about to recycle a block wipes its header first.
                lapped = (
                    headers[self._block % self._blocks][0] != self._block + 1
                    and max(ahead)[0] >= self._block + self._blocks
                )
                records.append(LossRecord(count=number - self._number, overwritten=lapped))
        self._block = sequence - 1
        self._offset = BLOCK_HEADER.size
        self._number = number
        return True

    def _tear(self, records: list[Record], number: int, count: int) -> None:
        """`count` records from `number` on are damaged."""
        if count > 0:
            self.torn += max(0, number + count - max(number, self.count_from))
            if self._noting:
                records.append(LossRecord(count=count))

    def _count_tail(self, records: list[Record]) -> None:
        """Count what the header says was written after the last record found."""
        lost = self.counters()[Counter.WRITTEN] - self._number
        if 0 < lost <= self._blocks * self._block_bytes // _MIN_RECORD_BYTES:
            self._tear(records, self._number, lost)
            self._number += lost

    def _parse(self, data: bytes, records: list[Record], complete: bool) -> None:
        pos = 0
        number = self._number
        decoders = self._decoders
        unpack = RECORD_HEADER.unpack_from
        last = len(data) - _MIN_RECORD_BYTES
        while pos <= last:
            if compiled is not None:
                pos, number = compiled.scan(data, pos, number, decoders, records, MarkRecord)
                if pos > last:
                    break
            low, checksum = unpack(data, pos)
            size = low & 0xFFFF
            body = data[pos + 8 : pos + size]
            if (
                low >> 16 != number & 0xFFFF
                or size < _MIN_RECORD_BYTES
                or crc32(body, number) != checksum
            ):
                found = self._next_intact(data, pos, number, complete)
                if found is None:
                    break
                pos, skipped = found
                self._tear(records, number, skipped)
                number += skipped
                continue
            decode = decoders[body[0]]
            if decode is None:
                self.unknown += number >= self.count_from
            else:
                try:
                    records.append(decode(body))
                except (struct.error, ValueError, msgspec.MsgspecError):
                    self.unknown += number >= self.count_from
            pos += size + 7 & -8
            number += 1
        self._offset += pos
        self._number = number

    def _next_intact(
        self, data: bytes, pos: int, number: int, complete: bool
    ) -> tuple[int, int] | None:
        """Position of the next intact record after the bad one at `pos`, and how many were lost.

        In a block still being written, a record that cannot be read may be on its way, and what is
        there may be left from the lap before: only one that has its number, and its intact
        successor right behind it, counts as damaged.
        """
        low, _ = RECORD_HEADER.unpack_from(data, pos)
        stop = len(data) - _MIN_RECORD_BYTES + 1
        most_lost = 0xFFFF
        if complete:
            candidates = range(pos + 8, stop, 8)
        elif low >> 16 == number & 0xFFFF:
            after = pos + ((low & 0xFFFF) + 7 & -8)
            candidates = range(after, min(after + 1, stop))
            most_lost = 1
        else:
            return None
        for candidate in candidates:
            low, checksum = RECORD_HEADER.unpack_from(data, candidate)
            size = low & 0xFFFF
            lost = (low >> 16) - number & 0xFFFF
            if (
                size >= _MIN_RECORD_BYTES
                and 0 < lost <= min(most_lost, (candidate - pos) // _MIN_RECORD_BYTES)
                and crc32(data[candidate + 8 : candidate + size], number + lost) == checksum
            ):
                return candidate, lost
        return None

    def _start(self, block: int) -> int:
        return HEADER_BYTES + block % self._blocks * self._block_bytes

    def _block_header(self, block: int) -> tuple[int, int]:
        """Sequence and first number of the block's slot; zeros while it is recycled or damaged."""
        header = self._exactly(self._start(block), BLOCK_HEADER.size)
        sequence, number, checksum = BLOCK_HEADER.unpack(header)
        if checksum != block_checksum(sequence, number):
            return 0, 0
        return sequence, number

    def _exactly(self, offset: int, size: int) -> bytes:
        data = self._read_at(offset, size)
        if len(data) != size:
            raise RingFormatError(f"{self.path} was cut short at byte {offset + len(data)}")
        return data


def _closed(offset: int, size: int) -> bytes:
    raise RingClosedError("the reader is closed")


def _read_header(path: Path, read_at: ReadAt, size: int) -> tuple[RingIdentity, RingCapacity]:
    fixed = read_at(0, FIXED_HEADER.size)
    if len(fixed) < FIXED_HEADER.size or not fixed.startswith(MAGIC):
        raise RingFormatError(f"{path} is not a pdtrace ring")
    _, version, header_bytes, block_bytes, blocks, length, checksum = FIXED_HEADER.unpack(fixed)
    if version != FORMAT_VERSION:
        raise RingVersionError(
            f"{path} has ring format {version}, this pdtrace reads format {FORMAT_VERSION}: "
            "read it with the pdtrace version that wrote it"
        )
    try:
        capacity = RingCapacity(blocks=blocks, block_bytes=block_bytes)
    except ValueError as error:
        raise RingFormatError(f"{path} has a damaged header: {error}") from error
    if header_bytes != HEADER_BYTES or length > MAX_IDENTITY_BYTES:
        raise RingFormatError(f"{path} has a damaged header: sizes {header_bytes}, {length}")
    if size != capacity.file_bytes:
        raise RingFormatError(
            f"{path} holds {size} bytes, its header says {capacity.file_bytes}: "
            "cut short or damaged"
        )
    encoded = read_at(IDENTITY_OFFSET, length)
    if crc32(encoded) != checksum:
        raise RingFormatError(f"{path} has a damaged header: identity checksum differs")
    try:
        identity = msgspec.json.decode(encoded, type=RingIdentity)
    except msgspec.MsgspecError as error:
        # Its checksum is right, so it is whole: fields or roles that this version does not know.
        raise RingVersionError(
            f"{path} was written by another pdtrace version, whose identity is unknown here "
            f"({error}): "
            "read it with the pdtrace version that wrote it"
        ) from error
    return identity, capacity
