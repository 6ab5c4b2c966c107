"""What only a transfer between hosts can suffer: peers that die, stall, lie or talk nonsense."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import StartError
from server.kv.layout import KvLayout
from server.kv.transfer import tcp
from server.kv.transfer.base import Copied, Drained, Failed, Reason, TransferEvent
from server.kv.transfer.tcp import TcpTransfer
from server.kv.transfer.tcp_auth import (
    CLAIM_BYTES,
    HELLO_BYTES,
    ReceiverGreeting,
)
from server.kv.transfer.tcp_frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    CopyHeader,
    CopyReply,
    FrameError,
    decode_header,
    decode_length,
    decode_reply,
    encode_frame,
    parse_address,
)
from server.wire.messages import PoolRef
from tests.support.kv_transfers import LAYOUT, NUM_PAGES, SECRET, Ends, TcpClient, TcpHarness

BIG = KvLayout(num_layers=4, num_kv_heads=8, head_dim=64, page_size=16, dtype="float32")
BIG_PAGES = 96  # 24 MiB: more than loopback's buffers hold
ALL = list(range(BIG_PAGES))
LIMIT_S = 20.0


@pytest.fixture
def big(tmp_path: Path) -> Iterator[TcpHarness]:
    """Copies of all pages cannot be under way without the other end reading."""
    harness = TcpHarness(tmp_path, num_pages=BIG_PAGES)
    yield harness
    harness.close()


def big_pools(big: TcpHarness) -> tuple[PoolRef, PoolRef]:
    """Pools, and a connection between their hosts that has served a copy of the first pages."""
    source, destination = (big.add_pool(end, layout=BIG) for end in ("source", "destination"))
    ends = Ends(big)
    ends.copy(source, [0], destination, [0], handoff_id="h-0")
    assert isinstance(ends.next_event(), Copied)
    return source, destination


def send_until_full(big: TcpHarness) -> None:
    """Let the source send until the connection takes no more; the other end does not read."""
    for _ in range(50):
        assert big.source.poll(0.0) == []


def failure_of(event: TransferEvent) -> Failed:
    assert isinstance(event, Failed)
    return event


def test_one_connection_serves_all_copies_to_a_host(harness: TcpHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    for number in range(5):
        ends.copy(source, [number], destination, [number], handoff_id=f"h-{number}")
        assert isinstance(ends.next_event(), Copied)
    assert harness.sender.num_connections == 1


def test_a_copy_larger_than_all_buffers_arrives_whole(big: TcpHarness) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    ends.copy(source, ALL, destination, ALL[::-1])
    assert isinstance(ends.next_event(), Copied)
    for page in (0, 1, BIG_PAGES // 2, BIG_PAGES - 1):
        arrived = big.memory(destination)[BIG.page_range(BIG_PAGES - 1 - page)]
        assert arrived == big.memory(source)[BIG.page_range(page)]


def test_cancel_at_the_source_stops_reading_and_keeps_the_connection(big: TcpHarness) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    ends.copy(source, ALL, destination, ALL)
    send_until_full(big)
    big.source.cancel("h-1")
    assert big.source.poll(0.0) == [Drained(handoff_id="h-1")]
    marker = b"\xa5" * BIG.page_bytes
    for page in ALL:
        big.memory(source)[BIG.page_range(page)] = marker
    ends.copy(source, [1], destination, [2], handoff_id="h-2")
    event = ends.next_event()
    assert isinstance(event, Copied)
    assert event.handoff_id == "h-2", "the cancelled copy ends without an event"
    assert big.memory(destination)[BIG.page_range(2)] == marker
    assert big.memory(destination)[BIG.page_range(BIG_PAGES - 1)] == bytes(BIG.page_bytes)
    assert big.sender.num_connections == 1


def test_cancel_at_the_destination_stops_writing_and_refuses_the_copy(big: TcpHarness) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    before = bytes(big.memory(destination))
    ends.copy(source, ALL, destination, ALL)
    send_until_full(big)
    big.destination.poll(0.0)
    big.destination.cancel("h-1")
    assert big.destination.poll(0.0)[-1] == Drained(handoff_id="h-1")
    drained = bytes(big.memory(destination))
    assert drained != before, "the copy had begun"
    event = failure_of(ends.next_event())
    assert (event.reason, event.settled) == (Reason.CANCELLED, True)
    assert big.memory(destination) == drained


def test_a_destination_that_stops_finishes_what_had_begun_and_refuses_the_rest(
    big: TcpHarness,
) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    assert big.destination.num_incoming == 0
    ends.copy(source, ALL, destination, ALL)
    ends.copy(source, ALL[:2], destination, ALL[:2], handoff_id="h-2")
    send_until_full(big)
    big.destination.poll(0.0)
    big.destination.stop_accepting()
    assert big.destination.num_incoming == 1
    first = ends.next_event()
    assert isinstance(first, Copied)
    assert first.handoff_id == "h-1"
    assert big.memory(destination) == big.memory(source)
    big.memory(source)[:] = bytes(len(big.memory(source)))
    refused = failure_of(ends.next_event())
    assert (refused.handoff_id, refused.reason) == ("h-2", Reason.TRANSFER_STOPPING)
    assert refused.settled
    assert big.memory(destination) != big.memory(source), "nothing of it was written"
    assert big.destination.num_incoming == 0


@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_worker_that_restarts_during_a_copy_fails_it(big: TcpHarness, end: str) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    ends.copy(source, ALL, destination, ALL)
    send_until_full(big)
    big.destination.poll(0.0)
    fresh = big.add_pool(end, "2", layout=BIG)
    before = bytes(big.memory(fresh))
    event = failure_of(ends.next_event())
    assert (event.reason, event.settled) == (Reason.POOL_REPLACED, True)
    assert big.memory(fresh) == before


def test_a_destination_that_dies_during_a_copy_is_not_called_settled(big: TcpHarness) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    ends.copy(source, ALL, destination, ALL)
    send_until_full(big)
    big.destination.close()
    events: list[TransferEvent] = []
    while not events:
        events = big.source.poll(0.05)
    event = failure_of(events[0])
    assert (event.reason, event.settled) == (Reason.PEER_LOST, False)


def test_a_source_that_dies_during_a_copy_leaves_the_destination_working(big: TcpHarness) -> None:
    source, destination = big_pools(big)
    ends = Ends(big)
    ends.copy(source, ALL, destination, ALL)
    send_until_full(big)
    big.source.close()
    for _ in range(20):
        assert big.destination.poll(0.005) == []
    with TcpTransferOf(big) as other:
        other.register(PoolRef(owner="source", incarnation="1"), big.descriptor(source))
        big.source = other
        ends.copy(source, [0], destination, [1], handoff_id="h-2")
        assert isinstance(ends.next_event(), Copied)


class TcpTransferOf:
    """A further transfer process on the source's host."""

    def __init__(self, harness: TcpHarness) -> None:
        self._harness = harness
        self.transfer = TcpTransfer("127.0.0.1:0", secret=SECRET)

    def __enter__(self) -> TcpTransfer:
        return self.transfer

    def __exit__(self, *_: object) -> None:
        self.transfer.close()


