"""Rules for dashboards as Grafana reads them: each was broken by somebody in public.

python -m dashboards.lint [FILE …]     findings, one a line; exit code 1 if there are any

Owns the rules; knows nothing of how a dashboard was made. Where Grafana would draw something wrong
or nothing at all without saying so, a rule says so. Without FILE: the generated boards.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards import promql
from dashboards.promql import PromqlError
from dashboards.sdk import COLUMNS, NOT_SHOWN, UNITS

Json = Mapping[str, Any]

_VALUE_PANELS = frozenset({"timeseries", "stat", "gauge", "bargauge", "heatmap", "state-timeline"})
_BUILT_IN = re.compile(r"__\w+")
_VARIABLE = re.compile(r"\$\{(\w+)[^}]*\}|\$(\w+)")
_STAND_IN = "5m"
_TEXT = re.compile(r'"[^"]*"')
_EXACT_VARIABLE = re.compile(r'!?="\$\{?(\w+)')
_WINDOWS = re.compile(r"\[([^\]]+)\]")
_PANEL_WINDOWS = frozenset({"$__rate_interval", "$__range", "$__interval"})
_ROUND_SCALES = frozenset({60.0, 100.0, 1000.0, 1024.0, 1e6, 1e9, 1048576.0, 1073741824.0})
_TAG = re.compile(r'[\w.]+=(?:"[^"]*"|[^\s"]*)')


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """What breaks a rule, where, and what there was."""

    where: str
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.what}"


Found = Iterator[tuple[str, str]]
"""Rule and what there was."""


def lint(board: Json) -> list[Finding]:
    """Everything that is wrong with a dashboard, sorted."""
    title = board.get("title") or "dashboard"
    found = [Finding(title, rule, what) for rule, what in _of_board(board)]
    for variable in _variables(board).values():
        where = f"{title} / ${variable['name']}"
        found += [Finding(where, rule, what) for rule, what in _of_variable(variable, board)]
    for panel in _panels(board):
        where = f"{title} / {panel.get('title') or panel.get('id')}"
        found += [Finding(where, rule, what) for rule, what in _of_panel(panel, board)]
    return sorted(set(found))


# -- the board -------------------------------------------------------------------------------------


def _of_board(board: Json) -> Found:
    if board.get("__inputs") or "${DS_" in json.dumps(board):
        yield "no-inputs", "inputs are filled in by the import dialog only, never from a file"
    if board.get("editable", True):
        yield "uneditable", "what is changed in the browser is lost with the next start"
    if not board.get("uid"):
        yield "board-uid", "links and provisioning need a fixed uid"
    if "id" in board and board["id"] is not None:
        yield "board-id", f"id {board['id']} belongs to one Grafana"
    kinds = {v.get("query") for v in _variables(board).values() if v["type"] == "datasource"}
    for kind in sorted({ds["type"] for ds in _datasources(board)} - kinds):
        yield "template-datasource", f"no variable chooses the {kind} data source"
    for link in board.get("links", ()):
        if link.get("type") == "dashboards" and not (
            link.get("keepTime") and link.get("includeVars")
        ):
            yield "links-keep-context", f"{link.get('title')!r} drops time or variables"
    yield from _of_grid(board)


def _of_grid(board: Json) -> Found:
    ids = [panel.get("id") for panel in _panels(board)]
    for number in sorted({i for i in ids if i is not None and ids.count(i) > 1}):
        yield "panel-ids", f"id {number} is used more than once"
    if any(not isinstance(i, int) or i < 1 for i in ids):
        yield "panel-ids", "a panel has no id above 0"
    placed: list[tuple[str, int, int, int, int]] = []
    for panel in _panels(board):
        grid = panel.get("gridPos")
        name = str(panel.get("title"))
        if grid is None:
            yield "grid", f"{name!r} has no place"
            continue
        x, y, w, h = (grid[key] for key in "xywh")
        if x + w > COLUMNS:
            yield "grid", f"{name!r} ends at column {x + w} of {COLUMNS}"
        for other, ox, oy, ow, oh in placed:
            if x < ox + ow and ox < x + w and y < oy + oh and oy < y + h:
                yield "grid", f"{name!r} overlaps {other!r}"
        placed.append((name, x, y, w, h))
    for panel in board.get("panels", ()):
        if panel["type"] == "row" and panel.get("collapsed"):
            yield "rows-open", f"{panel.get('title')!r} hides {len(panel.get('panels', ()))} panels"


# -- variables -------------------------------------------------------------------------------------


def _of_variable(variable: Json, board: Json) -> Found:
    name, kind = variable["name"], variable["type"]
    if kind == "query":
        if variable.get("refresh") != 2:
            yield "template-reload", "its values are not asked for anew with the time range"
        if not isinstance(variable.get("query"), dict):
            yield "template-query-shape", "some versions mangle a query that is a bare string"
        if variable.get("includeAll") and variable.get("allValue") != ".*":
            yield "template-all", "All is a long alternation instead of .*"
    rest = json.dumps({key: value for key, value in board.items() if key != "templating"})
    others = [v for v in _variables(board).values() if v is not variable]
    if not re.search(rf"\$(\{{{name}\b|{name}\b)", rest + json.dumps(others)):
        yield "unused-variable", "declared and never used"
    elif kind != "datasource" and not re.search(rf"\$(\{{{name}\b|{name}\b)", rest):
        yield "unused-variable", "used by other variables only"


# -- panels ----------------------------------------------------------------------------------------


def _of_panel(panel: Json, board: Json) -> Found:
    if panel["type"] == "row":
        return
    if not panel.get("title"):
        yield "panel-title", "no title"
    says = panel.get("description") or ""
    if not says:
        yield "panel-description", "no description"
    elif NOT_SHOWN not in says:
        yield "panel-description", f"does not say what it leaves out ({NOT_SHOWN!r})"
    targets = panel.get("targets", ())
    if not targets and panel["type"] not in {"text", "dashlist", "alertlist"}:
        yield "panel-targets", "no query"
    yield from _of_fields(panel)
    for target in targets:
        yield from _of_source(target, panel, board)
        yield from _of_names(target, board)
        if _kind(target, panel) == "jaeger":
            yield from _of_jaeger(target, panel, board)
        elif "expr" in target:
            yield from _of_promql(target["expr"], panel, board)
    yield from _of_links(panel, board)
    yield from _of_stacking(panel)


def _of_fields(panel: Json) -> Found:
    config = panel.get("fieldConfig", {})
    defaults = config.get("defaults", {})
    unit = defaults.get("unit")
    if panel["type"] in _VALUE_PANELS:
        if not unit:
            yield "panel-units", "no unit"
        elif unit not in UNITS:
            yield "panel-units", f"{unit!r} is no unit of Grafana"
    steps = defaults.get("thresholds", {}).get("steps", ())
    if [step.get("value") for step in steps] == [None, 80]:
        yield "default-threshold", "the editor's 80 was left in"
    legends = [target.get("legendFormat") or "" for target in panel.get("targets", ())]
    if panel["type"] == "timeseries" and legends and not any("{{" in legend for legend in legends):
        for override in config.get("overrides", ()):
            matcher = override["matcher"]
            if matcher["id"] == "byName" and matcher["options"] not in legends:
                yield "dead-override", f"no series is called {matcher['options']!r}"
    if panel["type"] == "stat" and unit == "percentunit":
        instant = all(target.get("instant") for target in panel.get("targets", ()))
        calcs = panel.get("options", {}).get("reduceOptions", {}).get("calcs", [])
        if not instant and calcs == ["lastNotNull"]:
            yield "stat-reduce", "the latest ratio reads calm right after an incident"


def _of_source(target: Json, panel: Json, board: Json) -> Found:
    source = target.get("datasource") or panel.get("datasource")
    uid = source.get("uid", "") if isinstance(source, dict) else ""
    match = re.fullmatch(r"\$\{(\w+)\}", uid)
    if match is None:
        yield "panel-datasource", f"the data source is not a variable: {source}"
    elif match[1] not in _variables(board):
        yield "panel-datasource", f"no variable {match[1]} is declared"


def _of_names(value: object, board: Json) -> Found:
    for name in _named(json.dumps(value)):
        if name not in _variables(board) and not _BUILT_IN.fullmatch(name):
            yield "undeclared-variable", f"${name}"


def _of_jaeger(target: Json, panel: Json, board: Json) -> Found:
    if len(panel["targets"]) > 1:
        yield "jaeger-one-target", "only the first query of a panel is run"
    kind, tags = target.get("queryType"), target.get("tags", "")
    if kind == "search":
        if not target.get("service"):
            yield "jaeger-service", "a search needs a service"
        if _TAG.sub("", tags).strip():
            yield "jaeger-tags", f"tags are logfmt (a=b c=d): {tags!r}"
        for name in _named(tags):
            if _variables(board).get(name, {}).get("multi"):
                yield "jaeger-tags", f"${name} may have several values, and tags match one exactly"
        if not isinstance(target.get("limit", 20), int):
            yield "jaeger-limit", "variables are not filled in there"
    elif kind is None:
        if any(field in target for field in ("service", "operation", "tags")):
            yield "jaeger-query-type", "without queryType it is a trace id, the search is ignored"
        if "=" in str(target.get("query", "")):
            yield "jaeger-query-type", f"{target['query']!r} is no trace id"


def _of_links(panel: Json, board: Json) -> Found:
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    links: list[Json] = [*defaults.get("links", ())]
    for override in panel.get("fieldConfig", {}).get("overrides", ()):
        for item in override.get("properties", ()):
            if item["id"] == "links":
                links += item["value"]
    for link in links:
        url = link.get("url", "")
        yield from _of_names(url, board)
        if url.startswith("/d/") and "${__url_time_range}" not in url:
            yield "links-keep-context", f"{link.get('title')!r} drops the time range"


def _of_stacking(panel: Json) -> Found:
    custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
    if custom.get("stacking", {}).get("mode", "none") == "none":
        return
    unstacked = {
        override["matcher"]["options"]
        for override in panel["fieldConfig"].get("overrides", ())
        for item in override["properties"]
        if item["id"] == "custom.stacking" and item["value"].get("mode") == "none"
    }
    for target in panel.get("targets", ()):
        if "histogram_quantile" in target.get("expr", "") and (
            target.get("legendFormat") not in unstacked
        ):
            yield "stacked-quantiles", "quantiles do not add up"


# -- PromQL ----------------------------------------------------------------------------------------


def _of_promql(expr: str, panel: Json, board: Json) -> Found:
    for window in _WINDOWS.findall(_TEXT.sub('""', expr)):
        if window.split(":")[0] not in _PANEL_WINDOWS:
            yield "target-rate-interval", f"[{window}] is empty or stale at another range"
    try:
        tree = promql.parse(_readable(expr))
    except PromqlError as error:
        yield "target-promql", str(error)
        return
    for rule in _PROMQL_RULES:
        yield from rule(tree)
    for match in _EXACT_VARIABLE.finditer(expr):
        if _variables(board).get(match[1], {}).get("multi"):
            yield "multi-needs-regex", f"${match[1]} may have several values"
    if panel["type"] == "heatmap" and not (
        isinstance(tree, promql.Aggregation) and "le" in tree.by
    ):
        yield "quantile-without-le", "a heatmap needs its buckets by le"
    if panel.get("fieldConfig", {}).get("defaults", {}).get("unit") == "s":
        yield from _sums_alone(tree)


def _readable(expr: str) -> str:
    """With something in place of Grafana's variables, so that it is PromQL."""
    windows = re.sub(r"\[\$[^\]]+\]", f"[{_STAND_IN}]", expr)
    return _VARIABLE.sub("x", windows)


