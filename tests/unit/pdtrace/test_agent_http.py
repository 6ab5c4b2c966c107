"""The agent's endpoint: routes, bounds on what a client may cost, and where it says it is."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdtrace.agent import endpoint as agent_endpoint
from pdtrace.agent.endpoint import (
    ADDRESS_NAME,
    MAX_THREADS,
    AgentHttp,
    HttpError,
    parse_bind,
    read_address,
)
from pdtrace.inflight import InFlight, Look
from pdtrace.stages import STAGES


def request(number: int, *, stage: str = "transfer") -> InFlight:
    return InFlight(
        request_id=f"req-{number}",
        trace_id=f"{number:032x}",
        root_span_id=f"{number:016x}",
        attempt=1,
        mode="pd",
        age_s=float(number),
        stage=stage,
        stage_age_s=1.0,
    )


LOOK = Look(
    at_ns=5,
    requests=(request(1), request(2, stage="decode.reserve"), request(3)),
    problems=("decode-0: 3 records damaged",),
)


class Served:
    """An endpoint with what it serves in the test's hands."""

    def __init__(self, **more: Any) -> None:
        self.look: Callable[[], Look] = lambda: LOOK
        self.healthy = True
        self.http = AgentHttp(
            "127.0.0.1:0",
            look=self._look,
            metrics=lambda accept: (f"# {accept}\n".encode(), "text/plain; version=1.0.0"),
            health=self._health,
            **more,
        )
        self.port = int(self.http.url.rpartition(":")[2])

    def _look(self) -> Look:
        return self.look()

    def _health(self) -> tuple[bool, Mapping[str, object]]:
        return self.healthy, {"status": "ok" if self.healthy else "behind", "lag_s": 0.1}

    def get(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@pytest.fixture
def served() -> Iterator[Served]:
    endpoint = Served()
    yield endpoint
    endpoint.http.close()


def look_of(body: bytes) -> Look:
    return msgspec.json.decode(body, type=Look)


def test_inflight_is_the_look_as_json(served: Served) -> None:
    status, headers, body = served.get("/inflight")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert look_of(body) == LOOK


def test_inflight_is_filtered_by_id_trace_and_stage(served: Served) -> None:
    def ids(query: str) -> list[str]:
        return [r.request_id for r in look_of(served.get(f"/inflight?{query}")[2]).requests]

    assert ids("id=req-2") == ["req-2"]
    assert ids(f"id={3:032x}") == ["req-3"]
    assert ids("id=req-2&id=req-3") == ["req-2", "req-3"]
    assert ids("id=nobody") == []
    assert ids("stage=transfer") == ["req-1", "req-3"]
    assert ids("stage=transfer&id=req-2") == []


def test_limit_shows_the_oldest_and_says_so(served: Served) -> None:
    shown = look_of(served.get("/inflight?limit=2")[2])
    assert [r.request_id for r in shown.requests] == ["req-3", "req-2"]
    assert shown.problems[-1] == "the 2 oldest of 3 requests are shown"
    served.look = lambda: msgspec.structs.replace(
        LOOK, requests=tuple(request(n) for n in range(1_500))
    )
    assert len(look_of(served.get("/inflight")[2]).requests) == 1_000
    assert len(look_of(served.get("/inflight?limit=5000")[2]).requests) == 1_500


def test_stage_that_does_not_exist_is_refused_with_those_that_do(served: Served) -> None:
    """No requests in it would look like good news."""
    status, _, body = served.get("/inflight?stage=decode.reserve&stage=decode.reserv")
    assert status == 400
    message = json.loads(body)["error"]
    assert message.startswith("'decode.reserv' is no stage; there are gateway.ingest, ")
    assert all(stage.name in message for stage in STAGES)


@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=many", "limit=1e3", "age=3", "age=", "stage="]
)
def test_wrong_filter_is_one_clear_line(served: Served, query: str) -> None:
    status, _, body = served.get(f"/inflight?{query}")
    assert status == 400
    assert query.partition("=")[0] in json.loads(body)["error"]


def test_metrics_go_by_accept(served: Served) -> None:
    status, headers, body = served.get("/metrics", Accept="application/openmetrics-text")
    assert (status, body) == (200, b"# application/openmetrics-text\n")
    assert headers["Content-Type"].startswith("text/plain")


def test_health_is_200_while_the_agent_keeps_up_and_503_when_not(served: Served) -> None:
    status, _, body = served.get("/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")
    served.healthy = False
    status, _, body = served.get("/health")
    assert (status, json.loads(body)["status"]) == (503, "behind")


def test_other_paths_and_methods_are_refused(served: Served) -> None:
    assert served.get("/")[0] == 404
    assert served.get("/metrics/../etc/passwd")[0] == 404
    status, headers, _ = served.get("/inflight", method="POST")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, headers, body = served.get("/inflight", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1", ""]
)
def test_name_that_is_not_this_endpoint_is_refused(served: Served, host: str) -> None:
    """A page in a browser reaches loopback under a name of its own (DNS rebinding)."""
    status, _, body = served.get("/inflight", Host=host)
    assert status == 403
    assert b"req-" not in body


@pytest.mark.parametrize("host", ["localhost", "LocalHost:99", "127.0.0.1:1", "[::1]:80"])
def test_names_of_loopback_are_taken(served: Served, host: str) -> None:
    assert served.get("/health", Host=host)[0] == 200


