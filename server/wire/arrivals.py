"""Messages on their way from the thread that reads them to the loop that waits for them.

Owns the hand-over and the wait; knows nothing of sockets or of what a message means.

`queue.SimpleQueue` is no base for a loop that must go round without messages: a wait that is
interrupted by a signal, or by a wake-up for what has been taken already, goes on with the time that
is left, and where that is negative it goes on for ever (CPython 3.11). A worker that was told to
stop in the last moments of a wait never came to know, and one with a deadline due in microseconds
could miss it until the next message. A lock's own wait keeps to its time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """First in, first out, for one reader. `put` and `wake` may be called by any thread, `wake` by
    a signal handler too."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._news = threading.Lock()
        """Held while there is nothing to look for: who waits takes it, who has news lets it go."""
        self._news.acquire()
        self._woken = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._tell()

    def wake(self) -> None:
        """End the present `get` with None, or the next one that finds nothing."""
        self._woken = True
        self._tell()

    def get(self, timeout_s: float) -> T | None:
        """The next item; None when none came in `timeout_s`, or at `wake`."""
        if self._items:
            return self._items.popleft()
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            if self._woken or left_s <= 0:
                self._woken = False
                return None
            self._news.acquire(timeout=left_s)
            # The news may be old: of items that were taken by a `get` that did not wait.
            if self._items:
                return self._items.popleft()

    def drain(self) -> list[T]:
        """All items that are here at this instant."""
        return [self._items.popleft() for _ in range(len(self._items))]

    def _tell(self) -> None:
        if self._news.locked():
            try:
                self._news.release()
            except RuntimeError:  # another thread, or a handler within this call, has done it
                pass
