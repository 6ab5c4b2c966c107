"""Why an output token came late, from what the loop did since the token before. Pure.

Owns which cause is named and how much of the gap it took; knows nothing of engines or marks.

Every token takes a step. Up to the length of the step before, a step is ordinary; what the batch's
growth added to it is a cause like the others. The largest cause is named if it took a fair part of
the gap. Without one, the ordinary step itself is named where it is the most of the gap: the batch
is that large, unless steps of as many were much faster lately. What nothing accounts for is
`unknown`: a step that took long with no more to compute, or much longer than what more there was to
compute can account for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdtrace.stages import GapCause
from server.loop_log import Doing, Spell

FAIR_SHARE = 0.2
"""Share of a gap below which a cause is not named."""
NOBODY = ""

_PRECEDENCE = (
    GapCause.INJECTED,
    GapCause.PREEMPTION,
    GapCause.PROCESS_PAUSED,
    GapCause.INTERFERING_PREFILL,
    GapCause.TRANSFER_LANDING,
    GapCause.BATCH_GROWTH,
    GapCause.SCHEDULER_BUSY,
)
"""Of parts of equal length the first one here is named."""


class Absence(NamedTuple):
    """Time in which a sequence could take no part in a step, whatever the loop did meanwhile.

    cause     PREEMPTION or INJECTED
    blocker   request id that got its pages, where one did
    """

    cause: GapCause
    begin_ns: int
    end_ns: int
    blocker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GapAccount:
    """Where the time between two tokens of a sequence went. Nanoseconds; the parts are disjoint.

    away      absences, by cause and by request id in the way
    prompts   passes over prompts of others, by the request that had most of each
    landings  taking in KV of others, by request
    step_ns   steps of the batch
    loop_ns   the loop's own work
    paused_ns the process stood still
    lost_ns   idle, or longer ago than the loop remembers
    """

    gap_ns: int
    away: Mapping[GapCause, Mapping[str, int]] = field(
        default_factory=dict[GapCause, Mapping[str, int]]
    )
    prompts: Mapping[str, int] = field(default_factory=dict[str, int])
    landings: Mapping[str, int] = field(default_factory=dict[str, int])
    step_ns: int = 0
    loop_ns: int = 0
    paused_ns: int = 0
    lost_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChange:
    """The step that made the token, against the one before it.

    usual_ns   how long the one before took; 0 when there was none
    fastest_ns the fastest lately of as many sequences or more; None when there was none
    size       sequences in the batch, `size_before` in the step before
    kv_tokens  positions that their KV has, `kv_tokens_before` in the step before
    joined     latest other request that joined in between
    """

    usual_ns: int
    size: int
    size_before: int
    kv_tokens: int = 0
    kv_tokens_before: int = 0
    joined: str | None = None
    fastest_ns: int | None = None

    @property
    def most_growth_ns(self) -> int:
        """The most that growth can have added to a step like the one before: the square of how
        many more sequences there are, or their KV in proportion."""
        if self.size <= self.size_before and self.joined is None:
            return 0
        sizes = self.size / max(1, self.size_before)
        tokens = self.kv_tokens / max(1, self.kv_tokens_before)
        return round(self.usual_ns * max(0.0, sizes**2 - 1, tokens - 1))


class GapReason(NamedTuple):
    """The cause of a gap, the part of it that the cause took, and the request behind it."""

    cause: GapCause
    seconds: float
    blocker: str | None


def account_gap(
    begin_ns: int,
    end_ns: int,
    *,
    spells: Iterable[Spell],
    absences: Iterable[Absence] = (),
    pauses: Iterable[tuple[int, int]] = (),
    known_from_ns: int = 0,
) -> GapAccount:
    """What happened from `begin_ns` (the token before) to `end_ns` (this one).

    spells          of the loop, in order
    absences        of the sequence, in order; what the loop did meanwhile does not count
    pauses          begin and end of each time in which the process stood still, whatever the loop
                    was at; they may overlap
    known_from_ns   what the loop did before is forgotten
    """
    away: dict[GapCause, dict[str, int]] = {}
    present: list[tuple[int, int]] = []
    at_ns = begin_ns
    for absence in absences:
        left_ns = min(max(absence.begin_ns, at_ns), end_ns)
        back_ns = min(max(absence.end_ns, left_ns), end_ns)
        present.append((at_ns, left_ns))
        _add(away.setdefault(absence.cause, {}), absence.blocker or NOBODY, back_ns - left_ns)
        at_ns = back_ns
    present.append((at_ns, end_ns))
    there_ns = sum(end - begin for begin, end in present)
    for pause in pauses:
        present = _without(present, *pause)
    paused_ns = there_ns - sum(end - begin for begin, end in present)
    prompts: dict[str, int] = {}
    landings: dict[str, int] = {}
    step_ns = 0
    lost_ns = covered_ns = _overlap(present, begin_ns, known_from_ns)
    at_ns = max(begin_ns, known_from_ns)
    for spell in spells:
        ns = _overlap(present, max(spell.begin_ns, at_ns), spell.end_ns)
        at_ns = max(at_ns, spell.end_ns)
        covered_ns += ns
        who = spell.who[0] if spell.who else NOBODY
        match spell.doing:
            case Doing.PREFILL:
                _add(prompts, who, ns)
            case Doing.LANDING:
                _add(landings, who, ns)
            case Doing.DECODE:
                step_ns += ns
            case Doing.IDLE:
                lost_ns += ns
    return GapAccount(
        gap_ns=end_ns - begin_ns,
        away=away,
        prompts=prompts,
        landings=landings,
        step_ns=step_ns,
        loop_ns=sum(end - begin for begin, end in present) - covered_ns,
        paused_ns=paused_ns,
        lost_ns=lost_ns,
    )


def time_without(begin_ns: int, end_ns: int, pauses: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds from `begin_ns` to `end_ns` that are in none of `pauses`."""
    left: Sequence[tuple[int, int]] = [(begin_ns, end_ns)]
    for pause in pauses:
        left = _without(left, *pause)
    return sum(end - begin for begin, end in left)


