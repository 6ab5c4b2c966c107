"""Which stage made a request miss an objective, and whether it would have met it without. Pure.

Owns the choice of that stage and the counterfactual; usual times are
`pdtrace.analysis.baselines`'. Unlike a stall (`pdtrace.analysis.outliers`) a miss needs no outlier:
where every request is slow, the stage with the most time above its median is named all the same,
and that the median itself is too slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdtrace.analysis.baselines import Yardstick, leaves
from pdtrace.analysis.facts import longest_cause
from pdtrace.analysis.objectives import GAP, GENERATE, PREEMPTED, Aim, Gaps, Graded, limit_ns
from pdtrace.analysis.timeline import UNEXPLAINED, StageVisit, Timeline
from pdtrace.analysis.verdict import Verdict, judge
from pdtrace.analysis.verdict_text import length_without
from pdtrace.analysis.waits import describe_wait
from pdtrace.duration import seconds_text
from pdtrace.slo import Slo

_NAMES = {Aim.TTFT: "first token", Aim.TOKEN_GAP: "a gap of", Aim.E2E: "took"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """One objective that one request missed. Nanoseconds.

    value_ns    time to the first token, the longest gap (at least), the length of the request
    limit_ns    None where the objective is about how it ended
    stage       the stage with the most time above its median, before the first token for `ttft`;
                for `errors` where it ended; None if nothing was recorded
    stage_ns    time of that stage; for `token_gap` its longest gap
    usual_ns    its median, for as many tokens; None without peers
    without_ns  what `value_ns` would have been at that median; None without one
    would_meet  whether it had met this objective at that median; None: that cannot be said
    cause       what was waited for, or the reason of the end; a clause
    """

    aim: Aim
    timeline: Timeline
    value_ns: int
    limit_ns: int | None = None
    stage: str | None = None
    stage_ns: int | None = None
    usual_ns: int | None = None
    without_ns: int | None = None
    would_meet: bool | None = None
    cause: str | None = None

    @property
    def excess(self) -> float:
        """How many times the limit; of those without one, their length in seconds."""
        return self.value_ns / (self.limit_ns or 1e9)

    @property
    def sentence(self) -> str:
        """`req-1: first token after 3.20 s; prefill.queue took 2.90 s instead of the usual …`."""
        name = self.timeline.request_id or f"trace {self.timeline.trace_id}"
        if self.aim is Aim.ERRORS:
            outcome = self.timeline.outcome
            text = f"{name}: {outcome.value.replace('_', ' ') if outcome else 'ended'}"
            text += f" in {self.stage}" if self.stage else ""
            return f"{text} after {seconds_text(self.value_ns)}{self._because}."
        after = " after" if self.aim is Aim.TTFT else ""
        text = f"{name}: {_NAMES[self.aim]}{after} {seconds_text(self.value_ns)}"
        if self.stage is None:
            return f"{text}; no stage was recorded."
        if self.stage == UNEXPLAINED:
            return f"{text}; {seconds_text(self.stage_ns or 0)} of it no stage covers."
        if self.aim is Aim.TOKEN_GAP:
            text += f", in {self.stage}{self._because}"
        else:
            text += f"; {self.stage} took {seconds_text(self.stage_ns or 0)}"
            if self.usual_ns is not None:
                text += f", usually {seconds_text(self.usual_ns)}"
            text += self._because
        return f"{text}.{self._counterfactual}"

    @property
    def _because(self) -> str:
        return f" ({self.cause})" if self.cause else ""

    @property
    def _counterfactual(self) -> str:
        if self.would_meet is None:
            return ""
        if self.would_meet:
            return " At its median this request would have met the limit."
        if self.aim is Aim.TOKEN_GAP:
            return " Without it, this request would have missed the limit as well."
        without = seconds_text(self.without_ns or 0)
        return f" At its median it would have missed it as well: {without}."


def misses_of(graded: Graded, slo: Slo, baselines: Yardstick) -> tuple[Miss, ...]:
    """What one request missed, each with the stage to blame."""
    if not graded.missed:
        return ()
    timeline = graded.timeline
    verdict = judge(timeline, baselines)
    found: list[Miss] = []
    for aim in graded.missed:
        limit = limit_ns(slo, aim)
        match aim:
            case Aim.ERRORS:
                found.append(_error(timeline))
            case Aim.TTFT:
                found.append(_late_first(timeline, limit or 0, baselines, verdict))
            case Aim.E2E:
                found.append(_too_long(timeline, limit or 0, verdict))
            case Aim.TOKEN_GAP:
                if graded.gaps is not None:
                    found.append(_gap(timeline, graded.gaps, limit or 0, verdict))
    return tuple(found)


def _error(timeline: Timeline) -> Miss:
    return Miss(
        aim=Aim.ERRORS,
        timeline=timeline,
        value_ns=timeline.total_ns,
        stage=timeline.outcome_stage,
        cause=timeline.outcome_reason,
    )


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A stage's time, and what of it is above its median; `saved_ns`: what that would have saved"""

    stage: str
    ns: int
    usual_ns: int | None
    saved_ns: int


