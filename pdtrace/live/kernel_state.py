"""Whether the kernel lets a process of this host run: `/proc/PID/stat`. Reads no ring.

A pid is believed only where the process that has it can be the one that made the ring: it is on
this host and boot, and it is not younger than the ring.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

from pdtrace.inflight import Halt
from pdtrace.ring.identity import read_boot_id, read_host_id
from pdtrace.ring.layout import RingIdentity

_HALTS = {b"T": Halt.STOPPED, b"t": Halt.TRACED, b"D": Halt.IN_KERNEL}
_STATE, _STARTED = 0, 19
"""Fields behind the name: its state, and when it was started, in ticks since the boot."""
_YOUNGER_NS = 100_000_000
"""Ticks are 10 ms long, and clocks are read one after the other."""


def is_here(identity: RingIdentity) -> bool:
    """Whether a process runs, or ran, on this host since it was booted."""
    return (identity.host_id, identity.boot_id) == _this_host()


def halt_of(identity: RingIdentity, *, proc: Path = Path("/proc")) -> Halt | None:
    """What keeps the process of a ring from running at this instant; None if nothing does, or if it
    cannot be told."""
    if not is_here(identity):
        return None
    try:
        stat = (proc / str(identity.pid) / "stat").read_bytes()
        fields = stat.rpartition(b")")[2].split()
        halt = _HALTS.get(fields[_STATE])
        if halt is None:
            return None
        started_ns = int(fields[_STARTED]) * 10**9 // os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns
    ring_age_ns = time.monotonic_ns() - identity.anchor.monotonic_ns
    return halt if age_ns + _YOUNGER_NS >= ring_age_ns else None


@cache
def _this_host() -> tuple[str, str]:
    return read_host_id(), read_boot_id()
