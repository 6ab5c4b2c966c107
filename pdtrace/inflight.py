"""A look at what is in flight, as `/inflight` sends it and `pdtrace top` shows it. Shapes only.

Times are seconds before the instant of the look. Who fills these in: `pdtrace.assembly.tracker`
(requests), `pdtrace.agent.tails` (processes). Both sides read the same JSON, so fields are added,
never renamed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

SCHEMA_VERSION = 1

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Beyond these is no number that a look has, and none that can be shown."""

END_UNKNOWN = "unknown"
"""`InFlight.ended` where whoever is known to have held a request let go of it, and what the gateway
said of its end was overwritten or is another host's."""


class ProcessState(StrEnum):
    """Whether a recording process can still do something."""

    ALIVE = "alive"
    STALLED = "stalled"  # it lives and has work, but its loop has not gone round for long
    CLOSED = "closed"  # it ended in order
    LOST = "lost"  # it was killed, or ended without a word


class Halt(StrEnum):
    """What keeps a process from running, as the kernel says."""

    STOPPED = "stopped"  # by a signal: SIGSTOP, Ctrl-Z
    TRACED = "traced"  # by a debugger
    IN_KERNEL = "in_kernel"  # in a call that no signal interrupts: a disk or a device


class WaitNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The latest reason why a request waits. Units of the numbers: `pdtrace.stages.WaitReason`.

    stage  nested stage that it waits in, such as `decode.preempted`; None: the request's stage
    age_s  how long it has waited for this reason; the numbers may be newer
    """

    reason: str
    stage: str | None = None
    needed: Whole | None = None
    free: Whole | None = None
    limit: Whole | None = None
    position: Whole | None = None
    blockers: tuple[str, ...] = ()
    age_s: Seconds = 0.0


class InFlight(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request that has not finished.

    stage         chain stage it is in; None when no mark says so
    stage_age_s   how long it has been in it
    worker        instance that has to end the stage, as far as known
    usual_s       median of that stage among finished requests; None without any
    p99_s         their 99th percentile
    stuck         whether the stage is older than it may become, or was reported as such
    ended         outcome, once the gateway has answered and legs still finish; END_UNKNOWN if that
                  is all that is known of its end
    incomplete    what is known to be missing of its marks
    """

    request_id: str
    trace_id: str
    root_span_id: str
    attempt: Whole
    mode: str
    age_s: Seconds
    stage: str | None = None
    stage_age_s: Seconds = 0.0
    worker: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    prompt_tokens: Whole | None = None
    wait: WaitNow | None = None
    usual_s: Seconds | None = None
    p99_s: Seconds | None = None
    stuck: bool = False
    ended: str | None = None
    incomplete: str | None = None


class ProcessNow(msgspec.Struct, frozen=True, kw_only=True):
    """One recording process.

    progress_age_s  since its loop last went round; None where it does not say
    halt            what keeps it from running; None if nothing does, or if it cannot be told
    gauges          by lower-case name of `pdtrace.stages.Gauge`
    """

    role: str
    instance: str
    pid: Whole
    host_id: str
    state: ProcessState
    progress_age_s: Seconds | None = None
    halt: Halt | None = None
    open_requests: Whole = 0
    gauges: dict[str, Whole] = {}


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """All of it at one instant; `at_ns` is Unix time, nanoseconds.

    pid      of the agent that looked; None where the rings themselves were read
    run_dir  the directory that agent writes to, on its host; None without one
    lag_s    how long ago the rings were read to their end
    """

    at_ns: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    requests: tuple[InFlight, ...] = ()
    processes: tuple[ProcessNow, ...] = ()
    problems: tuple[str, ...] = ()
    pid: Whole | None = None
    run_dir: str | None = None
    lag_s: Seconds = 0.0
    version: Whole = SCHEMA_VERSION
