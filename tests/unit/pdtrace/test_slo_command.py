"""`pdtrace slo` from a user's side: what is shown, exit codes, warnings, and no tracebacks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from pdtrace import semconv as a
from pdtrace.cli import app
from pdtrace.otlp import json_lines
from pdtrace.ring.losses import STATE_NAME, Losses
from pdtrace.spans import AttrValue, Span
from pdtrace.stages import Outcome, Role
from pdtrace.testing import open_recorders, record_request
from tests.support.copies import replace
from tests.support.jaeger_doubles import jaeger_double
from tests.support.pd_traces import WALL_NS, Story

RANGE = ("--since", "2025-01-01T00:00:00Z")
LENIENT = ("--ttft", "100", "--token-gap", "100")


def invoke(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["slo", *map(str, arguments)], env={"COLUMNS": str(columns)})


def document(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code in {0, 1}, result.stderr
    return json.loads(result.stdout)


def spans_of(story: Story, **root: AttrValue) -> list[Span]:
    """As a gateway of today records: how many gaps, and the longest."""
    own = {a.CONTENT_GAPS.key: 31, a.LONGEST_GAP_SECONDS.key: 0.03 + story.gap_s, **root}
    return [
        replace(span, attributes={**span.attributes, **own})
        if a.MODE.key in span.attributes
        else span
        for span in story.trace().spans
    ]


def stories() -> list[Sequence[Span]]:
    well = [spans_of(Story(request_id=f"ok-{n}", start_s=float(n))) for n in range(6)]
    failed = Story(request_id="broken", start_s=8.0, ends_in="transfer", outcome=Outcome.FAILED)
    cancelled = Story(
        request_id="left", start_s=8.5, ends_in="prefill.queue", outcome=Outcome.CANCELLED
    )
    large = {a.REQUEST_MODEL.key: "large\x1b[31m"}
    return [
        *well,
        spans_of(Story(request_id="late", start_s=6.0).stalled("prefill.queue", 4.0)),
        spans_of(Story(request_id="paused", start_s=7.0).stalled("decode.gap", 1.0), **large),
        failed.trace().spans,
        cancelled.trace().spans,
    ]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slo") / "traces.jsonl"
    path.write_bytes(b"".join(json_lines.encode_line(spans) for spans in stories()))
    return path


def test_everything_that_was_asked_for_is_there(recording: Path) -> None:
    result = invoke("--from", recording)
    assert result.exit_code == 1
    page = " ".join(result.stdout.split())
    assert page.startswith("6 of 10 requests were good: goodput 0.552 of 0.919 requests/s")
    assert re.search(r"ttft .* 8 streams 87\.50 % 99 % missed", page)
    assert re.search(r"token_gap .* 248 gaps 98\.38 to 99\.59 % 99 % not known", page)
    assert re.search(r"errors .* 9 requests 88\.88 % 99\.9 % missed", page)
    assert "(1 cancelled, 8 completed, 1 failed)" in page
    assert "ttft: streams that had a first token; not the 2 that ended before it" in page
    assert re.search(r"ttft prefill\.queue 1 1 of 1", page)
    assert re.search(r"errors transfer 1 cannot be said", page)
    assert "late: first token after 4.18 s; prefill.queue took 4.03 s, usually 30.0 ms" in page
    assert "At its median this request would have met the limit." in page
    assert "broken: failed in transfer" in page
    assert "\x1b" not in result.stdout
    assert "┃" in page


def test_one_is_no_plural(tmp_path: Path) -> None:
    """The first that a newcomer asks about is a single request."""
    path = tmp_path / "traces.jsonl"
    path.write_bytes(json_lines.encode_line(spans_of(Story(request_id="only"))))
    shown = " ".join(invoke("--from", path).stdout.split())
    assert "1 stream 100.00 %" in shown
    assert "1 longest gap, one of each stream" in shown
    assert not re.search(r"\b1 (?:requests|streams|longest gaps)\b", shown)


def test_exit_code_says_whether_all_is_met(recording: Path) -> None:
    assert invoke("--from", recording, *LENIENT).exit_code == 1  # one failed
    lenient = (*LENIENT, "--target", "errors=0.5")
    assert invoke("--from", recording, *lenient).exit_code == 0
    assert invoke("--from", recording, "--only", "ttft", "--ttft", 100).exit_code == 0
    assert invoke("--from", recording, "--only", "ttft").exit_code == 1
    assert invoke("--from", recording, "--only", "ttft", "--target", "87.5%").exit_code == 0


def test_what_cannot_be_told_is_not_met(tmp_path: Path) -> None:
    """A recording whose gateway recorded no gaps: generation of 0.7 s may have one of 0.3 s."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(json_lines.encode_line(Story().trace().spans))
    result = invoke("--from", path)
    assert result.exit_code == 1
    page = " ".join(result.stdout.split())
    assert page.startswith("0 to 1 of 1 request was good")
    assert "not known" in page
    assert "token_gap: whether 3 of 31 gaps kept it." in page
    assert invoke("--from", path, "--token-gap", "0.8").exit_code == 0
    assert invoke("--from", path, "--only", "ttft", "--only", "errors").exit_code == 0


