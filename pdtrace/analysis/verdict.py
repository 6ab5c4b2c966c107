"""Which stage held a request up, by how much, and why. Pure.

Owns the outlier rule (`VerdictPolicy`), the choice of the guilty stage, and the sentences. Usual
times come from `pdtrace.analysis.baselines`.

The rule: a stage has stalled a request if its excess over its usual time

- is at least `floor_s`, and at least `spreads` times its peers' spread,
- is at least `share` of the whole request, and
- makes the stage at least `ratio` times as long as usual.

Among stages that pass, the one with the largest excess is guilty. Pauses inside generation
(`decode.gap`, `decode.preempted`) are judged by themselves; stages beside the chain never are:
they are other views of the same time (`prefill.bootstrap` is `decode.reserve` seen from prefill).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text as attribute_text
from pdtrace.analysis.baselines import (
    NESTED_LEAVES,
    Baselines,
    Leaf,
    RollingBaselines,
    Usual,
    Yardstick,
    leaves,
)
from pdtrace.analysis.facts import Wait
from pdtrace.analysis.timeline import StageVisit, Timeline
from pdtrace.analysis.waits import describe_wait
from pdtrace.duration import seconds_text
from pdtrace.spans import AttrValue
from pdtrace.stages import STAGE_BY_NAME, Kind, Mark, Outcome, Scale, WaitReason

__all__ = [
    "Assessment",
    "Baselines",
    "Confidence",
    "RollingBaselines",
    "Verdict",
    "VerdictKind",
    "VerdictPolicy",
    "judge",
    "judge_all",
    "stall_attributes",
]

# The same time, seen by another process; it may know the reason where the stage itself does not.
_MIRRORS = {"decode.reserve": "prefill.bootstrap"}


_ADVICE_OF_REASONS: Mapping[str, str] = MappingProxyType(
    {
        WaitReason.PROCESS_PAUSED: "Look for who stopped it (SIGSTOP, a debugger, a freezer) and "
        "for a host that is short of memory or processors.",
        WaitReason.NO_WORKER: "Look which workers are dead, stopped or starting (GET /health), and "
        "add some.",
    }
)
"""What to do about a reason, whichever stage waits for it."""
_WORKER_LOST = "worker_lost"
_EXITED = "process_exited"
_FEW_STAGES = 3  # missing ones that a note names; more are listed elsewhere
_NONE_NS = 1_000  # a usual time below is none


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictPolicy:
    """When an excess counts as a stall. Raises ValueError for values out of range.

    floor_s        seconds; shorter excesses never count
    spreads        how many of its peers' spreads an excess must reach
    share          part of the request, 0 to 1, that an excess must make up
    ratio          how many times its usual time the stage must take
    enough_peers   with fewer peers a verdict's confidence is low
    """

    floor_s: float = 0.3
    spreads: float = 4.0
    share: float = 0.25
    ratio: float = 1.5
    enough_peers: int = 5

    def __post_init__(self) -> None:
        if self.floor_s < 0 or self.spreads < 0 or not 0 <= self.share <= 1 or self.ratio < 1:
            raise ValueError(
                f"{self}: floor_s and spreads must be 0 or more, share 0 to 1, ratio 1 or more"
            )
        if self.enough_peers < 1:
            raise ValueError(f"enough_peers is {self.enough_peers}; it must be 1 or more")


DEFAULT_POLICY = VerdictPolicy()


class VerdictKind(StrEnum):
    """What a verdict says of a request."""

    HEALTHY = "healthy"  # it completed, and no stage passes the outlier rule
    STALLED = "stalled"  # it completed, and `stage` held it up
    ENDED = "ended"  # it did not complete; `stage` is where it ended
    IN_FLIGHT = "in_flight"  # it has not ended; `stage` is where it is
    UNKNOWN = "unknown"  # it cannot be judged: no peers, or no root


class Confidence(StrEnum):
    """How far a verdict can be trusted."""

    HIGH = "high"
    LOW = "low"  # few peers, or an incomplete recording
    NONE = "none"  # nothing to compare with


@dataclass(frozen=True, slots=True)
class Assessment:
    """One judged leaf. `usual` is None without peers; `stalled` says it passes the rule."""

    leaf: Leaf
    usual: Usual | None
    stalled: bool

    @property
    def excess_ns(self) -> int:
        """Nanoseconds above the usual time; 0 without peers or below it."""
        return 0 if self.usual is None else max(0, self.leaf.ns - round(self.usual.ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer for one request.

    stage              guilty stage (STALLED), stage it ended in (ENDED) or is in (IN_FLIGHT),
                       longest one otherwise; None if no stage was recorded
    chain_stage        the chain stage that `stage` lies in; the same unless it is a pause
    detail             nested stage that most of the time went to (`transfer.copy`), or None
    stage_ns           time of `stage` in the partition; in flight, since it was last entered
    usual_ns           its usual time; None without peers
    excess_ns          time above usual; None without peers
    share              part of the request that the excess makes up; of `stage_ns` without peers
    counterfactual_ns  length of the request had the stage taken its usual time, or None
    stall              the assessment that passes the rule, also for a request that did not
                       complete; None if none does
    cause              clause that says what was waited for, with its numbers, or which process was
                       lost with the stage that the request ended in; or None
    wait               the wait behind `cause`
    notes              sentences on what weakens the verdict
    sentence           the verdict for people, one or two sentences
    """

    kind: VerdictKind
    stage: str | None
    chain_stage: str | None
    detail: str | None
    stage_ns: int
    usual_ns: int | None
    excess_ns: int | None
    share: float
    counterfactual_ns: int | None
    stall: Assessment | None
    cause: str | None
    wait: Wait | None
    advice: str | None
    confidence: Confidence
    peers: int
    notes: tuple[str, ...]
    assessments: tuple[Assessment, ...]
    sentence: str

    @property
    def stalled(self) -> bool:
        """Whether some stage passes the outlier rule."""
        return self.stall is not None


