"""The command from a user's side: output, exit codes, pipes, and no tracebacks."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pdtrace
from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from pdtrace.cli import app
from pdtrace.native import hot_path
from pdtrace.otlp import json_lines
from pdtrace.stages import STAGES, Mode, Role, WaitReason
from pdtrace.terminal import selection
from pdtrace.testing import Wait, open_recorders, record_request
from tests.support.copies import replace
from tests.support.pd_traces import Story, noisy

REPOSITORY = Path(__file__).resolve().parents[3]


def stories() -> list[Story]:
    rng = random.Random(3)
    waits = {"decode.reserve": {a.WAIT_REASON.key: "kv_pages", a.WAIT_NEEDED.key: 12}}
    slow = Story(request_id="slow-1", waits=waits).stalled("decode.reserve", 4.0)
    return [*(noisy(f"req-{index}", rng) for index in range(12)), slow]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    (run / "traces").mkdir()
    lines = [json_lines.encode_line(story.trace().spans) for story in stories()]
    (run / "traces" / "spans-000001.jsonl").write_bytes(b"".join(lines))
    return run


def invoke(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.mark.parametrize("command", ["why", "check", "stages"])
def test_no_line_that_is_piped_ends_in_blanks(recording: Path, command: str) -> None:
    source = () if command == "stages" else ("--from", recording)
    lines = invoke(command, *source).stdout.split("\n")
    assert len(lines) > 20
    assert [line for line in lines if line.endswith(" ")] == []


def test_why_without_an_id_explains_the_slowest(recording: Path) -> None:
    result = invoke("why", "--from", recording)
    assert result.exit_code == 0
    assert result.stdout.startswith("slow-1 stalled in decode.reserve: 4.00 s instead of")
    assert "Needed 12 KV pages." in " ".join(result.stdout.split())
    assert "1 of 13 requests in" in " ".join(result.stdout.split())


@pytest.mark.parametrize("wanted", ["req-3", "slow", "slow-1"])
def test_why_takes_a_request_id_or_a_unique_beginning(recording: Path, wanted: str) -> None:
    result = invoke("why", wanted, "--from", recording)
    assert result.exit_code == 0
    assert result.stdout.startswith(wanted)


def test_why_takes_a_trace_id_in_long_short_and_upper_form(tmp_path: Path) -> None:
    spans = Story(request_id="one").trace().spans
    line = json_lines.encode_line(spans).decode().replace(spans[0].trace_id, "1a2b".zfill(32))
    path = tmp_path / "traces.jsonl"
    path.write_text(line + json_lines.encode_line(Story(request_id="two").trace().spans).decode())
    for wanted in ("1a2b".zfill(32), "1a2b", "1A2B", "1a"):
        result = invoke("why", wanted, "--from", path)
        assert (result.exit_code, result.stdout[:3]) == (0, "one")


def test_exact_id_wins_over_longer_ones_that_begin_with_it(recording: Path) -> None:
    assert invoke("why", "req-1", "--from", recording).stdout.startswith("req-1 ")


def test_ambiguous_id_lists_the_candidates(recording: Path) -> None:
    result = invoke("why", "req-", "--from", recording)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "'req-' names 12 requests; give a longer id or a trace id:" in result.stderr
    assert "  req-3  trace " in result.stderr
    assert "s  completed\n" in result.stderr
    assert "and 2 more" in result.stderr


def test_tries_of_one_request_in_one_trace_are_told_apart_by_their_root_span(
    tmp_path: Path,
) -> None:
    tries = [Story(request_id="again", start_s=start_s).trace().spans for start_s in (0.0, 5.0)]
    shared = [[replace(s, trace_id="ab" * 16) for s in spans] for spans in tries]
    path = tmp_path / "t"
    path.write_bytes(b"".join(json_lines.encode_line(spans) for spans in shared))
    result = invoke("why", "again", "--from", path)
    assert result.exit_code == 2
    assert "'again' names 2 requests; give the id of a root span:" in result.stderr
    for spans in shared:
        root = next(span for span in spans if span.attributes.get(a.SPAN.key) == "request")
        assert f"root span {root.span_id}" in result.stderr
        found = invoke("why", root.span_id, "--from", path)
        assert (found.exit_code, found.stdout.split(" ")[0]) == (0, "again")


def test_unknown_id_is_one_line(recording: Path) -> None:
    result = invoke("why", "nobody", "--from", recording)
    assert result.exit_code == 2
    assert result.stderr == (
        "pdtrace: no request has an id that begins with 'nobody': looked through 13 finished in "
        f"{recording}\n"
    )


def test_unknown_ids_name_the_closest_and_are_cut(recording: Path) -> None:
    known = read_source(recording).traces[0].spans[0].attributes[a.REQUEST_ID.key]
    result = invoke("why", f"{known}x", "--from", recording)
    assert f"; the closest: '{known}'" in result.stderr
    result = invoke("why", "\x1b[31m" + "x" * 10_000, "--from", recording)
    assert len(result.stderr) < 400
    assert "\x1b" not in result.stderr
    for blank in ("", "  "):
        result = invoke("why", blank, "--from", recording)
        assert (result.exit_code, result.stderr) == (
            2,
            "pdtrace: the id is empty; without an ID the slowest request is shown\n",
        )


def test_slowest_gives_a_table_and_each_view(recording: Path) -> None:
    result = invoke("why", "--slowest", "3", "--from", recording)
    assert result.exit_code == 0
    assert result.stdout.startswith("request")
    assert result.stdout.count("\nusual: median of") == 3
    assert "What this does not know" not in result.stdout  # nothing is missing


def test_id_and_slowest_exclude_each_other(recording: Path) -> None:
    result = invoke("why", "x", "--slowest", "2", "--from", recording)
    assert (result.exit_code, result.stderr) == (
        2,
        "pdtrace: give an ID or --slowest N, not both\n",
    )


def test_why_as_json_is_one_document_with_stable_keys(recording: Path) -> None:
    result = invoke("why", "--slowest", "2", "--from", recording, "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == "pdtrace.why/1"
    assert document["source"]["requests"] == 13
    slow = document["requests"][0]
    assert slow["request_id"] == "slow-1"
    assert sum(part["ns"] for part in slow["parts"]) == slow["total_ns"]
    assert slow["verdict"]["kind"] == "stalled"
    assert slow["verdict"]["stage"] == slow["verdict"]["stall_stage"] == "decode.reserve"
    assert slow["verdict"]["wait"]["reason"] == "kv_pages"
    assert [w["needed"] for w in slow["waits"]] == [12]


def test_every_json_key_is_documented(recording: Path) -> None:
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")

    def keys(value: Any) -> set[str]:
        if isinstance(value, Mapping):
            return set(value) | {key for inner in value.values() for key in keys(inner)}
        if isinstance(value, list):
            return {key for inner in value for key in keys(inner)}
        return set()

    documents = [
        json.loads(invoke("why", "--from", recording, "--json").stdout),
        json.loads(invoke("check", "--from", recording, "--json").stdout),
        json.loads(invoke("stages", "--json").stdout),
    ]
    names = {stage.name for stage in STAGES} | {"completed", "pd", "pd_early", "colocated"}
    found = {key for document in documents for key in keys(document)} - names
    assert {key for key in found if f"`{key}`" not in page} == set()


def test_check_passes_a_whole_recording(recording: Path) -> None:
    result = invoke("check", "--from", recording)
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith("13 requests keep all 23 rules.")


def test_check_finds_a_broken_rule(tmp_path: Path) -> None:
    spans = [s for s in Story().trace().spans if s.name != "hop.notice"]
    path = tmp_path / "t"
    path.write_bytes(json_lines.encode_line(spans))
    result = invoke("check", "--from", path)
    assert result.exit_code == 1
    assert "a completed request lacks hop.notice" in result.stdout
    document = json.loads(invoke("check", "--from", path, "--json").stdout)
    assert document["ok"] is False


def test_standard_input_is_a_source(recording: Path) -> None:
    data = (recording / "traces" / "spans-000001.jsonl").read_bytes()
    assert invoke("check", "--from", "-", stdin=data).exit_code == 0


def test_stages_lists_every_stage() -> None:
    result = invoke("stages")
    assert result.exit_code == 0
    assert all(stage.name in result.stdout for stage in STAGES)
    document = json.loads(invoke("stages", "--json").stdout)
    assert [s["name"] for s in document["stages"]] == [stage.name for stage in STAGES]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"{}", "no resourceSpans"),
        (b'{"resourceSpans": []}', "holds no request"),
        (b"\x00\xff", "not JSON"),
        (b'{"data": []}', "holds no request"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(data)
    result = invoke("why", "--from", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("pdtrace: ")
    assert result.stderr.count("\n") == 1


def test_a_fault_of_pdtrace_is_one_line_and_exit_code_70(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(sources: object, **options: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(selection, "read_sources", fault)
    monkeypatch.delenv("PDTRACE_DEBUG", raising=False)
    result = invoke("why", "--from", recording)
    assert result.exit_code == 70
    assert result.stderr.startswith("pdtrace: internal error: ZeroDivisionError: by zero")
    assert result.stderr.count("\n") == 1
    monkeypatch.setenv("PDTRACE_DEBUG", "1")
    assert "Traceback" in invoke("why", "--from", recording).stderr


def test_version_and_help() -> None:
    hot = f"hot paths in {hot_path()}"
    assert invoke("--version").stdout == f"pdtrace {pdtrace.__version__} ({hot})\n"
    for command in ("why", "top", "check", "stages", "agent"):
        result = invoke(command, "--help")
        assert result.exit_code == 0
    assert "Exit codes" in " ".join(invoke("--help").stdout.split())
    assert "Examples" in invoke("why", "--help").stdout


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "pdtrace", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_program_takes_its_source_from_the_environment(recording: Path) -> None:
    done = run("why", env={"PDTRACE_RUN": str(recording), "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("slow-1 stalled in decode.reserve")
    assert b"\x1b" not in done.stdout


def test_program_draws_in_ascii_where_the_output_takes_no_more(recording: Path) -> None:
    done = run("why", "--from", recording, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr.decode()
    assert b"K...." in done.stdout
    assert done.stdout.isascii()


def test_agent_says_in_one_line_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "rings").mkdir()
    (tmp_path / "file").write_text("")
    done = run("agent", "--rings", tmp_path / "rings", "--out", tmp_path / "file" / "x")
    assert done.returncode == 2
    assert b"cannot write traces to" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("mode", list(Mode))
def test_what_processes_mark_is_what_why_explains(tmp_path: Path, mode: Mode) -> None:
    """Rings → agent → recording → `why`: the partition is the one that was recorded, to the ns."""
    (tmp_path / "rings").mkdir()
    roles = [role for role in Role if (role is Role.WORKER) is (mode is Mode.COLOCATED)]
    recorders = open_recorders(tmp_path / "rings", roles=[*{Role.GATEWAY, *roles}])
    wait: Wait = {"reason": WaitReason.TOKEN_BUDGET, "needed": 512, "free": 0, "limit": 256}
    recorded = {
        f"req-{index}": record_request(
            recorders,
            mode=mode,
            request_id=f"req-{index}",
            stage_ms={"prefill.queue": 2_000.0} if index == 6 else None,
            waits={"prefill.queue": wait} if index == 6 else None,
        )
        for index in range(7)
    }
    for recorder in recorders.values():
        recorder.close()
    done = run("agent", "--rings", tmp_path / "rings", "--out", tmp_path, "--until-closed")
    assert done.returncode == 0, done.stderr.decode()

    done = run("why", "--slowest", "7", "--from", tmp_path, "--json")
    requests = json.loads(done.stdout)["requests"]
    assert len(requests) == 7
    for request in requests:
        expected = recorded[request["request_id"]]
        lengths = {name: end - begin for name, (begin, end) in expected.stages.items()}
        parts = {part["stage"]: part["ns"] for part in request["parts"]}
        assert parts == {**lengths, "unexplained": 0}
        assert request["exact"]
        assert request["violations"] == []
    slow = requests[0]
    assert slow["request_id"] == "req-6"
    assert (slow["verdict"]["kind"], slow["verdict"]["stage"]) == ("stalled", "prefill.queue")
    assert slow["verdict"]["cause"] == "needed 512 tokens of the step's budget, 0 free, limit 256"
    checked = run("check", "--from", tmp_path, env={"PYTHONUTF8": "1"})
    assert checked.returncode == 0, checked.stdout.decode()


def test_no_color_is_honoured(recording: Path) -> None:
    coloured = run("why", "--from", recording, env={"FORCE_COLOR": "1", "NO_COLOR": ""})
    assert b"\x1b[38" in coloured.stdout or b"\x1b[1;31" in coloured.stdout
    plain = run("why", "--from", recording, env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert b"\x1b[38" not in plain.stdout
    assert b"\x1b[1;31" not in plain.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_reader_that_leaves_early_is_no_error(recording: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "pdtrace", "why", "--slowest", "13", "--from", str(recording)]
    with subprocess.Popen(
        [*command, *options], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_without_room_is_one_line(recording: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "pdtrace", "why", "--from", str(recording), *options]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr.decode() == "pdtrace: cannot write the output: No space left on device\n"


def test_commands_need_only_the_base_dependencies(recording: Path) -> None:
    """No torch, no ZeroMQ, no server; and analysis does not load OpenTelemetry either."""
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from pdtrace.cli import app\n"
        f"result = CliRunner().invoke(app, ['why', '--from', {str(recording)!r}])\n"
        "assert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'zmq', 'server', 'numpy', 'opentelemetry', 'starlette'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.decode().strip() == "[]"


def test_several_sources_are_joined_by_trace(tmp_path: Path) -> None:
    """Each host's agent writes its own spans: together they are the request."""
    spans = Story(request_id="far").trace().spans
    for host, services in (
        ("a", {"pd-gateway", "pd-prefill"}),
        ("b", {"pd-transfer", "pd-decode"}),
    ):
        folder = tmp_path / host / "traces"
        folder.mkdir(parents=True)
        own = [span for span in spans if span.resource.service_name in services]
        (folder / "spans-000001.jsonl").write_bytes(json_lines.encode_line(own))
    both = ("--from", tmp_path / "a", "--from", tmp_path / "b")
    assert invoke("check", "--from", tmp_path / "a").exit_code == 1
    assert invoke("check", *both).exit_code == 0
    document = json.loads(invoke("why", "far", *both, "--json").stdout)
    assert document["source"]["name"] == f"{tmp_path / 'a'} + {tmp_path / 'b'}"
    assert (document["source"]["files"], document["source"]["traces"]) == (2, 1)
    [request] = document["requests"]
    assert request["unexplained_ns"] == 0


