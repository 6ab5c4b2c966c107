"""Frames that no process of ours would send, into the inboxes of a running server.

Random bytes, damaged messages, bombs, several frames, too many bytes, whole messages about requests
and processes that nobody knows, and whole ones that ask for impossible things of requests that
there are. Nothing may crash, hang, grow or stay, and what is no message is counted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings

from pdtrace.ring.reader import RingReader
from pdtrace.ring.records import OpenRecord
from server.engine.fake import FakeModel
from server.wire import messages
from server.wire.messages import ENVELOPE, MAX_MESSAGE_BYTES, Cancel, CancelCopies, Peer
from tests.integration.conftest import EDGE_KEY
from tests.support.aftermath import assert_recovered
from tests.support.completions import Ask, ask
from tests.support.hostile_messages import handoffs_in, hostile_bodies, with_handoffs
from tests.support.server import RunningServer, running_server
from tests.support.wire_shapes import frame_of, frames

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

INBOXES: tuple[str, ...] = ("gateway-0", "prefill-0", "decode-0", "transfer-0")
WAIT_S = 60.0
PATIENCE_S = 5.0
GROWTH_KIB = 200 * 1024

FRAMES = frames()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message's frame with a byte changed, cut off or put in."""
    frame = bytearray(draw(FRAMES))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(frame)


ONE_FRAME = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda data: ENVELOPE + data),
    st.sampled_from(
        [b"\x91", b"\x81\xa1x", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    ).flatmap(lambda head: st.integers(1, 50_000).map(lambda count: ENVELOPE + head * count)),
    st.binary(max_size=50).map(lambda data: b"PDT\xff" + data),
    damaged(),
    FRAMES,
)
SENDING = st.lists(
    st.one_of(ONE_FRAME.map(lambda frame: [frame]), st.lists(ONE_FRAME, min_size=2, max_size=5)),
    min_size=10,
    max_size=30,
)


@pytest.fixture(scope="module")
def pushes(edge_server: RunningServer) -> Iterator[dict[str, zmq.Socket[bytes]]]:
    """A socket to each inbox."""
    with sockets_to(edge_server, INBOXES) as sockets:
        yield sockets


@contextlib.contextmanager
def sockets_to(
    server: RunningServer, instances: Sequence[str]
) -> Generator[dict[str, zmq.Socket[bytes]]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    sockets: dict[str, zmq.Socket[bytes]] = {}
    for instance in instances:
        push = sockets[instance] = context.socket(zmq.PUSH)
        push.set(zmq.SNDTIMEO, int(WAIT_S * 1000))
        push.connect(str(server.process_of(instance)["endpoint"]))
    yield sockets
    context.destroy(linger=0)


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1])


def malformed(server: RunningServer) -> dict[str, float]:
    """Frames that each process has counted as no message."""
    with server.client() as client:
        lines = client.get("/metrics").text.split("\n")
    found: dict[str, float] = dict.fromkeys(INBOXES, 0.0)
    for line in lines:
        value = float(line.rpartition(" ")[2]) if line and line[0] != "#" else 0.0
        if line.startswith('pd_gateway_ignored_messages_total{type="malformed"}'):
            found["gateway-0"] = value
        elif line.startswith("pd_messages_ignored_total{") and 'why="malformed"' in line:
            found[line.partition('process="')[2].partition('"')[0]] = value
    return found


def is_message(parts: list[bytes]) -> bool:
    try:
        messages.decode(parts[0])
    except messages.WireError:
        return False
    return len(parts) == 1


PROBE = Ask(max_tokens=4, headers={"authorization": f"Bearer {EDGE_KEY}"})


def probe(server: RunningServer) -> int:
    return ask(server, PROBE).status


def live_handoffs(server: RunningServer) -> list[str]:
    """Handoffs in the hands of workers: the last of those that any has begun."""
    found: list[str] = []
    for path in (server.run_dir / "rings").glob("*.ring"):
        with RingReader(path) as reader:
            found += [
                record.context.handoff_id
                for record in reader.read(limit=10**6)
                if isinstance(record, OpenRecord) and record.context.handoff_id
            ]
    return sorted(set(found))[-3:]


@contextlib.contextmanager
def held_request(server: RunningServer, pool: ThreadPoolExecutor) -> Generator[None]:
    """Requests of a client all the while, who leaves one that has been told to wait for what will
    not come: deadlines are minutes."""
    over = threading.Event()

    def keep_asking() -> None:
        long = replace(PROBE, max_tokens=200, request_id="among-them")
        while not over.is_set():
            with contextlib.suppress(httpx.ReadTimeout):
                answer = ask(server, long, timeout_s=PATIENCE_S)
                assert answer.status in {200, 400, 429, 502, 503, 504}

    asking = pool.submit(keep_asking)
    try:
        yield
    finally:
        over.set()
    asking.result(timeout=2 * WAIT_S)


