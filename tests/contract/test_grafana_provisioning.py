"""The files that set Grafana up: fields that its documentation has, references that lead somewhere,
queries about what is exposed.

No Grafana is run. Unknown fields are ignored by it without a word, hence the lists here: those of
Grafana 12's pages on provisioning and on the data sources Prometheus and Jaeger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dashboards import names, promql
from dashboards.build import boards
from pdtrace import semconv as a
from server.stack.programs import COLLECTOR, PROJECT_ROOT

SOURCES_TEXT = (COLLECTOR / "grafana/datasources/pdtrace.yaml").read_text()
SOURCES: dict[str, Any] = yaml.safe_load(SOURCES_TEXT)
BY_UID: dict[str, dict[str, Any]] = {source["uid"]: source for source in SOURCES["datasources"]}
PROVIDERS: dict[str, Any] = yaml.safe_load(
    (COLLECTOR / "grafana/dashboards/pdtrace.yaml").read_text()
)
COMPOSE: dict[str, Any] = yaml.safe_load((COLLECTOR / "compose.yaml").read_text())
GRAFANA: dict[str, Any] = COMPOSE["services"]["grafana"]
ALERTS = (PROJECT_ROOT / "dashboards/generated/grafana/alerts.yaml").read_text()

DOCUMENTED = {
    "source": (
        "name type access orgId uid url user database basicAuth basicAuthUser withCredentials "
        "isDefault jsonData secureJsonData version editable"
    ),
    "prometheus": (
        "httpMethod timeInterval queryTimeout manageAlerts alertmanagerUid customQueryParameters "
        "prometheusType prometheusVersion cacheLevel incrementalQuerying "
        "incrementalQueryOverlapWindow disableRecordingRules disableMetricsLookup "
        "exemplarTraceIdDestinations"
    ),
    "exemplarTraceIdDestinations": "name datasourceUid url urlDisplayLabel",
    "jaeger": "tracesToLogsV2 tracesToMetrics nodeGraph traceIdTimeParams spanBar",
    "tracesToMetrics": "datasourceUid spanStartTimeShift spanEndTimeShift tags queries",
    "provider": (
        "name orgId folder folderUid type disableDeletion updateIntervalSeconds allowUiUpdates "
        "options"
    ),
    "options": "path foldersFromFilesStructure",
}
METRICS = {f"{names.SPAN_DURATION}_bucket", names.SPAN_CALLS}
TO_METRICS: dict[str, Any] = BY_UID["jaeger"]["jsonData"]["tracesToMetrics"]
SPAN_LABELS = {"service_name", "span_name", *map(names.label_of, names.DIMENSIONS)}


def assert_documented(place: str, fields: dict[str, Any]) -> None:
    unknown = set(fields) - set(DOCUMENTED[place].split())
    assert not unknown, f"{place} has no {unknown}"


def test_sources_have_fields_that_grafana_documents_and_uids_of_their_own() -> None:
    assert set(SOURCES) == {"apiVersion", "datasources"}
    assert SOURCES["apiVersion"] == 1
    assert set(BY_UID) == {"prometheus", "jaeger"}
    assert len(SOURCES["datasources"]) == len(BY_UID)
    for uid, source in BY_UID.items():
        assert_documented("source", source)
        assert (source["type"], source["access"]) == (uid, "proxy")
        assert_documented(source["type"], source["jsonData"])
    assert [source["uid"] for source in BY_UID.values() if source.get("isDefault")] == [
        "prometheus"
    ]


def test_exemplars_lead_to_traces() -> None:
    data = BY_UID["prometheus"]["jsonData"]
    scraped = yaml.safe_load((COLLECTOR / "prometheus.yml").read_text())
    assert data["timeInterval"] == scraped["global"]["scrape_interval"]
    [destination] = data["exemplarTraceIdDestinations"]
    assert_documented("exemplarTraceIdDestinations", destination)
    # The label that span metrics and agents give their exemplars.
    assert (destination["name"], destination["datasourceUid"]) == ("trace_id", "jaeger")


def test_traces_lead_to_metrics() -> None:
    assert_documented("tracesToMetrics", TO_METRICS)
    assert BY_UID[TO_METRICS["datasourceUid"]]["type"] == "prometheus"
    assert TO_METRICS["tags"] == [{"key": "service.name", "value": "service_name"}]
    assert len({query["name"] for query in TO_METRICS["queries"]}) == len(TO_METRICS["queries"])
    for shift, sign in (("spanStartTimeShift", "-"), ("spanEndTimeShift", "")):
        assert re.fullmatch(rf"{sign}\d+m", TO_METRICS[shift])
    bar = BY_UID["jaeger"]["jsonData"]["spanBar"]
    assert bar == {"type": "Tag", "tag": a.STAGE.key}


@pytest.mark.parametrize("query", TO_METRICS["queries"], ids=lambda query: query["name"])
def test_queries_from_a_trace_name_metrics_and_labels_that_are_exposed(query: Any) -> None:
    """Grafana puts the span's tags in place of `$__tags`, written `$$__tags` here."""
    assert set(query) == {"name", "query"}
    expr = query["query"].replace("$$__tags", 'service_name="pd-decode"')
    assert "$" not in expr
    tree = promql.parse(expr)
    selectors = list(promql.selectors(tree))
    assert selectors
    for selector in selectors:
        assert selector.name in METRICS
        assert {label for label, _, _ in selector.matchers} <= SPAN_LABELS
    for node in promql.walk(tree):
        if isinstance(node, promql.Aggregation):
            assert set(node.by) <= {"le", *SPAN_LABELS}


