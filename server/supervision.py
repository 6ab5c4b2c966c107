"""When a process that ended is started again, and when nobody tries any more: pure policy.

Owns the life of one instance over all its processes; starts and kills nothing, and reads no clock:
the caller gives the time, in seconds on the monotonic clock.

    starting ─▶ ready ─┐       ready: it said that it serves
        │              ▼
        ├─────────▶ ended ─▶ starting …      ended: a new process is due at `due_s`
        ▼
      given up                               too many of its processes never became ready

A process that hangs has not ended. It is never killed here: it may go on (a debugger, a suspended
machine, a slow disk), and what it holds is evidence; whoever kills it gets a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The first end is followed by a start at once, those after it in a row by pauses. A process
    that served and ended in order was told to, and is followed at once by another.

    first_pause_s    before the second start in a row; each later pause is twice as long
    longest_pause_s  no pause is longer
    steady_s         a process that served for so long ends the row
    max_failures     processes in a row that ended before they were ready, then no more are started;
                     None: one goes on trying
    restart          False: nothing is started again
    """

    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    steady_s: float = 10.0
    max_failures: int | None = 5
    restart: bool = True

    def pause_s(self, ends_before: int) -> float:
        """How long to wait after an end that `ends_before` others in a row came before."""
        if ends_before == 0:
            return 0.0
        # Beyond some doublings the pause is the longest anyway, and 2 ** n is no float any more.
        return min(self.first_pause_s * 2 ** min(ends_before - 1, 30), self.longest_pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One instance at one moment.

    since_s     when it came to its phase
    restarts    processes started after the first
    ends        ends in a row without a steady time between
    failures    processes in a row that ended before they were ready
    due_s       ended: when the next one is to be started
    """

    phase: Phase = Phase.STARTING
    since_s: float
    restarts: int = 0
    ends: int = 0
    failures: int = 0
    due_s: float | None = None


def became_ready(life: Life, now_s: float) -> Life:
    """It serves."""
    return replace(life, phase=Phase.READY, since_s=now_s, failures=0)


def ended(life: Life, now_s: float, policy: RestartPolicy, *, in_order: bool = False) -> Life:
    """Its process is gone, or could not be started at all.

    in_order   it exited with code 0, as it does when it is told to stop
    """
    served = life.phase is Phase.READY
    told = served and in_order
    steady = served and now_s - life.since_s >= policy.steady_s
    before = 0 if told or steady else life.ends
    failures = 0 if served else life.failures + 1
    give_up = policy.max_failures is not None and failures >= policy.max_failures
    if give_up or not policy.restart:
        return replace(life, phase=Phase.GIVEN_UP, since_s=now_s, failures=failures, due_s=None)
    return replace(
        life,
        phase=Phase.ENDED,
        since_s=now_s,
        ends=0 if told else before + 1,
        failures=failures,
        due_s=now_s + policy.pause_s(before),
    )


def is_due(life: Life, now_s: float) -> bool:
    """Whether its next process is to be started now."""
    return life.due_s is not None and now_s >= life.due_s


def started(life: Life, now_s: float) -> Life:
    """Its next process runs."""
    return replace(
        life, phase=Phase.STARTING, since_s=now_s, restarts=life.restarts + 1, due_s=None
    )
