"""How queries are filled in, as Grafana and its Jaeger data source do it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dashboards import targets
from dashboards.build import boards

BOARDS = boards()
SLOW = BOARDS["pd-slow"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["$__all"], ".*"),
        (["decode-0"], "decode-0"),
        (["decode-0", "decode-1"], "(decode-0|decode-1)"),
        (["host.a:1"], r"host\\.a:1"),
        ([], "()"),
    ],
)
def test_several_values_are_a_regular_expression(chosen: list[str], expected: str) -> None:
    assert targets.texts(SLOW, {"worker": chosen}, kind="prometheus")["worker"] == expected


def test_what_is_not_chosen_is_as_the_board_has_it() -> None:
    assert targets.texts(SLOW, {}, kind="prometheus") == {
        **targets.ALL,
        "prometheus": "",
        "jaeger": "",
        "jaeger_ui": "http://127.0.0.1:16686",
        "stage": "decode.reserve",
        "min_duration": "1ms",
        "step": "30s",
    }


def test_a_single_value_stands_as_it_is() -> None:
    filled = targets.texts(SLOW, {"stage": ['a"b']}, kind="prometheus")
    assert filled["stage"] == r"a\"b"
    assert targets.texts(SLOW, {"stage": ['a"b']}, kind="jaeger")["stage"] == 'a"b'


def test_a_variable_that_the_board_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no variable stgae"):
        targets.texts(SLOW, {"stgae": ["x"]}, kind="prometheus")


def test_a_search_is_asked_for_as_the_data_source_does() -> None:
    query = {
        "queryType": "search",
        "service": "pd-gateway",
        "tags": 'a=b c="d \\"e\\""',
        "minDuration": "1ms",
        "limit": 5,
    }
    path, parameters = targets.jaeger_request(query, start_s=1.5, end_s=2)
    assert (path, json.loads(parameters.pop("tags"))) == ("/api/traces", {"a": "b", "c": 'd "e"'})
    assert parameters == {
        "service": "pd-gateway",
        "minDuration": "1ms",
        "limit": "5",
        "start": "1500000",
        "end": "2000000",
        "lookback": "custom",
    }
    _, parameters = targets.jaeger_request({**query, "minDuration": ""}, start_s=1, end_s=2)
    assert "minDuration" not in parameters
    assert targets.jaeger_request({"query": "ab"}, start_s=1, end_s=2) == ("/api/traces/ab", {})


@pytest.mark.parametrize(
    "query",
    [
        {"query": ""},
        {"queryType": "upload", "service": "s", "limit": 1},
        {"queryType": "search", "service": "", "limit": 1},
        {"queryType": "search", "service": "s", "tags": "a=b c", "limit": 1},
    ],
)
def test_what_the_data_source_refuses_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"trace id|search|key=value"):
        targets.jaeger_request(query, start_s=1, end_s=2)
