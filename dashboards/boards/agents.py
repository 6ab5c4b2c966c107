"""Panels about the agents: what they lose, how far they are behind, what has a trace.

Owns what is drawn; when it is too much stands in `dashboards.rules.alerts`.
"""

from __future__ import annotations

from dashboards import colours, names, queries
from dashboards.rules.alerts import LAG_S, POLL_AGE_S
from dashboards.sdk import REQUESTS_S, SECONDS, SHORT, Panel, Query, lines

LOST = "What the agents lost"
BEHIND = "How far the agents are behind"
TRACED = "Finished and traced requests"

LOSSES = (
    # An agent without an exporter has no spans to drop, one without --out no lines to lose.
    (names.AGENT_DROPPED, ("instance",), "{{instance}} spans dropped"),
    (names.AGENT_LINES_LOST, ("instance",), "{{instance}} requests not written"),
    (
        queries.series(names.AGENT_RECORDS, queries.any_of("what", ("missed", "torn"))),
        ("instance", "what"),
        "{{instance}} records {{what}}",
    ),
    (names.AGENT_ERRORS, ("instance",), "{{instance}} faults"),
)
"""Counters of what an agent may lose, their labels and what they are called."""


def panels() -> tuple[Panel, ...]:
    return _lost(), _behind(), _traced()


def _lost() -> Panel:
    return lines(
        LOST,
        "Spans dropped, requests that could not be written, records that were overwritten "
        "before they were read or torn, and faults that may have cost some, in the window.",
        "why spans were dropped, which the alert and the agent's log say; what a collector behind "
        "the agents lost. Model, role and worker do not apply.",
        SHORT,
        *(
            Query(expr=queries.number(counter, by, queries.RATE), legend=legend)
            for counter, by, legend in LOSSES
        ),
        bars=True,
        width=8,
        table=False,
        reaches=1,
    )


def _behind() -> Panel:
    return lines(
        BEHIND,
        "How long ago each agent had read the rings to their end, and had last looked. The lines "
        "are their limits.",
        "delays of the collector and of Jaeger behind the agent. Model, role and worker do not "
        "apply.",
        SECONDS,
        Query(expr=queries.highest(names.AGENT_LAG, ("instance",)), legend="{{instance}} behind"),
        Query(
            expr=queries.highest(names.AGENT_POLL_AGE, ("instance",)),
            legend="{{instance}} since its last look",
        ),
        steps=((None, "transparent"), (LAG_S, colours.WARN), (POLL_AGE_S, colours.BAD)),
        width=8,
    )


def _traced() -> Panel:
    roots = queries.series(names.SPAN_CALLS, *names.ROOT)
    return lines(
        TRACED,
        "Requests that finished per second, as the agents count them, and those of which a root "
        "span came to where span metrics are made. Where the second stands still, traces do not "
        "arrive.",
        "what tail sampling keeps: span metrics are made before it. Model, role and worker do not "
        "apply.",
        REQUESTS_S,
        Query(expr=queries.per_second(names.FINISHED), legend="finished"),
        Query(expr=queries.per_second(roots), legend="in span metrics"),
        width=8,
    )
