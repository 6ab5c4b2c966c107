"""What stands below the picture of a request, as lines of text: attempts, waits, gaps, steps.

Owns wording and which of many are shown; layout is `pdtrace.terminal.render`'s. Texts are as
recorded: who prints them makes them harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text as attribute_text
from pdtrace.analysis.baselines import NESTED_LEAVES
from pdtrace.analysis.facts import Try, Wait
from pdtrace.analysis.timeline import Timeline
from pdtrace.analysis.waits import describe_wait
from pdtrace.duration import seconds_text
from pdtrace.stages import CHAINS, GapCause, Outcome

MAX_WAITS = 12
MAX_GAPS = 5
_SHARED_SHARE = 0.005  # shorter overlaps are not worth a line
_GAP = "decode.gap"
_GAP_CAUSES = frozenset(GapCause)


def attempt_lines(timeline: Timeline) -> list[str]:
    """One line per attempt; none where the first one was the only one."""
    tries = timeline.tries
    return [_try_line(one) for one in tries] if len(tries) > 1 else []


def _try_line(one: Try) -> str:
    """`1: prefill-0 → decode-0, from 0.4 ms for 2.00 s: lost with decode-0 in decode.generate`."""
    workers = " → ".join(dict.fromkeys(w for w in (one.prefill_worker, one.decode_worker) if w))
    line = f"{one.number}: {workers + ', ' if workers else ''}from "
    line += f"{seconds_text(max(0, one.begin_ns))} for {seconds_text(one.end_ns - one.begin_ns)}"
    if one.outcome is None:
        return line
    line += f": {one.outcome.value.replace('_', ' ')}"
    if one.by:
        line += f" {'with' if one.outcome is Outcome.LOST else 'by'} {one.by}"
    if one.stage:
        line += f" in {one.stage}"
    return line + (f" ({one.reason})" if one.reason else "")


@dataclass(slots=True)
class _Spell:
    """Waits one after another for one reason behind the same requests; `longest` speaks for all."""

    first: Wait
    longest: Wait
    for_ns: int | None
    is_open: bool

    def line(self) -> str:
        at_ns, wait = self.first.at_ns, self.longest
        when = f" from {seconds_text(max(0, at_ns))}" if at_ns is not None else ""
        held = f" for {seconds_text(self.for_ns)}" if self.for_ns is not None else ""
        held += " so far" if self.is_open else ""
        return f"{wait.stage}{when}{held}: {describe_wait(wait)}"


def wait_lines(timeline: Timeline) -> Sequence[str]:
    """Waits of the chain, and of stages inside it, by begin; of many the longest, and what goes on.

    What changed but for numbers is told anew.
    """
    chain = {stage.name for stage in CHAINS[timeline.mode]}
    nested = {name for names in NESTED_LEAVES.values() for name in names} | {"transfer.queue"}
    spells: list[_Spell] = []
    for visit in timeline.visits:
        if visit.name not in chain | nested:
            continue
        for wait in visit.waits:
            if wait.reason in _GAP_CAUSES and visit.name == _GAP:
                continue  # told with the gaps
            is_open = visit.open and wait is visit.waits[-1]
            last = spells[-1] if spells else None
            if last is None or not _goes_on(last.longest, wait):
                spells.append(_Spell(wait, wait, wait.for_ns, is_open))
                continue
            if is_open or (wait.for_ns or 0) > (last.longest.for_ns or 0):
                last.longest = wait
            if wait.for_ns is not None:
                last.for_ns = (last.for_ns or 0) + wait.for_ns
            last.is_open = is_open
    longest = sorted(spells, key=lambda spell: (not spell.is_open, -(spell.for_ns or 0)))
    kept = {id(spell) for spell in longest[:MAX_WAITS]}
    lines = [spell.line() for spell in spells if id(spell) in kept]
    if len(spells) > MAX_WAITS:
        lines.append(f"… and {len(spells) - MAX_WAITS} shorter ones")
    return lines


def _goes_on(one: Wait, other: Wait) -> bool:
    return (one.stage, one.reason, one.blocker, one.blockers) == (
        other.stage,
        other.reason,
        other.blocker,
        other.blockers,
    )


def gap_lines(timeline: Timeline) -> Sequence[str]:
    """The longest gaps first: they are what a reader looks for."""
    gaps = sorted(timeline.visits_of(_GAP), key=lambda visit: -visit.duration_ns)
    lines: list[str] = []
    for gap in gaps:
        token = attribute_text(gap.attributes, a.TOKEN_INDEX)
        line = f"{seconds_text(gap.duration_ns)} at {seconds_text(max(0, gap.begin_ns))}"
        line += f" before token {token}" if token else ""
        cause = describe_wait(gap.cause) if gap.cause else "no cause was recorded"
        lines.append(f"{line}: {cause}")
    return limited(lines, MAX_GAPS)


def step_lines(timeline: Timeline) -> list[str]:
    """One line per stage that tells of forward passes."""
    lines: list[str] = []
    for steps in timeline.steps:
        line = f"{steps.stage}: {steps.count} forward pass{'' if steps.count == 1 else 'es'}"
        if steps.slowest_ns is not None:
            line += f", the slowest took {seconds_text(steps.slowest_ns)}"
            line += f" (step {steps.slowest})" if steps.slowest is not None else ""
        lines.append(line)
    return lines


def stuck_lines(timeline: Timeline) -> list[str]:
    """One line per report of a stage that took too long."""
    lines: list[str] = []
    for report in timeline.stuck:
        line = f"{report.stage} at {seconds_text(max(0, report.at_ns))}"
        if report.age_ns is not None:
            line += f": {seconds_text(report.age_ns)} old"
        if report.threshold_ns is not None:
            line += f", more than {seconds_text(report.threshold_ns)}"
        lines.append(line)
    return lines


def shared_time(timeline: Timeline) -> Iterable[str]:
    """Stages that ran while another one owned the time, where it is enough to be missed."""
    owners = dict.fromkeys(overlap.first for overlap in timeline.overlaps)
    for owner in owners:
        shared = [
            f"{overlap.second} {seconds_text(overlap.ns)}"
            for overlap in timeline.overlaps
            if overlap.first == owner and overlap.ns >= _SHARED_SHARE * timeline.total_ns
        ]
        if shared:
            yield f"counted for {owner}, which ran at the same time: {', '.join(shared)}"


def limited(lines: Sequence[str], limit: int) -> Sequence[str]:
    """The first lines, and how many more there are."""
    return lines if len(lines) <= limit else [*lines[:limit], f"… and {len(lines) - limit} more"]
