"""Inboxes and outboxes over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from server.errors import StartError
from server.wire.endpoints import IPC
from server.wire.messages import (
    ENVELOPE,
    MAX_MESSAGE_BYTES,
    CopiesDrained,
    CopyFailed,
    Peer,
    encode,
)
from server.wire.sockets import (
    OUTBOX_UNCONNECTED,
    REFUSED_ENDPOINTS,
    AsyncInbox,
    Inbox,
    Outbox,
    Received,
)

TRANSFER = Peer(instance="transfer-0", endpoint="ipc:///run/t", incarnation="dd")


def drained(handoff_id: str) -> CopiesDrained:
    return CopiesDrained(handoff_id=handoff_id, transfer=TRANSFER)


def ids(batch: Sequence[Received | None]) -> list[str]:
    handoffs: list[str] = []
    for received in batch:
        assert received is not None
        assert isinstance(received.message, CopiesDrained | CopyFailed)
        handoffs.append(received.message.handoff_id)
    return handoffs


def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition was not met in time"
        time.sleep(0.002)


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def sock_dir() -> Iterator[Path]:
    """A directory with a short path; fails the test when a socket file is left in it."""
    path = Path(f"/tmp/pdt-sock-{os.getpid()}")
    path.mkdir(mode=0o700)
    yield path
    left = sorted(entry.name for entry in path.iterdir())
    for name in left:
        (path / name).unlink()
    path.rmdir()
    assert left == [], "socket files left behind"


@pytest.fixture
def inbox(sock_dir: Path) -> Iterator[Inbox]:
    inbox = Inbox(f"{IPC}{sock_dir}/inbox.sock")
    yield inbox
    inbox.close()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close()


def test_messages_of_one_sender_arrive_in_order_with_their_arrival(
    inbox: Inbox, outbox: Outbox
) -> None:
    before_ns = time.monotonic_ns()
    for index in range(500):
        assert outbox.send(inbox.endpoint, drained(f"h-{index}"))
    received = [inbox.get(30.0) for _ in range(500)]
    assert ids(received) == [f"h-{index}" for index in range(500)]
    stamps = [item.arrived_ns for item in received if item is not None]
    assert stamps == sorted(stamps)
    assert before_ns < stamps[0] <= stamps[-1] <= time.monotonic_ns()
    assert inbox.get(0) is None
    assert inbox.counters.received == outbox.counters.sent == 500


def test_arrival_is_stamped_before_the_message_is_read(inbox: Inbox, outbox: Outbox) -> None:
    outbox.send(inbox.endpoint, drained("h"))
    eventually(lambda: inbox.num_waiting)
    asked_ns = time.monotonic_ns()
    received = inbox.get(30.0)
    assert received is not None
    assert received.arrived_ns <= asked_ns


def test_drain_returns_what_waits_and_never_waits(inbox: Inbox, outbox: Outbox) -> None:
    assert inbox.drain() == []
    for index in range(3):
        outbox.send(inbox.endpoint, drained(f"h-{index}"))
    eventually(lambda: inbox.num_waiting == 3)
    assert ids(inbox.drain()) == ["h-0", "h-1", "h-2"]


def test_get_waits_no_longer_than_asked(inbox: Inbox) -> None:
    start = time.monotonic()
    assert inbox.get(0.05) is None
    assert 0.04 < time.monotonic() - start < 20


def raw_push(endpoint: str) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    push = context.socket(zmq.PUSH)
    push.connect(endpoint)
    return context, push


def test_malformed_frames_are_counted_logged_once_and_survived(
    inbox: Inbox, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    context, push = raw_push(inbox.endpoint)
    garbage = [b"", b"GET / HTTP/1.1", ENVELOPE, ENVELOPE + b"\xc1", b"PDT\xff" + b"x", b"\0" * 99]
    with caplog.at_level(logging.WARNING):
        for frame in garbage:
            push.send(frame)
        push.send_multipart([encode(drained("a")), encode(drained("b"))])
        push.send(encode(drained("good")))
        received = inbox.get(30.0)
    context.destroy(linger=0)
    assert received is not None
    assert received.message == drained("good")
    assert inbox.counters.malformed == len(garbage) + 1
    assert len(caplog.records) == 1
    assert "dropped a frame (1 so far)" in caplog.text
    assert outbox.send(inbox.endpoint, drained("h"))
    assert inbox.get(30.0) is not None


def test_a_frame_beyond_the_limit_is_cut_off_by_the_socket(inbox: Inbox, outbox: Outbox) -> None:
    context, push = raw_push(inbox.endpoint)
    push.send(ENVELOPE + bytes(MAX_MESSAGE_BYTES))
    assert inbox.get(0.3) is None
    context.destroy(linger=0)
    assert inbox.counters.received == 0
    assert outbox.send(inbox.endpoint, drained("h"))
    assert inbox.get(30.0) is not None


@pytest.mark.parametrize("connected", [False, True])
def test_a_message_beyond_the_limit_is_refused_at_the_sender(
    outbox: Outbox, inbox: Inbox, caplog: pytest.LogCaptureFixture, connected: bool
) -> None:
    """It does not raise: a worker that tells on what a peer has said must go on."""
    if connected:
        assert outbox.send(inbox.endpoint, drained("h"))
        assert inbox.get(30.0) is not None
    huge = CopyFailed(
        handoff_id="h", index=0, reason="x", message="x" * (MAX_MESSAGE_BYTES + 1), settled=True
    )
    assert not outbox.send(inbox.endpoint, huge)
    assert outbox.counters.refused[inbox.endpoint] == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"the limit is {MAX_MESSAGE_BYTES}" in line
    assert outbox.send(inbox.endpoint, drained("h"))
    assert inbox.get(30.0) is not None


def test_bytes_that_are_no_zeromq_do_not_disturb_an_inbox(sock_dir: Path, outbox: Outbox) -> None:
    inbox = Inbox("tcp://127.0.0.1:*")
    host, port = inbox.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(os.urandom(4096))
    assert outbox.send(inbox.endpoint, drained("h"))
    assert inbox.get(30.0) is not None
    inbox.close()


def test_a_full_inbox_holds_senders_back_until_it_is_read(sock_dir: Path) -> None:
    inbox = Inbox(f"{IPC}{sock_dir}/small.sock", max_messages=10)
    outbox = Outbox(max_messages=10)
    filler = CopyFailed(handoff_id="h", index=0, reason="x", message="x" * 10_000, settled=True)
    num_accepted = 0

    def refused_by_a_full_inbox() -> bool:
        nonlocal num_accepted
        while outbox.send(inbox.endpoint, filler):
            num_accepted += 1
        return inbox.counters.held_back > 0

    try:
        eventually(refused_by_a_full_inbox, timeout_s=20.0)
        assert inbox.num_waiting == 10
        num_refused = outbox.counters.refused[inbox.endpoint]
        assert num_refused > 0
        for _ in range(num_accepted):
            assert inbox.get(30.0) is not None
        assert inbox.get(0.05) is None, "a refused message must not arrive"
        eventually(lambda: outbox.send(inbox.endpoint, filler))
        assert inbox.get(30.0) is not None
    finally:
        outbox.close()
        inbox.close()


def test_sending_to_nobody_never_blocks_and_close_names_the_peer(
    sock_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(max_messages=5)
    endpoint = f"{IPC}{sock_dir}/nobody.sock"
    results = [outbox.send(endpoint, drained(f"h-{index}")) for index in range(7)]
    assert results == [True] * 5 + [False] * 2
    assert outbox.counters.refused == {endpoint: 2}
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        outbox.close()
    assert time.monotonic() - start < 20
    assert f"5 messages for {endpoint} were not delivered" in caplog.text


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "ipc://", f"{IPC}/{'a' * 300}", f"{IPC}/\udcff", "tcp://127.0.0.1:x", "tcp://"),
        *("tcp://[::1]:", "a\nsecond line " + "b" * 5000),
    ],
)
def test_what_is_no_endpoint_is_refused_and_hurts_nobody(
    endpoint: str, caplog: pytest.LogCaptureFixture, inbox: Inbox, outbox: Outbox
) -> None:
    """Peers say where they are to be reached: whatever they say must not end who answers them."""
    assert not outbox.send(endpoint, drained("h"))
    assert not outbox.is_lost(endpoint)
    assert outbox.counters.refused[endpoint] == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert len(line) < 1000
    assert outbox.send(inbox.endpoint, drained("h"))
    assert inbox.get(30.0) is not None


def test_refusals_are_remembered_of_so_many_endpoints_alone() -> None:
    """As those who never get a socket are never forgotten with it."""
    outbox = Outbox()
    endpoints = [f"tcp://192.0.2.1:{7000 + number}" for number in range(REFUSED_ENDPOINTS + 20)]
    for endpoint in (*endpoints, endpoints[-1]):
        assert not outbox.send(endpoint, drained("h"))
    refused = outbox.counters.refused
    assert list(refused) == endpoints[20:]
    assert refused[endpoints[-1]] == 2
    outbox.close()


def test_outbox_that_is_closed_at_once_delivers_and_complains_of_nobody(
    sock_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is being made when it closes: that is no sign that nobody is there."""
    inbox = Inbox(f"{IPC}{sock_dir}/asker.sock")
    try:
        with caplog.at_level(logging.WARNING):
            for number in range(20):
                outbox = Outbox(linger_s=30.0)
                assert outbox.send(inbox.endpoint, drained(f"h-{number}"))
                outbox.close()
                assert inbox.get(30.0) is not None
        assert "not delivered" not in caplog.text
    finally:
        inbox.close()