@pytest.mark.case("ID-06")
@pytest.mark.parametrize("written", ["1a2b", "0x1A2B", "00001a2b", "1a2b".zfill(32)])
def test_short_trace_ids_are_padded_and_found_in_either_form(tmp_path: Path, written: str) -> None:
    spans = Story(request_id="one").trace().spans
    line = json_lines.encode_line(spans).decode().replace(spans[0].trace_id, written)
    assert written in line
    path = tmp_path / "traces.jsonl"
    path.write_text(line + json_lines.encode_line(Story(request_id="two").trace().spans).decode())
    for wanted in ("1a2b".zfill(32), "1a2b", "1A2B", "0x1a2b", "00001a2b"):
        result = invoke("why", wanted, "--from", path, "--json")
        assert result.exit_code == 0, (written, wanted, result.stderr)
        [request] = json.loads(result.stdout)["requests"]
        assert (request["request_id"], request["trace_id"]) == ("one", "1a2b".zfill(32))


@pytest.mark.case("CLK-01")
def test_span_on_a_monotonic_clock_breaks_a_rule_and_no_length(tmp_path: Path) -> None:
    spans = Story(request_id="one", exact=False).trace().spans
    document = json.loads(json_lines.encode_line(spans))
    for resource_spans in document["resourceSpans"]:
        for scope in resource_spans["scopeSpans"]:
            for span in scope["spans"]:
                if span["name"] == "prefill.compute":
                    span["startTimeUnixNano"] = 41_234_567_890_123
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(document))
    checked = invoke("check", "--from", path)
    assert checked.exit_code == 1
    assert "clock: one: prefill.compute runs from 41234567890123 to" in checked.stdout
    [request] = json.loads(invoke("why", "one", "--from", path, "--json").stdout)["requests"]
    assert 0.8e9 < request["total_ns"] < 0.9e9
    assert request["unexplained_ns"] == pytest.approx(120e6, abs=1e5)


