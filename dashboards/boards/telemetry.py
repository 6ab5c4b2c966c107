"""Panels on telemetry that is lost where no agent sees it, or that says less than it seems to."""

from __future__ import annotations

from dashboards import colours, names, queries
from dashboards import variables as v
from dashboards.boards import pieces
from dashboards.rules import telemetry as rules
from dashboards.sdk import EMPTY_WHILE, PERCENT, SHORT, Panel, Query, lines, states
from pdtrace.slo import Slo


def lossy(slo: Slo) -> tuple[Panel, ...]:
    """What the alerts of `rules.telemetry` ask, drawn."""
    return (_behind_agents(), _recorded(), _off_scale(slo))


def _behind_agents() -> Panel:
    scraped = queries.series(names.UP, rules.BEHIND_AGENTS)
    none_lost = f"0 * {queries.highest(scraped, ('instance',))}"
    unreached = f"1 - {queries.series(names.UP, rules.BEHIND_AGENTS)}"
    return lines(
        "Spans lost behind the agents",
        "What Jaeger or the collector refuses, cannot pass on, drops before it has decided, or "
        f"measures without labels, per second; 1 while it is not scraped. {EMPTY_WHILE}there is "
        "no such program. Its counters begin with the first loss: without one it is 0.",
        "what is sampled away on purpose. Model, role and worker do not apply.",
        SHORT,
        *(
            Query(
                expr=f"{queries.per_second(loss.counter, ('instance',))} or {none_lost}",
                legend=f"{{{{instance}}}} {loss.what}",
            )
            for loss in rules.LOSSES
        ),
        Query(expr=unreached, legend="{{instance}} not scraped"),
        steps=((None, "transparent"), (1e-9, colours.BAD)),
        width=8,
        reaches=1,
    )


def _recorded() -> Panel:
    return states(
        "Processes recorded",
        "Whether what a process does is recorded, as its heartbeats tell the gateway.",
        "processes that have not announced themselves. Model does not apply.",
        Query(
            expr=queries.highest(
                queries.series(names.PROCESS_RECORDED, v.BY_ROLE, v.BY_WORKER),
                ("role", "instance"),
            ),
            legend="{{instance}}",
        ),
        {"0": ("not recorded", colours.BAD), "1": ("recorded", colours.GOOD)},
        width=8,
    )


def _off_scale(slo: Slo) -> Panel:
    edge_s = rules.last_edge_s(slo)
    legend = {
        names.GATEWAY_DURATION: f"requests of {{{{{names.MODEL}}}}}",
        names.REQUEST_DURATION: "requests {{outcome}}",
        names.STAGE_DURATION: "in {{stage}}",
    }

    def above(one: rules.Measured) -> str:
        share = queries.share_above(edge_s, one.histogram, by=(one.by,))
        return pieces.by_model(share, one.by) if one.by == names.MODEL else share

    return lines(
        "Durations above the last bucket edge",
        f"Share of what took longer than {edge_s:g} s. Above 1 % the p99 of the other panels is "
        "that edge, whatever it was.",
        "how much longer: look at traces. Not a number while nothing finishes. Model, role and "
        "worker do not apply.",
        PERCENT,
        *(Query(expr=above(one), legend=legend[one.histogram]) for one in rules.MEASURED),
        colours={
            **{f"requests {outcome}": colour for outcome, colour in colours.OUTCOMES.items()},
            **{f"in {stage}": colour for stage, colour in colours.STAGES.items()},
        },
        steps=((None, "transparent"), (rules.OFF_SCALE_SHARE, colours.BAD)),
        width=8,
        reaches=2 * rules.OFF_SCALE_SHARE,
    )
