"""A server's secrets and folders are its user's, and hostile ids stay what they are: text."""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import decode_line
from tests.integration.conftest import EDGE_KEY
from tests.support.aftermath import assert_recovered
from tests.support.completions import Ask
from tests.support.otlp_receivers import Received
from tests.support.recorded import wait_for
from tests.support.server import ROOT, RunningServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

MARK = "FORGED"
HOSTILE = {
    "newline": b"a\nFORGED=1",
    "carriage return": b"a\r\nX-Forged: FORGED",
    "spaces": b"a outcome=FORGED request_id=b",
    "quotes": b"\"FORGED\" 'x' \\",
    "percent": b"%s%n%d%(FORGED)s",
    "control": b"\x1b[31mFORGED\x07\x00",
    "unicode": "FORGED\u202e\u2028é🌍".encode(),
    "long": b"FORGED" * 1700,
}
MAX_CHARS = 4096
HEADERS = ("X-Request-Id", "traceparent", "tracestate", "Authorization", "X-Other")


def post(server: RunningServer, headers: bytes, model: str) -> int:
    """Status of a generation asked for with these bytes as headers."""
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 2}).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            + headers
            + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head = answer.partition(b"\r\n\r\n")[0]
    assert b"\r\nX-Forged" not in head
    return int(head.split()[1])


@pytest.fixture(scope="module")
def attacked(edge_server: RunningServer) -> RunningServer:
    """The server after requests with each of these in every header and as the model's name."""
    key = f"Authorization: Bearer {EDGE_KEY}\r\n".encode()
    statuses: set[int] = set()
    for value in HOSTILE.values():
        for name in HEADERS:
            header = f"{name}: ".encode() + value + b"\r\n"
            statuses.add(post(edge_server, header + key, edge_server.model))
        statuses.add(post(edge_server, key, value.decode()))
    for name in ("\ud800", "\0", 'm",x="1"} 1\n# EOF'):
        statuses.add(post(edge_server, key, name))
    assert 200 in statuses
    assert statuses <= {200, 400, 401, 404}
    assert_recovered(
        edge_server,
        probe=Ask(request_id="behind-them", headers={"authorization": f"Bearer {EDGE_KEY}"}),
    )
    return edge_server


def test_hostile_ids_and_headers_reach_no_log_line(attacked: RunningServer) -> None:
    for log in sorted((attacked.run_dir / "logs").glob("*.log")):
        for line in log.read_text().split("\n"):
            assert line.isprintable(), (log.name, line)
            assert len(line) < 2000, log.name
            assert not re.search(
                rf"(^|[ ,]){MARK}|outcome={MARK} ", re.sub(r'"(\\.|[^"\\])*"', "", line)
            ), line


@pytest.mark.parametrize("of", ["gateway", "agent"])
def test_metrics_are_valid_and_have_nothing_of_a_caller(attacked: RunningServer, of: str) -> None:
    url = attacked.url if of == "gateway" else attacked.agent_url()
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(f"{url}/metrics", headers=accept, timeout=60, trust_env=False)
    assert answer.status_code == 200
    is_open = answer.headers["content-type"].startswith("application/openmetrics-text")
    parse = openmetrics if is_open else prometheus
    samples = [sample for family in parse(answer.text) for sample in family.samples]
    assert len(samples) > 20
    assert MARK not in answer.text


def test_spans_on_disk_and_on_the_wire_have_callers_words_as_bounded_values_alone(
    attacked: RunningServer, edge_collector: Received
) -> None:
    def exported() -> list[Any]:
        return [
            span
            for span in edge_collector.spans()
            for item in span.attributes
            if item.key == "pd.request.id" and item.value.string_value == "behind-them"
        ]

    wait_for(lambda: bool(exported()), "the last request at the collector")
    seen = 0
    for line in lines_since(attacked.run_dir / "traces"):
        json.loads(line)
        assert min(line.rstrip(b"\n")) >= ord(" ")
        for span in decode_line(line):
            check_words(span.name, span.attributes)
            seen += any(MARK in str(value) for value in span.attributes.values())
    assert seen, "what callers chose is there to be searched for"
    for span in edge_collector.spans():
        check_words(
            span.name,
            {item.key: item.value.string_value for item in span.attributes},
        )
        assert span.trace_state.isprintable()


def check_words(name: str, attributes: Mapping[str, Any]) -> None:
    assert MARK not in name
    for key, value in attributes.items():
        assert MARK not in key
        if isinstance(value, str):
            assert len(value) <= MAX_CHARS, key
            assert key not in {"pd.request.id", "pd.handoff.id"} or value.isprintable()


@pytest.mark.parametrize(
    "command", [("why", "--slowest", "200"), ("check",), ("top", "--once")], ids=" ".join
)
def test_terminal_gets_nothing_of_a_caller_but_text(
    attacked: RunningServer, command: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdtrace", *command, "--from", str(attacked.run_dir)],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    for line in (done.stdout + done.stderr).decode().split("\n"):
        assert line.isprintable(), line


def test_no_file_is_named_by_a_caller(attacked: RunningServer) -> None:
    assert not [path for path in attacked.run_dir.rglob("*") if MARK in path.name]
    assert not list(attacked.run_dir.parent.glob(f"*{MARK}*"))


def test_api_key_is_nowhere_but_in_the_gateways_configuration(edge_server: RunningServer) -> None:
    found = {
        str(path.relative_to(edge_server.run_dir))
        for path in edge_server.run_dir.rglob("*")
        if path.is_file() and EDGE_KEY.encode() in path.read_bytes()
    }
    assert found == {"config/gateway-0.json"}
    assert EDGE_KEY not in edge_server.stderr + json.dumps(edge_server.state)


def test_run_directory_is_its_users_alone(edge_server: RunningServer) -> None:
    seen = {"folders": 0, "files": 0}
    for path in [edge_server.run_dir, *edge_server.run_dir.rglob("*")]:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            seen["folders"] += 1
            assert stat.S_IMODE(mode) == 0o700, path
        elif stat.S_ISREG(mode):
            seen["files"] += 1
    assert min(seen.values()) >= 5
    rings = list((edge_server.run_dir / "rings").iterdir())
    assert rings
    assert {stat.S_IMODE(ring.stat().st_mode) & ~0o600 for ring in rings} == {0}


def test_second_server_on_a_run_directory_is_refused(edge_server: RunningServer) -> None:
    second = subprocess.run(
        [
            *(sys.executable, "-m", "server", "up", "--port", "0", "--model", "fake"),
            *("--run-dir", str(edge_server.run_dir), "--fresh"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert second.returncode == 2
    assert len(second.stderr.strip().splitlines()) == 1
    assert "another server" in second.stderr or "in use" in second.stderr
    assert Path(edge_server.run_dir / "server.json").exists()