def test_a_transfer_that_restarts_at_its_address_is_found_again(harness: TcpHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    ends.copy(source, [0], destination, [0])
    assert isinstance(ends.next_event(), Copied)
    harness.destination.close()
    assert harness.address is not None
    harness.destination = TcpTransfer(harness.address, secret=SECRET)
    harness.destination.register(destination, harness.descriptor(destination))
    ends.copy(source, [1], destination, [1], handoff_id="h-2")
    assert isinstance(ends.next_event(), Copied)
    assert harness.sender.num_connections == 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_nobody_at_the_address_fails_the_copy_as_settled(harness: TcpHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    harness.address = f"127.0.0.1:{free_port()}"
    ends = Ends(harness)
    ends.copy(source, [0], destination, [0])
    event = failure_of(ends.next_event())
    assert (event.reason, event.settled) == (Reason.TRANSFER_UNREACHABLE, True)
    assert harness.address in event.message


@pytest.mark.parametrize(
    "address", [None, "somewhere.invalid:7000", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ""]
)
def test_addresses_that_lead_nowhere_fail_the_copy(
    harness: TcpHarness, address: str | None
) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    harness.address = address
    ends = Ends(harness)
    ends.copy(source, [0], destination, [0])
    assert failure_of(ends.next_event()).reason is Reason.NO_ROUTE
    ends.quiet(3)


def test_a_host_that_does_not_answer_stops_nobody_else(tmp_path: Path) -> None:
    harness = TcpHarness(tmp_path, copy_timeout_s=5.0, num_pages=BIG_PAGES)
    source, destination = big_pools(harness)
    ends = Ends(harness)
    real = harness.address
    with socket.create_server(("127.0.0.1", 0)) as silent:
        harness.address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        ends.copy(source, ALL, destination, ALL, handoff_id="stuck")
        harness.source.poll(0.1)
        peer, _ = silent.accept()
        assert greet_sender(harness, peer)
        harness.address = real
        for number in range(3):
            ends.copy(source, [number], destination, [number], handoff_id=f"h-{number}")
        events = ends.until(4)
        assert time.monotonic() - start < LIMIT_S
        peer.close()
    assert [event.handoff_id for event in events] == ["h-0", "h-1", "h-2", "stuck"]
    event = failure_of(events[3])
    assert (event.reason, event.settled) == (Reason.TRANSFER_TIMEOUT, False)
    assert "bytes went to 127.0.0.1" in event.message
    harness.close()


def greet_sender(harness: TcpHarness, peer: socket.socket, secret: bytes = SECRET) -> bool:
    """Say hello as a receiver does; whether the sender's claim holds."""
    greeting = ReceiverGreeting(secret)
    peer.sendall(greeting.hello)
    for _ in range(5):
        harness.source.poll(0.02)
    known, verdict = greeting.answer(peer.recv(CLAIM_BYTES, socket.MSG_WAITALL))
    peer.sendall(verdict)
    return known


def serve_once(harness: TcpHarness, answer: Callable[[CopyHeader, bytes], bytes]) -> TransferEvent:
    """Copy one page to a peer that reads it all and then says `answer`."""
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        harness.address = f"127.0.0.1:{listener.getsockname()[1]}"
        ends.copy(source, [3], destination, [5])
        harness.source.poll(0.1)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(LIMIT_S)
            greet_sender(harness, peer)
            for _ in range(5):
                harness.source.poll(0.02)
            length = decode_length(peer.recv(LENGTH_BYTES, socket.MSG_WAITALL))
            header = decode_header(peer.recv(length, socket.MSG_WAITALL))
            pages = peer.recv(header.num_bytes, socket.MSG_WAITALL)
            peer.sendall(answer(header, pages))
            return ends.next_event()


def test_a_peer_that_wrote_other_bytes_is_found_by_the_checksum(harness: TcpHarness) -> None:
    def answer(header: CopyHeader, pages: bytes) -> bytes:
        damaged = bytes([pages[0] ^ 1]) + pages[1:]
        return encode_frame(CopyReply(num_bytes=header.num_bytes, crc32=zlib.crc32(damaged)))

    event = failure_of(serve_once(harness, answer))
    assert (event.reason, event.settled) == (Reason.CHECKSUM_MISMATCH, True)


def test_a_peer_that_wrote_fewer_bytes_is_found_by_the_length(harness: TcpHarness) -> None:
    def answer(header: CopyHeader, pages: bytes) -> bytes:
        return encode_frame(CopyReply(num_bytes=header.num_bytes - 1, crc32=zlib.crc32(pages)))

    assert failure_of(serve_once(harness, answer)).reason is Reason.CHECKSUM_MISMATCH


def test_an_honest_answer_in_two_pieces_is_a_copy(harness: TcpHarness) -> None:
    seen: list[CopyHeader] = []

    def answer(header: CopyHeader, pages: bytes) -> bytes:
        seen.append(header)
        return encode_frame(CopyReply(num_bytes=header.num_bytes, crc32=zlib.crc32(pages)))

    assert isinstance(serve_once(harness, answer), Copied)
    assert seen[0].pages == (5,)
    assert seen[0].pool == PoolRef(owner="destination", incarnation="1")


def test_a_second_answer_does_not_hide_the_first(harness: TcpHarness) -> None:
    def answer(header: CopyHeader, pages: bytes) -> bytes:
        return 2 * encode_frame(CopyReply(num_bytes=header.num_bytes, crc32=zlib.crc32(pages)))

    assert isinstance(serve_once(harness, answer), Copied)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\0",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\x03abc",
        encode_frame(CopyReply(num_bytes=0, crc32=0, reason="made-up", message="x")),
    ],
)
def test_a_peer_that_answers_nonsense_fails_the_copy(harness: TcpHarness, garbage: bytes) -> None:
    event = failure_of(serve_once(harness, lambda _header, _pages: garbage))
    assert event.reason is Reason.PROTOCOL_ERROR


