"""Faults that were reported of other servers under stress, tried on this one: dead work in the way
of live work, starvation, queues that never empty. One server, and one with a single place."""

from __future__ import annotations

import http.client
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import build_timelines
from pdtrace.ring.reader import RingReader
from pdtrace.spans import Span
from pdtrace.stages import Gauge, Outcome, Role
from server.injection.fault import Drop, Repeat, name_of
from tests.support.completions import Ask, ask
from tests.support.injection import inject, injected, wait_injected
from tests.support.recorded import in_flight, is_root, spans_by_request, spans_of, wait_for
from tests.support.server import ROOT, RunningServer, running_server

pytestmark = pytest.mark.server

MODEL = "fake:step_ms=1,token_us=1000"
"""A prompt of 3000 tokens takes 3 s, in chunks of 32 ms; a step of the batch some milliseconds."""
LONG = 3000
OPTIONS = (
    "--allow-faults",
    *("--max-concurrency", "16", "--max-queue", "4", "--max-waiting", "12"),
    *("--prefill-budget", "32", "--prefill-pages", "1024", "--decode-pages", "2400"),
)
GENEROUS_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run_dir = tmp_path_factory.mktemp("stress") / "run"
    with running_server(run_dir, *OPTIONS, model=MODEL) as server:
        yield server
        check_logs(server)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that admits one request at a time."""
    run_dir = tmp_path_factory.mktemp("narrow") / "run"
    with running_server(run_dir, "--max-concurrency", "1", model="fake:step_ms=2") as server:
        yield server
        check_logs(server)


def check_logs(server: RunningServer) -> None:
    """Whoever was idle was whole, and nothing raised."""
    for process in server.state["processes"]:
        text = server.log(str(process["instance"]))
        assert "is not whole" not in text
        assert "Traceback" not in text


def tokens(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 90 + 33 for i in range(length)]


def gateway_metric(server: RunningServer, name: str) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


def check_recovered(server: RunningServer) -> None:
    """A probe is served, and every gauge is back where it is when nothing is in flight."""
    assert ask(server, Ask(prompt=tokens(9, 50), max_tokens=4)).status == 200

    def idle() -> bool:
        gauges: dict[str, Mapping[Gauge, int]] = {}
        for path in (server.run_dir / "rings").glob("*.ring"):
            with RingReader(path) as reader:
                gauges[reader.identity.role] = reader.gauges()
        prefill, decode = gauges[Role.PREFILL], gauges[Role.DECODE]
        return (
            decode[Gauge.KV_PAGES_FREE] == decode[Gauge.KV_PAGES_TOTAL]
            and prefill[Gauge.KV_PAGES_USED] == prefill[Gauge.HELD_PAGES] == 0
            and decode[Gauge.HELD_PAGES] == gauges[Role.TRANSFER][Gauge.COPY_JOBS_WAITING] == 0
            and prefill[Gauge.IN_FLIGHT] == decode[Gauge.IN_FLIGHT] == 0
            and gateway_metric(server, "pd_requests_in_flight") == 0
            and gateway_metric(server, "pd_gateway_queue_depth") == 0
        )

    wait_for(idle, "gauges of an idle server")


def post(server: RunningServer, request_id: str, body: Mapping[str, Any]) -> socket.socket:
    """The connection of a request that has been sent."""
    url = httpx.URL(server.url)
    content = json.dumps({"model": server.model, "ignore_eos": True, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc.decode()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        f"X-Request-Id: {request_id}\r\n\r\n"
    )
    connection = socket.create_connection((url.host, url.port or 80), timeout=30)
    connection.sendall(head.encode() + content)
    return connection


def all_spans(server: RunningServer, names: Sequence[str]) -> dict[str, list[Span]]:
    """Spans of each of these requests, root first, once all are written."""
    found: dict[str, list[Span]] = {}

    def written() -> bool:
        for spans in spans_by_request(server).values():
            roots = [span for span in spans if is_root(span)]
            if roots:
                name = str(roots[0].attributes[a.REQUEST_ID.key])
                found[name] = sorted(spans, key=lambda span: not is_root(span))
        return set(names) <= found.keys()

    wait_for(written, f"{len(names)} recorded requests")
    return {name: found[name] for name in names}


def check_cancelled(root: Span, *others: Span) -> str:
    """The stage in which its client left, where the trace ends."""
    assert root.attributes[a.OUTCOME.key] == Outcome.CANCELLED
    assert root.attributes[a.OUTCOME_BY.key] == "client"
    stage = str(root.attributes[a.OUTCOME_STAGE.key])
    (last,) = [span for span in others if span.name == stage]
    assert last.attributes[a.OUTCOME.key] == Outcome.CANCELLED
    return stage


@pytest.mark.case("CAN-02")
def test_short_request_does_not_wait_for_prompts_whose_clients_have_left(
    server: RunningServer,
) -> None:
    def seconds(name: str) -> float:
        begun_s = time.monotonic()
        answer = ask(server, Ask(prompt=tokens(32, 60), max_tokens=1, request_id=name))
        assert answer.status == 200
        return time.monotonic() - begun_s

    idle_s = seconds("idle-short")
    names = [f"left-{number}" for number in range(10)]
    with ExitStack() as connections:
        for number, name in enumerate(names):
            body = {"prompt": tokens(LONG, number), "max_tokens": 4, "stream": True}
            connections.enter_context(post(server, name, body))
        wait_for(
            lambda: (in_flight(server, names[0]) or {}).get("stage") == "prefill.compute",
            "a prompt that is computed",
        )
    # 30 s of work are left, unless it has stopped; a step that runs may end, and so may noise.
    assert seconds("live-short") <= 2 * idle_s + 5
    stages: Counter[str] = Counter()
    for spans in all_spans(server, names).values():
        stages[check_cancelled(*spans)] += 1
        assert {"decode.generate", "decode.first", "transfer"}.isdisjoint(s.name for s in spans)
    assert stages["prefill.compute"] >= 1
    assert stages["prefill.queue"] >= 5
    check_recovered(server)


@pytest.mark.case("CAN-03")
def test_request_after_one_that_was_cancelled_at_any_point_of_its_prefill_is_served(
    server: RunningServer,
) -> None:
    chance = random.Random(3)
    stages: Counter[str] = Counter()
    for number in range(50):
        name = f"cancelled-{number}"
        body = {"prompt": tokens(160, number), "max_tokens": 4, "stream": number % 2 == 0}
        with post(server, name, body):
            time.sleep(chance.uniform(0, 0.16))
        answer = ask(server, Ask(prompt=tokens(8, number), max_tokens=2))
        assert answer.status == 200
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == 2
    for spans in all_spans(server, [f"cancelled-{number}" for number in range(50)]).values():
        if spans[0].attributes[a.OUTCOME.key] != Outcome.COMPLETED:  # the client left too late
            stages[check_cancelled(*spans)] += 1
    assert sum(stages.values()) >= 25
    check_recovered(server)


@pytest.mark.case("SCH-01")
def test_running_streams_end_while_new_requests_keep_coming(server: RunningServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        streams = [
            pool.submit(
                ask,
                server,
                Ask(prompt=tokens(20, n), max_tokens=150, stream=True, request_id=f"stream-{n}"),
            )
            for n in range(2)
        ]

        def flow(first: int) -> int:
            count = 0
            while not all(stream.done() for stream in streams):
                ask(server, Ask(prompt=tokens(64, first + count), max_tokens=1))
                count += 1
            return count

        flows = [pool.submit(flow, 1000 * n) for n in range(4)]
        for stream in streams:  # starved, they would not end before the flow does: never
            answer = stream.result(timeout=GENEROUS_S)
            assert answer.status == 200
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == 150
        assert sum(each.result() for each in flows) > 10
    for number in range(2):
        _, *spans = spans_of(server, f"stream-{number}")
        gaps = [span for span in spans if span.name == "decode.gap"]
        # Whatever a slow machine made late: no prompt runs where streams do.
        assert "interfering_prefill" not in {span.attributes[a.GAP_CAUSE.key] for span in gaps}
    check_recovered(server)


@pytest.mark.case("SCH-02")
def test_short_request_behind_a_long_prompt_is_told_who_was_in_its_way(
    server: RunningServer,
) -> None:
    with ThreadPoolExecutor() as pool:
        long = pool.submit(
            ask, server, Ask(prompt=tokens(2 * LONG, 11), max_tokens=1, request_id="long")
        )
        wait_for(
            lambda: (in_flight(server, "long") or {}).get("stage") == "prefill.compute",
            "a long prompt that is computed",
        )
        short = ask(server, Ask(prompt=tokens(40, 12), max_tokens=1, request_id="short"))
        assert short.status == long.result().status == 200
    (queued,) = [span for span in spans_of(server, "short") if span.name == "prefill.queue"]
    assert queued.attributes[a.WAIT_REASON.key] == "token_budget"
    assert queued.attributes[a.WAIT_BLOCKER.key] == "long"
    done = subprocess.run(
        [*(sys.executable, "-m", "pdtrace", "why", "short"), "--from", str(server.run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    assert "prefill.queue" in done.stdout
    assert "long" in done.stdout
    check_recovered(server)


@pytest.mark.parametrize(
    ("message", "at"),
    [
        ("PagesReserved", "prefill-0"),
        ("Handoff", "decode-0"),
        ("CopyDone", "decode-0"),
        ("CopyDone", "prefill-0"),
        ("LegClosed", "gateway-0"),
    ],
)
def test_message_that_is_lost_between_processes_costs_a_moment_and_no_request(
    server: RunningServer, message: str, at: str
) -> None:
    name = f"without-{message}-{at}"
    fault = Drop(at=at, message=message)
    acted = injected(server, at=at)[name_of(fault)]
    inject(server, fault)
    answer = ask(server, Ask(prompt=tokens(40, 21), max_tokens=8, request_id=name))
    assert answer.status == 200
    assert answer.text == ask(server, Ask(prompt=tokens(40, 21), max_tokens=8)).text
    wait_injected(server, fault, acted + 1, at=at)
    root, *_ = spans_of(server, name)
    assert root.attributes[a.OUTCOME.key] == Outcome.COMPLETED
    (timeline,) = [
        timeline
        for timeline in build_timelines(read_source(server.run_dir).traces)
        if timeline.request_id == name
    ]
    assert timeline.violations == ()
    assert timeline.attempts == 1, "made good, not tried again"
    check_recovered(server)


def test_message_that_comes_twice_changes_nothing_and_is_counted(server: RunningServer) -> None:
    fault = Repeat(at="decode-0", message="CopyDone")
    acted = injected(server, at="decode-0")[name_of(fault)]
    inject(server, fault)
    assert ask(server, Ask(prompt=tokens(40, 22), max_tokens=8)).status == 200
    wait_injected(server, fault, acted + 1, at="decode-0")

    def counted() -> bool:
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        series = [line for line in lines if line.startswith("pd_messages_ignored_total{")]
        return any(
            all(word in line for word in ('process="decode-0"', 'type="CopyDone"', 'why="'))
            for line in series
        )

    wait_for(counted, "the count of a repeated message")
    check_recovered(server)


@pytest.mark.case("SCH-07")
def test_two_thousand_requests_at_a_small_queue_all_end(server: RunningServer) -> None:
    """Sent = finished + refused, each by the gateway or a worker, fast and with a reason.

    The last one on its server: reading the recording takes longer from here on.
    """
    url = httpx.URL(server.url)
    before = gateway_metric(server, "pd_requests_total")

    def send(worker: int) -> Counter[tuple[int, str]]:
        ends: Counter[tuple[int, str]] = Counter()
        connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=GENEROUS_S)
        for number in range(50):
            body = json.dumps(
                {
                    "model": server.model,
                    "prompt": tokens(2, 50 * worker + number),
                    "max_tokens": 2,
                    "ignore_eos": True,
                }
            )
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            code = str(answer["error"]["code"]) if response.status != 200 else ""
            ends[response.status, code] += 1
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
        connection.close()
        return ends

    with ThreadPoolExecutor(40) as pool:
        ends = sum(pool.map(send, range(40)), Counter[tuple[int, str]]())
    assert ends.total() == 2000
    assert ends[200, ""] >= 100
    assert {status for status, _ in ends} <= {200, 429, 503}
    wait_for(
        lambda: gateway_metric(server, "pd_requests_total") - before == 2000,
        "the gateway's count of all of them",
    )
    check_recovered(server)


@pytest.mark.case("CAN-08")
def test_client_that_leaves_a_request_without_stream_frees_its_place_at_once(
    narrow: RunningServer,
) -> None:
    body = {"prompt": tokens(20), "max_tokens": 5000, "stream": False}
    before = decode_steps(narrow)
    with post(narrow, "gone", body):
        wait_for(
            lambda: (in_flight(narrow, "gone") or {}).get("stage") == "decode.generate",
            "a request that generates",
        )
        steps = decode_steps(narrow)
        wait_for(lambda: decode_steps(narrow) > steps + 20, "tokens")
    answer = ask(narrow, Ask(prompt=tokens(9, 5), max_tokens=4, request_id="next"))
    assert answer.status == 200
    spans = spans_of(narrow, "gone")
    assert check_cancelled(*spans) == "decode.generate"
    # It was stopped long before its 5000 tokens.
    assert decode_steps(narrow) < before + 4000
    check_recovered(narrow)


def decode_steps(server: RunningServer) -> int:
    (path,) = (server.run_dir / "rings").glob("decode-0-*.ring")
    with RingReader(path) as reader:
        return reader.gauges()[Gauge.STEPS]
