"""Panels that more than one board has, and the stages they name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.sdk import (
    EMPTY_WHERE,
    EMPTY_WHILE,
    PERCENT,
    SECONDS,
    SHORT,
    Link,
    Panel,
    Query,
    Steps,
    bars,
    legends,
    lines,
)
from pdtrace.analysis.baselines import NESTED_LEAVES
from pdtrace.analysis.timeline import UNEXPLAINED
from pdtrace.slo import Slo
from pdtrace.stages import CHAINS, STAGE_BY_NAME, Mode, Role, Stage

CHAIN: tuple[Stage, ...] = tuple(
    STAGE_BY_NAME[name]
    for name in dict.fromkeys(stage.name for mode in Mode for stage in CHAINS[mode])
)
"""Chain stages of every mode, in causal order."""

PARTS: tuple[str, ...] = (
    *(stage.name for stage in CHAIN),
    *(pause for pauses in NESTED_LEAVES.values() for pause in pauses),
    UNEXPLAINED,
)
"""What a request's time is divided into."""

STALLING: tuple[str, ...] = PARTS[:-1]
"""Stages that a verdict may name."""

GENERATE = "decode.generate"
_OLDEST = 8
"""Bars that can be read in a panel of the usual height."""

NO_MODEL, NO_WORKER = "no model", "no worker"

POOLS: Mapping[Role, tuple[str, ...]] = MappingProxyType(
    {Role.PREFILL: ("prefill.queue",), Role.DECODE: ("decode.reserve", "decode.queue")}
)
"""Stages in which requests wait for a worker of a pool."""


def stage_colours(stages: tuple[str, ...] = STALLING) -> dict[str, str]:
    return {stage: colours.STAGES[stage] for stage in stages}


def stage_shades(legend: str) -> dict[str, str]:
    """Of a stage's colour each of its series has a shade."""
    return legends(legend, "stage", colours.STAGES)


def by_model(expr: str, label: str) -> str:
    return queries.named(expr, label, NO_MODEL)


def p50_and_p99(
    histogram: str, *matchers: str, exemplar: bool = False, model: str = ""
) -> tuple[Query, Query]:
    """Both quantiles; by the label `model` where it is given."""
    by, of = ((model,), f"{{{{{model}}}}}") if model else ((), "")

    def one(q: float) -> str:
        found = queries.quantile(q, histogram, *matchers, by=by)
        return by_model(found, model) if model else found

    made = [
        Query(
            expr=one(q),
            legend=f"{name} {of}".strip(),
            exemplar=exemplar,
        )
        for q, name in ((0.5, "p50"), (0.99, "p99"))
    ]
    return made[0], made[1]


def quantile_shades() -> dict[str, str]:
    """Of the quantiles of several models."""
    return legends("{{q}} {{model}}", "q", colours.QUANTILES)


def latency_steps(limit_s: float) -> Steps:
    return ((None, colours.GOOD), (limit_s / 2, colours.WARN), (limit_s, colours.BAD))


def limit_line(limit_s: float) -> Steps:
    return ((None, "transparent"), (limit_s, colours.BAD))


def open_by_stage(title: str, *, width: int = 12, height: int = 8) -> Panel:
    return lines(
        title,
        "Requests in flight at this moment by the stage that they are in, read from the rings: it "
        "moves while a worker hangs. Numbers add up, so they are stacked.",
        "requests of other hosts than the agents scraped, and what is finished. Model, role and "
        "worker do not apply.",
        SHORT,
        Query(
            expr=queries.total(names.OPEN, ("stage",)),
            legend="{{stage}}",
        ),
        colours=stage_colours(),
        stacked=True,
        links=(links.slow_in_this_stage(),),
        width=width,
        height=height,
        reaches=1,
    )