def test_both_forms_of_gaps_can_be_asked_for(recording: Path) -> None:
    by_form = {
        form: document(
            "--from", recording, "--gap-form", form, "--only", "token_gap", "--target", 0.98
        )
        for form in ("pooled", "requests")
    }
    for form, unit, counted in (("pooled", "gaps", 248), ("requests", "streams", 8)):
        [objective] = by_form[form]["objectives"]
        assert by_form[form]["token_gap_form"] == form
        assert (objective["unit"], objective["counted"]) == (unit, counted)
    assert by_form["pooled"]["ok"] is True
    assert by_form["requests"]["ok"] is False


def test_document_has_what_the_page_says_and_is_json(recording: Path) -> None:
    found = document("--from", recording, "--e2e", "5")
    assert found["schema"] == "pdtrace.slo/1"
    assert (found["ok"], found["requests"], found["good"]) == (False, 10, {"least": 6, "most": 6})
    assert found["goodput_rps"]["least"] == pytest.approx(6 / found["seconds"])
    assert found["goodput_tokens_per_s"] == pytest.approx(6 * 32 / found["seconds"])
    assert {one["name"]: one["promise"] for one in found["objectives"]} == {
        "ttft": "99 % of streams have their first token within 1.25 s",
        "token_gap": "the 99th percentile of pooled gaps between tokens is at most 200 ms",
        "errors": "99.9 % of requests that were admitted and not cancelled complete",
        "e2e": "99 % of completed requests take at most 5.00 s",
    }
    assert found["objectives"][0]["attainment"] == {"least": 0.875, "most": 0.875}
    assert found["objectives"][0]["spread"]["known"] == 8
    assert set(found["models"]) == {"smol", "large\x1b[31m"}
    worst = {one["request_id"]: one for one in found["worst"] if one["objective"] == "ttft"}
    assert worst["late"]["stage"] == "prefill.queue"
    assert worst["late"]["met_at_median"] is True
    assert len(worst["late"]["trace_id"]) == 32
    assert found["warnings"] == []


