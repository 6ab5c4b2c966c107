"""Alerts on telemetry that is lost where no agent sees it, or that says less than it seems to.

Behind the agents spans are lost by a collector; before them a process may serve without being
recorded; and what lasts longer than the last bucket edge has no quantile.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboards import links, names, queries
from dashboards.rules.alert import Alert, Severity
from dashboards.rules.timing import Timing
from pdtrace.agent.buckets import duration_edges
from pdtrace.slo import Slo

OFF_SCALE_SHARE, OFF_SCALE_LEAST = 0.01, 20
"""Of so many observations at least, such a share is above the last edge: p99 is no longer known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One way to lose spans behind the agents: a counter, and what it is called in an alert."""

    what: str
    counter: str


LOSSES = (
    Loss(what="refused", counter=names.COLLECTOR_REFUSED),
    Loss(what="failed inside", counter=names.COLLECTOR_FAILED),
    Loss(what="no room to send", counter=names.COLLECTOR_UNQUEUED),
    Loss(what="not sent", counter=names.COLLECTOR_UNSENT),
    Loss(what="dropped undecided", counter=names.COLLECTOR_UNDECIDED),
    Loss(
        what="measured without labels",
        counter=queries.series(names.SPAN_CALLS, names.SPAN_OVERFLOW),
    ),
)

BEHIND_AGENTS = queries.any_of("job", (names.COLLECTOR_JOB, names.SPANS_JOB))
"""Matcher: scrapes of Jaeger or a collector, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Durations whose quantiles are drawn: a histogram, and by which label its shares are taken."""

    histogram: str
    by: str


MEASURED = (
    Measured(histogram=names.GATEWAY_DURATION, by=names.MODEL),
    Measured(histogram=names.REQUEST_DURATION, by="outcome"),
    Measured(histogram=names.STAGE_DURATION, by="stage"),
)
"""What is part of these is not longer than they are."""


def last_edge_s(slo: Slo) -> float:
    """The highest edge, seconds, where the objectives' limits are edges too."""
    return duration_edges(slo.thresholds_s)[-1]


def alerts(slo: Slo, timing: Timing) -> tuple[Alert, ...]:
    return (_collector(timing), _unrecorded(timing), _off_scale(slo, timing))


def _collector(timing: Timing) -> Alert:
    window = timing.window("10m")
    known = queries.series(names.UP, BEHIND_AGENTS)

    def lost(loss: Loss) -> str:
        grown = queries.number(loss.counter, ("instance",), window)
        # Most of these appear with the first loss, which increase() therefore does not see. What is
        # there when Prometheus first looks may have been lost long ago.
        appeared = queries.total(
            f"{loss.counter} unless {loss.counter} offset {window} "
            f"and on (instance) {known} offset {window}",
            ("instance",),
        )
        return f'label_replace({grown} > 0 or {appeared} > 0, "what", "{loss.what}", "", "")'

    return Alert(
        name="PDCollectorLosing",
        expr="\nor\n".join(
            (
                *(lost(loss) for loss in LOSSES),
                f'label_replace({known} == 0, "what", "not scraped", "", "")',
            )
        ),
        severity=Severity.TICKET,
        hold=timing.hold("1m"),
        keep=timing.hold("5m"),
        summary="Behind the agents spans are lost at {{ $labels.instance }}: {{ $labels.what }}",
        description="Within 10m Jaeger or the collector refused spans, could not pass them on, "
        "dropped traces before it had decided on them, or counted spans without their labels; or "
        "it cannot be scraped. The recording in the run directory is whole.",
        board=links.OVERVIEW,
        panel="Spans lost behind the agents",
    )


def _unrecorded(timing: Timing) -> Alert:
    """Where the server's first process of a name cannot be recorded, the server does not start; one
    that follows it serves all the same. So all at 0 is a setting, and one among others is not."""
    mine = names.PROCESS_RECORDED
    others = f"max without (role, instance) ({mine})"
    return Alert(
        name="PDProcessNotRecorded",
        expr=f"{mine} == 0 and ignoring (role, instance) {others} == 1",
        severity=Severity.TICKET,
        hold=timing.hold("1m"),
        keep=timing.hold("0s"),
        summary="{{ $labels.instance }} serves without being recorded",
        description="Other processes of the server are recorded and this one is not: no ring could "
        "be made when it was started again. Its part is missing in every trace and in every "
        "metric of the agent.",
        board=links.OVERVIEW,
        panel="Processes recorded",
        worker="{{ $labels.instance }}",
    )


def _off_scale(slo: Slo, timing: Timing) -> Alert:
    window = timing.window("1h")
    edge_s = last_edge_s(slo)

    def above(one: Measured) -> str:
        share = queries.share_above(edge_s, one.histogram, by=(one.by,), window=window)
        counted = queries.number(f"{one.histogram}_count", (one.by,), window)
        condition = f"{share} > {OFF_SCALE_SHARE:g} and {counted} >= {OFF_SCALE_LEAST}"
        return f'label_replace({condition}, "metric", "{one.histogram}", "", "")'

    return Alert(
        name="PDDurationsOffScale",
        expr="\nor\n".join(map(above, MEASURED)),
        severity=Severity.TICKET,
        hold=timing.hold("2m"),
        keep=timing.hold("5m"),
        summary="{{ $labels.metric }} has more than "
        f"{OFF_SCALE_SHARE:.0%} above its last bucket edge",
        description=f"Within 1h more than {OFF_SCALE_SHARE:.0%} took longer than {edge_s:g} s. The "
        "p99 that panels show is that edge, whatever it was.",
        board=links.OVERVIEW,
        panel="Durations above the last bucket edge",
    )
