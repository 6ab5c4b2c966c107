"""Faults that were reported of other servers, tried on this one: identity, traces, leaving clients.

One server for each way through the processes; each has another routing policy.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdtrace import semconv as a
from pdtrace.propagation import RequestContext, extract, inject
from pdtrace.spans import Span, StatusCode
from pdtrace.stages import ATTEMPT_SPAN, CHAINS, STAGE_BY_NAME, Mode, Outcome
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Ask, ask
from tests.support.recorded import in_flight, is_root, recorded, spans_of, wait_for
from tests.support.server import RunningServer, running_server
from tests.support.slowness import is_of_the_machine

pytestmark = pytest.mark.server

CALLER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"
NS_PER_S = 1_000_000_000
HELD_MS = 50_000
"""Longer than a test waits for what ends a hold."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A way through the processes, and the services that a request meets on it."""

    mode: Mode
    options: tuple[str, ...]
    services: frozenset[str]


PD_SERVICES = frozenset({"pd-gateway", "pd-prefill", "pd-transfer", "pd-decode"})
SHAPES = {
    "pd, least loaded": Shape(Mode.PD, ("--policy", "least_loaded"), PD_SERVICES),
    "early over tcp, in turn": Shape(
        Mode.PD_EARLY,
        (
            *("--first-token", "prefill", "--transfer", "tcp", "--policy", "round_robin"),
            *("--prefill", "2", "--decode", "2"),
        ),
        PD_SERVICES,
    ),
    "colocated, by prefix": Shape(
        Mode.COLOCATED,
        ("--mode", "colocated", "--policy", "prefix_aware", "--workers", "2"),
        frozenset({"pd-gateway", "pd-worker"}),
    ),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shape, RunningServer]]:
    """A running server of each shape."""
    shape = SHAPES[request.param]
    run_dir = tmp_path_factory.mktemp(shape.mode.value) / "run"
    with running_server(run_dir, "--allow-faults", *shape.options, model=FAST_FAKE) as server:
        yield shape, server


def caller(span: str = CALLER_SPAN, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{CALLER_TRACE}-{span}-{flags}"}


def check_linked(spans: list[Span], services: frozenset[str], parent: str) -> None:
    """One trace, one root below the caller's span, everything else below that root."""
    root, *others = spans
    assert {span.trace_id for span in spans} == {CALLER_TRACE}
    assert [span for span in spans if span.parent_id == parent] == [root]
    assert is_root(root)
    assert root.resource.service_name == "pd-gateway"
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans)
    for span in others:
        assert not is_root(span)
        assert span.parent_id in known, span.name
        assert span.name in {ATTEMPT_SPAN, *STAGE_BY_NAME}, span.name
    assert {span.resource.service_name for span in spans} == services


# -- context propagation --------------------------------------------------------------------------


@pytest.mark.case("CTX-01")
@pytest.mark.case("CTX-03")
@pytest.mark.case("CTX-05")
def test_request_is_one_tree_below_the_callers_span_on_every_way(
    way: tuple[Shape, RunningServer],
) -> None:
    shape, server = way
    for number in range(4):  # several, so that a policy makes more than its first choice
        name = f"linked-{number}"
        answer = ask(
            server, Ask(request_id=name, prompt=f"{number}" * 40, max_tokens=4, headers=caller())
        )
        assert answer.status == 200
        check_linked(spans_of(server, name), shape.services, CALLER_SPAN)


@pytest.mark.case("CTX-01")
def test_request_through_another_recording_gateway_stays_in_the_callers_trace(
    way: tuple[Shape, RunningServer],
) -> None:
    shape, server = way
    front = RequestContext.create(parent=extract(caller()), request_id="front")
    answer = ask(server, Ask(request_id="behind", headers=inject(front)))
    assert answer.status == 200
    spans = spans_of(server, "behind")
    assert spans[0].parent_id == front.attempt_span_id != CALLER_SPAN
    check_linked(spans, shape.services, front.attempt_span_id)


