"""A verdict in words: where a request stalled, ended or is, what of it is usual, and why. Pure.

Owns the sentences, and finding the process that a request's end goes back to; which stage they
speak of is `pdtrace.analysis.verdict`'s choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text as attribute_text
from pdtrace.analysis.baselines import Leaf
from pdtrace.analysis.outliers import DEFAULT_POLICY, Assessment
from pdtrace.analysis.timeline import Timeline
from pdtrace.duration import seconds_text
from pdtrace.stages import STAGE_BY_NAME, Kind, Outcome, Scale

_WORKER_LOST = "worker_lost"
_EXITED = "process_exited"
_NONE_NS = 1_000  # a usual time below is none


class VerdictKind(StrEnum):
    """What a verdict says of a request."""

    HEALTHY = "healthy"  # it completed, and no stage passes the outlier rule
    STALLED = "stalled"  # it completed, and `stage` held it up
    ENDED = "ended"  # it did not complete; `stage` is where it ended
    IN_FLIGHT = "in_flight"  # it has not ended; `stage` is where it is
    UNKNOWN = "unknown"  # it cannot be judged: no peers, or no root


@dataclass(frozen=True, slots=True)
class Loss:
    """The process whose end a request's end goes back to."""

    instance: str
    in_order: bool

    @property
    def clause(self) -> str:
        return f"{self.instance} {'had ended' if self.in_order else 'was lost'}"

    @property
    def sentence(self) -> str:
        how = "" if self.in_order else " with it (killed, or ended without a word)"
        return self.clause + how


def find_loss(timeline: Timeline) -> Loss | None:
    """The process that took a stage of the last attempt with it, that of the stage in which the
    request ended first. None if none did, or if the outcome itself names it. What was cancelled did
    not end by a process that was lost elsewhere, such as one that only held its KV pages."""
    if timeline.outcome is Outcome.LOST:
        return None
    elsewhere = timeline.outcome is not Outcome.CANCELLED
    found = [
        visit
        for visit in timeline.visits
        if visit.outcome is Outcome.LOST
        and visit.attempt == timeline.attempts
        and (elsewhere or visit.name == timeline.outcome_stage)
    ]
    found.sort(key=lambda visit: visit.name != timeline.outcome_stage)
    for visit in found:
        if instance := attribute_text(visit.attributes, a.OUTCOME_BY) or visit.instance:
            reason = attribute_text(visit.attributes, a.OUTCOME_REASON)
            return Loss(instance, in_order=reason == _EXITED)
    return None


def length_without(timeline: Timeline, stall: Assessment) -> int:
    """The request's length had the stage taken its usual time.

    What ran beside the stage would have taken its time all the same; the end of the answer is no
    such thing, it waits for what is sent before it.
    """
    beside = sum(
        overlap.ns
        for overlap in timeline.overlaps
        if overlap.first == stall.leaf.outer and overlap.second != "gateway.finish"
    )
    return timeline.total_ns - max(0, stall.excess_ns - beside)


def sentence_of(
    timeline: Timeline,
    kind: VerdictKind,
    *,
    chosen: Assessment | None,
    stall: Assessment | None,
    assessments: Sequence[Assessment],
    detail: str | None,
    cause: str | None,
    loss: Loss | None,
) -> str:
    """The verdict for people.

    chosen  what it speaks of; `stall` passes the rule, which may be another one
    detail  nested stage that most of the time went to
    cause   what was waited for, a clause
    loss    the process whose end ended the request
    """
    first = _sentence(
        timeline, kind, chosen=chosen, stall=stall, detail=detail, cause=cause, loss=loss
    )
    return first + _further(kind, assessments, stall) + _tried_again(timeline, kind)


