"""One request's marks from every process that recorded some: what assembly turns into spans.

Owns shapes only; knows neither ring files nor the form of spans. Times are CLOCK_MONOTONIC
nanoseconds of the recording host; each `Process` carries the anchor that maps them to wall time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pdtrace.clock import ClockAnchor
from pdtrace.offsets import ClockOffsets
from pdtrace.ring.records import MarkRecord
from pdtrace.spans import Resource
from pdtrace.stages import Mode, Role, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Who recorded. Processes with equal `clock_id` share CLOCK_MONOTONIC."""

    role: Role
    instance: str
    clock_id: str
    anchor: ClockAnchor
    resource: Resource


class StepStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The forward passes of one kind that one attempt took part in, in one process."""

    kind: StepKind
    attempt: int = 1
    count: int
    total_ns: int
    slowest_ns: int
    slowest_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A chain stage was reported as stuck: `age_ns` old at `at_ns`, more than `threshold_ns`."""

    stage: str
    attempt: int
    at_ns: int
    age_ns: int
    threshold_ns: int


class Leg(msgspec.Struct, kw_only=True, gc=False):
    """What one process recorded of a request.

    lost_at_ns      when the process was found gone with the request open in it; None otherwise
    lost_attempts   those that it held then; none: those that it recorded marks of
    lost_reason     process_lost (it died) or process_exited (it closed its ring in order)
    records_missed  records of its ring that were overwritten or torn while the request was open
    steps           its forward passes, by kind
    clock           what the process measured of other hosts' clocks; None where it measured nothing
    """

    process: Process
    marks: list[MarkRecord] = msgspec.field(default_factory=list[MarkRecord])
    lost_at_ns: int | None = None
    lost_attempts: frozenset[int] = frozenset()
    lost_reason: str = "process_lost"
    records_missed: int = 0
    steps: Sequence[StepStats] = ()
    clock: ClockOffsets | None = None


class AttemptIds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Ids that travel with one attempt. The span id is 16 hex digits."""

    span_id: str
    handoff_id: str | None = None


class CollectedRequest(msgspec.Struct, kw_only=True, gc=False):
    """All that is known of one request when its spans are built.

    mode       as its context says; the gateway's TOKENIZED mark has the last word
    attempts   ids per attempt number, from 1
    gave_up    why collection ended before the request did; None when it ended in order
    blockers   trace id and root span id of requests that waits name, by request id
    open_at_ns the request is still in flight: when it was looked at, on this host's
               CLOCK_MONOTONIC; None once it is finished
    stuck      stages that were reported as stuck
    """

    request_id: str
    trace_id: str
    root_span_id: str
    client_parent_span_id: str | None = None
    sampled: bool = True
    trace_state: str = ""
    mode: Mode | None = None
    attempts: Mapping[int, AttemptIds] = msgspec.field(default_factory=dict[int, AttemptIds])
    legs: Sequence[Leg] = ()
    gave_up: str | None = None
    blockers: Mapping[str, tuple[str, str]] = msgspec.field(
        default_factory=dict[str, tuple[str, str]]
    )
    open_at_ns: int | None = None
    stuck: Sequence[Stuck] = ()
