"""Where one request's task waits: for tokens, for a place, for a worker, or to be told to stop.

Owns waiting; knows nothing of what the items mean. One task reads, anything on the same event loop
puts. A request waits for many things at once, and they all arrive here, so that no wait can miss
the client's leaving or a deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Mailbox(Generic[ItemT]):
    """Items in order of arrival, and at most one interruption, which ends every further wait."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: Exception | None = None

    @property
    def interruption(self) -> Exception | None:
        return self._interruption

    def put(self, item: ItemT) -> None:
        self._items.append(item)
        self._wake()

    def clear(self) -> None:
        """Forget the items that nobody has taken."""
        self._items.clear()

    def interrupt(self, reason: Exception) -> None:
        """Make the reader raise `reason` from its next wait on. The first reason counts."""
        if self._interruption is None:
            self._interruption = reason
            self._wake()

    async def take(self) -> list[ItemT]:
        """All items that are there, at least one. Raises an interruption even if there are some."""
        while not self._items or self._interruption is not None:
            if self._interruption is not None:
                raise self._interruption
            await self._wait()
        items = list(self._items)
        self._items.clear()
        return items

    async def pause(self, seconds: float) -> None:
        """Sleep, keeping items for later. Raises an interruption at once."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        timer = loop.call_at(end, self._wake)
        try:
            while loop.time() < end:
                if self._interruption is not None:
                    raise self._interruption
                await self._wait()
        finally:
            timer.cancel()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
