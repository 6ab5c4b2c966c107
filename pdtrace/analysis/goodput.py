"""How many requests kept the objectives: goodput, shares against targets, what the misses cost.

Owns the algebra over many requests and the definition of what counts; whether one request kept an
objective is `pdtrace.analysis.objectives`', what made it miss is `pdtrace.analysis.misses`'. Pure.

What a recording does not tell is never guessed: a count is then two numbers, at least and at most,
and an objective is met only if it is for both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.analysis.baselines import Baselines
from pdtrace.analysis.columns import Column
from pdtrace.analysis.misses import Miss, misses_of
from pdtrace.analysis.objectives import Aim, Graded, Held, aims_of, grade, limit_ns, target_of
from pdtrace.analysis.requests import Requests
from pdtrace.analysis.timeline import Timeline
from pdtrace.duration import seconds_text
from pdtrace.patience import Progress, no_progress
from pdtrace.slo import Slo
from pdtrace.stages import Outcome

MAX_WORST = 3
"""Misses of each objective that are named."""
UNNAMED_MODEL = "(not recorded)"
_TELL_EVERY = 100


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
    """Of the values that are known: how many, and which, in order. Nanoseconds."""

    known: int
    p50_ns: int
    p90_ns: int
    p99_ns: int
    most_ns: int
    values: Sequence[int]


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
    warnings   why the shares may not be those of all requests: to be added by who knows
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
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

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
    requests: Requests,
    slo: Slo,
    *,
    source: str = "",
    aims: Sequence[Aim] | None = None,
    gap_form: GapForm = GapForm.POOLED,
    choice: Choice = Choice(),
    in_flight: int = 0,
    notes: Sequence[str] = (),
    worst: int = MAX_WORST,
    progress: Progress = no_progress,
) -> SloReport:
    """Hold the requests of a source to the objectives. Each is looked at once, and those that
    missed one a second time, when it is known what is usual: nothing of their size is kept.

    aims       those to judge; None: all that something is promised of
    in_flight  requests that are known to be in flight beside `requests`
    worst      misses of each objective that are named
    """
    wanted = aims_of(slo) if aims is None else tuple(aim for aim in aims_of(slo) if aim in aims)
    baselines = Baselines()  # of all: what is usual does not depend on who asks
    book = _Book(slo, wanted)
    for position, timeline in enumerate(requests):
        baselines.add(timeline)
        if choice.takes(timeline):
            book.add(position, timeline)
    misses = _Misses(worst)
    for done, position in enumerate(book.missed.values):
        if done % _TELL_EVERY == 0:
            progress("looking at what missed", done / len(book.missed.values))
        for miss in misses_of(grade(requests[position], slo, wanted), slo, baselines):
            misses.add(miss)
    return SloReport(
        source=source,
        gap_form=gap_form,
        choice=choice,
        goods=_goods(slo, wanted),
        total=book.total.goodput(gap_form),
        models={name: book.models[name].goodput(gap_form) for name in sorted(book.models)}
        if len(book.models) > 1
        else {},
        outcomes=dict(sorted(book.outcomes.items())),
        retried=book.retried,
        cut_off=(book.cut_off, book.cut_off_late),
        seen_late=book.seen_late,
        rootless=book.rootless,
        open=in_flight + book.open,
        blamed=misses.blamed(),
        worst=misses.worst(),
        notes=tuple(notes),
    )


class _Book:
    """What is counted over the requests of a report.

    missed  positions of those that missed an objective
    """

    def __init__(self, slo: Slo, aims: Sequence[Aim]) -> None:
        self._slo = slo
        self._aims = tuple(aims)
        self.total = _Sum(slo, aims)
        self.models: dict[str, _Sum] = {}
        self.outcomes: Counter[str] = Counter()
        self.missed = Column()
        self.retried = 0
        self.cut_off = 0
        self.cut_off_late = 0
        self.seen_late = 0
        self.rootless = 0
        self.open = 0

    def add(self, position: int, timeline: Timeline) -> None:
        if timeline.open:
            self.open += 1
            return
        if timeline.root_id is None:
            self.rootless += 1
            return
        graded = grade(timeline, self._slo, self._aims)
        model = model_of(timeline)
        if model not in self.models:
            self.models[model] = _Sum(self._slo, self._aims)
        self.total.add(graded)
        self.models[model].add(graded)
        if graded.missed:
            self.missed.append(position)
        self.outcomes[timeline.outcome.value if timeline.outcome else "unknown"] += 1
        self.retried += timeline.attempts > 1
        if (
            timeline.attributes.get(a.STREAM.key) is True
            and timeline.ttft_ns is None
            and timeline.outcome not in {None, Outcome.COMPLETED, Outcome.REJECTED}
        ):
            self.cut_off += 1
            self.cut_off_late += timeline.total_ns > (limit_ns(self._slo, Aim.TTFT) or 0)
        if Aim.TOKEN_GAP in self._aims and graded.gaps is not None:
            self.seen_late += not graded.gaps.exact


class _Sum:
    """Goodput of requests that come one by one."""

    def __init__(self, slo: Slo, aims: Sequence[Aim]) -> None:
        self._shares = [_Share(slo, aim) for aim in aims]
        self._requests = 0
        self._good = Counter[Held]()
        self._tokens = 0
        self._tokens_unknown = 0
        self._span_ns: tuple[int, int] | None = None  # from the first begin to the last end

    def add(self, graded: Graded) -> None:
        timeline = graded.timeline
        self._requests += 1
        self._good[graded.good] += 1
        if graded.good is Held.KEPT:
            tokens = timeline.output_tokens
            self._tokens += max(0, tokens or 0)
            self._tokens_unknown += tokens is None or tokens < 0
        begin = timeline.started_unix_ns
        end = begin + timeline.total_ns
        first, last = self._span_ns or (begin, end)
        self._span_ns = min(first, begin), max(last, end)
        for share in self._shares:
            share.add(graded)

    def goodput(self, gap_form: GapForm) -> Goodput:
        first, last = self._span_ns or (0, 0)
        sure = self._good[Held.KEPT]
        return Goodput(
            requests=self._requests,
            good_least=sure,
            good_most=sure + self._good[Held.UNKNOWN],
            seconds=(last - first) / 1e9,
            tokens=self._tokens,
            tokens_unknown=self._tokens_unknown,
            attainments=tuple(share.attained(gap_form) for share in self._shares),
        )


class _Share:
    """How far requests that come one by one kept one objective."""

    def __init__(self, slo: Slo, aim: Aim) -> None:
        self._aim = aim
        self._limit = limit_ns(slo, aim)
        self._target = target_of(slo, aim)
        self._held = Counter[Held]()
        self._gaps = 0
        self._gaps_longer = (0, 0)  # than the limit: at least, at most
        self._uncounted = 0
        self._values = Column()

    def add(self, graded: Graded) -> None:
        held = graded.held.get(self._aim)
        if held is None:
            return
        self._held[held] += 1
        if (value := _value(self._aim, graded)) is not None:
            self._values.append(value)
        gaps = graded.gaps
        if self._aim is Aim.TOKEN_GAP and self._limit is not None and gaps is not None:
            low, high = gaps.longer(self._limit)
            self._gaps += gaps.count or 0
            self._gaps_longer = self._gaps_longer[0] + low, self._gaps_longer[1] + high
            self._uncounted += gaps.count is None and held is not Held.KEPT

    def attained(self, gap_form: GapForm) -> Attainment:
        kept = self._held[Held.KEPT]
        of, least, most, uncounted = self._held.total(), kept, kept + self._held[Held.UNKNOWN], 0
        if self._aim is Aim.TOKEN_GAP and gap_form is GapForm.POOLED and self._limit is not None:
            low, high = self._gaps_longer
            of, least, most = self._gaps, self._gaps - high, self._gaps - low
            uncounted = self._uncounted
        return Attainment(
            aim=self._aim,
            promise=_promise(self._aim, self._target, self._limit, gap_form),
            unit=_unit(self._aim, gap_form),
            limit_s=None if self._limit is None else self._limit / 1e9,
            target=self._target,
            counted=of,
            kept_least=least,
            kept_most=most,
            uncounted=uncounted,
            spread=_spread(self._values),
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


def _value(aim: Aim, graded: Graded) -> int | None:
    """What a request's value is, where it has one that is known. Nanoseconds."""
    match aim:
        case Aim.TTFT:
            return graded.timeline.ttft_ns
        case Aim.TOKEN_GAP:
            return graded.gaps.least_ns if graded.gaps and graded.gaps.exact else None
        case Aim.E2E:
            return graded.timeline.total_ns
        case Aim.ERRORS:
            return None