def _quantiles(tree: promql.Node) -> Found:
    for call in promql.calls(tree, "histogram_quantile"):
        inner = call.arguments[-1]
        if not (isinstance(inner, promql.Aggregation) and "le" in inner.by):
            yield "quantile-without-le", "without sum by (le, …) each series has its own quantile"


def _counters(tree: promql.Node) -> Found:
    for selector, inside in promql.selectors_within(tree):
        grows = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
        functions = {"rate", "increase", "irate", "absent", "absent_over_time", "changes", "resets"}
        if grows and not functions & set(inside):
            yield "target-counter-agg", f"{selector.name} only ever grows: take its rate"
        if selector.name and not grows and {"rate", "increase", "irate"} & set(inside):
            yield "target-counter-agg", f"{selector.name} is no counter: it has no rate"
        if "delta" in inside and grows:
            yield "target-counter-agg", f"delta of {selector.name} falls when a process restarts"


def _ratios(tree: promql.Node) -> Found:
    for left, right in promql.quotients(tree):
        both = [
            {s.name for s in promql.selectors(side) if s.name.endswith("_bucket")}
            for side in (left, right)
        ]
        whole = [{s.matchers for s in promql.selectors(side)} for side in (left, right)]
        if all(both) and both[0] == both[1] and whole[0] == whole[1]:
            yield "bucket-over-bucket", "a bucket over itself is always 1"
        if any(True for _ in promql.calls(left, "histogram_quantile")) and any(
            True for _ in promql.calls(right, "histogram_quantile")
        ):
            yield "ratio-of-quantiles", "a ratio of two quantiles is of no request"
    for _, right in promql.quotients(tree):
        match right:
            case promql.Binary("+", promql.Number(), _) | promql.Binary("+", _, promql.Number()):
                yield "ratio-plus-one", "a number added to the denominator changes what is shown"
            case _:
                pass