@pytest.mark.parametrize(("columns", "width"), [("0", 100), ("x", 100), ("1", 31), ("60", 60)])
def test_odd_widths_still_show_text(
    recording: Path, monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = invoke("why", "--from", recording)
    assert result.exit_code == 0
    longest = max(map(len, result.stdout.splitlines()))
    assert width / 2 < longest <= width


def test_closed_standard_output_is_no_fault(recording: Path) -> None:
    command = f"{sys.executable} -m pdtrace stages >&-"
    finished = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("columns", [31, 39, 42, 52, 62, 72])
def test_numbers_are_whole_in_a_narrow_terminal(
    recording: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = invoke("why", "--from", recording).stdout
    assert max(map(len, text.splitlines())) <= columns
    table = text.partition("   stage ")[2]
    assert "…" not in table
    for stage in ("decode.reserve", "prefill.compute", "unexplained", "total"):
        assert re.search(rf"{re.escape(stage)} +[\d.]+ (s|ms|µs|ns)", table)
    checked = invoke("check", "--from", recording).stdout
    assert max(map(len, checked.splitlines())) <= columns
    assert re.search(r"unexplained .*1 +0", checked)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("why", "--help"), ("stages",)])
def test_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pdtrace", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            cwd=REPOSITORY,
        )
    assert done.stderr == "pdtrace: cannot write the output: No space left on device\n"
    assert done.returncode == 2