def judge_all(
    timelines: Sequence[Timeline], policy: VerdictPolicy = DEFAULT_POLICY
) -> list[Verdict]:
    """Judge each request against the others."""
    baselines = Baselines(timelines)
    return [judge(timeline, baselines, policy) for timeline in timelines]


def judge(
    timeline: Timeline, baselines: Yardstick, policy: VerdictPolicy = DEFAULT_POLICY
) -> Verdict:
    """Judge one request; `baselines` may or may not hold it, it is never compared with itself."""
    assessments = tuple(
        assess(leaf, baselines.usual(timeline, leaf), timeline.total_ns, policy)
        for leaf in leaves(timeline)
    )
    stall = max((x for x in assessments if x.stalled), key=lambda x: x.excess_ns, default=None)
    kind = _kind(timeline, assessments, stall)
    if kind is VerdictKind.IN_FLIGHT:
        assessments = tuple(_since_entered(timeline, x) for x in assessments)
    chosen = _chosen(timeline, kind, assessments, stall)
    wait = _wait(timeline, chosen.leaf) if chosen else None
    cause = _cause(timeline, chosen.leaf, wait) if chosen and wait else None
    loss = _loss(timeline) if kind is VerdictKind.ENDED else None
    detail = _detail(timeline, chosen.leaf) if chosen else None
    peers = chosen.usual.peers if chosen and chosen.usual else 0
    beyond = bool(chosen and chosen.usual and chosen.usual.beyond)
    notes = [*_notes(timeline, kind, peers, policy)]
    if beyond and chosen is not None:
        notes.append(
            f"No other request has half as many tokens: the usual time of {chosen.leaf.name} is "
            "a guess."
        )
    excess = chosen.excess_ns if chosen and chosen.usual else None
    counterfactual = None
    if kind is VerdictKind.STALLED and stall is not None:
        counterfactual = _counterfactual(timeline, stall)
    share = 0.0
    if chosen and timeline.total_ns:
        share = (chosen.leaf.ns if excess is None else excess) / timeline.total_ns
    return Verdict(
        kind=kind,
        stage=chosen.leaf.name if chosen else None,
        chain_stage=chosen.leaf.outer if chosen else None,
        detail=detail,
        stage_ns=chosen.leaf.ns if chosen else 0,
        usual_ns=round(chosen.usual.ns) if chosen and chosen.usual else None,
        excess_ns=excess,
        share=share,
        counterfactual_ns=counterfactual,
        stall=stall,
        cause=loss.clause if loss else cause,
        wait=wait,
        advice=_advice(chosen.leaf, wait) if chosen else None,
        confidence=_confidence(timeline, kind, peers, policy, beyond=beyond),
        peers=peers,
        notes=tuple(notes),
        assessments=assessments,
        sentence=_sentence(
            timeline, kind, chosen=chosen, stall=stall, detail=detail, cause=cause, loss=loss
        )
        + _further(kind, assessments, stall)
        + _tried_again(timeline, kind),
    )


