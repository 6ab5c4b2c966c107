"""Processes of a running server that die, hang, stop and come back; the server goes on.

One server for the module, in a directory whose path is too long for a socket. Every test leaves it
whole: all processes ready, a request served with the text that it always had.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pdtrace import semconv as a
from pdtrace.stages import Outcome
from server.config import ProcessConfig, Settings
from server.injection.fault import Pause
from server.rundir import RunDir
from server.wire.endpoints import MAX_PATH_BYTES, EndpointDirectory
from server.wire.messages import InjectFaults
from server.wire.sockets import Outbox
from tests.integration.conftest import FAST_FAKE
from tests.support.aftermath import assert_recorded, assert_recovered
from tests.support.completions import Answer, Ask, ask, ask_all
from tests.support.own_server import OwnServer, own_server
from tests.support.recorded import (
    in_flight,
    is_root,
    requests_in_flight,
    spans_of,
    wait_for,
)
from tests.support.server import ROOT, RunningServer, is_running, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

INSTANCES = ("prefill-0", "decode-0", "transfer-0", "gateway-0", "agent")
PROBE = Ask(prompt="is all well?", max_tokens=12)
LONG = 8000
"""Tokens of an answer that does not end while a test runs."""
LINGERS = {"decode.generate": 2000}
"""A fault that keeps a request in sight of a test until that has looked, and its answer whole."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    parent = tmp_path_factory.mktemp("long")
    parent = parent / ("läßt-ÿ-多" * 12)  # more bytes than characters
    parent.mkdir()
    options = ("--decode", "2", "--prefill", "2", "--allow-faults")
    with running_server(parent / "run", *options, model=FAST_FAKE) as server:
        yield server
        sockets = {Path(p["endpoint"].removeprefix("ipc://")) for p in server.state["processes"]}
        assert server.stop() == 0
        assert not [path for path in sockets if path.parent.exists()]
        assert "Traceback" not in server.stderr


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> str:
    """The probe's text before anything happened."""
    answer = ask(server, PROBE)
    assert answer.status == 200
    return answer.text


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test all is as before it."""
    yield
    if "server" in request.fixturenames:
        server: RunningServer = request.getfixturevalue("server")
        wait_for(lambda: is_healthy(server), "a healthy server")
        serves_again(server, request.getfixturevalue("expected"))


def is_healthy(server: RunningServer) -> bool:
    with server.client() as client:
        return client.get("/health").status_code == 200


def serves_again(server: RunningServer, expected: str) -> None:
    """Wait until a request is served, and then more in a row, with the right text."""
    wait_for(lambda: try_to_ask(server, PROBE) is not None, "an answer")
    for _ in range(4):
        answer = ask(server, PROBE)
        assert (answer.status, answer.text) == (200, expected)


def try_to_ask(server: RunningServer, request: Ask) -> Answer | None:
    """The answer, None when there is no whole one."""
    try:
        answer = ask(server, request)
    except httpx.TransportError:  # the gateway went away meanwhile
        return None
    return answer if answer.status == 200 and answer.finish_reason else None


def ends_properly(server: RunningServer, request: Ask) -> str:
    """How a request ended for its client: completed, failed (said so), or broken off."""
    try:
        answer = ask(server, request)  # for streams it checks that [DONE] is the last event
    except httpx.TransportError:
        return "broken off"
    if answer.status == 200 and answer.finish_reason is not None:
        return "completed"
    body: Any = answer.body if answer.status != 200 else answer.body[-1]
    assert body["error"]["message"], body
    return "failed"


def held_on(server: RunningServer, request_id: str) -> str:
    """Instance in whose hands a request is generated."""
    found: list[str] = []

    def is_generating() -> bool:
        request = in_flight(server, request_id)
        if request is not None and request["stage"] == "decode.generate":
            found.append(str(request["worker"]))
        return bool(found)

    wait_for(is_generating, f"{request_id} being generated")
    return found[0]


@pytest.mark.case("FAIL-13")
def test_directory_whose_path_is_too_long_for_sockets_serves(
    server: RunningServer, expected: str
) -> None:
    assert len(os.fsencode(server.run_dir)) > MAX_PATH_BYTES
    assert len(str(server.run_dir)) > 120
    for process in server.state["processes"]:
        path = Path(process["endpoint"].removeprefix("ipc://"))
        assert len(os.fsencode(path)) <= MAX_PATH_BYTES
    assert expected


@pytest.mark.case("FAIL-03")
@pytest.mark.case("XFER-08")
@pytest.mark.parametrize("instance", INSTANCES)
def test_killed_process_is_replaced_at_its_address_and_all_goes_on(
    server: RunningServer, expected: str, instance: str
) -> None:
    """The gateway keeps the list of workers, the transfer process that of pools: both are told
    anew by workers that nobody touched."""
    before = {name: server.process_of(name) for name in (*INSTANCES, "prefill-1", "decode-1")}
    pid = server.send_signal(instance, signal.SIGKILL)
    server.wait_for_successor(instance, pid)
    serves_again(server, expected)
    after = server.process_of(instance)
    assert after["endpoint"] == before[instance]["endpoint"]
    assert after["incarnation"] != before[instance]["incarnation"]
    assert after["restarts"] == before[instance]["restarts"] + 1
    assert after["last_exit"] == "was killed by SIGKILL"
    others = [name for name in before if name != instance]
    assert [server.pid(name) for name in others] == [before[name]["pid"] for name in others]
    assert f"{instance} (pid {pid}) was killed by SIGKILL; it is started again" in server.stderr


def test_request_that_comes_while_everybody_is_dead_is_served(
    server: RunningServer, expected: str
) -> None:
    """It waits in the backlog for a gateway, and there for a pair."""
    names = (*INSTANCES, "prefill-1", "decode-1")
    pids = {name: server.send_signal(name, signal.SIGKILL) for name in names}
    wait_for(lambda: not any(is_running(pid) for pid in pids.values()), "their end")
    answer = ask(server, PROBE)
    assert (answer.status, answer.text) == (200, expected)
    for name, pid in pids.items():
        server.wait_for_successor(name, pid)


def test_requests_of_other_workers_are_untouched_by_a_death(
    server: RunningServer, expected: str
) -> None:
    wanted = Ask(
        prompt="go on", max_tokens=400, stream=True, request_id="untouched", faults=LINGERS
    )
    alone = ask(server, Ask(prompt="go on", max_tokens=400))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, wanted)
        holder = held_on(server, "untouched")
        other = "decode-1" if holder == "decode-0" else "decode-0"
        pid = server.send_signal(other, signal.SIGKILL)
        assert (answer.result().status, answer.result().text) == (200, alone.text)
    server.wait_for_successor(other, pid)


@pytest.mark.case("FAIL-05")
@pytest.mark.parametrize("instance", INSTANCES)
def test_process_told_to_stop_drains_exits_with_0_and_is_replaced(
    server: RunningServer, expected: str, instance: str
) -> None:
    """Idle and at work; in neither case anybody waits for ever, or is cut off without a word."""
    asked = [Ask(prompt=f"{n}" * 30, max_tokens=150, stream=n % 2 == 0) for n in range(5)]
    asked.append(Ask(prompt="lingers", max_tokens=150, faults=LINGERS))
    for requests in ([], asked):
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(ends_properly, server, request) for request in requests]
            if requests:
                wait_for(lambda: bool(requests_in_flight(server)), "requests in flight")
            pid = server.send_signal(instance, signal.SIGTERM)
            server.wait_for_successor(instance, pid)
            assert {answer.result() for answer in answers} <= {"completed", "failed"}
        assert server.process_of(instance)["last_exit"] == "exited with code 0"
        serves_again(server, expected)
    assert "Traceback" not in server.log(instance)


def test_worker_told_to_stop_finishes_what_it_has(server: RunningServer, expected: str) -> None:
    wanted = Ask(
        prompt="finish", max_tokens=300, stream=True, request_id="finished", faults=LINGERS
    )
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, wanted)
        holder = held_on(server, "finished")
        pid = server.send_signal(holder, signal.SIGTERM)
        assert (answer.result().status, answer.result().finish_reason) == (200, "length")
        server.wait_for_successor(holder, pid)
    assert server.process_of(holder)["last_exit"] == "exited with code 0"


@pytest.mark.case("FAIL-08")
def test_hung_worker_is_reported_left_alone_and_used_again(
    server: RunningServer, expected: str
) -> None:
    wanted = Ask(prompt="hang", max_tokens=LONG, stream=True, request_id="hung")
    with ThreadPoolExecutor() as pool, server.client() as client:
        before = num_gaps(client)
        answer = pool.submit(ends_properly, server, wanted)
        holder = held_on(server, "hung")
        # A request of which its client has nothing yet would be tried again.
        wait_for(lambda: num_gaps(client) > before, "tokens that have reached the client")

        def report() -> dict[str, Any]:
            processes = client.get("/health").json()["processes"]
            return next(p for p in processes if p["instance"] == holder)

        pid = server.send_signal(holder, signal.SIGSTOP)
        try:
            wait_for(lambda: report()["state"] in {"dead", "stalled"}, "an unhealthy worker")
            assert client.get("/health").status_code == 503
            hung = report()
            assert hung["last_progress_age_s"] > server.state["settings"]["dead_after_s"]
            assert hung["reason"]
            wait_for(lambda: server.process_of(holder)["state"] == "stopped", "its state")
            assert answer.result() == "failed"  # rather than waiting for it
            assert client.get("/ready").status_code == 200
            for number in range(6):  # nobody is sent to it
                name = f"elsewhere-{number}"
                assert ask(server, named(PROBE, name)).text == expected
                assert decode_worker_of(server, name) != holder
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: client.get("/health").status_code == 200, "a healthy server")
        assert server.pid(holder) == pid

    def is_used() -> bool:
        names = [f"back-{time.monotonic_ns()}-{number}" for number in range(4)]
        ask_all(server, [named(PROBE, name) for name in names])
        return holder in {decode_worker_of(server, each) for each in names}

    wait_for(is_used, f"{holder} being used again")
    assert f"{holder} (pid {pid}) is stopped by a signal" in server.stderr
    wait_for(lambda: f"{holder} (pid {pid}) continues" in server.stderr, "the launcher's word")


def num_gaps(client: httpx.Client) -> float:
    """Gaps between writes to streams, those that have not ended among them."""
    lines = client.get("/metrics").text.splitlines()
    name = "pd_inter_token_gap_seconds_count"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def named(request: Ask, name: str) -> Ask:
    return Ask(prompt=request.prompt, max_tokens=request.max_tokens, request_id=name)


def decode_worker_of(server: RunningServer, request_id: str) -> str:
    """Who generated a request that was recorded."""
    return next(
        str(span.attributes[a.DECODE_WORKER.key])
        for span in spans_of(server, request_id)
        if a.DECODE_WORKER.key in span.attributes
    )


@pytest.mark.case("FAIL-18")
def test_gateway_told_to_stop_ends_its_streams_with_a_word(
    server: RunningServer, expected: str
) -> None:
    names = [f"stream-{number}" for number in range(3)]
    log_before = server.log("gateway-0")
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(
                ask, server, Ask(prompt=name, max_tokens=LONG, stream=True, request_id=name)
            )
            for name in names
        ]
        for name in names:
            held_on(server, name)
        pid = server.send_signal("gateway-0", signal.SIGTERM)
        for answer in answers:  # `ask` has seen [DONE]
            events: Any = answer.result().body
            assert events[-1]["error"]["code"] == "shutting_down"
        server.wait_for_successor("gateway-0", pid)
    assert server.process_of("gateway-0")["last_exit"] == "exited with code 0"
    for name in names:  # all of it is exported, and says what happened
        (root,) = [span for span in spans_of(server, name) if is_root(span)]
        assert root.attributes[a.OUTCOME.key] == Outcome.FAILED
        assert root.attributes[a.OUTCOME_REASON.key] == "shutting_down"
    said = server.log("gateway-0").removeprefix(log_before)
    assert "Traceback" not in said
    assert "Cancel" not in said


# -- servers of their own -------------------------------------------------------------------------


@pytest.mark.case("FAIL-05")
def test_two_interrupts_stop_a_busy_server_and_leave_no_process(tmp_path: Path) -> None:
    with running_server(tmp_path / "run", model=FAST_FAKE) as server:
        pids = server.pids
        with ThreadPoolExecutor() as pool:
            asked = [
                Ask(max_tokens=LONG, stream=n % 2 == 0, request_id=f"busy-{n}") for n in range(5)
            ]
            answers = [pool.submit(ends_properly, server, each) for each in asked]
            held_on(server, "busy-0")
            server.process.send_signal(signal.SIGINT)
            with server.client() as client:
                wait_for(lambda: client.get("/ready").status_code == 503, "a server that stops")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(timeout=60) == 0
            for answer in answers:
                answer.result()  # whatever it is: nobody hangs
        assert not [pid for pid in pids if is_running(pid)]
        assert "Traceback" not in server.stderr
        # The second one leaves a gateway no time to tell the end of what it had: that is lost.
        assert_recorded(server.run_dir)
        for each in asked:
            root, *_ = spans_of(server, str(each.request_id))
            assert root.attributes[a.OUTCOME.key] in {Outcome.FAILED, Outcome.LOST}


HANG_S = 12
"""Long beside what a busy machine makes a loop wait, and beside the time to look."""


@pytest.mark.case("FAIL-08")
def test_worker_whose_loop_alone_hangs_is_reported_though_it_beats(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with (
        own_server(run_dir, stalled_after_s=2.0) as server,
        contextlib.closing(Outbox()) as outbox,
        ThreadPoolExecutor() as pool,
    ):
        begun = [threading.Event(), threading.Event()]  # in turn: one at each decode worker
        streams = [pool.submit(stream, server, event) for event in begun]
        assert all(event.wait(60) for event in begun)
        hang = InjectFaults(faults=(Pause(ms=HANG_S * 1000),))
        assert outbox.send(EndpointDirectory(run_dir).endpoint("decode-0"), hang)
        seen: list[dict[str, Any]] = []

        def reported() -> bool:
            """Alone, and the other pair serves: where the machine is slow, others come late too."""
            with server.client() as client:
                health, ready = client.get("/health"), client.get("/ready")
            hung = [p for p in health.json()["processes"] if p["state"] != "ready"]
            seen[:] = hung
            return (
                [(p["instance"], p["state"]) for p in hung] == [("decode-0", "stalled")]
                and health.status_code == 503
                and ready.status_code == 200
            )

        server.wait_until(reported, "a worker that is said to be stalled, and it alone")
        assert seen[0]["last_progress_age_s"] >= 2.0
        assert seen[0]["reason"].startswith("has work but made no progress for ")
        server.wait_ready()
        assert [each.result() for each in streams] == ["[DONE]", "[DONE]"], "it went on with it"
        assert_recovered(server, recording=False)  # which is not written yet
        timelines = server.timelines()
    assert_recorded(run_dir)
    assert [timeline.outcome for timeline in timelines] == [Outcome.COMPLETED] * 3
    gaps = [
        visit
        for timeline in timelines
        for visit in timeline.visits_of("decode.gap")
        if visit.duration_ns > 0.9e9 * HANG_S
    ]
    assert len(gaps) == 1, "one stream stood still, and the trace says so"


def stream(server: OwnServer, begun: threading.Event) -> str:
    """The last event of a long answer; `begun` is set with the first."""
    body = {"model": server.model, "prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
    last = ""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: "):
                begun.set()
                last = line.removeprefix("data: ")
                assert "error" not in last
    return last


@pytest.mark.case("FAIL-12")
def test_server_that_was_killed_starts_again_in_the_same_directory(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        pids = server.pids
        server.process.kill()
        server.process.wait(timeout=60)
        wait_for(lambda: not [pid for pid in pids if is_running(pid)], "the end of its processes")
        place = Path(server.process_of("gateway-0")["endpoint"].removeprefix("ipc://"))
    assert place.is_socket()
    place.unlink()
    place.write_text("mine")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "server", "up", "--model", "fake", "--port", "0"),
            *("--run-dir", str(tmp_path / "run"), "--fresh"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {place} exists and is not a socket; move it away, it is left untouched\n"
    )
    assert place.read_text() == "mine"
    place.unlink()
    with running_server(tmp_path / "run", "--fresh") as server:
        assert_recovered(server)


@pytest.mark.case("FAIL-15")
def test_worker_whose_gateway_was_never_there_stops_and_says_so(tmp_path: Path) -> None:
    with RunDir.acquire(tmp_path / "run") as run_dir:
        nowhere = run_dir.endpoint("nobody-0")
        config = ProcessConfig(
            settings=Settings(model="fake", run_dir=str(run_dir.path), decode_pages=8),
            role="decode",
            instance="decode-0",
            incarnation="1",
            endpoint=run_dir.endpoint("decode-0"),
            gateway_endpoint=nowhere,
            transfer_endpoint=run_dir.endpoint("nobody-1"),
            pool_path=str(tmp_path / "pool"),
        )
        run_dir.config("decode-0").write_bytes(msgspec.json.encode(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "server.process", str(run_dir.config("decode-0"))],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        with process.stderr as log:
            assert any("decode-0 serves at" in line for line in log)
            process.send_signal(signal.SIGINT)
            rest = log.read()
            assert process.wait(timeout=60) == 0
    assert f"messages for {nowhere} were not delivered: nobody has answered there" in rest
    assert "Traceback" not in rest