def test_messages_wait_for_a_peer_that_starts_later(sock_dir: Path, outbox: Outbox) -> None:
    endpoint = f"{IPC}{sock_dir}/late.sock"
    assert outbox.send(endpoint, drained("early"))
    inbox = Inbox(endpoint)
    received = inbox.get(30.0)
    assert received is not None
    assert received.message == drained("early")
    inbox.close()


def test_a_lost_peer_is_refused_until_it_is_back(sock_dir: Path, outbox: Outbox) -> None:
    endpoint = f"{IPC}{sock_dir}/peer.sock"
    inbox = Inbox(endpoint)
    assert outbox.send(endpoint, drained("first"))
    assert inbox.get(30.0) is not None
    inbox.close()
    eventually(lambda: not outbox.send(endpoint, drained("lost")))
    reborn = Inbox(endpoint)
    eventually(lambda: outbox.send(endpoint, drained("again")))
    eventually(lambda: "again" in ids(reborn.drain()))
    reborn.close()


def test_forget_drops_what_was_queued(sock_dir: Path, outbox: Outbox) -> None:
    endpoint = f"{IPC}{sock_dir}/peer.sock"
    assert outbox.send(endpoint, drained("old"))
    outbox.forget(endpoint)
    outbox.forget("ipc:///tmp/never-used.sock")
    inbox = Inbox(endpoint)
    assert outbox.send(endpoint, drained("new"))
    received = inbox.get(30.0)
    assert received is not None
    assert received.message == drained("new")
    assert inbox.get(0.05) is None
    inbox.close()


