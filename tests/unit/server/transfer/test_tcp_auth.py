"""Who may speak to a TCP transfer: peers that know the secret, and nobody else."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.errors import StartError
from server.kv.transfer import tcp
from server.kv.transfer.base import Copied, Failed, Reason, TransferError, TransferEvent
from server.kv.transfer.secret import NAME, shared_secret
from server.kv.transfer.tcp import TcpTransfer
from server.kv.transfer.tcp_auth import (
    ACCEPTED,
    CLAIM_BYTES,
    PROOF_BYTES,
    VERDICT_BYTES,
    ReceiverGreeting,
    SenderGreeting,
)
from server.kv.transfer.tcp_frames import (
    PREFACE,
    CopyHeader,
    FrameError,
    encode_frame,
)
from server.kv.transfer.tcp_receiver import Receiver
from server.kv.transfer.tcp_sender import Sender
from server.wire.messages import PoolRef
from tests.support.kv_transfers import LAYOUT, SECRET, Ends, TcpClient, TcpHarness

OTHER = bytes(32)
LIMIT_S = 30.0


@pytest.fixture
def stranger(harness: TcpHarness) -> Iterator[TcpClient]:
    client = TcpClient(harness)
    yield client
    client.socket.close()


def with_secret(harness: TcpHarness, secret: bytes) -> Ends:
    """The source's transfer knows another secret."""
    harness.sender.close()
    harness.sender = TcpTransfer("127.0.0.1:0", secret=secret)
    harness.source = harness.sender
    return Ends(harness)


def event_of(harness: TcpHarness) -> TransferEvent:
    return Ends(harness).next_event()


def test_a_sender_with_another_secret_is_refused_with_that_reason(harness: TcpHarness) -> None:
    ends = with_secret(harness, OTHER)
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    before = bytes(harness.memory(destination))
    ends.copy(source, [0], destination, [0])
    event = ends.next_event()
    assert isinstance(event, Failed)
    assert (event.reason, event.settled) == (Reason.UNAUTHENTICATED, True)
    assert event.message == (
        f"{harness.address}: the receiver refused this transfer process: their secrets differ"
    )
    assert harness.memory(destination) == before
    assert harness.receiver.num_refused == 1


def test_a_receiver_with_another_secret_gets_no_kv(harness: TcpHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        harness.address = f"127.0.0.1:{impostor.getsockname()[1]}"
        ends.copy(source, [0], destination, [0])
        harness.sender.poll(0.1)
        peer, _ = impostor.accept()
        with peer:
            peer.settimeout(LIMIT_S)
            peer.sendall(ReceiverGreeting(OTHER).hello)
            for _ in range(5):
                harness.sender.poll(0.02)
            peer.recv(CLAIM_BYTES, socket.MSG_WAITALL)
            peer.sendall(ACCEPTED + os.urandom(PROOF_BYTES))
            event = event_of(harness)
            assert peer.recv(1) == b"", "nothing follows the claim"
    assert isinstance(event, Failed)
    assert (event.reason, event.settled) == (Reason.UNAUTHENTICATED, True)
    assert "no KV was sent" in event.message


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n" + 100 * b"x",
        b"\xff" * 200,
        PREFACE + bytes(CLAIM_BYTES - len(PREFACE)),
        b"PDKV\x01" + bytes(100),
        PREFACE
        + encode_frame(
            CopyHeader(
                handoff_id="h",
                index=0,
                pool=PoolRef(owner="destination", incarnation="1"),
                layout=LAYOUT,
                pages=(0,),
            )
        )
        + bytes(LAYOUT.page_bytes),
    ],
)
def test_frames_of_a_peer_that_proved_nothing_are_not_believed(
    harness: TcpHarness, stranger: TcpClient, opening: bytes
) -> None:
    destination = harness.add_pool("destination")
    before = bytes(harness.memory(destination))
    stranger.hello()
    stranger.socket.send(opening)
    assert len(stranger.receive(VERDICT_BYTES + 1)) <= VERDICT_BYTES
    assert stranger.is_closed()
    assert harness.memory(destination) == before
    assert harness.receiver.num_refused == 1


def test_a_claim_that_was_overheard_opens_no_other_connection(harness: TcpHarness) -> None:
    first, second = TcpClient(harness), TcpClient(harness)
    claim = SenderGreeting(SECRET).feed(first.hello())
    first.socket.send(claim)
    assert first.receive(VERDICT_BYTES)[:1] == ACCEPTED
    second.hello()
    second.socket.send(claim)
    assert second.receive(VERDICT_BYTES)[:1] != ACCEPTED
    assert second.is_closed()
    for client in (first, second):
        client.socket.close()


