"""The requests that are open at the gateway, and when none is left.

Owns the set; what ends a request is `pipeline`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from server.gateway.call import Call


class OpenCalls:
    """Lives on one event loop."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        """Those that are open now; some may end while the caller goes through them."""
        return iter(list(self._calls))

    def add(self, call: Call) -> None:
        self._calls.add(call)
        self._none.clear()

    def discard(self, call: Call) -> None:
        """It is over; no effect if it was before."""
        self._calls.discard(call)
        if not self._calls:
            self._none.set()

    async def ended(self, timeout_s: float) -> bool:
        """Wait until none is open. False when `timeout_s` passes before."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none.wait()
        except TimeoutError:
            return False
        return True
