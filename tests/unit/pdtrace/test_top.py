"""What `pdtrace top` shows: the order, both widths, the loop, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from pdtrace.cli import app
from pdtrace.errors import LiveError
from pdtrace.inflight import Halt, InFlight, Look, ProcessNow, ProcessState, WaitNow
from pdtrace.recorder import Recorder
from pdtrace.stages import Role, WaitReason
from pdtrace.terminal.following import follow
from pdtrace.terminal.top import ordered, times_usual, top_document, top_view
from pdtrace.testing import open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]
AT_NS = 1_800_000_000_000_000_000


def request(name: str, stage: str | None = "decode.reserve", **fields: Any) -> InFlight:
    defaults: dict[str, Any] = {
        "trace_id": "1" * 32,
        "root_span_id": f"{crc32(name.encode()):016x}",
        "attempt": 1,
        "mode": "pd",
        "age_s": 12.3,
        "stage_age_s": 12.1,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }
    return InFlight(request_id=name, stage=stage, **{**defaults, **fields})


def process(instance: str, state: ProcessState = ProcessState.ALIVE, **fields: Any) -> ProcessNow:
    role = instance.partition("-")[0]
    given: dict[str, Any] = {"pid": 4532, **fields}
    return ProcessNow(role=role, instance=instance, host_id="h", state=state, **given)


LOOK = Look(
    at_ns=AT_NS,
    requests=(
        request("healthy", "decode.generate", stage_age_s=0.2, usual_s=0.4, worker="decode-0"),
        request(
            "req-9",
            usual_s=0.003,
            p99_s=0.004,
            stuck=True,
            attempt=2,
            worker="decode-0",
            wait=WaitNow(reason="kv_pages", needed=12, free=3, blockers=("req-7", "req-8")),
        ),
        request("new-stage", "prefill.queue", stage_age_s=3.0, wait=WaitNow(reason="novel")),
        request("lost", None, incomplete="decode-1: process_lost", decode_worker="decode-1"),
    ),
    processes=(
        process("gateway-0", progress_age_s=0.05, open_requests=4),
        process(
            "decode-0",
            ProcessState.STALLED,
            progress_age_s=11.8,
            open_requests=2,
            gauges={
                "kv_pages_total": 112,
                "kv_pages_free": 3,
                "recording_detail": 2,
            },
        ),
    ),
    problems=("x.ring is not a pdtrace ring",),
)


def shown(look: Look, width: int, **options: Any) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False, markup=False, emoji=False)
    console.print(top_view(look, source="run", width=width, **options))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


AT_80 = """\
4 requests in flight, 1 stuck · run · 08:00:00 UTC

   request    stage            in stage    usual  times  in all
!  req-9      decode.reserve     12.1 s  3.00 ms  4033x  12.3 s
    prefill-0 → decode-0 · try 2
    needed 12 KV pages, 3 free; behind req-7 and req-8
    decode-0 is stalled: no progress for 11.8 s.
   lost       ?                                          12.3 s
    prefill-0 → decode-1
    incomplete: decode-1: process_lost
   new-stage  prefill.queue      3.00 s                  12.3 s
    prefill-0 → decode-0
    waited for novel
   healthy    decode.generate    200 ms   400 ms   0.5x  12.3 s
    prefill-0 → decode-0
    decode-0 is stalled: no progress for 11.8 s.

process    state       progress  open
gateway-0  alive    50.0 ms ago     4
decode-0   stalled   11.8 s ago     2  KV 3 of 112 pages free · records at
                                       detail 2 of 3

Problems
  x.ring is not a pdtrace ring
"""

AT_140 = """\
4 requests in flight, 1 stuck · run · 08:00:00 UTC

   request    stage            in stage    usual  times  in all  try  workers
!  req-9      decode.reserve     12.1 s  3.00 ms  4033x  12.3 s  2    prefill-0 → decode-0
    needed 12 KV pages, 3 free; behind req-7 and req-8
    decode-0 is stalled: no progress for 11.8 s.
   lost       ?                                          12.3 s  1    prefill-0 → decode-1
    incomplete: decode-1: process_lost
   new-stage  prefill.queue      3.00 s                  12.3 s  1    prefill-0 → decode-0
    waited for novel
   healthy    decode.generate    200 ms   400 ms   0.5x  12.3 s  1    prefill-0 → decode-0
    decode-0 is stalled: no progress for 11.8 s.

