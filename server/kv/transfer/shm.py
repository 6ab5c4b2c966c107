"""Transfer between two pools of one host: both are mapped, a copy is a memory copy.

Owns the order and slicing of copies and their verification; knows nothing of marks or of who waits
for them. A copy moves in pieces. Each is compared with its source while it still lies in the
core's cache, so that a piece that arrived short or altered is never taken for KV (docs/adr/013).
"""

from __future__ import annotations

import logging
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
from server.kv.transfer.memory_ops import Move, first_difference, is_equal, move_bytes
from server.kv.transfer.pools import MappedPool, PoolTable, check_layouts, check_pages, check_pair
from server.kv.transfer.runs import Run, page_runs
from server.kv.transfer.tombstones import Tombstones
from server.kv.transfer.wakeup import Wakeup
from server.wire.messages import PoolRef

STEP_BYTES = 8 * 1024 * 1024  # per call of poll, so that messages are read in between
PIECE_BYTES = 128 * 1024  # with its source it fits a core's cache, where comparing costs least

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Active:
    """A copy under way. `runs` are those still to be done; `moved` of `num_bytes` are."""

    copy: PageCopy
    source: MappedPool
    destination: MappedPool
    runs: Iterator[Run]
    num_bytes: int
    moved: int = 0


class ShmTransfer:
    """Copies one job after the other, in order of submission, a bounded step per `poll`.

    verify   compare each piece with its source
    move     what copies a piece
    """

    def __init__(
        self, *, verify: bool = True, move: Move = move_bytes, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._verify = verify
        self._move = move
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
        max_bytes = min(PIECE_BYTES, STEP_BYTES) if self._verify else STEP_BYTES
        return _Active(
            copy=copy,
            source=source,
            destination=destination,
            runs=page_runs(
                copy.source_pages, copy.destination_pages, page_bytes, max_bytes=max_bytes
            ),
            num_bytes=len(copy.source_pages) * page_bytes,
        )

    def _advance(self) -> None:
        budget = STEP_BYTES
        while self._active and budget > 0:
            active = next(iter(self._active.values()))
            try:
                budget -= self._copy_runs(active, budget)
            except TransferError as error:
                self._end(active, _failed(active.copy, error))
            except Exception as error:  # it ends this copy; those behind it are served
                _logger.exception("copy %s failed", active.copy.handoff_id)
                self._end(active, _failed(active.copy, TransferError.of(error)))
            else:
                if active.moved == active.num_bytes:
                    self._end(
                        active,
                        Copied(
                            handoff_id=active.copy.handoff_id,
                            index=active.copy.index,
                            num_bytes=active.moved,
                            finished_ns=self._clock.monotonic_ns(),
                        ),
                    )

    def _end(self, active: _Active, event: TransferEvent) -> None:
        del self._active[active.copy.handoff_id]
        self._events.append(event)

    def _copy_runs(self, active: _Active, budget: int) -> int:
        """Copy whole runs until `budget` bytes are used up or none is left; the bytes copied."""
        if active.source.replaced or active.destination.replaced:
            raise _replaced(active)
        # The pages were checked against both pools' sizes.
        move, verify = self._move, self._verify
        destination, source = active.destination.address, active.source.address
        num_bytes = 0
        for run in active.runs:
            from_offset, to_offset, run_bytes = run
            from_address, to_address = source + from_offset, destination + to_offset
            moved = move(to_address, from_address, run_bytes)
            if moved != run_bytes:
                raise TransferError(
                    Reason.TRANSFER_INCOMPLETE,
                    f"{moved} bytes arrived of a piece of {run_bytes}, after {active.moved} of "
                    f"{active.num_bytes}",
                )
            if verify and not is_equal(to_address, from_address, run_bytes):
                raise _altered(active, run)
            num_bytes += run_bytes
            active.moved += run_bytes
            if num_bytes >= budget:
                break
        return num_bytes


def _replaced(active: _Active) -> TransferError:
    gone = active.source if active.source.replaced else active.destination
    return TransferError(
        Reason.POOL_REPLACED, f"{gone.ref.owner} restarted while its pages were copied"
    )


def _altered(active: _Active, run: Run) -> TransferError:
    from_offset, to_offset, num_bytes = run
    at = first_difference(
        active.destination.address + to_offset, active.source.address + from_offset, num_bytes
    )
    page_bytes = active.source.layout.page_bytes
    page, byte = divmod(to_offset + (at or 0), page_bytes)
    source_page = (from_offset + (at or 0)) // page_bytes
    return TransferError(
        Reason.CHECKSUM_MISMATCH,
        f"page {page} of {active.destination.ref.owner} differs from page {source_page} of "
        f"{active.source.ref.owner} from byte {byte} on",
    )


def _failed(copy: PageCopy, error: TransferError) -> Failed:
    # Copies run in the caller's thread: after a failure nothing can be written any more.
    return Failed(
        handoff_id=copy.handoff_id,
        index=copy.index,
        reason=error.reason,
        message=str(error),
        settled=True,
        error=error.error,
    )
