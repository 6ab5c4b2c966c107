"""Uids of the boards, and the links between them: time and variables go along.

Owns addresses; knows nothing of what is shown there.
"""

from __future__ import annotations

from dashboards import variables as v
from dashboards.sdk import Link

OVERVIEW, STAGES, SLOW, REQUEST, WORKERS = (
    "pd-overview",
    "pd-stages",
    "pd-slow",
    "pd-request",
    "pd-workers",
)
FOLDER = "PD serving"
PROMETHEUS_UID = "prometheus"
"""Of the data source, as provisioned; only alert rules name it."""

_TIME = "${__url_time_range}"


def _kept(*names: str) -> str:
    return "&".join(f"${{{name}:queryparam}}" for name in names)


_ALL = _kept(v.PROMETHEUS, v.JAEGER, v.MODEL, v.ROLE, v.WORKER, v.STEP, v.JAEGER_UI)


def board(title: str, uid: str) -> Link:
    return Link(title=title, url=f"/d/{uid}?{_ALL}&{_TIME}")


def slow_in(stage: str) -> Link:
    """Slow requests that stalled in a stage; `stage` may be a field reference."""
    return Link(
        title="Slow requests that stalled here",
        url=f"/d/{SLOW}?var-{v.STAGE}={stage}&{_ALL}&{_TIME}",
    )


def slow_in_this_stage() -> Link:
    """The same, of the series' own stage."""
    return slow_in("${__field.labels.stage}")


def worker(uid: str = WORKERS) -> Link:
    """What the series' own worker does."""
    kept = _kept(v.PROMETHEUS, v.JAEGER, v.MODEL, v.STEP, v.JAEGER_UI)
    label = "${__field.labels.instance}"
    return Link(title="This worker", url=f"/d/{uid}?var-{v.WORKER}={label}&{kept}&{_TIME}")


def one_request() -> tuple[Link, ...]:
    """From a trace id in a table: the board of one request, and Jaeger's own page."""
    return (
        Link(
            title="Where did it stall?",
            url=f"/d/{REQUEST}?var-{v.TRACE}=${{__value.raw}}&{_ALL}&{_TIME}",
        ),
        in_jaeger("${__value.raw}"),
    )


def in_jaeger(trace_id: str) -> Link:
    return Link(title="Open in Jaeger", url=f"${{{v.JAEGER_UI}:raw}}/trace/{trace_id}", blank=True)


def alert_url(uid: str, panel_id: int, **labels: str) -> str:
    """Where an alert leads: the panel that shows it, with its labels as variables."""
    chosen = "".join(
        f"&var-{name}={value.replace(' }}', ' | urlquery }}')}" for name, value in labels.items()
    )
    return f"/d/{uid}?viewPanel={panel_id}{chosen}"
