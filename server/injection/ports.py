"""The inboxes and outboxes of a process, with faults between them and the loop.

Owns what passes through them; which message is hit is decided by the injector, what becomes of it
by `server.injection.lane`. InjectFaults is answered here and never seen by the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from server.injection.fault import Direction
from server.injection.injector import Injector
from server.injection.lane import Lane
from server.wire.messages import AnyMessage, InjectFaults
from server.wire.sockets import Received

IDLE_WAIT_S = 0.5


class Source(Protocol):
    """`server.wire.sockets.Inbox`."""

    def get(self, timeout_s: float) -> Received | None: ...

    def drain(self) -> list[Received]: ...


class AsyncSource(Protocol):
    """`server.wire.sockets.AsyncInbox`."""

    def receive(self) -> Awaitable[list[Received]]: ...


class Sink(Protocol):
    """What needs no more of `server.wire.sockets.Outbox` than sending."""

    def send(self, endpoint: str, message: AnyMessage) -> bool: ...


class FaultyOutbox:
    """Sends through `outbox`, for one thread. A message that is lost or late counts as sent.

    What is held goes on with `turn`, or with the next message sent. An outbox of the loop's own
    thread is to be watched by the injector.
    """

    def __init__(self, outbox: Sink, injector: Injector) -> None:
        self._lane: Lane[tuple[str, AnyMessage]] = Lane()
        self._outbox = outbox
        self._injector = injector

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        self.turn()
        fault = self._injector.message(Direction.SENT, message)
        on = self._lane.route((endpoint, message), endpoint, fault, self._injector.now_ns())
        sent = [self._outbox.send(*item) for item in on]
        return sent[0] if sent else True

    @property
    def next_due_ns(self) -> int | None:
        return self._lane.next_due_ns

    def turn(self) -> None:
        if self._lane.num_held:
            for item in self._lane.release(self._injector.now_ns()):
                self._outbox.send(*item)

    def clear(self) -> None:
        self._lane.release_all()


class FaultyInbox:
    """Reads from `inbox`. `stamp_ns` is the clock on which messages arrive."""

    def __init__(self, inbox: Source, injector: Injector, *, stamp_ns: Callable[[], int]) -> None:
        self._inbox = inbox
        self._way = _Way(injector, stamp_ns)
        self._injector = injector

    def get(self, timeout_s: float) -> Received | None:
        """The next message; None sooner than `timeout_s` where a message was lost or held."""
        way = self._way
        way.turn()
        wait_s = self._injector.bound_s(timeout_s)
        while not way.ready:
            received = self._inbox.get(wait_s)
            wait_s = 0.0
            if received is not None:
                way.take(received)
            way.turn()
            if received is None:
                break
        return way.ready.pop(0) if way.ready else None

    def drain(self) -> list[Received]:
        for received in self._inbox.drain():
            self._way.take(received)
        self._way.turn()
        return self._way.pop_ready()


class AsyncFaultyInbox:
    """The same for a coroutine, whose going round is the loop's turn."""

    def __init__(self, inbox: AsyncSource, injector: Injector) -> None:
        self._inbox = inbox
        self._way = _Way(injector, time.monotonic_ns)
        self._injector = injector

    async def receive(self) -> list[Received]:
        """All messages that wait, at least one."""
        way = self._way
        while True:
            self._injector.turn()
            if way.ready:
                return way.pop_ready()
            try:
                async with asyncio.timeout(self._injector.bound_s(IDLE_WAIT_S)):
                    arrived = await self._inbox.receive()
            except TimeoutError:
                continue
            for received in arrived:
                way.take(received)


class _Way:
    """From a socket to the loop. `ready`: what the loop may have, in order."""

    def __init__(self, injector: Injector, stamp_ns: Callable[[], int]) -> None:
        self.ready: list[Received] = []
        self._lane: Lane[Received] = Lane()
        self._injector = injector
        self._stamp_ns = stamp_ns
        injector.watch(self)

    @property
    def next_due_ns(self) -> int | None:
        return self._lane.next_due_ns

    def take(self, received: Received) -> None:
        message = received.message
        if isinstance(message, InjectFaults):
            self._injector.obey(message)
            return
        fault = self._injector.message(Direction.RECEIVED, message)
        for item in self._lane.route(received, "", fault, self._injector.now_ns()):
            self.ready.append(item if item is received else self._late(item))

    def turn(self) -> None:
        if self._lane.num_held:
            self.ready += map(self._late, self._lane.release(self._injector.now_ns()))

    def _late(self, received: Received) -> Received:
        """It arrives when it is let go, as if it had been under way for as long."""
        return Received(received.message, self._stamp_ns())

    def clear(self) -> None:
        self._lane.release_all()

    def pop_ready(self) -> list[Received]:
        ready, self.ready = self.ready, []
        return ready
