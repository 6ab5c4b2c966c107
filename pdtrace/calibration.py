"""What recording costs on this machine: a few short loops over a ring in memory, once per process.

Owns the measurement; knows nothing of what the costs are used for (`pdtrace.budget`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdtrace.budget import Costs
from pdtrace.native import compiled
from pdtrace.stages import GapCause, Mark, StepKind, WaitReason

if TYPE_CHECKING:
    from pdtrace.recorder import Recorder, RequestTrace

MAX_NS = 5_000_000
"""CPU time that a calibration may take, give or take one round."""
BETWEEN_OTHER_WORK = 2.0
"""A program that serves makes a few calls at a time, with the caches full of other work: they take
about this many times as long as in a tight loop. Measured once (`benchmarks/LOG.md`), as it cannot
be measured well in the time there is."""
BETWEEN_OTHER_WORK_IN_C = 5.0
"""The same for a mark in C: most of what it takes then is fetching what it needs."""
_ROUNDS = 9
_CALLS = 20
MEMBERS = 32
_TWO_BYTES = 2 * 8
_GAP = (17, 0.25, GapCause.INTERFERING_PREFILL, 0.2, 4711, 16, "req-0123456789abcdef")
_GAP_BYTES = 5 * 8 + 2 + len(_GAP[2]) + len(_GAP[6])


def measure_costs(recorder: Recorder, traces: list[RequestTrace]) -> Costs:
    """Costs of a `Role.DECODE` recorder, with at least MEMBERS traces begun in it.

    The best of some rounds in tight loops, times BETWEEN_OTHER_WORK or, for marks in C, what that
    is there; in CPU time, so that other threads and processes do not count.
    """
    trace = traces[0]
    members = traces[:MEMBERS]
    names = ("req-0123456789abcdef", "req-fedcba9876543210")

    def bare() -> None:
        for _ in range(_CALLS):
            trace.mark(Mark.KV_NOTICED)

    def two() -> None:
        for number in range(_CALLS):
            trace.mark(Mark.DECODE_RELEASED, number, 188)

    def seven() -> None:
        for _ in range(_CALLS):
            trace.mark(Mark.TOKEN_GAP, *_GAP)

    def waits() -> None:
        for number in range(_CALLS):
            trace.wait(
                "decode.reserve",
                WaitReason.KV_PAGES,
                needed=12,
                free=3,
                limit=4096,
                position=number,
                blocker=names[number & 1],
            )

    def small_steps() -> None:
        for _ in range(_CALLS):
            recorder.step(StepKind.DECODE, members[:1], tokens=1, begin_ns=0, end_ns=1)

    def large_steps() -> None:
        for _ in range(_CALLS):
            recorder.step(StepKind.DECODE, members, tokens=32, begin_ns=0, end_ns=1)

    loops: tuple[Callable[[], None], ...] = (bare, two, seven, waits, small_steps, large_steps)
    rounds: list[list[float]] = []
    deadline_ns = time.thread_time_ns() + MAX_NS
    while len(rounds) < _ROUNDS and (not rounds or time.thread_time_ns() < deadline_ns):
        rounds.append([_time(loop) / _CALLS for loop in loops])
    cold = BETWEEN_OTHER_WORK if compiled is None else BETWEEN_OTHER_WORK_IN_C
    best = [min(one) for one in zip(*rounds, strict=True)]
    bare_ns, two_ns, seven_ns = (ns * cold for ns in best[:3])
    wait_ns, small_ns, large_ns = (ns * BETWEEN_OTHER_WORK for ns in best[3:])
    member_ns = max(0.0, (large_ns - small_ns) / (MEMBERS - 1))
    return Costs(
        record=bare_ns,
        # Numbers take longer by the byte than many of them with strings: something in between.
        byte=max(0.0, (two_ns - bare_ns) / _TWO_BYTES + (seven_ns - bare_ns) / _GAP_BYTES) / 2,
        attributes=max(0.0, two_ns - bare_ns),
        wait=wait_ns,
        step=max(0.0, small_ns - member_ns),
        member=member_ns,
    )


def _time(loop: Callable[[], None]) -> int:
    begin_ns = time.thread_time_ns()
    loop()
    return time.thread_time_ns() - begin_ns
