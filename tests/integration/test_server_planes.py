"""Whole servers whose processes speak over other ways than the usual ones: control messages over
TCP with keys and KV over TCP, as between hosts; and colocated, without any transfer. Strangers are
kept out, and faults of messages and copies act there, too."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import zmq

from server.engine.fake import expected_tokens
from server.errors import StartError
from server.injection.client import FaultClient
from server.injection.fault import Corrupt, Damage, Delay, Direction, Drop, Fault, Repeat
from server.wire.curve import make_keys
from server.wire.messages import AnyMessage, Heartbeat, InjectFaults, Peer, WorkerLoad, encode
from tests.support.completions import Answer, Ask, ask
from tests.support.injection import clear, inject, wait_injected
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.server

WAIT_S = 60.0
PROMPT = "a prompt of several pages, whose tokens are a hash of what lies in the pages: "
NUM_TOKENS = 12
STRANGER = Peer(instance="decode-9", endpoint="tcp://127.0.0.1:1", incarnation="stranger")


@pytest.fixture(scope="module")
def networked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Everything between processes goes over TCP on loopback."""
    folder = tmp_path_factory.mktemp("networked")
    make_keys(folder / "keys")
    options = ("--control", "tcp", "--curve-keys", str(folder / "keys"), "--transfer", "tcp")
    with running_server(folder / "run", *options, "--allow-faults") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run_dir = tmp_path_factory.mktemp("colocated") / "run"
    with running_server(run_dir, "--mode", "colocated", "--allow-faults") as server:
        yield server
        assert server.stop() == 0


def served(server: RunningServer, name: str) -> Answer:
    """A request named `name`; it must be answered with what its own KV says."""
    answer = ask(server, Ask(prompt=PROMPT + name, max_tokens=NUM_TOKENS, request_id=name))
    expected = bytes(expected_tokens(list((PROMPT + name).encode()), NUM_TOKENS))
    assert (answer.status, answer.text) == (200, expected.decode()), answer.body
    return answer


