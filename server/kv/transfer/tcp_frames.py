"""What two transfer processes say to each other over TCP, byte by byte.

Owns the frames and their limits; knows nothing of sockets or pools.

    both                 the greeting (`tcp_auth`), once
    sender ▶ receiver    per copy: length, CopyHeader, pages
    receiver ▶ sender    per copy, in order: length, CopyReply

Lengths have four bytes, big endian. Pages travel as they lie in the pool, `num_bytes` in all,
without framing. Headers and replies are MessagePack. A pool is named by its PoolRef alone; the
receiver maps nothing on a peer's word.

VERSION history
  1  first version
  2  the greeting, by which both sides prove that they know the secret
"""

from __future__ import annotations

import msgspec

from server.kv.layout import KvLayout
from server.wire.messages import PoolRef

VERSION = 2
PREFACE = b"PDKV" + bytes([VERSION])
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1024 * 1024
MAX_COPY_BYTES = 64 * 2**30


class FrameError(Exception):
    """Bytes that are no frame of this version; the connection cannot go on."""


class CopyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Announces `len(pages) * layout.page_bytes` bytes for `pages` of `pool`."""

    handoff_id: str
    index: int
    pool: PoolRef
    layout: KvLayout
    pages: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.pages) * self.layout.page_bytes


class CopyReply(msgspec.Struct, frozen=True, kw_only=True):
    """All bytes of the copy were read from the connection.

    num_bytes, crc32   what was written to the pool; both 0 when refused
    reason, message    why nothing may be relied on; None and "" when all was written
    """

    num_bytes: int
    crc32: int
    reason: str | None = None
    message: str = ""


_header_decoder = msgspec.msgpack.Decoder(CopyHeader)
_reply_decoder = msgspec.msgpack.Decoder(CopyReply)


def encode_frame(body: CopyHeader | CopyReply) -> bytes:
    """Length and body. Raises FrameError when the body exceeds MAX_FRAME_BYTES."""
    encoded = msgspec.msgpack.encode(body)
    if len(encoded) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(encoded)} bytes, the limit is {MAX_FRAME_BYTES}")
    return len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded


def decode_length(data: bytes | bytearray | memoryview) -> int:
    """Body length. Raises FrameError when it is 0 or above MAX_FRAME_BYTES."""
    length = int.from_bytes(data, "big")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"frame of {length} bytes, expected 1 … {MAX_FRAME_BYTES}")
    return length


def decode_header(data: bytes | bytearray | memoryview) -> CopyHeader:
    """Raises FrameError for anything but a header whose pages fit MAX_COPY_BYTES."""
    try:
        header = _header_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FrameError(f"malformed header: {error}") from error
    if header.num_bytes > MAX_COPY_BYTES:
        raise FrameError(f"copy of {header.num_bytes} bytes, the limit is {MAX_COPY_BYTES}")
    return header


def decode_reply(data: bytes | bytearray | memoryview) -> CopyReply:
    """Raises FrameError for anything else."""
    try:
        return _reply_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FrameError(f"malformed reply: {error}") from error


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:7000` or `[::1]:7000`. Raises ValueError for anything else."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"transfer address is {address!r}, expected host:port")
    return host, int(port)
