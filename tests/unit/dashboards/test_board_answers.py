"""What panels answer, and in which colour, where a calm look would be wrong: Prometheus's own
evaluation (promtool) of the boards' queries over scripted series."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import build, colours, targets
from tests.support.programs import program

BOARDS = build.boards()
VALUES = {**targets.ALL, **targets.windows(range_s=600, step_s=30, scrape_s=30)}
INTERVAL = "30s"

GATEWAY_UP, AGENT_UP = 'up{job="pdtrace-gateway"}', 'up{job="pdtrace-agent"}'
WORKERS = ("prefill-0", "transfer-0", "decode-0", "decode-1")


def ready(**values: int) -> dict[str, str]:
    """Each worker's readiness as the gateway tells it: 1 unless given (`decode_1=0`)."""
    return {
        f'pd_process_ready{{job="pdtrace-gateway",{of(worker)}}}': (
            f"{values.get(worker.replace('-', '_'), 1)}x30"
        )
        for worker in WORKERS
    }


def in_state(worker: str, one: str) -> str:
    return f'pd_process_state{{job="pdtrace-agent",{of(worker)},state="{one}"}}'


def state(worker: str, now: str) -> dict[str, str]:
    states = ("alive", "stalled", "closed", "lost")
    return {in_state(worker, one): f"{int(one == now)}x30" for one in states}


def of(worker: str) -> str:
    return f'role="{worker.partition("-")[0]}",instance="{worker}"'


