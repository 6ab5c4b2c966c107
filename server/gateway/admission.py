"""How many requests are worked on at once, and who waits for a place: first come, first served.

Owns the concurrency limit and the bounded queue before it; knows nothing of HTTP, workers or time.
Everything happens on one event loop, so nothing is locked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from pdtrace.recorder import MAX_BLOCKERS
from server.errors import IntegrityError, Overloaded

QUEUE_FULL = "queue_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """Where a waiting request stands.

    position   requests ahead of it in the queue
    limit      requests worked on at once
    blockers   request ids of the longest-running ones, at most MAX_BLOCKERS
    """

    position: int
    limit: int
    blockers: tuple[str, ...]


class Admission:
    """A FIFO semaphore whose waiters are told by a callback, keyed by handoff id.

    A request is, in this order: unknown, waiting (or at once) admitted, released. `release` works
    in each of these states, so that every way out of a request may call it. While it is on its way
    to the queue, `approaching` keeps room for it: who finds none is refused before any work.
    """

    def __init__(self, *, max_concurrency: int, max_queue: int) -> None:
        self._max_concurrency = max_concurrency
        self._max_queue = max_queue
        self._admitted: OrderedDict[str, str] = OrderedDict()  # key → request id, oldest first
        self._waiting: OrderedDict[str, tuple[str, Callable[[], None]]] = OrderedDict()
        self._approaching = 0

    @property
    def in_flight(self) -> int:
        """Requests admitted and not released."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def approaching(self) -> Generator[None]:
        """Keep room for a request that will `enter` right behind this block.

        Raises Overloaded (429) when there is none.
        """
        taken = len(self._admitted) + len(self._waiting) + self._approaching
        if taken >= self._max_concurrency + self._max_queue:
            raise self._full()
        self._approaching += 1
        try:
            yield
        finally:
            self._approaching -= 1

    def enter(
        self, key: str, request_id: str, on_admitted: Callable[[], None]
    ) -> QueuePlace | None:
        """Take a place, or wait for one: None, or where it stands in the queue.

        `on_admitted` is called later, once, and only if this returned a place in the queue.
        Raises Overloaded (429) when the queue is full.
        """
        if key in self._admitted or key in self._waiting:
            raise IntegrityError(f"{key} enters twice")
        if len(self._admitted) < self._max_concurrency:
            self._admitted[key] = request_id
            return None
        if len(self._waiting) >= self._max_queue:
            raise self._full()
        place = self._place(len(self._waiting), self._longest_running())
        self._waiting[key] = (request_id, on_admitted)
        return place

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{len(self._admitted)} requests are being served and {len(self._waiting)} wait: "
            "try again later.",
            status=429,
            code=QUEUE_FULL,
        )

    def places(self) -> Iterator[tuple[str, QueuePlace]]:
        """Where each waiting request stands, by key."""
        blockers = self._longest_running()
        for position, key in enumerate(self._waiting):
            yield key, self._place(position, blockers)

    def _place(self, position: int, blockers: tuple[str, ...]) -> QueuePlace:
        return QueuePlace(position=position, limit=self._max_concurrency, blockers=blockers)

    def _longest_running(self) -> tuple[str, ...]:
        return tuple(islice(self._admitted.values(), MAX_BLOCKERS))

    def release(self, key: str) -> bool:
        """Give a place back, or leave the queue, if it has either; whether it had a place."""
        self._waiting.pop(key, None)
        if self._admitted.pop(key, None) is None:
            return False
        while self._waiting and len(self._admitted) < self._max_concurrency:
            next_key, (request_id, on_admitted) = self._waiting.popitem(last=False)
            self._admitted[next_key] = request_id
            on_admitted()
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError when somebody waits although there is a place."""
        both = self._admitted.keys() & self._waiting.keys()
        idle = self._waiting and len(self._admitted) < self._max_concurrency
        if both or idle or len(self._admitted) > self._max_concurrency:
            raise IntegrityError(
                f"{len(self._admitted)} admitted of {self._max_concurrency}, "
                f"{len(self._waiting)} waiting, {sorted(both)} both"
            )
