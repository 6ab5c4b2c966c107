"""docs/metrics.md names every metric of the gateway; no name is the agent's as well."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import pdtrace
from pdtrace.stages import Outcome
from server.gateway.metrics import GatewayMetrics
from server.gateway.openai_api import Operation
from server.gateway.registry import MemberReport, MemberState
from tests.contract.test_agent_page import exposition

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FORMATS = ("text/plain", OPENMETRICS)


def gateway(accept: str) -> str:
    """What the gateway answers once a request was served."""
    member = MemberReport(
        instance="decode-0",
        role="decode",
        state=MemberState.READY,
        progress_age_s=0.5,
        heartbeat_age_s=0.1,
        reason=None,
        ignored={"late.CopyDone": 2},
        denied={"control": 1},
    )
    metrics = GatewayMetrics(
        model="m", in_flight=lambda: 1, waiting=lambda: 0, members=lambda: [member]
    )
    metrics.ended(Operation.CHAT, Outcome.COMPLETED, "", 1.0)
    metrics.ignored("Tokens")
    return metrics.render(accept)[0].decode()


def families(text: str, accept: str) -> Mapping[str, Metric]:
    """By name as it stands in queries: a counter's ends in _total in either format."""
    parse = parse_openmetrics if accept == OPENMETRICS else parse_text
    found: Iterable[Metric] = parse(text)
    return {f"{f.name}_total" if f.type == "counter" else f.name: f for f in found}


def test_page_names_every_metric_of_the_gateway_and_no_other() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert named == set(families(gateway("text/plain"), "text/plain"))


@pytest.mark.parametrize("accept", FORMATS)
def test_page_has_the_labels_and_the_words_of_the_code(accept: str) -> None:
    page = PAGE.read_text()
    for name, family in families(gateway(accept), accept).items():
        labels = sorted({key for s in family.samples for key in s.labels} - {"le"})
        [row] = re.findall(rf"^\| `{name}` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
        assert sorted(re.findall(r"\w+", row[0])) == labels, name
        assert row[1] == family.documentation.rstrip("."), name


@pytest.mark.parametrize("accept", FORMATS)
def test_no_name_is_exposed_by_both(accept: str) -> None:
    here = families(gateway(accept), accept)
    there = families(exposition(accept), accept)
    assert len(here) > 10
    assert len(there) > 30
    assert set(here) & set(there) == set()


@pytest.mark.parametrize("accept", FORMATS)
@pytest.mark.parametrize("expose", [gateway, exposition])
def test_help_says_something_and_no_series_tells_when_it_was_made(expose, accept: str) -> None:  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    text = expose(accept)
    assert "_created" not in text
    for name, family in families(text, accept).items():
        assert len(family.documentation.split()) > 3, name


@pytest.mark.parametrize("accept", FORMATS)
def test_both_say_of_which_version_they_are(accept: str) -> None:
    version = {"version": pdtrace.__version__}
    for name, text in (
        ("pd_build_info", exposition(accept)),
        ("pd_gateway_build_info", gateway(accept)),
    ):
        [sample] = families(text, accept)[name].samples
        assert (sample.labels, sample.value) == (version, 1)