def test_sockets_to_who_is_not_there_are_bounded(
    sock_dir: Path, inbox: Inbox, outbox: Outbox
) -> None:
    assert outbox.send(inbox.endpoint, drained("first"))
    assert inbox.get(30.0) is not None

    def absent(number: int) -> str:
        return f"{IPC}{sock_dir}/absent-{number}"

    for number in range(OUTBOX_UNCONNECTED):
        outbox.send(absent(number), drained("queued"))
    before = num_descriptors()
    outbox.send(absent(0), drained("queued too"))
    for number in range(OUTBOX_UNCONNECTED, 2 * OUTBOX_UNCONNECTED - 1):
        outbox.send(absent(number), drained("queued"))
    eventually(lambda: num_descriptors() <= before, 30.0)

    # Who was connected stays so, however long ago it was used; so does who was used last.
    late = Inbox(absent(0))
    assert ids([late.get(30.0), late.get(30.0)]) == ["queued", "queued too"]
    late.close()
    forgotten = Inbox(absent(1))
    assert outbox.send(forgotten.endpoint, drained("new"))
    assert ids([forgotten.get(30.0)]) == ["new"]
    forgotten.close()
    assert outbox.send(inbox.endpoint, drained("last"))
    assert ids([inbox.get(30.0)]) == ["last"]


