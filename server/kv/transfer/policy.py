"""Which waiting copy jobs start, and why the others wait. Pure: a snapshot in, a plan out.

Jobs start in order of arrival, one at a time per route (the pair of this host and the destination
host) and per handoff. A job that is held by a fault lets others pass; so does one whose route is
busy, so that a host that does not answer stops nobody but those who need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdtrace.recorder import MAX_BLOCKERS
from pdtrace.stages import WaitReason

COPIES_PER_ROUTE = 1
"""Copies that run at once on a route: each gets all of its bandwidth."""


class JobView(NamedTuple):
    """A copy job as the policy sees it.

    route            transfer address of the destination host; None: this host
    held_until_ns    CLOCK_MONOTONIC before which it may not start; 0 for most
    """

    handoff_id: str
    request_id: str
    job_index: int
    route: str | None
    held_until_ns: int


class JobWait(NamedTuple):
    """Why the first waiting job of a handoff does not start.

    reason     INJECTED: a fault holds it; then nothing else is said
               BANDWIDTH: it is next, and the copies that run use its route: maybe its own earlier
               one, which is no request in the way
               COPY_QUEUE: other jobs are to start before it
    position   jobs of other requests ahead of it on its route, those that run included
    blockers   their request ids, in order of the jobs, at most MAX_BLOCKERS
    """

    handoff_id: str
    reason: WaitReason
    position: int | None = None
    blockers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`start` in order; `wake_ns` is when the earliest hold ends, None without holds."""

    start: tuple[JobView, ...]
    waits: tuple[JobWait, ...]
    wake_ns: int | None


def plan_copies(waiting: Sequence[JobView], running: Sequence[JobView], now_ns: int) -> CopyPlan:
    """`waiting` in order of arrival; `running` those that copy at this instant."""
    start: list[JobView] = []
    waits: list[JobWait] = []
    busy = {job.route for job in running}
    copying = {job.handoff_id for job in running}
    with_earlier: set[str] = set()
    queued: set[str | None] = set()  # routes with jobs that wait
    held: set[str] = set()
    ahead: dict[str | None, list[JobView]] = {}
    for job in running:
        ahead.setdefault(job.route, []).append(job)
    holds = [job.held_until_ns for job in waiting if job.held_until_ns > now_ns]
    for job in waiting:
        if job.handoff_id in held:
            continue
        on_route = ahead.setdefault(job.route, [])
        if job.handoff_id in with_earlier:
            # Its own earlier job says what the handoff waits for.
            on_route.append(job)
            continue
        if job.held_until_ns > now_ns:
            held.add(job.handoff_id)
            waits.append(JobWait(job.handoff_id, WaitReason.INJECTED))
            continue
        with_earlier.add(job.handoff_id)
        if job.handoff_id in copying:
            waits.append(JobWait(job.handoff_id, WaitReason.BANDWIDTH, 0))
            queued.add(job.route)
        elif job.route not in busy:
            busy.add(job.route)
            start.append(job)
        else:
            reason = WaitReason.COPY_QUEUE if job.route in queued else WaitReason.BANDWIDTH
            others = [other.request_id for other in on_route if other.handoff_id != job.handoff_id]
            blockers = tuple(dict.fromkeys(others))[:MAX_BLOCKERS]
            waits.append(JobWait(job.handoff_id, reason, len(others), blockers))
            queued.add(job.route)
        on_route.append(job)
    return CopyPlan(tuple(start), tuple(waits), min(holds, default=None))