def gauges(worker: str, **values: str) -> dict[str, str]:
    return {
        f'pd_{name}{{job="pdtrace-agent",{of(worker)}}}': given for name, given in values.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series → their values, and what the panel's query answers: labels → value."""

    board: str
    panel: str
    series: Mapping[str, str]
    answers: Mapping[str, float]
    looks: str | None = None
    ref: str = "A"

    def __str__(self) -> str:
        return f"{self.panel}: {self.looks or self.answers}"


def stat(panel: str, series: dict[str, str], value: float | None, looks: str) -> Case:
    answers = {} if value is None else {"{}": value}
    return Case(board="pd-overview", panel=panel, series=series, answers=answers, looks=looks)


FIRING = 'ALERTS{alertstate="firing",component="pdtrace"}'
BOTH = {AGENT_UP: "1x30", GATEWAY_UP: "1x30"}
LOSSES = {
    'pd_agent_spans_dropped_total{job="pdtrace-agent",reason="queue_full"}': "0x30",
    'pd_agent_lines_lost_total{job="pdtrace-agent"}': "0x30",
    'pd_agent_records_total{job="pdtrace-agent",what="missed"}': "0x30",
    'pd_agent_records_total{job="pdtrace-agent",what="torn"}': "0x30",
    'pd_agent_errors_total{job="pdtrace-agent"}': "0x30",
}
OLDEST = "pd_open_request_oldest_age"


def held(worker: str, in_flight: str, free: str) -> dict[str, str]:
    """Three of 64 pages held back."""
    sizes = {"kv_pages_held": "3x30", "kv_pages_capacity": "64x30"}
    pages = f'pd_kv_pages{{job="pdtrace-agent",{of(worker)},state="free"}}'
    return gauges(worker, **sizes, worker_in_flight=in_flight) | {pages: free}


def progress(worker: str, *, age: str, running: str, steps: str) -> dict[str, str]:
    return gauges(
        worker, process_progress_age_seconds=age, worker_running=running, steps_total=steps
    )


CASES = [
    stat("Telemetry", BOTH, 1, "alive green"),
    stat("Telemetry", BOTH | {AGENT_UP: "0x30"}, 0, "target missing red"),
    stat("Telemetry", {GATEWAY_UP: "1x30"}, 0, "target missing red"),  # a job without a target
    stat("Telemetry", {AGENT_UP: "1x30"}, 0, "target missing red"),
    stat("Telemetry", {'up{job="node"}': "1x30"}, None, "no telemetry red"),
    stat("Processes not ready", ready(), 0, "0 green"),
    stat("Processes not ready", ready(decode_1=0), 1, "1 red"),  # frozen: four of five are
    stat("Processes not ready", ready(decode_1=0) | state("decode-1", "lost"), 1, "1 red"),
    stat("Processes not ready", ready() | state("decode-2", "lost"), 1, "1 red"),
    stat("Processes not ready", state("decode-1", "closed"), 0, "0 green"),
    stat("Processes not ready", BOTH, None, "no data text"),
    # A series that ended: what it was is not what is.
    stat("Processes not ready", dict.fromkeys(ready(), "1x5 stale"), None, "no data text"),
    stat("Alerts firing", {FIRING: "1x5 stale"}, None, "none text"),
    stat("Alerts firing", {FIRING: "1x30"}, 1, "1 red"),
    stat("Spans lost", LOSSES, 0, "0 green"),
    *(stat("Spans lost", LOSSES | {one: "0x9 10x20"}, 10, "10 red") for one in LOSSES),
    stat("Spans lost", BOTH, None, "no data text"),
    stat("Incomplete requests", BOTH, None, "no data text"),
    stat("Errors", BOTH, None, "no data text"),
    Case(
        board="pd-overview",
        panel="Processes",
        series={
            **ready(decode_1=0, prefill_0=0, transfer_0=0),
            **state("decode-0", "alive"),
            **state("decode-1", "alive"),
            **state("prefill-0", "lost"),
            **state("transfer-0", "stalled"),
            **state("gateway-0", "alive"),
        },
        answers={
            '{role="decode",instance="decode-0"}': 1,
            '{role="decode",instance="decode-1"}': 5,
            '{role="prefill",instance="prefill-0"}': 4,
            '{role="transfer",instance="transfer-0"}': 2,
            '{role="gateway",instance="gateway-0"}': 1,
        },
    ),
    Case(
        board="pd-workers",
        panel="Standing still",
        series={
            **gauges("gateway-0", process_progress_age_seconds="0.1x30"),
            **progress("prefill-0", age="0+30x30", running="1x30", steps="5x30"),
            **progress("decode-1", age="0.1x30", running="2x30", steps="5x30"),
            **progress("decode-0", age="0.1x30", running="0x30", steps="5x30"),
            **progress("decode-2", age="0.1x30", running="3x30", steps="0+5x30"),
        },
        answers={
            '{role="gateway",instance="gateway-0"}': 0,
            '{role="prefill",instance="prefill-0"}': 2,
            '{role="decode",instance="decode-1"}': 1,
            '{role="decode",instance="decode-0"}': 0,
            '{role="decode",instance="decode-2"}': 0,
        },
    ),
    Case(
        board="pd-stages",
        panel="Oldest open request by stage and worker",
        series={
            OLDEST + '_seconds{stage="gateway.queue"}': "40x30",
            OLDEST + '_seconds{stage="transfer"}': "7x30",
            OLDEST + '_seconds{stage="hop.token"}': "0x30",
            OLDEST + '_by_worker_seconds{stage="transfer",instance="decode-0"}': "7x30",
        },
        answers={
            '{stage="gateway.queue",instance="no worker"}': 40,
            '{stage="transfer",instance="decode-0"}': 7,
        },
    ),
    Case(
        board="pd-request",
        panel="KV pages by worker",
        series={
            'pd_kv_pages{role="decode",instance="decode-0",state="free"}': "88x30",
            'pd_kv_pages{role="decode",instance="decode-0",state="used"}': "12x30",
            'pd_kv_pages_capacity{role="decode",instance="decode-0"}': "100x30",
        },
        answers={'{instance="decode-0",state="used"}': 0.12},
    ),
    *(
        Case(
            board="pd-workers",
            panel="KV pages held back",
            ref=ref,
            series={
                **held("decode-0", in_flight="0x30", free="60x30"),
                **held("decode-1", in_flight="1x30", free="61x30"),
            },
            answers=answers,
        )
        for ref, answers in (
            ("B", {'{role="decode",instance="decode-0"}': 3}),
            ("C", {f"{{{of('decode-0')}}}": 1, f"{{{of('decode-1')}}}": 0}),
        )
    ),
    *(
        Case(
            board="pd-workers",
            panel="Requests waiting for each worker of a pool",
            ref=ref,
            series={
                'pd_open_requests{stage="prefill.queue"}': "6x30",
                'pd_open_requests{stage="decode.queue"}': "1x30",
                **state("prefill-0", "alive"),
                **state("prefill-1", "lost"),
                **state("decode-0", "alive"),
                **state("decode-1", "alive"),
            },
            answers={"{}": waiting},
        )
        for ref, waiting in (("A", 6), ("B", 0.5))
    ),
    *(
        Case(
            board="pd-stages",
            panel="Stages slower than usual by worker",
            ref=ref,
            series={
                f'pdtrace:stage_seconds:mean5m{{stage="transfer",{of("decode-0")}}}': "0.9x30",
                f'pdtrace:stage_seconds:mean6h{{stage="transfer",{of("decode-0")}}}': "0.1x30",
                f'pdtrace:stage_seconds:mean5m{{stage="transfer",{of("decode-1")}}}': "0.12x30",
                f'pdtrace:stage_seconds:mean6h{{stage="transfer",{of("decode-1")}}}': "0.1x30",
            },
            answers={f'{name}{{stage="transfer",{of("decode-0")}}}': seconds},
        )
        for ref, name, seconds in (("A", "pdtrace:stage_seconds:mean5m", 0.9), ("B", "", 0.5))
    ),
    *(
        Case(
            board="pd-overview",
            panel="Budget burn: errors",
            series={
                f'pdtrace:slo_error:ratio_rate1h{{slo="errors"{model}}}': f"{long}x30",
                f'pdtrace:slo_error:ratio_rate5m{{slo="errors"{model}}}': f"{short}x30",
            },
            answers={f'{{slo="errors",gen_ai_request_model="{shown}"}}': burn},
        )
        for model, shown, long, short, burn in (
            (',gen_ai_request_model="m"', "m", 0.2, 0.1, 100),
            (',gen_ai_request_model="m"', "m", 0.1, 0.2, 100),
            (',gen_ai_request_model="m"', "m", 0.1, 0.1, 100),
            ("", "no model", 0.1, 0.2, 100),
        )
    ),
]


def panel(case: Case) -> dict[str, Any]:
    [found] = [one for one in BOARDS[case.board]["panels"] if one["title"] == case.panel]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_panel_answers(case: Case, tmp_path: Path) -> None:
    [target] = [one for one in panel(case)["targets"] if one["refId"] == case.ref]
    assert evaluated(tmp_path, targets.fill(target["expr"], VALUES), case) == ""
    if case.looks is not None:
        assert looks(panel(case), next(iter(case.answers.values()), None)) == case.looks


def evaluated(tmp_path: Path, expr: str, case: Case) -> str:
    """What promtool says is different."""
    samples = [{"labels": labels, "value": value} for labels, value in case.answers.items()]
    test = {
        "interval": INTERVAL,
        "input_series": [{"series": name, "values": told} for name, told in case.series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "10m", "exp_samples": samples}],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"tests": [test]}))
    tested = subprocess.run(
        [program("promtool"), "test", "rules", str(path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return "" if tested.returncode == 0 else tested.stdout + tested.stderr


def looks(one: dict[str, Any], value: float | None) -> str:
    """Text and colour of a stat, as Grafana chooses them: mappings first, then thresholds."""
    defaults = one["fieldConfig"]["defaults"]
    for mapping in defaults.get("mappings", ()):
        options = mapping["options"]
        if value is None and mapping["type"] == "special" and "null" in options["match"]:
            return f"{options['result']['text']} {options['result']['color']}"
        if value is not None and mapping["type"] == "value" and f"{value:g}" in options:
            found = options[f"{value:g}"]
            return f"{found['text']} {found['color']}"
    low = float("-inf") if value is None else value
    steps = defaults["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or low >= step["value"]][-1]
    return f"{defaults['noValue'] if value is None else format(value, 'g')} {colour}"


def test_a_number_that_is_not_there_is_never_green() -> None:
    stats = [one for board in BOARDS.values() for one in board["panels"] if one["type"] == "stat"]
    assert len(stats) > 6
    for one in stats:
        assert not looks(one, None).endswith(colours.GOOD), one["title"]


def test_what_is_shown_as_now_is_of_now() -> None:
    """A range's latest value stays after its series ended."""
    for board in BOARDS.values():
        for one in board["panels"]:
            calcs = one.get("options", {}).get("reduceOptions", {}).get("calcs", [])
            if "lastNotNull" in calcs:
                assert all(target.get("instant") for target in one["targets"]), one["title"]


# -- annotations -----------------------------------------------------------------------------------

MARKS = {
    "Starts": {
        **state("decode-0", "alive"),
        in_state("decode-1", "alive"): "0x19 1x10",
        in_state("decode-2", "alive"): "0x19 1x10",
        in_state("decode-2", "stalled"): "1x19 0x10",
        **state("decode-3", "alive"),
        **gauges("decode-3", steps_total="0+9x19 0+9x10"),  # back between two scrapes
        **gauges("decode-0", steps_total="0+9x30"),
    },
    "Drains": ready()
    | {f'pd_process_ready{{job="pdtrace-gateway",{of("decode-1")}}}': "1x19 0x10"},
    "Ended processes": {
        **state("decode-0", "closed"),
        in_state("decode-1", "closed"): "0x19 1x10",
    },
    "Lost processes": {
        **state("decode-0", "lost"),
        in_state("decode-1", "lost"): "0x19 1x10",
    },
}
MARKED = {"Starts": {"decode-1", "decode-3"}}


@pytest.mark.parametrize("name", MARKS)
def test_only_beginnings_are_marked(name: str, tmp_path: Path) -> None:
    exprs = {
        own: expr for uid, own, expr in targets.annotation_queries(BOARDS) if uid == "pd-overview"
    }
    assert {"Alerts", *MARKS} == set(exprs)
    marked = f"count by (instance) ({targets.fill(exprs[name], VALUES)})"
    answers = {f'{{instance="{one}"}}': 1.0 for one in MARKED.get(name, {"decode-1"})}
    case = Case(board="", panel=name, series=MARKS[name], answers=answers)
    assert evaluated(tmp_path, marked, case) == ""
