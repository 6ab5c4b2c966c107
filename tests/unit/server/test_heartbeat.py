"""Heartbeats as the gateway and the transfer process receive them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdtrace.clock import SYSTEM_CLOCK
from server.config import ProcessConfig, Settings
from server.engine.fake import FakeModel
from server.heartbeat import HeartbeatThread, Progress, Serves
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.taken import TakenRequests
from server.wire.endpoints import IPC
from server.wire.messages import AnyMessage, Heartbeat, RegisterPool, WorkerLoad
from server.wire.sockets import Inbox

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
POOL = PoolDescriptor(owner="decode-0", path="/dev/null", num_pages=4, layout=LAYOUT)
INFO = FakeModel().info
SERVES = Serves(info=INFO, layout=LAYOUT, pool=POOL)


class StillClock:
    """Monotonic time moves only when told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def gateway() -> Iterator[Inbox]:
    path = Path(f"/tmp/pdt-beat-{os.getpid()}.sock")
    inbox = Inbox(f"{IPC}{path}")
    yield inbox
    inbox.close()
    assert not path.exists()


@pytest.fixture
def transfer() -> Iterator[Inbox]:
    inbox = Inbox("tcp://127.0.0.1:*")
    yield inbox
    inbox.close()


def config(gateway: Inbox, transfer: Inbox | None, heartbeat_s: float) -> ProcessConfig:
    return ProcessConfig(
        settings=Settings(heartbeat_s=heartbeat_s),
        role="decode",
        instance="decode-0",
        incarnation="abc",
        endpoint="ipc:///tmp/decode-0.sock",
        gateway_endpoint=gateway.endpoint,
        transfer_endpoint=None if transfer is None else transfer.endpoint,
    )


def next_beat(inbox: Inbox) -> Heartbeat:
    received = inbox.get(30.0)
    assert received is not None, "no heartbeat came"
    assert isinstance(received.message, Heartbeat)
    return received.message


def test_the_first_beat_comes_at_once_and_says_who_is_there(gateway: Inbox) -> None:
    thread = HeartbeatThread(config(gateway, None, 60.0), Progress(), serves=SERVES)
    thread.start()
    beat = next_beat(gateway)
    assert (beat.peer.instance, beat.peer.incarnation) == ("decode-0", "abc")
    assert (beat.role, beat.seq, beat.draining) == ("decode", 1, False)
    assert (beat.info, beat.layout) == (INFO, LAYOUT)
    thread.stop()


def test_worker_that_loads_beats_and_offers_nothing_until_it_is_announced(
    gateway: Inbox, transfer: Inbox
) -> None:
    thread = HeartbeatThread(config(gateway, transfer, 0.01), Progress())
    thread.start()
    loading = [next_beat(gateway) for _ in range(3)]
    assert {(beat.info, beat.layout) for beat in loading} == {(None, None)}
    assert transfer.get(0.0) is None
    thread.announce(SERVES)
    while (beat := next_beat(gateway)).info is None:
        pass
    assert beat.layout == LAYOUT
    received = transfer.get(30.0)
    assert received is not None
    assert received.message == RegisterPool(peer=beat.peer, pool=POOL)
    thread.stop()


def test_beats_say_which_messages_had_no_effect(gateway: Inbox) -> None:
    progress = Progress()
    ignored: Counter[str] = Counter({"late.CopyDone": 2})
    progress.tick(busy=False, ignored=ignored)
    ignored["unknown.Handoff"] += 1  # of the next turn
    thread = HeartbeatThread(config(gateway, None, 0.01), progress)
    thread.start()
    assert next_beat(gateway).ignored == {"late.CopyDone": 2}
    progress.tick(busy=False, ignored=ignored)
    while next_beat(gateway).ignored == {"late.CopyDone": 2}:
        pass
    progress.tick(busy=False)
    thread.stop()
    assert next_beat(gateway).ignored == {"late.CopyDone": 2, "unknown.Handoff": 1}


def test_beats_go_on_while_the_loop_hangs_and_show_how_long(gateway: Inbox) -> None:
    clock = StillClock()
    progress = Progress(clock)
    progress.tick(busy=True, load=WorkerLoad(pages_total=8, running=3))
    thread = HeartbeatThread(config(gateway, None, 0.01), progress)
    thread.start()
    first = next_beat(gateway)
    assert (first.busy, first.progress_age_s) == (True, 0.0)
    clock.now_ns += 7_000_000_000
    while next_beat(gateway).progress_age_s == 0.0:
        pass
    beat = next_beat(gateway)
    assert (beat.progress_age_s, beat.load.running) == (7.0, 3)
    progress.tick(busy=True)
    while next_beat(gateway).progress_age_s == 7.0:
        pass
    assert next_beat(gateway).load.running == 3, "a tick without numbers keeps them"
    thread.stop()


