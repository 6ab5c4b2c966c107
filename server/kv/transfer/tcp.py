"""Transfer between hosts over TCP: one object sends from this host's pools and receives for them.

Owns the listening socket, the selector and deadlines; frames, sending and receiving are
`tcp_frames`, `tcp_sender` and `tcp_receiver`. Both ends prove that they know one secret before any
frame is believed (`tcp_auth`); bytes on the way are not encrypted.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from typing import TypeAlias

from pdtrace.clock import SYSTEM_CLOCK, Clock
from server.errors import StartError
from server.kv.pool import PoolDescriptor
from server.kv.transfer.base import (
    Drained,
    Failed,
    PageCopy,
    Reason,
    TransferError,
    TransferEvent,
)
from server.kv.transfer.pools import PoolTable, check_pages, check_pair
from server.kv.transfer.tcp_frames import FrameError, parse_address
from server.kv.transfer.tcp_receiver import Receiver, Stranger
from server.kv.transfer.tcp_sender import Sender, outgoing
from server.kv.transfer.tombstones import Tombstones
from server.kv.transfer.wakeup import Wakeup
from server.wire.messages import PoolRef

CONNECT_TIMEOUT_S = 5.0
COPY_TIMEOUT_S = 30.0
MAX_RECEIVERS = 256
MAX_STRANGERS = 32
"""Connections whose peer has proven nothing yet; the oldest makes room for one more."""
GREETING_TIMEOUT_S = 5.0
NS_PER_S = 1_000_000_000

_Endpoint: TypeAlias = Sender | Receiver

_logger = logging.getLogger(__name__)


class TcpTransfer:
    """Sends copies to other hosts' transfer processes and receives theirs.

    listen             host:port to receive at; port 0 lets the system choose
    secret             what peers must know, 32 bytes (`server.kv.transfer.secret`)
    copy_timeout_s     from `submit` to the receiver's confirmation; also how long a peer may take
                       to send one copy
    connect_timeout_s  from `submit`, for the first copy of a connection, greeting included

    Raises StartError when it cannot listen.
    """

    def __init__(
        self,
        listen: str,
        *,
        secret: bytes,
        copy_timeout_s: float = COPY_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._listener = _listen(listen)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._secret = secret
        self.num_refused = 0
        """Connections closed because their peer did not prove that it knows the secret."""
        self._monotonic_ns = clock.monotonic_ns
        self._copy_timeout_ns = round(copy_timeout_s * NS_PER_S)
        self._connect_timeout_ns = round(connect_timeout_s * NS_PER_S)
        self._pools = PoolTable()
        self._cancelled = Tombstones()
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[Receiver, None] = {}  # in order of arrival
        self._unfinished: set[str] = set()
        self._events: deque[TransferEvent] = deque()
        self._stopping = False
        self._num_received = 0  # on connections that are closed
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._closed = False

    @property
    def num_connections(self) -> int:
        """Connections opened to other hosts since the start."""
        return sum(sender.connections for sender in self._senders.values())

    def register(self, ref: PoolRef, pool: PoolDescriptor) -> None:
        self._pools.register(ref, pool)

    def submit(self, copy: PageCopy) -> None:
        try:
            self._submit(copy)
        except TransferError as error:
            self._events.append(_failed(copy, error))

    def cancel(self, handoff_id: str) -> None:
        self._cancelled.add(handoff_id)
        self._unfinished.discard(handoff_id)
        for sender in self._senders.values():
            sender.cancel(handoff_id)
        for receiver in self._receivers:
            receiver.cancel(handoff_id)
        self._events.append(Drained(handoff_id=handoff_id))

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        for sender in self._senders.values():
            self._open(sender)
        for key, _ in self._selector.select(self._wait_s(timeout_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakeup:
                self._wakeup.clear()
            elif isinstance(key.data, Sender):
                self._turn_of_sender(key.data)
            else:
                self._turn_of_receiver(key.data)
        self._expire()
        events = list(self._events)
        self._events.clear()
        for event in events:
            if not isinstance(event, Drained):
                self._unfinished.discard(event.handoff_id)
        return events

    def stop_accepting(self) -> None:
        self._stopping = True
        for receiver in self._receivers:
            receiver.stop_accepting()

    @property
    def num_incoming(self) -> int:
        return sum(receiver.is_busy for receiver in self._receivers)

    @property
    def num_received(self) -> int:
        return self._num_received + sum(receiver.num_answered for receiver in self._receivers)

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for sender in self._senders.values():
            sender.disconnect()
        for receiver in self._receivers:
            receiver.connection.close()
        self._senders.clear()
        self._receivers.clear()
        self._listener.close()
        self._selector.close()
        self._wakeup.close()
        self._pools.close()

    # -- sending ------------------------------------------------------------------------------

    def _submit(self, copy: PageCopy) -> None:
        if copy.handoff_id in self._cancelled:
            raise TransferError(Reason.CANCELLED, f"handoff {copy.handoff_id} is cancelled here")
        if copy.handoff_id in self._unfinished:
            raise TransferError(
                Reason.INTERNAL, f"handoff {copy.handoff_id} has an unfinished copy"
            )
        if copy.address is None:
            raise TransferError(
                Reason.NO_ROUTE, "the destination host has no transfer address, TCP needs one"
            )
        source = self._pools.get(copy.source)
        check_pair(copy.source_pages, copy.destination_pages)
        check_pages(copy.source_pages, source)
        now_ns = self._monotonic_ns()
        item = outgoing(
            copy,
            source,
            deadline_ns=now_ns + self._copy_timeout_ns,
            connect_by_ns=now_ns + self._connect_timeout_ns,
        )
        sender = self._senders.get(copy.address)
        if sender is None:
            sender = self._senders[copy.address] = self._make_sender(copy.address)
        self._unfinished.add(copy.handoff_id)
        sender.submit(item)
        self._select_for(sender)

    def _make_sender(self, address: str) -> Sender:
        return Sender(address, secret=self._secret, monotonic_ns=self._monotonic_ns)

    def _open(self, sender: Sender) -> None:
        try:
            sender.open()
        except TransferError as error:
            self._drop_sender(sender, error)
        else:
            self._select_for(sender)

    def _turn_of_sender(self, sender: Sender) -> None:
        try:
            self._advance_sender(sender)
        except Exception as error:  # it ends the copy on this connection, and no other
            _logger.exception("copy to %s failed", sender.address)
            self._drop_sender(sender, TransferError.of(error))

    def _advance_sender(self, sender: Sender) -> None:
        try:
            sender.advance()
        except TransferError as error:
            self._drop_sender(sender, error)
        else:
            self._select_for(sender)
            self._take_events(sender)

    def _drop_sender(self, sender: Sender, error: TransferError) -> None:
        if sender.num_waiting:
            _logger.warning("copy to %s failed: %s", sender.address, error)
        self._unregister(sender.connection)
        sender.drop(error)
        self._take_events(sender)

    def _take_events(self, sender: Sender) -> None:
        self._events += sender.events
        sender.events.clear()

    # -- receiving ----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return  # it is gone again, or descriptors are scarce: the peer will see a timeout
        strangers = [receiver for receiver in self._receivers if not receiver.authenticated]
        if len(strangers) >= MAX_STRANGERS:
            self._refuse(strangers[0], "too many have not said who they are")
        if len(self._receivers) >= MAX_RECEIVERS:
            _logger.warning("connection from %s refused: %d are open", peer, MAX_RECEIVERS)
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        receiver = Receiver(
            connection,
            secret=self._secret,
            pools=self._pools,
            cancelled=self._cancelled,
            monotonic_ns=self._monotonic_ns,
        )
        if self._stopping:
            receiver.stop_accepting()
        self._receivers[receiver] = None
        self._select_for(receiver)

    def _turn_of_receiver(self, receiver: Receiver) -> None:
        try:
            self._advance_receiver(receiver)
        except Exception:  # its sender sees the connection break
            _logger.exception("incoming copy failed")
            self._drop_receiver(receiver)

    def _advance_receiver(self, receiver: Receiver) -> None:
        try:
            alive = receiver.advance()
        except Stranger as error:
            self._refuse(receiver, str(error))
            return
        except (FrameError, OSError) as error:
            if not receiver.authenticated:
                self._refuse(receiver, str(error))
                return
            _logger.warning("incoming copy given up: %s", error)
            alive = False
        if alive:
            self._select_for(receiver)
        else:
            self._drop_receiver(receiver)

    def _drop_receiver(self, receiver: Receiver) -> None:
        self._unregister(receiver.connection)
        receiver.connection.close()
        if receiver in self._receivers:
            del self._receivers[receiver]
            self._num_received += receiver.num_answered

    def _refuse(self, receiver: Receiver, why: str) -> None:
        """Close the connection of a stranger. One line of log for many: anybody may connect."""
        self.num_refused += 1
        if self.num_refused.bit_count() == 1:
            _logger.warning("connection refused (%d so far): %s", self.num_refused, why)
        self._drop_receiver(receiver)

    # -- waiting ------------------------------------------------------------------------------

    def _select_for(self, endpoint: _Endpoint) -> None:
        connection = endpoint.connection
        if connection is None:
            return
        if isinstance(endpoint, Sender):
            # Always readable interest: a peer that closes an idle connection is noticed.
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if endpoint.wants_write else 0)
        else:
            events = selectors.EVENT_WRITE if endpoint.wants_write else selectors.EVENT_READ
        known = self._selector.get_map().get(connection)
        if known is None:
            self._selector.register(connection, events, endpoint)
        elif known.events != events:
            self._selector.modify(connection, events, endpoint)

    def _unregister(self, connection: socket.socket | None) -> None:
        if connection is not None and connection in self._selector.get_map():
            self._selector.unregister(connection)

    def _wait_s(self, timeout_s: float) -> float:
        if self._events:
            return 0.0
        deadlines = [sender.next_deadline_ns for sender in self._senders.values()]
        deadlines += [self._give_up_ns(receiver) for receiver in self._receivers]
        first_ns = min((at_ns for at_ns in deadlines if at_ns is not None), default=None)
        if first_ns is None:
            return max(0.0, timeout_s)
        return max(0.0, min(timeout_s, (first_ns - self._monotonic_ns()) / NS_PER_S))

    def _expire(self) -> None:
        now_ns = self._monotonic_ns()
        for sender in self._senders.values():
            error = sender.expire(now_ns)
            if error is not None:
                self._drop_sender(sender, error)
        for receiver in list(self._receivers):
            give_up_ns = self._give_up_ns(receiver)
            if give_up_ns is None or now_ns < give_up_ns:
                continue
            if receiver.authenticated:
                _logger.warning("incoming copy given up: it took too long")
                self._drop_receiver(receiver)
            else:
                self._refuse(receiver, "the peer does not say who it is")

    def _give_up_ns(self, receiver: Receiver) -> int | None:
        if receiver.started_ns is None:
            return None
        limit_ns = self._copy_timeout_ns
        if not receiver.authenticated:
            limit_ns = min(limit_ns, round(GREETING_TIMEOUT_S * NS_PER_S))
        return receiver.started_ns + limit_ns


def _listen(address: str) -> socket.socket:
    try:
        host, port = parse_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=64)
    except (ValueError, OSError) as error:
        raise StartError(f"cannot receive KV at {address!r}: {error}") from error
    listener.setblocking(False)
    return listener


def _failed(copy: PageCopy, error: TransferError) -> Failed:
    # Nothing of it was sent.
    return Failed(
        handoff_id=copy.handoff_id,
        index=copy.index,
        reason=error.reason,
        message=str(error),
        settled=True,
    )
