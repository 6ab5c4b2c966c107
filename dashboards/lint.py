"""Rules for dashboards as Grafana reads them: each was broken by somebody in public.

python -m dashboards.lint [FILE …]     findings, one a line; exit code 1 if there are any

Owns the rules; knows nothing of how a dashboard was made. Where Grafana would draw something wrong
or nothing at all without saying so, a rule says so. Without FILE: the generated boards.
"""

from __future__ import annotations

import functools
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
_OFFSET = re.compile(r"offset \$\w+")
_WINDOWS = re.compile(r"\[([^\]]+)\]")
_PANEL_WINDOWS = frozenset({"$__rate_interval", "$__range", "$__interval"})
_ROUND_SCALES = frozenset({60.0, 100.0, 1000.0, 1024.0, 1e6, 1e9, 1048576.0, 1073741824.0})
_LABEL_VALUES = re.compile(r"label_values\((?:(.+),)?\s*\w+\s*\)")
_QUERY_RESULT = re.compile(r"query_result\((.+)\)")
_NO_PROMQL = re.compile(r"label_names\(\)|metrics\(.*\)")
_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_ANY_LABEL = re.compile(r"\{\{\s*\w+\s*\}\}")
_CALM = re.compile(r"(?:semi-dark-|dark-|light-|super-light-)?green|#73BF69", re.IGNORECASE)
_REGEXP = re.compile(r"/(.*?)/[gimys]*")
_GROUP = re.compile(r"\([^()]*\)|\[[^\]]*\]")
_OPEN = re.compile(r"(?<!\\)(?:\.[*+?]*|[*+?]|\{\d*,?\d*\})")
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
    for annotation in board.get("annotations", {}).get("list", ()):
        where = f"{title} / annotation {annotation.get('name')}"
        found += [Finding(where, rule, what) for rule, what in _of_annotation(annotation, board)]
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
        yield from _of_values(variable, board)
    rest = json.dumps({key: value for key, value in board.items() if key != "templating"})
    others = [v for v in _variables(board).values() if v is not variable]
    if not re.search(rf"\$(\{{{name}\b|{name}\b)", rest + json.dumps(others)):
        yield "unused-variable", "declared and never used"
    elif kind != "datasource" and not re.search(rf"\$(\{{{name}\b|{name}\b)", rest):
        yield "unused-variable", "used by other variables only"


def _of_values(variable: Json, board: Json) -> Found:
    """Where its values come from: a selector, or a query whose answer is read."""
    query = variable.get("query")
    text = query.get("query", "") if isinstance(query, dict) else str(query or "")
    yield from _of_names(text, board)
    asked = _LABEL_VALUES.fullmatch(text) or _QUERY_RESULT.fullmatch(text)
    if asked is None:
        if not _NO_PROMQL.fullmatch(text):
            yield "template-query", f"{text!r} is no query for values"
    elif asked[1]:
        rules = _SELECTOR_RULES if text.startswith("label_values") else _PROMQL_RULES
        yield from _of_expression(asked[1], rules, board)


# -- annotations -----------------------------------------------------------------------------------


def _of_annotation(annotation: Json, board: Json) -> Found:
    target = annotation.get("target") or {}
    expr = target.get("expr") or annotation.get("expr")
    if not expr:
        return  # Grafana's own, of alerts and tags
    yield from _of_source(annotation, {}, board)
    yield from _of_names(expr, board)
    yield from _of_step(target)
    yield from _of_expression(expr, _PROMQL_RULES, board)


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
            yield from _of_step(target)
            yield from _of_promql(target, panel, board)
    yield from _of_links(panel, board)
    yield from _of_stacking(panel)


def _of_fields(panel: Json) -> Found:
    config = panel.get("fieldConfig", {})
    defaults = config.get("defaults", {})
    if panel["type"] in _VALUE_PANELS and not defaults.get("unit"):
        yield "panel-units", "no unit"
    for unit in _units(panel):
        if unit not in UNITS:
            yield "panel-units", f"{unit!r} is no unit of Grafana"
    steps = defaults.get("thresholds", {}).get("steps", ())
    if [step.get("value") for step in steps] == [None, 80]:
        yield "default-threshold", "the editor's 80 was left in"
    yield from _of_overrides(panel)
    if panel["type"] in {"stat", "gauge", "bargauge"}:
        yield from _of_single_value(panel)


def _units(panel: Json) -> Iterator[str]:
    """Wherever one may stand: of the panel, of one column, of an axis and of cells."""
    config, options = panel.get("fieldConfig", {}), panel.get("options", {})
    if unit := config.get("defaults", {}).get("unit"):
        yield unit
    for override in config.get("overrides", ()):
        yield from (item["value"] for item in override["properties"] if item["id"] == "unit")
    for part in ("yAxis", "cellValues"):
        if unit := options.get(part, {}).get("unit"):
            yield unit


def _of_single_value(panel: Json) -> Found:
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    instant = all(target.get("instant") for target in panel.get("targets", ()))
    calcs = panel.get("options", {}).get("reduceOptions", {}).get("calcs", [])
    if not instant and set(calcs) & {"last", "lastNotNull"}:
        yield "stat-reduce", "the latest value is calm right after an incident, and stays for ever"
    steps = defaults.get("thresholds", {}).get("steps", ())
    special = [m for m in defaults.get("mappings", ()) if m.get("type") == "special"]
    said = any("null" in one.get("options", {}).get("match", "") for one in special)
    if panel["type"] == "stat" and steps and _CALM.fullmatch(steps[0]["color"]) and not said:
        yield "no-data-is-green", "no data has the lowest threshold's colour; map null to another"