def test_environment_has_what_the_files_ask_for() -> None:
    """Any other `$` would be taken for a variable and vanish."""
    values = "\n".join(line.partition(" #")[0] for line in SOURCES_TEXT.splitlines())
    values = "\n".join(line for line in values.splitlines() if not line.startswith("#"))
    asked = re.findall(r"\$\{?(\w+)", values.replace("$$", ""))
    assert set(asked) == {name for name in GRAFANA["environment"] if name.startswith("PD_")}


def test_boards_are_found_where_they_are_mounted() -> None:
    [provider] = PROVIDERS["providers"]
    assert PROVIDERS["apiVersion"] == 1
    assert_documented("provider", provider)
    assert_documented("options", provider["options"])
    assert provider["type"] == "file"
    mounts = [volume.removesuffix(":ro").rpartition(":")[2] for volume in GRAFANA["volumes"]]
    assert provider["options"]["path"] in mounts
    assert "/etc/grafana/provisioning/datasources" in mounts
    assert "/etc/grafana/provisioning/dashboards" in mounts
    # Alerts and boards in one folder.
    folders = {group["folder"] for group in yaml.safe_load(ALERTS)["groups"]}
    assert folders == {provider["folder"]}


def uids(node: Any) -> Iterator[tuple[str, str]]:
    """(type, uid) of every data source that is named."""
    if isinstance(node, dict):
        found: dict[str, Any] = node
        if isinstance(source := found.get("datasource"), dict):
            yield str(source["type"]), str(source["uid"])
        for value in found.values():
            yield from uids(value)
    elif isinstance(node, list):
        for value in node:
            yield from uids(value)


def test_boards_and_alerts_name_sources_that_are_set_up() -> None:
    """Boards by a variable for each type, alerts by uid."""
    types = {source["type"] for source in BY_UID.values()}
    named = {found for board in boards().values() for found in uids(board)}
    assert {kind for kind, _ in named} == types
    assert {uid for _, uid in named} == {f"${{{kind}}}" for kind in types}
    assert set(re.findall(r"datasourceUid: (\S+)", ALERTS)) == {"prometheus", "__expr__"}