def _sentence(
    timeline: Timeline,
    kind: VerdictKind,
    *,
    chosen: Assessment | None,
    stall: Assessment | None,
    detail: str | None,
    cause: str | None,
    loss: Loss | None,
) -> str:
    name = timeline.request_id or timeline.trace_id
    total = seconds_text(timeline.total_ns)
    if chosen is None:
        if kind is VerdictKind.IN_FLIGHT:
            return f"{name} has been in flight for {total}; no mark says in which stage it is."
        ended = f"{_ending(timeline)} after" if kind is VerdictKind.ENDED else "took"
        return f"{name} {ended} {total}; no stage was recorded."
    stage, took = chosen.leaf.name, seconds_text(chosen.leaf.ns)
    percent = _percent(chosen.leaf.ns, timeline.total_ns)
    unknown = ""
    if mostly_unexplained(timeline):
        unexplained = _percent(timeline.unexplained_ns, timeline.total_ns)
        unknown = (
            f", {unexplained} of it unexplained: no stage covers it. Of the rest {stage} took "
            f"most: {took} ({percent})."
        )
    because = f" {cause[0].upper()}{cause[1:]}." if cause else ""
    match kind:
        case VerdictKind.ENDED:
            sentence = f"{name} {_ending(timeline, by=loss is None)}"
            if timeline.outcome_stage in {stage, chosen.leaf.outer}:
                where = stage if loss else f"{stage}{_lost_on(timeline, chosen.leaf)}"
                because_of = f"{loss.sentence}; " if loss else ""
                sentence += (
                    f" in {where}: {because_of}{took} in that stage, {total} in all.{because}"
                )
            else:
                because_of = f": {loss.sentence}" if loss else ""
                sentence += f" after {total}{because_of}; {stage} took {took}.{because}"
            if stall is not None and stall.leaf.name != stage:
                when = "After" if _begins_behind(timeline, stall.leaf, stage) else "Before"
                sentence += f" {when} that, {stall.leaf.name} took {_excess(stall)}."
            return sentence
        case VerdictKind.STALLED:
            share = chosen.excess_ns / timeline.total_ns * 100
            mostly = f" (mostly {detail})" if detail else ""
            sentence = f"{name} stalled in {stage}{mostly}: {_excess(chosen)}"
            sentence += f"; the excess is {share:.0f} % of the request."
            return f"{sentence}{because} {_without_stall(timeline, chosen)}"
        case VerdictKind.IN_FLIGHT:
            sentence = f"{name} has been in flight for {total}, in {stage} for {took}"
            if chosen.usual is not None:
                usual = f"usual {seconds_text(chosen.usual.ns)}{_for_its_tokens(chosen)}"
                sentence += f" ({usual if chosen.usual.ns >= _NONE_NS else 'others have none'})"
            sentence += f": {cause}." if cause else "."
            if stall is not None and stall.leaf.name != stage:
                sentence += f" Before that, {stall.leaf.name} took {_excess(stall)}."
            return sentence
        case VerdictKind.HEALTHY:
            sentence = f"{name} is not stalled: {total}, of which {stage} took {took} ({percent})."
            if STAGE_BY_NAME[stage].kind is Kind.WAIT:
                sentence += because + _as_others(chosen)
            return sentence
        case VerdictKind.UNKNOWN:
            why = "There is no other completed request to say whether that is slow."
            if chosen.usual is not None:
                why = (
                    "Whether it stalled there is not known."
                    if unknown and timeline.outcome
                    else "Its outcome is not known."
                )
            if unknown:
                return f"{name} took {total}{unknown}{because} {why}"
            return f"{name} took {total}, most in {stage}: {took} ({percent}).{because} {why}"


def mostly_unexplained(timeline: Timeline) -> bool:
    """Whether no stage covers more than half of a request."""
    return 2 * timeline.unexplained_ns > timeline.total_ns


def _begins_behind(timeline: Timeline, leaf: Leaf, stage: str) -> bool:
    """Whether a stage was entered only once the other one, in which a request ended, had begun:
    what its end took."""
    begins = [visit.begin_ns for visit in timeline.visits_of(leaf.name)]
    ended = [visit.begin_ns for visit in timeline.visits_of(stage)]
    return bool(begins and ended) and min(begins) > max(ended)


def _percent(ns: int, total_ns: int) -> str:
    return f"{ns / total_ns * 100 if total_ns else 0:.0f} %"


