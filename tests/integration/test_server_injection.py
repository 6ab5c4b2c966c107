"""Faults injected into a whole server: by a file at its start, by the command while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdtrace import semconv as a
from server.injection.fault import (
    Corrupt,
    Damage,
    Delay,
    Direction,
    Drop,
    Freeze,
    Pause,
    Place,
    Raise,
    Repeat,
    ShiftClock,
    Shrink,
    name_of,
)
from tests.support.completions import Ask, ask
from tests.support.injection import clear, inject, injected, wait_injected
from tests.support.recorded import spans_of
from tests.support.server import ROOT, RunningServer, running_server

pytestmark = pytest.mark.server
S = 1_000_000_000

AT_START = [
    {"kind": "delay", "at": "decode", "message": "CopyDone", "ms": 300},
    {"kind": "raise", "at": "prefill-0", "place": "step"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.json").write_text(json.dumps(AT_START))
    options = ("--allow-faults", "--faults", str(folder / "faults.json"))
    with running_server(folder / "run", *options) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_armed_afterwards(server: RunningServer) -> Iterator[None]:
    yield
    assert all(report.armed == 0 for report in clear(server).values())
    assert ask(server, Ask(request_id="probe")).status == 200


def command(server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", "inject", "--run-dir", str(server.run_dir), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_faults_of_the_file_are_armed_from_the_start(server: RunningServer) -> None:
    wait_injected(server, "raise.step", at="prefill-0")
    assert ask(server, Ask(request_id="late-copy")).status == 200
    assert injected(server, at="decode-0")["delay.CopyDone"] == 1
    assert "injected: CopyDone received number 1 comes 300 ms late" in server.log("decode-0")


def test_the_command_arms_tells_and_clears(server: RunningServer) -> None:
    armed = command(
        server, "--json", '[{"kind": "drop", "message": "Abort", "at": "decode", "nth": 1000}]'
    )
    assert armed.returncode == 0, armed.stderr
    reports = json.loads(armed.stdout)
    assert set(reports) == {"gateway-0", "prefill-0", "transfer-0", "decode-0"}
    assert reports["decode-0"]["armed"] == 1
    assert reports["prefill-0"]["armed"] == 0
    told = command(server)
    assert "decode-0" in told.stdout
    cleared = command(server, "--clear", "--json")
    assert json.loads(cleared.stdout)["decode-0"]["armed"] == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"kind": "pause", "ms": 1, "at": "decode-1"}', "at is 'decode-1', expected one of dec"),
        ('[{"kind": "drop", "message": "Nothing"}]', "fault 1.message: 'Nothing' is no message"),
        ("/no/such/file.json", "cannot be read: No such file or directory"),
    ],
)
def test_the_command_refuses_what_cannot_be_done(
    server: RunningServer, text: str, error: str
) -> None:
    refused = command(server, text)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ")
    assert error in line


def test_messages_of_all_processes_can_be_hit(server: RunningServer) -> None:
    faults = (
        Drop(at="decode", message="Heartbeat", direction=Direction.SENT),
        Drop(at="gateway", message="Heartbeat"),
        Drop(at="transfer", message="RegisterPool"),
        Delay(at="gateway", message="LegClosed", ms=30),
        Repeat(at="prefill", message="CopyJob", direction=Direction.SENT),
        Delay(at="transfer", message="CopyDone", direction=Direction.SENT, ms=30),
        Repeat(at="gateway", message="DecodeRequest", direction=Direction.SENT),
    )
    before = injected(server)
    inject(server, *faults)
    answer = ask(server, Ask(prompt="which", request_id="hit"))
    assert answer.status == 200
    assert answer.text == ask(server, Ask(prompt="which", request_id="not-hit")).text
    for name, times in (
        ("drop.Heartbeat", 2),
        ("drop.RegisterPool", 1),
        ("delay.LegClosed", 1),
        ("repeat.CopyJob", 1),
        ("delay.CopyDone", 1),
        ("repeat.DecodeRequest", 1),
    ):
        wait_injected(server, name, before[name] + times)


@pytest.mark.parametrize(
    ("message", "loser", "stage"),
    [
        ("DecodeRequest", "decode-0", "hop.dispatch"),
        ("PrefillRequest", "prefill-0", "hop.publish"),
    ],
)
def test_request_that_is_lost_on_its_way_is_served_by_a_second_attempt(
    server: RunningServer, message: str, loser: str, stage: str
) -> None:
    """Soon, though no worker died: long before any deadline of either leg."""
    fault = Drop(at=loser, message=message)
    before = injected(server)
    inject(server, fault)
    answer = ask(server, Ask(prompt=message, request_id=f"lost-{message}"))
    assert answer.status == 200
    assert answer.text == ask(server, Ask(prompt=message)).text
    wait_injected(server, fault, before[name_of(fault)] + 1)
    spans = spans_of(server, f"lost-{message}")
    first, second = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns
    )
    ended = [a.OUTCOME, a.OUTCOME_REASON, a.OUTCOME_BY, a.OUTCOME_STAGE]
    assert [first.attributes[attr.key] for attr in ended] == [
        *("failed", "request_lost", loser, stage),
    ]
    assert second.attributes[a.OUTCOME.key] == "completed"
    assert first.attributes[a.HANDOFF_ID.key] != second.attributes[a.HANDOFF_ID.key]
    assert first.end_ns - first.start_ns < 20 * S


def test_raises_outside_of_requests_reach_no_request(server: RunningServer) -> None:
    before = injected(server)
    inject(
        server,
        *(Raise(at=at, place=Place.RECORDER) for at in ("gateway", "prefill", "decode")),
        Raise(place=Place.METRICS),
        Raise(at="gateway", place=Place.STEP),
        Raise(at="gateway", place=Place.MESSAGE, message="Heartbeat"),
    )
    assert ask(server, Ask(request_id="unharmed")).status == 200
    for name, times in (
        ("raise.recorder", 3),
        ("raise.metrics", 1),
        ("raise.step", 1),
        ("raise.message", 1),
    ):
        wait_injected(server, name, before[name] + times)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Raise(at="prefill", place=Place.ENGINE, count=None), "engine_error"),
        (Raise(at="decode", place=Place.ENGINE, count=None), "engine_error"),
        (Raise(at="decode", place=Place.MESSAGE, message="Handoff", count=None), "internal"),
        (Raise(at="transfer", place=Place.COPY, count=None), "internal"),
    ],
)
def test_a_raise_in_a_requests_way_fails_it_with_its_reason(
    server: RunningServer, fault: Raise, reason: str
) -> None:
    before = injected(server)
    inject(server, fault)
    answer = ask(server, Ask(prompt=f"{fault.at}, {fault.place}"))
    assert answer.status in (500, 502)
    assert answer.body["error"]["code"] == reason
    wait_injected(server, fault, before[f"raise.{fault.place}"] + 1)


@pytest.mark.parametrize(
    "stage", ["gateway.route", "hop.token", "prefill.compute", "transfer", "decode.first"]
)
def test_a_stage_can_be_frozen_in_any_process_and_let_go(server: RunningServer, stage: str) -> None:
    """For an hour, had it not been cleared; other requests are served meanwhile."""
    fault = Freeze(stage=stage, ms=3_600_000, request="frozen-")
    before = injected(server)
    inject(server, fault)
    with ThreadPoolExecutor(1) as pool:
        frozen = pool.submit(ask, server, Ask(prompt=stage, request_id=f"frozen-{stage}"))
        wait_injected(server, fault, before[name_of(fault)] + 1)
        assert ask(server, Ask(request_id="other")).status == 200
        assert not frozen.done()
        clear(server)
        assert frozen.result().status == 200
    assert frozen.result().text == ask(server, Ask(prompt=stage)).text


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_pool_can_be_shrunk_and_made_whole(server: RunningServer, at: str) -> None:
    before = injected(server)
    inject(server, Shrink(at=at, pages=100_000))
    wait_injected(server, "shrink", before["shrink"] + 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ask, server, Ask(prompt=f"waits for {at}", request_id="waits"))
        time.sleep(0.3)
        assert not waits.done()
        clear(server)
        assert waits.result().status == 200


@pytest.mark.parametrize("damage", [Damage.SHORT, Damage.ALTERED])
def test_a_damaged_copy_is_found_and_its_request_served_again(
    server: RunningServer, damage: Damage
) -> None:
    fault = Corrupt(copy=damage)
    before = injected(server)
    inject(server, fault)
    answer = ask(server, Ask(prompt="which text"))
    assert answer.status == 200
    assert answer.text == ask(server, Ask(prompt="which text")).text
    assert injected(server)[name_of(fault)] == before[name_of(fault)] + 1
    always = Corrupt(copy=damage, count=None)
    inject(server, always)
    assert ask(server, Ask(prompt="no text")).status == 502


@pytest.mark.parametrize("at", ["prefill-0", "transfer-0", "decode-0"])
@pytest.mark.parametrize("seconds", [5.0, -1.0])
def test_a_clock_can_be_set_while_the_process_runs(
    server: RunningServer, at: str, seconds: float
) -> None:
    before = injected(server, at=at)
    inject(server, ShiftClock(at=at, seconds=seconds))
    wait_injected(server, "clock", before["clock"] + 1, at=at)
    assert f"the clock is set by {seconds:+g} s" in server.log(at)


def test_a_clock_that_jumps_ends_the_waits_of_its_process_and_serving_goes_on(
    server: RunningServer,
) -> None:
    """Minutes pass for decode alone: its deadlines are over, but it does not take others for dead,
    as it would not after it was stopped itself."""
    freeze = Freeze(at="decode", stage="decode.queue", ms=60_000, request="jump")
    before = injected(server)
    inject(server, freeze)
    with ThreadPoolExecutor(1) as pool:
        frozen = pool.submit(ask, server, Ask(prompt="jumps", request_id="jump"))
        wait_injected(server, freeze, before[name_of(freeze)] + 1)
        began_s = time.monotonic()
        inject(server, ShiftClock(at="decode", seconds=300))
        answer = frozen.result()
        assert time.monotonic() - began_s < 50
    assert answer.status == 504, answer.body
    assert answer.body["error"]["code"] == "deadline_exceeded"
    assert "decode.queue" in answer.body["error"]["message"]
    assert all(report.armed == 0 for report in inject(server).values())
    assert ask(server, Ask(prompt="jumps")).status == 200


@pytest.mark.parametrize("at", ["gateway-0", "prefill-0", "transfer-0", "decode-0"])
def test_every_loop_can_be_paused(server: RunningServer, at: str) -> None:
    before = injected(server, at=at)
    inject(server, Pause(at=at, ms=200))
    wait_injected(server, "pause", before["pause"] + 1, at=at)


def test_a_server_that_allows_no_faults_is_told_nothing(
    server: RunningServer, tmp_path: Path
) -> None:
    state = json.loads((server.run_dir / "server.json").read_text())
    state["settings"]["allow_faults"] = False
    (tmp_path / "server.json").write_text(json.dumps(state))
    refused = command(server, "--run-dir", str(tmp_path))
    assert refused.returncode == 2
    assert "allows no faults: start it with --allow-faults" in refused.stderr
