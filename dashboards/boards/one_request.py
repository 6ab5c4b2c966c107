"""One request: its trace, and what the server did at that time."""

from __future__ import annotations

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.boards import pieces
from dashboards.sdk import EMPTY_WHERE, SECONDS, Board, Panel, Query, Row, lines, trace, trace_view
from pdtrace.slo import Slo


def board(slo: Slo) -> Board:
    return Board(
        uid=links.REQUEST,
        title="PD one request",
        description="Where did this request stall? Reached by a link that names its trace.",
        variables=(*v.everywhere(), v.trace()),
        links=(
            links.board("Back to slow traces", links.SLOW),
            links.in_jaeger(f"${{{v.TRACE}}}"),
        ),
        rows=(
            Row(title="The request", panels=(_trace(),)),
            Row(title="The server at that time", panels=_meanwhile(slo)),
        ),
        refresh="",
    )


def _trace() -> Panel:
    return trace_view(
        "Trace",
        "Every span of the request, of all processes. The root's tags pd.stall.stage and "
        "pd.stall.duration are the verdict; pd.wait.* of a stage say what it waited for.",
        "requests in flight, which have no trace yet (`pdtrace why --in-flight`), and usual times, "
        "which `pdtrace why TRACE_ID` compares. Model, role and worker do not apply. An "
        "error here means that no trace id was given.",
        trace(f"${v.TRACE}"),
    )


def _meanwhile(slo: Slo) -> tuple[Panel, ...]:
    return (
        pieces.open_by_stage("Open requests by stage", width=12),
        lines(
            "Forward passes by worker",
            "p99 of the time of a forward pass: was the worker itself slow? "
            f"{EMPTY_WHERE}no chosen worker has a model.",
            "what was in the batch: the trace's steps say so. Model and role do not apply.",
            SECONDS,
            Query(
                expr=queries.quantile(
                    0.99, names.STEP_DURATION, v.BY_WORKER, by=("kind", "instance")
                ),
                legend="{{instance}} {{kind}}",
            ),
            links=(links.worker(),),
        ),
        pieces.kv_pages("KV pages by worker", width=12),
        lines(
            "Time to first token meanwhile",
            "What the others got at that time. The red line is the limit.",
            "this request by itself. Role and worker do not apply.",
            SECONDS,
            *pieces.p50_and_p99(names.GATEWAY_TTFT, names.STREAMED, v.BY_MODEL),
            colours=colours.QUANTILES,
            steps=pieces.limit_line(slo.ttft_s),
        ),
    )