process    state       progress  open   pid
gateway-0  alive    50.0 ms ago     4  4532
decode-0   stalled   11.8 s ago     2  4532  KV 3 of 112 pages free · records at detail 2 of 3

Problems
  x.ring is not a pdtrace ring
"""


@pytest.mark.parametrize(("width", "expected"), [(80, AT_80), (140, AT_140)])
def test_view_at_two_widths(width: int, expected: str) -> None:
    assert shown(LOOK, width) == expected


def test_view_in_ascii() -> None:
    text = shown(LOOK, 80, ascii_only=True)
    assert text.isascii()
    assert "prefill-0 > decode-0" in text


def test_long_ids_are_cut_so_that_numbers_stay() -> None:
    look = Look(at_ns=AT_NS, requests=(request("r" * 200, usual_s=0.1),))
    lines = shown(look, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"r+…  decode\.reserve +12\.1 s  100 ms +121x +12\.3 s$", lines[3])


def test_usual_time_that_the_ratio_does_not_reckon_with_is_not_shown() -> None:
    """12,100 times a floor of 1 ms beside `140 µs` reads as a mistake."""
    look = Look(at_ns=AT_NS, requests=(request("req-1", usual_s=0.00014),))
    assert re.search(r"decode\.reserve +12\.1 s +<1 ms +12100x ", shown(look, 80))
    exact = Look(at_ns=AT_NS, requests=(request("req-1", usual_s=0.001),))
    assert re.search(r"decode\.reserve +12\.1 s +1\.00 ms +12100x ", shown(exact, 80))


def test_forty_columns_keep_whole_numbers_and_show_gauges_below() -> None:
    text = shown(LOOK, 40)
    assert max(map(len, text.splitlines())) <= 40
    assert re.search(r"^! +req-9 +decode\.reserve +12\.1 s$", text, re.MULTILINE)
    assert "decode-0: KV 3 of 112 pages free" in text


def test_many_requests_are_counted_by_stage() -> None:
    look = Look(
        at_ns=AT_NS,
        requests=(
            *(request(f"q-{i}", "gateway.queue") for i in range(9)),
            *(request(f"r-{i}") for i in range(3)),
            request("answered", "gateway.finish", ended="completed"),
        ),
    )
    assert shown(look, 80, limit=2).splitlines()[1] == "9 in gateway.queue, 3 in decode.reserve"
    few = msgspec.structs.replace(look, requests=look.requests[7:11])
    assert "2 in gateway.queue" not in shown(few, 80)


def test_pause_inside_a_stage_is_named() -> None:
    wait = WaitNow(reason="kv_pages", stage="decode.preempted", needed=35, free=5, blockers=("b",))
    look = Look(at_ns=AT_NS, requests=(request("r", "decode.generate", wait=wait),))
    assert "decode.preempted: needed 35 KV pages, 5 free; behind b" in shown(look, 80)
    [document] = top_document(look, source="run")["requests"]
    assert document["waits_for"].startswith("decode.preempted: ")


def test_workers_that_nobody_can_be_sent_to_are_named() -> None:
    wait = WaitNow(reason=WaitReason.NO_WORKER, needed=1, free=0)
    queued = request(
        "r", "gateway.queue", worker="gateway-0", prefill_worker=None, decode_worker=None, wait=wait
    )
    processes = (
        process("gateway-0"),
        process("prefill-0"),
        process("decode-0", ProcessState.STALLED, progress_age_s=4.4),
    )
    text = shown(Look(at_ns=AT_NS, requests=(queued,), processes=processes), 80)
    assert "decode-0 is stalled: no progress for 4.40 s." in text
    assert text.count("is stalled") == 1


def test_prompt_that_a_stalled_worker_is_in_is_named_to_those_behind_it() -> None:
    requests = (
        request("victim", "decode.generate", worker="worker-0"),
        request("culprit", "prefill.compute", worker="worker-0", stage_age_s=6.3),
        request("elsewhere", "prefill.compute", worker="worker-1"),
    )
    processes = (process("worker-0", ProcessState.STALLED, progress_age_s=6.3),)
    text = shown(Look(at_ns=AT_NS, requests=requests, processes=processes), 80)
    assert text.count("worker-0 is stalled: no progress for 6.30 s, in the prompt of culprit.") == 2


@pytest.mark.parametrize(
    ("halt", "words"),
    [
        (Halt.STOPPED, "is stopped by a signal (SIGSTOP): no progress for 6.30 s."),
        (Halt.TRACED, "is held by a debugger: no progress for 6.30 s."),
        (Halt.IN_KERNEL, "is stalled in the kernel (state D: a disk or a device): no progress"),
    ],
)
def test_process_that_the_kernel_holds_is_said_to_be_held_and_blames_no_prompt(
    halt: Halt, words: str
) -> None:
    requests = (
        request("victim", "decode.generate", worker="worker-0"),
        request("innocent", "prefill.compute", worker="worker-0", stage_age_s=6.3),
    )
    held = process("worker-0", ProcessState.STALLED, progress_age_s=6.3)
    held = msgspec.structs.replace(held, halt=halt)
    look = Look(at_ns=AT_NS, requests=requests, processes=(held,))
    text = shown(look, 120)
    assert text.count(f"worker-0 (pid {held.pid}) {words}") == 2
    assert "in the prompt of" not in text
    assert re.search(rf"^worker-0 +{halt} ", text, re.MULTILINE)
    [told] = top_document(look, source="run")["processes"]
    assert (told["state"], told["halt"]) == ("stalled", halt.value)


def test_stage_that_nobody_took_up_names_who_could_but_cannot_go_on() -> None:
    copied = request("r", "transfer", worker=None)
    processes = (
        process("transfer-0"),
        process("transfer-1", ProcessState.STALLED, progress_age_s=4.4),
        process("decode-0", ProcessState.STALLED, progress_age_s=4.4),
    )
    text = shown(Look(at_ns=AT_NS, requests=(copied,), processes=processes), 80)
    assert "transfer-1 is stalled" in text
    assert "decode-0 is stalled" not in text


def test_nothing_is_said_of_what_is_in_flight_where_no_ring_could_be_read() -> None:
    look = Look(at_ns=AT_NS, problems=("x.ring has ring format 255",))
    assert shown(look, 80).splitlines()[0] == "What is in flight cannot be told."


def test_order_is_by_times_usual_then_by_age_then_the_rest() -> None:
    requests = [
        request("stuck-unknown", stage_age_s=50.0, stuck=True),
        request("on-time", usual_s=20.0),
        request("twice", usual_s=6.0),
        request("many-times", usual_s=0.001),
        request("old-unknown", stage_age_s=90.0),
        request("young-unknown", stage_age_s=1.0),
        request("answered", usual_s=0.001, ended="completed"),
    ]
    assert [r.request_id for r in ordered(requests)] == [
        "stuck-unknown",
        "many-times",
        "twice",
        "old-unknown",
        "young-unknown",
        "on-time",
        "answered",
    ]
    assert [r.request_id for r in ordered(requests, "prefill.queue")] == []


def test_microsecond_stages_do_not_outrank_by_a_usual_time_of_nothing() -> None:
    hop = request("hop", "hop.dispatch", stage_age_s=0.002, usual_s=1e-6)
    assert times_usual(hop) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("processes", "line"),
    [
        ((), "No request is in flight: no process has recorded anything yet."),
        (
            (process("gateway-0"), process("decode-0"), process("decode-1", ProcessState.LOST)),
            "No request is in flight: gateway-0 and decode-0 are alive, decode-1 is lost.",
        ),
        (
            (
                process("gateway-0", ProcessState.LOST, pid=7),
                process("gateway-0", pid=8),
                process("decode-0"),
            ),
            "No request is in flight: gateway-0 (pid 8) and decode-0 are alive, "
            "gateway-0 (pid 7) is lost.",
        ),
    ],
)
def test_idle_server_says_so_in_one_line(processes: tuple[ProcessNow, ...], line: str) -> None:
    text = shown(Look(at_ns=AT_NS, processes=processes), 100)
    assert text.splitlines()[0] == line


@pytest.mark.parametrize("width", [40, 80, 140])
def test_process_and_the_one_in_whose_place_it_is_are_told_apart(width: int) -> None:
    gauges = {"kv_pages_total": 9, "kv_pages_free": 9}
    processes = (
        process("decode-0", ProcessState.LOST, pid=11, gauges=gauges),
        process("decode-0", pid=22, gauges=gauges),
        process("prefill-0", pid=33, gauges=gauges),
    )
    text = shown(Look(at_ns=AT_NS, processes=processes), width)
    assert "11" in text and "22" in text
    assert ("decode-0 (pid 22)" in text.split("\n\n", 1)[1]) is (width < 140)
    assert "prefill-0 (pid" not in text


@pytest.mark.parametrize(("copies", "told"), [(1, "1 copy waiting"), (2, "2 copies waiting")])
def test_copies_that_wait_are_counted_in_words_that_fit(copies: int, told: str) -> None:
    gauges = {"copy_jobs_waiting": copies}
    look = Look(at_ns=AT_NS, processes=(process("transfer-0", gauges=gauges),))
    assert told in shown(look, 100)


def test_limit_and_height_leave_out_the_least_urgent() -> None:
    look = Look(at_ns=AT_NS, requests=tuple(request(f"r-{i}", usual_s=i + 1) for i in range(9)))
    text = shown(look, 140, limit=2)
    assert "r-0" in text
    assert "… and 7 more" in text
    assert len(shown(look, 80, height=14).splitlines()) <= 14
    assert "more" in shown(look, 80, height=14)


def test_texts_of_others_cannot_steer_the_terminal() -> None:
    look = Look(
        at_ns=AT_NS,
        requests=(request("a\x1b[2Jb", wait=WaitNow(reason="kv_pages", blockers=("\x1b]0;x",))),),
        problems=("\x07",),
    )
    assert "\x1b" not in shown(look, 100)
    assert "\x07" not in shown(look, 100)


def test_document_is_complete_and_plain() -> None:
    document = json.loads(json.dumps(top_document(LOOK, source="run", limit=1)))
    assert document["schema"] == "pdtrace.top/1"
    assert (document["in_flight"], len(document["requests"])) == (4, 1)
    [first] = document["requests"]
    assert first["request_id"] == "req-9"
    assert first["wait"]["blockers"] == ["req-7", "req-8"]
    assert first["waits_for"] == "needed 12 KV pages, 3 free; behind req-7 and req-8"
    assert first["times_usual"] == pytest.approx(4033.3, rel=1e-3)
    assert [p["state"] for p in document["processes"]] == ["alive", "stalled"]
    assert document["problems"] == ["x.ring is not a pdtrace ring"]


class Scripted:
    """Looks in order; a text stands for an error. Interrupts after the last."""

    name = "script"

    def __init__(self, *looks: Look | str) -> None:
        self._looks = list(looks)

    def look(self) -> Look:
        if not self._looks:
            raise KeyboardInterrupt
        look = self._looks.pop(0)
        if isinstance(look, str):
            raise LiveError(look)
        return look

    def close(self) -> None:
        pass


def followed(*looks: Look | str, as_json: bool = False) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, highlight=False, markup=False, emoji=False)
    with pytest.raises(KeyboardInterrupt):
        follow(
            Scripted(*looks),
            console,
            stage=None,
            limit=20,
            interval_s=9,
            as_json=as_json,
            ascii_only=False,
            sleep=lambda _: None,
        )
    return buffer.getvalue()


def test_source_that_stops_answering_is_a_problem_under_the_last_look() -> None:
    text = followed(LOOK, "agent gone", LOOK)
    assert text.count("req-9") == 3
    assert text.count("agent gone") == 1
    assert "\x1b" not in text


def test_source_that_never_answered_is_an_error() -> None:
    console = Console(file=io.StringIO())
    options: dict[str, Any] = {"stage": None, "limit": 1, "interval_s": 1}
    with pytest.raises(LiveError, match="nobody"):
        follow(Scripted("nobody"), console, **options, as_json=False, ascii_only=False)


def test_following_as_json_is_one_line_per_look(capsys: pytest.CaptureFixture[str]) -> None:
    followed(LOOK, msgspec.structs.replace(LOOK, requests=()), as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["requests"]) for line in lines] == [4, 0]


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    roles = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)
    recorders: Mapping[Role, Recorder] = open_recorders(tmp_path / "rings", roles=roles)
    record_request(recorders, request_id="done")
    record_request(
        recorders,
        request_id="held",
        stop_in="decode.reserve",
        outcome=None,
        start_ns=time.monotonic_ns() - 20 * 10**9,
        waits={"decode.reserve": {"reason": WaitReason.KV_PAGES, "needed": 4, "free": 0}},
    )
    yield tmp_path
    for recorder in recorders.values():
        recorder.close()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_once_shows_the_run(run: Path) -> None:
    result = invoke("top", "--once", "--from", run)
    assert result.exit_code == 0
    assert result.stdout.startswith("1 request in flight, 1 stuck")
    assert "needed 4 KV pages, 0 free" in result.stdout
    assert "\x1b" not in result.stdout


def test_json_holds_all_unless_limited(run: Path) -> None:
    roles = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)
    recorders = open_recorders(run / "rings", roles=roles)
    for index in range(30):
        record_request(recorders, request_id=f"r-{index}", stop_in="gateway.queue", outcome=None)
    whole = json.loads(invoke("top", "--once", "--json", "--from", run).stdout)
    assert len(whole["requests"]) == whole["in_flight"] == 31
    few = json.loads(invoke("top", "--once", "--json", "--limit", "3", "--from", run).stdout)
    assert (len(few["requests"]), few["in_flight"]) == (3, 31)
    assert "… and 11 more" in invoke("top", "--once", "--from", run).stdout
    for recorder in recorders.values():
        recorder.close()


def test_once_as_json_is_one_object(run: Path) -> None:
    document = json.loads(invoke("top", "--once", "--json", "--from", run).stdout)
    assert [r["stage"] for r in document["requests"]] == ["decode.reserve"]
    elsewhere = invoke("top", "--once", "--json", "--stage", "prefill.queue", "--from", run)
    assert json.loads(elsewhere.stdout)["requests"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--from", "/nothing/here"),
            "no such directory; give a run directory, or http://HOST:PORT of an agent",
        ),
        (("--stage", "nonsense"), "'nonsense' is no stage; `pdtrace stages` lists them"),
        (("--from", "http://127.0.0.1:1"), "Connection refused"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("top", "--once", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_interrupt_ends_a_terminal_cleanly(run: Path) -> None:
    """In a terminal of its own: drawn in place; after Ctrl-C exit code 0, and the cursor back."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pdtrace", "top", "--from", str(run), "--interval", "0.1"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONUTF8": "1"},
    )
    os.close(theirs)
    seen = b""

    def read(seconds: float) -> bool:
        nonlocal seen
        if not select.select([terminal], [], [], seconds)[0]:
            return True
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            return False
        seen += data
        return bool(data)

    deadline = time.monotonic() + 60
    while seen.count(b"held") < 3:
        assert time.monotonic() < deadline, seen.decode()
        read(0.1)
    process.send_signal(signal.SIGINT)
    while read(0.1) and time.monotonic() < deadline:
        pass
    assert process.wait(timeout=60) == 0
    os.close(terminal)
    assert b"Traceback" not in seen
    assert b"\x1b[?25l" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_following_into_a_pipe_ends_with_its_reader(run: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "pdtrace", "top", "--from", str(run), "--interval", "0.05"]
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"held" in process.stdout.readline() + process.stdout.read(400)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


def test_interrupted_pipe_is_exit_code_0(run: Path) -> None:
    command = [sys.executable, "-m", "pdtrace", "top", "--from", str(run), "--interval", "0.05"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


def test_every_json_key_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    document = top_document(LOOK, source="run")
    keys = set(document) | set(document["requests"][0]) | set(document["processes"][0])
    keys |= set(document["requests"][0]["wait"])
    assert {key for key in keys if f"`{key}`" not in page} == set()
