"""What happened when, marked on every board: alerts, and processes that start, drain, end or die.

Owns the queries of the marks; knows no board. Only beginnings are marked: the shaded stretches of
what lasts would hide the data.
"""

from __future__ import annotations

from dashboards import colours, names, queries
from dashboards import variables as v
from dashboards.sdk import Annotation
from pdtrace.inflight import ProcessState

_EARLIER = " offset $__interval"


def marks() -> tuple[Annotation, ...]:
    firing = queries.series(
        names.ALERTS, queries.equal("alertstate", "firing"), queries.equal("component", "pdtrace")
    )
    ready = queries.series(names.PROCESS_READY, v.BY_ROLE, v.BY_WORKER)
    lost, closed = (_in(state) for state in (ProcessState.LOST, ProcessState.CLOSED))
    return (
        Annotation(name="Alerts", expr=_onset(firing), colour=colours.BAD, title="{{alertname}}"),
        Annotation(
            name="Lost processes",
            expr=_onset(lost, " == 1"),
            colour=colours.WARN,
            title="{{instance}} was lost",
        ),
        Annotation(
            name="Drains",
            expr=_onset(ready, " == 0"),
            colour=colours.DRAINS,
            title="{{instance}} gets no more requests",
        ),
        Annotation(
            name="Ended processes",
            expr=_onset(closed, " == 1"),
            colour=colours.CALM_LINE,
            title="{{instance}} ended in order",
        ),
        Annotation(
            name="Starts",
            expr=_starts(),
            colour=colours.CALM,
            title="{{instance}} started",
        ),
    )


def _in(state: ProcessState) -> str:
    return queries.series(
        names.PROCESS_STATE, queries.equal("state", state.value), v.BY_ROLE, v.BY_WORKER
    )


def _onset(series: str, condition: str = "") -> str:
    return f"{series}{condition} unless {series}{_EARLIER}{condition}"


def _starts() -> str:
    """Of a worker also where it came back between two scrapes: its forward passes begin anew."""
    alive, stalled = (_in(state) for state in (ProcessState.ALIVE, ProcessState.STALLED))
    was_there = f"{alive}{_EARLIER} == 1 or {stalled}{_EARLIER} == 1"
    steps = queries.series(names.STEPS, v.BY_ROLE, v.BY_WORKER)
    owner = ("role", "instance")
    appeared = queries.highest(f"{alive} == 1 unless on (role, instance) ({was_there})", owner)
    fewer = f"resets({steps}[{queries.RATE}]"
    again = queries.highest(f"{fewer}) > 0 unless {fewer}{_EARLIER}) > 0", owner)
    return f"{appeared} or {again}"
