"""A server's secrets and folders are its user's, and hostile ids stay what they are: text."""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import EDGE_KEY
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


def test_hostile_ids_and_headers_reach_no_log_line_metric_or_label(
    edge_server: RunningServer,
) -> None:
    key = f"Authorization: Bearer {EDGE_KEY}\r\n".encode()
    statuses: set[int] = set()
    for value in HOSTILE.values():
        for name in HEADERS:
            header = f"{name}: ".encode() + value + b"\r\n"
            statuses.add(post(edge_server, header + key, edge_server.model))
        statuses.add(post(edge_server, key, value.decode()))
    assert 200 in statuses
    assert statuses <= {200, 400, 401, 404}
    with edge_server.client() as client:
        assert MARK not in client.get("/metrics").text
    for log in sorted((edge_server.run_dir / "logs").glob("*.log")):
        for line in log.read_text().splitlines():
            assert line.isprintable(), (log.name, line)
            assert len(line) < 2000, log.name
            assert not re.search(
                rf"(^|[ ,]){MARK}|outcome={MARK} ", re.sub(r'"(\\.|[^"\\])*"', "", line)
            ), line


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