def _late_first(timeline: Timeline, limit: int, baselines: Yardstick, verdict: Verdict) -> Miss:
    """By what stages own of the time to the first token."""
    until = timeline.ttft_ns or 0
    owned: defaultdict[str, int] = defaultdict(int)
    for segment in timeline.segments:
        owned[segment.name] += max(0, min(segment.end_ns, until) - segment.begin_ns)
    suspects = [_Suspect(UNEXPLAINED, owned[UNEXPLAINED], None, owned[UNEXPLAINED])]
    for leaf in leaves(timeline):
        ns = owned[leaf.name]
        if leaf.name != leaf.outer or ns <= 0:
            continue
        usual = baselines.usual(timeline, leaf)
        usual_ns = None if usual is None else round(usual.ns)
        saved = 0 if usual_ns is None else max(0, ns - usual_ns)
        suspects.append(_Suspect(leaf.name, ns, usual_ns, saved))
    found = Miss(aim=Aim.TTFT, timeline=timeline, value_ns=until, limit_ns=limit)
    return _blame(found, suspects, verdict)


def _too_long(timeline: Timeline, limit: int, verdict: Verdict) -> Miss:
    """By the stages of the whole request; what ran beside one would have taken its time as well."""
    rest = timeline.unexplained_ns
    suspects = [_Suspect(UNEXPLAINED, rest, None, rest)]
    for assessment in verdict.assessments:
        usual = assessment.usual
        saved = 0 if usual is None else timeline.total_ns - length_without(timeline, assessment)
        usual_ns = None if usual is None else round(usual.ns)
        suspects.append(_Suspect(assessment.leaf.name, assessment.leaf.ns, usual_ns, saved))
    found = Miss(aim=Aim.E2E, timeline=timeline, value_ns=timeline.total_ns, limit_ns=limit)
    return _blame(found, suspects, verdict)


def _blame(found: Miss, suspects: Sequence[_Suspect], verdict: Verdict) -> Miss:
    """The same miss with the suspect that has the most time above its median, else the longest."""
    guilty = max(suspects, key=lambda one: (one.saved_ns, one.ns))
    if guilty.ns <= 0:
        return found
    # Nothing is usual for time that no stage covers.
    without_ns = None if guilty.usual_ns is None else found.value_ns - guilty.saved_ns
    return replace(
        found,
        stage=guilty.stage,
        stage_ns=guilty.ns,
        usual_ns=guilty.usual_ns,
        without_ns=without_ns,
        would_meet=None if without_ns is None else without_ns <= (found.limit_ns or 0),
        cause=_cause(found.timeline, guilty.stage, verdict),
    )


def _cause(timeline: Timeline, stage: str, verdict: Verdict) -> str | None:
    if verdict.stage == stage and verdict.cause:
        return verdict.cause
    waits = [wait for visit in timeline.visits_of(stage) for wait in visit.waits]
    longest = longest_cause(waits, None)
    return None if longest is None else describe_wait(longest)


def _gap(timeline: Timeline, gaps: Gaps, limit: int, verdict: Verdict) -> Miss:
    """By the pause that the worker recorded: a gap above its threshold, or a preemption."""
    longest = gaps.least_ns
    found = Miss(aim=Aim.TOKEN_GAP, timeline=timeline, value_ns=longest, limit_ns=limit)
    pauses = [v for name in (GAP, PREEMPTED) for v in timeline.visits_of(name)]
    pause = max(pauses, key=lambda visit: visit.duration_ns, default=None)
    if pause is None or pause.duration_ns <= limit or longest - pause.duration_ns > limit:
        # Slow steps, or the way from the worker to the client's socket: no pause was recorded.
        return replace(found, stage=GENERATE if timeline.visits_of(GENERATE) else None)
    usual = next((x.usual for x in verdict.assessments if x.leaf.name == pause.name), None)
    usual_ns = None if usual is None else round(usual.ns)
    would_meet = None
    if usual_ns is not None:
        would_meet = usual_ns <= limit and _were_short(gaps, pauses, pause, limit)
    return replace(
        found,
        stage=pause.name,
        stage_ns=pause.duration_ns,
        usual_ns=usual_ns,
        would_meet=would_meet,
        cause=None if pause.cause is None else describe_wait(pause.cause),
    )


def _were_short(
    gaps: Gaps, pauses: Sequence[StageVisit], longest: StageVisit, limit: int
) -> bool | None:
    """Whether all gaps but those that are pauses of the longest one's kind kept the limit."""
    if gaps.count is None:
        return None
    of_its_kind = sum(p.name == longest.name and p.duration_ns > limit for p in pauses)
    least, most = gaps.longer(limit)
    if most <= of_its_kind:
        return True
    return False if least > of_its_kind else None
