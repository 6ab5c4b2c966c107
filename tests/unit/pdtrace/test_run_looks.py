"""Who tells what is in flight in a run directory: its agent, and its rings where that is silent."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from typer.testing import CliRunner, Result

from pdtrace.cli import app
from pdtrace.inflight import InFlight, Look
from pdtrace.live.address import ADDRESS_NAME, Address, read_address
from pdtrace.live.looks import AgentLooks, RingLooks
from pdtrace.live.run_looks import ASK_AGAIN_S, RunLooks
from pdtrace.recorder import Recorder
from pdtrace.ring import RingCapacity
from pdtrace.ring.losses import STATE_NAME
from pdtrace.stages import Role
from pdtrace.testing import open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]
ROLES = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)
WITHIN_S = 60.0
_T = TypeVar("_T")


def until(ask: Callable[[], _T | None]) -> _T:
    deadline = time.monotonic() + WITHIN_S
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)


def only(requests: Sequence[InFlight]) -> Sequence[InFlight] | None:
    """The requests in flight once there is but one: the agent reads now and then."""
    return requests if len(requests) == 1 else None


@contextmanager
def agent(run: Path, *options: str) -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "pdtrace.agent", "--rings", str(run / "rings")]
    command += ["--out", str(run), "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        until(lambda: read_address(run))
        yield process
    finally:
        process.kill()
        process.wait(timeout=WITHIN_S)


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings", roles=ROLES)
    yield opened
    for recorder in opened.values():
        recorder.close()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def hold(
    recorders: Mapping[Role, Recorder],
    request_id: str,
    stage: str = "decode.reserve",
    seconds: float = 12.0,
) -> None:
    start_ns = time.monotonic_ns() - round(seconds * 1e9)
    record_request(recorders, request_id=request_id, start_ns=start_ns, stop_in=stage, outcome=None)


def ageless(look: Look) -> dict[str, InFlight]:
    return {
        r.request_id: msgspec.structs.replace(r, age_s=0.0, stage_age_s=0.0) for r in look.requests
    }


def test_agent_rings_and_top_agree(tmp_path: Path, recorders: Mapping[Role, Recorder]) -> None:
    for index in range(25):
        record_request(recorders, request_id=f"done-{index}")
    hold(recorders, "may-take-longer", "decode.reserve")
    hold(recorders, "stuck", "prefill.queue")
    with agent(tmp_path, "--deadline", "decode.reserve=60"):
        address = read_address(tmp_path)
        assert address is not None
        until(lambda: len(AgentLooks(address.url).look().requests) == 2)
        until((tmp_path / STATE_NAME).exists)
        by_agent = AgentLooks(address.url).look()
        looks = RunLooks(RingLooks(tmp_path))
        assert looks.look().pid == address.pid
        by_rings = looks.rings.look()
        looks.close()
    assert by_rings.pid is None
    assert by_agent.run_dir == str(tmp_path.resolve())
    assert ageless(by_agent) == ageless(by_rings)
    assert {r.request_id: r.stuck for r in by_rings.requests} == {
        "may-take-longer": False,
        "stuck": True,
    }
    # The rule outlives the agent.
    later = RingLooks(tmp_path)
    assert ageless(later.look()) == ageless(by_rings)
    later.close()


def test_request_older_than_one_lap_of_its_ring_is_whole(tmp_path: Path) -> None:
    small = RingCapacity(blocks=8, block_bytes=8192)
    recorders = {
        role: Recorder.open(
            tmp_path / "rings", role=role, instance=f"{role.value}-0", capacity=small
        )
        for role in ROLES
    }
    hold(recorders, "old", "decode.generate")
    with agent(tmp_path):
        looks = RunLooks(RingLooks(tmp_path))
        until(lambda: [r for r in looks.look().requests if r.incomplete is None])
        for index in range(200):
            record_request(recorders, request_id=f"r-{index}")
            time.sleep(0.005)
        [request] = until(lambda: only(looks.look().requests))
        assert (request.request_id, request.incomplete) == ("old", None)
        [request] = looks.rings.look().requests
        assert request.incomplete is not None
        looks.close()
        # `why` has no picture of it, but never says that nothing is in flight.
        for arguments in (["why", "old"], ["why", "--in-flight"]):
            result = invoke(*arguments, "--from", tmp_path)
            assert result.exit_code == 2
            assert re.match(
                r"pdtrace: old has been in flight for [\d.]+ s, in decode\.generate for [\d.]+ s",
                result.stderr,
            )
            assert "its first records were overwritten in the rings" in result.stderr
    result = invoke("why", "--in-flight", "--from", tmp_path)
    assert (result.exit_code, result.stderr.startswith("pdtrace: old has been")) == (2, True)
    for recorder in recorders.values():
        recorder.close()


def test_stopped_agent_is_not_waited_for(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    hold(recorders, "r")
    clock = [0.0]
    with agent(tmp_path) as process:
        looks = RunLooks(RingLooks(tmp_path), clock=lambda: clock[0])
        until(lambda: looks.look().requests)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: "State:\tT" in Path(f"/proc/{process.pid}/status").read_text())
        begin_s = time.monotonic()
        look = looks.look()
        assert time.monotonic() - begin_s < 10
        assert [r.request_id for r in look.requests] == ["r"]
        [problem] = look.problems
        assert f"(pid {process.pid}) does not answer" in problem
        assert problem.endswith("this was read from the rings")
        assert looks.look().problems == look.problems
        os.kill(process.pid, signal.SIGCONT)
        clock[0] = ASK_AGAIN_S
        until(lambda: looks.look().pid == process.pid)
        looks.close()


def test_agent_that_is_gone_and_another_in_its_place_are_not_believed(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    hold(recorders, "r")
    other = tmp_path / "other"
    (other / "rings").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with agent(other):
        its = read_address(other)
        assert its is not None
        for address in (Address(url=url, pid=1), Address(url=its.url, pid=1)):
            (tmp_path / ADDRESS_NAME).write_bytes(msgspec.json.encode(address))
            result = invoke("top", "--once", "--json", "--from", tmp_path)
            assert result.exit_code == 0, result.stderr
            document = json.loads(result.stdout)
            assert [r["request_id"] for r in document["requests"]] == ["r"]
            assert "read from the rings" in document["problems"][0]


def test_agent_address_stands_for_its_run(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for index in range(6):
        record_request(recorders, request_id=f"done-{index}")
    hold(recorders, "r")
    with agent(tmp_path):
        address = read_address(tmp_path)
        assert address is not None
        until(lambda: list(tmp_path.glob("traces/*")))
        until(lambda: '"done-5"' in next(tmp_path.glob("traces/*")).read_text())
        for arguments in (["why", "r"], ["why", "--in-flight"], ["why", "done-2"]):
            result = invoke(*arguments, "--from", address.url)
            assert result.exit_code == 0, result.stderr
            wanted = "done-2" if "done-2" in arguments else "r"
            assert result.stdout.startswith(f"{wanted} "), result.stdout
        result = invoke("check", "--json", "--from", address.url)
        assert json.loads(result.stdout)["requests"] == 6
    result = invoke("why", "r", "--from", address.url)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
