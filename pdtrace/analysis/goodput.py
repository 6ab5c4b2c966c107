"""How many requests kept the objectives: goodput, shares against targets, what the misses cost.

Owns the algebra over many requests and the definition of what counts; whether one request kept an
objective is `pdtrace.analysis.objectives`', what made it miss is `pdtrace.analysis.misses`'. Pure.

What a recording does not tell is never guessed: a count is then two numbers, at least and at most,
and an objective is met only if it is for both.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.analysis.baselines import Baselines
from pdtrace.analysis.misses import Miss, misses_of
from pdtrace.analysis.objectives import Aim, Graded, Held, aims_of, grade, limit_ns, target_of
from pdtrace.analysis.timeline import Timeline
from pdtrace.duration import seconds_text
from pdtrace.slo import Slo
from pdtrace.stages import Outcome

MAX_WORST = 3
"""Misses of each objective that are named."""
UNNAMED_MODEL = "(not recorded)"


class GapForm(StrEnum):
    """What an objective on gaps between tokens says. The two are different promises."""

    POOLED = "pooled"  # a share of the gaps of all streams together
    REQUESTS = "requests"  # a share of the streams, in each of which every gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which requests are looked at. Times are Unix nanoseconds; None: all."""

    model: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None

    def takes(self, timeline: Timeline) -> bool:
        """Whether a request begun then, for that model, is one of them."""
        began = timeline.started_unix_ns
        return (
            (self.model is None or model_of(timeline) == self.model)
            and (self.since_ns is None or began >= self.since_ns)
            and (self.until_ns is None or began <= self.until_ns)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of the values that are known: how many, and some of them. Nanoseconds."""

    known: int
    p50_ns: int
    p90_ns: int
    p99_ns: int
    most_ns: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """How far one objective was kept. `kept_least` and `kept_most` differ by what is not known.

    promise  the objective in words, with its form
    unit     what is counted: requests, streams or gaps
    uncounted  streams whose gaps nobody counted, and not all of them are known to be short: a
               pooled share lacks them
    spread   of the values of single requests, where there are such
    """

    aim: Aim
    promise: str
    unit: str
    limit_s: float | None
    target: float
    counted: int
    kept_least: int
    kept_most: int
    uncounted: int = 0
    spread: Spread | None = None

    @property
    def least(self) -> float | None:
        return self.kept_least / self.counted if self.counted else None

    @property
    def most(self) -> float | None:
        return self.kept_most / self.counted if self.counted else None

    @property
    def met(self) -> bool | None:
        """None: nothing was counted, or what is known does not tell."""
        if self.least is None or self.most is None:
            return None
        if self.least >= self.target and not self.uncounted:
            return True
        return False if self.most < self.target and not self.uncounted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that completed within every limit. `good_least` and `good_most` differ by those of
    which the recording does not tell it.

    requests  all that ended, however
    seconds   from the first one's begin to the last one's end
    tokens    output tokens of those that are good for certain; `tokens_unknown` of these did not
              record theirs
    """

    requests: int
    good_least: int
    good_most: int
    seconds: float
    tokens: int
    tokens_unknown: int
    attainments: tuple[Attainment, ...]

    def per_second(self, count: float) -> float | None:
        """None where no time passed."""
        return count / self.seconds if self.seconds > 0 else None

    @property
    def ok(self) -> bool:
        """Whether something was judged, and every objective that counts anything is met."""
        judged = [one for one in self.attainments if one.counted or one.uncounted]
        return bool(judged) and all(one.met for one in judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """Misses of one objective that one stage is to blame for.

    met_at_median  those that had kept it with that stage at its median, of `judged`
    """

    aim: Aim
    stage: str | None
    count: int
    judged: int
    met_at_median: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SloReport:
    """The answer of `pdtrace slo`.

    goods      what makes a request good, in words
    models     by name, where there are several
    outcomes   of all requests that ended
    retried    requests that were tried more than once: each counts once, as its last try went
    cut_off    streams that ended before their first token, and those of them that had waited for
               longer than the limit: `ttft` does not count them
    seen_late  streams whose gaps are known from the decode worker only
    rootless   requests that are not counted, as their root is missing: nobody knows how they ended
    open       requests in flight, which are not counted
    warnings   why the shares may not be those of all requests
    """

    source: str
    gap_form: GapForm
    choice: Choice
    goods: str
    total: Goodput
    models: Mapping[str, Goodput]
    outcomes: Mapping[str, int]
    retried: int
    cut_off: tuple[int, int]
    seen_late: int
    rootless: int
    open: int
    blamed: tuple[Blamed, ...]
    worst: tuple[Miss, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The headline."""
        total = self.total
        several = total.good_most != total.good_least
        good = f"{total.good_least} to {total.good_most}" if several else f"{total.good_least}"
        verb = "was" if total.good_most == 1 else "were"
        headline = f"{good} of {_many(total.requests, 'request')} {verb} good"
        rate = total.per_second(total.good_least)
        if rate is None:
            return f"{headline}."
        rates = _rate(rate)
        if several:
            rates += f" to {_rate(total.per_second(total.good_most) or 0)}"
        offered = _rate(total.per_second(total.requests) or 0)
        tokens = _rate(total.per_second(total.tokens) or 0)
        least = " at least" if total.tokens_unknown or several else ""
        return (
            f"{headline}: goodput {rates} of {offered} requests/s, and{least} {tokens} tokens/s, "
            f"over {seconds_text(total.seconds * 1e9)}."
        )

    def document(self) -> dict[str, Any]:
        """The report as one JSON object (`pdtrace slo --json`)."""
        return {
            "schema": "pdtrace.slo/1",
            "source": self.source,
            "ok": self.total.ok,
            "model": self.choice.model,
            "since_unix_ns": self.choice.since_ns,
            "until_unix_ns": self.choice.until_ns,
            "token_gap_form": self.gap_form.value,
            "good_means": self.goods,
            **_goodput_document(self.total),
            "models": {name: _goodput_document(one) for name, one in self.models.items()},
            "outcomes": dict(self.outcomes),
            "retried": self.retried,
            "ended_before_first_token": self.cut_off[0],
            "ended_before_first_token_late": self.cut_off[1],
            "gaps_seen_by_worker": self.seen_late,
            "without_root": self.rootless,
            "in_flight": self.open,
            "misses": [
                {
                    "objective": one.aim.value,
                    "stage": one.stage,
                    "requests": one.count,
                    "judged_at_median": one.judged,
                    "met_at_median": one.met_at_median,
                }
                for one in self.blamed
            ],
            "worst": [
                {
                    "objective": miss.aim.value,
                    "request_id": miss.timeline.request_id,
                    "trace_id": miss.timeline.trace_id,
                    "value_ns": miss.value_ns,
                    "limit_ns": miss.limit_ns,
                    "stage": miss.stage,
                    "stage_ns": miss.stage_ns,
                    "usual_ns": miss.usual_ns,
                    "at_median_ns": miss.without_ns,
                    "met_at_median": miss.would_meet,
                    "cause": miss.cause,
                    "sentence": miss.sentence,
                }
                for miss in self.worst
            ],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def _goodput_document(one: Goodput) -> dict[str, Any]:
    return {
        "requests": one.requests,
        "good": {"least": one.good_least, "most": one.good_most},
        "seconds": one.seconds,
        "goodput_rps": {
            "least": one.per_second(one.good_least),
            "most": one.per_second(one.good_most),
        },
        "requests_rps": one.per_second(one.requests),
        "good_tokens": one.tokens,
        "good_tokens_unknown": one.tokens_unknown,
        "goodput_tokens_per_s": one.per_second(one.tokens),
        "objectives": [_attainment_document(x) for x in one.attainments],
    }


def _attainment_document(one: Attainment) -> dict[str, Any]:
    spread = one.spread
    return {
        "name": one.aim.value,
        "promise": one.promise,
        "limit_s": one.limit_s,
        "target": one.target,
        "unit": one.unit,
        "counted": one.counted,
        "uncounted": one.uncounted,
        "kept": {"least": one.kept_least, "most": one.kept_most},
        "attainment": {"least": one.least, "most": one.most},
        "met": one.met,
        "spread": None
        if spread is None
        else {
            "known": spread.known,
            "p50_ns": spread.p50_ns,
            "p90_ns": spread.p90_ns,
            "p99_ns": spread.p99_ns,
            "most_ns": spread.most_ns,
        },
    }


def model_of(timeline: Timeline) -> str:
    return text(timeline.attributes, a.REQUEST_MODEL) or UNNAMED_MODEL


def measure(
    timelines: Iterable[Timeline],
    slo: Slo,
    *,
    source: str = "",
    aims: Sequence[Aim] | None = None,
    gap_form: GapForm = GapForm.POOLED,
    choice: Choice = Choice(),
    in_flight: int = 0,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    worst: int = MAX_WORST,
) -> SloReport:
    """Hold the requests of a source to the objectives.

    aims       those to judge; None: all that something is promised of
    in_flight  requests that are known to be in flight beside `timelines`
    worst      misses of each objective that are named
    """
    wanted = aims_of(slo) if aims is None else tuple(aim for aim in aims_of(slo) if aim in aims)
    everything = list(timelines)
    baselines = Baselines(everything)  # of all: what is usual does not depend on who asks
    chosen = [timeline for timeline in everything if choice.takes(timeline)]
    ended = [t for t in chosen if not t.open and t.root_id is not None]
    graded = [grade(timeline, slo, wanted) for timeline in ended]
    by_model: defaultdict[str, list[Graded]] = defaultdict(list)
    for one in graded:
        by_model[model_of(one.timeline)].append(one)
    misses = [miss for one in graded for miss in misses_of(one, slo, baselines)]
    cut_off = [
        t.total_ns
        for t in ended
        if t.attributes.get(a.STREAM.key) is True
        and t.ttft_ns is None
        and t.outcome not in {None, Outcome.COMPLETED, Outcome.REJECTED}
    ]
    late = [ns for ns in cut_off if ns > (limit_ns(slo, Aim.TTFT) or 0)]
    return SloReport(
        source=source,
        gap_form=gap_form,
        choice=choice,
        goods=_goods(slo, wanted),
        total=_goodput(graded, slo, wanted, gap_form),
        models={name: _goodput(by_model[name], slo, wanted, gap_form) for name in sorted(by_model)}
        if len(by_model) > 1
        else {},
        outcomes=dict(
            sorted(Counter(t.outcome.value if t.outcome else "unknown" for t in ended).items())
        ),
        retried=sum(t.attempts > 1 for t in ended),
        cut_off=(len(cut_off), len(late)),
        seen_late=sum(one.gaps is not None and not one.gaps.exact for one in graded)
        if Aim.TOKEN_GAP in wanted
        else 0,
        rootless=sum(not t.open and t.root_id is None for t in chosen),
        open=in_flight + sum(t.open for t in chosen),
        blamed=_blamed(misses),
        worst=_worst(misses, worst),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _goodput(graded: Sequence[Graded], slo: Slo, aims: Sequence[Aim], gap_form: GapForm) -> Goodput:
    sure = [one for one in graded if one.good is Held.KEPT]
    maybe = [one for one in graded if one.good is Held.UNKNOWN]
    written = [one.timeline.output_tokens for one in sure]
    begins = [one.timeline.started_unix_ns for one in graded]
    ends = [one.timeline.started_unix_ns + one.timeline.total_ns for one in graded]
    return Goodput(
        requests=len(graded),
        good_least=len(sure),
        good_most=len(sure) + len(maybe),
        seconds=(max(ends) - min(begins)) / 1e9 if graded else 0.0,
        tokens=sum(tokens for tokens in written if tokens is not None and tokens > 0),
        tokens_unknown=sum(tokens is None or tokens < 0 for tokens in written),
        attainments=tuple(_attained(graded, slo, aim, gap_form) for aim in aims),
    )


def _attained(graded: Sequence[Graded], slo: Slo, aim: Aim, gap_form: GapForm) -> Attainment:
    limit, target = limit_ns(slo, aim), target_of(slo, aim)
    counted = [one for one in graded if aim in one.held]
    kept = sum(one.held[aim] is Held.KEPT for one in counted)
    unknown = sum(one.held[aim] is Held.UNKNOWN for one in counted)
    of, least, most, uncounted = len(counted), kept, kept + unknown, 0
    if aim is Aim.TOKEN_GAP and gap_form is GapForm.POOLED and limit is not None:
        gaps = [one.gaps for one in counted if one.gaps is not None]
        longer = [one.longer(limit) for one in gaps]
        of = sum(one.count or 0 for one in gaps)
        least, most = (of - sum(high for _, high in longer), of - sum(low for low, _ in longer))
        uncounted = sum(one.count is None and one.held(limit) is not Held.KEPT for one in gaps)
    return Attainment(
        aim=aim,
        promise=_promise(aim, target, limit, gap_form),
        unit=_unit(aim, gap_form),
        limit_s=None if limit is None else limit / 1e9,
        target=target,
        counted=of,
        kept_least=least,
        kept_most=most,
        uncounted=uncounted,
        spread=_spread(aim, counted),
    )


def _unit(aim: Aim, gap_form: GapForm) -> str:
    if aim is Aim.TOKEN_GAP and gap_form is GapForm.POOLED:
        return "gaps"
    return "streams" if aim in {Aim.TTFT, Aim.TOKEN_GAP} else "requests"


def _promise(aim: Aim, target: float, limit: int | None, gap_form: GapForm) -> str:
    percent = f"{target * 100:.6g}"
    share, at_most = f"{percent} %", seconds_text(limit or 0)
    match aim:
        case Aim.TTFT:
            return f"{share} of streams have their first token within {at_most}"
        case Aim.TOKEN_GAP if gap_form is GapForm.POOLED:
            return f"the {percent}th percentile of pooled gaps between tokens is at most {at_most}"
        case Aim.TOKEN_GAP:
            return f"every gap between tokens is at most {at_most} in {share} of streams"
        case Aim.ERRORS:
            return f"{share} of requests that were admitted and not cancelled complete"
        case Aim.E2E:
            return f"{share} of completed requests take at most {at_most}"


def _goods(slo: Slo, aims: Sequence[Aim]) -> str:
    clauses = ["it completed"]
    if Aim.TTFT in aims:
        clauses.append(
            f"its first token came within {seconds_text(slo.ttft_s * 1e9)} if it streams"
        )
    if Aim.TOKEN_GAP in aims:
        limit = seconds_text(slo.token_gap_s * 1e9)
        clauses.append(f"every gap between its tokens was at most {limit} if it streams")
    if Aim.E2E in aims and slo.e2e_s is not None:
        clauses.append(f"it took at most {seconds_text(slo.e2e_s * 1e9)}")
    listed = " and ".join(filter(None, (", ".join(clauses[:-1]), clauses[-1])))
    return f"A request is good if {listed}."


def _spread(aim: Aim, counted: Sequence[Graded]) -> Spread | None:
    match aim:
        case Aim.TTFT:
            values = [one.timeline.ttft_ns for one in counted if one.timeline.ttft_ns is not None]
        case Aim.TOKEN_GAP:
            values = [one.gaps.least_ns for one in counted if one.gaps and one.gaps.exact]
        case Aim.E2E:
            values = [one.timeline.total_ns for one in counted]
        case Aim.ERRORS:
            values = []
    if not values:
        return None
    values.sort()
    return Spread(
        known=len(values),
        p50_ns=_nearest_rank(values, 0.5),
        p90_ns=_nearest_rank(values, 0.9),
        p99_ns=_nearest_rank(values, 0.99),
        most_ns=values[-1],
        values=tuple(values),
    )


def _nearest_rank(ordered: Sequence[int], q: float) -> int:
    """The smallest value that at least that share does not exceed: one that was measured."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _blamed(misses: Sequence[Miss]) -> tuple[Blamed, ...]:
    """By objective, the stage with the most misses first."""
    groups: defaultdict[tuple[Aim, str | None], list[Miss]] = defaultdict(list)
    for miss in misses:
        groups[miss.aim, miss.stage].append(miss)
    order = {aim: position for position, aim in enumerate(Aim)}
    found = [
        Blamed(
            aim=aim,
            stage=stage,
            count=len(group),
            judged=sum(miss.would_meet is not None for miss in group),
            met_at_median=sum(miss.would_meet is True for miss in group),
        )
        for (aim, stage), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: (order[one.aim], -one.count, one.stage or "")))


def _worst(misses: Sequence[Miss], limit: int) -> tuple[Miss, ...]:
    """The worst of each objective."""
    ordered = sorted(misses, key=lambda miss: (-miss.excess, miss.timeline.trace_id))
    return tuple(miss for aim in Aim for miss in [m for m in ordered if m.aim is aim][:limit])


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
