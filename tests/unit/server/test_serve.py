"""A worker from its configuration to its end, in a thread, over real sockets."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import pytest

from pdtrace.clock import Clock
from pdtrace.ring.reader import RingReader
from pdtrace.ring.records import ClockRecord
from pdtrace.stages import Role
from server.clock_fault import ClockFault
from server.colocated.worker import ColocatedWorker, run
from server.config import ProcessConfig, Settings
from server.engine.fake import FakeEngine
from server.engine.loader import EngineConfig
from server.errors import StartError
from server.readiness import ReadyPipe
from server.scheduler import IDLE_WAIT_S
from server.serve import serve
from server.wire.curve import CurveKeys
from server.wire.endpoints import EndpointDirectory
from server.wire.messages import AnyMessage, Cancel, Heartbeat, HeartbeatAck, LegClosed, Peer
from server.wire.sockets import Inbox, Outbox

ROOT = Path(__file__).resolve().parents[3]


def config(tmp_path: Path, *, pool: bool = True, **settings: object) -> ProcessConfig:
    endpoints = EndpointDirectory(tmp_path)
    values: dict[str, object] = {
        "run_dir": str(tmp_path),
        "mode": "colocated",
        "model": "fake",
        "decode_pages": 8,
        "heartbeat_s": 0.05,
        "record": False,
        **settings,
    }
    return ProcessConfig(
        settings=Settings(**values),  # pyright: ignore[reportArgumentType]
        role="worker",
        instance="worker-0",
        incarnation="1",
        endpoint=endpoints.endpoint("worker-0"),
        gateway_endpoint=endpoints.endpoint("gateway-0"),
        pool_path=str(tmp_path / "worker-0.kv") if pool else None,
    )


@contextlib.contextmanager
def running(given: ProcessConfig) -> Generator[threading.Event]:
    stop = threading.Event()
    failures: list[BaseException] = []

    def serve_until_stopped() -> None:
        try:
            run(given, stop=stop)
        except BaseException as error:  # handed to the test's thread
            failures.append(error)

    thread = threading.Thread(target=serve_until_stopped)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert failures == []


def receive(inbox: Inbox, kind: type[AnyMessage]) -> AnyMessage:
    for _ in range(100):
        received = inbox.get(30)
        assert received is not None
        if isinstance(received.message, kind):
            return received.message
    raise AssertionError(f"no {kind.__name__} came")


def ready_beat(gateway: Inbox) -> Heartbeat:
    """The first beat of a worker that has its engine."""
    while True:
        beat = receive(gateway, Heartbeat)
        assert isinstance(beat, Heartbeat)
        if beat.info is not None:
            return beat


def test_worker_beats_answers_and_leaves_no_pool_behind(tmp_path: Path) -> None:
    given = config(tmp_path)
    gateway = Inbox(given.gateway_endpoint)
    outbox = Outbox()
    with contextlib.closing(gateway), contextlib.closing(outbox), running(given):
        beat = ready_beat(gateway)
        assert beat.info is not None
        assert beat.info.name == "fake"
        assert beat.load.pages_total in {0, 8}  # 0 before the first turn
        peer = Peer(instance="gateway-0", endpoint=given.gateway_endpoint, incarnation="g")
        cancel = Cancel(
            handoff_id="h1", outcome="cancelled", reason="test", by="client", gateway=peer
        )
        outbox.send(given.endpoint, cancel)
        closed = receive(gateway, LegClosed)
        assert isinstance(closed, LegClosed)
        assert (closed.handoff_id, closed.outcome) == ("h1", "cancelled")
    assert not (tmp_path / "worker-0.kv").exists()


def test_mail_for_the_predecessor_at_the_address_is_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came before anybody could know of this worker: a leg of it would be nobody's."""
    given = config(tmp_path)
    gateway, outbox = Inbox(given.gateway_endpoint), Outbox()
    peer = Peer(instance="gateway-0", endpoint=given.gateway_endpoint, incarnation="g")

    def cancel(handoff_id: str) -> Cancel:
        return Cancel(
            handoff_id=handoff_id, outcome="cancelled", reason="test", by="client", gateway=peer
        )

    inboxes: list[Inbox] = []

    def kept_inbox(endpoint: str, *, clock: Clock, keys: CurveKeys | None) -> Inbox:
        inboxes.append(Inbox(endpoint, clock=clock, keys=keys))
        return inboxes[0]

    def load_while_mail_arrives(_: EngineConfig) -> FakeEngine:
        with contextlib.closing(Outbox()) as early:
            early.send(given.endpoint, cancel("for-the-one-before"))
            wait_until(lambda: inboxes[0].num_waiting == 1)
        return FakeEngine(pool_path=tmp_path / "mine.kv", owner="worker-0", num_pages=8)

    monkeypatch.setattr("server.serve.Inbox", kept_inbox)
    monkeypatch.setattr("server.serve.load_engine", load_while_mail_arrives)
    with contextlib.closing(gateway), contextlib.closing(outbox), running(given):
        ready_beat(gateway)
        outbox.send(given.endpoint, cancel("for-this-one"))
        closed = receive(gateway, LegClosed)
        assert isinstance(closed, LegClosed)
        assert closed.handoff_id == "for-this-one"


