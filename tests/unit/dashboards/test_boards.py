"""The five boards: their order, colours, words, links and what a test can ask of them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dashboards import build, colours, links, names, promql, sdk, targets
from dashboards import variables as v
from dashboards.boards import pieces
from dashboards.rules.alerts import alerts
from pdtrace.slo import DEFAULT_SLO, Slo
from pdtrace.stages import STAGES

BOARDS = build.boards()
UIDS = ("pd-overview", "pd-stages", "pd-slow", "pd-request", "pd-workers")

each_board = pytest.mark.parametrize("uid", UIDS)


def panels(uid: str) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[uid]["panels"] if panel["type"] != "row"]


def panel(uid: str, title: str) -> dict[str, Any]:
    [found] = [panel for panel in panels(uid) if panel["title"] == title]
    return found


def overrides(one: dict[str, Any]) -> dict[str, str]:
    """Name or pattern → fixed colour."""
    return {
        override["matcher"]["options"]: item["value"]["fixedColor"]
        for override in one.get("fieldConfig", {}).get("overrides", ())
        for item in override["properties"]
        if item["id"] == "color"
    }


def test_boards_are_these_five_with_fixed_uids() -> None:
    assert tuple(BOARDS) == UIDS
    assert all(board["schemaVersion"] == 42 for board in BOARDS.values())


def test_building_twice_gives_the_same_bytes() -> None:
    assert build.files() == build.files()


@each_board
def test_every_panel_says_what_it_leaves_out_and_in_whole_sentences(uid: str) -> None:
    for one in panels(uid):
        shows, lacks = one["description"].split(f"\n\n{sdk.NOT_SHOWN}")
        assert shows.endswith((".", "?")), one["title"]
        assert lacks.endswith("."), one["title"]


@each_board
def test_each_board_chooses_sources_model_role_and_worker(uid: str) -> None:
    variables = {one["name"]: one for one in BOARDS[uid]["templating"]["list"]}
    assert variables["prometheus"]["query"] == "prometheus"
    assert variables["jaeger"]["query"] == "jaeger"
    for name in (v.MODEL, v.ROLE, v.WORKER):
        assert variables[name]["multi"]
        assert variables[name]["allValue"] == ".*"
    assert variables["jaeger_ui"]["current"]["value"].startswith("http://")


def test_every_stage_has_a_colour_of_its_own() -> None:
    assert {stage.name for stage in STAGES} <= set(colours.STAGES)
    assert len(set(colours.STAGES.values())) == len(colours.STAGES)


LIVE = frozenset(
    {
        *(names.OPEN, names.OPEN_OLDEST, names.OPEN_OLDEST_BY_WORKER, names.OPEN_STUCK),
        *(names.IN_FLIGHT, names.RUNNING, names.WAITING, names.STEPS, names.PROGRESS_AGE),
        *(names.PROCESS_STATE, names.PROCESS_READY),
    }
)
"""Read from the rings or told by heartbeats: they move while a request hangs."""


def rows(uid: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each heading and the panels below it."""
    title, below = "", list[dict[str, Any]]()
    for one in BOARDS[uid]["panels"]:
        if one["type"] == "row":
            yield title, below
            title, below = one["title"], []
        else:
            below.append(one)
    yield title, below


def asked(one: dict[str, Any]) -> set[str]:
    """Metrics of a panel."""
    exprs = [target["expr"] for target in one["targets"] if "expr" in target]
    filled = [targets.fill(expr, {**targets.ALL, **WINDOWS, "stage": "transfer"}) for expr in exprs]
    return {one.name for expr in filled for one in promql.selectors(promql.parse(expr))}


WINDOWS = targets.windows(range_s=3600, step_s=15, scrape_s=15)


@pytest.mark.parametrize("uid", ["pd-overview", "pd-stages", "pd-workers"])
def test_what_is_in_flight_stands_above_what_is_finished(uid: str) -> None:
    titles = [title for title, _ in rows(uid)]
    live = max(at for at, title in enumerate(titles) if title.startswith("Now"))
    assert not [title for title in titles[: live + 1] if title.startswith("Finished")]
    for title, below in rows(uid):
        for one in below:
            if title.startswith("Now"):
                assert asked(one) <= LIVE, one["title"]
            if title.startswith("Finished"):
                assert not asked(one) & LIVE, one["title"]


def test_telemetry_alive_comes_first() -> None:
    first = panels("pd-overview")[0]
    assert (first["title"], first["type"]) == ("Telemetry", "stat")
    assert first["fieldConfig"]["defaults"]["noValue"] == "no telemetry"


