"""Transfer between two pools of one host: both are mapped, a copy is a memory copy.

Owns the order and slicing of copies; knows nothing of marks or of who waits for them.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from pdtrace.clock import SYSTEM_CLOCK, Clock
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
from server.kv.transfer.pools import MappedPool, PoolTable, check_layouts, check_pages, check_pair
from server.kv.transfer.runs import Run, page_runs
from server.kv.transfer.tombstones import Tombstones
from server.kv.transfer.wakeup import Wakeup
from server.wire.messages import PoolRef

STEP_BYTES = 8 * 1024 * 1024  # per call of poll, so that messages are read in between


@dataclass(slots=True)
class _Active:
    """A copy under way. `runs` are those still to be done, of `remaining` bytes."""

    copy: PageCopy
    source: MappedPool
    destination: MappedPool
    runs: Iterator[Run]
    num_bytes: int
    remaining: int


class ShmTransfer:
    """Copies one job after the other, in order of submission, a bounded step per `poll`."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._pools = PoolTable()
        self._active: OrderedDict[str, _Active] = OrderedDict()
        self._events: deque[TransferEvent] = deque()
        self._cancelled = Tombstones()
        self._wakeup = Wakeup()
        self._closed = False

    def register(self, ref: PoolRef, pool: PoolDescriptor) -> None:
        self._pools.register(ref, pool)

    def submit(self, copy: PageCopy) -> None:
        try:
            self._active[copy.handoff_id] = self._prepare(copy)
        except TransferError as error:
            self._events.append(_failed(copy, error))

    def cancel(self, handoff_id: str) -> None:
        self._cancelled.add(handoff_id)
        self._active.pop(handoff_id, None)
        self._events.append(Drained(handoff_id=handoff_id))

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        if self._active:
            # A wake-up stays set meanwhile; the next wait without copies returns at once for it.
            self._advance()
        elif not self._events:
            self._wakeup.wait(timeout_s)
        events = list(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._active.clear()
            self._events.clear()
            self._pools.close()
            self._wakeup.close()

    def _prepare(self, copy: PageCopy) -> _Active:
        if copy.handoff_id in self._cancelled:
            raise TransferError(Reason.CANCELLED, f"handoff {copy.handoff_id} is cancelled here")
        if copy.handoff_id in self._active:
            raise TransferError(
                Reason.INTERNAL, f"handoff {copy.handoff_id} has an unfinished copy"
            )
        if copy.address is not None:
            raise TransferError(
                Reason.NO_ROUTE,
                f"the destination is at {copy.address}, this transfer copies within a host",
            )
        source, destination = self._pools.get(copy.source), self._pools.get(copy.destination)
        check_layouts(source.layout, destination.layout)
        check_pair(copy.source_pages, copy.destination_pages)
        check_pages(copy.source_pages, source)
        check_pages(copy.destination_pages, destination)
        page_bytes = source.layout.page_bytes
        return _Active(
            copy=copy,
            source=source,
            destination=destination,
            runs=page_runs(
                copy.source_pages, copy.destination_pages, page_bytes, max_bytes=STEP_BYTES
            ),
            num_bytes=len(copy.source_pages) * page_bytes,
            remaining=len(copy.source_pages) * page_bytes,
        )

    def _advance(self) -> None:
        budget = STEP_BYTES
        while self._active and budget > 0:
            active = next(iter(self._active.values()))
            if active.source.replaced or active.destination.replaced:
                self._end(active, _failed(active.copy, _replaced(active)))
                continue
            budget -= _copy_runs(active, budget)
            if not active.remaining:
                self._end(
                    active,
                    Copied(
                        handoff_id=active.copy.handoff_id,
                        index=active.copy.index,
                        num_bytes=active.num_bytes,
                        finished_ns=self._clock.monotonic_ns(),
                    ),
                )

    def _end(self, active: _Active, event: TransferEvent) -> None:
        del self._active[active.copy.handoff_id]
        self._events.append(event)


def _copy_runs(active: _Active, budget: int) -> int:
    """Copy whole runs until `budget` bytes are used up or none is left; the bytes copied."""
    # memmove rather than slices of the mappings: it lets go of the interpreter lock, so that the
    # inbox's thread stamps arrivals in time. The pages were checked against both pools' sizes.
    memmove = ctypes.memmove
    destination, source = active.destination.address, active.source.address
    num_bytes = 0
    for from_offset, to_offset, run_bytes in active.runs:
        memmove(destination + to_offset, source + from_offset, run_bytes)
        num_bytes += run_bytes
        if num_bytes >= budget:
            break
    active.remaining -= num_bytes
    return num_bytes


def _replaced(active: _Active) -> TransferError:
    gone = active.source if active.source.replaced else active.destination
    return TransferError(
        Reason.POOL_REPLACED, f"{gone.ref.owner} restarted while its pages were copied"
    )


def _failed(copy: PageCopy, error: TransferError) -> Failed:
    # Copies run in the caller's thread: after a failure nothing can be written any more.
    return Failed(
        handoff_id=copy.handoff_id,
        index=copy.index,
        reason=error.reason,
        message=str(error),
        settled=True,
    )