# -- the receiving end against scripted senders ---------------------------------------------------


@pytest.fixture
def client(harness: TcpHarness) -> Iterator[TcpClient]:
    client = TcpClient(harness).greet()
    yield client
    client.socket.close()


def header_for(pool: PoolRef, pages: tuple[int, ...], handoff_id: str = "h-1") -> bytes:
    return encode_frame(
        CopyHeader(handoff_id=handoff_id, index=0, pool=pool, layout=LAYOUT, pages=pages)
    )


def test_a_copy_that_comes_byte_by_byte_is_written_and_confirmed(
    harness: TcpHarness, client: TcpClient
) -> None:
    destination = harness.add_pool("destination")
    pages = os.urandom(2 * LAYOUT.page_bytes)
    for byte in header_for(destination, (4, 9)) + pages:
        client.send(bytes([byte]))
    assert client.reply() == CopyReply(num_bytes=len(pages), crc32=zlib.crc32(pages))
    memory = harness.memory(destination)
    assert memory[LAYOUT.page_range(4)] == pages[: LAYOUT.page_bytes]
    assert memory[LAYOUT.page_range(9)] == pages[LAYOUT.page_bytes :]


def test_a_refused_copy_is_read_to_its_end_and_the_next_one_is_served(
    harness: TcpHarness, client: TcpClient
) -> None:
    destination = harness.add_pool("destination")
    before = bytes(harness.memory(destination))
    stranger = PoolRef(owner="../../etc/passwd", incarnation="1")
    page = os.urandom(LAYOUT.page_bytes)
    refused = [
        (header_for(stranger, (0,)), Reason.UNKNOWN_POOL),
        (header_for(destination, (NUM_PAGES,)), Reason.BAD_PAGES),
        (header_for(destination, (-1,)), Reason.BAD_PAGES),
    ]
    for header, reason in refused:
        client.send(header + page)
        reply = client.reply()
        assert (reply.reason, reply.num_bytes) == (reason, 0)
    client.send(header_for(destination, ()))
    assert client.reply().reason == Reason.BAD_PAGES
    assert harness.memory(destination) == before
    client.send(header_for(destination, (0,)) + page)
    assert client.reply() == CopyReply(num_bytes=len(page), crc32=zlib.crc32(page))


