"""The transfer process as it runs: real sockets, pools in shared memory, one host and two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from pdtrace.propagation import RequestContext
from pdtrace.ring.layout import Counter
from pdtrace.ring.reader import RingReader
from pdtrace.ring.records import EndRecord, MarkRecord
from pdtrace.stages import Gauge, Mark
from pdtrace.testing import SequentialIds
from server.config import ProcessConfig, Settings
from server.errors import StartError
from server.kv.pool import KvPool
from server.kv.transfer import worker
from server.kv.transfer.base import Reason
from server.kv.transfer.secret import shared_secret
from server.kv.transfer.tcp_auth import HELLO_BYTES, VERDICT_BYTES, SenderGreeting
from server.kv.transfer.tcp_frames import (
    LENGTH_BYTES,
    CopyHeader,
    CopyReply,
    decode_length,
    decode_reply,
    encode_frame,
    parse_address,
)
from server.kv.transfer.worker import run
from server.wire.endpoints import EndpointDirectory
from server.wire.messages import (
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    Heartbeat,
    Peer,
    PoolRef,
    RegisterPool,
)
from server.wire.sockets import Inbox, Outbox
from tests.support.kv_transfers import LAYOUT, NUM_PAGES

LIMIT_S = 60.0
MessageT = TypeVar("MessageT")


@dataclass
class Leg:
    """A worker as the transfer process sees it: an inbox and a pool."""

    peer: Peer
    inbox: Inbox
    pool: KvPool
    held: list[AnyMessage] = field(default_factory=list[AnyMessage])

    @property
    def ref(self) -> PoolRef:
        return PoolRef(owner=self.peer.instance, incarnation=self.peer.incarnation)

    def expect(self, kind: type[MessageT]) -> MessageT:
        received = self.inbox.get(LIMIT_S)
        assert received is not None, f"no {kind.__name__} came"
        assert isinstance(received.message, kind), received.message
        return received.message


@dataclass
class Site:
    """One or two hosts with their transfer processes, a prefill and a decode leg, a gateway."""

    directory: Path
    configs: list[ProcessConfig]
    prefill: Leg
    decode: Leg
    gateway: Inbox
    outbox: Outbox
    ids: SequentialIds = field(default_factory=SequentialIds)

    def register(self, *, prefill_only: bool = False) -> None:
        """As the workers' heartbeats do; returns when the transfers have seen it."""
        for leg, config in ((self.prefill, self.configs[0]), (self.decode, self.configs[-1])):
            message = RegisterPool(peer=leg.peer, pool=leg.pool.descriptor)
            assert self.outbox.send(config.endpoint, message)
            # Messages of one sender keep their order, so the answer comes after the registration.
            question = CancelCopies(handoff_id="registered?", reply_to=leg.peer)
            assert self.outbox.send(config.endpoint, question)
            leg.expect(CopiesDrained)
            if prefill_only:
                return

    def job(self, index: int, pages: tuple[int, ...], *, last: bool, handoff: str) -> CopyJob:
        context = RequestContext.create(request_id=f"req-{handoff}", ids=self.ids)
        return CopyJob(
            context=msgspec.structs.replace(context, handoff_id=handoff),
            index=index,
            last=last,
            source=self.prefill.ref,
            source_pages=pages,
            destination=self.decode.ref,
            destination_pages=tuple(NUM_PAGES - 1 - page for page in pages),
            transfer_address=self.configs[-1].transfer_address,
            prefill=self.prefill.peer,
            decode=self.decode.peer,
        )

    def copy(self, handoff: str) -> None:
        """Two jobs of one handoff, and their answers on both sides."""
        assert self.outbox.send(
            self.configs[0].endpoint, self.job(0, (0, 1, 2), last=False, handoff=handoff)
        )
        assert self.outbox.send(
            self.configs[0].endpoint, self.job(1, (5,), last=True, handoff=handoff)
        )
        for leg in (self.prefill, self.decode):
            answers = [leg.expect(CopyDone) for _ in range(2)]
            assert [(a.handoff_id, a.index, a.last) for a in answers] == [
                (handoff, 0, False),
                (handoff, 1, True),
            ]
            assert sum(a.num_bytes for a in answers) == 4 * LAYOUT.page_bytes
        for page in (0, 1, 2, 5):
            arrived = self.decode.pool.memory[LAYOUT.page_range(NUM_PAGES - 1 - page)]
            assert arrived == self.prefill.pool.memory[LAYOUT.page_range(page)]

    def marks(self, config: ProcessConfig) -> list[Mark]:
        [path] = Path(config.settings.rings_path).glob(f"{config.instance}-*.ring")
        with RingReader(path) as reader:
            records = reader.read()
            assert reader.counters()[Counter.ERRORS] == 0
            assert reader.closed
        assert sum(isinstance(record, EndRecord) for record in records) >= 1
        return [record.mark for record in records if isinstance(record, MarkRecord)]


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[[str], Site]]:
    endpoints = EndpointDirectory(tmp_path)
    closers: list[Callable[[], None]] = []

    def leg(name: str, number: int) -> Leg:
        inbox = Inbox(endpoints.endpoint(name))
        pool = KvPool.create(
            tmp_path / f"{name}.pool", owner=name, layout=LAYOUT, num_pages=NUM_PAGES
        )
        pool.memory[:] = os.urandom(pool.descriptor.num_bytes)
        closers.extend((inbox.close, pool.close))
        peer = Peer(instance=name, endpoint=inbox.endpoint, incarnation=f"i{number}")
        return Leg(peer, inbox, pool)

    def make(transfer: str) -> Site:
        settings = Settings(run_dir=str(tmp_path), transfer=transfer, heartbeat_s=0.1)
        gateway = Inbox(endpoints.endpoint("gateway-0"))
        outbox = Outbox()
        closers.extend((gateway.close, outbox.close))
        configs = [
            ProcessConfig(
                settings=settings,
                role="transfer",
                instance=f"transfer-{host}",
                incarnation=f"t{host}",
                endpoint=endpoints.endpoint(f"transfer-{host}"),
                gateway_endpoint=gateway.endpoint,
                transfer_address=f"127.0.0.1:{free_port()}" if transfer == "tcp" else None,
            )
            for host in range(2 if transfer == "tcp" else 1)
        ]
        return Site(tmp_path, configs, leg("prefill-0", 1), leg("decode-0", 2), gateway, outbox)

    yield make
    for close in reversed(closers):
        close()
    endpoints.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Running:
    """`run` of each config in a thread; stopping must succeed."""

    def __init__(self, *configs: ProcessConfig) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, args=(config,), kwargs={"stop": self._stop})
            for config in configs
        ]

    def __enter__(self) -> Running:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """As SIGTERM does; returns at once."""
        self._stop.set()

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "the transfer process did not stop"


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_pages_move_between_the_legs_and_both_hear_of_it(
    make_site: Callable[[str], Site], transfer: str
) -> None:
    site = make_site(transfer)
    with Running(*site.configs):
        site.register()
        for number in range(3):
            site.copy(f"h-{number}")
        beat = site.gateway.get(LIMIT_S)
        assert beat is not None
        assert isinstance(beat.message, Heartbeat)
        assert beat.message.role == "transfer"
    marks = site.marks(site.configs[0])
    assert marks.count(Mark.KV_LANDED) == 3
    assert marks.count(Mark.COPY_FINISHED) == 6
    assert Mark.ABORTED not in marks


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_each_leg_drains_at_the_transfer_of_its_own_host(
    make_site: Callable[[str], Site], transfer: str
) -> None:
    site = make_site(transfer)
    with Running(*site.configs):
        site.register()
        site.copy("h-0")
        for leg, config in ((site.prefill, site.configs[0]), (site.decode, site.configs[-1])):
            message = CancelCopies(handoff_id="h-1", reply_to=leg.peer)
            assert site.outbox.send(config.endpoint, message)
            assert leg.expect(CopiesDrained).handoff_id == "h-1"
        before = bytes(site.decode.pool.memory)
        late = site.job(0, (3, 4), last=True, handoff="h-1")
        assert site.outbox.send(site.configs[0].endpoint, late)
        site.copy("h-2")  # jobs of one sender keep their order: the late one has been seen
        changed = [
            page
            for page in range(NUM_PAGES)
            if bytes(site.decode.pool.memory[LAYOUT.page_range(page)])
            != before[LAYOUT.page_range(page)]
        ]
        assert changed == []