def oldest_by_worker(title: str, slo: Slo, *, width: int = 12, height: int = 8) -> Panel:
    by_worker = queries.highest(
        queries.series(names.OPEN_OLDEST_BY_WORKER, v.BY_WORKER), ("stage", "instance")
    )
    by_stage = queries.highest(names.OPEN_OLDEST, ("stage",))
    elsewhere = queries.named(
        f"({by_stage} > 0 unless on (stage) {names.OPEN_OLDEST_BY_WORKER})", "instance", NO_WORKER
    )
    return bars(
        title,
        "Age in its stage of the request that is longest in it, by the worker that has to end the "
        f"stage, or `{NO_WORKER}` where none is known to have to, as before a pair is chosen; the "
        f"{_OLDEST} oldest. The colour says how old: red from {slo.oldest_s:g} s. "
        f"{EMPTY_WHILE}nothing is in flight.",
        "how many wait. Model and role do not apply. "
        f"In {GENERATE} long answers are old without harm (limit {slo.oldest_generate_s:g} s).",
        SECONDS,
        Query(
            expr=f"topk({_OLDEST}, {by_worker} or {elsewhere})", legend="{{stage}} · {{instance}}"
        ),
        steps=latency_steps(slo.oldest_s),
        no_value="none",
        links=(links.worker(), links.slow_in_this_stage()),
        width=width,
        height=height,
    )


def stalls_by_stage(title: str, *, width: int = 12, height: int = 8) -> Panel:
    stalls = queries.number(names.STALLS, ("stage",), queries.RATE)
    return lines(
        title,
        "Finished requests by the stage that held them up: the one that exceeded its own baseline "
        "by most. Counted by the agent, so sampling does not change it.",
        "requests that did not stall, and those still in flight. Model, role and worker do not "
        "apply.",
        SHORT,
        Query(expr=stalls, legend="{{stage}}"),
        colours=stage_colours(),
        stacked=True,
        bars=True,
        links=(links.slow_in_this_stage(),),
        width=width,
        height=height,
        reaches=1,
    )


def stalls_in_span_metrics(title: str, *, width: int = 12, height: int = 8) -> Panel:
    calls = queries.series(
        names.SPAN_CALLS,
        *names.ROOT,
        queries.chosen(names.SPAN_MODEL, v.MODEL),
        f'{names.SPAN_STALL_STAGE}!=""',
    )
    grown = queries.number(calls, (names.SPAN_STALL_STAGE,), queries.RATE)
    return lines(
        title,
        "The same out of span metrics, for whoever has traces without the agent's metrics: root "
        "spans by their tag pd.stall.stage, which also finds them in Jaeger.",
        "requests that did not stall; requests that were not sampled before span metrics were "
        "made; a stage's first one, where Prometheus looks less often than the collector writes; "
        "what is still in flight. Role and worker do not apply.",
        SHORT,
        Query(expr=grown, legend=f"{{{{{names.SPAN_STALL_STAGE}}}}}"),
        colours=stage_colours(),
        stacked=True,
        bars=True,
        links=(links.slow_in(f"${{__field.labels.{names.SPAN_STALL_STAGE}}}"),),
        width=width,
        height=height,
        reaches=1,
    )


def kv_pages(title: str, *, width: int = 12, height: int = 8) -> Panel:
    held = queries.any_of("state", ("used", "reserved"))
    pages = queries.series(names.KV_PAGES, held, v.BY_ROLE, v.BY_WORKER)
    used = queries.total(pages, ("instance", "state"))
    legend = "{{instance}} {{state}}"
    capacity = queries.total(
        queries.series(names.KV_CAPACITY, v.BY_ROLE, v.BY_WORKER), ("instance",)
    )
    return lines(
        title,
        "Share of each worker's KV pages that requests hold: used, or reserved for them. "
        f"{EMPTY_WHERE}no chosen worker has a pool.",
        "which requests they are (`pdtrace top`), pages kept for prefixes, which are given up when "
        "they are needed, and pages held back from reuse. Model does not apply.",
        PERCENT,
        Query(
            expr=f"{used} / on (instance) group_left () {capacity}",
            legend=legend,
        ),
        shades=legends(legend, "state", colours.KV),
        links=(links.worker(),),
        width=width,
        height=height,
        reaches=1,
    )


def to(*uids: tuple[str, str]) -> tuple[Link, ...]:
    return tuple(links.board(title, uid) for title, uid in uids)