def gap_parts(account: GapAccount, change: BatchChange) -> dict[GapCause, int]:
    """Nanoseconds of each cause. Disjoint, so that they never add up to more than the gap."""
    away = account.away
    return {
        GapCause.INJECTED: sum(away.get(GapCause.INJECTED, {}).values()),
        GapCause.PREEMPTION: sum(away.get(GapCause.PREEMPTION, {}).values()),
        GapCause.PROCESS_PAUSED: account.paused_ns,
        GapCause.INTERFERING_PREFILL: sum(account.prompts.values()),
        GapCause.TRANSFER_LANDING: sum(account.landings.values()),
        GapCause.BATCH_GROWTH: min(
            max(0, account.step_ns - change.usual_ns), change.most_growth_ns
        ),
        GapCause.SCHEDULER_BUSY: account.loop_ns,
    }


def explain_gap(account: GapAccount, change: BatchChange) -> GapReason:
    """The cause to name. Parts of equal length are decided by the order of the causes."""
    parts = gap_parts(account, change)
    fair_ns = FAIR_SHARE * account.gap_ns
    cause = max(_PRECEDENCE, key=parts.__getitem__)
    if parts[cause] > 0 and parts[cause] >= fair_ns:
        return GapReason(cause, parts[cause] / 1e9, _blocker(cause, account, change))
    ordinary_ns = min(account.step_ns, change.usual_ns)
    if change.fastest_ns is not None:
        ordinary_ns = min(ordinary_ns, change.fastest_ns)
    rest_ns = account.gap_ns - ordinary_ns - sum(parts.values())
    if ordinary_ns >= max(fair_ns, rest_ns):
        whole_ns = ordinary_ns + parts[GapCause.BATCH_GROWTH]
        return GapReason(GapCause.BATCH_GROWTH, whole_ns / 1e9, change.joined)
    return GapReason(GapCause.UNKNOWN, rest_ns / 1e9, None)


def _blocker(cause: GapCause, account: GapAccount, change: BatchChange) -> str | None:
    if cause is GapCause.BATCH_GROWTH:
        return change.joined
    by_request: Mapping[str, int]
    if cause is GapCause.INTERFERING_PREFILL:
        by_request = account.prompts
    elif cause is GapCause.TRANSFER_LANDING:
        by_request = account.landings
    else:
        by_request = account.away.get(cause, {})
    most = max(by_request, key=by_request.__getitem__, default=NOBODY)
    return most or None


def _overlap(present: Sequence[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    return sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in present)


def _without(
    stretches: Sequence[tuple[int, int]], begin_ns: int, end_ns: int
) -> list[tuple[int, int]]:
    parts = [
        part
        for begin, end in stretches
        for part in ((begin, min(end, begin_ns)), (max(begin, end_ns), end))
    ]
    return [(begin, end) for begin, end in parts if begin < end]


def _add(totals: dict[str, int], who: str, ns: int) -> None:
    if ns > 0:
        totals[who] = totals.get(who, 0) + ns