def test_who_connects_while_the_receiver_stops_is_told_so_and_strangers_are_not_waited_for(
    harness: TcpHarness,
) -> None:
    destination = harness.add_pool("destination")
    harness.destination.stop_accepting()
    client = TcpClient(harness)
    assert len(client.receive(HELLO_BYTES - 1)) == HELLO_BYTES - 1
    assert harness.destination.num_incoming == 0
    client.socket.close()
    client = TcpClient(harness).greet()
    assert harness.destination.num_incoming == 0
    client.send(header_for(destination, (0,)))
    assert harness.destination.num_incoming == 1
    client.send(bytes(LAYOUT.page_bytes))
    assert client.reply().reason == Reason.TRANSFER_STOPPING
    assert harness.destination.num_incoming == 0
    client.socket.close()


@pytest.mark.parametrize(
    "opening",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x05hello",
        encode_frame(
            CopyHeader(
                handoff_id="h",
                index=0,
                pool=PoolRef(owner="destination", incarnation="1"),
                layout=KvLayout(
                    num_layers=10**6,
                    num_kv_heads=10**6,
                    head_dim=10**6,
                    page_size=10**6,
                    dtype="float32",
                ),
                pages=(0,),
            )
        ),
    ],
)
def test_a_peer_that_speaks_something_else_is_disconnected(
    harness: TcpHarness, client: TcpClient, opening: bytes
) -> None:
    destination = harness.add_pool("destination")
    before = bytes(harness.memory(destination))
    client.send(opening)
    assert client.is_closed()
    assert harness.memory(destination) == before