@pytest.fixture(scope="module")
def colocated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run_dir = tmp_path_factory.mktemp("wire") / "run"
    options = ("--mode", "colocated", "--api-key", EDGE_KEY)
    with running_server(run_dir, *options, model="fake") as server:
        yield server


@pytest.mark.parametrize("served", ["edge_server", "colocated_server"])
def test_hostile_messages_among_live_ones_leave_a_server_as_it_was(
    request: pytest.FixtureRequest, served: str
) -> None:
    """Requests are served all the while, wrong ones are begun, and at the end told to stop.

    It comes first: the other tests leave jobs of nobody to the transfer process for minutes.
    """
    server: RunningServer = request.getfixturevalue(served)
    instances = [p.instance for p in server.present() if p.role != "agent"]
    assert_recovered(server, probe=PROBE, recording=False)
    pids = server.pids
    before = {instance: resident_kib(server.pid(instance)) for instance in instances}
    endpoints = [str(server.process_of(instance)["endpoint"]) for instance in instances]
    named: set[str] = set()
    messages_sent = 0
    with (
        sockets_to(server, instances) as sockets,
        ThreadPoolExecutor(1) as pool,
        held_request(server, pool),
    ):

        @settings(
            max_examples=60,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(
            st.lists(
                hostile_bodies(
                    endpoints=(*instances, *endpoints),
                    layout=FakeModel().layout(16),
                    fingerprint=FakeModel().info.fingerprint,
                ),
                min_size=10,
                max_size=30,
            )
        )
        def bombard(bodies: list[Any]) -> None:
            nonlocal messages_sent
            handoffs = live_handoffs(server)
            for shape in bodies:
                body = with_handoffs(shape, handoffs)
                frame = frame_of(body)
                if not is_message([frame]):
                    continue
                messages_sent += 1
                named.update(handoffs_in(body))
                for push in sockets.values():
                    push.send(frame)

        bombard()
        me = Peer(instance="nobody", endpoint=str(endpoints[0]), incarnation="nobody")
        for handoff_id in named:
            cancel = Cancel(
                handoff_id=handoff_id, outcome="cancelled", reason="over", by="nobody", gateway=me
            )
            copies = CancelCopies(handoff_id=handoff_id, reply_to=me)
            for push in sockets.values():
                push.send(messages.encode(cancel))
                push.send(messages.encode(copies))
        assert messages_sent > 500
    assert_recovered(server, probe=PROBE, recording=False)
    assert server.pids == pids
    for instance in instances:
        grown = resident_kib(server.pid(instance)) - before[instance]
        assert grown < GROWTH_KIB, (instance, grown)
        assert "Traceback" not in server.log(instance)


def test_every_process_survives_and_counts_what_is_no_message(
    edge_server: RunningServer, pushes: dict[str, zmq.Socket[bytes]]
) -> None:
    pids = {instance: edge_server.pid(instance) for instance in INBOXES}
    assert probe(edge_server) == 200
    before = {instance: resident_kib(pid) for instance, pid in pids.items()}
    counted = malformed(edge_server)
    no_message = 0

    @settings(
        max_examples=40,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(SENDING)
    def bombard(sending: list[list[bytes]]) -> None:
        nonlocal no_message
        no_message += sum(not is_message(parts) for parts in sending)
        for push in pushes.values():
            for parts in sending:
                push.send_multipart(parts)

    bombard()
    for push in pushes.values():
        push.send(b"\x00" * (MAX_MESSAGE_BYTES + 1))  # the socket itself ends this connection
        push.send(b"behind it")
    no_message += 1
    assert no_message > 100
    expected = {instance: count + no_message for instance, count in counted.items()}
    deadline = time.monotonic() + WAIT_S
    while (found := malformed(edge_server)) != expected:
        assert time.monotonic() < deadline, (found, expected)
        time.sleep(0.1)
    assert probe(edge_server) == 200
    assert {instance: edge_server.pid(instance) for instance in INBOXES} == pids
    for instance, pid in pids.items():
        assert resident_kib(pid) < before[instance] + GROWTH_KIB, instance
    with edge_server.client() as client:
        told = client.get("/health").json()["processes"]
    # A foreign heartbeat may have called itself a gateway, and is silent since.
    states = {(each["instance"], each["state"]) for each in told}
    assert {(instance, "ready") for instance in INBOXES} <= states


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1x"])
def test_nesting_is_an_error_of_its_sender(nested: bytes) -> None:
    with pytest.raises(messages.WireError, match="malformed"):
        messages.decode(ENVELOPE + nested * 100_000)
