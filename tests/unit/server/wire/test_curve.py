"""Keys of the control plane: who is let in over TCP, and what is refused without keys."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from server.cli import app
from server.errors import StartError
from server.wire.curve import (
    CurveKeys,
    KeyPair,
    endpoint_refusal,
    load_keys,
    make_keys,
    needs_keys,
    zap_answer,
)
from server.wire.messages import CopiesDrained, Peer, encode
from server.wire.sockets import AsyncInbox, Inbox, Outbox

LIMIT_S = 30.0
LOOPBACK = "tcp://127.0.0.1:*"
PEER = Peer(instance="t", endpoint="", incarnation="i")


def drained(handoff_id: str) -> CopiesDrained:
    return CopiesDrained(handoff_id=handoff_id, transfer=PEER)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.01)


def keys_in(directory: Path) -> CurveKeys:
    keys = load_keys(directory)
    assert keys is not None
    return keys


@pytest.fixture
def keys(tmp_path: Path) -> CurveKeys:
    make_keys(tmp_path / "keys")
    return keys_in(tmp_path / "keys")


@pytest.fixture
def inbox(keys: CurveKeys) -> Iterator[Inbox]:
    inbox = Inbox(LOOPBACK, keys=keys)
    yield inbox
    inbox.close()


# -- who gets through -----------------------------------------------------------------------------


def test_messages_of_known_peers_arrive(keys: CurveKeys) -> None:
    inbox = Inbox(LOOPBACK, keys=keys)
    outbox = Outbox(keys=keys)
    assert outbox.send(inbox.endpoint, drained("h-1"))
    received = inbox.get(LIMIT_S)
    assert received is not None
    assert received.message == drained("h-1")
    assert inbox.counters.denied == 0
    outbox.close()
    inbox.close()


def test_an_async_inbox_takes_keys_too(keys: CurveKeys) -> None:
    async def main() -> None:
        inbox = AsyncInbox(LOOPBACK, keys=keys)
        outbox = Outbox(keys=keys)
        assert outbox.send(inbox.endpoint, drained("h-1"))
        (received,) = await asyncio.wait_for(inbox.receive(), LIMIT_S)
        assert received.message == drained("h-1")
        outbox.close()
        inbox.close()

    asyncio.run(main())


def still_serves(inbox: Inbox, keys: CurveKeys) -> None:
    outbox = Outbox(keys=keys)
    assert outbox.send(inbox.endpoint, drained("known"))
    received = inbox.get(LIMIT_S)
    assert received is not None
    assert received.message == drained("known"), "nothing of the stranger came before"
    outbox.close()


def new_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


@pytest.mark.parametrize(
    "changed", ["process", "inbox", "both"], ids=["unknown key", "another server's", "both"]
)
def test_a_peer_with_other_keys_delivers_nothing_and_is_counted(
    inbox: Inbox, keys: CurveKeys, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = keys
    if changed != "inbox":
        other = replace(other, process=new_pair())
    if changed != "process":
        other = replace(other, inbox=new_pair())
    outbox = Outbox(keys=other)
    with caplog.at_level(logging.WARNING):
        outbox.send(inbox.endpoint, drained("stranger"))
        eventually(lambda: inbox.counters.denied)
        eventually(lambda: not outbox.send(inbox.endpoint, drained("stranger")))
    assert f"inbox {inbox.endpoint} let a peer not in" in caplog.text
    assert inbox.drain() == []
    still_serves(inbox, keys)
    outbox.close()


def test_a_peer_without_keys_delivers_nothing_and_is_counted(inbox: Inbox, keys: CurveKeys) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    push = context.socket(zmq.PUSH)
    push.set(zmq.LINGER, 0)
    push.connect(inbox.endpoint)
    push.send(encode(drained("stranger")))
    eventually(lambda: inbox.counters.denied)
    still_serves(inbox, keys)
    context.destroy(linger=0)


def test_a_peer_with_keys_does_not_speak_to_an_inbox_without(
    keys: CurveKeys, caplog: pytest.LogCaptureFixture
) -> None:
    """An impostor that listens in the place of an inbox learns nothing."""
    inbox = Inbox(LOOPBACK)
    outbox = Outbox(keys=keys)
    with caplog.at_level(logging.WARNING):
        outbox.send(inbox.endpoint, drained("secret"))
        eventually(lambda: not outbox.send(inbox.endpoint, drained("secret")))
    assert inbox.counters.received == 0
    outbox.close()
    inbox.close()


def test_bytes_that_are_no_zeromq_do_not_disturb_an_inbox_with_keys(
    inbox: Inbox, keys: CurveKeys
) -> None:
    host, port = inbox.endpoint.removeprefix("tcp://").split(":")
    for opening in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(63), b"\xff" * 4096):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(opening)
    still_serves(inbox, keys)


def test_a_peer_that_was_refused_gets_through_once_it_is_known(
    keys: CurveKeys, tmp_path: Path
) -> None:
    """A host with a process key of its own, whose public half the others were given."""
    shutil.copytree(tmp_path / "keys", tmp_path / "other")
    make_keys(tmp_path / "third")
    for name in ("process.key", "process.key_secret"):
        shutil.copy(tmp_path / "third" / name, tmp_path / "other" / name)
    other = keys_in(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "process.key", tmp_path / "keys" / "known" / "other.key")
    inbox = Inbox(LOOPBACK, keys=keys_in(tmp_path / "keys"))
    outbox = Outbox(keys=other)
    assert outbox.send(inbox.endpoint, drained("h-1"))
    assert inbox.get(LIMIT_S) is not None
    outbox.close()
    inbox.close()


def test_ipc_needs_no_keys_and_works_beside_them(keys: CurveKeys, tmp_path: Path) -> None:
    inbox = Inbox(f"ipc://{tmp_path}/a.sock", keys=keys)
    for outbox in (Outbox(), Outbox(keys=keys)):
        assert outbox.send(inbox.endpoint, drained("h-1"))
        assert inbox.get(LIMIT_S) is not None
        outbox.close()
    inbox.close()


# -- without keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("ipc:///run/a.sock", False),
        ("inproc://a", False),
        ("tcp://127.0.0.1:7000", False),
        ("tcp://127.8.9.1:*", False),
        ("tcp://[::1]:7000", False),
        ("tcp://localhost:7000", False),
        ("tcp://*:7000", True),
        ("tcp://0.0.0.0:7000", True),
        ("tcp://[::]:7000", True),
        ("tcp://10.0.0.1:7000", True),
        ("tcp://eth0:7000", True),
        ("tcp://localhost.example.org:7000", True),
        ("tcp://127.0.0.1.example.org:7000", True),
        ("tcp://127.0.0.1:0;10.0.0.1:7000", True),
        ("udp://127.0.0.1:7000", True),
        ("", True),
    ],
)
def test_endpoints_that_others_reach_need_keys(endpoint: str, expected: bool) -> None:
    assert needs_keys(endpoint) is expected


def test_without_keys_no_socket_listens_beyond_the_host() -> None:
    with pytest.raises(StartError, match=r"will not listen: .* --curve-keys DIR"):
        Inbox("tcp://0.0.0.0:*")


def test_without_keys_nothing_is_sent_beyond_the_host(caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox()
    endpoint = "tcp://192.0.2.1:7000"
    with caplog.at_level(logging.ERROR):
        assert [outbox.send(endpoint, drained("h")) for _ in range(3)] == 3 * [False]
    assert outbox.counters.refused == {endpoint: 3}
    assert caplog.text.count("will not connect") == 1
    assert not outbox.is_lost(endpoint)
    outbox.close()


def test_with_keys_an_inbox_may_listen_beyond_the_host(keys: CurveKeys) -> None:
    inbox = Inbox("tcp://0.0.0.0:*", keys=keys)
    outbox = Outbox(keys=keys)
    endpoint = inbox.endpoint.replace("0.0.0.0", "127.0.0.1")
    assert outbox.send(endpoint, drained("h-1"))
    assert inbox.get(LIMIT_S) is not None
    outbox.close()
    inbox.close()


def test_keys_allow_no_other_transport(keys: CurveKeys) -> None:
    assert endpoint_refusal("udp://10.0.0.1:7000", keys) == (
        "udp://10.0.0.1:7000 is neither ipc nor tcp"
    )


# -- the folder -----------------------------------------------------------------------------------


def test_keys_are_private_and_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    result = CliRunner().invoke(app, ["keys", str(directory)])
    assert result.exit_code == 0, result.output
    assert str(directory) in result.output
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert [str(path.relative_to(directory)) for path in files] == [
        "inbox.key",
        "inbox.key_secret",
        "known/process.key",
        "process.key",
        "process.key_secret",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    before = (directory / "inbox.key_secret").read_bytes()
    again = CliRunner().invoke(app, ["keys", str(directory)])
    assert again.exit_code == 2
    assert (directory / "inbox.key_secret").read_bytes() == before


def test_secrets_are_not_in_the_text_of_keys(keys: CurveKeys) -> None:
    for pair in (keys.inbox, keys.process):
        assert pair.secret.decode() not in repr(keys)


def test_no_folder_means_no_keys() -> None:
    assert load_keys(None) is None


@pytest.mark.parametrize("name", ["inbox.key_secret", "process.key_secret"])
def test_a_secret_that_others_can_read_is_refused(
    keys: CurveKeys, tmp_path: Path, name: str
) -> None:
    (tmp_path / "keys" / name).chmod(0o640)
    with pytest.raises(StartError, match=f"{name} can be read by others"):
        load_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("inbox.key_secret", None, "cannot be read"),
        ("known/process.key", None, "has no public keys"),
        ("known/process.key", "nonsense", "is no key"),
        ("inbox.key_secret", 'curve\n    public-key = "abc"\n', "is no key"),
        ("known/process.key", f'curve\n    public-key = "{"~" * 40}"\n', "is no key"),
    ],
)
def test_a_folder_that_is_damaged_is_a_start_error(
    keys: CurveKeys, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / "keys" / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(StartError, match=message):
        load_keys(tmp_path / "keys")


def test_a_missing_folder_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="has no public keys"):
        load_keys(tmp_path / "nowhere")


# -- who is let in, as ZeroMQ asks ----------------------------------------------------------------


KEY = b"k" * 32
ASKED = [b"1.0", b"7", b"pdtrace", b"10.0.0.1", b"", b"CURVE", KEY]


def test_a_known_key_is_let_in() -> None:
    assert zap_answer(ASKED, frozenset({KEY})) == (True, [b"1.0", b"7", b"200", b"OK", b"", b""])


@pytest.mark.parametrize(
    "request_frames",
    [
        [*ASKED[:-1], b"other" * 6],
        ASKED[:-1],
        [*ASKED, KEY],
        [*ASKED[:5], b"NULL"],
        [*ASKED[:5], b"PLAIN", KEY],
        [b"2.0", *ASKED[1:]],
        [b"1.0"],
        [],
    ],
)
def test_anything_else_is_not(request_frames: list[bytes]) -> None:
    allowed, reply = zap_answer(request_frames, frozenset({KEY}))
    assert not allowed
    assert len(reply) == 6
    assert reply[2] == b"400"
