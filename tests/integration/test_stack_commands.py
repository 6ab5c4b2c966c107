"""A stack beside others, with objectives of one's own: the commands that `stack up` prints do what
they say when they are copied into a shell; the objectives, given once, reach every program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards.rules.alerts import alerts
from pdtrace.slo import DEFAULT_SLO
from tests.support.real_stack import need_programs, wait_for
from tests.support.server import ROOT, START_S, STOP_S

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

MINE = "ttft_s = 0.8\ntoken_gap_s = 0.07\n"


@dataclass(slots=True)
class Shell:
    """A terminal in somebody's folder, which is no checkout."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: v for name, v in os.environ.items() if not name.startswith("OTEL_")}
        return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "60"}

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, line: str) -> subprocess.Popen[bytes]:
        with (self.folder / "server.log").open("wb") as log:
            return subprocess.Popen(
                ["sh", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@dataclass(slots=True)
class Shown:
    """The commands that `stack up` printed, and what of the stack can be seen."""

    shell: Shell
    join: str
    look: str
    stop: str

    @property
    def folder(self) -> Path:
        return self.shell.folder / "a stack"

    def program(self, name: str) -> dict[str, Any]:
        state = json.loads((self.folder / "stack.json").read_text())
        return next(one for one in state["programs"] if one["name"] == name)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    need_programs()
    shell = Shell(tmp_path_factory.mktemp("somewhere"))
    (shell.folder / "slo.toml").write_text(MINE)
    stack = f"{sys.executable} -m server stack"
    up = shell.run(
        f"{stack} up --dir 'a stack' --free-ports --slo slo.toml --timeout {START_S:.0f}"
    )
    try:
        assert up.returncode == 0, up.stderr
        _, _, rest = up.stdout.partition("\nnow:\n")
        join, look, stop, *_ = (line.strip() for line in rest.splitlines())
        yield Shown(shell, join, look, stop)
    finally:
        shell.run(f"{stack} down --dir 'a stack'")


@pytest.fixture(scope="module")
def server(shown: Shown) -> Iterator[dict[str, Any]]:
    """Started by the first command, with a model that costs nothing; what it says of itself."""
    line = shown.join.replace(" server up", " server up --model fake --port 0")
    assert line != shown.join
    process = shown.shell.start(line)
    state = shown.shell.folder / "run" / "latest" / "server.json"

    def ready() -> dict[str, Any] | None:
        log = shown.shell.folder / "server.log"
        assert process.poll() is None, log.read_text()[-1000:]
        found = json.loads(state.read_text()) if state.exists() else {}
        return found if found.get("ready") else None

    try:
        yield wait_for(ready, "the server is ready", timeout_s=START_S)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=60.0, trust_env=False).raise_for_status()


def test_server_joins_and_its_requests_can_be_looked_at(
    shown: Shown, server: dict[str, Any]
) -> None:
    body = {"model": server["model"], "prompt": "one two three", "max_tokens": 4}
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        client.post(f"{server['url']}/v1/completions", json=body).raise_for_status()

    def looked() -> str | None:
        done = shown.shell.run(shown.look)
        return done.stdout if done.returncode == 0 else None

    assert "prefill" in wait_for(looked, f"{shown.look} shows the request")


def test_histograms_of_gateway_and_agent_have_the_limits_as_edges(
    shown: Shown, server: dict[str, Any]
) -> None:
    for url in (server["url"], server["agent_url"]):
        exposed = get(f"{url}/metrics").text
        assert 'le="0.8"' in exposed, url
        assert 'le="0.07"' in exposed, url


def test_prometheus_has_each_rule_once_with_these_limits(shown: Shown) -> None:
    groups = get(f"{shown.program('prometheus')['url']}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    alerting = [rule for rule in rules if rule["type"] == "alerting"]
    assert sorted(rule["name"] for rule in alerting) == sorted(
        alert.name for alert in alerts(DEFAULT_SLO)
    )
    queries = " ".join(rule["query"] for rule in rules)
    assert 'le="0.8"' in queries
    assert f'le="{DEFAULT_SLO.ttft_s:g}"' not in queries
    for rule in alerting:
        page = httpx.URL(rule["annotations"]["runbook_url"])
        assert page.scheme == "file"
        assert Path(page.path).read_text().startswith(f"# {rule['name']}\n")


def test_jaeger_keeps_and_the_agent_asks_for_what_misses_these_limits(
    shown: Shown, server: dict[str, Any]
) -> None:
    agent = next(one["pid"] for one in server["processes"] if one["instance"] == "agent")
    for pid in (shown.program("jaeger")["process"]["pid"], agent):
        told = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert {"PD_SLO_TTFT_S=0.8", "PD_SLO_TOKEN_GAP_S=0.07"} <= set(told)


def test_boards_are_drawn_with_these_limits(shown: Shown) -> None:
    boards = shown.folder / "generated" / "boards"
    assert '"value": 0.07' in (boards / "pd-overview.json").read_text()


def test_stack_that_is_up_says_that_it_keeps_its_options(shown: Shown) -> None:
    again = f"{sys.executable} -m server stack up --dir 'a stack'"
    other = shown.shell.run(f"{again} --keep 5")
    assert other.returncode == 0
    assert f"keeps its options; for others stop it: {shown.stop}" in other.stderr
    assert shown.shell.run(again).stderr == ""


def test_last_command_stops_this_stack(shown: Shown) -> None:
    """Runs last: the others need what it stops."""
    assert shown.program("jaeger")
    done = shown.shell.run(shown.stop)
    assert done.stdout == "stopped: prometheus, alertmanager, jaeger\n", done.stderr
    assert not (shown.folder / "stack.json").exists()