def test_model_and_time_choose_requests(recording: Path) -> None:
    assert document("--from", recording, "--model", "smol")["requests"] == 9
    first = WALL_NS // 10**9
    until = f"2025-10-09T08:53:2{first % 60 + 4 - 20}Z"
    assert document("--from", recording, "--until", until)["requests"] == 5
    assert document("--from", recording, "--since", until)["requests"] == 6
    nobody = invoke("--from", recording, "--model", "nope")
    assert (nobody.exit_code, nobody.stdout) == (2, "")
    assert "holds no finished request for model 'nope'; there are large" in nobody.stderr
    assert "\x1b" not in nobody.stderr
    none = invoke("--from", recording, "--since", "1s")
    assert (none.exit_code, none.stderr.count("\n")) == (2, 1)
    assert "begun in that time" in none.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ttft", "0"), "ttft_s is 0.0; it must be a number of seconds above 0"),
        (("--token-gap", "nan"), "token_gap_s is nan"),
        (("--ttft", "1e300"), "ttft_s is 1e+300; it must be from 1e-09 to 1e+09 seconds"),
        (("--e2e", "1e-12"), "e2e_s is 1e-12; it must be from 1e-09 to 1e+09 seconds"),
        (("--target", "ttft=2"), "ttft_objective is 2.0; it must be a share between 0 and 1"),
        (("--target", "speed=0.9"), "'speed' is no objective"),
        (("--only", "e2e"), "e2e has no limit: give --e2e S"),
        (("--since", "soon"), "'soon' is no time"),
        (("--slo", "/nowhere/slo.toml"), "/nowhere/slo.toml: No such file"),
    ],
)
def test_usage_errors_are_one_line(recording: Path, arguments: Sequence[str], says: str) -> None:
    result = invoke("--from", recording, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("limit", ["1e-9", "1e9"])
def test_the_smallest_and_the_largest_limits_are_drawn(recording: Path, limit: str) -> None:
    limits = ("--ttft", limit, "--token-gap", limit, "--e2e", limit)
    result = invoke("--from", recording, *limits)
    assert result.exit_code in {0, 1}
    assert "┃" in result.stdout


def test_settings_come_from_the_file_that_boards_are_built_with(
    recording: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "slo.toml"
    settings.write_text("ttft_s = 5.0\nttft_objective = 0.5\n")
    found = document("--from", recording, "--slo", settings, "--only", "ttft")
    [objective] = found["objectives"]
    assert (objective["limit_s"], objective["target"], objective["met"]) == (5.0, 0.5, True)
    [objective] = document("--from", recording, "--slo", settings, "--ttft", "1", "--only", "ttft")[
        "objectives"
    ]
    assert (objective["limit_s"], objective["target"], objective["met"]) == (1.0, 0.5, True)


@pytest.mark.parametrize("columns", [31, 40, 80, 200])
def test_no_number_is_cut_in_a_narrow_terminal(recording: Path, columns: int) -> None:
    result = invoke("--from", recording, columns=columns)
    assert "…" not in result.stdout
    assert "87.50 %" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= max(columns, 31)


# -- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("era", [{"older": False}, {"v3": False}])
def test_jaeger_of_any_version_is_read_and_its_shares_are_warned_of(era: dict[str, bool]) -> None:
    with jaeger_double(**era) as jaeger:
        result = invoke("--from", jaeger.url, *RANGE)
        told = document("--from", jaeger.url, *RANGE)
        unwarned = document("--from", jaeger.url, *RANGE, "--all-kept")
        paths = {path for path, _ in jaeger.requests}
    assert result.exit_code in {0, 1}
    page = " ".join(result.stdout.split())
    assert "NOT of all requests" in page
    assert page.index("NOT of all requests") < page.index("objective")
    assert told["requests"] == unwarned["requests"] == 1
    assert (len(told["warnings"]), unwarned["warnings"]) == (1, [])
    assert ("/api/v3/traces" in paths) and (("/api/traces" in paths) == ("v3" in era))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("trace_state", "ot=th:8", "tracestate th:8"),
        ("trace_state", "vendor=1,ot=rv:abc;th:c0", "tracestate th:c0"),
        ("trace_state", "ot=th:0", None),
        ("tailsampling.policy", "slow", "tailsampling.policy slow"),
        ("sampler.type", "probabilistic", "sampler.type probabilistic"),
        ("sampler.type", "const", None),
    ],
)
def test_spans_that_tell_of_sampling_are_believed(
    tmp_path: Path, field: str, value: str, says: str | None
) -> None:
    spans = Story().trace().spans
    if field == "trace_state":
        spans = [replace(span, trace_state=value) for span in spans]
    else:
        spans = [replace(s, attributes={**s.attributes, field: value}) for s in spans]
    path = tmp_path / "t.jsonl"
    path.write_bytes(json_lines.encode_line(spans))
    warnings = document("--from", path, "--all-kept")["warnings"]
    assert [says in warning for warning in warnings] == ([True] if says else [])


# -- run directories ------------------------------------------------------------------------------


def test_requests_in_flight_of_a_run_are_told_and_not_counted(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", roles=[r for r in Role if r is not Role.WORKER])
    try:
        for number in range(3):
            record_request(recorders, request_id=f"r{number}")
        record_request(recorders, request_id="open", outcome=None, stop_in="prefill.queue")
        # No agent was there: the rings hold what is finished as well.
        found = document("--from", tmp_path)
        page = invoke("--from", tmp_path).stdout
    finally:
        for recorder in recorders.values():
            recorder.close()
    assert (found["requests"], found["in_flight"]) == (3, 1)
    assert "not counted: 1 in flight" in " ".join(page.split())


def test_requests_that_the_agent_could_not_write_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "t.jsonl").write_bytes(json_lines.encode_line(spans_of(Story())))
    (tmp_path / STATE_NAME).write_bytes(
        msgspec.json.encode({"losses": Losses(lines_lost=2, evicted=1)})
    )
    [warning] = document("--from", tmp_path)["warnings"]
    assert "3 requests were given up or could not be written" in warning
