"""Every query of every board, with its variables filled in: for tests against real programs.

Owns how Grafana fills in variables, and what its Jaeger data source asks, as far as these boards
use it; runs nothing itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dashboards.sdk import STEP, Json

ALL: Mapping[str, str] = MappingProxyType({"model": ".*", "role": ".*", "worker": ".*"})
"""The variables at All."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)")
_LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
_ALL = "$__all"
_SPECIAL = re.compile(r"[\\$^*{}\[\]'+?.()|]")
_TAG = re.compile(r"(\S+?)=(\"(?:[^\"\\]|\\.)*\"|\S*)\s*")
_TRACES = "/api/traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One query of a panel.

    kind       prometheus or jaeger
    exemplar   its points lead to traces, so `/api/v1/query_exemplars` answers too
    instant    asked at the end of the range only
    fields     the query as it stands in the board
    """

    board: str
    panel: str
    panel_type: str
    ref: str
    kind: str
    exemplar: bool
    instant: bool
    fields: Json

    @property
    def expr(self) -> str:
        """PromQL, variables not filled in. Raises KeyError for a Jaeger query."""
        return self.fields["expr"]

    def filled(self, values: Mapping[str, str]) -> Json:
        """The query with variables filled in. Raises KeyError for one that has no value."""
        return {
            name: fill(value, values) if isinstance(value, str) else value
            for name, value in self.fields.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesQuery:
    """Where a variable's values come from: `/api/v1/label/<label>/values?match[]=<selector>`."""

    board: str
    variable: str
    selector: str
    label: str


def targets(boards: Mapping[str, Json]) -> Iterator[Target]:
    """Every query of these boards, in the order in which they stand there."""
    for uid, board in boards.items():
        for panel in board["panels"]:
            for fields in panel.get("targets", ()):
                yield Target(
                    board=uid,
                    panel=panel["title"],
                    panel_type=panel["type"],
                    ref=fields["refId"],
                    kind=fields["datasource"]["type"],
                    exemplar=bool(fields.get("exemplar")),
                    instant=bool(fields.get("instant")),
                    fields=fields,
                )


def annotation_queries(boards: Mapping[str, Json]) -> Iterator[tuple[str, str, str]]:
    """Board, name and PromQL of each annotation."""
    for uid, board in boards.items():
        for annotation in board["annotations"]["list"]:
            yield uid, annotation["name"], annotation["target"]["expr"]


def values_queries(boards: Mapping[str, Json]) -> Iterator[ValuesQuery]:
    """Where the boards' variables take their values from."""
    for uid, board in boards.items():
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            query = variable["query"]["query"]
            match = _LABEL_VALUES.fullmatch(query)
            if match is None:
                raise ValueError(f"{uid}: variable {variable['name']} asks {query!r}")
            yield ValuesQuery(
                board=uid, variable=variable["name"], selector=match[1], label=match[2]
            )


def texts(board: Json, chosen: Mapping[str, Sequence[str]], *, kind: str) -> dict[str, str]:
    """What stands in a query for each variable of a board: what is `chosen` of it, or else the
    board's own choice. No value at all is a cleared text box, and an empty text.

    Several values of a variable that may have them are a regular expression in PromQL. Raises
    ValueError for a variable that the board lacks.
    """
    declared = {variable["name"]: variable for variable in board["templating"]["list"]}
    if unknown := sorted(set(chosen) - set(declared)):
        raise ValueError(f"{board['uid']} has no variable {', '.join(unknown)}")
    return {
        name: _text(variable, chosen.get(name, _own(variable)), promql=kind == "prometheus")
        for name, variable in declared.items()
    }


def _own(variable: Json) -> Sequence[str]:
    value: str | list[str] = (variable.get("current") or {}).get("value") or ""
    return [value] if isinstance(value, str) else value


def _text(variable: Json, values: Sequence[str], *, promql: bool) -> str:
    if _ALL in values:
        return variable["allValue"]
    if not promql:
        return ",".join(values)
    if not (variable.get("multi") or variable.get("includeAll")):
        return "".join(values).replace("\\", "\\\\").replace('"', '\\"')
    escaped = [_SPECIAL.sub(r"\\\\\g<0>", value).replace('"', '\\"') for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def jaeger_request(query: Json, *, start_s: float, end_s: float) -> tuple[str, dict[str, str]]:
    """Path and parameters that the Jaeger data source asks for, of a query that is filled in.

    Raises ValueError for one that it refuses: no trace id, no service, tags that are no logfmt.
    """
    kind = query.get("queryType")
    if kind is None:
        if not query["query"]:
            raise ValueError("no trace id")
        return f"{_TRACES}/{query['query']}", {}
    if kind != "search" or not query["service"]:
        raise ValueError(f"a search of a service is expected, not {query}")
    tags = query.get("tags", "")
    if _TAG.sub("", tags):
        raise ValueError(f"tags are key=value, not {tags!r}")
    parts = {
        "service": query["service"],
        "operation": query.get("operation", ""),
        "tags": json.dumps({key: _unquoted(value) for key, value in _TAG.findall(tags)}),
        "minDuration": query.get("minDuration", ""),
        "limit": str(query["limit"]),
        "start": str(int(start_s * 1e6)),
        "end": str(int(end_s * 1e6)),
        "lookback": "custom",
    }
    return _TRACES, {name: value for name, value in parts.items() if value}


def _unquoted(value: str) -> str:
    return json.loads(value) if value.startswith('"') else value


def windows(*, range_s: float, step_s: float, scrape_s: float) -> dict[str, str]:
    """Grafana's own variables for a range looked at, as its Prometheus data source works them out
    where the boards' least step is the scrape interval: a rate looks back at least four scrapes,
    and never less far than the next point."""
    rate_s = max(step_s + scrape_s, 4 * scrape_s)
    named = {
        "__rate_interval": rate_s,
        "__interval": step_s,
        "__range": range_s,
        STEP: scrape_s,
    }
    return {name: f"{math.ceil(length_s)}s" for name, length_s in named.items()}


def fill(text: str, values: Mapping[str, str]) -> str:
    """Raises KeyError for a variable that has no value."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], text)
