"""Panels and boards through grafana-foundation-sdk: the only module that imports it for boards.

Owns the defaults of each kind of panel, the layout of rows, the query type that the SDK lacks
(Jaeger), and what has to be cleaned out of its JSON (classic dashboards, schema version 42). Knows
nothing of stages and metrics.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

with warnings.catch_warnings():
    # The classic builders say that they are not the newest; they are what file provisioning reads.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import bargauge, heatmap, stat, statetimeline, table
    from grafana_foundation_sdk.builders import common as cb
    from grafana_foundation_sdk.builders import dashboard as d
    from grafana_foundation_sdk.builders import prometheus as p
    from grafana_foundation_sdk.builders import timeseries as ts
from grafana_foundation_sdk.cog import builder as cog
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models import dashboard as m
from grafana_foundation_sdk.models import heatmap as hm
from grafana_foundation_sdk.models import prometheus as pm

COLUMNS = 24
_LEGEND_BESIDE = 12
"""From this width on a legend stands beside its plot; in less it would take half of it."""
NOT_SHOWN = "Not shown: "
"""Begins the part of every description that says what the panel leaves out."""
EMPTY_WHILE = "Empty while "
"""Begins the sentence of a description that says when the panel has no data in health."""
STEP = "step"
"""The board's variable for the least step of rates: `$__rate_interval` is at least four of them,
whatever the data source says, so that a window always holds two scrapes."""
LIVE_STEP = "5s"
"""Least step of what needs no window: a stall shows as soon as it is scraped."""
_MARK_STEP = "30s"
"""Of annotations; Grafana's own 60 s would miss what is over sooner."""
_OVERLAP = " Each bar is of the window before it, four steps: neighbours overlap."
_UNKNOWN = "text"
"""Colour of a value that is not there: neither good nor bad."""
EMPTY_WHERE = "Empty where "
"""The same, of a panel that has none at some values of its variables; at All it has."""

SECONDS, PERCENT, REQUESTS_S = units.Seconds, units.PercentUnit, units.RequestsPerSecond
BYTES, BYTES_S, SHORT, OPS_S = (
    units.BytesIEC,
    units.BytesPerSecondIEC,
    units.Short,
    units.OpsPerSecond,
)
TOKENS_S = units.CountsPerSecond
NO_UNIT = units.NoUnit

UNITS = frozenset(
    value for name, value in vars(units).items() if name[:1].isupper() and isinstance(value, str)
)
"""Every unit that Grafana knows."""

PROMETHEUS = common.DataSourceRef(type_val="prometheus", uid="${prometheus}")
JAEGER = common.DataSourceRef(type_val="jaeger", uid="${jaeger}")

_PLACE = re.compile(r"\{\{\w+\}\}")
_SPECIAL = re.compile(r"[.*+?^$(){}|\[\]\\/]")