def _sums_alone(tree: promql.Node) -> Found:
    """The rate of a _sum is how many are under way at a time, not how long one takes."""
    if not any(True for _ in promql.quotients(tree)):
        for selector in promql.selectors(tree):
            if selector.name.endswith("_sum"):
                yield "sum-without-count", f"rate of {selector.name} is no duration"


def _scaling(tree: promql.Node) -> Found:
    for factor in promql.factors(tree):
        if factor in _ROUND_SCALES:
            yield "manual-unit-scaling", f"× or / {factor:g}: leave the base unit, Grafana scales"


def _matchers(tree: promql.Node) -> Found:
    for selector in promql.selectors(tree):
        if selector.name == "":
            yield "target-metric", "a selector names no metric"
        if selector.name == "up":
            continue
        for label, _, value in selector.matchers:
            if label in {"instance", "pod", "job", "namespace", "node"} and value not in {"x", ""}:
                yield "fixed-target", f"{label}={value!r} is one installation's"


def _filled_in(tree: promql.Node) -> Found:
    if any(True for _ in promql.calls(tree, "vector")):
        yield "no-zero-for-nothing", "or vector(0) shows a calm 0 where there are no data"


_PROMQL_RULES: Sequence[Callable[[promql.Node], Found]] = (
    _quantiles,
    _counters,
    _ratios,
    _scaling,
    _matchers,
    _filled_in,
)


