"""PD overview: is the telemetry alive, are users well, and which stage holds requests up."""

from __future__ import annotations

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.boards import agents, pieces, telemetry
from dashboards.rules import recordings as rec
from dashboards.rules.alerts import PAGE_BURNS, TICKET_BURNS
from dashboards.sdk import (
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

JOBS = (names.AGENT_JOB, names.GATEWAY_JOB)


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
            Row(
                title="The telemetry itself",
                panels=(*agents.panels(), *telemetry.lossy(slo)),
            ),
        ),
    )


def _alive() -> tuple[Panel, ...]:
    lost = queries.total(
        " or ".join(
            # Some have the same labels, of which only the first would count.
            f'label_replace(increase({counter}[{queries.RANGE}]), "loss", "{at}", "", "")'
            for at, (counter, *_) in enumerate(agents.LOSSES)
        )
    )
    incomplete = queries.share(names.AGENT_INCOMPLETE, names.AGENT_REQUESTS, window=queries.RANGE)
    reached = queries.series(names.UP, queries.any_of("job", JOBS))
    every_job = f"count(count by (job) ({reached})) == bool {len(JOBS)}"
    ready = queries.series(names.PROCESS_READY, v.BY_ROLE, v.BY_WORKER)
    gone = queries.series(
        names.PROCESS_STATE,
        queries.equal("state", ProcessState.LOST.value),
        v.BY_ROLE,
        v.BY_WORKER,
    )
    absent = queries.highest(f"1 - {ready} or {gone}", ("role", "instance"))
    firing = queries.series(
        names.ALERTS, 'alertstate="firing"', queries.equal("component", "pdtrace")
    )
    return (
        number(
            "Telemetry",
            "Whether Prometheus reaches every agent and gateway that it knows, and knows one of "
            "each. While it does not, every panel below is silent or old, and silence is no good "
            "sign.",
            "whether Jaeger receives traces: see finished and traced requests below.",
            SHORT,
            Query(expr=f"min({reached}) * ({every_job})", legend="telemetry"),
            steps=((None, colours.BAD), (1, colours.GOOD)),
            texts={"0": ("target missing", colours.BAD), "1": ("alive", colours.GOOD)},
            no_value=("no telemetry", colours.BAD),
        ),
        number(
            "Agent lag",
            "How long ago the slowest agent had read the rings to their end: the worst in the time "
            "shown.",
            "which agent it was, and delays of the collector and of Jaeger behind it.",
            SECONDS,
            Query(expr=queries.highest(names.AGENT_LAG), legend="lag"),
            steps=((None, colours.GOOD), (2, colours.WARN), (5, colours.BAD)),
            over_time="max",
        ),
        number(
            "Spans lost",
            "Spans dropped, requests that could not be written, records overwritten or torn, and "
            "faults of an agent, in the time shown.",
            "which of these: see what the agents lost below; what a collector behind them lost.",
            SHORT,
            Query(expr=lost, legend="lost"),
            steps=((None, colours.GOOD), (1, colours.BAD)),
        ),
        number(
            "Incomplete requests",
            "Share of finished requests of whose marks something is known to be missing, in the "
            "time shown. Their parts are not to be trusted.",
            "requests whose loss nobody noticed; not a number while no request finishes.",
            PERCENT,
            Query(expr=incomplete, legend="incomplete"),
            steps=((None, colours.GOOD), (0.001, colours.WARN), (0.01, colours.BAD)),
        ),
        number(
            "Processes not ready",
            "Processes that cannot take part in a generation: those that the gateway knows and "
            "gives no requests, and those that an agent found killed with nothing in their place.",
            "which they are: see processes below; processes that ended in order. Model does not "
            "apply.",
            SHORT,
            Query(expr=queries.total(absent), legend="not ready"),
            steps=((None, colours.GOOD), (1, colours.BAD)),
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
            no_value=("none", colours.UNKNOWN),
        ),
    )


def _processes() -> Panel:
    owner = ("role", "instance")
    in_state = (
        queries.series(
            names.PROCESS_STATE, queries.equal("state", state.value), v.BY_ROLE, v.BY_WORKER
        )
        for state in ProcessState
    )
    state = " + ".join(
        f"{index} * {queries.highest(one, owner)}" for index, one in enumerate(in_state, start=1)
    )
    texts = {
        str(index): (name.value, colours.STATES[name.value])
        for index, name in enumerate(ProcessState, start=1)
    }
    alive = list(ProcessState).index(ProcessState.ALIVE) + 1
    unready = len(texts) + 1
    texts[str(unready)] = ("not ready", colours.NOT_READY)
    ready = queries.highest(
        queries.series(names.PROCESS_READY, v.BY_ROLE, v.BY_WORKER), ("role", "instance")
    )
    # What the gateway says stands only where the ring has nothing worse to say.
    refused = f"({ready} == 0) + {unready} unless ({state}) != {alive}"
    return states(
        "Processes",
        "State of each process: alive, not ready (it gets no requests: it loads, drains or does "
        "not fit, as the gateway says), stalled (it has work and its loop does not go round), "
        "closed in order, or lost, as its ring says.",
        "what it works on, and processes of hosts without an agent while they are ready. Model "
        "does not apply.",
        Query(expr=f"{refused} or {state}", legend="{{instance}}"),
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
                expr=pieces.by_model(
                    queries.quantile(
                        0.99, names.GATEWAY_TTFT, names.STREAMED, v.BY_MODEL, by=(names.MODEL,)
                    ),
                    names.MODEL,
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


_BURNS = (*PAGE_BURNS, *TICKET_BURNS)
"""Long window, short window, and the burn rate from which an alert holds both."""


def _burn(objective: rec.Objective, long: str, short: str) -> Query:
    """The lesser of both windows: what has to be above the rate for an alert."""
    slo = queries.equal("slo", objective.key)
    over_long, over_short = (
        queries.series(rec.error_ratio(window), slo, v.BY_MODEL) for window in (long, short)
    )
    lesser = f"({over_long} < {over_short} or {over_short} and {over_long})"
    burn = pieces.by_model(f"{lesser} / {objective.budget:g}", names.MODEL)
    return Query(expr=burn, legend=f"{{{{{names.MODEL}}}}} {long} and {short}")


def _budget(slo: Slo) -> tuple[Panel, ...]:
    rates = sorted(rate for *_, rate in _BURNS)
    of_rate = dict(zip(rates, colours.BURNS, strict=True))
    shades = {f"^.* {long} and {short}$": of_rate[rate] for long, short, rate in _BURNS}
    pages, tickets = (
        " and ".join(f"{rate:g}" for *_, rate in burns) for burns in (PAGE_BURNS, TICKET_BURNS)
    )
    return tuple(
        lines(
            rec.burn_panel(objective),
            f"{objective.promise} Burn 1 uses up the budget of 30 days in 30 days. Each line is "
            "the lesser of a long and a short window, and alerts above the dashed line of its "
            f"colour: those at {pages} page, those at {tickets} are tickets.",
            "what is left of the budget, and that little traffic alerts nobody. Empty without the "
            "recording rules, and while nothing is served. Role and worker do not apply.",
            SHORT,
            *(_burn(objective, long, short) for long, short, _ in _BURNS),
            shades=shades,
            steps=((None, "transparent"), *of_rate.items()),
            width=8,
            reaches=1,
        )
        for objective in rec.objectives(slo)
    )
