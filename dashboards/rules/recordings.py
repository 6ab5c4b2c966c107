"""What is recorded for the alerts: how much of each objective was missed, and stages' means.

Owns the service-level indicators and the names of recorded series; knows nothing of when an alert
fires.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboards import names, queries
from dashboards.rules.timing import NOMINAL, Timing
from pdtrace.slo import Slo
from pdtrace.stages import STAGES, Outcome, Scale

BURN_WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
LONG_WINDOWS = ("1h", "6h", "1d", "3d")
"""Those in which enough must have happened for an alert."""

LEAST_REQUESTS_MISSED, LEAST_GAPS_MISSED = 5, 50
"""One slow answer has many gaps."""

RECENT, BASELINE = "5m", "6h"
BASELINE_AGE = "10m"
"""How far a baseline keeps from now, so that what is being judged is not in it."""

STEADY_STAGES = tuple(stage.name for stage in STAGES if stage.scale is Scale.CONSTANT)
"""Stages whose healthy time does not grow with tokens: it can be held against a former one."""

PAIR_STAGES = ("hop.publish", "transfer", "hop.notice")
"""Chain stages that depend on both workers of a pair."""

_COUNTED = (Outcome.COMPLETED, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST)
_BAD = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recorded series."""

    name: str
    expr: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One objective.

    key      label value `slo`
    budget   share that may miss it
    least_missed  fewer misses in the long window alert nobody: of little traffic one is a large
             share
    histogram, threshold_s, matcher  what is measured; without a histogram, counted by outcome
    """

    key: str
    title: str
    promise: str
    budget: float
    least_missed: int
    histogram: str | None = None
    threshold_s: float = 0.0
    matcher: str = ""

    def missed(self, window: str) -> str:
        """Share that missed it, by model. Not a number where nothing was counted."""
        if self.histogram is None:
            return error_share(by=(names.MODEL,), window=window)
        return queries.share_above(
            self.threshold_s, self.histogram, self.matcher, by=(names.MODEL,), window=window
        )

    def counted(self, window: str) -> str:
        """How many were counted, by model."""
        if self.histogram is None:
            counted = queries.series(names.GATEWAY_REQUESTS, _outcomes(_COUNTED))
        else:
            counted = queries.series(f"{self.histogram}_count", self.matcher)
        return queries.number(counted, (names.MODEL,), window)


def objectives(slo: Slo) -> tuple[Objective, ...]:
    return (
        Objective(
            key="ttft",
            title="time to first token",
            promise=f"{_percent(slo.ttft_objective)} of streams are to have their first token "
            f"within {slo.ttft_s:g} s.",
            budget=round(1 - slo.ttft_objective, 9),
            least_missed=LEAST_REQUESTS_MISSED,
            histogram=names.GATEWAY_TTFT,
            threshold_s=slo.ttft_s,
            matcher=names.STREAMED,
        ),
        Objective(
            key="token_gap",
            title="gap between tokens",
            promise=f"{_percent(slo.token_gap_objective)} of gaps between tokens are to be at most "
            f"{slo.token_gap_s:g} s.",
            budget=round(1 - slo.token_gap_objective, 9),
            least_missed=LEAST_GAPS_MISSED,
            histogram=names.GATEWAY_GAP,
            threshold_s=slo.token_gap_s,
        ),
        Objective(
            key="errors",
            title="errors",
            promise=f"{_percent(slo.error_objective)} of requests that are admitted and not "
            "cancelled are to be completed.",
            budget=round(1 - slo.error_objective, 9),
            least_missed=LEAST_REQUESTS_MISSED,
        ),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def burn_panel(objective: Objective) -> str:
    """Title of the panel that shows it."""
    return f"Budget burn: {objective.title}"


def error_ratio(window: str) -> str:
    return f"pdtrace:slo_error:ratio_rate{window}"


def events(window: str) -> str:
    return f"pdtrace:slo_events:increase{window}"


STAGE_MEAN = f"pdtrace:stage_seconds:mean{RECENT}"
STAGE_BASELINE = f"pdtrace:stage_seconds:mean{BASELINE}"
PAIR_MEAN = f"pdtrace:pair_stage_seconds:mean{RECENT}"
PAIR_BASELINE = f"pdtrace:pair_stage_seconds:mean{BASELINE}"


def error_share(*matchers: str, by: tuple[str, ...] = (), window: str) -> str:
    """Share of requests that ended badly: failed, timed out or lost, of those and the completed."""
    bad = queries.series(names.GATEWAY_REQUESTS, _outcomes(_BAD), *matchers)
    counted = queries.series(names.GATEWAY_REQUESTS, _outcomes(_COUNTED), *matchers)
    # Without a failure there is no series of one: then the share is 0 of what was counted.
    none = queries.per_second(counted, by, window)
    return f"({queries.per_second(bad, by, window)} or {none} * 0) / {none}"


def recordings(slo: Slo, timing: Timing = NOMINAL) -> dict[str, list[Recording]]:
    """By group."""
    budgets = [
        Recording(
            name=error_ratio(window),
            expr=objective.missed(timing.window(window)),
            labels=(("slo", objective.key),),
        )
        for objective in objectives(slo)
        for window in BURN_WINDOWS
    ]
    counts = [
        Recording(
            name=events(window),
            expr=objective.counted(timing.window(window)),
            labels=(("slo", objective.key),),
        )
        for objective in objectives(slo)
        for window in LONG_WINDOWS
    ]
    steady = queries.any_of("stage", STEADY_STAGES)
    by_worker = ("stage", "role", "instance")
    by_pair = ("stage", "source", "destination")
    of_pairs = queries.any_of("stage", PAIR_STAGES)
    means = [
        Recording(name=STAGE_MEAN, expr=_mean(names.STAGE_DURATION, steady, by_worker, timing)),
        Recording(
            name=STAGE_BASELINE,
            expr=_mean(names.STAGE_DURATION, steady, by_worker, timing, before=True),
        ),
        Recording(name=PAIR_MEAN, expr=_mean(names.PAIR_STAGE_DURATION, of_pairs, by_pair, timing)),
        Recording(
            name=PAIR_BASELINE,
            expr=_mean(names.PAIR_STAGE_DURATION, of_pairs, by_pair, timing, before=True),
        ),
    ]
    return {"pdtrace-slo": [*budgets, *counts], "pdtrace-stages": means}


def _mean(
    histogram: str, matcher: str, by: tuple[str, ...], timing: Timing, *, before: bool = False
) -> str:
    """Mean over the recent window, or over the long one before it. No series where nothing was
    observed: a mean of nothing would be not a number."""
    window = timing.window(BASELINE if before else RECENT)
    offset = f" offset {timing.window(BASELINE_AGE)}" if before else ""
    sums, counts = (
        queries.total(
            f"rate({queries.series(f'{histogram}_{kind}', matcher)}[{window}]{offset})", by
        )
        for kind in ("sum", "count")
    )
    return f"{sums} / ({counts} > 0)"


def _outcomes(outcomes: tuple[Outcome, ...]) -> str:
    return queries.any_of("outcome", (outcome.value for outcome in outcomes))
