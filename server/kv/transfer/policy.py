"""Which waiting copy jobs start, and why the others wait. Pure: a snapshot in, a plan out.

Jobs start in order of arrival, one at a time per route (the pair of this host and the destination
host) and per handoff. A job that is held by a fault lets others pass; so does one whose route is
busy, so that a host that does not answer stops nobody but those who need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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

    held       a fault holds it; then nothing else is said
    position   jobs of other requests ahead of it on its route
    blocker    request id of the first of them
    """

    handoff_id: str
    held: bool
    position: int = 0
    blocker: str | None = None


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
    with_earlier = {job.handoff_id for job in running}
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
            waits.append(JobWait(job.handoff_id, held=True))
            continue
        with_earlier.add(job.handoff_id)
        if job.route not in busy:
            busy.add(job.route)
            start.append(job)
        else:
            others = [other for other in on_route if other.request_id != job.request_id]
            if others:
                blocker = others[0].request_id
                waits.append(JobWait(job.handoff_id, False, len(others), blocker))
        on_route.append(job)
    return CopyPlan(tuple(start), tuple(waits), min(holds, default=None))
