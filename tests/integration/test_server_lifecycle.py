"""Starting, stopping and dying of a whole server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import build_timelines
from pdtrace.stages import Outcome
from tests.support.completions import Ask, ask
from tests.support.server import ROOT, RunningServer, is_running, running_server

pytestmark = pytest.mark.server


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def in_flight(server: RunningServer) -> list[dict[str, Any]] | None:
    """What the agent says is in flight; None while it does not answer."""
    try:
        url = f"{server.state['agent_url']}/inflight"
        answer = httpx.get(url, timeout=60.0, trust_env=False)
    except httpx.TransportError:
        return None
    return answer.json()["requests"]


def pool_folder(run_dir: Path) -> Path:
    """Where the server that runs or ran in `run_dir` put its KV pools."""
    config = json.loads((run_dir / "config" / "decode-0.json").read_text())
    return Path(config["pool_path"]).parent


def test_sigterm_stops_everything_and_keeps_the_recording(tmp_path: Path) -> None:
    """Of its memory nothing is left, neither of a process that was killed before, nor secrets."""
    with running_server(tmp_path / "run", "--api-key", "secret-of-the-test") as server:
        pools = pool_folder(server.run_dir)
        of_decode = {path for path in pools.iterdir() if path.name.startswith("decode-0")}
        pid = server.send_signal("decode-0", signal.SIGKILL)
        server.wait_for_successor("decode-0", pid)
        assert len(of_decode) == 1
        assert not [path for path in of_decode if path.exists()]
        assert len([path for path in pools.iterdir() if path.name.startswith("decode-0")]) == 1
        key = {"Authorization": "Bearer secret-of-the-test"}
        assert ask(server, Ask(request_id="last-one", headers=key)).status == 200
        assert server.stop() == 0
        assert not [pid for pid in server.pids if is_running(pid)]
        assert not pools.exists()
        assert {path.name for path in server.run_dir.iterdir()} == {
            *("rings", "traces", "logs", "agent-state.json"),
            *("lock", "server.json"),
        }
        for path in server.run_dir.rglob("*"):
            assert path.is_dir() or b"secret-of-the-test" not in path.read_bytes(), path
        lines = "".join(p.read_text() for p in (tmp_path / "run" / "traces").glob("*.jsonl"))
        assert "last-one" in lines


def test_second_server_on_a_running_servers_directory_is_refused(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
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
        assert len(done.stderr.splitlines()) == 1
        assert f"in use by another server (pid {server.process.pid})" in done.stderr
        assert ask(server, Ask()).status == 200


@pytest.mark.parametrize("instance", ["decode-0", "gateway-0"])
def test_without_restarts_a_process_that_dies_stops_the_server_with_its_name(
    tmp_path: Path, instance: str
) -> None:
    with running_server(tmp_path / "run", "--no-restart") as server:
        pid = server.send_signal(instance, signal.SIGKILL)
        assert server.process.wait(timeout=60) == 1
        assert not [pid for pid in server.pids if is_running(pid)]
        assert server.process_of(instance)["state"] == "given_up"
    assert f"{instance} (pid {pid}) was killed by SIGKILL" in server.stderr


def test_an_agent_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        assert ask(server, Ask(request_id="before")).status == 200
        first = server.send_signal("agent", signal.SIGKILL)
        assert ask(server, Ask(request_id="without-agent")).status == 200
        server.wait_for_successor("agent", first)
        assert ask(server, Ask(request_id="after")).status == 200
        assert wait_until(lambda: in_flight(server) is not None)  # at the same address
        assert server.stop() == 0
    found = {t.request_id for t in build_timelines(read_source(tmp_path / "run").traces)}
    assert found == {"before", "without-agent", "after"}
    assert "agent (pid " in (tmp_path / "run.stderr").read_text()


def test_server_whose_run_directory_cannot_be_written_serves_and_replaces_its_agent(
    tmp_path: Path,
) -> None:
    """As on a full disk, which is when an agent may die."""
    with running_server(tmp_path / "run") as server:
        # The first may answer a little later than the server.
        assert wait_until(lambda: server.log("agent").count("answering at") == 1)
        (tmp_path / "run" / ".server.json").mkdir()
        first = server.send_signal("agent", signal.SIGKILL)
        assert wait_until(lambda: server.log("agent").count("answering at") == 2)
        assert ask(server, Ask(request_id="after")).status == 200
        assert server.pid("agent") == first
        (tmp_path / "run" / ".server.json").rmdir()
        assert wait_until(lambda: server.pid("agent") != first)
        assert server.stop() == 0
    warning = f"warning: cannot write {tmp_path}/run/server.json, which is out of date: Is a dir"
    assert (tmp_path / "run.stderr").read_text().count(warning) == 1  # not with each change


def test_process_that_found_no_room_for_a_ring_is_named_until_it_has_one(tmp_path: Path) -> None:
    """As on a full disk."""
    rings, aside = tmp_path / "run" / "rings", tmp_path / "run" / "aside"
    with running_server(tmp_path / "run", "--decode", "2") as server:

        def recorded() -> set[tuple[str, bool | None]]:
            with server.client() as client:
                processes = client.get("/health").json()["processes"]
            return {(p["instance"], p["recorded"]) for p in processes if p["state"] == "ready"}

        def metric() -> str:
            with server.client() as client:
                lines = client.get("/metrics").text.splitlines()
            (line,) = [s for s in lines if s.startswith("pd_process_recorded") and "decode-0" in s]
            return line.split()[-1]

        assert wait_until(lambda: ("decode-0", True) in recorded())
        rings.rename(aside)
        rings.write_text("in the way")
        pid = server.send_signal("decode-0", signal.SIGKILL)
        assert wait_until(lambda: ("decode-0", False) in recorded())
        server.wait_for_successor("decode-0", pid)
        others = {("gateway-0", True), ("prefill-0", True), ("decode-1", True)}
        assert others <= recorded()
        assert metric() == "0.0"
        assert server.process_of("decode-0")["recorded"] is False
        assert server.process_of("decode-1")["recorded"] is True
        assert server.process_of("agent")["recorded"] is None
        assert [ask(server, Ask()).status for _ in range(2)] == [200, 200]
        rings.unlink()
        aside.rename(rings)
        pid = server.send_signal("decode-0", signal.SIGTERM)  # as `up` tells its operator
        assert wait_until(lambda: ("decode-0", True) in recorded() and metric() == "1.0")
        server.wait_for_successor("decode-0", pid)
        assert server.process_of("decode-0")["recorded"] is True
        assert server.stop() == 0
    assert re.search(r"decode-0 \(pid \d+\) serves without being recorded", server.stderr)


def is_seen_dead(server: RunningServer) -> bool:
    """Whether there is no agent now; else kills the one that there is. The second in a row is
    followed in a second, which a look may miss, the third in two."""
    agent = server.process_of("agent")
    if agent["state"] == "ended":
        return True
    with suppress(ProcessLookupError):  # it is gone, and the launcher has not said so yet
        os.kill(int(agent["pid"]), signal.SIGKILL)
    return False


@pytest.mark.parametrize("option", ["--agent-port=0", "--agent-port=-1"])
def test_server_that_is_stopped_while_its_agent_is_dead_exports_all_the_same(
    tmp_path: Path, option: str
) -> None:
    with running_server(tmp_path / "run", option) as server:
        assert ask(server, Ask(request_id="before")).status == 200
        first = server.send_signal("agent", signal.SIGKILL)
        assert wait_until(lambda: server.pid("agent") != first)
        assert wait_until(lambda: is_seen_dead(server))
        assert ask(server, Ask(request_id="without-agent")).status == 200
        assert server.stop() == 0
    found = {t.request_id for t in build_timelines(read_source(tmp_path / "run").traces)}
    assert found == {"before", "without-agent"}


def test_agent_that_is_told_to_stop_as_it_starts_loses_nothing(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        first = server.send_signal("agent", signal.SIGKILL)
        assert ask(server, Ask(request_id="without-agent")).status == 200
        assert wait_until(lambda: server.pid("agent") != first)
        server.send_signal("agent", signal.SIGTERM)  # as the launcher may
        assert server.stop() == 0
    (timeline,) = build_timelines(read_source(tmp_path / "run").traces)
    assert timeline.request_id == "without-agent"


def test_agent_tells_what_is_in_flight(tmp_path: Path) -> None:
    options = ("--allow-faults", "--decode-pages", "64")
    with running_server(tmp_path / "run", *options) as server, ThreadPoolExecutor() as pool:
        assert wait_until(lambda: in_flight(server) == [])
        asked = Ask(request_id="held", faults={"decode.reserve": 8000})
        answer = pool.submit(ask, server, asked)
        seen: list[dict[str, Any]] = []

        def it_waits_for_pages() -> bool:
            seen[:] = in_flight(server) or []
            return any((request["wait"] or {}).get("reason") == "kv_pages" for request in seen)

        assert wait_until(it_waits_for_pages)
        assert [(r["request_id"], r["stage"], r["worker"]) for r in seen] == [
            ("held", "decode.reserve", "decode-0")
        ]
        assert (seen[0]["wait"]["reason"], seen[0]["wait"]["limit"]) == ("kv_pages", 64)
        assert answer.result().status == 200
        assert wait_until(lambda: in_flight(server) == [])


def test_agent_answers_nowhere_if_told_so(tmp_path: Path) -> None:
    with running_server(tmp_path / "run", "--agent-port", "-1") as server:
        assert server.state["agent_url"] is None
        assert ask(server, Ask(request_id="one")).status == 200
        assert server.stop() == 0
    assert not (tmp_path / "run" / "agent.json").exists()


def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        server.process.kill()
        server.process.wait(timeout=30)
        assert wait_until(lambda: not any(is_running(pid) for pid in server.pids))


def test_next_start_removes_the_pools_of_a_killed_launcher(tmp_path: Path) -> None:
    with running_server(tmp_path / "first") as server:
        server.process.kill()
        server.process.wait(timeout=30)
    # Another start on this machine may have been faster.
    with running_server(tmp_path / "second"):
        assert not pool_folder(tmp_path / "first").exists()


def test_stop_does_not_wait_for_a_stopped_process(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        os.kill(server.pid("decode-0"), signal.SIGSTOP)
        assert server.stop() == 0
        assert not [pid for pid in server.pids if is_running(pid)]


def test_a_second_signal_stops_at_once_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with running_server(tmp_path / "run", model="fake:step_ms=20") as server:
        with (
            server.client() as client,
            client.stream(
                "POST", "/v1/completions", json=body, headers={"X-Request-Id": "cut-off"}
            ) as answer,
        ):
            lines = answer.iter_lines()  # kept: an iterator that goes closes the connection
            assert next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: client.get("/ready").status_code == 503)
            second = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            with suppress(httpx.HTTPError):  # it is cut off
                for _ in lines:
                    pass
            assert time.monotonic() - second < server.state["settings"]["deadlines"]["drain_s"]
            assert server.process.wait(timeout=60) == 0
        assert not [pid for pid in server.pids if is_running(pid)]
    (timeline,) = [
        t
        for t in build_timelines(read_source(tmp_path / "run").traces)
        if t.request_id == "cut-off"
    ]
    assert timeline.outcome is Outcome.LOST


def test_server_without_recording_serves_and_leaves_no_rings(tmp_path: Path) -> None:
    with running_server(tmp_path / "run", "--no-record") as server:
        assert ask(server, Ask()).status == 200
        assert "agent" not in {p["instance"] for p in server.state["processes"]}
    assert list((tmp_path / "run" / "rings").iterdir()) == []


def test_failed_start_leaves_latest_at_the_recording_before_it(tmp_path: Path) -> None:
    """On call, a restart that fails must not hide the evidence."""
    (tmp_path / "run" / "good").mkdir(parents=True)
    (tmp_path / "run" / "latest").symlink_to("good")
    done = subprocess.run(
        "exec $PYTHON -m server up --model fake --port 0 --start-timeout 0.1",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(list((tmp_path / "run").iterdir())) == 3  # the failed start's directory is there
    assert (tmp_path / "run" / "latest").resolve().name == "good"