def test_mean_stage_times_stack_up_to_the_mean_request() -> None:
    one = panel("pd-stages", "Mean time per request by stage")
    assert one["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    parts, whole = one["targets"]
    assert names.STAGE_PARTS in parts["expr"]
    assert f"{names.REQUEST_DURATION}_sum" in whole["expr"]
    # The remainder is one of the parts; the whole is a line over them.
    assert "unexplained" in overrides(one)
    [line] = [
        override
        for override in one["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == whole["legendFormat"]
    ]
    stacking = [item["value"] for item in line["properties"] if item["id"] == "custom.stacking"]
    assert stacking == [{"mode": "none", "group": "B"}]


def test_no_board_stacks_quantiles() -> None:
    for target in targets.targets(BOARDS):
        if target.kind == "prometheus" and "histogram_quantile" in target.expr:
            one = panel(target.board, target.panel)
            custom = one["fieldConfig"]["defaults"].get("custom", {})
            assert custom.get("stacking", {}).get("mode", "none") == "none", target.panel


@pytest.mark.parametrize("uid", ["pd-overview", "pd-stages"])
def test_dominant_stage_is_shown_from_verdicts_and_from_span_metrics(uid: str) -> None:
    exprs = " ".join(t.expr for t in targets.targets({uid: BOARDS[uid]}) if t.kind == "prometheus")
    assert names.STALLS in exprs
    assert f'{names.SPAN_STALL_STAGE}!=""' in exprs


def test_each_stage_of_the_chain_has_its_panel_on_pd_stages() -> None:
    for stage in pieces.CHAIN:
        one = panel("pd-stages", stage.name)
        assert one["description"].startswith(f"{stage.meaning} {stage.advice}")
        assert all(target["exemplar"] for target in one["targets"])
        [link] = one["fieldConfig"]["defaults"]["links"]
        assert f"var-stage={stage.name}&" in link["url"]


@each_board
def test_links_go_to_boards_that_have_what_they_set(uid: str) -> None:
    for url in re.findall(r'"url": "(/d/[^"]+)"', json.dumps(BOARDS[uid])):
        target = url.split("/")[2].split("?")[0]
        declared = {one["name"] for one in BOARDS[target]["templating"]["list"]}
        chosen = set(re.findall(r"var-(\w+)=", url)) | set(re.findall(r"\{(\w+):queryparam\}", url))
        assert chosen
        assert chosen <= declared, url
        assert "${__url_time_range}" in url


def test_trace_ids_lead_to_the_own_board_and_to_jaeger() -> None:
    for title in ("Slowest requests that stalled in this stage", "Slowest requests"):
        [override] = [
            override
            for override in panel("pd-slow", title)["fieldConfig"]["overrides"]
            if override["matcher"]["options"] == "Trace ID"
        ]
        own, jaeger = override["properties"][0]["value"]
        assert own["url"].startswith("/d/pd-request?var-trace=${__value.raw}&")
        assert jaeger["url"] == "${jaeger_ui:raw}/trace/${__value.raw}"


def test_thresholds_follow_the_objectives() -> None:
    strict = build.boards(Slo(ttft_s=0.3, token_gap_s=0.05, oldest_s=4.0))
    text = json.dumps(strict)
    for value in (0.3, 0.05, 4.0):
        assert f'"value": {value}}}' in text or f'"value": {value},' in text
    assert json.dumps(BOARDS) != text


def test_every_alert_leads_to_a_panel_that_is_there() -> None:
    for alert in alerts(DEFAULT_SLO):
        assert panel(alert.board, alert.panel)["id"] == alert.panel_id
        declared = {one["name"] for one in BOARDS[alert.board]["templating"]["list"]}
        assert {name for name, _ in alert.chosen} <= declared


def test_panel_ids_stay_where_a_panel_is_moved() -> None:
    assert panel("pd-overview", "Telemetry")["id"] == sdk.stable_id("Telemetry")


def lines_of(width: int, title: str = "one") -> sdk.Panel:
    query = sdk.Query(expr="up", legend="")
    return sdk.lines(title, "It shows.", "nothing.", sdk.SHORT, query, width=width)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ((lines_of(12),), "12 columns wide"),
        ((lines_of(16), lines_of(12, "two")), "leaves a hole"),
        ((lines_of(12), replace(lines_of(12, "two"), height=3)), "leaves a hole"),
        ((lines_of(12), lines_of(12)), "same title"),
    ],
)
def test_layout_that_leaves_holes_is_refused(made: tuple[sdk.Panel, ...], says: str) -> None:
    board = sdk.Board(
        uid="x",
        title="x",
        description="x",
        variables=v.everywhere(),
        rows=(sdk.Row(title="row", panels=made),),
    )
    with pytest.raises(ValueError, match=says):
        sdk.board_json(board, [sdk.Annotation(name="a", expr="up", colour="red", title="a")])


# -- what tests against real programs ask ----------------------------------------------------------