@pytest.mark.case("CTX-05")
def test_request_that_waited_for_a_worker_is_linked_all_the_same(
    way: tuple[Shape, RunningServer],
) -> None:
    shape, server = way
    role = "worker" if shape.mode is Mode.COLOCATED else "decode"
    pids = [int(p["pid"]) for p in server.state["processes"] if p["role"] == role]
    with server.client() as client, ThreadPoolExecutor() as pool:
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: client.get("/ready").status_code == 503, "dead workers")
            answer = pool.submit(ask, server, Ask(request_id="early-bird", headers=caller()))
            wait_for(
                lambda: wait_reason(server, "early-bird") == "no_worker",
                "a request without a worker",
            )
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert answer.result().status == 200
    spans = spans_of(server, "early-bird")
    check_linked(spans, shape.services, CALLER_SPAN)
    (queue,) = [span for span in spans if span.name == "gateway.queue"]
    assert queue.attributes[a.WAIT_REASON.key] == "no_worker"


@pytest.mark.case("CTX-08")
@pytest.mark.case("CTX-09")
@pytest.mark.parametrize("flags", ["00", "01"])
def test_answer_carries_the_callers_decision_and_log_and_files_have_both(
    fake_pd_server: RunningServer, flags: str
) -> None:
    name = f"flags-{flags}"
    answer = ask(fake_pd_server, Ask(request_id=name, max_tokens=2, headers=caller(flags=flags)))
    assert answer.headers["traceparent"].endswith(f"-{flags}")
    check_linked(spans_of(fake_pd_server, name), PD_SERVICES, CALLER_SPAN)
    wait_for(
        lambda: f"request_id={name} trace_id={CALLER_TRACE} " in fake_pd_server.log("gateway-0"),
        f"{name} in the gateway's log",
    )


@pytest.mark.case("CTX-10")
@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_headers_in_a_plain_dict_are_found_in_any_case(name: str) -> None:
    state = name.replace("parent", "state").replace("PARENT", "STATE")
    parent = extract({name: caller()["traceparent"], state: "v=1"})
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (CALLER_TRACE, CALLER_SPAN)
    assert parent.tracestate == "v=1"


@pytest.mark.case("CTX-12")
def test_fifty_streams_that_are_closed_leave_no_noise_and_one_end_each(
    tmp_path: Path,
) -> None:
    with running_server(tmp_path / "run", model="fake:step_ms=5") as server:

        def two_chunks(number: int) -> None:
            body = {**streaming(server.model), "max_tokens": 2000}
            headers = {"X-Request-Id": f"closed-{number}"}
            with (
                server.client() as client,
                client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
            ):
                chunks = response.iter_lines()
                next(chunks)
                next(chunks)

        with ThreadPoolExecutor(25) as pool:
            list(pool.map(two_chunks, range(50)))
        for number in range(50):
            root, *_ = spans_of(server, f"closed-{number}")
            assert root.attributes[a.OUTCOME.key] == Outcome.CANCELLED
        assert ask(server, Ask(max_tokens=2)).status == 200
        logs = {
            str(p["instance"]): server.log(str(p["instance"])) for p in server.state["processes"]
        }
    for instance, text in logs.items():
        bad = [
            line
            for line in text.splitlines()
            if re.search(r"Traceback|ERROR|WARNING|[Ff]ailed to detach|never retrieved", line)
            and not is_of_the_machine(line)
        ]
        assert bad == [], instance
    told = (tmp_path / "run.stderr").read_text().splitlines()
    said = [line for line in told if not is_of_the_machine(line)]
    assert said == [f"stopped; recorded in {tmp_path / 'run'}"]


@pytest.mark.case("CTX-16")
def test_request_whose_prefill_fails_has_errors_at_the_root_and_at_the_stage(
    tmp_path: Path,
) -> None:
    options = ("--allow-faults", "--max-retries", "0")
    with running_server(tmp_path / "run", *options, model=FAST_FAKE) as server:
        assert ask(server, Ask(max_tokens=2)).status == 200
        pid = server.pid("prefill-0")
        with ThreadPoolExecutor() as pool:
            held = Ask(request_id="failed", faults={"prefill.queue": HELD_MS})
            answer = pool.submit(ask, server, held)
            wait_for(
                lambda: (in_flight(server, "failed") or {}).get("stage") == "prefill.queue",
                "a request in prefill.queue",
            )
            os.kill(pid, signal.SIGSTOP)  # as good as dead, and it can still tell of it later
            try:
                status = answer.result().status
            finally:
                os.kill(pid, signal.SIGCONT)
        spans = spans_of(server, "failed")
    root = spans[0]
    assert status >= 500
    assert root.status is StatusCode.ERROR
    assert root.attributes[a.HTTP_STATUS.key] == status
    assert root.attributes[a.OUTCOME.key] == Outcome.FAILED
    assert root.attributes[a.ERROR_TYPE.key] == root.attributes[a.OUTCOME_REASON.key]
    assert root.attributes[a.OUTCOME_STAGE.key] == "prefill.queue"
    (stage,) = [span for span in spans if span.name == "prefill.queue"]
    assert stage.status is StatusCode.ERROR
    assert stage.attributes[a.OUTCOME_REASON.key]
    ok = {"gateway.ingest", "gateway.queue", "gateway.route", "decode.reserve"}
    assert {span.name for span in spans if span.status is StatusCode.ERROR}.isdisjoint(ok)