def _of_overrides(panel: Json) -> Found:
    legends = [target.get("legendFormat") or "" for target in panel.get("targets", ())]
    if panel["type"] != "timeseries" or not all(legends):
        return  # series without a legend are called by all their labels
    names = [_shape(legend, _ANY_LABEL) for legend in legends]
    for override in panel.get("fieldConfig", {}).get("overrides", ()):
        kind, wanted = override["matcher"]["id"], override["matcher"]["options"]
        if kind == "byName":
            shapes = [tuple(wanted)]
        elif kind == "byRegexp":
            slashed = _REGEXP.fullmatch(wanted)
            if slashed is None:
                yield "override-regexp", f"{wanted!r} has no slashes: it has to match whole names"
            shapes = _shapes(wanted if slashed is None else slashed[1])
        else:
            continue
        if not any(_may_meet(shape, name) for shape in shapes for name in names):
            yield "dead-override", f"no series is called {wanted!r}"


Shape = tuple[str | None, ...]
"""Characters, and None for any number of any."""


def _shape(text: str, wild: re.Pattern[str]) -> Shape:
    made: list[str | None] = []
    for part in wild.split(text):
        made += [*part, None]
    return tuple(made[:-1])


def _shapes(pattern: str) -> list[Shape]:
    """What a simple regular expression matches, or more: each of its alternatives."""
    made: list[Shape] = []
    for one in _GROUP.sub(".*", pattern).split("|"):
        before, after = "" if one.startswith("^") else ".*", "" if one.endswith("$") else ".*"
        shape = _shape(f"{before}{one.removeprefix('^').removesuffix('$')}{after}", _OPEN)
        made.append(tuple(at for at in shape if at != "\\"))
    return made


@functools.cache
def _may_meet(one: Shape, other: Shape) -> bool:
    """Whether there is a text of both shapes."""
    if not one or not other:
        return all(at is None for at in (*one, *other))
    if one[0] is None:
        return _may_meet(one[1:], other) or _may_meet(one, other[1:])
    if other[0] is None:
        return _may_meet(other, one)
    return one[0] == other[0] and _may_meet(one[1:], other[1:])


def _of_source(target: Json, panel: Json, board: Json) -> Found:
    source = target.get("datasource") or panel.get("datasource")
    uid = source.get("uid", "") if isinstance(source, dict) else ""
    match = re.fullmatch(r"\$\{(\w+)\}", uid)
    if match is None:
        yield "panel-datasource", f"the data source is not a variable: {source}"
    elif match[1] not in _variables(board):
        yield "panel-datasource", f"no variable {match[1]} is declared"


def _of_step(target: Json) -> Found:
    if not target.get("interval"):
        yield "target-min-step", "no minimum step: a rate's window may be shorter than two scrapes"


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


def _of_promql(target: Json, panel: Json, board: Json) -> Found:
    expr = target["expr"]
    yield from _of_expression(expr, _PROMQL_RULES, board)
    try:
        tree = promql.parse(_readable(expr))
    except PromqlError:
        return
    if panel["type"] == "heatmap" and not (
        isinstance(tree, promql.Aggregation) and "le" in tree.by
    ):
        yield "quantile-without-le", "a heatmap needs its buckets by le"
    if panel.get("fieldConfig", {}).get("defaults", {}).get("unit") == "s":
        yield from _sums_alone(tree)
    left = promql.labels(tree)
    for label in _PLACE.findall(target.get("legendFormat") or ""):
        if left is not None and label not in left:
            yield "legend-label", f"{{{{{label}}}}} is always empty: the query drops {label}"


def _of_expression(
    expr: str, rules: Sequence[Callable[[promql.Node], Found]], board: Json
) -> Found:
    for window in _WINDOWS.findall(_TEXT.sub('""', expr)):
        if window.split(":")[0] not in _PANEL_WINDOWS:
            yield "target-rate-interval", f"[{window}] is empty or stale at another range"
    try:
        tree = promql.parse(_readable(expr))
    except PromqlError as error:
        yield "target-promql", str(error)
        return
    for rule in rules:
        yield from rule(tree)
    for match in _EXACT_VARIABLE.finditer(expr):
        if _variables(board).get(match[1], {}).get("multi"):
            yield "multi-needs-regex", f"${match[1]} may have several values"


def _readable(expr: str) -> str:
    """With something in place of Grafana's variables, so that it is PromQL."""
    windows = _OFFSET.sub(f"offset {_STAND_IN}", expr)
    return _VARIABLE.sub("x", re.sub(r"\[\$[^\]]+\]", f"[{_STAND_IN}]", windows))


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


def _whole_edges(tree: promql.Node) -> Found:
    """`le="1"` and `le="1.0"` are two series: which there is depends on how it is exposed."""
    for selector in promql.selectors(tree):
        for label, operator, value in selector.matchers:
            if label == "le" and operator in {"=", "!="} and re.fullmatch(r"\d+(\.0*)?", value):
                yield "whole-number-le", f"le{operator}{value!r}: some expose it as {value}.0"


def _filled_in(tree: promql.Node) -> Found:
    if any(True for _ in promql.calls(tree, "vector")):
        yield "no-zero-for-nothing", "or vector(0) shows a calm 0 where there are no data"


_SELECTOR_RULES: Sequence[Callable[[promql.Node], Found]] = (_matchers, _whole_edges)
_PROMQL_RULES: Sequence[Callable[[promql.Node], Found]] = (
    *_SELECTOR_RULES,
    _quantiles,
    _counters,
    _ratios,
    _scaling,
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
