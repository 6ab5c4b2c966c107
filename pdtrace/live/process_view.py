"""How a recording process stands, from its ring's header and the kernel. Reads no ring.

Owns the rule for STALLED, and what is shown of a process that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from functools import cache
from pathlib import Path

from pdtrace.inflight import InFlight, ProcessNow, ProcessState
from pdtrace.ring import WriterState
from pdtrace.ring.identity import read_boot_id, read_host_id
from pdtrace.ring.layout import RingIdentity
from pdtrace.ring.losses import RingLosses, WriterEnd
from pdtrace.stages import Gauge

STALLED_AFTER_S = 2.0
"""A process that has work, that requests wait for, or that was stopped, and whose loop has not gone
round for longer is STALLED."""

_WORK = (Gauge.IN_FLIGHT, Gauge.RUNNING, Gauge.WAITING, Gauge.COPY_JOBS_WAITING)


def needed_by(requests: Iterable[InFlight]) -> Set[str]:
    """Instances that requests in flight were sent to, whether or not these know yet."""
    names = ((r.worker, r.prefill_worker, r.decode_worker) for r in requests)
    return {name for group in names for name in group if name}


def process_now(
    identity: RingIdentity,
    writer: WriterState,
    gauges: Mapping[Gauge, int],
    *,
    open_requests: int,
    is_needed: bool = False,
) -> ProcessNow:
    """A process at this instant.

    open_requests  requests that it has not let go of
    is_needed      requests in flight were sent to it
    """
    progress_age_s = None
    progress_ns = gauges.get(Gauge.LAST_PROGRESS_NS)
    if writer is WriterState.ALIVE and progress_ns is not None:
        progress_age_s = max(0.0, (now_ns_on(identity) - progress_ns) / 1e9)
    match writer:
        case WriterState.CLOSED:
            state = ProcessState.CLOSED
        case WriterState.DEAD:
            state = ProcessState.LOST
        case WriterState.ALIVE:
            busy = (
                open_requests > 0
                or is_needed
                or any(gauges.get(gauge, 0) > 0 for gauge in _WORK)
                or _is_stopped(identity)
            )
            stalled = busy and progress_age_s is not None and progress_age_s > STALLED_AFTER_S
            state = ProcessState.STALLED if stalled else ProcessState.ALIVE
    return ProcessNow(
        role=identity.role.value,
        instance=identity.instance,
        pid=identity.pid,
        host_id=identity.host_id,
        state=state,
        progress_age_s=progress_age_s,
        open_requests=open_requests,
        gauges={
            gauge.name.lower(): value
            for gauge, value in gauges.items()
            if gauge is not Gauge.LAST_PROGRESS_NS
        },
    )


def _is_stopped(identity: RingIdentity) -> bool:
    """Whether a signal or a debugger has stopped a process of this host."""
    if (identity.host_id, identity.boot_id) != _this_host():
        return False
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


def processes_gone(rings: Iterable[RingLosses], alive: Set[tuple[str, str]]) -> list[ProcessNow]:
    """How the latest process of each role and instance ended, of those that are not `alive`."""
    latest: dict[tuple[str, str], RingLosses] = {}
    for ring in rings:
        key = (ring.role, ring.instance)
        if ring.ended is None or key in alive:
            continue
        if key not in latest or latest[key].made_ns < ring.made_ns:
            latest[key] = ring
    return [_gone(ring) for _, ring in sorted(latest.items())]


def _gone(ring: RingLosses) -> ProcessNow:
    closed = ring.ended is WriterEnd.CLOSED
    return ProcessNow(
        role=ring.role,
        instance=ring.instance,
        pid=ring.pid,
        host_id=ring.host_id,
        state=ProcessState.CLOSED if closed else ProcessState.LOST,
        open_requests=ring.open_requests,
    )


def now_ns_on(identity: RingIdentity) -> int:
    """This instant on the CLOCK_MONOTONIC of a ring's host; by wall time if that is another."""
    if (identity.host_id, identity.boot_id) == _this_host():
        return time.monotonic_ns()
    return identity.anchor.to_monotonic_ns(time.time_ns())


@cache
def _this_host() -> tuple[str, str]:
    return read_host_id(), read_boot_id()
