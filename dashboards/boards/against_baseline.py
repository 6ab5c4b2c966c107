"""What takes longer than usual: the panels of the alerts on stalled stages.

Owns what is drawn: recorded means, and how high they may be. What is usual stands in
`dashboards.rules.recordings`, how much more is a stall in `dashboards.rules.alerts`.
"""

from __future__ import annotations

from dashboards import links, queries
from dashboards import variables as v
from dashboards.boards import pieces
from dashboards.rules import recordings as rec
from dashboards.rules.alerts import STALLED_ABOVE_S, STALLED_TIMES
from dashboards.sdk import EMPTY_WHILE, SECONDS, Link, Panel, Query, lines

BY_WORKER = "Stages slower than usual by worker"
BY_PAIR = "Hand-overs slower than usual by pair"


def by_worker() -> Panel:
    return _panel(
        BY_WORKER,
        "stages whose time grows with prompts and answers: verdicts judge them. Model does not "
        "apply.",
        (rec.STAGE_MEAN, rec.STAGE_BASELINE, v.BY_ROLE, v.BY_WORKER),
        "{{stage}} · {{instance}}",
        (links.worker(), links.slow_in_this_stage()),
    )


def by_pair() -> Panel:
    return _panel(
        BY_PAIR,
        "stages that one worker has by itself: PD stages has them. Model and role do not apply, "
        "and worker is the destination.",
        (rec.PAIR_MEAN, rec.PAIR_BASELINE, queries.chosen("destination", v.WORKER)),
        "{{stage}} · {{source}} → {{destination}}",
        (links.slow_in_this_stage(),),
    )


def _panel(
    title: str,
    lacks: str,
    recorded: tuple[str, str, *tuple[str, ...]],
    legend: str,
    offered: tuple[Link, ...],
) -> Panel:
    mean, usual = (queries.series(metric, *recorded[2:]) for metric in recorded[:2])
    more = f"{mean} - {usual} > {STALLED_ABOVE_S:g}"
    return lines(
        title,
        f"Mean of the last {rec.RECENT}, of stages in which it is more than {STALLED_ABOVE_S:g} s "
        f"above that of the {rec.BASELINE} before. Above its dashed line, "
        f"{STALLED_TIMES} times the usual, a stage is stalled. {EMPTY_WHILE}none takes that much "
        "longer, and in the first minutes, which have nothing to be held against.",
        f"{lacks} Too few requests are no mean for an alert, and are drawn here.",
        SECONDS,
        Query(expr=f"{mean} and {more}", legend=legend),
        Query(expr=f"{STALLED_TIMES} * {usual} and {more}", legend=f"{legend} · limit"),
        shades=pieces.stage_shades(legend),
        dashed="^.* · limit$",
        links=offered,
        width=12,
    )
