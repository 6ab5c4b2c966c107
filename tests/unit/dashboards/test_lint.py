"""Each rule of the linter: what breaks it in public, and what keeps it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards import lint, promql
from dashboards.build import boards
from dashboards.rules.alerts import alerts
from dashboards.rules.recordings import recordings
from pdtrace.slo import DEFAULT_SLO, Slo

Board = dict[str, Any]

QUANTILE = "histogram_quantile(0.99, sum by (le) (rate(a_seconds_bucket[$__rate_interval])))"


def good() -> Board:
    """A dashboard that keeps every rule."""
    return {
        "title": "good",
        "uid": "pd-good",
        "editable": False,
        "links": [{"title": "others", "type": "dashboards", "keepTime": True, "includeVars": True}],
        "templating": {
            "list": [
                {"name": "prometheus", "type": "datasource", "query": "prometheus"},
                {"name": "jaeger", "type": "datasource", "query": "jaeger"},
                {"name": "stage", "type": "custom", "query": "a,b", "multi": False},
                {"name": "step", "type": "custom", "query": "15s,1m", "multi": False},
                {
                    "name": "worker",
                    "type": "query",
                    "query": {"query": "label_values(up, instance)", "refId": "worker"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "annotations": {
            "list": [
                {"name": "Annotations & Alerts", "builtIn": 1, "type": "dashboard"},
                {
                    "name": "lost",
                    "datasource": {"type": "prometheus", "uid": "${prometheus}"},
                    "target": {
                        "refId": "Anno",
                        "expr": "a == 1 unless a offset $__interval == 1",
                        "interval": "30s",
                    },
                },
            ]
        },
        "panels": [
            {"type": "row", "title": "row", "id": 1, "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}},
            panel(2, 'rate(a_total{instance=~"$worker"}[$__rate_interval])'),
            {
                "type": "table",
                "title": "traces",
                "id": 3,
                "description": "Traces.\n\nNot shown: old ones.",
                "gridPos": {"x": 12, "y": 1, "w": 12, "h": 8},
                "targets": [
                    {
                        "refId": "A",
                        "datasource": {"type": "jaeger", "uid": "${jaeger}"},
                        "queryType": "search",
                        "service": "pd-gateway",
                        "tags": 'pd.stall.stage=$stage error="a b"',
                        "limit": 20,
                    }
                ],
            },
        ],
    }


def panel(number: int, *exprs: str, kind: str = "timeseries", legend: str = "{{x}}") -> Board:
    return {
        "type": kind,
        "title": f"panel {number}",
        "id": number,
        "description": "What it shows.\n\nNot shown: the rest.",
        "gridPos": {"x": 0, "y": 1, "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": "reqps"}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": {"type": "prometheus", "uid": "${prometheus}"},
                "expr": expr,
                "legendFormat": legend,
                "interval": "$step",
            }
            for at, expr in enumerate(exprs)
        ],
    }


def change(path: str, value: Any) -> Callable[[Board], None]:
    """Sets what stands at a path such as `panels.1.title`; None takes it away."""

    def apply(board: Board) -> None:
        *keys, last = path.split(".")
        at: Any = board
        for key in keys:
            at = at[int(key)] if isinstance(at, list) else at[key]
        where: Any = int(last) if isinstance(at, list) else last
        if value is None:
            del at[where]
        else:
            at[where] = value

    return apply


def asks(expr: str) -> Callable[[Board], None]:
    return change("panels.1.targets.0.expr", expr)


def adds(*panels: Board) -> Callable[[Board], None]:
    def apply(board: Board) -> None:
        for number, added in enumerate(panels):
            added["gridPos"] = {"x": 0, "y": 20 + 10 * number, "w": 12, "h": 8}
            board["panels"].append(added)

    return apply


def stacked_quantiles(board: Board) -> None:
    asks(QUANTILE)(board)
    custom = {"stacking": {"mode": "normal", "group": "A"}}
    board["panels"][1]["fieldConfig"]["defaults"]["custom"] = custom


def mean_without_count(board: Board) -> None:
    asks("sum(rate(a_seconds_sum[$__rate_interval]))")(board)
    board["panels"][1]["fieldConfig"]["defaults"]["unit"] = "s"


def number(expr: str, *, calc: str, instant: bool, colour: str = "red") -> Board:
    one = panel(9, expr, kind="stat")
    one["fieldConfig"]["defaults"] |= {
        "unit": "short",
        "thresholds": {"steps": [{"value": None, "color": colour}, {"value": 1, "color": "blue"}]},
    }
    one["options"] = {"reduceOptions": {"calcs": [calc]}}
    one["targets"][0]["instant"] = instant
    return one


def calm_ratio(board: Board) -> None:
    one = number("rate(a_total[$__range])", calc="lastNotNull", instant=False)
    one["fieldConfig"]["defaults"]["unit"] = "percentunit"
    adds(one)(board)


def value_of_what_ended(board: Board) -> None:
    one = number("max(a)", calc="lastNotNull", instant=False)
    one["type"] = "bargauge"
    adds(one)(board)


def green_without_data(board: Board) -> None:
    adds(number("max(a)", calc="max", instant=False, colour="green"))(board)


def dead_override(board: Board) -> None:
    overrides(board, "Free Blocks", "byName", "Total Blocks")


def dead_override_of_a_composed_legend(board: Board) -> None:
    overrides(board, "{{x}} blocks", "byName", "Total Blocks")


def dead_pattern(board: Board) -> None:
    overrides(board, "p99 {{x}}", "byRegexp", "/^p50 .*$/")


def pattern_without_slashes(board: Board) -> None:
    overrides(board, "p99 {{x}}", "byRegexp", "^p99")


def overrides(board: Board, legend: str, kind: str, wanted: str) -> None:
    board["panels"][1]["targets"][0]["legendFormat"] = legend
    override = {"matcher": {"id": kind, "options": wanted}, "properties": []}
    board["panels"][1]["fieldConfig"]["overrides"] = [override]


def unit_of_a_column(board: Board) -> None:
    override = {
        "matcher": {"id": "byName", "options": "Mean"},
        "properties": [{"id": "unit", "value": "seconds"}],
    }
    board["panels"][2]["fieldConfig"] = {"defaults": {}, "overrides": [override]}


def unit_of_an_axis(board: Board) -> None:
    one = panel(9, "sum by (le) (rate(a_bucket[$__rate_interval]))", kind="heatmap")
    one["targets"][0]["legendFormat"] = "{{le}}"
    one["options"] = {"yAxis": {"unit": "secs"}}
    adds(one)(board)


def asks_for_values(query: str) -> Callable[[Board], None]:
    return change("templating.list.4.query.query", query)


def marks(expr: str) -> Callable[[Board], None]:
    return change("annotations.list.1.target.expr", expr)


def two_jaeger_queries(board: Board) -> None:
    board["panels"][2]["targets"] *= 2


def variable_unused(board: Board) -> None:
    added = {"name": "job", "type": "custom", "query": "a"}
    board["templating"]["list"].append(added)


def hidden_panels(board: Board) -> None:
    row = board["panels"][0]
    hidden = panel(9, "up")
    hidden["gridPos"] = {"x": 0, "y": 40, "w": 12, "h": 8}
    row["collapsed"], row["panels"] = True, [hidden]


def link_without_time(board: Board) -> None:
    link = {"title": "slow", "url": "/d/pd-slow?var-stage=transfer"}
    board["panels"][1]["fieldConfig"]["defaults"]["links"] = [link]


# Rule, how it is broken, and who broke it (the numbers are those of the public threads).
BROKEN: list[tuple[str, Callable[[Board], None]]] = [
    ("no-inputs", change("__inputs", [{"name": "DS_PROMETHEUS"}])),  # exports "for sharing"
    ("no-inputs", change("panels.1.targets.0.datasource.uid", "${DS_PROMETHEUS}")),  # compass
    ("uneditable", change("editable", True)),
    ("board-uid", change("uid", None)),
    ("board-id", change("id", 42)),
    ("template-datasource", change("templating.list.0", {"name": "x", "type": "custom"})),
    ("links-keep-context", change("links.0.keepTime", False)),
    ("links-keep-context", link_without_time),
    ("panel-ids", change("panels.1.id", 3)),  # ticdc 4508
    ("panel-ids", change("panels.1.id", 0)),  # grafana 15229
    ("grid", change("panels.2.gridPos", {"x": 16, "y": 1, "w": 12, "h": 8})),  # 28 of 24 columns
    ("grid", change("panels.2.gridPos", {"x": 6, "y": 1, "w": 12, "h": 8})),  # ticdc 4508
    ("grid", change("panels.1.gridPos", None)),
    ("rows-open", hidden_panels),  # context-guru 184
    ("template-reload", change("templating.list.4.refresh", 1)),
    ("template-query-shape", change("templating.list.4.query", "label_values(up, instance)")),
    ("template-all", change("templating.list.4.allValue", None)),
    ("template-query", asks_for_values("label_value(up, instance)")),
    ("target-promql", asks_for_values("label_values(up{job=~}, instance)")),
    ("target-promql", asks_for_values("query_result(sum(up)")),
    ("undeclared-variable", asks_for_values('label_values(up{x=~"$gone"}, instance)')),
    ("multi-needs-regex", asks_for_values('label_values(up{instance="$worker"}, instance)')),
    ("fixed-target", asks_for_values('label_values(a{job="mine"}, instance)')),
    ("target-rate-interval", asks_for_values("query_result(sum(rate(a_total[30s])))")),
    ("target-promql", marks("a == ")),
    ("target-rate-interval", marks("changes(a[1m]) > 0")),
    ("target-counter-agg", marks("a_total > 0")),
    ("undeclared-variable", marks('a{x=~"$gone"}')),
    ("multi-needs-regex", marks('a{instance="$worker"}')),
    ("panel-datasource", change("annotations.list.1.datasource.uid", "P1809F7CD0C75ACF3")),
    ("target-min-step", change("annotations.list.1.target.interval", None)),
    ("target-min-step", change("panels.1.targets.0.interval", None)),  # vllm 58148
    ("unused-variable", variable_unused),  # SGLang, compass: job is declared and never used
    ("panel-title", change("panels.1.title", "")),
    ("panel-description", change("panels.1.description", None)),
    ("panel-description", change("panels.1.description", "Time to first token.")),
    ("panel-targets", change("panels.1.targets", [])),
    ("panel-units", change("panels.1.fieldConfig.defaults.unit", None)),
    ("panel-units", change("panels.1.fieldConfig.defaults.unit", "GB/s")),  # ray PR 60819
    ("panel-units", change("panels.1.fieldConfig.defaults.unit", "secs")),  # SGLang
    (
        "default-threshold",  # vLLM
        change(
            "panels.1.fieldConfig.defaults.thresholds",
            {"steps": [{"value": None, "color": "green"}, {"value": 80, "color": "red"}]},
        ),
    ),
    ("panel-units", unit_of_a_column),  # a column of a table
    ("panel-units", unit_of_an_axis),
    ("dead-override", dead_override),  # Dynamo: "Total Blocks"
    ("dead-override", dead_override_of_a_composed_legend),
    ("dead-override", dead_pattern),
    ("override-regexp", pattern_without_slashes),
    ("stat-reduce", calm_ratio),
    ("stat-reduce", value_of_what_ended),
    ("no-data-is-green", green_without_data),
    ("panel-datasource", change("panels.1.targets.0.datasource.uid", "ddyfngn31dg5cf")),  # SGLang
    ("panel-datasource", change("panels.1.targets.0.datasource.uid", "${prom}")),
    ("undeclared-variable", asks('rate(a_total{model="$model_name"}[$__rate_interval])')),
    ("multi-needs-regex", asks('rate(a_total{instance="$worker"}[$__rate_interval])')),
    ("multi-needs-regex", asks('rate(a_total{instance="${worker}"}[$__rate_interval])')),
    ("jaeger-one-target", two_jaeger_queries),
    ("jaeger-service", change("panels.2.targets.0.service", None)),
    ("jaeger-tags", change("panels.2.targets.0.tags", '{"pd.stall.stage": "transfer"}')),
    ("jaeger-tags", change("panels.2.targets.0.tags", "worker=$worker")),
    ("jaeger-limit", change("panels.2.targets.0.limit", "$limit")),
    ("jaeger-query-type", change("panels.2.targets.0.queryType", None)),
    (
        "jaeger-query-type",
        change(
            "panels.2.targets.0",
            {"datasource": {"type": "jaeger", "uid": "${jaeger}"}, "query": "service=x"},
        ),
    ),
    ("target-rate-interval", asks("rate(a_total[30s])")),  # Dynamo, vllm 58148
    ("target-rate-interval", asks("rate(a_total[5m])")),  # llm-d
    ("target-promql", asks('rate(a_total{,model="x"}[$__rate_interval])')),  # ray 63219
    ("target-promql", asks("<<<<<<< HEAD")),  # SGLang: merge markers
    ("target-metric", asks('sum({job=~".+"})')),
    (
        "quantile-without-le",  # llm-d 1098, compass
        asks("histogram_quantile(0.99, rate(a_seconds_bucket[$__rate_interval]))"),
    ),
    (
        "quantile-without-le",
        asks("histogram_quantile(0.99, sum by (pod) (rate(a_bucket[$__rate_interval])))"),
    ),
    (
        "quantile-without-le",
        adds(panel(9, "sum by (worker) (rate(a_bucket[$__rate_interval]))", kind="heatmap")),
    ),
    ("target-counter-agg", asks("sum(nv_inference_request_success_total)")),  # Triton
    ("target-counter-agg", asks("delta(a_total[$__range])")),  # Ray
    ("target-counter-agg", asks("rate(vllm:num_preemptions[$__rate_interval])")),  # llm-d
    (
        "bucket-over-bucket",  # SGLang: always 1
        asks("avg(rate(a_bucket[$__rate_interval]) / rate(a_bucket[$__rate_interval]))"),
    ),
    ("ratio-of-quantiles", asks(f"{QUANTILE} / {QUANTILE}")),  # compass
    (
        "ratio-plus-one",  # Triton
        asks("rate(a_sum[$__rate_interval]) / (1 + rate(a_count[$__rate_interval]))"),
    ),
    ("sum-without-count", mean_without_count),  # vLLM and Ray: queue time
    ("manual-unit-scaling", asks("1000 * rate(a_total[$__rate_interval])")),  # Dynamo
    ("manual-unit-scaling", asks("rate(a_total[$__rate_interval]) / 1024")),  # ray PR 60819
    ("fixed-target", asks('rate(a_total{job="my-cluster-vllm"}[$__rate_interval])')),  # llm-d
    ("fixed-target", asks('rate(a_total{pod=~"pool-0-.*"}[$__rate_interval])')),  # llm-d 1098
    ("whole-number-le", asks('rate(a_bucket{le="1"}[$__rate_interval])')),
    ("whole-number-le", asks('rate(a_bucket{le="2.0"}[$__rate_interval])')),
    ("legend-label", asks("sum by (pod) (rate(a_total[$__rate_interval]))")),  # Triton
    ("legend-label", asks(QUANTILE)),
    ("no-zero-for-nothing", asks("sum by (model) (rate(a_total[$__range])) or vector(0)")),  # 405
    ("stacked-quantiles", stacked_quantiles),  # compass
]


@pytest.mark.case("DSH-01", "DSH-03", "DSH-04")
@pytest.mark.parametrize(
    ("rule", "breaks"), BROKEN, ids=lambda value: getattr(value, "__name__", value)
)
def test_rule_finds_what_breaks_it(rule: str, breaks: Callable[[Board], None]) -> None:
    board = copy.deepcopy(good())
    breaks(board)
    assert rule in {finding.rule for finding in lint.lint(board)}


def test_good_dashboard_breaks_no_rule() -> None:
    assert lint.lint(good()) == []


GOOD = [
    QUANTILE,
    "sum(rate(a_seconds_sum[$__rate_interval])) / sum(rate(a_seconds_count[$__rate_interval]))",
    '1 - sum(rate(a_bucket{le="0.5"}[$__rate_interval])) / sum(rate(a_count[$__rate_interval]))',
    'max by (stage) (pd_open_requests{stage=~"gateway[.]queue"}) > 0',
    'sum(increase(a_total{instance=~"$worker"}[$__range]))',
    "sum(up) / count(up)",
    '-sum(rate(a_total{x="$stage"}[$__interval]))',
]


@pytest.mark.parametrize("expr", GOOD)
def test_rules_leave_alone_what_is_right(expr: str) -> None:
    board = good()
    one = panel(9, expr, legend="all") | {"gridPos": {"x": 0, "y": 30, "w": 12, "h": 8}}
    board["panels"].append(one)
    assert lint.lint(board) == []


@pytest.mark.parametrize(
    "query",
    [
        "label_values(instance)",
        'label_values(a_seconds_count{x=~"$stage"}, instance)',
        "query_result(topk(3, sum by (instance) (rate(a_total[$__range]))))",
        "label_names()",
        "metrics(pd_.*)",
    ],
)
def test_values_may_come_from_any_query_that_grafana_knows(query: str) -> None:
    board = good()
    asks_for_values(query)(board)
    assert lint.lint(board) == []


@pytest.mark.parametrize(
    ("legend", "kind", "wanted"),
    [
        ("{{stage}}", "byName", "transfer"),
        ("{{stage}} · {{worker}}", "byName", "transfer · decode-0"),
        ("{{stage}} · {{worker}}", "byRegexp", r"/^transfer\.queue · .*$/"),
        ("{{from}} → {{to}} {{outcome}}", "byRegexp", "/ (failed|lost)$/"),
        ("p99 {{x}}", "byRegexp", "/^p50|^p99/"),
        ("p99 {{x}}", "byRegexp", "/9[0-9]* m+$/"),
        ("p99", "byName", "p99"),
        ("p99", "byFrameRefID", "A"),
    ],
)
def test_override_that_some_series_may_have_is_alive(legend: str, kind: str, wanted: str) -> None:
    board = good()
    asks('max by (stage, worker, from, to, outcome, x) (a{instance=~"$worker"})')(board)
    overrides(board, legend, kind, wanted)
    assert lint.lint(board) == []


@pytest.mark.parametrize(
    ("expr", "left"),
    [
        ("a", None),
        ("rate(a_total[5m])", None),
        ("sum(a)", set[str]()),
        ("sum by (x, y) (a)", {"x", "y"}),
        ("topk(3, sum by (x) (a))", {"x"}),
        ("max without (x) (sum by (x, y) (a))", {"y"}),
        ("max without (x) (a)", None),
        ("histogram_quantile(0.9, sum by (le, x) (rate(a_bucket[5m])))", {"x"}),
        ('label_replace(sum by (x) (a), "y", "z", "", "")', {"x", "y"}),
        ("sum by (x) (a) / scalar(sum(b))", {"x"}),
        ("sum by (x) (a) and sum by (x, y) (b)", {"x"}),
        ("sum by (x) (a) or sum by (y) (b)", {"x", "y"}),
        ("2 * -sum by (x) (a)", {"x"}),
    ],
)
def test_labels_that_a_query_leaves(expr: str, left: set[str] | None) -> None:
    assert promql.labels(promql.parse(expr)) == (None if left is None else frozenset(left))


def test_number_that_says_when_there_are_no_data_may_be_green() -> None:
    board = good()
    one = number("max(a)", calc="lastNotNull", instant=True, colour="green")
    nothing = {"match": "null+nan", "result": {"text": "no data", "color": "text"}}
    one["fieldConfig"]["defaults"]["mappings"] = [{"type": "special", "options": nothing}]
    one["targets"][0]["legendFormat"] = "all"
    adds(one)(board)
    assert lint.lint(board) == []


def test_a_line_over_the_stack_may_be_a_quantile() -> None:
    board = good()
    stacked_quantiles(board)
    one = board["panels"][1]
    one["targets"][0]["legendFormat"] = "p99"
    adds(panel(9, GOOD[4], legend="all"))(board)
    properties = [{"id": "custom.stacking", "value": {"mode": "none"}}]
    matcher = {"id": "byName", "options": "p99"}
    one["fieldConfig"]["overrides"] = [{"matcher": matcher, "properties": properties}]
    assert lint.lint(board) == []


def test_every_rule_is_tried() -> None:
    source = Path(lint.__file__).read_text()
    rules = {rule for rule, _ in BROKEN}
    assert {line.split('"')[1] for line in source.splitlines() if 'yield "' in line} == rules


@pytest.mark.parametrize("uid", boards())
def test_generated_boards_break_no_rule(uid: str) -> None:
    assert lint.lint(boards()[uid]) == []


@pytest.mark.parametrize("slo", [DEFAULT_SLO, Slo(ttft_s=2.0, token_gap_s=1.0)])
def test_rules_ask_no_bucket_whose_edge_is_a_whole_number(slo: Slo) -> None:
    recorded = [one.expr for group in recordings(slo).values() for one in group]
    asked = [expr for expr in recorded + [one.expr for one in alerts(slo)] if "le=" in expr]
    assert asked
    for expr in asked:
        board = good()
        asks(expr)(board)
        assert "whole-number-le" not in {finding.rule for finding in lint.lint(board)}, expr


def test_command_says_what_is_wrong_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = good()
    asks('rate(a_total{instance=~"$worker"}[5m])')(broken)
    path = tmp_path / "board.json"
    path.write_text(json.dumps(broken))
    assert lint.main([str(path)]) == 1
    assert capsys.readouterr().out.startswith("good / panel 2: target-rate-interval: [5m]")
    path.write_text(json.dumps(good()))
    assert lint.main([str(path)]) == 0
    path.write_text("[]")
    assert lint.main([str(path)]) == 2


def test_promql_errors_say_where() -> None:
    with pytest.raises(promql.PromqlError, match="parenthesis"):
        promql.parse("sum(a")