def test_strangers_make_room_for_each_other_and_never_take_that_of_peers(
    harness: TcpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_STRANGERS", 2)
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    ends.copy(source, [0], destination, [0])
    assert isinstance(ends.next_event(), Copied)
    strangers = [TcpClient(harness) for _ in range(4)]
    for client in strangers[2:]:
        client.hello()
    for client in strangers[:2]:
        client.hello()
        assert client.is_closed()
    assert harness.receiver.num_refused == 2
    ends.copy(source, [1], destination, [1], handoff_id="h-2")
    assert isinstance(ends.next_event(), Copied)
    assert harness.sender.num_connections == 1
    for client in strangers:
        client.socket.close()


def test_a_stranger_that_says_nothing_is_disconnected(
    harness: TcpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "GREETING_TIMEOUT_S", 0.05)
    client = TcpClient(harness)
    client.hello()
    assert client.is_closed()
    client.socket.close()


def test_a_peer_that_hangs_up_on_the_greeting_fails_the_copy_once(harness: TcpHarness) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    ends = Ends(harness)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        harness.address = f"127.0.0.1:{listener.getsockname()[1]}"
        ends.copy(source, [0], destination, [0])
        harness.sender.poll(0.1)
        listener.accept()[0].close()
        event = ends.next_event()
    assert isinstance(event, Failed)
    assert (event.reason, event.settled) == (Reason.PEER_LOST, True)
    assert harness.sender.num_connections == 1


# -- what raises ----------------------------------------------------------------------------------


class Once:
    """Raises in the place of the first call."""

    def __init__(self, function: object) -> None:
        self._function = function
        self.raised = False

    def __call__(self, endpoint: Sender | Receiver) -> None:
        if not self.raised and (not isinstance(endpoint, Receiver) or endpoint.authenticated):
            self.raised = True
            raise ZeroDivisionError("scripted")
        assert callable(self._function)
        self._function(endpoint)


@pytest.mark.case("XFER-07")
@pytest.mark.parametrize(
    ("end", "reason", "error"),
    [
        ("sender", Reason.INTERNAL, "ZeroDivisionError"),
        ("receiver", Reason.PEER_LOST, None),
    ],
)
def test_what_a_connection_raises_ends_its_copy_and_the_next_one_is_served(
    harness: TcpHarness,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    reason: Reason,
    error: str | None,
) -> None:
    source, destination = harness.add_pool("source"), harness.add_pool("destination")
    transfer = harness.sender if end == "sender" else harness.receiver
    once = Once(getattr(transfer, f"_advance_{end}"))
    monkeypatch.setattr(transfer, f"_advance_{end}", once)
    ends = Ends(harness)
    ends.copy(source, [0], destination, [0])
    event = ends.next_event()
    assert once.raised
    assert isinstance(event, Failed)
    assert (event.reason, event.error) == (reason, error)
    ends.copy(source, [1], destination, [1], handoff_id="h-2")
    assert isinstance(ends.next_event(), Copied)


# -- the greeting's bytes -------------------------------------------------------------------------


def test_a_greeting_may_come_byte_by_byte() -> None:
    receiver, sender = ReceiverGreeting(SECRET), SenderGreeting(SECRET)
    claim = b"".join(sender.feed(bytes([byte])) for byte in receiver.hello)
    assert len(claim) == CLAIM_BYTES
    known, verdict = receiver.answer(claim)
    assert known
    for byte in verdict:
        assert not sender.done
        assert sender.feed(bytes([byte])) == b""
    assert sender.done


def test_a_receiver_that_speaks_something_else_is_found_at_its_first_bytes() -> None:
    with pytest.raises(FrameError, match="preface begins with b'HTT'"):
        SenderGreeting(SECRET).feed(b"HTT")


def test_a_proof_of_the_other_side_is_no_proof() -> None:
    """Else a receiver could be opened with what it said itself."""
    receiver = ReceiverGreeting(SECRET)
    claim = SenderGreeting(SECRET).feed(receiver.hello)
    _, verdict = receiver.answer(claim)
    assert not receiver.answer(claim[:-PROOF_BYTES] + verdict[1:])[0]


def test_bytes_behind_the_verdict_are_an_error() -> None:
    receiver, sender = ReceiverGreeting(SECRET), SenderGreeting(SECRET)
    _, verdict = receiver.answer(sender.feed(receiver.hello))
    with pytest.raises(FrameError, match="before any copy"):
        sender.feed(verdict + b"x")
    assert not sender.done


def test_a_refusal_is_an_error_with_its_reason() -> None:
    receiver, sender = ReceiverGreeting(SECRET), SenderGreeting(OTHER)
    known, verdict = receiver.answer(sender.feed(receiver.hello))
    assert not known
    with pytest.raises(TransferError) as caught:
        sender.feed(verdict)
    assert caught.value.reason is Reason.UNAUTHENTICATED


# -- the secret -----------------------------------------------------------------------------------


def test_processes_that_start_at_once_share_one_secret_that_is_private(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(shared_secret(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def test_two_servers_have_two_secrets(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert shared_secret(tmp_path / "a") != shared_secret(tmp_path / "b")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    shared_secret(tmp_path)
    (tmp_path / NAME).chmod(mode)
    with pytest.raises(StartError, match="can be read by others"):
        shared_secret(tmp_path)


@pytest.mark.parametrize("content", ["", "abc", "zz" * 32, "ab" * 31, "ab" * 33, "\x00\xff"])
def test_what_is_no_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / NAME
    path.write_text(content, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(StartError, match="64 hexadecimal digits"):
        shared_secret(tmp_path)


def test_links_folders_and_missing_places_are_start_errors(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        shared_secret(tmp_path / "missing")
    (tmp_path / NAME).mkdir()
    with pytest.raises(StartError, match="is not a file"):
        shared_secret(tmp_path)
    (tmp_path / NAME).rmdir()
    (tmp_path / "elsewhere").write_text("ab" * 32)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="transfer secret"):
        shared_secret(tmp_path)
