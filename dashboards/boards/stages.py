"""PD stages: in which stage requests are now, and where the time of finished ones went."""

from __future__ import annotations

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.boards import against_baseline, pieces
from dashboards.rules.alerts import STALLING_SHARE
from dashboards.sdk import (
    EMPTY_WHERE,
    PERCENT,
    SECONDS,
    SHORT,
    Board,
    Panel,
    Query,
    Row,
    bars,
    lines,
    number,
    rows_of,
    spread,
)
from pdtrace.slo import Slo
from pdtrace.stages import Stage

MEAN = "mean"
_SHARES = 12


def board(slo: Slo) -> Board:
    return Board(
        uid=links.STAGES,
        title="PD stages",
        description="In which stage are requests now, and which stage took the time of those that "
        "finished?",
        variables=v.everywhere(),
        rows=(
            Row(title="Now: requests in flight", panels=_now(slo)),
            Row(title="Finished: where the time of a request goes", panels=_parts()),
            Row(
                title="Finished: how long each stage takes",
                panels=tuple(_one_stage(stage, slo) for stage in pieces.CHAIN),
            ),
            Row(title="Finished: waits and late tokens", panels=_waits()),
            Row(title="Finished: from worker to worker", panels=_handover()),
        ),
    )


def _now(slo: Slo) -> tuple[Panel, ...]:
    oldest = queries.highest(names.OPEN_OLDEST, ("stage",))
    return (
        pieces.open_by_stage("Open requests by stage"),
        pieces.oldest_by_worker("Oldest open request by stage and worker", slo),
        lines(
            "Age of the oldest open request by stage",
            "Age in its stage of the request that is longest in it. A slope of one second a second "
            "is one request that does not move. The red line is the limit.",
            "how many requests wait there. Model, role and worker do not apply.",
            SECONDS,
            Query(expr=oldest, legend="{{stage}}"),
            colours=pieces.stage_colours(),
            steps=pieces.limit_line(slo.oldest_s),
            links=(links.slow_in_this_stage(),),
            width=18,
        ),
        number(
            "Stuck requests",
            "Requests that are older in their stage than it may become: half its deadline and "
            "three times its 99th percentile (docs/agent.md). The most in the time shown.",
            "which they are: `pdtrace top` and `pdtrace why --in-flight` name them.",
            SHORT,
            Query(expr=queries.total(names.OPEN_STUCK), legend="stuck"),
            steps=((None, colours.GOOD), (1, colours.BAD)),
            over_time="max",
            width=6,
            height=8,
        ),
    )


def _parts() -> tuple[Panel, ...]:
    finished = queries.per_second(f"{names.REQUEST_DURATION}_count")
    seconds = queries.per_second(names.STAGE_PARTS, ("stage",))
    whole = queries.per_second(f"{names.REQUEST_DURATION}_sum")
    return (
        lines(
            "Mean time per request by stage",
            "The mean request, divided: each instant belongs to the first stage that covers it, "
            "the rest is `unexplained`. The parts add up, so they are stacked, up to the line: the "
            "mean request.",
            "requests in flight, the spread behind a mean, and what runs beside the chain. All "
            "outcomes are in it. Model, role and worker do not apply: parts of a part would not "
            "add up.",
            SECONDS,
            Query(expr=f"{seconds} / scalar({finished})", legend="{{stage}}"),
            Query(expr=f"{whole} / {finished}", legend=MEAN),
            colours={**pieces.stage_colours(pieces.PARTS), MEAN: colours.WHOLE},
            stacked=True,
            unstacked=(MEAN,),
            links=(links.slow_in_this_stage(),),
            width=16,
            height=10,
        ),
        bars(
            "Share of all time by stage",
            "What part of all requests' time each stage owned, over the time shown; the "
            f"{_SHARES} largest.",
            "how it changed within it. Model, role and worker do not apply.",
            PERCENT,
            Query(
                expr=f"topk({_SHARES}, {queries.number(names.STAGE_PARTS, ('stage',))} "
                f"/ scalar({queries.number(names.STAGE_PARTS)}))",
                legend="{{stage}}",
            ),
            steps=((None, colours.CALM),),
            colours=pieces.stage_colours(pieces.PARTS),
            highest=1.0,
            links=(links.slow_in_this_stage(),),
            width=8,
            height=10,
        ),
        pieces.stalls_by_stage("Requests by dominant stage"),
        _stalling(),
        pieces.stalls_in_span_metrics(
            "Requests by dominant stage (span metrics)", width=24, height=6
        ),
    )


def _stalling() -> Panel:
    stalls = queries.per_second(names.STALLS, ("stage",))
    finished = queries.per_second(names.FINISHED)
    return lines(
        "Share of requests that stall by stage",
        "Of the requests that finished, what part each stage held up. From the red line on, "
        f"{STALLING_SHARE:.0%}, it is one stage's and no bad luck.",
        "how many that is: see requests by dominant stage; requests in flight. Model, role and "
        "worker do not apply.",
        PERCENT,
        Query(expr=f"{stalls} / scalar({finished})", legend="{{stage}}"),
        colours=pieces.stage_colours(),
        steps=pieces.limit_line(STALLING_SHARE),
        links=(links.slow_in_this_stage(),),
        reaches=2 * STALLING_SHARE,
    )