def test_close_lets_queued_messages_leave(sock_dir: Path, inbox: Inbox) -> None:
    outbox = Outbox()
    for index in range(100):
        assert outbox.send(inbox.endpoint, drained(f"h-{index}"))
    outbox.close()
    assert [inbox.get(30.0) is not None for _ in range(100)] == [True] * 100
    outbox.close()


def test_an_outbox_refuses_a_second_thread(inbox: Inbox, outbox: Outbox) -> None:
    outbox.send(inbox.endpoint, drained("h"))
    errors: list[Exception] = []

    def send() -> None:
        try:
            outbox.send(inbox.endpoint, drained("h"))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_a_second_inbox_at_a_live_endpoint_is_a_start_error(inbox: Inbox, outbox: Outbox) -> None:
    with pytest.raises(StartError, match="in use"):
        Inbox(inbox.endpoint)
    assert outbox.send(inbox.endpoint, drained("h"))
    assert inbox.get(30.0) is not None, "the first inbox still works"


def test_a_busy_tcp_port_is_a_start_error() -> None:
    inbox = Inbox("tcp://127.0.0.1:*")
    with pytest.raises(StartError, match="cannot listen at tcp://"):
        Inbox(inbox.endpoint)
    inbox.close()


def test_a_missing_directory_is_a_start_error(sock_dir: Path) -> None:
    with pytest.raises(StartError, match="cannot listen at"):
        Inbox(f"{IPC}{sock_dir}/none/inbox.sock")


KILLED = """
import os, signal, sys
from server.wire.sockets import Inbox
Inbox(sys.argv[1])
print("bound", flush=True)
signal.pause()
"""


def test_the_endpoint_of_a_killed_process_can_be_bound_again(
    sock_dir: Path, outbox: Outbox
) -> None:
    endpoint = f"{IPC}{sock_dir}/killed.sock"
    process = subprocess.Popen([sys.executable, "-c", KILLED, endpoint], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"bound\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert (sock_dir / "killed.sock").exists()
    inbox = Inbox(endpoint)
    assert outbox.send(endpoint, drained("h"))
    assert inbox.get(30.0) is not None
    inbox.close()


def test_async_inbox_delivers_all_messages_in_order(sock_dir: Path) -> None:
    async def main() -> list[str]:
        inbox = AsyncInbox(f"{IPC}{sock_dir}/async.sock")
        outbox = Outbox()
        seen: list[str] = []
        try:
            async with asyncio.timeout(30):
                for index in range(300):
                    assert outbox.send(inbox.endpoint, drained(f"h-{index}"))
                    if index % 100 == 99:
                        while len(seen) <= index:
                            seen += ids(await inbox.receive())
        finally:
            outbox.close()
            inbox.close()
        return seen

    assert asyncio.run(main()) == [f"h-{index}" for index in range(300)]


def test_async_receive_can_be_cancelled_without_losing_messages(sock_dir: Path) -> None:
    async def main() -> None:
        inbox = AsyncInbox(f"{IPC}{sock_dir}/async.sock")
        outbox = Outbox()
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await inbox.receive()
            assert outbox.send(inbox.endpoint, drained("h"))
            async with asyncio.timeout(30):
                assert ids(await inbox.receive()) == ["h"]
        finally:
            outbox.close()
            inbox.close()

    asyncio.run(main())


def test_an_inbox_outlives_the_event_loop_that_made_it(sock_dir: Path) -> None:
    async def make() -> AsyncInbox:
        return AsyncInbox(f"{IPC}{sock_dir}/async.sock")

    inbox = asyncio.run(make())
    outbox = Outbox()
    assert outbox.send(inbox.endpoint, drained("h"))
    eventually(lambda: inbox.num_waiting)
    outbox.close()
    inbox.close()
    inbox.close()