def stall_attributes(
    verdict: Verdict, policy: VerdictPolicy = DEFAULT_POLICY
) -> dict[str, AttrValue]:
    """`pd.stall.*` for the root span; empty if no stage passes the rule, or too few peers say so.

    An attribute outlives the doubts that stand beside a verdict, so it is not given lightly.
    """
    if verdict.stall is None or verdict.stall.usual is None:
        return {}
    if verdict.stall.usual.peers < policy.enough_peers or verdict.stall.usual.beyond:
        return {}
    attributes: dict[str, AttrValue] = {
        a.STALL_STAGE.key: verdict.stall.leaf.name,
        a.STALL_SECONDS.key: verdict.stall.excess_ns / 1e9,
    }
    if verdict.wait is not None and verdict.stage == verdict.stall.leaf.name:
        attributes[a.STALL_REASON.key] = verdict.wait.reason
    return attributes


def assess(leaf: Leaf, usual: Usual | None, total_ns: int, policy: VerdictPolicy) -> Assessment:
    if usual is None:
        return Assessment(leaf, None, stalled=False)
    excess = leaf.ns - usual.ns
    stalled = (
        excess > 0
        and excess >= policy.floor_s * 1e9
        and excess >= policy.spreads * usual.spread_ns
        and excess >= policy.share * total_ns
        and leaf.ns >= policy.ratio * usual.ns
    )
    return Assessment(leaf, usual, stalled)


def _kind(
    timeline: Timeline, assessments: Sequence[Assessment], stall: Assessment | None
) -> VerdictKind:
    if timeline.open:
        return VerdictKind.IN_FLIGHT
    if timeline.outcome not in {None, Outcome.COMPLETED}:
        return VerdictKind.ENDED
    if stall is not None:
        return VerdictKind.STALLED
    judged = any(assessment.usual is not None for assessment in assessments)
    return VerdictKind.HEALTHY if judged and timeline.outcome else VerdictKind.UNKNOWN


def _chosen(
    timeline: Timeline,
    kind: VerdictKind,
    assessments: Sequence[Assessment],
    stall: Assessment | None,
) -> Assessment | None:
    """The stage a verdict speaks of."""
    if kind is VerdictKind.IN_FLIGHT:
        here = timeline.current
        at = next((x for x in assessments if here and x.leaf.name == here.name), None)
        return at and _open_pause_or(timeline, at, assessments)
    if kind is VerdictKind.ENDED:
        for assessment in assessments:
            if assessment.leaf.name == timeline.outcome_stage:
                return _pause_or(assessment, assessments)
    if stall is not None:
        return stall
    return max(assessments, key=lambda x: x.leaf.ns, default=None)


def _pause_or(ended: Assessment, assessments: Sequence[Assessment]) -> Assessment:
    """The pause that most of the ended stage's time went to, else the stage."""
    pauses = [x for x in assessments if x.leaf.outer == ended.leaf.name and x is not ended]
    longest = max(pauses, key=lambda x: x.leaf.ns, default=None)
    return longest if longest and longest.leaf.ns > ended.leaf.ns else ended


def _since_entered(timeline: Timeline, assessment: Assessment) -> Assessment:
    """The stage that a request is in, as old as its open visit: not with those before it."""
    open_visits = [v for v in timeline.visits if v.open and v.name == assessment.leaf.name]
    here = timeline.current
    if not open_visits or here is None or assessment.leaf.outer != here.name:
        return assessment
    leaf = assessment.leaf
    entered = Leaf(leaf.name, leaf.outer, open_visits[-1].duration_ns, leaf.tokens)
    return replace(assessment, leaf=entered)


def _open_pause_or(
    timeline: Timeline, here: Assessment, assessments: Sequence[Assessment]
) -> Assessment:
    """The pause that goes on inside the stage that a request is in, else the stage."""
    open_names = {visit.name for visit in timeline.visits if visit.open}
    pauses = [x for x in assessments if x.leaf.outer == here.leaf.name and x is not here]
    return next((x for x in pauses if x.leaf.name in open_names), here)


def _wait(timeline: Timeline, leaf: Leaf) -> Wait | None:
    for name in (leaf.name, _MIRRORS.get(leaf.name)):
        visits = [visit for visit in timeline.visits if visit.name == name and visit.cause]
        if timeline.open:
            # What it waits for, not what it waited for: the last word of the visit that goes on.
            visits = [visit for visit in visits if visit.open]
            if visits:
                return visits[-1].waits[-1]
        if visits:
            return max(visits, key=_weight).cause
    if STAGE_BY_NAME[leaf.name].kind is Kind.WAIT:
        return None
    # A working stage that waited inside: its nested stages know.
    nested = [v for v in timeline.visits if STAGE_BY_NAME[v.name].within == leaf.name and v.cause]
    nested = [v for v in nested if v.name not in NESTED_LEAVES.get(leaf.name, ())]
    return max(nested, key=_weight).cause if nested else None


