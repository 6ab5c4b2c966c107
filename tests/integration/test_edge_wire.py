"""Frames that no process of ours would send, into the inboxes of a running server.

Random bytes, damaged messages, bombs, several frames, too many bytes, and whole messages about
requests and processes that nobody knows. Nothing may crash, hang or grow, and all of it is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings

from server.wire import messages
from server.wire.messages import ENVELOPE, MAX_MESSAGE_BYTES
from tests.integration.conftest import EDGE_KEY
from tests.support.completions import Ask, ask
from tests.support.server import RunningServer
from tests.support.wire_shapes import frames

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

INBOXES: tuple[str, ...] = ("gateway-0", "prefill-0", "decode-0", "transfer-0")
WAIT_S = 60.0
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
    context = zmq.Context[zmq.Socket[bytes]]()
    sockets: dict[str, zmq.Socket[bytes]] = {}
    for instance in INBOXES:
        push = sockets[instance] = context.socket(zmq.PUSH)
        push.set(zmq.SNDTIMEO, int(WAIT_S * 1000))
        push.connect(str(edge_server.process_of(instance)["endpoint"]))
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


def probe(server: RunningServer) -> int:
    request = Ask(max_tokens=4, headers={"authorization": f"Bearer {EDGE_KEY}"})
    return ask(server, request).status


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
        states = {p["instance"]: p["state"] for p in client.get("/health").json()["processes"]}
    assert {states[instance] for instance in INBOXES} == {"ready"}


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1x"])
def test_nesting_is_an_error_of_its_sender(nested: bytes) -> None:
    with pytest.raises(messages.WireError, match="malformed"):
        messages.decode(ENVELOPE + nested * 100_000)