def _one_stage(stage: Stage, slo: Slo) -> Panel:
    matchers = (queries.equal("stage", stage.name), v.BY_ROLE, v.BY_WORKER)
    limit_s = slo.oldest_generate_s if stage.name == pieces.GENERATE else slo.oldest_s
    return lines(
        stage.name,
        f"{stage.meaning} {stage.advice} Quantiles; points lead to traces. {EMPTY_WHERE}no chosen "
        "worker has a part in it.",
        "requests that are still in it, and what part of it other stages own (a request's first "
        "token may be on its way while it generates). Model does not apply.",
        SECONDS,
        *pieces.p50_and_p99(names.STAGE_DURATION, *matchers, exemplar=True),
        colours={"p50": colours.CALM_LINE, "p99": colours.STAGES[stage.name]},
        steps=pieces.limit_line(limit_s),
        links=(links.slow_in(stage.name),),
        width=6,
        height=7,
        table=False,
    )


def _waits() -> tuple[Panel, ...]:
    waits = ("gateway.queue", "decode.reserve", "prefill.queue", "transfer.queue", "decode.queue")
    by_worker, by_reason = "{{stage}} · {{instance}}", "{{stage}} · {{reason}}"
    of_waits = queries.any_of("stage", waits)
    stuck = queries.series(names.STUCK, v.BY_WORKER)
    return (
        lines(
            "Waits by worker",
            "Mean time in the stages that only wait, by the worker that ends them: is it the "
            f"queue, the transfer or the batch? {EMPTY_WHERE}no chosen worker ends such a stage.",
            "waits of requests in flight, and the spread behind a mean. Model does not apply.",
            SECONDS,
            Query(
                expr=queries.mean(
                    names.STAGE_DURATION,
                    of_waits,
                    v.BY_ROLE,
                    v.BY_WORKER,
                    by=("stage", "instance"),
                ),
                legend=by_worker,
            ),
            shades=pieces.stage_shades(by_worker),
            links=(links.worker(), links.slow_in_this_stage()),
            width=12,
        ),
        against_baseline.by_worker(),
        lines(
            "Time waited by reason",
            "Seconds waited per second, by what the requests waited for: how many waited for it at "
            "a time, on average. Rates add up, so they are stacked.",
            "which requests were in the way: `pdtrace why` names them. Model, role and worker do "
            "not apply.",
            SHORT,
            Query(
                expr=queries.per_second(f"{names.STAGE_WAIT}_sum", ("stage", "reason")),
                legend=by_reason,
            ),
            shades=pieces.stage_shades(by_reason),
            stacked=True,
            links=(links.slow_in_this_stage(),),
            width=12,
        ),
        lines(
            "Late tokens by cause",
            "Gaps above the workers' threshold per second, by what made the token late.",
            "gaps below the threshold, and the client's side. Model, role and worker do not apply.",
            SHORT,
            Query(
                expr=queries.per_second(f"{names.TOKEN_GAP}_count", ("cause",)),
                legend="{{cause}}",
            ),
            stacked=True,
            links=(links.slow_in("decode.gap"),),
            width=12,
        ),
        lines(
            "Reported as stuck",
            "Requests that the agent reported as stuck in the window, by stage and worker.",
            "those that were reported before and still are: see stuck requests above. Model and "
            "role do not apply.",
            SHORT,
            Query(
                expr=queries.number(stuck, ("stage", "instance"), queries.RATE),
                legend=by_worker,
            ),
            stacked=True,
            shades=pieces.stage_shades(by_worker),
            bars=True,
            links=(links.slow_in_this_stage(), links.worker()),
            width=24,
            height=6,
            reaches=1,
        ),
    )


def _handover() -> tuple[Panel, ...]:
    pair = ("source", "destination")
    transfer = queries.equal("stage", "transfer")
    buckets = queries.series(f"{names.PAIR_STAGE_DURATION}_bucket", transfer)
    return (
        spread(
            "KV transfer time",
            "Distribution of what was left of the transfer when the prompt's compute had ended. "
            "Points lead to traces.",
            "copies beside compute, which cost no time. Model, role and worker do not apply.",
            Query(expr=queries.per_second(buckets, ("le",)), legend="{{le}}", exemplar=True),
            width=12,
            height=9,
        ),
        rows_of(
            "KV transfers by pair",
            "Each pair of workers over the time shown: its transfers, how many of its attempts "
            "ended in one, and how long they take.",
            "pairs without traffic, and copies beside compute. Model, role and worker do not "
            "apply.",
            (
                (
                    "Transfers",
                    SHORT,
                    Query(
                        expr=queries.number(
                            queries.series(f"{names.PAIR_STAGE_DURATION}_count", transfer), pair
                        ),
                        legend="transfers",
                    ),
                    None,
                ),
                (
                    "Failures",
                    SHORT,
                    Query(expr=queries.number(names.COPY_FAILURES, pair), legend="failures"),
                    ((None, "text"), (0.5, colours.BAD)),
                ),
                (
                    "Mean",
                    SECONDS,
                    Query(
                        expr=queries.mean(
                            names.PAIR_STAGE_DURATION, transfer, by=pair, window=queries.RANGE
                        ),
                        legend="mean",
                    ),
                    None,
                ),
                (
                    "p99",
                    SECONDS,
                    Query(
                        expr=queries.quantile(
                            0.99, names.PAIR_STAGE_DURATION, transfer, by=pair, window=queries.RANGE
                        ),
                        legend="p99",
                    ),
                    None,
                ),
            ),
            {"source": "From", "destination": "To"},
            sort_by="p99",
            width=12,
            height=9,
        ),
    )