def test_a_sender_that_stalls_in_a_copy_is_disconnected_an_idle_one_is_not(
    tmp_path: Path,
) -> None:
    harness = TcpHarness(tmp_path, copy_timeout_s=1.0)
    destination = harness.add_pool("destination")
    stalled, idle = TcpClient(harness).greet(), TcpClient(harness).greet()
    stalled.send(header_for(destination, (0,)) + b"x")
    assert stalled.is_closed()
    page = os.urandom(LAYOUT.page_bytes)
    idle.send(header_for(destination, (1,)) + page)
    assert idle.reply().crc32 == zlib.crc32(page)
    for client in (stalled, idle):
        client.socket.close()
    harness.close()


def test_connections_beyond_the_limit_are_refused(
    harness: TcpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_RECEIVERS", 1)
    destination = harness.add_pool("destination")
    first = TcpClient(harness).greet()
    second = TcpClient(harness)
    assert second.is_closed()
    page = os.urandom(LAYOUT.page_bytes)
    first.send(header_for(destination, (1,)) + page)
    assert first.reply().reason is None
    for client in (first, second):
        client.socket.close()


def test_a_busy_port_is_a_start_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot receive KV at '{address}'"):
            TcpTransfer(address, secret=SECRET)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    for decode in (decode_header, decode_reply, decode_length):
        try:
            decode(data)
        except FrameError:
            pass


@pytest.mark.parametrize(
    ("text", "parsed"), [("127.0.0.1:7000", ("127.0.0.1", 7000)), ("[::1]:0", ("::1", 0))]
)
def test_addresses_are_host_and_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


# -- whatever comes -------------------------------------------------------------------------------


def frame_around(body: bytes) -> bytes:
    """A frame of the right length, whatever is in it."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 7, 2**31, 2**63 - 1])
HEADERS = st.builds(
    CopyHeader,
    handoff_id=st.text(max_size=20),
    index=NUMBERS,
    pool=st.builds(
        PoolRef,
        owner=st.sampled_from(["destination", "source", ""]) | st.text(max_size=9),
        incarnation=st.sampled_from(["1", "2"]) | st.text(max_size=9),
    ),
    layout=st.just(LAYOUT)
    | st.builds(
        KvLayout,
        num_layers=st.sampled_from([1, 10**9]),
        num_kv_heads=st.sampled_from([1, 10**9]),
        head_dim=st.sampled_from([1, 4, 10**9]),
        page_size=st.sampled_from([1, 4, 10**9]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    # None of them exists: what names pages that do, from who knows the secret, is a copy.
    pages=st.lists(st.sampled_from([-1, NUM_PAGES, 2**31, 2**62]), max_size=4).map(tuple),
)
SAID = st.lists(
    st.binary(min_size=1, max_size=300)
    | HEADERS.map(encode_frame)
    | st.tuples(HEADERS.map(encode_frame), st.integers(1, 40)).map(lambda cut: cut[0][: cut[1]])
    | st.integers(0, 2**32 - 1).map(lambda length: length.to_bytes(LENGTH_BYTES, "big")),
    min_size=1,
    max_size=6,
)
MANY = settings(
    max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(said=SAID, knows=st.booleans())
def test_whatever_a_sender_says_nothing_is_written_and_others_are_served(
    harness: TcpHarness, said: list[bytes], knows: bool
) -> None:
    source = harness.add_pool("source")
    destination = harness.add_pool("destination")
    before = bytes(harness.memory(destination))
    client = TcpClient(harness)
    try:
        if knows:
            client.greet()
        for data in said:
            client.send(data)
    except ConnectionError:
        pass  # the receiver has had enough
    assert harness.memory(destination) == before
    client.socket.close()
    ends = Ends(harness)
    ends.copy(source, [3], destination, [5])
    assert isinstance(ends.next_event(), Copied)
    assert harness.receiver.num_incoming == 0


@MANY
@given(answer=st.binary(max_size=60).map(frame_around))
def test_whatever_a_receiver_answers_the_copy_ends_once_and_others_are_served(
    harness: TcpHarness, answer: bytes
) -> None:
    event = failure_of(serve_once(harness, lambda _header, _pages: answer))
    assert event.reason in {Reason.PROTOCOL_ERROR, Reason.PEER_LOST}
    harness.address = harness.receiver.address
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    ends.copy(source, [3], destination, [5], handoff_id="h-2")
    assert isinstance(ends.next_event(), Copied)
