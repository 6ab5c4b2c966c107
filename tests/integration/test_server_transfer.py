"""A whole server over the TCP transfer, in which copies raise, messages get lost and strangers
knock: what the client gets, and what the recording says."""

from __future__ import annotations

import json
import signal
import socket
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pdtrace.analysis.sources import read_source
from pdtrace.spans import Span
from server.engine.fake import expected_tokens
from server.injection.fault import Drop, Fault, Place, Raise
from server.kv.transfer.secret import NAME
from server.kv.transfer.tcp_frames import parse_address
from tests.support.aftermath import assert_recovered
from tests.support.completions import Answer, Ask, ask
from tests.support.injection import inject, wait_injected
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.server

STORY: dict[str, Sequence[Fault]] = {
    "untouched": (),
    "sender-raises": (Raise(at="transfer-0", place=Place.SENDER),),
    "receiver-raises": (Raise(at="transfer-1", place=Place.RECEIVER),),
    "copy-raises": (Raise(at="transfer-0", place=Place.COPY),),
    "done-is-lost": (Drop(at="decode-0", message="CopyDone"),),
    "probe": (),
}
PROMPT = "a prompt of more than one page, and its tokens are a hash of the pages"
NUM_TOKENS = 8


@dataclass
class Told:
    """What came of the story."""

    answers: dict[str, Answer]
    spans: dict[str, list[Span]]
    logs: dict[str, str]
    secret_mode: int
    while_it_stopped: dict[str, Answer]
    last_exit: str


def knock(server: RunningServer) -> None:
    """A stranger says something else than a transfer process would."""
    config = json.loads((server.run_dir / "config" / "transfer-1.json").read_text())
    with socket.create_connection(parse_address(config["transfer_address"]), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n" + 200 * b"x")
        while client.recv(4096):
            pass


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    run_dir = tmp_path_factory.mktemp("transfer") / "run"
    with running_server(run_dir, "--allow-faults", "--transfer", "tcp") as server:
        secret_mode = stat.S_IMODE((run_dir / NAME).stat().st_mode)
        answers: dict[str, Answer] = {}
        for name, faults in STORY.items():
            inject(server, *faults)
            answers[name] = ask(
                server, Ask(prompt=PROMPT + name, max_tokens=NUM_TOKENS, request_id=name)
            )
            for fault in faults:
                wait_injected(server, fault)
            try:
                knock(server)
            except ConnectionResetError:
                pass  # it was not read to its end
        assert_recovered(server)
        while_it_stopped, last_exit = stop_receiver(server)
        logs = {f"transfer-{host}": server.log(f"transfer-{host}") for host in range(2)}
    spans: dict[str, list[Span]] = {}
    for trace in read_source(run_dir).traces:
        for span in trace.spans:
            spans.setdefault(trace.spans[0].trace_id, []).append(span)
    by_request = {
        str(span.attributes["pd.request.id"]): group
        for group in spans.values()
        for span in group
        if "pd.request.id" in span.attributes
    }
    return Told(answers, by_request, logs, secret_mode, while_it_stopped, last_exit)


def stop_receiver(server: RunningServer) -> tuple[dict[str, Answer], str]:
    """Stop the receiving process in order while requests come one after the other."""
    served = threading.Event()
    answers: dict[str, Answer] = {}

    def load(client: int) -> None:
        number = 0
        while not served.is_set():
            number += 1
            name = f"stopping-{client}-{number}"
            answers[name] = ask(
                server, Ask(prompt=PROMPT + name, max_tokens=NUM_TOKENS, request_id=name)
            )

    with ThreadPoolExecutor() as pool:
        loads = [pool.submit(load, client) for client in range(4)]
        try:
            while len(answers) < 8:
                time.sleep(0.01)
            pid = server.send_signal("transfer-1", signal.SIGTERM)
            server.wait_for_successor("transfer-1", pid)
            enough = len(answers) + 8
            while len(answers) < enough:
                time.sleep(0.01)
        finally:
            served.set()
        for done in loads:
            done.result()
    return answers, server.process_of("transfer-1")["last_exit"]


def text_of(name: str) -> str:
    return bytes(expected_tokens(list((PROMPT + name).encode()), NUM_TOKENS)).decode()


@pytest.mark.parametrize("name", ["untouched", "receiver-raises", "done-is-lost", "probe"])
def test_answers_are_of_the_right_kv(told: Told, name: str) -> None:
    answer = told.answers[name]
    assert (answer.status, answer.text) == (200, text_of(name))


@pytest.mark.case("XFER-07")
@pytest.mark.parametrize("name", ["sender-raises", "copy-raises"])
def test_what_a_transfer_raises_reaches_the_client_and_its_span(told: Told, name: str) -> None:
    answer = told.answers[name]
    assert answer.status == 502
    assert answer.body["error"]["code"] == "internal"
    assert "InjectedError" in answer.body["error"]["message"]
    failed = [
        span
        for span in told.spans[name]
        if span.resource.attributes["service.name"] == "pd-transfer"
        and span.attributes.get("error.type") == "InjectedError"
    ]
    assert failed, [(span.name, span.attributes) for span in told.spans[name]]


def test_a_receiver_that_is_told_to_stop_costs_no_request(told: Told) -> None:
    assert len(told.while_it_stopped) >= 16
    for name, answer in told.while_it_stopped.items():
        assert (answer.status, answer.text) == (200, text_of(name)), answer.body
    assert told.last_exit == "exited with code 0"
    assert "incoming copy given up" not in told.logs["transfer-1"].partition(" stopped")[0]


@pytest.mark.case("XFER-07")
def test_a_receiver_that_raises_costs_one_more_attempt(told: Told) -> None:
    attempts = {
        span.attributes["pd.attempt"]
        for span in told.spans["receiver-raises"]
        if "pd.attempt" in span.attributes
    }
    assert attempts == {1, 2}
    assert "InjectedError" in told.logs["transfer-1"]


def test_strangers_are_refused_and_the_secret_is_private(told: Told) -> None:
    assert "connection refused (1 so far): preface is" in told.logs["transfer-1"]
    assert told.secret_mode == 0o600
