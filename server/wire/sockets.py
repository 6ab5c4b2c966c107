"""Typed messages over ZeroMQ: inboxes that stamp arrival, outboxes that never block.

Owns sockets, their limits and their threads; knows nothing of what a message means. With
`server.kv.transfer` the only importer of zmq. Sockets bind where the endpoint says: ipc paths from
`server.wire.endpoints`, loopback TCP, or with keys (`server.wire.curve`) any TCP. Where there are
keys, all TCP is encrypted and only known peers get through; without, no socket leaves the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdtrace.clock import SYSTEM_CLOCK, Clock
from server.errors import StartError
from server.log_fields import logged
from server.wire.arrivals import Arrivals
from server.wire.curve import (
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    CurveKeys,
    endpoint_refusal,
    is_networked,
    zap_answer,
)
from server.wire.endpoints import clear_stale_socket, remove_socket, socket_inode
from server.wire.messages import MAX_MESSAGE_BYTES, AnyMessage, WireError, decode, encode

INBOX_MESSAGES = 10_000
OUTBOX_MESSAGES = 1_000
OUTBOX_UNCONNECTED = 64
"""Sockets of an outbox at whose other end nobody is, of about four descriptors each."""
REFUSED_ENDPOINTS = 256
"""Endpoints of which an outbox remembers how many messages it refused."""
LINGER_S = 0.2
_POLL_MS = 100  # how long a close waits for the I/O thread at most
_FULL_PAUSE_S = 0.005
_LOG_EVERY_S = 10.0
_MESSAGES_PER_TURN = 1_000  # then peers that want in are answered
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """A message and the `CLOCK_MONOTONIC` instant at which it came out of the socket.

    The instant is taken by the I/O thread: time that a message then waits for its reader counts
    as the reader's, not as the hop's.
    """

    message: AnyMessage
    arrived_ns: int


@dataclass(slots=True)
class InboxCounters:
    """What an inbox has seen. `malformed` frames were dropped; `held_back` times it was full;
    `denied` handshakes failed: no key, an unknown one, or one for another inbox."""

    received: int = 0
    malformed: int = 0
    held_back: int = 0
    denied: int = 0


class _Receiver:
    """PULL socket and the thread that reads, stamps and decodes; `deliver` gets each message.

    While `num_waiting()` is at the limit nothing is read, so that the peers' queues fill and
    their sends fail: memory stays bounded and the loss is seen by those who can act on it.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        deliver: Callable[[Received], None],
        num_waiting: Callable[[], int],
        max_messages: int,
        clock: Clock,
        keys: CurveKeys | None,
    ) -> None:
        refusal = endpoint_refusal(endpoint, keys)
        if refusal is not None:
            raise StartError(f"will not listen: {refusal}")
        clear_stale_socket(endpoint)
        self.counters = InboxCounters()
        self._deliver = deliver
        self._num_waiting = num_waiting
        self._max_messages = max_messages
        self._now_ns = clock.monotonic_ns
        self._last_log_s = -_LOG_EVERY_S
        self._last_denied_log_s = -_LOG_EVERY_S
        self._known = frozenset[bytes]() if keys is None else keys.known
        self._zap: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._stopping = threading.Event()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set(zmq.RCVHWM, OUTBOX_MESSAGES)
        try:
            if keys is not None and is_networked(endpoint):
                self._guard(keys)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartError(f"cannot listen at {endpoint}: {error.strerror}") from error
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._inode = socket_inode(self.endpoint)
        self._thread = threading.Thread(target=self._run, name="wire-inbox", daemon=True)
        self._thread.start()

    def _guard(self, keys: CurveKeys) -> None:
        """Let in only who proves to have one of the known keys."""
        self._zap = self._context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)  # must be there before the socket that asks it
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILED)
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, keys.inbox.secret)
        self._socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)

    def close(self) -> None:
        """Stop the thread and unbind. Idempotent; messages not read yet are dropped."""
        self._stopping.set()
        self._thread.join()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        # ZeroMQ leaves the file behind. While the socket is open nobody else can have bound it.
        remove_socket(self.endpoint, self._inode)
        self._inode = None
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for guard in (self._zap, self._monitor):
            if guard is not None:
                poller.register(guard, zmq.POLLIN)
        while not self._stopping.is_set():
            if not poller.poll(_POLL_MS):
                continue
            try:
                self._answer_zap()
                self._count_denied()
                self._read_all()
            except Exception:  # a thread that died would look like a silent network
                _logger.exception("inbox %s failed to read; it goes on", self.endpoint)
                self._stopping.wait(_FULL_PAUSE_S)

    def _answer_zap(self) -> None:
        while self._zap is not None and self._zap.poll(0):
            allowed, reply = zap_answer(self._zap.recv_multipart(), self._known)
            self._zap.send_multipart(reply)
            if not allowed:
                self._deny("its key is not known here")

    def _count_denied(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            frames: list[Any] = self._monitor.recv_multipart()
            # Refused by us: counted when that was answered.
            if parse_monitor_message(frames)["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._deny("it has no key, or one for another server")

    def _deny(self, why: str) -> None:
        self.counters.denied += 1
        now_s = time.monotonic()
        if now_s - self._last_denied_log_s >= _LOG_EVERY_S:
            self._last_denied_log_s = now_s
            _logger.warning(
                "inbox %s let a peer not in (%d so far): %s",
                self.endpoint,
                self.counters.denied,
                why,
            )

    def _read_all(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if self._stopping.is_set():
                return
            if self._num_waiting() >= self._max_messages:
                self.counters.held_back += 1
                self._stopping.wait(_FULL_PAUSE_S)
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            arrived_ns = self._now_ns()
            try:
                if len(frames) != 1:
                    raise WireError(f"message of {len(frames)} frames, expected 1")
                message = decode(frames[0])
            except WireError as error:
                self.counters.malformed += 1
                self._complain(error)
                continue
            self.counters.received += 1
            self._deliver(Received(message, arrived_ns))

    def _complain(self, error: WireError) -> None:
        now_s = time.monotonic()
        if now_s - self._last_log_s >= _LOG_EVERY_S:
            self._last_log_s = now_s
            _logger.warning(
                "inbox %s dropped a frame (%d so far): %s",
                self.endpoint,
                self.counters.malformed,
                error,
            )


class Inbox:
    """Messages for a synchronous loop, in arrival order per sender.

    on_arrival  called by the I/O thread after each message, for a loop that waits for other
                things too
    clock       stamps each message as it comes out of the socket
    keys        who may connect over TCP; None: nobody from another host

    Raises StartError when `endpoint` cannot be bound: in use, not a socket, no such directory, open
    to other hosts without keys.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_messages: int = INBOX_MESSAGES,
        on_arrival: Callable[[], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        keys: CurveKeys | None = None,
    ) -> None:
        self._arrivals = Arrivals[Received]()
        self._on_arrival = on_arrival
        self._receiver = _Receiver(
            endpoint,
            deliver=self._arrivals.put if on_arrival is None else self._deliver,
            num_waiting=self._arrivals.__len__,
            max_messages=max_messages,
            clock=clock,
            keys=keys,
        )

    @property
    def endpoint(self) -> str:
        """The bound endpoint, with the port the system chose for `tcp://127.0.0.1:*`."""
        return self._receiver.endpoint

    @property
    def counters(self) -> InboxCounters:
        return self._receiver.counters

    @property
    def num_waiting(self) -> int:
        return len(self._arrivals)

    def get(self, timeout_s: float) -> Received | None:
        """The next message, waiting up to `timeout_s` for it; None when none came, or at `wake`."""
        return self._arrivals.get(timeout_s)

    def drain(self) -> list[Received]:
        """All messages that wait at this instant, without waiting for more."""
        return self._arrivals.drain()

    def wake(self) -> None:
        """End the present `get`, or the next one that would wait. For signal handlers too."""
        self._arrivals.wake()

    def close(self) -> None:
        """Stop the I/O thread and unbind. Idempotent."""
        self._receiver.close()

    def _deliver(self, received: Received) -> None:
        self._arrivals.put(received)
        if self._on_arrival is not None:
            self._on_arrival()


class AsyncInbox:
    """Messages for a coroutine of the event loop in which the inbox was made."""

    def __init__(
        self,
        endpoint: str,
        *,
        max_messages: int = INBOX_MESSAGES,
        keys: CurveKeys | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Received] = deque()
        self._arrived = asyncio.Event()
        self._wake_scheduled = False
        self._receiver = _Receiver(
            endpoint,
            deliver=self._deliver,
            num_waiting=self._waiting.__len__,
            max_messages=max_messages,
            clock=SYSTEM_CLOCK,
            keys=keys,
        )

    @property
    def endpoint(self) -> str:
        """The bound endpoint, with the port the system chose for `tcp://127.0.0.1:*`."""
        return self._receiver.endpoint

    @property
    def counters(self) -> InboxCounters:
        return self._receiver.counters

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def receive(self) -> list[Received]:
        """All messages that wait, at least one: returns when there is one. For one reader."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self.drain()

    def drain(self) -> list[Received]:
        """All messages that wait at this instant."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def close(self) -> None:
        """Stop the I/O thread (up to 100 ms) and unbind. Idempotent."""
        self._receiver.close()

    def _deliver(self, received: Received) -> None:
        self._waiting.append(received)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Cleared before the event is set: a message appended from here on schedules another wake.
        self._wake_scheduled = False
        self._arrived.set()


@dataclass(slots=True, eq=False)
class _Peer:
    """One PUSH socket. `connected` is None until the first connection succeeds or is refused.

    denied   whether the last one failed because the keys of both ends do not fit
    """

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connected: bool | None = None
    denied: bool = False
    sent: int = 0


@dataclass(slots=True)
class OutboxCounters:
    """What an outbox did, and the messages it refused per endpoint, of the REFUSED_ENDPOINTS that
    were refused latest: peers come and go, each at an endpoint of its own."""

    sent: int = 0
    refused: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])

    def refuse(self, endpoint: str) -> int:
        """Count one; how many there were to `endpoint`."""
        count = self.refused[endpoint] = self.refused.get(endpoint, 0) + 1
        self.refused.move_to_end(endpoint)
        while len(self.refused) > REFUSED_ENDPOINTS:
            self.refused.popitem(last=False)
        return count


class Outbox:
    """Sends messages to any endpoint without ever blocking. Belongs to the thread that uses it.

    A socket per endpoint opens on first use; messages queue while the first connection is being
    made. `send` is False, and the message is dropped and counted, when the peer's queue is full
    or the connection is lost and not yet made again, when the message is too large, and when
    `endpoint` is none, or on another host and there are no keys. True means queued, not delivered:
    a peer may die with messages in its queue, which deadlines must cover.

    Peers come and go, each at an endpoint of its own: with OUTBOX_UNCONNECTED sockets that are not
    connected, the one that was not used for longest is closed before another is opened.
    """

    def __init__(
        self,
        *,
        linger_s: float = LINGER_S,
        max_messages: int = OUTBOX_MESSAGES,
        keys: CurveKeys | None = None,
    ) -> None:
        self._keys = keys
        self.counters = OutboxCounters()
        self._linger_ms = round(linger_s * 1000)
        self._max_messages = max_messages
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by last use
        self._owner: int | None = None

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        """Queue `message` for `endpoint`. Raises RuntimeError from a thread other than the first
        user's."""
        self._require_owner()
        try:
            frame = encode(message)
        except WireError as error:  # a peer's words, and a little more
            return self._refuse(endpoint, str(error))
        peer = self._peers.get(endpoint)
        if peer is None:
            refusal = endpoint_refusal(endpoint, self._keys)
            if refusal is not None:
                return self._refuse(endpoint, f"will not connect: {refusal}")
            self._make_room()
            try:
                peer = self._open(endpoint)
            except (zmq.ZMQError, UnicodeError) as error:  # peers name endpoints as they like
                return self._refuse(endpoint, f"it cannot be connected to: {_reason(error)}")
            self._peers[endpoint] = peer
        else:
            self._peers.move_to_end(endpoint)
        _follow_connection(peer)
        if peer.connected is False:
            return self._refuse(endpoint)
        try:
            peer.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return self._refuse(endpoint)
        peer.sent += 1
        self.counters.sent += 1
        return True

    def is_lost(self, endpoint: str) -> bool:
        """Whether the connection to `endpoint` was made, broke, and is not made again yet."""
        self._require_owner()
        peer = self._peers.get(endpoint)
        if peer is None:
            return False
        _follow_connection(peer)
        return peer.connected is False

    def forget(self, endpoint: str) -> None:
        """Drop what is queued for `endpoint` and close its socket; a later send opens another."""
        self._require_owner()
        peer = self._peers.pop(endpoint, None)
        if peer is not None:
            _close_peer(peer, linger_ms=0)
        self.counters.refused.pop(endpoint, None)

    def close(self) -> None:
        """Give queued messages `linger_s` to leave, then close. Idempotent."""
        until_s = time.monotonic() + self._linger_ms / 1000
        for endpoint, peer in self._peers.items():
            if peer.sent:
                _await_connection(peer, until_s)
            if peer.connected is None and peer.sent:
                _logger.warning(
                    "%d messages for %s were not delivered: nobody has answered there",
                    peer.sent,
                    logged(endpoint),
                )
            _close_peer(peer, linger_ms=self._linger_ms)
        self._peers.clear()
        self._context.term()

    def _open(self, endpoint: str) -> _Peer:
        push = self._context.socket(zmq.PUSH)
        push.set(zmq.LINGER, self._linger_ms)
        push.set(zmq.SNDHWM, self._max_messages)
        push.set(zmq.RECONNECT_IVL, 20)
        push.set(zmq.RECONNECT_IVL_MAX, 100)
        push.set(zmq.TCP_KEEPALIVE, 1)
        push.set(zmq.TCP_KEEPALIVE_IDLE, 10)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        if self._keys is not None and is_networked(endpoint):
            events |= _HANDSHAKE_FAILED
            push.set(zmq.CURVE_SERVERKEY, self._keys.inbox.public)
            push.set(zmq.CURVE_PUBLICKEY, self._keys.process.public)
            push.set(zmq.CURVE_SECRETKEY, self._keys.process.secret)
        peer = _Peer(push, push.get_monitor_socket(events))
        try:
            push.connect(endpoint)
        except BaseException:
            _close_peer(peer, linger_ms=0)
            raise
        return peer

    def _make_room(self) -> None:
        """Forget who is not there, so that descriptors cannot run out."""
        if len(self._peers) < OUTBOX_UNCONNECTED:
            return
        for peer in self._peers.values():
            _follow_connection(peer)
        absent = [endpoint for endpoint, peer in self._peers.items() if not peer.connected]
        if len(absent) >= OUTBOX_UNCONNECTED:
            _logger.info("%s is forgotten: it is not connected and not used", logged(absent[0]))
            self.forget(absent[0])

    def _refuse(self, endpoint: str, why: str = "") -> bool:
        num_refused = self.counters.refuse(endpoint)
        if num_refused == 1:
            peer = self._peers.get(endpoint)
            # A lost peer is everyday business (a stop, a restart); all else is not.
            named = logged(endpoint)
            if why or peer is None:
                _logger.error("message for %s refused: %s", named, why)
            elif peer.denied:
                _logger.error("message for %s refused: its keys and ours do not fit", named)
            elif peer.connected is False:
                _logger.info("message for %s refused: the connection is lost", named)
            else:
                _logger.warning("message for %s refused: its queue is full", named)
        return False

    def _require_owner(self) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        elif self._owner != thread:
            raise RuntimeError("an Outbox belongs to one thread: ZeroMQ sockets cannot be shared")


def _reason(error: zmq.ZMQError | UnicodeError) -> str:
    return error.strerror or "it fails" if isinstance(error, zmq.ZMQError) else "it is no text"


def _follow_connection(peer: _Peer) -> None:
    while True:
        try:
            frames: list[Any] = peer.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        event = parse_monitor_message(frames)["event"]
        peer.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event != zmq.EVENT_DISCONNECTED:
            peer.denied = not peer.connected


def _await_connection(peer: _Peer, until_s: float) -> None:
    """Learn whether a peer was ever reached; one that has just been written to may be still."""
    _follow_connection(peer)
    if peer.connected is None:
        peer.monitor.poll(max(0, round((until_s - time.monotonic()) * 1000)))
        _follow_connection(peer)


def _close_peer(peer: _Peer, *, linger_ms: int) -> None:
    peer.socket.disable_monitor()
    peer.monitor.close(linger=0)
    peer.socket.close(linger=linger_ms)