def _spread(found: Column) -> Spread | None:
    if not found.values:
        return None
    values = found.ordered()
    return Spread(
        known=len(values),
        p50_ns=_nearest_rank(values, 0.5),
        p90_ns=_nearest_rank(values, 0.9),
        p99_ns=_nearest_rank(values, 0.99),
        most_ns=values[-1],
        values=values,
    )


def _nearest_rank(ordered: Sequence[int], q: float) -> int:
    """The smallest value that at least that share does not exceed: one that was measured."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


class _Misses:
    """What the misses go back to, and the worst of each objective.

    limit  misses of each objective that are kept
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stages: dict[tuple[Aim, str | None], Blamed] = {}
        self._worst: dict[Aim, list[Miss]] = {aim: [] for aim in Aim}

    def add(self, miss: Miss) -> None:
        key = miss.aim, miss.stage
        before = self._stages.get(key) or Blamed(
            aim=miss.aim, stage=miss.stage, count=0, judged=0, met_at_median=0
        )
        self._stages[key] = replace(
            before,
            count=before.count + 1,
            judged=before.judged + (miss.would_meet is not None),
            met_at_median=before.met_at_median + (miss.would_meet is True),
        )
        worst = self._worst[miss.aim]
        worst.append(miss)
        if len(worst) > 2 * self._limit:
            self._cut(worst)

    def _cut(self, worst: list[Miss]) -> None:
        worst.sort(key=lambda miss: (-miss.excess, miss.timeline.trace_id))
        del worst[self._limit :]

    def blamed(self) -> tuple[Blamed, ...]:
        """By objective, the stage with the most misses first."""
        order = {aim: position for position, aim in enumerate(Aim)}
        found = sorted(
            self._stages.values(), key=lambda one: (order[one.aim], -one.count, one.stage or "")
        )
        return tuple(found)

    def worst(self) -> tuple[Miss, ...]:
        """Of each objective, the worst first."""
        for worst in self._worst.values():
            self._cut(worst)
        return tuple(miss for aim in Aim for miss in self._worst[aim])


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
