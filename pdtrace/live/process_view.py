"""How a recording process stands, from its ring's header and the kernel. Reads no ring.

Owns the rule for STALLED, the sentences on processes that cannot go on, and what is shown of one
that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set

from pdtrace.duration import seconds_text
from pdtrace.inflight import Halt, InFlight, ProcessNow, ProcessState
from pdtrace.live.kernel_state import halt_of, is_here
from pdtrace.ring import WriterState
from pdtrace.ring.layout import RingIdentity
from pdtrace.ring.losses import RingLosses, WriterEnd
from pdtrace.stages import Gauge

STALLED_AFTER_S = 2.0
"""A process that has work, or that requests wait for, and whose loop has not gone round for longer
is STALLED; one that was stopped is so at once."""

HALTED_AFTER_S = 0.5
"""One that the kernel does not let run is told from here on: an idle loop goes round more often."""

_HELD = frozenset({Halt.STOPPED, Halt.TRACED})
_HALTS = {
    Halt.STOPPED: "stopped by a signal (SIGSTOP)",
    Halt.TRACED: "held by a debugger",
    Halt.IN_KERNEL: "stalled in the kernel (state D: a disk or a device)",
}

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
    halt = None
    if writer is WriterState.ALIVE and (progress_age_s is None or progress_age_s > HALTED_AFTER_S):
        halt = halt_of(identity)
    match writer:
        case WriterState.CLOSED:
            state = ProcessState.CLOSED
        case WriterState.DEAD:
            state = ProcessState.LOST
        case WriterState.ALIVE:
            busy = (
                open_requests > 0 or is_needed or any(gauges.get(gauge, 0) > 0 for gauge in _WORK)
            )
            silent = progress_age_s is not None and progress_age_s > STALLED_AFTER_S
            stalled = halt in _HELD or (busy and silent)
            state = ProcessState.STALLED if stalled else ProcessState.ALIVE
    return ProcessNow(
        role=identity.role.value,
        instance=identity.instance,
        pid=identity.pid,
        host_id=identity.host_id,
        state=state,
        progress_age_s=progress_age_s,
        halt=halt if state is ProcessState.STALLED else None,
        open_requests=open_requests,
        gauges={
            gauge.name.lower(): value
            for gauge, value in gauges.items()
            if gauge is not Gauge.LAST_PROGRESS_NS
        },
    )


def standing(process: ProcessNow) -> str | None:
    """Why a process cannot go on, a clause without a full stop; None if it can."""
    name = process.instance
    match process.state:
        case ProcessState.STALLED:
            what = "is stalled"
            if process.halt is not None:
                what = f"(pid {process.pid}) is {_HALTS[process.halt]}"
            silent = ""
            if process.progress_age_s is not None:
                silent = f": no progress for {seconds_text(round(process.progress_age_s * 1e9))}"
            return f"{name} {what}{silent}"
        case ProcessState.LOST:
            return f"{name} is lost: its process (pid {process.pid}) is gone"
        case ProcessState.CLOSED:
            return f"{name} has ended"
        case ProcessState.ALIVE:
            return None


def halted(identity: RingIdentity) -> str | None:
    """What keeps the process of a ring from running now: "stopped by a signal (SIGSTOP),
    pid 7"; None if nothing does, or if it cannot be told."""
    halt = halt_of(identity)
    return None if halt is None else f"{_HALTS[halt]}, pid {identity.pid}"


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
    if is_here(identity):
        return time.monotonic_ns()
    return identity.anchor.to_monotonic_ns(time.time_ns())