# -- span loss ------------------------------------------------------------------------------------


@pytest.mark.case("API-09")
@pytest.mark.parametrize(
    ("name", "content", "status", "code"),
    [
        ("no-json", b"{", 400, "invalid_request"),
        ("unknown-model", {"model": "gpt-9", "prompt": "x"}, 404, "model_not_found"),
        ("too-long", {"prompt": [1] * 9000}, 400, "context_length_exceeded"),
    ],
)
def test_refused_request_is_one_gateway_span_with_status_and_error(
    fake_pd_server: RunningServer,
    name: str,
    content: bytes | Mapping[str, Any],
    status: int,
    code: str,
) -> None:
    if not isinstance(content, bytes):
        content = json.dumps({"model": fake_pd_server.model, **content}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    with fake_pd_server.client() as client:
        response = client.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    root, *others = spans_of(fake_pd_server, name)
    assert root.resource.service_name == "pd-gateway"
    # The time it took to find the fault, and no stage that it never came to.
    assert [(span.name, span.status) for span in others] == [("gateway.ingest", StatusCode.ERROR)]
    assert root.attributes[a.HTTP_STATUS.key] == status
    assert root.attributes[a.OUTCOME.key] == Outcome.REJECTED
    assert root.attributes[a.ERROR_TYPE.key] == code


def wait_reason(server: RunningServer, request_id: str) -> str | None:
    """Why a request in flight waits."""
    wait = (in_flight(server, request_id) or {}).get("wait")
    return None if wait is None else str(wait["reason"])


def streaming(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "p" * 40, "stream": True, "ignore_eos": True}


def post(server: RunningServer, request_id: str, *, faults: Mapping[str, int]) -> socket.socket:
    """The connection of a streaming request that has been sent."""
    url = httpx.URL(server.url)
    body = json.dumps({**streaming(server.model), "max_tokens": 12}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc.decode()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: {request_id}\r\n"
        f"X-PD-Faults: {', '.join(f'{k}={v}' for k, v in faults.items())}\r\n\r\n"
    )
    connection = socket.create_connection((url.host, url.port or 80), timeout=30)
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.case("CAN-10")
def test_client_that_leaves_in_any_stage_has_a_trace_up_to_it(
    way: tuple[Shape, RunningServer],
) -> None:
    shape, server = way
    chain = [stage.name for stage in CHAINS[shape.mode]]
    for stage in chain:
        check_left_in(server, stage, chain)
    assert ask(server, Ask(max_tokens=2)).status == 200


def check_left_in(server: RunningServer, stage: str, chain: list[str]) -> None:
    """Hold a request in `stage`, let its client leave, and look at what was recorded."""
    name = f"left-in-{stage}"
    connection = post(server, name, faults={stage: HELD_MS})
    # The first token travels while decode generates: all of them are open, and one is told.
    beside = {"decode.generate", "gateway.finish"} if stage == "hop.token" else set[str]()
    wait_for(
        lambda: (in_flight(server, name) or {}).get("stage") in {stage, *beside},
        f"a request in {stage}",
    )
    connection.close()
    spans = spans_of(server, name)
    root = spans[0]
    assert root.attributes[a.OUTCOME.key] == Outcome.CANCELLED, stage
    assert root.attributes[a.OUTCOME_BY.key] == "client", stage
    assert root.attributes[a.OUTCOME_STAGE.key] == stage
    assert a.INCOMPLETE.key not in root.attributes, stage
    stages = {span.name: span for span in spans if span.name in chain}
    assert stages[stage].attributes[a.OUTCOME.key] == Outcome.CANCELLED, stage
    before = set(chain[: chain.index(stage)]) - {"hop.token"}
    assert before <= set(stages), f"complete up to {stage}"
    for earlier in before:
        assert a.OUTCOME.key not in stages[earlier].attributes, (stage, earlier)
    wait_for(lambda: in_flight(server, name) is None, "the end of the request")


# -- clocks ---------------------------------------------------------------------------------------


@pytest.mark.case("CLK-01")
def test_spans_stand_on_wall_time(way: tuple[Shape, RunningServer]) -> None:
    _, server = way
    begun_ns = time.time_ns()
    assert ask(server, Ask(request_id="on-wall-time", max_tokens=4)).status == 200
    spans = spans_of(server, "on-wall-time")
    known_ns = time.time_ns()
    assert min(span.start_ns for span in spans) > begun_ns - NS_PER_S
    assert max(span.end_ns for span in spans) < known_ns + NS_PER_S


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.case("ID-01")
def test_two_requests_with_one_id_at_once_are_served_and_told_apart(
    way: tuple[Shape, RunningServer],
) -> None:
    _, server = way
    asks = [
        Ask(request_id="twin", prompt="a" * 30, max_tokens=20),
        Ask(request_id="twin", prompt="b" * 30, max_tokens=20),
    ]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(ask, [server, server], asks)
    assert first.status == second.status == 200
    assert first.text != second.text
    for request, answer in zip(asks, (first, second), strict=True):
        alone = ask(server, Ask(prompt=request.prompt, max_tokens=20))
        assert alone.text == answer.text, "its own output"
    both = recorded(server, "twin", count=2)
    assert len({spans[0].trace_id for spans in both}) == 2
    assert {spans[0].attributes[a.OUTCOME.key] for spans in both} == {Outcome.COMPLETED}
    with server.client() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.case("ID-05")
@pytest.mark.parametrize("given", ["abc-123", None])
def test_one_id_is_in_the_answer_the_logs_and_the_spans_of_all_processes(
    way: tuple[Shape, RunningServer], given: str | None
) -> None:
    shape, server = way
    answer = ask(server, Ask(request_id=given, max_tokens=3))
    request_id = answer.headers["x-request-id"]
    assert request_id == given if given else re.fullmatch(r"req-[0-9a-f]{24}", request_id)
    spans = spans_of(server, request_id)
    assert {span.resource.service_name for span in spans} == shape.services
    assert {span.attributes[a.REQUEST_ID.key] for span in spans} == {request_id}
    instances = {str(span.resource.attributes["service.instance.id"]) for span in spans}
    for instance in instances:
        wait_for(
            lambda name=instance: f"request_id={request_id} " in server.log(name),
            f"{request_id} in the log of {instance}",
        )


# -- export ---------------------------------------------------------------------------------------


@pytest.mark.case("EXP-09")
def test_long_stream_has_few_spans(way: tuple[Shape, RunningServer]) -> None:
    _, server = way
    answer = ask(server, Ask(request_id="long", max_tokens=500, stream=True))
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 500
    # Tokens share an event where a machine is slow; what has a span each would have more of them.
    assert len(spans_of(server, "long")) < 30 < len(answer.pieces)


@pytest.mark.case("EXP-10")
def test_root_span_of_a_stream_lasts_to_its_last_byte(way: tuple[Shape, RunningServer]) -> None:
    _, server = way
    url = httpx.URL(server.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
    body = json.dumps({**streaming(server.model), "max_tokens": 12})
    headers = {
        "Content-Type": "application/json",
        "X-Request-Id": "slow-stream",
        "X-PD-Faults": "decode.gap=3000",
    }
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    arrived_ns = [time.time_ns() for line in response if line.startswith(b"data: ")]
    connection.close()
    assert arrived_ns[-1] - arrived_ns[0] > 2.9e9
    spans = spans_of(server, "slow-stream")
    root = spans[0]
    assert root.end_ns - root.start_ns > 3e9
    (finish,) = [span for span in spans if span.name == "gateway.finish"]
    assert finish.attributes[a.END_NS.key] == root.attributes[a.END_NS.key]
    assert all(span.end_ns <= root.end_ns for span in spans)