def _for_its_tokens(assessment: Assessment) -> str:
    """` for 5003 tokens`, where what is usual depends on them; a guess where peers are far off."""
    leaf, usual = assessment.leaf, assessment.usual
    if leaf.tokens is None or STAGE_BY_NAME[leaf.name].scale is Scale.CONSTANT:
        return ""
    return f" for {leaf.tokens} tokens" + (", a guess" if usual and usual.beyond else "")


def _as_others(wait: Assessment) -> str:
    """Where all wait, nobody stands out: that is no good health."""
    usual = wait.usual
    alike = usual is not None and wait.leaf.ns <= DEFAULT_POLICY.ratio * usual.ns
    return " Other requests wait there as long." if alike else ""


def _further(kind: VerdictKind, assessments: Sequence[Assessment], stall: Assessment | None) -> str:
    """A sentence on the other stages that pass the rule."""
    others = [x for x in assessments if x.stalled and x is not stall]
    if kind is not VerdictKind.STALLED or not others:
        return ""
    others.sort(key=lambda x: -x.excess_ns)
    listed = ", ".join(f"{x.leaf.name} took {_excess(x)}" for x in others)
    return f" Besides, {listed}."


def _tried_again(timeline: Timeline, kind: VerdictKind) -> str:
    """A sentence on the attempts that failed before the last one of a request that completed."""
    failed = [one for one in timeline.tries[:-1] if one.outcome not in {None, Outcome.COMPLETED}]
    if kind is VerdictKind.ENDED or kind is VerdictKind.IN_FLIGHT or not failed:
        return ""
    told = "; ".join(
        f"attempt {one.number} took {seconds_text(one.end_ns - one.begin_ns)}"
        + (f", ended in {one.stage}" if one.stage else "")
        + f" ({one.reason or one.outcome}{f', by {one.by}' if one.by else ''})"
        for one in failed
    )
    return f" It was tried again: {told}."


def _without_stall(timeline: Timeline, stall: Assessment) -> str:
    shorter = length_without(timeline, stall)
    total = seconds_text(timeline.total_ns)
    if shorter < timeline.total_ns - stall.excess_ns // 2:
        return (
            f"Without this excess it would have taken {seconds_text(shorter)} instead of {total}."
        )
    late = seconds_text(stall.excess_ns)
    return f"Other stages ran meanwhile: the first token came {late} late, the last one did not."


def _excess(assessment: Assessment) -> str:
    assert assessment.usual is not None
    took, usual = seconds_text(assessment.leaf.ns), seconds_text(assessment.usual.ns)
    if assessment.usual.ns < _NONE_NS:
        return f"{took}, where others have none"
    return f"{took} instead of the usual {usual}"


def _lost_on(timeline: Timeline, leaf: Leaf) -> str:
    """` on prefill-0`, of a request whose worker vanished, where the sentence does not name it."""
    visits = timeline.visits_of(leaf.name)
    instance = visits[-1].instance if visits else None
    if timeline.outcome_reason != _WORKER_LOST or instance in {None, timeline.outcome_by}:
        return ""
    return f" on {instance}"


def _ending(timeline: Timeline, *, by: bool = True) -> str:
    """`timed out (deadline)`, `was cancelled by client`; `by`: with who ended it."""
    match timeline.outcome:
        case Outcome.TIMED_OUT:
            phrase = "timed out"
        case Outcome.FAILED:
            phrase = "failed"
        case Outcome.LOST:
            phrase = "was lost"
        case Outcome.CANCELLED | Outcome.REJECTED as outcome:
            phrase = f"was {outcome.value}"
        case Outcome.COMPLETED | None:
            phrase = "ended"
    if by and timeline.outcome_by and timeline.outcome is not Outcome.REJECTED:
        joint = "with" if timeline.outcome is Outcome.LOST else "by"
        phrase += f" {joint} {timeline.outcome_by}"
    if timeline.outcome_reason:
        phrase += f" ({timeline.outcome_reason})"
    return phrase