def metric(server: RunningServer, series: str) -> float:
    """Value of one of the gateway's series; 0 where it has none."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series + " "))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def retries(server: RunningServer, reason: str) -> float:
    return metric(server, f'pd_gateway_retries_total{{outcome="completed",reason="{reason}"}}')


def denied(server: RunningServer, instance: str) -> float:
    return metric(server, f'pd_connections_denied_total{{plane="control",process="{instance}"}}')


# -- over TCP with keys ---------------------------------------------------------------------------


def test_all_inboxes_are_ports_of_loopback_and_requests_are_served(
    networked: RunningServer,
) -> None:
    endpoints = [str(process["endpoint"]) for process in networked.state["processes"]]
    assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)
    assert len(set(endpoints)) == len(endpoints)
    assert not list((networked.run_dir / "sock").iterdir())
    for number in range(3):
        served(networked, f"networked-{number}")


@contextlib.contextmanager
def sending_without_keys(endpoint: str, message: AnyMessage) -> Generator[None]:
    """Somebody who knows the address and nothing else tries to send, again and again."""
    context = zmq.Context[zmq.Socket[bytes]]()
    push = context.socket(zmq.PUSH)
    push.connect(endpoint)
    push.send(encode(message))
    try:
        yield
    finally:
        push.close(linger=0)
        context.term()


@pytest.mark.parametrize("instance", ["gateway-0", "decode-0", "transfer-0"])
def test_who_has_no_keys_is_not_let_in_counted_and_logged(
    networked: RunningServer, instance: str
) -> None:
    heartbeat = Heartbeat(
        peer=STRANGER,
        role="decode",
        seq=1,
        sent_ns=0,
        load=WorkerLoad(),
        progress_age_s=0.0,
        busy=False,
    )
    faults = InjectFaults(faults=(), clear=True, reply_to=STRANGER)
    before = denied(networked, instance)
    with sending_without_keys(
        str(networked.process_of(instance)["endpoint"]),
        heartbeat if instance == "gateway-0" else faults,
    ):
        wait_for(lambda: denied(networked, instance) > before, "the denial to be counted")
    assert "let a peer not in" in networked.log(instance)
    with networked.client() as client:
        health = client.get("/health")
    assert "decode-9" not in health.text
    assert health.status_code == 200
    served(networked, f"after-a-stranger-at-{instance}")


def test_a_process_that_is_killed_comes_back_to_its_port_with_its_keys(
    networked: RunningServer,
) -> None:
    before = networked.process_of("decode-0")
    pid = networked.send_signal("decode-0", signal.SIGKILL)
    networked.wait_for_successor("decode-0", pid)
    assert networked.process_of("decode-0")["endpoint"] == before["endpoint"]
    served(networked, "after-a-kill")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Corrupt(at="transfer-0", copy=Damage.ALTERED), "checksum_mismatch"),
        (Corrupt(at="transfer-0", copy=Damage.SHORT), "peer_lost"),
        (Drop(at="gateway", message="Tokens"), "stream_incomplete"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_on_the_way_over_tcp_costs_an_attempt_and_no_wrong_byte(
    networked: RunningServer, fault: Fault, reason: str
) -> None:
    before = retries(networked, reason)
    inject(networked, fault)
    served(networked, f"damaged-{reason}")
    wait_injected(networked, fault)
    assert retries(networked, reason) == before + 1
    clear(networked)
    served(networked, f"whole-after-{reason}")


def test_a_lost_completion_of_a_tcp_copy_is_told_again(networked: RunningServer) -> None:
    lost = Drop(at="decode-0", message="CopyDone")
    inject(networked, lost)
    served(networked, "completion-lost")
    wait_injected(networked, lost)


def test_control_over_tcp_without_keys_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="--control tcp needs --curve-keys"),
        running_server(tmp_path / "run", "--control", "tcp"),
    ):
        pass


def test_fault_client_whose_keys_have_gone_says_so(networked: RunningServer) -> None:
    keys = Path(str(networked.state["settings"]["curve_keys"]))
    secret = keys / "process.key_secret"
    mode = stat.S_IMODE(secret.stat().st_mode)
    secret.chmod(0o644)
    try:
        with pytest.raises(StartError, match="can be read by others"):
            FaultClient(networked.run_dir)
    finally:
        secret.chmod(mode)


# -- colocated ------------------------------------------------------------------------------------


def test_a_request_that_is_late_at_a_colocated_worker_is_served_late(
    colocated: RunningServer,
) -> None:
    late = Delay(at="worker-0", message="ColocatedRequest", ms=700)
    inject(colocated, late)
    begin = time.monotonic()
    served(colocated, "late")
    assert time.monotonic() - begin >= 0.7
    wait_injected(colocated, late)
    assert "injected: ColocatedRequest received number 1 comes 700 ms late" in colocated.log(
        "worker-0"
    )


def test_lost_tokens_of_a_colocated_worker_cost_an_attempt(colocated: RunningServer) -> None:
    lost = Drop(at="worker-0", message="Tokens", direction=Direction.SENT)
    before = retries(colocated, "stream_incomplete")
    inject(colocated, lost)
    served(colocated, "tokens-lost")
    wait_injected(colocated, lost)
    assert retries(colocated, "stream_incomplete") == before + 1


def test_a_request_that_comes_twice_to_a_colocated_worker_is_served_once(
    colocated: RunningServer,
) -> None:
    twice = Repeat(at="worker-0", message="ColocatedRequest", ms=50)
    inject(colocated, twice)
    answer = served(colocated, "twice")
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == NUM_TOKENS
    wait_injected(colocated, twice)
    series = 'pd_messages_ignored_total{process="worker-0",type="ColocatedRequest",why='
    wait_for(
        lambda: any(metric(colocated, f'{series}"{why}"}}') for why in ("duplicate", "late")),
        "the second one to be counted",
    )


def test_an_end_that_a_colocated_worker_told_in_vain_is_asked_for(
    colocated: RunningServer,
) -> None:
    lost = Drop(at="worker-0", message="LegClosed", direction=Direction.SENT)
    inject(colocated, lost)
    served(colocated, "end-lost")
    wait_injected(colocated, lost)
    wait_for(lambda: metric(colocated, "pd_requests_in_flight") == 0, "its place to come free")
    state = json.loads((colocated.run_dir / "server.json").read_text())
    assert all(process["restarts"] == 0 for process in state["processes"])