def test_worker_says_that_it_serves_once_it_does(tmp_path: Path) -> None:
    pipe = ReadyPipe()
    given = msgspec.structs.replace(config(tmp_path), ready_fd=os.dup(pipe.write_fd))
    gateway = Inbox(given.gateway_endpoint)
    with contextlib.closing(gateway), contextlib.closing(pipe), running(given):
        wait_until(pipe.is_ready)
        receive(gateway, Heartbeat)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_worker_without_a_pool_path_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="worker-0 has no pool_path"):
        run(config(tmp_path, pool=False), stop=threading.Event())


def test_directory_that_cannot_hold_the_recording_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "rings").write_text("a file")
    with pytest.raises(StartError, match="worker-0 cannot record in"):
        run(config(tmp_path, record=True), stop=threading.Event())
    assert not (tmp_path / "worker-0.kv").exists()


def test_given_engine_is_used_and_closed(tmp_path: Path) -> None:
    engine = FakeEngine(pool_path=tmp_path / "mine.kv", owner="worker-0", num_pages=4)
    stop = threading.Event()
    stop.set()
    given = config(tmp_path)
    gateway = Inbox(given.gateway_endpoint)
    with contextlib.closing(gateway):
        serve(given, role=Role.WORKER, make_worker=ColocatedWorker, engine=engine, stop=stop)
        beat = receive(gateway, Heartbeat)
    assert isinstance(beat, Heartbeat)
    assert not (tmp_path / "mine.kv").exists()


def test_answers_to_its_beats_become_clock_samples(tmp_path: Path) -> None:
    """The gateway here runs on a clock 7 s ahead, the worker on one 5 s ahead of this host's."""
    fault = ClockFault(offset_s=5, host="host-b")
    given = config(tmp_path, record=True, allow_faults=True, clock_faults={"worker-0": fault})
    gateway = Inbox(given.gateway_endpoint)
    outbox = Outbox()
    with contextlib.closing(gateway), contextlib.closing(outbox), running(given):
        ready_beat(gateway)
        for _ in range(3):
            received = gateway.get(30)
            assert received is not None and isinstance(received.message, Heartbeat)
            beat, now_ns = received.message, time.monotonic_ns() + 7_000_000_000
            answer = HeartbeatAck(
                incarnation=beat.peer.incarnation,
                seq=beat.seq,
                sent_ns=beat.sent_ns,
                received_ns=now_ns,
                answered_ns=now_ns,
                clock_id="host-a/boot-1",
                gateway=Peer(
                    instance="gateway-0", endpoint=given.gateway_endpoint, incarnation="g"
                ),
            )
            assert outbox.send(beat.peer.endpoint, answer)
            assert outbox.send(beat.peer.endpoint, answer), "a repeated answer says nothing"
        (path,) = (tmp_path / "rings").glob("worker-0-*.ring")
        samples = wait_for_samples(path, 3)
    assert len(samples) == 3
    for sample in samples:
        assert (sample.peer, sample.peer_clock_id) == ("gateway-0", "host-a/boot-1")
        assert abs(sample.offset_ns - 2_000_000_000) <= sample.error_ns
    assert RingReader(path).identity.host_id == "host-b"


def wait_for_samples(path: Path, count: int) -> list[ClockRecord]:
    reader = RingReader(path)
    samples: list[ClockRecord] = []
    end_s = time.monotonic() + 30
    while len(samples) < count and time.monotonic() < end_s:
        samples += [record for record in reader.read() if isinstance(record, ClockRecord)]
        time.sleep(0.01)
    return samples


def test_worker_that_is_told_to_stop_at_the_end_of_a_wait_stops(tmp_path: Path) -> None:
    """The signal interrupts a wait whose time is over before its handler has run. No message comes
    to end that wait: the gateway is gone."""
    given = config(tmp_path)
    path = tmp_path / "worker-0.json"
    path.write_bytes(msgspec.json.encode(given))
    process = subprocess.Popen(
        [sys.executable, "-m", "server.process", str(path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr as log:
        try:
            assert any("worker-0 serves at" in line for line in log)
            time.sleep(IDLE_WAIT_S)  # it may have been in its first turn
            process.send_signal(signal.SIGSTOP)
            # To its main thread: where another one takes it, no wait is interrupted.
            assert ctypes.CDLL(None).tgkill(process.pid, process.pid, signal.SIGTERM) == 0
            time.sleep(2 * IDLE_WAIT_S)
            process.send_signal(signal.SIGCONT)
            assert process.wait(timeout=30) == 0
            assert "worker-0 stopped" in log.read()
        finally:
            process.kill()
            process.wait()