Json = dict[str, Any]
PanelBuilder = cog.Builder[m.Panel]
Variable = cog.Builder[m.VariableModel]
Steps = Sequence[tuple[float | None, str]]
"""From which value on a colour holds; the first from None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A Prometheus query. With `exemplar`, its points lead to traces."""

    expr: str
    legend: str
    exemplar: bool = False
    instant: bool = False

    @property
    def step(self) -> str:
        """Minimum step, in Grafana's words."""
        return f"${STEP}" if "[$__rate_interval]" in self.expr else LIVE_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Marks in time on every panel of a board: one for each series of a query, when it has one."""

    name: str
    expr: str
    colour: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """From a value to where it leads; `url` may name variables and fields."""

    title: str
    url: str
    blank: bool = False

    def data(self) -> Json:
        return {"title": self.title, "url": self.url, "targetBlank": self.blank}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel and its place; `links` are offered on each of its values."""

    title: str
    builder: PanelBuilder
    width: int
    height: int
    links: tuple[Link, ...] = ()

    def sized(self, width: int, height: int | None = None) -> Panel:
        return replace(self, width=width, height=self.height if height is None else height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading and its panels, which fill whole lines of 24 columns. Open: nothing is hidden."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard.

    uid        stable, in links
    links      to other places, above the panels; those to the other boards come by themselves
    """

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    links: tuple[Link, ...] = ()
    refresh: str = "10s"
    since: str = "now-30m"


class JaegerQuery(variants.Dataquery):
    """A query of the Jaeger data source, as its plugin reads it; the SDK has none."""

    def __init__(self, **fields: str | int) -> None:
        self._fields: Json = dict(fields)

    def to_json(self) -> dict[str, object]:
        return {"refId": "A", "datasource": JAEGER.to_json(), **self._fields}


class _Jaeger(cog.Builder[variants.Dataquery]):
    def __init__(self, query: JaegerQuery) -> None:
        self._query = query

    def build(self) -> variants.Dataquery:
        return self._query


def search(service: str, *, tags: str, min_duration: str, limit: int) -> JaegerQuery:
    """The newest `limit` traces with a span of `service` like this. `tags` is logfmt, exact."""
    return JaegerQuery(
        queryType="search",
        service=service,
        tags=tags,
        minDuration=min_duration,
        limit=limit,
    )


def trace(trace_id: str) -> JaegerQuery:
    """One trace, whole. The plugin takes the absence of `queryType` for this."""
    return JaegerQuery(query=trace_id)


def describe(shows: str, lacks: str) -> str:
    return f"{shows}\n\n{NOT_SHOWN}{lacks}"


def stable_id(title: str) -> int:
    """A panel's id, which links and alerts name: of its title alone, wherever it stands."""
    return zlib.crc32(title.encode()) % 100_000 + 1


# -- legends ---------------------------------------------------------------------------------------


def legends(legend: str, label: str, palette: Mapping[str, str]) -> dict[str, str]:
    """Pattern of the series that have each value of a label in their legend → its colour."""
    before, _, after = legend.partition(f"{{{{{label}}}}}")
    head, tail = _any_value(before), _any_value(after)
    return {f"^{head}{_literal(value)}{tail}$": colour for value, colour in palette.items()}


def _any_value(legend: str) -> str:
    return ".*".join(map(_literal, _PLACE.split(legend)))


def _literal(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


# -- variables -----------------------------------------------------------------------------------


def datasource_variable(name: str, label: str, plugin: str) -> Variable:
    return d.DatasourceVariable(name).type(plugin).label(label)


def query_variable(name: str, label: str, query: str) -> Variable:
    """Any number of values; All matches whatever there is."""
    return (
        d.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(query)
        .refresh(m.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(m.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(m.VariableOption(selected=True, text="All", value="$__all"))
    )


def choice_variable(name: str, label: str, values: Iterable[str], first: str) -> Variable:
    """Exactly one of these."""
    return (
        d.CustomVariable(name)
        .label(label)
        .values(",".join(values))
        .multi(False)
        .include_all(False)
        .current(m.VariableOption(selected=True, text=first, value=first))
    )


def text_variable(name: str, label: str, default: str) -> Variable:
    return d.TextBoxVariable(name).label(label).default_value(default)


# -- panels ------------------------------------------------------------------------------------


def lines(
    title: str,
    shows: str,
    lacks: str,
    unit: str,
    *queries: Query,
    colours: Mapping[str, str] | None = None,
    shades: Mapping[str, str] | None = None,
    dashed: str | None = None,
    steps: Steps | None = None,
    stacked: bool = False,
    unstacked: tuple[str, ...] = (),
    bars: bool = False,
    links: tuple[Link, ...] = (),
    width: int = 12,
    height: int = 8,
    table: bool = True,
    reaches: float | None = None,
) -> Panel:
    """Values over time.

    colours    series → colour
    shades     pattern of several series (`legends`) → colour of which each has a shade
    dashed     pattern of series that are limits of others
    steps      thresholds, drawn as lines
    stacked    only for what adds up; `unstacked` are lines over it
    table      latest and highest value of each series beside its name; without it names alone,
               which is for many series in a narrow panel
    reaches    the axis ends at this value or above; where all is 0 it would end at 100 units
    """
    panel = (
        ts.Panel()
        .title(title)
        .description(describe(f"{shows}{_OVERLAP}" if bars else shows, lacks))
        .datasource(PROMETHEUS)
        .unit(unit)
        .min(0)
        # The outline of a part that is 0 would lie on the part below it, in another colour.
        .line_width(0 if bars or stacked else 2 if colours else 1)
        .fill_opacity(70 if bars or stacked else 0)
        .show_points(common.VisibilityMode.AUTO)
        .span_nulls(False)
        .tooltip(
            cb.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .legend(_legend(calculated=table))
        .thresholds(_thresholds(steps or ((None, "green"),)))
    )
    if bars:
        panel = panel.draw_style(common.GraphDrawStyle.BARS)
    if stacked:
        stacking = cb.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
        panel = panel.stacking(stacking)
    if reaches is not None:
        panel = panel.axis_soft_max(reaches)
    if steps:
        style = cb.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    for name, colour in (colours or {}).items():
        properties = [_fixed(colour)]
        if name in unstacked:
            properties += [
                m.DynamicConfigValue(
                    id_val="custom.stacking", value={"mode": "none", "group": "B"}
                ),
                m.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
                m.DynamicConfigValue(id_val="custom.lineWidth", value=2),
            ]
        panel = panel.override_by_name(name, properties)
    for pattern, colour in (shades or {}).items():
        panel = panel.override_by_regexp(_regexp(pattern), [_shaded(colour)])
    if dashed is not None:
        style = m.DynamicConfigValue(
            id_val="custom.lineStyle", value={"fill": "dash", "dash": [6, 6]}
        )
        unfilled = m.DynamicConfigValue(id_val="custom.fillOpacity", value=0)
        panel = panel.override_by_regexp(_regexp(dashed), [style, unfilled])
    for ref, query in _numbered(queries):
        panel = panel.with_target(_prometheus(ref, query))
    return Panel(title=title, builder=panel, width=width, height=height, links=links)


def number(
    title: str,
    shows: str,
    lacks: str,
    unit: str,
    query: Query,
    *,
    steps: Steps,
    over_time: str | None = None,
    texts: Mapping[str, tuple[str, str]] | None = None,
    no_value: tuple[str, str] = ("no data", _UNKNOWN),
    links: tuple[Link, ...] = (),
    width: int = 4,
    height: int = 4,
) -> Panel:
    """One value, coloured by thresholds: at the end of the range, so that a series that ended says
    nothing any more.

    over_time  how the values of the whole range make one, as `max`
    texts      value → text and colour
    no_value   text and colour where there is none; a threshold's would be the lowest's
    """
    calc = "lastNotNull" if over_time is None else over_time
    graph = common.BigValueGraphMode.NONE if over_time is None else common.BigValueGraphMode.AREA
    shown = replace(query, instant=over_time is None)
    panel = (
        stat.Panel()
        .title(title)
        .description(describe(shows, lacks))
        .datasource(PROMETHEUS)
        .unit(unit)
        .no_value(no_value[0])
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(graph)
        .reduce_options(cb.ReduceDataOptions().calcs([calc]))
        .thresholds(_thresholds(steps))
        .mappings([*([_mapping(texts)] if texts else []), _nothing(*no_value)])
        .with_target(_prometheus("A", shown))
    )
    return Panel(title=title, builder=panel, width=width, height=height, links=links)


def bars(
    title: str,
    shows: str,
    lacks: str,
    unit: str,
    query: Query,
    *,
    steps: Steps,
    colours: Mapping[str, str] | None = None,
    no_value: str = "no data",
    highest: float | None = None,
    links: tuple[Link, ...] = (),
    width: int = 12,
    height: int = 8,
) -> Panel:
    """The value of each series at the end of the range as a bar, coloured by thresholds, or by
    `colours` where the colour says which series it is."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(describe(shows, lacks))
        .datasource(PROMETHEUS)
        .unit(unit)
        .no_value(no_value)
        .min(0)
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .value_mode(common.BarGaugeValueMode.TEXT)
        .text(cb.VizTextDisplayOptions().title_size(12).value_size(14))
        .sizing(common.BarGaugeSizing.MANUAL)
        .min_viz_height(16)
        .max_viz_height(32)
        .reduce_options(cb.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(steps))
        .color_scheme(d.FieldColor().mode(m.FieldColorModeId.THRESHOLDS))
        .with_target(_prometheus("A", replace(query, instant=True)))
    )
    for name, colour in (colours or {}).items():
        panel = panel.override_by_name(name, [_fixed(colour)])
    if highest is not None:
        panel = panel.max(highest)
    return Panel(title=title, builder=panel, width=width, height=height, links=links)


def spread(
    title: str,
    shows: str,
    lacks: str,
    query: Query,
    *,
    scheme: str = "Oranges",
    width: int = 12,
    height: int = 8,
) -> Panel:
    """A heatmap of a histogram's buckets, seconds; `query` sums by `le`."""
    panel = (
        heatmap.Panel()
        .title(title)
        .description(describe(shows, lacks))
        .datasource(PROMETHEUS)
        .unit(SECONDS)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(hm.HeatmapColorMode.SCHEME)
            .scheme(scheme)
            .steps(64)
            .fill("dark-orange")
            .exponent(0.5)
            .scale(hm.HeatmapColorScale.EXPONENTIAL)
        )
        .y_axis(heatmap.YAxisConfig().unit(SECONDS))
        .cell_values(heatmap.CellValues().unit(REQUESTS_S))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .exemplars_color("rgba(255,0,255,0.7)")
        .tooltip(heatmap.HeatmapTooltip().mode(common.TooltipDisplayMode.SINGLE).y_histogram(True))
        .with_target(_prometheus("A", query).format(pm.PromQueryFormat.HEATMAP))
    )
    return Panel(title=title, builder=panel, width=width, height=height)


def states(
    title: str,
    shows: str,
    lacks: str,
    query: Query,
    texts: Mapping[str, tuple[str, str]],
    *,
    width: int = 12,
    height: int = 8,
) -> Panel:
    """What each series was, over time. `texts`: value → text and colour."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(describe(shows, lacks))
        .datasource(PROMETHEUS)
        .unit(NO_UNIT)
        .mappings([_mapping(texts)])
        .color_scheme(d.FieldColor().mode(m.FieldColorModeId.THRESHOLDS))
        .thresholds(_thresholds(((None, "transparent"),)))
        .show_value(common.VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .line_width(0)
        .legend(_legend(calculated=False))
        .with_target(_prometheus("A", query))
    )
    return Panel(title=title, builder=panel, width=width, height=height)


def rows_of(
    title: str,
    shows: str,
    lacks: str,
    columns: Sequence[tuple[str, str, Query, Steps | None]],
    labels: Mapping[str, str],
    *,
    links: Mapping[str, tuple[Link, ...]] | None = None,
    sort_by: str,
    width: int = 24,
    height: int = 8,
) -> Panel:
    """A table: a line for each set of labels, a column for each query at the end of the range.

    columns  heading, unit, query, thresholds
    labels   label → heading
    links    heading → where its cells lead
    """
    panel = (
        table.Panel()
        .title(title)
        .description(describe(shows, lacks))
        .datasource(PROMETHEUS)
        .no_value("none")
        .cell_height(common.TableCellHeight.SM)
        .min_width(80)
        .with_transformation(m.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(_organized(columns, labels))
        .sort_by([cb.TableSortByFieldState().display_name(sort_by).desc(True)])
    )
    for (heading, unit, query, steps), (ref, _) in zip(columns, _numbered(columns), strict=True):
        made = _prometheus(ref, replace(query, instant=True)).format(pm.PromQueryFormat.TABLE)
        properties = [m.DynamicConfigValue(id_val="unit", value=unit)]
        if unit == SHORT:  # a number of something, which increase() extrapolates
            properties.append(m.DynamicConfigValue(id_val="decimals", value=0))
        if steps:
            properties += [
                m.DynamicConfigValue(id_val="thresholds", value=_steps_json(steps)),
                m.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
            ]
        panel = panel.with_target(made).override_by_name(heading, properties)
    for heading, offered in (links or {}).items():
        panel = panel.override_by_name(heading, [_links_property(offered)])
    return Panel(title=title, builder=panel, width=width, height=height)


def traces_table(
    title: str,
    shows: str,
    lacks: str,
    query: JaegerQuery,
    links: tuple[Link, ...],
    *,
    width: int = 24,
    height: int = 10,
) -> Panel:
    """Traces that Jaeger found, slowest first; the id leads to one."""
    duration = [
        m.DynamicConfigValue(id_val="unit", value=units.Microseconds),
        m.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "gauge", "mode": "basic"}),
        m.DynamicConfigValue(id_val="min", value=0),
        _fixed("blue"),
    ]
    sort: Json = {"fields": {}, "sort": [{"field": "Duration", "desc": True}]}
    panel = (
        table.Panel()
        .title(title)
        .description(describe(shows, lacks))
        .datasource(JAEGER)
        .no_value("no trace")
        .cell_height(common.TableCellHeight.SM)
        .with_transformation(m.DataTransformerConfig(id_val="sortBy", options=sort))
        .override_by_name("Trace ID", [_links_property(links)])
        .override_by_name("Duration", duration)
        .with_target(_Jaeger(query))
    )
    return Panel(title=title, builder=panel, width=width, height=height)


def trace_view(
    title: str, shows: str, lacks: str, query: JaegerQuery, *, height: int = 20
) -> Panel:
    """One trace as Grafana draws it. The SDK has no builder for this kind of panel."""
    panel = (
        d.Panel()
        .type("traces")
        .title(title)
        .description(describe(shows, lacks))
        .datasource(JAEGER)
        .with_target(_Jaeger(query))
    )
    return Panel(title=title, builder=panel, width=COLUMNS, height=height)


# -- the board -----------------------------------------------------------------------------------


def board_json(board: Board, annotations: Sequence[Annotation]) -> Json:
    """The dashboard as Grafana reads it from a file; it has at least one annotation.

    Raises ValueError for a line that does not fill its 24 columns, or two panels of one title.
    """
    made = (
        d.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["pdtrace", "generated"])
        .readonly()
        .refresh(board.refresh)
        .time(board.since, "now")
        .timezone("browser")
        .tooltip(m.DashboardCursorSync.CROSSHAIR)
        .link(
            d.DashboardLink("PD serving")
            .type(m.DashboardLinkType.DASHBOARDS)
            .tags(["pdtrace"])
            .as_dropdown(False)
            .keep_time(True)
            .include_vars(True)
        )
    )
    for link in board.links:
        made = made.link(
            d.DashboardLink(link.title)
            .type(m.DashboardLinkType.LINK)
            .url(link.url)
            .target_blank(link.blank)
            .keep_time(False)
        )
    for variable in board.variables:
        made = made.with_variable(variable)
    for annotation in annotations:
        made = made.annotation(
            d.AnnotationQuery()
            .name(annotation.name)
            .datasource(PROMETHEUS)
            .enable(True)
            .icon_color(annotation.colour)
            .expr(annotation.expr)
            .title_format(annotation.title)
        )
    encoded = cast("Json", json.loads(JSONEncoder().encode(made.build())))
    encoded["panels"] = _placed(board)
    return _clean(encoded)


def _placed(board: Board) -> list[Json]:
    panels: list[Json] = []
    seen: dict[int, str] = {}
    y = 0
    for row in board.rows:
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "id": stable_id(f"row {row.title}"),
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS or (x and panel.height != tallest):
                raise ValueError(f"{board.uid}: {panel.title!r} leaves a hole in {row.title!r}")
            made = cast("Json", json.loads(JSONEncoder().encode(panel.builder.build())))
            made["id"] = stable_id(panel.title)
            made["gridPos"] = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            legend = made.get("options", {}).get("legend", {})
            if panel.width < _LEGEND_BESIDE and legend.get("placement") == "right":
                legend["placement"] = "bottom"
            if panel.links:
                made["fieldConfig"]["defaults"]["links"] = [link.data() for link in panel.links]
            panels.append(made)
            x, tallest = x + panel.width, panel.height
            if x == COLUMNS:
                x, y = 0, y + tallest
        if x:
            raise ValueError(f"{board.uid}: the last line of {row.title!r} is {x} columns wide")
    for made in panels:
        other = seen.setdefault(made["id"], made["title"])
        if other != made["title"]:
            raise ValueError(f"{board.uid}: {other!r} and {made['title']!r} have one id")
    if len(seen) != len(panels):
        raise ValueError(f"{board.uid}: two panels have the same title")
    return panels


def _clean(board: Json) -> Json:
    """Takes out what the SDK writes and Grafana does not know, or should not act on."""
    for variable in board["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)
        if variable["type"] == "textbox":
            text = variable["query"] or ""
            variable["current"] = {"selected": True, "text": text, "value": text}
        if variable["type"] == "query":
            # Some versions mangle a bare string.
            variable["query"] = {"query": variable["query"], "refId": variable["name"]}
    for annotation in board["annotations"]["list"]:
        annotation.pop("placement", None)  # it would hide them in a menu
        annotation["target"] = {
            "expr": annotation.pop("expr"),
            "refId": "Anno",
            "interval": _MARK_STEP,
        }
    for link in board["links"]:
        link.pop("placement", None)
    for panel in board["panels"]:
        if panel["type"] == "table":
            panel["options"].pop("footer", None)  # newer tables have none
        panel.pop("transparent", None)
        panel.pop("repeatDirection", None)
    return board


# -- pieces --------------------------------------------------------------------------------------


def _numbered(queries: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(chr(ord("A") + at), query) for at, query in enumerate(queries)]


def _prometheus(ref: str, query: Query) -> p.Dataquery:
    made = (
        p.Dataquery()
        .datasource(PROMETHEUS)
        .ref_id(ref)
        .expr(query.expr)
        .legend_format(query.legend)
        .editor_mode(pm.QueryEditorMode.CODE)
        .exemplar(query.exemplar)
        .interval(query.step)
    )
    return made.instant() if query.instant else made.range()


def _legend(*, calculated: bool) -> cb.VizLegendOptions:
    legend = (
        cb.VizLegendOptions()
        .show_legend(True)
        .display_mode(
            common.LegendDisplayMode.TABLE if calculated else common.LegendDisplayMode.LIST
        )
        .placement(common.LegendPlacement.RIGHT if calculated else common.LegendPlacement.BOTTOM)
    )
    if not calculated:
        return legend.calcs([])
    return legend.calcs(["lastNotNull", "max"]).sort_by("Max").sort_desc(True)


def _thresholds(steps: Steps) -> d.ThresholdsConfig:
    made = [m.Threshold(value=value, color=colour) for value, colour in steps]
    return d.ThresholdsConfig().mode(m.ThresholdsMode.ABSOLUTE).steps(made)


def _steps_json(steps: Steps) -> Json:
    made = [{"value": value, "color": colour} for value, colour in steps]
    return {"mode": "absolute", "steps": made}


def _fixed(colour: str) -> m.DynamicConfigValue:
    return m.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _shaded(colour: str) -> m.DynamicConfigValue:
    return m.DynamicConfigValue(id_val="color", value={"mode": "shades", "fixedColor": colour})


def _regexp(pattern: str) -> str:
    """Without slashes Grafana would anchor it at both ends."""
    return f"/{pattern}/"


def _links_property(links: Sequence[Link]) -> m.DynamicConfigValue:
    return m.DynamicConfigValue(id_val="links", value=[link.data() for link in links])


def _nothing(text: str, colour: str) -> m.SpecialValueMap:
    shown = m.ValueMappingResult(text=text, color=colour)
    options = m.DashboardSpecialValueMapOptions(
        match=m.SpecialValueMatch.NULL_AND_NAN, result=shown
    )
    return m.SpecialValueMap(options=options)


def _mapping(texts: Mapping[str, tuple[str, str]]) -> m.ValueMap:
    return m.ValueMap(
        options={
            value: m.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(texts.items())
        }
    )


def _organized(
    columns: Sequence[tuple[str, str, Query, Steps | None]], labels: Mapping[str, str]
) -> m.DataTransformerConfig:
    headings = {
        f"Value #{ref}": heading
        for (heading, *_), (ref, _) in zip(columns, _numbered(columns), strict=True)
    }
    options: Json = {
        "excludeByName": {"Time": True},
        "indexByName": {name: at for at, name in enumerate([*labels, *headings])},
        "renameByName": {**labels, **headings},
    }
    return m.DataTransformerConfig(id_val="organize", options=options)