NOBODY = 65534


@pytest.fixture
def others_run() -> Iterator[Path]:
    """A run directory that is looked at as another user than root."""
    folder = Path(tempfile.mkdtemp(prefix="pdtrace-others-"))
    folder.chmod(0o755)
    run = folder / "run"
    recorders = open_recorders(run / "rings")
    record_request(recorders, request_id="ring-1")
    for recorder in recorders.values():
        recorder.close()
    (run / "traces").mkdir()
    (run / "traces" / "spans.jsonl").write_bytes(json_lines.encode_line(Story().trace().spans))
    for path in (run, *run.rglob("*")):
        path.chmod(0o755)
    for arguments in (["top", "--once"], ["why"], ["why", "nobody"], ["check"]):
        invoke(*arguments, "--from", run)  # imports what another user may not
    am_root = os.geteuid() == 0
    if am_root:
        os.seteuid(NOBODY)
    yield run
    if am_root:
        os.seteuid(0)
    for path in (run, run / "rings", run / "traces"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def close_to_others(path: Path) -> None:
    user = os.geteuid()
    if user == NOBODY:
        os.seteuid(0)
    path.chmod(0o000)
    os.seteuid(user)


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "named"),
    [
        (".", ["top", "--once"], 2, "run"),
        (".", ["why"], 2, "run"),
        (".", ["why", "--in-flight"], 2, "run"),
        (".", ["check"], 2, "run"),
        ("rings", ["top", "--once"], 2, "rings"),
        ("rings", ["why", "--in-flight"], 2, "rings"),
        ("rings", ["why", "nobody"], 2, "rings"),
        ("rings", ["why"], 0, ""),
        ("rings", ["check"], 1, "rings"),
        ("traces", ["why"], 2, "traces"),
        ("traces", ["check"], 2, "traces"),
    ],
)
def test_what_this_user_may_not_see_is_said_and_no_fault(
    others_run: Path, closed: str, arguments: list[str], code: int, named: str
) -> None:
    close_to_others(others_run / closed)
    result = invoke(*arguments, "--from", others_run)
    assert result.exit_code == code, result.output
    if code == 0:
        return
    text = " ".join((result.stderr + result.stdout).split())
    assert re.search(rf"{named}\S*: permission denied", text, re.IGNORECASE), text
    assert code == 1 or result.stderr.count("\n") == 1
