"""A scripted transfer for unit tests: pools in this process's memory, ends as the script says.

Owns the double; nothing in production imports it. Pools are byte arrays of the descriptor's size,
whatever lies at its path.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pdtrace.clock import SYSTEM_CLOCK, Clock
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.kv.transfer.base import (
    Copied,
    Drained,
    Failed,
    PageCopy,
    Reason,
    TransferError,
    TransferEvent,
)
from server.kv.transfer.wakeup import Wakeup
from server.wire.messages import PoolRef


class Fate(Enum):
    """How a copy ends without delay."""

    COPY = "copy"
    LOSE = "lose"  # neither bytes nor an event, until it is cancelled
    SHORT = "short"  # the last page does not arrive, as the event says
    CORRUPT = "corrupt"  # the bytes arrive with one flipped, as the event says


@dataclass(frozen=True, slots=True)
class Delay:
    """Copy once `delay_s` of the clock have passed since `submit`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Fail without copying."""

    reason: Reason = Reason.PEER_LOST
    settled: bool = True


Script: TypeAlias = Callable[[PageCopy], Fate | Delay | Abort]


def copy_all(_copy: PageCopy) -> Fate:
    """The script of a transfer that works."""
    return Fate.COPY


class MemoryTransfer:
    """Serves as both ends. `script` decides about every copy when it is submitted.

    log   every call of submit and cancel, for tests' assertions
    """

    def __init__(self, script: Script = copy_all, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.script = script
        self.log: list[tuple[str, str, int | None]] = []
        self._clock = clock
        self._pools: dict[str, tuple[PoolRef, KvLayout, bytearray]] = {}
        self._active: OrderedDict[str, tuple[PageCopy, Fate | Delay | Abort, int]] = OrderedDict()
        self._cancelled: set[str] = set()
        self._events: deque[TransferEvent] = deque()
        self._wakeup = Wakeup()

    def memory(self, ref: PoolRef) -> bytearray:
        """The pool's bytes, to look at and to fill."""
        return self._find(ref)[1]

    def register(self, ref: PoolRef, pool: PoolDescriptor) -> None:
        known = self._pools.get(ref.owner)
        if known is None or known[0] != ref:
            self._pools[ref.owner] = (ref, pool.layout, bytearray(pool.num_bytes))

    def submit(self, copy: PageCopy) -> None:
        self.log.append(("submit", copy.handoff_id, copy.index))
        try:
            if copy.handoff_id in self._cancelled:
                raise TransferError(Reason.CANCELLED, f"handoff {copy.handoff_id} is cancelled")
            if copy.handoff_id in self._active:
                raise TransferError(
                    Reason.INTERNAL, f"handoff {copy.handoff_id} has an unfinished copy"
                )
            self._check(copy)
        except TransferError as error:
            self._fail(copy, error.reason, str(error))
            return
        submitted_ns = self._clock.monotonic_ns()
        self._active[copy.handoff_id] = (copy, self.script(copy), submitted_ns)

    def cancel(self, handoff_id: str) -> None:
        self.log.append(("cancel", handoff_id, None))
        self._cancelled.add(handoff_id)
        self._active.pop(handoff_id, None)
        self._events.append(Drained(handoff_id=handoff_id))

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        if not self._advance() and not self._events:
            self._wakeup.wait(timeout_s)
            self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def stop_accepting(self) -> None:
        """There are no other hosts."""

    @property
    def num_incoming(self) -> int:
        return 0

    @property
    def num_received(self) -> int:
        return 0

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._active.clear()
        self._events.clear()
        self._wakeup.close()

    def _find(self, ref: PoolRef) -> tuple[KvLayout, bytearray]:
        known = self._pools.get(ref.owner)
        if known is None:
            raise TransferError(Reason.UNKNOWN_POOL, f"no pool of {ref.owner} is registered")
        if known[0] != ref:
            raise TransferError(
                Reason.UNKNOWN_POOL,
                f"{ref.owner} is of incarnation {known[0].incarnation}, not {ref.incarnation}",
            )
        return known[1], known[2]

    def _check(self, copy: PageCopy) -> None:
        source_layout, source = self._find(copy.source)
        destination_layout, destination = self._find(copy.destination)
        if source_layout != destination_layout:
            raise TransferError(Reason.LAYOUT_MISMATCH, "the pools' layouts differ")
        if not copy.source_pages or len(copy.source_pages) != len(copy.destination_pages):
            raise TransferError(Reason.BAD_PAGES, "page lists are empty or of unequal length")
        for pages, memory in (
            (copy.source_pages, source),
            (copy.destination_pages, destination),
        ):
            num_pages = len(memory) // source_layout.page_bytes
            if len(set(pages)) != len(pages) or min(pages) < 0 or max(pages) >= num_pages:
                raise TransferError(Reason.BAD_PAGES, f"pages {list(pages)} of {num_pages}")

    def _advance(self) -> bool:
        """End what is due; whether anything was."""
        due = False
        for copy, fate, submitted_ns in list(self._active.values()):
            if fate is Fate.LOSE:
                continue
            if isinstance(fate, Delay):
                waited_ns = self._clock.monotonic_ns() - submitted_ns
                if waited_ns < fate.delay_s * 1e9:
                    continue
            due = True
            del self._active[copy.handoff_id]
            self._finish(copy, fate)
        return due

    def _finish(self, copy: PageCopy, fate: Fate | Delay | Abort) -> None:
        if isinstance(fate, Abort):
            self._fail(copy, fate.reason, "scripted abort", settled=fate.settled)
            return
        try:
            self._check(copy)
        except TransferError as error:  # the pool was replaced since `submit`
            self._fail(copy, Reason.POOL_REPLACED, str(error))
            return
        layout, source = self._find(copy.source)
        _, destination = self._find(copy.destination)
        pairs = list(zip(copy.source_pages, copy.destination_pages, strict=True))
        if fate is Fate.SHORT:
            pairs.pop()
        for from_page, to_page in pairs:
            destination[layout.page_range(to_page)] = source[layout.page_range(from_page)]
        if fate is Fate.CORRUPT:
            destination[layout.page_range(copy.destination_pages[0]).start] ^= 0xFF
            self._fail(copy, Reason.CHECKSUM_MISMATCH, "scripted corruption")
            return
        self._events.append(
            Copied(
                handoff_id=copy.handoff_id,
                index=copy.index,
                num_bytes=len(pairs) * layout.page_bytes,
                finished_ns=self._clock.monotonic_ns(),
            )
        )

    def _fail(self, copy: PageCopy, reason: Reason, message: str, *, settled: bool = True) -> None:
        self._events.append(
            Failed(
                handoff_id=copy.handoff_id,
                index=copy.index,
                reason=reason,
                message=message,
                settled=settled,
            )
        )
