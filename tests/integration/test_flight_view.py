"""`pdtrace top`, `why` and `check` beside a real server whose processes stop and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import ROOT, RunningServer, running_server

SLOW_FAKE = "fake:step_ms=100,token_us=20"
TOKENS = 5_000
"""More than that model makes while a test looks on, for minutes on a busy machine: such a request
stays until somebody ends it."""
PAGES = 2 * TOKENS // 16 + 100
"""Room for two of them."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run = tmp_path_factory.mktemp("view") / "run"
    # A successor would take the dead one's place within a second.
    options = ["--decode-pages", str(PAGES), "--reserve-output-tokens", str(TOKENS), "--no-restart"]
    with running_server(run, *options, model=SLOW_FAKE) as running:
        yield running


def pdtrace(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdtrace", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONUTF8": "1"},
    )


def top(source: object) -> dict[str, Any]:
    done = pdtrace("top", "--once", "--json", "--from", source)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(
    source: object, condition: Callable[[dict[str, Any]], bool], *, within_s: float = 90.0
) -> dict[str, Any]:
    """The first look that meets a condition."""
    deadline = time.monotonic() + within_s
    while not condition(look := top(source)):
        assert time.monotonic() < deadline, look
    return look


def states(look: dict[str, Any]) -> dict[str, str]:
    return {process["instance"]: process["state"] for process in look["processes"]}


def ask(server: RunningServer, request_id: str, tokens: int) -> threading.Thread:
    """Sends a request in a thread of its own; whatever answer it gets is fine."""

    def send() -> None:
        try:
            with server.client(timeout_s=300) as client:
                client.post(
                    "/v1/completions",
                    json={"model": server.model, "prompt": "hello", "max_tokens": tokens},
                    headers={"X-Request-Id": request_id},
                )
        except httpx.HTTPError:
            pass  # the server was stopped under it

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.server
@pytest.mark.timeout(400)
def test_what_is_in_flight_is_seen_whatever_stops_or_dies(server: RunningServer) -> None:
    run = server.run_dir
    for index in range(6):
        ask(server, f"quick-{index}", 4).join()
    everybody = dict.fromkeys(("gateway-0", "prefill-0", "transfer-0", "decode-0"), "alive")
    until(run, lambda look: not look["requests"] and states(look) == everybody)

    threads = [ask(server, f"long-{index}", TOKENS) for index in range(2)]
    until(run, lambda look: [r["stage"] for r in look["requests"]] == ["decode.generate"] * 2)
    threads.append(ask(server, "waits", TOKENS))
    look = until(run, lambda look: "decode.reserve" in {r["stage"] for r in look["requests"]})
    waiting = look["requests"][0]
    assert waiting["request_id"] == "waits"
    assert waiting["wait"]["reason"] == "kv_pages"
    assert set(waiting["wait"]["blockers"]) == {"long-0", "long-1"}
    assert waiting["usual_s"] is not None

    # The agent tells the same, until it is stopped; the rings tell without it.
    agent_url = server.state["agent_url"]
    assert {r["request_id"] for r in top(agent_url)["requests"]} == {"long-0", "long-1", "waits"}
    os.kill(server.pid("agent"), signal.SIGSTOP)
    silent = pdtrace("top", "--once", "--from", agent_url, "--timeout", "0.5")
    assert silent.returncode == 2
    assert "no answer within 0.5 s; the rings tell without an agent" in silent.stderr
    why = pdtrace("why", "waits", "--from", run)
    assert why.returncode == 0, why.stderr
    text = " ".join(why.stdout.split())
    assert text.startswith("waits has been in flight for ")
    assert ", in decode.reserve for " in text
    assert "behind long-" in text
    assert "KV pages" in text

    # Decode stands still: everything that it holds stays in view, and it is named.
    os.kill(server.pid("decode-0"), signal.SIGSTOP)
    look = until(run, lambda look: states(look)["decode-0"] == "stalled")
    assert {r["request_id"] for r in look["requests"]} == {"long-0", "long-1", "waits"}
    assert states(look)["prefill-0"] == "alive"
    why = " ".join(pdtrace("why", "waits", "--from", run).stdout.split())
    assert f"decode-0 (pid {server.pid('decode-0')}) is stopped by a signal (SIGSTOP)" in why
    os.kill(server.pid("agent"), signal.SIGCONT)

    # And dies, with them.
    os.kill(server.pid("decode-0"), signal.SIGKILL)
    look = until(run, lambda look: states(look)["decode-0"] == "lost")
    for thread in threads:
        thread.join(timeout=120)
    checked = pdtrace("check", "--from", run, "--json")
    assert checked.returncode == 1
    rules = {rule["name"]: rule for rule in json.loads(checked.stdout)["rules"]}
    [vanished] = rules["processes"]["examples"]
    assert vanished.startswith(f"decode-0 (pid {server.pid('decode-0')}) was killed")
    assert "with 3 requests open" in vanished


@pytest.mark.server
def test_healthy_run_keeps_every_rule_and_ends_closed(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        for index in range(12):
            ask(server, f"r-{index}", 8).join()
        server.stop()
        checked = pdtrace("check", "--from", server.run_dir)
        assert checked.returncode == 0, checked.stdout
        look = top(server.run_dir)
        assert set(states(look).values()) == {"closed"}
        assert look["requests"] == []
