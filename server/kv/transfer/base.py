"""The transfer seam: how KV pages move between pools, and what may be relied on meanwhile.

Owns the protocol and its contract; knows nothing of sockets, marks or who asked for a copy. What
schedules copies (`server.kv.transfer.worker`) sees nothing but `KvTransfer`, so that a transfer
over CUDA IPC, NIXL or Mooncake is one more class here.

The contract
- One thread calls everything but `wake`. No call but `poll` may block, and `poll` at most for its
  timeout; long copies advance a bounded step per call.
- `submit` starts nothing that cannot fail: whatever is wrong with a copy is an event, never an
  exception. Every copy ends in exactly one `Copied` or `Failed` event, unless it is cancelled. What
  a defect raises ends the copy at hand and no other.
- `Copied` means observed completion: the bytes are visible at the destination to its owner. That
  all bytes were handed to a kernel, a NIC or a stream is not enough. Its `num_bytes` were counted
  as they moved. Unless that is switched off, they are also known to be those of the source.
- `Failed.settled` says whether the destination pages are certain to stay untouched from then on.
  While it is False only the destination's own transfer can tell, by draining.
- `cancel` ends with a `Drained` event: nothing of the handoff is read or written by this transfer
  any more, or ever will be; copies of it that are submitted or arrive later are refused. Both ends
  of a transfer between hosts are drained by their own transfer. Cancelling an unknown or finished
  handoff drains at once.
- After `stop_accepting` copies that have begun go on, those that another host begins are refused
  with `TRANSFER_STOPPING`.
- A pool is named by (owner, incarnation) and known by registration on its own host. No path or
  address comes from a peer. Registering another incarnation replaces the pool; copies that use the
  old one fail.

How others fit: CUDA IPC registers an exported handle in place of a path; `submit` enqueues copies
on a stream and records an event that `poll` queries. NIXL and Mooncake register (address, length)
per pool; `submit` posts one transfer per copy, whose descriptors are `runs`, and `poll` asks for
its status until done; `cancel` waits for what was posted, so its `Drained` comes later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol, TypeAlias

from server.errors import IntegrityError
from server.kv.pool import PoolDescriptor
from server.wire.messages import PoolRef


class CopyState(StrEnum):
    """Where one copy job is.

    QUEUED ▶ COPYING ▶ COPIED
       │        ├─────▶ FAILED
       │        └─────▶ DRAINING ▶ CANCELLED
       ├──────────────▶ FAILED       an earlier job of its handoff failed, or the process stops
       └──────────────▶ CANCELLED
    """

    QUEUED = "queued"
    COPYING = "copying"  # submitted: pages may be read and written
    DRAINING = "draining"  # cancelled while copying: the transfer has not let go yet
    COPIED = "copied"
    FAILED = "failed"
    CANCELLED = "cancelled"


_C = CopyState

TRANSITIONS: Mapping[CopyState, frozenset[CopyState]] = MappingProxyType(
    {
        _C.QUEUED: frozenset({_C.COPYING, _C.FAILED, _C.CANCELLED}),
        _C.COPYING: frozenset({_C.COPIED, _C.FAILED, _C.DRAINING}),
        _C.DRAINING: frozenset({_C.CANCELLED}),
        _C.COPIED: frozenset(),
        _C.FAILED: frozenset(),
        _C.CANCELLED: frozenset(),
    }
)

TERMINAL: frozenset[CopyState] = frozenset(
    state for state, targets in TRANSITIONS.items() if not targets
)


def check_transition(state: CopyState, target: CopyState) -> None:
    """Raises IntegrityError unless a job in `state` may go to `target`."""
    if target not in TRANSITIONS[state]:
        allowed = ", ".join(sorted(TRANSITIONS[state])) or "nothing: it is terminal"
        raise IntegrityError(f"copy job from {state} to {target}; allowed: {allowed}")


class Reason(StrEnum):
    """Why a copy failed: the `reason` of CopyFailed. Stable."""

    UNKNOWN_POOL = "unknown_pool"
    POOL_REPLACED = "pool_replaced"
    LAYOUT_MISMATCH = "layout_mismatch"
    BAD_PAGES = "bad_pages"
    NO_ROUTE = "no_route"
    TRANSFER_UNREACHABLE = "transfer_unreachable"
    PEER_LOST = "peer_lost"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_INCOMPLETE = "transfer_incomplete"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    UNAUTHENTICATED = "unauthenticated"
    PROTOCOL_ERROR = "protocol_error"
    CANCELLED = "cancelled"
    JOBS_MISSING = "jobs_missing"
    TRANSFER_STOPPING = "transfer_stopping"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Copy `source_pages` to `destination_pages`, in order, one for one.

    address   host:port of the destination host's transfer process; None: the pools share a host
    """

    handoff_id: str
    index: int
    source: PoolRef
    source_pages: Sequence[int]
    destination: PoolRef
    destination_pages: Sequence[int]
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """All bytes of a copy are visible at the destination since `finished_ns` (CLOCK_MONOTONIC)."""

    handoff_id: str
    index: int
    num_bytes: int
    finished_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A copy ended without completing.

    settled   the destination pages are certain not to be written from here on
    error     type of the exception that ended it; None when the reason says it all
    """

    handoff_id: str
    index: int
    reason: Reason
    message: str
    settled: bool
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Answer to `cancel`: this transfer neither reads nor writes pages of the handoff any more."""

    handoff_id: str


TransferEvent: TypeAlias = Copied | Failed | Drained


class TransferError(Exception):
    """A copy cannot be done; `reason`, `error` and the text go into its `Failed` event."""

    def __init__(self, reason: Reason, message: str, *, error: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.error = error

    @classmethod
    def of(cls, error: Exception) -> TransferError:
        """What a defect of the transfer means for the copy at hand."""
        name = type(error).__name__
        return cls(Reason.INTERNAL, f"the transfer failed: {name}: {error}", error=name)


class KvTransfer(Protocol):
    """Moves KV pages between registered pools. The contract stands in the module's docstring."""

    def register(self, ref: PoolRef, pool: PoolDescriptor) -> None:
        """Make a pool of this host known. The same incarnation again changes nothing; another one
        replaces the owner's pool. Raises TransferError when it cannot be mapped."""
        ...

    def submit(self, copy: PageCopy) -> None:
        """Start a copy. At most one per handoff may be unfinished."""
        ...

    def cancel(self, handoff_id: str) -> None:
        """Let go of a handoff; `Drained` says when that is done. Idempotent while it runs."""
        ...

    def poll(self, timeout_s: float) -> list[TransferEvent]:
        """Advance copies and return what ended, in order. Waits up to `timeout_s` only while
        there is nothing to do; returns early after `wake`."""
        ...

    def stop_accepting(self) -> None:
        """Refuse what other hosts begin to copy from here on. Idempotent."""
        ...

    @property
    def num_incoming(self) -> int:
        """Copies of other hosts that have begun here and are not answered yet."""
        ...

    @property
    def num_received(self) -> int:
        """Copies of other hosts that were answered so far."""
        ...

    def wake(self) -> None:
        """Make a waiting `poll`, or else the next one, return at once. Thread-safe."""
        ...

    def close(self) -> None:
        """Stop, without events: nothing is read or written afterwards. Idempotent."""
        ...
