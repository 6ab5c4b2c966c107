"""The destination's end of a TCP transfer: pages from a connection straight into a registered pool.

Owns one incoming connection's state machine; knows nothing of who listens or selects.

    CLAIM ▶ LENGTH ▶ HEADER ▶ PAGES ▶ (reply) ▶ LENGTH …

Until its claim is proven a peer costs a few hundred bytes of memory and is believed nothing.

A copy that may not be written (unknown pool, wrong pages, cancelled handoff, a process that stops)
is still read to its end, into nothing, and refused in its reply: the connection stays usable.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterator
from enum import Enum

from server.kv.transfer.base import Reason, TransferError
from server.kv.transfer.pools import MappedPool, PoolTable, check_layouts, check_pages
from server.kv.transfer.runs import page_runs
from server.kv.transfer.tcp_auth import CLAIM_BYTES, ReceiverGreeting
from server.kv.transfer.tcp_frames import (
    LENGTH_BYTES,
    CopyHeader,
    CopyReply,
    FrameError,
    decode_header,
    decode_length,
    encode_frame,
)
from server.kv.transfer.tombstones import Tombstones

RECEIVE_BYTES = 256 * 1024
STEP_BYTES = 4 * 1024 * 1024  # per call of read, so that other connections get their turn


class _Await(Enum):
    CLAIM = "claim"
    LENGTH = "length"
    HEADER = "header"
    PAGES = "pages"


class Stranger(FrameError):  # noqa: N818 -- who was refused
    """The peer does not know the secret; the connection is closed."""


class Receiver:
    """One incoming connection.

    authenticated   whether the peer has proven that it knows the secret
    started_ns      when the frame that is being read began; None between frames, where a peer may
                    be silent as long as it likes
    num_answered    copies that were written or refused
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        secret: bytes,
        pools: PoolTable,
        cancelled: Tombstones,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self.connection = connection
        self.started_ns: int | None = monotonic_ns()
        self.num_answered = 0
        self._pools = pools
        self._cancelled = cancelled
        self._monotonic_ns = monotonic_ns
        self.authenticated = False
        self._stopping = False
        self._greeting = ReceiverGreeting(secret)
        self._await = _Await.CLAIM
        self._head = bytearray(CLAIM_BYTES)
        self._filled = 0
        self._scratch = memoryview(b"")
        self._replies = bytearray(self._greeting.hello)
        # the copy that is being read
        self._header: CopyHeader | None = None
        self._mapped: MappedPool | None = None
        self._refusal: TransferError | None = None
        self._runs: Iterator[tuple[int, int]] = iter(())
        self._run = (0, 0)  # offset and bytes of the pool that come next
        self._remaining = 0
        self._crc32 = 0

    @property
    def wants_write(self) -> bool:
        """Whether a reply waits to be sent; nothing is read meanwhile."""
        return bool(self._replies)

    @property
    def is_busy(self) -> bool:
        """Whether the peer, which is no stranger, has begun a copy that is not answered yet."""
        return self.authenticated and (self.started_ns is not None or self.wants_write)

    def stop_accepting(self) -> None:
        """Refuse copies whose header has not been read yet."""
        self._stopping = True

    def cancel(self, handoff_id: str) -> None:
        """Write nothing more of the handoff; `cancelled` has it already."""
        if self._header is not None and self._header.handoff_id == handoff_id:
            self._refuse(_cancelled(handoff_id))

    def advance(self) -> bool:
        """Read, write and reply as far as the socket allows, at most about STEP_BYTES. False when
        the peer has closed. Raises FrameError for a peer that speaks something else or is a
        stranger, and OSError for a broken connection; the caller closes in all these cases."""
        budget = STEP_BYTES
        while budget > 0:
            if self._replies and not self._send_replies():
                return True
            try:
                num_bytes = self._read()
            except BlockingIOError:
                return True
            if num_bytes == 0:
                return False
            budget -= num_bytes
        return True

    def _read(self) -> int:
        if self._await is _Await.PAGES:
            return self._read_pages()
        view = memoryview(self._head)[self._filled :]
        num_bytes = self.connection.recv_into(view)
        if num_bytes and self.started_ns is None:
            self.started_ns = self._monotonic_ns()
        self._filled += num_bytes
        if self._filled == len(self._head):
            self._finish_head()
        return num_bytes

    def _finish_head(self) -> None:
        match self._await:
            case _Await.CLAIM:
                self._greet(bytes(self._head))
                self._expect(_Await.LENGTH, LENGTH_BYTES)
                self.started_ns = None
            case _Await.LENGTH:
                self._expect(_Await.HEADER, decode_length(self._head))
            case _Await.HEADER:
                self._begin(decode_header(self._head))
            case _Await.PAGES:
                raise AssertionError("pages are not read into the head")

    def _greet(self, claim: bytes) -> None:
        known, verdict = self._greeting.answer(claim)
        if not known:
            # At once: nothing else is on its way to the peer, and it will not be heard again.
            self.connection.send(verdict)
            raise Stranger("the peer does not know the transfer secret of this server")
        self._replies += verdict
        self._scratch = memoryview(bytearray(RECEIVE_BYTES))
        self.authenticated = True

    def _expect(self, what: _Await, num_bytes: int) -> None:
        self._await = what
        self._head = bytearray(num_bytes)
        self._filled = 0

    def _begin(self, header: CopyHeader) -> None:
        self._header = header
        self._refusal = None
        self._crc32 = 0
        self._remaining = header.num_bytes
        self._await = _Await.PAGES
        try:
            if header.handoff_id in self._cancelled:
                raise _cancelled(header.handoff_id)
            if self._stopping:
                raise TransferError(
                    Reason.TRANSFER_STOPPING, "the destination's transfer process is shutting down"
                )
            mapped = self._pools.get(header.pool)
            check_layouts(header.layout, mapped.layout)
            check_pages(header.pages, mapped)
            self._mapped = mapped
            pages = header.pages
            self._runs = (
                (offset, run_bytes)
                for _, offset, run_bytes in page_runs(pages, pages, header.layout.page_bytes)
            )
            self._run = next(self._runs)
        except TransferError as error:
            self._refuse(error)
        if self._remaining == 0:
            self._end()

    def _refuse(self, error: TransferError) -> None:
        self._refusal = error
        self._mapped = None

    def _read_pages(self) -> int:
        mapped = self._mapped
        if mapped is not None and mapped.replaced:
            self._refuse(
                TransferError(
                    Reason.POOL_REPLACED,
                    f"{mapped.ref.owner} restarted while its pages were written",
                )
            )
            mapped = None
        if mapped is None:
            view = self._scratch[: min(self._remaining, RECEIVE_BYTES)]
            num_bytes = self.connection.recv_into(view)
        else:
            offset, run_bytes = self._run
            view = mapped.memory[offset : offset + min(run_bytes, RECEIVE_BYTES)]
            num_bytes = self.connection.recv_into(view)
            self._crc32 = zlib.crc32(view[:num_bytes], self._crc32)
            self._run = (offset + num_bytes, run_bytes - num_bytes)
            if num_bytes == run_bytes:
                self._run = next(self._runs, (0, 0))
        self._remaining -= num_bytes
        if self._remaining == 0:
            self._end()
        return num_bytes

    def _end(self) -> None:
        assert self._header is not None
        if self._refusal is None:
            reply = CopyReply(num_bytes=self._header.num_bytes, crc32=self._crc32)
        else:
            reply = CopyReply(
                num_bytes=0,
                crc32=0,
                reason=self._refusal.reason,
                message=str(self._refusal),
            )
        self._replies += encode_frame(reply)
        self._header = self._mapped = None
        self.num_answered += 1
        self.started_ns = None
        self._expect(_Await.LENGTH, LENGTH_BYTES)

    def _send_replies(self) -> bool:
        try:
            num_bytes = self.connection.send(self._replies)
        except BlockingIOError:
            return False
        del self._replies[:num_bytes]
        return not self._replies


def _cancelled(handoff_id: str) -> TransferError:
    return TransferError(Reason.CANCELLED, f"handoff {handoff_id} is cancelled at the destination")