def test_a_destination_that_drained_refuses_a_source_that_does_not_know(
    make_site: Callable[[str], Site],
) -> None:
    site = make_site("tcp")
    with Running(*site.configs):
        site.register()
        site.copy("h-0")
        message = CancelCopies(handoff_id="h-1", reply_to=site.decode.peer)
        assert site.outbox.send(site.configs[1].endpoint, message)
        site.decode.expect(CopiesDrained)
        before = bytes(site.decode.pool.memory)
        job = site.job(0, (3, 4), last=True, handoff="h-1")
        assert site.outbox.send(site.configs[0].endpoint, job)
        assert site.prefill.expect(CopyFailed).reason == "cancelled"
        assert site.decode.pool.memory.tobytes() == before


def test_a_destination_host_that_is_down_fails_the_copy_within_its_deadline(
    make_site: Callable[[str], Site],
) -> None:
    site = make_site("tcp")
    with Running(site.configs[0]):
        site.register(prefill_only=True)
        job = site.job(0, (1,), last=True, handoff="h-0")
        assert site.outbox.send(site.configs[0].endpoint, job)
        failed = site.prefill.expect(CopyFailed)
        assert failed.reason == "transfer_unreachable"
        assert site.decode.expect(CopyFailed) == failed


def test_pools_are_learnt_again_after_a_restart(make_site: Callable[[str], Site]) -> None:
    site = make_site("shm")
    with Running(*site.configs):
        site.register()
        site.copy("h-0")
    with Running(*site.configs):
        deadline = time.monotonic() + LIMIT_S
        job = site.job(0, (1,), last=True, handoff="h-1")
        while not site.outbox.send(site.configs[0].endpoint, job):
            assert time.monotonic() < deadline, "the connection was not made again"
            time.sleep(0.01)
        for leg in (site.prefill, site.decode):
            assert leg.expect(CopyFailed).reason == "unknown_pool"
        site.register()
        site.copy("h-2")


