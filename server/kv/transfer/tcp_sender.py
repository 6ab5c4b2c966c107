"""The source's end of a TCP transfer: pages of a registered pool onto a connection, and its reply.

Owns the copies to one destination host and the connection they share; knows nothing of pools'
registration or of other hosts. One copy is on the wire at a time; the next waits for its reply.
Nothing of a copy is sent before both ends have proven themselves to each other (`tcp_auth`).

A copy that must stop in the middle (cancelled, or its pool was replaced) goes on as zeros: the
source is read no more, and the connection's framing holds. Its checksum cannot match.
"""

from __future__ import annotations

import errno
import os
import socket
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.kv.transfer.base import Copied, Failed, PageCopy, Reason, TransferError, TransferEvent
from server.kv.transfer.pools import MappedPool
from server.kv.transfer.runs import Run, page_runs
from server.kv.transfer.tcp_auth import SenderGreeting
from server.kv.transfer.tcp_frames import (
    LENGTH_BYTES,
    CopyHeader,
    CopyReply,
    FrameError,
    decode_length,
    decode_reply,
    encode_frame,
    parse_address,
)

SEND_BYTES = 256 * 1024
STEP_BYTES = 4 * 1024 * 1024  # per call of advance, so that other connections get their turn
_ZEROS = memoryview(bytes(SEND_BYTES))


@dataclass(slots=True, eq=False)
class Outgoing:
    """One copy on its way.

    head        bytes that precede its pages and are not sent yet
    poison      why its pages are sent as zeros
    cancelled   its end is nobody's business any more
    started     whether any byte of it may have reached the destination
    """

    copy: PageCopy
    source: MappedPool
    deadline_ns: int
    connect_by_ns: int
    head: memoryview
    runs: Iterator[Run]
    num_bytes: int
    run: Run = (0, 0, 0)
    sent: int = 0
    crc32: int = 0
    poison: TransferError | None = None
    cancelled: bool = False
    started: bool = False


def outgoing(
    copy: PageCopy, source: MappedPool, *, deadline_ns: int, connect_by_ns: int
) -> Outgoing:
    """Prepare a checked copy. Raises TransferError when its header is too large."""
    layout = source.layout
    header = CopyHeader(
        handoff_id=copy.handoff_id,
        index=copy.index,
        pool=copy.destination,
        layout=layout,
        pages=tuple(copy.destination_pages),
    )
    try:
        head = encode_frame(header)
    except FrameError as error:
        raise TransferError(Reason.BAD_PAGES, str(error)) from error
    pages = copy.source_pages
    return Outgoing(
        copy=copy,
        source=source,
        deadline_ns=deadline_ns,
        connect_by_ns=connect_by_ns,
        head=memoryview(head),
        runs=page_runs(pages, pages, layout.page_bytes, max_bytes=SEND_BYTES),
        num_bytes=header.num_bytes,
    )


