"""PD overview: is the telemetry alive, are users well, and which stage holds requests up."""

from __future__ import annotations

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.boards import pieces
from dashboards.rules import recordings as rec
from dashboards.sdk import (
    EMPTY_WHERE,
    EMPTY_WHILE,
    PERCENT,
    REQUESTS_S,
    SECONDS,
    SHORT,
    Board,
    Panel,
    Query,
    Row,
    lines,
    number,
    states,
)
from pdtrace.inflight import ProcessState
from pdtrace.slo import Slo
from pdtrace.stages import Outcome

JOBS = queries.any_of("job", (names.AGENT_JOB, names.GATEWAY_JOB))


def board(slo: Slo) -> Board:
    return Board(
        uid=links.OVERVIEW,
        title="PD overview",
        description="Are users served in time, and if not, which stage holds requests up?",
        variables=v.everywhere(),
        rows=(
            Row(title="Is the telemetry alive?", panels=_alive()),
            Row(
                title="Now: requests in flight",
                panels=(
                    pieces.open_by_stage("Open requests by stage"),
                    pieces.oldest_by_worker("Oldest open request by stage and worker", slo),
                    _processes(),
                ),
            ),
            Row(title="Finished: what users saw", panels=_users(slo)),
            Row(
                title="Finished: which stage held them up",
                panels=(
                    pieces.stalls_by_stage("Requests by dominant stage"),
                    pieces.stalls_in_span_metrics("Requests by dominant stage (span metrics)"),
                ),
            ),
            Row(title="Error budget", panels=_budget(slo)),
        ),
    )


def _alive() -> tuple[Panel, ...]:
    # An agent without an exporter has no spans to drop, one without --out no lines to lose.
    lost = queries.total(
        " or ".join(
            f"increase({metric}[{queries.RANGE}])"
            for metric in (names.AGENT_DROPPED, names.AGENT_LINES_LOST)
        )
    )
    incomplete = queries.share(names.AGENT_INCOMPLETE, names.AGENT_REQUESTS, window=queries.RANGE)
    ready = queries.total(queries.series(names.PROCESS_READY, v.BY_ROLE, v.BY_WORKER))
    firing = queries.series(
        names.ALERTS, 'alertstate="firing"', queries.equal("component", "pdtrace")
    )
    return (
        number(
            "Telemetry",
            "Whether Prometheus reaches every agent and gateway. While it does not, every panel "
            "below is silent or old, and silence is no good sign.",
            "whether Jaeger receives traces: see requests by dominant stage out of span metrics.",
            SHORT,
            Query(expr=f"min({queries.series(names.UP, JOBS)})", legend="telemetry"),
            steps=((None, colours.BAD), (1, colours.GOOD)),
            texts={"0": ("a target is down", colours.BAD), "1": ("alive", colours.GOOD)},
            no_value="no telemetry",
        ),
        number(
            "Agent lag",
            "How long ago the slowest agent had read the rings to their end.",
            "delays of the collector and of Jaeger behind the agent.",
            SECONDS,
            Query(expr=queries.highest(names.AGENT_LAG), legend="lag"),
            steps=((None, colours.GOOD), (2, colours.WARN), (5, colours.BAD)),
            calc="max",
        ),
        number(
            "Spans lost",
            "Spans dropped and requests that could not be written, in the time shown.",
            "what a collector behind the agents lost, and records overwritten in the rings.",
            SHORT,
            Query(expr=lost, legend="lost", instant=True),
            steps=((None, colours.GOOD), (1, colours.BAD)),
        ),
        number(
            "Incomplete requests",
            "Share of finished requests of whose marks something is known to be missing, in the "
            "time shown. Their parts are not to be trusted.",
            "requests whose loss nobody noticed; not a number while no request finishes.",
            PERCENT,
            Query(expr=incomplete, legend="incomplete", instant=True),
            steps=((None, colours.GOOD), (0.001, colours.WARN), (0.01, colours.BAD)),
        ),
        number(
            "Processes ready",
            "Processes that can take part in a generation, as the gateway says. "
            f"{EMPTY_WHERE}the gateway alone is chosen.",
            "the agents themselves. Model does not apply.",
            SHORT,
            Query(expr=ready, legend="ready"),
            steps=((None, colours.BAD), (1, colours.GOOD)),
            links=pieces.to(("Transfer and workers", links.WORKERS)),
        ),
        number(
            "Alerts firing",
            f"Alerts of these rules that fire now. {EMPTY_WHILE}none does.",
            "alerts that are pending, silenced notifications, and rules that are not loaded: then "
            "it reads none for ever.",
            SHORT,
            Query(expr=f"count({firing})", legend="firing"),
            steps=((None, colours.GOOD), (1, colours.BAD)),
            no_value="none",
        ),
    )


