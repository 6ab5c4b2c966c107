"""Which stage held a request up, by how much, and why. Pure.

Owns the choice of the guilty stage and what goes with it. The rule that stages are judged by is
`pdtrace.analysis.outliers`', usual times are `pdtrace.analysis.baselines`', the sentences are
`pdtrace.analysis.verdict_text`'s.

Among stages that pass the rule, the one with the largest excess is guilty. Pauses inside generation
(`decode.gap`, `decode.preempted`) are judged by themselves; stages beside the chain never are:
they are other views of the same time (`prefill.bootstrap` is `decode.reserve` seen from prefill).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.analysis.baselines import (
    NESTED_LEAVES,
    Baselines,
    Leaf,
    RollingBaselines,
    Yardstick,
    leaves,
)
from pdtrace.analysis.facts import Wait
from pdtrace.analysis.outliers import DEFAULT_POLICY, Assessment, VerdictPolicy, assess
from pdtrace.analysis.timeline import StageVisit, Timeline
from pdtrace.analysis.verdict_text import (
    VerdictKind,
    find_loss,
    length_without,
    mostly_unexplained,
    sentence_of,
)
from pdtrace.analysis.waits import describe_wait
from pdtrace.duration import seconds_text
from pdtrace.spans import AttrValue
from pdtrace.stages import STAGE_BY_NAME, Kind, Mark, Outcome, WaitReason

__all__ = [
    "DEFAULT_POLICY",
    "Assessment",
    "Baselines",
    "Confidence",
    "RollingBaselines",
    "Verdict",
    "VerdictKind",
    "VerdictPolicy",
    "assess",
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

_FEW_STAGES = 3  # missing ones that a note names; more are listed elsewhere


class Confidence(StrEnum):
    """How far a verdict can be trusted."""

    HIGH = "high"
    LOW = "low"  # few peers, or an incomplete recording
    NONE = "none"  # nothing to compare with


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
    loss = find_loss(timeline) if kind is VerdictKind.ENDED else None
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
        counterfactual = length_without(timeline, stall)
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
        sentence=sentence_of(
            timeline,
            kind,
            chosen=chosen,
            stall=stall,
            assessments=assessments,
            detail=detail,
            cause=cause,
            loss=loss,
        ),
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


def _kind(
    timeline: Timeline, assessments: Sequence[Assessment], stall: Assessment | None
) -> VerdictKind:
    if timeline.open:
        return VerdictKind.IN_FLIGHT
    if timeline.outcome not in {None, Outcome.COMPLETED}:
        return VerdictKind.ENDED
    if stall is not None:
        return VerdictKind.STALLED
    if mostly_unexplained(timeline):
        return VerdictKind.UNKNOWN  # it may have stalled where nothing was recorded
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
            own = max(visits, key=_weight).cause
            inner = None if timeline.open else _wait_inside(timeline, leaf)
            return inner if own and inner and _held_longer(inner, own) else own
    if STAGE_BY_NAME[leaf.name].kind is Kind.WAIT:
        return None
    return _wait_inside(timeline, leaf)


def _wait_inside(timeline: Timeline, leaf: Leaf) -> Wait | None:
    """What a working stage waited for inside: its nested stages know."""
    nested = [v for v in timeline.visits if STAGE_BY_NAME[v.name].within == leaf.name and v.cause]
    nested = [v for v in nested if v.name not in NESTED_LEAVES.get(leaf.name, ())]
    return max(nested, key=_weight).cause if nested else None


def _held_longer(one: Wait, other: Wait) -> bool:
    """A pause of 0.3 s does not explain a stage that waited for something else for 13 s."""
    return one.for_ns is not None and other.for_ns is not None and one.for_ns > other.for_ns


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