class Sender:
    """Copies to one destination host, in order of submission.

    connection   None until the first copy, and after a failure until the next one
    connections  how many were opened
    events       ends of copies that nobody has taken yet
    """

    def __init__(self, address: str, *, secret: bytes, monotonic_ns: Callable[[], int]) -> None:
        self.address = address
        self._secret = secret
        self.connection: socket.socket | None = None
        self.connections = 0
        self.events: list[TransferEvent] = []
        self._connecting = False
        self._greeting = SenderGreeting(secret)
        self._claim = b""  # what of it is not sent yet
        self._queue: deque[Outgoing] = deque()
        self._reply = bytearray()
        self._monotonic_ns = monotonic_ns

    @property
    def num_waiting(self) -> int:
        """Copies not ended, the one on the wire included."""
        return len(self._queue)

    @property
    def wants_write(self) -> bool:
        """Whether the selector shall say when the socket takes bytes."""
        if not self._greeting.done:
            return self._connecting or bool(self._claim)
        return bool(self._queue and not self._is_sent(self._queue[0]))

    def submit(self, item: Outgoing) -> None:
        self._queue.append(item)

    def cancel(self, handoff_id: str) -> None:
        """Read no more source pages of the handoff; its copies end without an event."""
        for item in list(self._queue):
            if item.copy.handoff_id != handoff_id:
                continue
            if item.started:
                item.cancelled = True
                item.poison = TransferError(Reason.CANCELLED, "cancelled")
            else:
                self._queue.remove(item)

    def open(self) -> None:
        """Begin to connect if there is a copy and no connection. Raises TransferError when the
        address is no address or the connection is refused at once."""
        if self.connection is not None or not self._queue:
            return
        try:
            host, port = parse_address(self.address)
            # Numeric only: looking up a name would block the loop.
            family, kind, proto, _, target = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
        except (ValueError, OSError) as error:
            raise TransferError(
                Reason.NO_ROUTE, f"transfer address {self.address!r}: {error}"
            ) from error
        connection = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        code = connection.connect_ex(target)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            raise self._unreachable(code)
        self.connection = connection
        self.connections += 1
        self._connecting = True
        self._reply.clear()
        self._greeting = SenderGreeting(self._secret)
        self._claim = b""

    def advance(self) -> None:
        """Receive and send as far as the socket allows. Raises TransferError when the connection
        is of no use any more; follow with `drop`."""
        connection = self.connection
        assert connection is not None
        if self._connecting:
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise self._unreachable(code)
            try:
                connection.getpeername()
            except OSError:
                return  # still connecting
            self._connecting = False
        try:
            # Read first: an idle connection that the peer has closed is found before it is used.
            self._receive(connection)
            if not self._greeting.done:
                self._send_claim(connection)
            elif self._queue and not self._is_sent(self._queue[0]):
                self._send(connection, self._queue[0])
        except OSError as error:
            raise TransferError(
                Reason.PEER_LOST, f"connection to {self.address} broke: {error.strerror}"
            ) from error
        except FrameError as error:
            raise TransferError(Reason.PROTOCOL_ERROR, f"{self.address}: {error}") from error
        except TransferError as error:
            raise TransferError(error.reason, f"{self.address}: {error}") from error

    def expire(self, now_ns: int) -> TransferError | None:
        """Why the copy on the wire has taken too long, or None. Follow with `drop`."""
        if not self._queue:
            return None
        first = self._queue[0]
        if self._is_opening and now_ns >= first.connect_by_ns:
            return TransferError(Reason.TRANSFER_UNREACHABLE, f"{self.address} does not answer")
        if now_ns >= first.deadline_ns:
            return TransferError(
                Reason.TRANSFER_TIMEOUT,
                f"{first.sent} of {first.num_bytes} bytes went to {self.address} before the "
                "deadline" + ("" if first.sent < first.num_bytes else "; it did not confirm them"),
            )
        return None

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` must be asked next."""
        if not self._queue:
            return None
        first = self._queue[0]
        return (
            min(first.deadline_ns, first.connect_by_ns) if self._is_opening else first.deadline_ns
        )

    @property
    def _is_opening(self) -> bool:
        """Whether there is a connection that cannot be used yet."""
        return self.connection is not None and not self._greeting.done

    def drop(self, error: TransferError) -> None:
        """Close the connection and fail the copy it was busy with; the others will use another.

        A peer may close an idle connection just when a copy is about to use it: a copy of which
        nothing was sent stays for the next connection. A peer that hangs up on a greeting does so
        again.
        """
        was_idle = self._greeting.done and error.reason is Reason.PEER_LOST
        self.disconnect()
        if not self._queue or (was_idle and not self._queue[0].started):
            return
        item = self._queue.popleft()
        if not item.cancelled:
            self.events.append(_failed(item, error, settled=not item.started))

    def disconnect(self) -> None:
        """Close the connection, if there is one. Copies stay."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._connecting = False

    def _unreachable(self, code: int) -> TransferError:
        return TransferError(Reason.TRANSFER_UNREACHABLE, f"{self.address}: {os.strerror(code)}")

    @staticmethod
    def _is_sent(item: Outgoing) -> bool:
        return not item.head and item.sent == item.num_bytes

    def _send_claim(self, connection: socket.socket) -> None:
        try:
            while self._claim:
                self._claim = self._claim[connection.send(self._claim) :]
        except BlockingIOError:
            pass  # the selector says when there is room again

    def _send(self, connection: socket.socket, item: Outgoing) -> None:
        budget = STEP_BYTES
        try:
            while item.head:
                item.started = True
                item.head = item.head[connection.send(item.head) :]
            while item.sent < item.num_bytes and budget > 0:
                if not item.run[2]:
                    item.run = next(item.runs)
                offset, _, run_bytes = item.run
                if item.poison is None and item.source.replaced:
                    item.poison = TransferError(
                        Reason.POOL_REPLACED,
                        f"{item.source.ref.owner} restarted while its pages were read",
                    )
                if item.poison is None:
                    view = item.source.memory[offset : offset + run_bytes]
                else:
                    view = _ZEROS[:run_bytes]
                num_bytes = connection.send(view)
                item.crc32 = zlib.crc32(view[:num_bytes], item.crc32)
                item.run = (offset + num_bytes, 0, run_bytes - num_bytes)
                item.sent += num_bytes
                budget -= num_bytes
        except BlockingIOError:
            pass  # the selector says when there is room again

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise TransferError(Reason.PEER_LOST, f"{self.address} closed the connection")
        if not self._greeting.done:
            self._claim += self._greeting.feed(data)
            return
        self._reply += data
        while len(self._reply) >= LENGTH_BYTES:
            end = LENGTH_BYTES + decode_length(self._reply[:LENGTH_BYTES])
            if len(self._reply) < end:
                return
            reply = decode_reply(self._reply[LENGTH_BYTES:end])
            del self._reply[:end]
            self._finish(reply)

    def _finish(self, reply: CopyReply) -> None:
        if not self._queue or not self._is_sent(self._queue[0]):
            raise FrameError("a reply came for no copy")
        item = self._queue.popleft()
        if item.cancelled:
            return
        error = item.poison or _verdict(item, reply)
        if error is not None:
            self.events.append(_failed(item, error, settled=True))
            return
        self.events.append(
            Copied(
                handoff_id=item.copy.handoff_id,
                index=item.copy.index,
                num_bytes=item.num_bytes,
                finished_ns=self._monotonic_ns(),
            )
        )


def _verdict(item: Outgoing, reply: CopyReply) -> TransferError | None:
    if reply.reason is not None:
        known = reply.reason in set(Reason)
        reason = Reason(reply.reason) if known else Reason.PROTOCOL_ERROR
        return TransferError(reason, reply.message)
    if (reply.num_bytes, reply.crc32) != (item.num_bytes, item.crc32):
        return TransferError(
            Reason.CHECKSUM_MISMATCH,
            f"sent {item.num_bytes} bytes with CRC {item.crc32:08x}, "
            f"{reply.num_bytes} bytes with CRC {reply.crc32:08x} were written",
        )
    return None


def _failed(item: Outgoing, error: TransferError, *, settled: bool) -> Failed:
    return Failed(
        handoff_id=item.copy.handoff_id,
        index=item.copy.index,
        reason=error.reason,
        message=str(error),
        settled=settled,
        error=error.error,
    )