def test_an_idle_loop_has_no_age() -> None:
    clock = StillClock()
    progress = Progress(clock)
    assert progress.tick(busy=False) == clock.now_ns
    clock.now_ns += 60_000_000_000
    assert progress.age_s == 0.0


def test_a_pool_is_registered_with_every_beat(gateway: Inbox, transfer: Inbox) -> None:
    thread = HeartbeatThread(config(gateway, transfer, 0.01), Progress(), serves=SERVES)
    thread.start()
    for _ in range(3):
        received = transfer.get(30.0)
        assert received is not None
        assert isinstance(received.message, RegisterPool)
        assert received.message.pool == POOL
        assert received.message.peer.incarnation == "abc"
    thread.stop()


def test_stop_sends_a_last_beat_that_says_draining(gateway: Inbox) -> None:
    thread = HeartbeatThread(config(gateway, None, 60.0), Progress())
    thread.start()
    assert not next_beat(gateway).draining
    start = time.monotonic()
    thread.stop()
    assert time.monotonic() - start < 30
    last = next_beat(gateway)
    assert (last.draining, last.leaving, last.seq) == (True, True, 2)
    thread.stop()


def test_draining_is_announced_by_the_loop(gateway: Inbox) -> None:
    progress = Progress()
    progress.draining = True
    thread = HeartbeatThread(config(gateway, None, 60.0), progress)
    thread.start()
    assert next_beat(gateway).draining
    thread.stop()


def test_sequence_and_send_time_grow(gateway: Inbox) -> None:
    thread = HeartbeatThread(config(gateway, None, 0.005), Progress())
    before_ns = SYSTEM_CLOCK.monotonic_ns()
    thread.start()
    beats = [next_beat(gateway) for _ in range(4)]
    assert [beat.seq for beat in beats] == [1, 2, 3, 4]
    times = [before_ns, *(beat.sent_ns for beat in beats), SYSTEM_CLOCK.monotonic_ns()]
    assert times == sorted(times)
    thread.stop()


def test_requests_taken_in_are_named_until_that_was_answered(gateway: Inbox) -> None:
    taken = TakenRequests()
    taken.take("h1")
    thread = HeartbeatThread(
        config(gateway, None, 0.005), Progress(), taken=taken, denied=lambda: {"control": 3}
    )
    thread.start()
    beats = [next_beat(gateway) for _ in range(3)]
    assert [(beat.heard, beat.taken) for beat in beats] == 3 * [(0, ("h1",))]
    assert beats[0].denied == {"control": 3}
    taken.heard(beats[1].seq)
    taken.take("h2")
    while (beat := next_beat(gateway)).taken != ("h2",):
        assert beat.taken in (("h1",), ())
    assert beat.heard == beats[1].seq
    thread.stop()


def test_beats_say_whether_the_process_is_recorded(gateway: Inbox) -> None:
    progress = Progress()
    thread = HeartbeatThread(config(gateway, None, 0.005), progress)
    thread.start()
    assert not next_beat(gateway).unrecorded
    progress.recorded = False
    while not next_beat(gateway).unrecorded:
        pass
    thread.stop()


def test_stopping_a_thread_that_never_started_returns(gateway: Inbox) -> None:
    HeartbeatThread(config(gateway, None, 1.0), Progress()).stop()


class LostConnections:
    """An outbox whose peers refuse the first messages; `sent` says what each got to hear."""

    def __init__(self, refusals: dict[str, int]) -> None:
        self.refusals = refusals
        self.sent: list[tuple[str, bool]] = []
        self.quiet = threading.Event()

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        left = self.refusals[endpoint]
        self.refusals[endpoint] = left - 1
        self.sent.append((endpoint, left <= 0))
        if all(taken < 0 for taken in self.refusals.values()):
            self.quiet.set()
        return left <= 0

    def close(self) -> None: ...


def test_who_is_away_hears_of_everybody_as_soon_as_it_is_back(
    gateway: Inbox, transfer: Inbox
) -> None:
    """Beats are an hour apart: what is said again is what was refused, and only that."""
    outbox = LostConnections({gateway.endpoint: 3, transfer.endpoint: 1})
    thread = HeartbeatThread(
        config(gateway, transfer, 3600.0), Progress(), serves=SERVES, make_outbox=lambda: outbox
    )
    thread.start()
    assert outbox.quiet.wait(30.0)
    told = [taken for endpoint, taken in outbox.sent if endpoint == gateway.endpoint]
    assert told == [False, False, False, True]
    told = [taken for endpoint, taken in outbox.sent if endpoint == transfer.endpoint]
    assert told == [False, True]
    thread.stop()


def test_a_drain_is_told_without_waiting_for_a_beat(gateway: Inbox) -> None:
    progress = Progress()
    thread = HeartbeatThread(config(gateway, None, 3600.0), progress)
    thread.start()
    assert not next_beat(gateway).draining
    progress.draining = True
    thread.beat_now()
    assert next_beat(gateway).draining
    thread.stop()