def test_every_query_can_be_filled_in() -> None:
    windows = targets.windows(range_s=3600, step_s=15, scrape_s=5)
    values = {
        **targets.ALL,
        **windows,
        "stage": "transfer",
        "min_duration": "1ms",
        "trace": "0af7651916cd43dd8448eb211c80319c",
        "prometheus": "prometheus",
        "jaeger": "jaeger",
    }
    found = list(targets.targets(BOARDS))
    assert len(found) > 60
    for target in found:
        filled = target.filled(values)
        assert "$" not in json.dumps({k: f for k, f in filled.items() if k != "datasource"})
    asked = {(query.variable, query.label) for query in targets.values_queries(BOARDS)}
    assert asked == {("model", names.MODEL), ("role", "role"), ("worker", "instance")}
    assert {uid for uid, _, _ in targets.annotation_queries(BOARDS)} == set(UIDS)


def test_every_query_has_a_least_step() -> None:
    """Of a rate it is the variable, of which the window is four; what has no window is live."""
    for target in targets.targets(BOARDS):
        if target.kind == "prometheus":
            used = set(re.findall(r"\[([^\]\"]+)\]", re.sub(r'"[^"]*"', "", target.expr)))
            assert used <= {"$__rate_interval", "$__range"}, target.panel
            wanted = "$step" if "$__rate_interval" in used else sdk.LIVE_STEP
            assert target.fields["interval"] == wanted, target.panel


@each_board
def test_models_and_workers_that_a_request_may_lack_are_named_in_legends(uid: str) -> None:
    for target in targets.targets({uid: BOARDS[uid]}):
        if target.kind != "prometheus":
            continue
        for label in (names.MODEL, names.SPAN_PREFILL, names.SPAN_DECODE):
            if f"{{{{{label}}}}}" in target.fields["legendFormat"]:
                assert re.search(rf'"{label}", "no \w+", "{label}", ""\)', target.expr)


def test_missing_variable_is_an_error() -> None:
    with pytest.raises(KeyError):
        targets.fill('up{instance=~"$worker"}', {})


# -- the command -----------------------------------------------------------------------------------


def test_check_names_what_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--out", str(tmp_path)]) == 0
    assert build.main(["--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "boards" / "pd-slow.json").write_text("{}\n")
    (tmp_path / "boards" / "old.json").write_text("{}\n")
    assert build.main(["--out", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    assert "boards/pd-slow.json is out of date" in said
    assert "boards/old.json is out of date" in said


def test_own_objectives_are_written_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "slo.toml"
    mine.write_text("ttft_s = 0.8\nerror_objective = 0.99\n")
    assert build.main(["--slo", str(mine)]) == 2
    out = tmp_path / "out"
    assert build.main(["--slo", str(mine), "--out", str(out)]) == 0
    assert str(out / "slo.env") in capsys.readouterr().out
    assert 'le="0.8"' in (out / "prometheus" / "pdtrace.rules.yml").read_text()
    mine.write_text("ttft_s = -1\n")
    assert build.main(["--slo", str(mine), "--out", str(out)]) == 2
    assert "ttft_s is -1.0; it must be a number of seconds above 0" in capsys.readouterr().err


def test_own_objectives_come_with_all_that_other_programs_need(tmp_path: Path) -> None:
    """As a shell reads the file, which Docker Compose reads too."""
    mine, out = tmp_path / "slo.toml", tmp_path / "a folder"
    mine.write_text("ttft_s = 0.00001\ntoken_gap_s = 3.0\n")
    base = "https://wiki.example/pd"
    made = ["--slo", str(mine), "--out", str(out), "--runbooks", base]
    assert build.main(made) == 0
    assert build.main([*made, "--check"]) == 0
    told = subprocess.run(
        ["sh", "-c", 'set -a; . "$1"; env', "sh", str(out / "slo.env")],
        env={}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    said = dict(line.split("=", 1) for line in told)
    assert said["PD_SLO_TTFT_S"] == "0.00001"
    assert said["PD_SLO_TOKEN_GAP_S"] == "3.0"
    assert said["PDTRACE_SLO_SECONDS"] == "0.00001,3.0"
    generated = Path(said["PD_GENERATED"])
    assert (generated / "boards" / "pd-overview.json").exists()
    rules = (generated / "prometheus" / "pdtrace.rules.yml").read_text()
    assert 'le="3.000001"' in rules
    urls = re.findall(r"runbook_url: (\S+)", rules)
    assert len(urls) == len(alerts(DEFAULT_SLO))
    for url in urls:
        assert url.startswith(f"{base}/")
        assert (generated / "runbooks" / url.rpartition("/")[2]).exists()
    assert build.main(["--out", str(out), "--runbooks", "two words"]) == 2
    assert build.main(["--runbooks", base]) == 2


def test_uids_are_the_names_that_others_use() -> None:
    assert (links.OVERVIEW, links.STAGES, links.SLOW, links.REQUEST, links.WORKERS) == UIDS
