"""Every query of every board, with its variables filled in: for tests against real programs.

Owns how Grafana fills in variables, as far as these boards use it; runs nothing itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dashboards.sdk import Json

ALL: Mapping[str, str] = MappingProxyType({"model": ".*", "role": ".*", "worker": ".*"})
"""The variables at All."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)")
_LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


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


def windows(*, range_s: float, step_s: float, scrape_s: float) -> dict[str, str]:
    """Grafana's own variables for a range looked at, as its Prometheus data source works them out:
    a rate looks back at least four scrapes, and never less far than the next point."""
    rate_s = max(step_s + scrape_s, 4 * scrape_s)
    named = {"__rate_interval": rate_s, "__interval": step_s, "__range": range_s}
    return {name: f"{math.ceil(length_s)}s" for name, length_s in named.items()}


def fill(text: str, values: Mapping[str, str]) -> str:
    """Raises KeyError for a variable that has no value."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], text)