def test_an_idle_process_sleeps(make_site: Callable[[str], Site]) -> None:
    site = make_site("shm")
    with Running(*site.configs):
        site.register()
        site.copy("h-0")
        before_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before_s < 0.2, "the loop turns without work"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_process_cleanly(
    make_site: Callable[[str], Site], signal_number: signal.Signals
) -> None:
    site = make_site("shm")
    [config] = site.configs
    path = site.directory / "transfer-0.json"
    path.write_bytes(msgspec.json.encode(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "server.process", str(path)], stderr=subprocess.PIPE
    )
    try:
        beat = site.gateway.get(LIMIT_S)
        assert beat is not None
        site.register()
        site.copy("h-0")
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors
    beats = [received.message for received in site.gateway.drain()]
    assert isinstance(beats[-1], Heartbeat)
    assert beats[-1].draining
    [ring] = Path(config.settings.rings_path).glob("transfer-0-*.ring")
    with RingReader(ring) as reader:
        assert reader.gauges()[Gauge.COPIED_BYTES] == 4 * LAYOUT.page_bytes
        assert reader.gauges()[Gauge.COPY_JOBS_WAITING] == 0


class OtherHost:
    """A transfer process of another host, as the one that receives from it sees it."""

    def __init__(self, site: Site) -> None:
        address = site.configs[-1].transfer_address
        assert address is not None
        self._socket = socket.create_connection(parse_address(address), timeout=LIMIT_S)
        self._file = self._socket.makefile("rb")
        greeting = SenderGreeting(shared_secret(site.configs[-1].settings.run_path))
        self.send(greeting.feed(self._file.read(HELLO_BYTES)))
        greeting.feed(self._file.read(VERDICT_BYTES))

    def header(self, site: Site, handoff_id: str) -> bytes:
        return encode_frame(
            CopyHeader(
                handoff_id=handoff_id, index=0, pool=site.decode.ref, layout=LAYOUT, pages=(0,)
            )
        )

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self) -> CopyReply:
        return decode_reply(self._file.read(decode_length(self._file.read(LENGTH_BYTES))))

    def is_closed(self) -> bool:
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def drains(gateway: Inbox, instance: str) -> bool:
    """Wait for a heartbeat that says that `instance` stops."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        received = gateway.get(LIMIT_S)
        if received is not None and isinstance(received.message, Heartbeat):
            beat = received.message
            if beat.peer.instance == instance and beat.draining:
                return True
    return False


def test_a_process_that_stops_finishes_the_copy_that_comes_in_and_refuses_the_next(
    make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 4 * LIMIT_S)
    monkeypatch.setattr(worker, "ACCEPT_S", 0.0)
    site = make_site("tcp")
    page = os.urandom(LAYOUT.page_bytes)
    with Running(*site.configs) as running:
        site.register()
        other, late = OtherHost(site), OtherHost(site)
        other.send(other.header(site, "begun") + page[:10])
        wait_for_bytes(site.decode.pool, page[:10])
        running.stop()
        assert drains(site.gateway, "transfer-1")
        late.send(late.header(site, "new") + bytes(LAYOUT.page_bytes))
        refused = late.reply()
        assert (refused.reason, refused.num_bytes) == (Reason.TRANSFER_STOPPING, 0)
        other.send(page[10:])
        assert other.reply() == CopyReply(num_bytes=len(page), crc32=zlib.crc32(page))
        assert site.decode.pool.memory[LAYOUT.page_range(0)] == page
        assert other.is_closed()
    for host in (other, late):
        host.close()


def test_a_process_that_stops_takes_copies_that_were_on_their_way(
    make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once none comes any more, it ends long before its grace."""
    for name in ("GRACE_S", "ACCEPT_S", "QUIET_S"):
        monkeypatch.setattr(worker, name, 4 * LIMIT_S)
    site = make_site("tcp")
    with Running(*site.configs) as running:
        site.register()
        running.stop()
        assert drains(site.gateway, "transfer-1")
        for number in range(3):
            site.copy(f"h-{number}")
        monkeypatch.setattr(worker, "QUIET_S", 0.0)