def test_fault_of_ours_is_500_and_said_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Look:
        raise ZeroDivisionError

    served.look = broken
    for _ in range(3):
        status, _, body = served.get("/inflight")
        assert status == 500
        assert b"ZeroDivisionError" in body
    assert caplog.text.count("GET /inflight failed") == 1
    assert served.get("/health")[0] == 200


def test_request_that_is_too_large_is_refused(served: Served) -> None:
    assert served.get("/inflight?id=" + "x" * 20_000)[0] == 431
    assert served.get("/health", **{f"X-{n}": "y" * 1_000 for n in range(40)})[0] == 431
    assert served.get("/health")[0] == 200


def test_garbage_and_clients_that_leave_do_not_disturb(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    for data in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"", b"GET /infl"):
        with served.raw() as client:
            client.sendall(data)
    assert served.get("/health")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_silent_clients_are_cut_off_and_others_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_endpoint, "HEAD_S", 0.5)
    served = Served()
    try:
        silent = [served.raw() for _ in range(MAX_THREADS)]
        for client in silent:
            client.sendall(b"GET /health HTTP/1.1\r\n")
        statuses: set[int] = set()
        deadline = time.monotonic() + 30
        while 200 not in statuses:
            assert time.monotonic() < deadline, statuses
            try:
                statuses.add(served.get("/health")[0])
            except (ConnectionError, http.client.HTTPException):
                continue  # refused before it had sent its request
        assert statuses <= {200, 503}
        for client in silent:
            client.close()
    finally:
        served.http.close()


def test_answer_may_take_longer_than_the_request(served: Served) -> None:
    def slow() -> Look:
        time.sleep(agent_endpoint.HEAD_S + 0.5)
        return LOOK

    served.look = slow
    assert served.get("/inflight")[0] == 200


def test_answers_at_the_same_time(served: Served) -> None:
    slow_begun, go_on = threading.Event(), threading.Event()

    def slow() -> Look:
        slow_begun.set()
        assert go_on.wait(30)
        return LOOK

    served.look = slow
    statuses: list[int] = []
    client = threading.Thread(target=lambda: statuses.append(served.get("/inflight")[0]))
    client.start()
    assert slow_begun.wait(30)
    assert served.get("/health")[0] == 200
    go_on.set()
    client.join(30)
    assert statuses == [200]


def test_address_stands_in_the_run_directory_until_closed(tmp_path: Path) -> None:
    served = Served(out=tmp_path)
    address = read_address(tmp_path)
    assert address is not None
    assert (address.url, address.pid) == (served.http.url, os.getpid())
    served.http.close()
    served.http.close()
    assert read_address(tmp_path) is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConnectionRefusedError):
        served.raw()


def test_address_of_the_agent_that_came_after_is_left_alone(tmp_path: Path) -> None:
    first, second = Served(out=tmp_path), Served(out=tmp_path)
    first.http.close()
    address = read_address(tmp_path)
    assert address is not None
    assert address.url == second.http.url
    second.http.close()


def test_endpoint_that_nobody_asks_sleeps_and_closes_at_once(served: Served) -> None:
    assert served.get("/health")[0] == 200
    (thread,) = (t for t in threading.enumerate() if t.name == "agent-http")
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def pauses() -> int:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["voluntary_ctxt_switches"])

    deadline_s = time.monotonic() + 30  # until the thread that has answered is gone
    while True:
        before = pauses()
        time.sleep(0.5)
        if pauses() == before:
            break
        assert time.monotonic() < deadline_s, "the endpoint wakes although nobody asks"
    served.http.close()
    assert not thread.is_alive()


def test_address_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_address(tmp_path / "none") is None
    (tmp_path / ADDRESS_NAME).write_text("{ damaged")
    assert read_address(tmp_path) is None


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:9", ("127.0.0.1", 9)),
        ("[::1]:80", ("::1", 80)),
        ("127.9.9.9:1", ("127.9.9.9", 1)),
    ],
)
def test_addresses_to_bind_to(bind: str, expected: tuple[str, int]) -> None:
    assert parse_bind(bind) == expected


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("127.0.0.1", "no address"),
        ("127.0.0.1:", "no address"),
        (":80", "no address"),
        ("127.0.0.1:http", "no address"),
        ("127.0.0.1:70000", "no address"),
        ("::1:80", "no address"),
        ("example.org:80", "no IP address"),
        ("0.0.0.0:80", "not loopback"),
        ("[::]:80", "not loopback"),
        ("10.0.0.1:80", "not loopback"),
    ],
)
def test_address_that_cannot_be_bound_is_one_clear_line(bind: str, message: str) -> None:
    with pytest.raises(HttpError, match=message):
        parse_bind(bind)


def test_other_hosts_are_allowed_when_asked_for() -> None:
    assert parse_bind("0.0.0.0:80", any_host=True) == ("0.0.0.0", 80)


def test_port_in_use_is_one_clear_line(served: Served) -> None:
    with pytest.raises(HttpError, match=f"cannot listen on 127.0.0.1:{served.port}"):
        AgentHttp(
            f"127.0.0.1:{served.port}",
            look=lambda: LOOK,
            metrics=lambda accept: (b"", ""),
            health=lambda: (True, {}),
        )