def _processes() -> Panel:
    in_state = (
        queries.series(
            names.PROCESS_STATE, queries.equal("state", state.value), v.BY_ROLE, v.BY_WORKER
        )
        for state in ProcessState
    )
    state = " + ".join(
        f"{index} * {queries.highest(one, ('role', 'instance'))}"
        for index, one in enumerate(in_state, start=1)
    )
    texts = {
        str(index): (name.value, colours.STATES[name.value])
        for index, name in enumerate(ProcessState, start=1)
    }
    return states(
        "Processes",
        "State of each process, read from its ring: alive, stalled (it has work and its loop does "
        "not go round), closed in order, or lost.",
        "whether a process is ready to serve, and processes of hosts without an agent.",
        Query(expr=state, legend="{{instance}}"),
        texts,
        width=24,
        height=7,
    )


def _users(slo: Slo) -> tuple[Panel, ...]:
    ended = queries.per_second(queries.series(names.GATEWAY_REQUESTS, v.BY_MODEL), ("outcome",))
    return (
        lines(
            "Requests by outcome",
            "Requests that ended per second, by outcome. Rates add up, so they are stacked.",
            "requests in flight. Role and worker do not apply.",
            REQUESTS_S,
            Query(expr=ended, legend="{{outcome}}"),
            colours=colours.OUTCOMES,
            stacked=True,
            width=8,
            table=False,
        ),
        number(
            "Errors",
            "Share of requests that failed, timed out or were lost, over the time shown: not the "
            "latest value, which is calm right after an incident.",
            "requests that were cancelled or rejected; both are left out above and below the line.",
            PERCENT,
            Query(
                expr=rec.error_share(v.BY_MODEL, window=queries.RANGE),
                legend="errors",
                instant=True,
            ),
            steps=(
                (None, colours.GOOD),
                (round(1 - slo.error_objective, 9), colours.WARN),
                (round(10 * (1 - slo.error_objective), 9), colours.BAD),
            ),
            width=4,
            height=8,
        ),
        lines(
            "Request duration",
            "First request byte to last byte written, of completed requests. Points lead to "
            "traces.",
            "requests that did not complete or are still in flight. Model, role and worker do not "
            "apply; quantiles are of all requests together and do not add up.",
            SECONDS,
            *pieces.p50_and_p99(
                names.REQUEST_DURATION,
                queries.equal("outcome", Outcome.COMPLETED.value),
                exemplar=True,
            ),
            colours=colours.QUANTILES,
            links=pieces.to(("Stages", links.STAGES), ("Slow requests", links.SLOW)),
            width=12,
        ),
        lines(
            "Time to first token",
            "First request byte to first content byte written, of streams. The red line is the "
            "limit. Points lead to traces.",
            "answers sent in one piece: their first byte is their last. Model, role and worker do "
            "not apply.",
            SECONDS,
            *pieces.p50_and_p99(names.TTFT, names.STREAMED, exemplar=True),
            colours=colours.QUANTILES,
            steps=pieces.limit_line(slo.ttft_s),
            links=pieces.to(("Stages", links.STAGES), ("Slow requests", links.SLOW)),
            width=8,
        ),
        lines(
            "Time to first token by model",
            "p99 as the gateway measures it.",
            "a way to the trace: the gateway's metrics carry no exemplars. Role and worker do not "
            "apply.",
            SECONDS,
            Query(
                expr=queries.quantile(
                    0.99, names.GATEWAY_TTFT, names.STREAMED, v.BY_MODEL, by=(names.MODEL,)
                ),
                legend=f"{{{{{names.MODEL}}}}}",
            ),
            steps=pieces.limit_line(slo.ttft_s),
            width=8,
        ),
        lines(
            "Gap between tokens",
            "Time between two writes of content, pooled over all streams. The red line is the "
            "limit.",
            "which request had the gap, and why: see gaps by cause on PD stages. Role and worker "
            "do not apply.",
            SECONDS,
            *pieces.p50_and_p99(names.GATEWAY_GAP, v.BY_MODEL),
            colours=colours.QUANTILES,
            steps=pieces.limit_line(slo.token_gap_s),
            width=8,
        ),
    )


def _missed(objective: rec.Objective, window: str) -> str:
    slo = queries.equal("slo", objective.key)
    return pieces.by_model(queries.series(rec.error_ratio(window), slo, v.BY_MODEL), names.MODEL)


def _budget(slo: Slo) -> tuple[Panel, ...]:
    return tuple(
        lines(
            rec.burn_panel(objective),
            f"{objective.promise} Burn 1 uses up the budget of 30 days in 30 days; alerts page at "
            "14.4 and 6 (docs/dashboards.md).",
            "what is left of the budget. Empty without the recording rules, and while nothing is "
            "served. Role and worker do not apply.",
            SHORT,
            *(
                Query(
                    expr=f"{_missed(objective, window)} / {objective.budget:g}",
                    legend=f"{{{{{names.MODEL}}}}} {window}",
                )
                for window in ("1h", "6h")
            ),
            steps=((None, "transparent"), (1, colours.WARN), (14.4, colours.BAD)),
            width=8,
            to_one=True,
        )
        for objective in rec.objectives(slo)
    )