def test_a_process_that_stops_does_not_wait_for_ever_for_a_copy_that_comes_in(
    make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.3)
    monkeypatch.setattr(worker, "ACCEPT_S", 0.1)
    site = make_site("tcp")
    with Running(*site.configs) as running:
        site.register()
        other = OtherHost(site)
        other.send(other.header(site, "begun") + b"1234567890")
        wait_for_bytes(site.decode.pool, b"1234567890")
        running.stop()
        assert other.is_closed()
    other.close()


def wait_for_bytes(pool: KvPool, expected: bytes) -> None:
    """Wait until page 0 of `pool` begins with `expected`."""
    deadline = time.monotonic() + LIMIT_S
    begin = LAYOUT.page_range(0).start
    while bytes(pool.memory[begin : begin + len(expected)]) != expected:
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.002)


def test_tcp_without_an_address_is_a_start_error(make_site: Callable[[str], Site]) -> None:
    site = make_site("tcp")
    config = msgspec.structs.replace(site.configs[0], transfer_address=None)
    with pytest.raises(StartError, match="transfer_address"):
        run(config)


def test_an_endpoint_in_use_is_a_start_error(make_site: Callable[[str], Site]) -> None:
    site = make_site("shm")
    config = msgspec.structs.replace(site.configs[0], endpoint=site.gateway.endpoint)
    with pytest.raises(StartError, match="in use"):
        run(config)