def _cause(timeline: Timeline, leaf: Leaf, wait: Wait) -> str:
    """What was waited for; of several gaps it is the longest one's cause."""
    gaps = timeline.visits_of(leaf.name) if STAGE_BY_NAME[leaf.name].end is Mark.TOKEN_GAP else ()
    clause = describe_wait(wait)
    return f"the longest of {len(gaps)} gaps: {clause}" if len(gaps) > 1 else clause


def _advice(leaf: Leaf, wait: Wait | None) -> str:
    reason = wait.reason if wait is not None else None
    return _ADVICE_OF_REASONS.get(reason or "") or STAGE_BY_NAME[leaf.name].advice


def _weight(visit: StageVisit) -> tuple[int, int]:
    return (visit.owned_ns, visit.duration_ns)


def _detail(timeline: Timeline, leaf: Leaf) -> str | None:
    """The nested stage that more than half of a stage's time went to."""
    if leaf.name != leaf.outer or leaf.ns <= 0:
        return None
    inner = [p for p in timeline.details.get(leaf.name, ()) if p.name != leaf.name]
    longest = max(inner, key=lambda part: part.ns, default=None)
    return longest.name if longest and longest.ns * 2 > leaf.ns else None


def _confidence(
    timeline: Timeline, kind: VerdictKind, peers: int, policy: VerdictPolicy, *, beyond: bool
) -> Confidence:
    if kind is VerdictKind.UNKNOWN:
        return Confidence.NONE
    if kind is VerdictKind.IN_FLIGHT and peers == 0:
        return Confidence.NONE
    doubtful = timeline.root_id is None or a.INCOMPLETE.key in timeline.attributes
    if kind is not VerdictKind.ENDED and (peers < policy.enough_peers or beyond):
        doubtful = True
    # A missing stage leaves its time unexplained: that may be the stall.
    if timeline.unexplained_ns > policy.share * timeline.total_ns:
        doubtful = True
    return Confidence.LOW if doubtful else Confidence.HIGH


def _notes(timeline: Timeline, kind: VerdictKind, peers: int, policy: VerdictPolicy) -> list[str]:
    notes: list[str] = []
    if peers == 0:
        notes.append("No other completed request to compare with.")
    elif peers < policy.enough_peers and kind is not VerdictKind.ENDED:
        s = "" if peers == 1 else "s"
        notes.append(f"Compared with only {peers} request{s}: the usual times are uncertain.")
    if timeline.unexplained_ns > policy.share * timeline.total_ns:
        missing = sorted(
            {v.stage for v in timeline.violations if v.kind == "missing_stage" and v.stage}
        )
        which = f" (missing: {', '.join(missing)})" if 0 < len(missing) <= _FEW_STAGES else ""
        notes.append(
            f"{seconds_text(timeline.unexplained_ns)} of the request is not covered by any stage"
            f"{which}: the cause may lie there."
        )
    return notes


def _counterfactual(timeline: Timeline, stall: Assessment) -> int:
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


def _sentence(
    timeline: Timeline,
    kind: VerdictKind,
    *,
    chosen: Assessment | None,
    stall: Assessment | None,
    detail: str | None,
    cause: str | None,
    loss: _Loss | None,
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
    mostly_unexplained = ""
    if 2 * timeline.unexplained_ns > timeline.total_ns:
        unexplained = _percent(timeline.unexplained_ns, timeline.total_ns)
        mostly_unexplained = (
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
            sentence = f"{name} is not stalled: {total}{mostly_unexplained}"
            if not mostly_unexplained:
                sentence = (
                    f"{name} is not stalled: {total}, of which {stage} took {took} ({percent})."
                )
            if STAGE_BY_NAME[stage].kind is Kind.WAIT:
                sentence += because + _as_others(chosen)
            return sentence
        case VerdictKind.UNKNOWN:
            why = "There is no other completed request to say whether that is slow."
            if chosen.usual is not None:
                why = "Its outcome is not known."
            if mostly_unexplained:
                return f"{name} took {total}{mostly_unexplained}{because} {why}"
            return f"{name} took {total}, most in {stage}: {took} ({percent}).{because} {why}"


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
    shorter = _counterfactual(timeline, stall)
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


@dataclass(frozen=True, slots=True)
class _Loss:
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


def _loss(timeline: Timeline) -> _Loss | None:
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
            return _Loss(instance, in_order=reason == _EXITED)
    return None


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
