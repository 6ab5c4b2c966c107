"""Slow traces: the very requests that stalled, out of Jaeger, and exemplars beside them."""

from __future__ import annotations

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.boards import pieces
from dashboards.sdk import (
    EMPTY_WHERE,
    SECONDS,
    SHORT,
    Board,
    Panel,
    Query,
    Row,
    lines,
    search,
    traces_table,
)
from pdtrace import semconv as a
from pdtrace.slo import Slo
from pdtrace.stages import ROOT_SPAN

LIMIT = 50


def board(slo: Slo) -> Board:
    del slo
    return Board(
        uid=links.SLOW,
        title="PD slow traces",
        description="Which requests stalled in a stage, and where is the trace of each?",
        variables=(
            *v.everywhere(),
            v.stage(pieces.STALLING, "decode.reserve"),
            v.min_duration(),
        ),
        rows=(
            Row(title="Requests that stalled in the chosen stage", panels=_stalled()),
            Row(title="Any slow request", panels=_slow()),
        ),
    )


def _stalled() -> tuple[Panel, ...]:
    stage = f"${v.STAGE}"
    one_stage = queries.equal("stage", stage)
    calls = queries.series(
        names.SPAN_CALLS,
        *names.ROOT,
        queries.equal(names.SPAN_STALL_STAGE, stage),
        queries.chosen(names.SPAN_MODEL, v.MODEL),
    )
    pair = (names.SPAN_PREFILL, names.SPAN_DECODE)
    by_pair = queries.number(calls, pair, queries.RATE)
    for label in pair:
        by_pair = queries.named(by_pair, label, pieces.NO_WORKER)
    return (
        traces_table(
            "Slowest requests that stalled in this stage",
            f"The newest {LIMIT} traces whose verdict names the chosen stage and that took at "
            "least the chosen time, slowest first. Choose a trace id to see where it stalled.",
            f"older ones beyond {LIMIT}: raise the least duration to reach them; requests in "
            "flight; requests whose trace was not sampled. Model, role and worker do not apply: "
            "Jaeger finds tags by their exact value only.",
            search(
                names.ROOT_SERVICE,
                tags=f"{a.STALL_STAGE.key}={stage}",
                min_duration=f"${v.MIN_DURATION}",
                limit=LIMIT,
            ),
            links.one_request(),
        ),
        lines(
            "Stalled requests by pair of workers",
            "Requests that stalled in the chosen stage, by the pair that served them, out of span "
            "metrics: is it one worker, or all?",
            f"what is in flight. Requests that were given none have `{pieces.NO_WORKER}`. Role and "
            "worker do not apply.",
            SHORT,
            Query(
                expr=by_pair,
                legend=f"{{{{{names.SPAN_PREFILL}}}}} → {{{{{names.SPAN_DECODE}}}}}",
            ),
            stacked=True,
            bars=True,
            reaches=1,
        ),
        lines(
            "Time in this stage by worker",
            "p99 of the chosen stage by worker. Points lead to traces, also where Jaeger's search "
            f"finds nothing any more. {EMPTY_WHERE}no chosen worker has a part in the stage.",
            "requests in flight. Model does not apply.",
            SECONDS,
            Query(
                expr=queries.quantile(
                    0.99,
                    names.STAGE_DURATION,
                    one_stage,
                    v.BY_ROLE,
                    v.BY_WORKER,
                    by=("instance",),
                ),
                legend="{{instance}}",
                exemplar=True,
            ),
            links=(links.worker(),),
        ),
    )


def _slow() -> tuple[Panel, ...]:
    return (
        traces_table(
            "Slowest requests",
            f"The newest {LIMIT} traces of requests that took at least the chosen time, slowest "
            "first, whether they stalled or not.",
            f"older ones beyond {LIMIT}; requests in flight; requests whose trace was not sampled. "
            "Stage, model, role and worker do not apply.",
            search(
                names.ROOT_SERVICE,
                tags=f"{a.SPAN.key}={ROOT_SPAN}",
                min_duration=f"${v.MIN_DURATION}",
                limit=LIMIT,
            ),
            links.one_request(),
        ),
        lines(
            "Request duration by model",
            "Quantiles of all requests out of span metrics. Points lead to traces.",
            "requests in flight, and requests that were not sampled before span metrics were made. "
            f"Requests that were refused before they were read have `{pieces.NO_MODEL}`. Role and "
            "worker do not apply.",
            SECONDS,
            *pieces.p50_and_p99(
                names.SPAN_DURATION,
                *names.ROOT,
                queries.chosen(names.SPAN_MODEL, v.MODEL),
                exemplar=True,
                model=names.SPAN_MODEL,
            ),
            shades=pieces.quantile_shades(),
        ),
        lines(
            "Request duration by outcome",
            "p99 by outcome as the agent measures it. Points lead to traces.",
            "requests in flight. Model, role and worker do not apply.",
            SECONDS,
            Query(
                expr=queries.quantile(0.99, names.REQUEST_DURATION, by=("outcome",)),
                legend="{{outcome}}",
                exemplar=True,
            ),
            colours=colours.OUTCOMES,
        ),
    )
