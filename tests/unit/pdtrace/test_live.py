"""Looks at what is in flight: on real rings without an agent, and at an agent's address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from pdtrace.errors import LiveError
from pdtrace.inflight import Halt, InFlight, Look, ProcessNow, ProcessState, WaitNow
from pdtrace.live import looks as live_looks
from pdtrace.live.looks import AgentLooks, RingLooks
from pdtrace.live.process_view import HALTED_AFTER_S
from pdtrace.live.run_looks import open_looks
from pdtrace.otlp import json_lines
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.ring import RingCapacity, RingReader, scan_rings
from pdtrace.stages import CHAINS, Gauge, Mark, Mode, Outcome, Role, WaitReason
from pdtrace.testing import Wait, open_recorders, record_request
from tests.support.pd_traces import Story

ROOT = Path(__file__).resolve().parents[3]
ROLES = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)
FULL: Wait = {
    "reason": WaitReason.KV_PAGES,
    "needed": 12,
    "free": 3,
    "blocker": ["req-7", "req-8"],
}


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings", roles=ROLES)
    yield opened
    for recorder in opened.values():
        recorder.close()


@pytest.fixture
def looks(tmp_path: Path) -> Iterator[RingLooks]:
    (tmp_path / "rings").mkdir(exist_ok=True)
    source = RingLooks(tmp_path)
    yield source
    source.close()


def ago(seconds: float) -> int:
    return time.monotonic_ns() - round(seconds * 1e9)


def by_name(look: Look) -> dict[str, ProcessNow]:
    return {process.instance: process for process in look.processes}


def wait_for(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("mode", [Mode.PD, Mode.PD_EARLY])
def test_request_in_flight_is_seen_with_its_stage_age_and_wait(
    recorders: Mapping[Role, Recorder], looks: RingLooks, mode: Mode
) -> None:
    for index in range(25):
        record_request(recorders, request_id=f"done-{index}", mode=mode, start_ns=ago(60 - index))
    record_request(
        recorders,
        request_id="req-9",
        mode=mode,
        start_ns=ago(12.3),
        stop_in="decode.reserve",
        outcome=None,
        waits={"decode.reserve": FULL},
    )
    look = looks.look()
    [request] = look.requests
    assert (request.request_id, request.stage, request.attempt) == ("req-9", "decode.reserve", 1)
    assert 12.2 < request.stage_age_s < request.age_s < 60
    assert request.usual_s == pytest.approx(0.0004)
    assert request.p99_s == pytest.approx(0.0004)
    assert request.stuck
    assert request.incomplete is None
    assert request.wait is not None
    assert (request.wait.reason, request.wait.needed, request.wait.free) == ("kv_pages", 12, 3)
    assert request.wait.blockers == ("req-7", "req-8")
    assert (request.prefill_worker, request.decode_worker) == ("prefill-0", "decode-0")
    assert look.problems == ()
    processes = by_name(look)
    assert {name: p.state for name, p in processes.items()} == dict.fromkeys(
        ("gateway-0", "prefill-0", "transfer-0", "decode-0"), ProcessState.ALIVE
    )
    assert (processes["decode-0"].open_requests, processes["transfer-0"].open_requests) == (1, 0)


@pytest.mark.parametrize("stage", [s.name for s in CHAINS[Mode.PD]])
def test_every_stage_is_seen_while_it_lasts(
    recorders: Mapping[Role, Recorder], looks: RingLooks, stage: str
) -> None:
    record_request(recorders, stop_in=stage, outcome=None, start_ns=ago(30))
    [request] = looks.look().requests
    assert request.stage == stage


def test_usual_times_come_from_traces_when_the_rings_are_fresh(
    tmp_path: Path, recorders: Mapping[Role, Recorder], looks: RingLooks
) -> None:
    (tmp_path / "traces").mkdir()
    lines = [
        json_lines.encode_line(Story(request_id=f"r-{index}", start_s=index).trace().spans)
        for index in range(30)
    ]
    torn = lines[0][: len(lines[0]) // 2]
    (tmp_path / "traces" / "spans-000002.jsonl").write_bytes(b"".join(lines) + torn)
    (tmp_path / "traces" / "spans-000001.jsonl").write_text("not read")
    record_request(recorders, stop_in="prefill.compute", outcome=None, start_ns=ago(5))
    [request] = looks.look().requests
    assert request.usual_s == pytest.approx(0.120, rel=0.01)


def test_later_looks_read_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch, recorders: Mapping[Role, Recorder], looks: RingLooks
) -> None:
    opened: list[str] = []
    read: list[int] = []

    class Counting(RingReader):
        def __init__(self, path: str | Path) -> None:
            opened.append(Path(path).name)
            super().__init__(path)

        def read(
            self, *, limit: int = 65536, final: bool = False, losses: bool = False
        ) -> list[live_looks.Record]:
            records = super().read(limit=limit, final=final, losses=losses)
            read.append(len(records))
            return records

    monkeypatch.setattr(live_looks, "RingReader", Counting)
    for index in range(20):
        record_request(recorders, request_id=f"done-{index}")
    looks.look()
    first = sum(read)
    assert (len(opened), first > 400) == (4, True)
    read.clear()
    looks.look()
    assert (len(opened), sum(read)) == (4, 0)
    record_request(recorders, request_id="new", stop_in="prefill.queue", outcome=None)
    assert [request.request_id for request in looks.look().requests] == ["new"]
    assert len(opened) == 4
    assert 0 < sum(read) < 20


def test_request_leaves_when_it_ends_and_processes_when_they_close(
    recorders: Mapping[Role, Recorder], looks: RingLooks
) -> None:
    record_request(recorders, stop_in="decode.queue", outcome=None)
    assert len(looks.look().requests) == 1
    for recorder in recorders.values():
        recorder.close()
    look = looks.look()
    assert look.requests == ()
    assert {process.state for process in look.processes} == {ProcessState.CLOSED}


def test_rings_that_cannot_be_read_are_named_and_the_others_count(
    tmp_path: Path, recorders: Mapping[Role, Recorder], looks: RingLooks
) -> None:
    record_request(recorders, stop_in="prefill.queue", outcome=None)
    whole = scan_rings(tmp_path / "rings")[0].read_bytes()
    rings = tmp_path / "rings"
    (rings / "foreign.ring").write_bytes(b"something else entirely")
    (rings / "cut.ring").write_bytes(whole[: len(whole) // 2])
    (rings / "other.ring").write_bytes(whole[:8] + (99).to_bytes(4, "little") + whole[12:])
    look = looks.look()
    assert len(look.requests) == 1
    cut, foreign, other = look.problems
    assert "cut.ring holds" in cut
    assert "foreign.ring is not a pdtrace ring" in foreign
    assert "other.ring has ring format 99" in other
    assert looks.look().problems == look.problems


def test_torn_records_are_told(tmp_path: Path, looks: RingLooks) -> None:
    recorders = open_recorders(tmp_path / "rings", roles=ROLES)
    record_request(recorders, request_id="torn")
    for recorder in recorders.values():
        recorder.close()
    path = next(p for p in scan_rings(tmp_path / "rings") if p.name.startswith("decode"))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"length")  # the text in DECODE_FINISHED
    data[at] ^= 0xFF
    path.write_bytes(data)
    assert looks.look().problems == ("1 record of decode-0 torn",)


def test_request_older_than_its_ring_says_so(tmp_path: Path) -> None:
    small = RingCapacity(blocks=4, block_bytes=4096)
    recorders = {
        role: Recorder.open(
            tmp_path / "rings", role=role, instance=f"{role.value}-0", capacity=small
        )
        for role in ROLES
    }
    record_request(recorders, request_id="old", stop_in="decode.generate", outcome=None)
    for index in range(60):
        record_request(recorders, request_id=f"r-{index}")
    looks = RingLooks(tmp_path)
    [request] = looks.look().requests
    assert request.request_id == "old"
    assert request.incomplete is not None
    assert "its first records were overwritten" in request.incomplete
    assert looks.look().problems == ()  # nobody was there to read them: that is no loss
    for index in range(60):
        record_request(recorders, request_id=f"s-{index}")
    problems = looks.look().problems
    assert any("records faster than they were read here" in problem for problem in problems)
    looks.close()
    for recorder in recorders.values():
        recorder.close()


def test_requests_that_were_overwritten_between_two_looks_are_shown_as_incomplete(
    tmp_path: Path,
) -> None:
    tiny = RingCapacity(blocks=4, block_bytes=4096)
    recorders = open_recorders(tmp_path / "rings", roles=ROLES[1:])
    recorders |= open_recorders(tmp_path / "rings", roles=[Role.GATEWAY], capacity=tiny)
    looks = RingLooks(tmp_path)
    gateway = recorders[Role.GATEWAY]
    traces = {
        name: gateway.begin(RequestContext.create(request_id=name)) for name in ("ends", "alive")
    }
    for trace in traces.values():
        trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    assert [request.request_id for request in looks.look().requests] == ["ends", "alive"]
    unheard = RequestContext.create(request_id="unheard")
    with gateway.begin(unheard):
        pass
    recorders[Role.DECODE].begin(unheard).mark(Mark.RESERVE_RECEIVED)
    traces["ends"].mark(Mark.COMPLETED, Outcome.COMPLETED, None, None, 200)
    traces["ends"].end()
    for number in range(100):
        record_request(recorders, request_id=f"req-{number}")
    look = looks.look()
    [problem] = look.problems
    count = problem.split()[2]
    assert {request.request_id: request.incomplete for request in look.requests} == {
        "alive": f"gateway-0 lost {count} records",
        "unheard": f"gateway-0 lost {count} records",
    }
    looks.close()
    for recorder in recorders.values():
        recorder.close()


WORKER = textwrap.dedent(
    """
    import sys, time
    from pdtrace import Recorder, Role
    from pdtrace.stages import Gauge
    from pdtrace.testing import open_recorders, record_request
    recorders = open_recorders(sys.argv[1], roles=[Role.GATEWAY, Role.PREFILL, Role.TRANSFER])
    decode = open_recorders(sys.argv[1], roles=[Role.DECODE])[Role.DECODE]
    for index in range(6):
        record_request({**recorders, Role.DECODE: decode}, request_id=f"done-{index}")
    record_request({**recorders, Role.DECODE: decode}, request_id="held",
                   stop_in="decode.generate", outcome=None)
    print("ready", flush=True)
    while True:
        for recorder in (*recorders.values(), decode):
            recorder.gauge(Gauge.LAST_PROGRESS_NS, time.monotonic_ns())
        time.sleep(0.02)
    """
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path / "rings")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()


def test_stopped_process_is_stalled_and_its_request_stays_in_view(
    worker: subprocess.Popen[str], looks: RingLooks
) -> None:
    wait_for(lambda: by_name(looks.look())["decode-0"].state is ProcessState.ALIVE)
    os.kill(worker.pid, signal.SIGSTOP)
    wait_for(lambda: by_name(looks.look())["decode-0"].state is ProcessState.STALLED)
    look = looks.look()
    process = by_name(look)["decode-0"]
    assert process.progress_age_s is not None
    assert process.progress_age_s > HALTED_AFTER_S
    assert process.halt is Halt.STOPPED
    [request] = look.requests
    assert (request.request_id, request.stage) == ("held", "decode.generate")
    age_s = request.stage_age_s
    wait_for(lambda: looks.look().requests[0].stage_age_s > age_s)  # it ages all the same
    os.kill(worker.pid, signal.SIGCONT)
    wait_for(lambda: by_name(looks.look())["decode-0"].state is ProcessState.ALIVE)


def test_killed_process_is_lost_and_so_is_its_request(
    tmp_path: Path, worker: subprocess.Popen[str]
) -> None:
    following = RingLooks(tmp_path, keep=True)
    assert len(following.look().requests) == 1
    worker.kill()
    worker.wait(timeout=30)
    for source in (following, RingLooks(tmp_path, keep=True)):
        wait_for(lambda source=source: source.look().requests == ())
        processes = by_name(source.look())
        assert processes["decode-0"].state is ProcessState.LOST
        assert processes["decode-0"].open_requests == 1
        lost = [request for request in source.kept() if request.request_id == "held"]
        assert [leg.lost_reason for leg in lost[0].legs if leg.lost_at_ns] == ["process_lost"] * 4
        source.close()


def test_process_that_came_back_is_shown_once(tmp_path: Path, looks: RingLooks) -> None:
    for _ in range(2):
        with Recorder.open(tmp_path / "rings", role=Role.PREFILL, instance="prefill-0") as recorder:
            recorder.gauge(Gauge.RUNNING, 3)
    with Recorder.open(tmp_path / "rings", role=Role.PREFILL, instance="prefill-0"):
        [process] = looks.look().processes
        assert process.state is ProcessState.ALIVE
        assert "running" not in process.gauges


def test_newest_run_of_a_folder_and_a_folder_of_rings_are_sources(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    recorders = open_recorders(run / "rings", roles=ROLES)
    record_request(recorders, stop_in="prefill.queue", outcome=None)
    (tmp_path / "runs" / "latest").symlink_to("one")
    for source in (tmp_path / "runs", run, run / "rings"):
        looks = open_looks(source)
        assert len(looks.look().requests) == 1
        shown = run if source == tmp_path / "runs" else source
        assert looks.name == str(shown), "which run it is"
        looks.close()
    for recorder in recorders.values():
        recorder.close()


def test_request_that_crosses_hosts_is_one_request(tmp_path: Path) -> None:
    here = open_recorders(tmp_path / "a" / "rings", roles=ROLES[:2])
    there = open_recorders(tmp_path / "b" / "rings", roles=ROLES[2:])
    record_request({**here, **there}, stop_in="decode.generate", outcome=None)
    looks = open_looks(tmp_path / "a", tmp_path / "b")
    [request] = looks.look().requests
    assert (request.stage, request.incomplete) == ("decode.generate", None)
    looks.close()
    for recorder in (*here.values(), *there.values()):
        recorder.close()
    with pytest.raises(LiveError, match="give one agent's address, or run directories"):
        open_looks(tmp_path, "http://127.0.0.1:1")


def test_no_directory_is_an_error_and_no_rings_a_problem(tmp_path: Path) -> None:
    with pytest.raises(LiveError, match="no such directory; give a run directory, or http"):
        open_looks(tmp_path / "nothing")
    assert open_looks(tmp_path).look().problems == (f"no ring in {tmp_path} yet",)


# -- an agent's address --------------------------------------------------------------------------

LOOK = Look(
    at_ns=1_800_000_000_000_000_000,
    requests=(
        InFlight(
            request_id="req-1",
            trace_id="0" * 31 + "1",
            root_span_id="0" * 15 + "1",
            attempt=2,
            mode="pd",
            age_s=3.0,
            stage="decode.reserve",
            stage_age_s=2.0,
            wait=WaitNow(reason="kv_pages", blockers=("req-0",)),
        ),
    ),
    problems=("something",),
)


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """Starts an endpoint that answers /inflight so; returns its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/inflight"
                self.send_response(status if found else 404)
                self.end_headers()
                self.wfile.write(body if found else b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_agent_is_asked(answering: Callable[[int, bytes], str]) -> None:
    url = answering(200, msgspec.json.encode(LOOK))
    for address in (url, f"{url}/", f"{url}/inflight"):
        assert open_looks(address).look() == LOOK


def test_fields_of_a_later_version_are_passed_over(
    answering: Callable[[int, bytes], str],
) -> None:
    document = {**msgspec.to_builtins(LOOK), "version": 7, "mood": "good"}
    assert AgentLooks(answering(200, msgspec.json.encode(document))).look().requests


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ({"at_ns": "x"}, "at_ns"),
        ({"at_ns": -1}, "at_ns"),
        ({"at_ns": 10**30}, "at_ns"),
        ({"at_ns": 1, "lag_s": 1e300}, "lag_s"),
        ({"at_ns": 1, "requests": [{}]}, "requests"),
        ({"at_ns": 1, "processes": [{"state": "x" * 5_000}]}, "Invalid enum value"),
    ],
)
def test_look_that_could_not_be_shown_is_none(
    answering: Callable[[int, bytes], str], document: dict[str, object], where: str
) -> None:
    url = answering(200, msgspec.json.encode(document))
    with pytest.raises(LiveError) as error:
        AgentLooks(url).look()
    message = str(error.value)
    assert message.startswith(f"{url}: answers, but not as an agent does (")
    assert where in message
    assert message.endswith("; is it an agent?")
    assert len(message) < 400


def test_refused_and_silent_addresses_say_what_tells_without_an_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LiveError, match=r"no answer within 0\.2 s; the rings tell without"):
            AgentLooks(url, timeout_s=0.2).look()
    with pytest.raises(LiveError, match="Connection refused: no agent listens there") as refused:
        AgentLooks(url).look()
    assert "?limit=" not in str(refused.value)
    with pytest.raises(LiveError, match="give http://HOST:PORT"):
        open_looks("ftp://127.0.0.1/")


def test_no_proxy_knows_an_agent(
    answering: Callable[[int, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", answering(200, msgspec.json.encode(LOOK)))
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(LiveError, match=r"^http://192\.0\.2\.1"):
        AgentLooks("http://192.0.2.1", timeout_s=0.2).look()