# -- pieces ----------------------------------------------------------------------------------------


def _variables(board: Json) -> dict[str, Json]:
    return {v["name"]: v for v in board.get("templating", {}).get("list", ())}


def _panels(board: Json) -> Iterator[Json]:
    for panel in board.get("panels", ()):
        yield panel
        yield from panel.get("panels", ())


def _datasources(board: Json) -> Iterator[Json]:
    for panel in _panels(board):
        for target in panel.get("targets", ()):
            source = target.get("datasource") or panel.get("datasource")
            if isinstance(source, dict) and "type" in source:
                yield source


def _kind(target: Json, panel: Json) -> str:
    source = target.get("datasource") or panel.get("datasource")
    return source.get("type", "") if isinstance(source, dict) else ""


def _named(text: str) -> Iterator[str]:
    for match in _VARIABLE.finditer(text):
        yield match[1] or match[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing found; 1: something was; 2: a file is no dashboard."""
    given = sys.argv[1:] if arguments is None else arguments
    here = Path(__file__).resolve().parent / "generated" / "boards"
    paths = [Path(name) for name in given] or sorted(here.glob("*.json"))
    found: list[Finding] = []
    for path in paths:
        try:
            found += lint(json.loads(path.read_text()))
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            print(f"dashboards.lint: {path} is no dashboard: {error!r}", file=sys.stderr)
            return 2
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
