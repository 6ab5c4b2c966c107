"""Inboxes and outboxes with faults, on a fake clock."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import pytest

from pdtrace.testing import FakeClock
from server.injection.fault import Delay, Direction, Drop, Fault, Pause, Reorder, Repeat
from server.injection.injector import Injector
from server.injection.ports import AsyncFaultyInbox, FaultyInbox, FaultyOutbox
from server.wire.messages import AnyMessage, CancelCopies, CopyDone, FaultReport, InjectFaults, Peer
from server.wire.sockets import Received

ME = Peer(instance="decode-0", endpoint="me", incarnation="1")
ASKER = Peer(instance="inject", endpoint="asker", incarnation="")
SENT = Direction.SENT


def done(number: int) -> CopyDone:
    return CopyDone(handoff_id=f"h{number}", index=0, last=True, num_bytes=1)


def other(number: int) -> CancelCopies:
    return CancelCopies(handoff_id=f"h{number}", reply_to=ME)


@dataclass(slots=True)
class Socket:
    """Both ends: what waits to be read, and what was sent. Waiting moves the clock."""

    clock: FakeClock
    waiting: deque[Received] = field(default_factory=deque[Received])
    sent: list[tuple[str, AnyMessage]] = field(default_factory=list[tuple[str, AnyMessage]])
    reachable: bool = True

    def arrive(self, *messages: AnyMessage) -> None:
        self.waiting += [Received(message, self.clock.monotonic_ns()) for message in messages]

    def get(self, timeout_s: float) -> Received | None:
        if not self.waiting:
            self.clock.advance(s=timeout_s)
            return None
        return self.waiting.popleft()

    def drain(self) -> list[Received]:
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    async def receive(self) -> list[Received]:
        if not self.waiting:
            self.clock.advance(ms=10)
            raise TimeoutError
        return self.drain()

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        self.sent.append((endpoint, message))
        return self.reachable


class Process:
    """One process's ports around a socket, with `faults` armed."""

    def __init__(self, *faults: Fault) -> None:
        self.clock = FakeClock()
        self.socket = Socket(self.clock)
        self.injector = Injector(
            ME,
            role="decode",
            now_ns=self.clock.monotonic_ns,
            sleep=lambda seconds: self.clock.advance(s=seconds),
            reply=self.socket.send,
        )
        self.outbox = FaultyOutbox(self.socket, self.injector)
        self.injector.watch(self.outbox)
        self.inbox = FaultyInbox(self.socket, self.injector, stamp_ns=self.clock.monotonic_ns)
        self.injector.arm(faults)

    def read(self, timeout_s: float = 0.0) -> list[AnyMessage]:
        """What a turn of a scheduler's loop takes in."""
        first = self.inbox.get(timeout_s)
        rest = self.inbox.drain() if first is not None else []
        return [received.message for received in ([first] if first else []) + rest]


def test_without_a_fault_everything_passes_both_ways() -> None:
    process = Process()
    process.socket.arrive(done(1), other(2), done(3))
    assert process.read() == [done(1), other(2), done(3)]
    assert process.outbox.send("peer", done(1)) is True
    assert process.socket.sent == [("peer", done(1))]
    process.socket.reachable = False
    assert process.outbox.send("peer", done(2)) is False
    assert not process.injector.injected


def test_a_received_message_is_lost() -> None:
    process = Process(Drop(message="CopyDone", nth=2))
    process.socket.arrive(done(1), other(1), done(2), done(3))
    assert process.read() == [done(1), other(1), done(3)]
    assert process.injector.injected == {"drop.CopyDone": 1}


def test_a_late_message_is_waited_for_no_longer_than_needed_and_arrives_late() -> None:
    process = Process(Delay(message="CopyDone", ms=30))
    process.socket.arrive(done(1), other(1))
    assert process.read() == [other(1)]
    came = process.inbox.get(30.0)
    assert came is not None
    assert came.message == done(1)
    assert (
        came.arrived_ns == process.clock.monotonic_ns() == FakeClock().monotonic_ns() + 30_000_000
    )


def test_a_reordered_message_comes_behind_the_next_one() -> None:
    process = Process(Reorder(message="CopyDone"))
    process.socket.arrive(done(1), other(2), done(3))
    assert process.read() == [other(2), done(1), done(3)]


def test_a_sent_message_that_is_lost_or_late_counts_as_sent() -> None:
    process = Process(
        Drop(message="CopyDone", direction=SENT), Delay(message="CopyDone", direction=SENT, ms=30)
    )
    process.socket.reachable = False
    assert process.outbox.send("peer", done(1)) is True
    assert process.outbox.send("peer", done(2)) is False
    assert process.socket.sent == [("peer", done(2))]


def test_a_late_message_is_sent_by_the_loops_turn() -> None:
    process = Process(Delay(message="CopyDone", direction=SENT, ms=30))
    process.outbox.send("peer", done(1))
    assert process.injector.bound_s(1.0) == pytest.approx(0.03)
    process.clock.advance(ms=29)
    process.injector.turn()
    assert process.socket.sent == []
    process.clock.advance(ms=1)
    process.injector.turn()
    assert process.socket.sent == [("peer", done(1))]


def test_sent_messages_pass_each_other_only_on_the_way_to_one_receiver() -> None:
    process = Process(Reorder(message="CopyDone", direction=SENT))
    process.outbox.send("a", done(1))
    process.outbox.send("b", other(2))
    process.outbox.send("a", other(3))
    assert process.socket.sent == [("b", other(2)), ("a", other(3)), ("a", done(1))]


def test_a_repeated_message_is_sent_twice() -> None:
    process = Process(Repeat(message="CopyDone", direction=SENT))
    process.outbox.send("a", done(1))
    assert process.socket.sent == [("a", done(1))] * 2
    assert process.injector.injected == {"repeat.CopyDone": 1}


def test_a_test_arms_faults_by_message_and_gets_a_report() -> None:
    process = Process(Drop(message="Abort"))
    order = InjectFaults(
        faults=(Drop(message="CopyDone"), Pause(at="prefill", ms=1)), reply_to=ASKER
    )
    process.socket.arrive(order, done(1), done(2))
    assert process.read() == [done(2)]
    assert process.socket.sent == [("asker", FaultReport(peer=ME, armed=2, injected={}))]
    process.socket.arrive(InjectFaults(reply_to=ASKER))
    process.read()
    assert process.socket.sent[1:] == [
        ("asker", FaultReport(peer=ME, armed=1, injected={"drop.CopyDone": 1}))
    ]


def test_clearing_disarms_and_lets_go_of_what_is_held() -> None:
    process = Process(
        Delay(message="CopyDone", ms=60_000),
        Delay(message="CopyDone", ms=60_000, direction=SENT),
        Drop(message="CancelCopies"),
    )
    process.outbox.send("peer", done(7))
    process.socket.arrive(done(1), InjectFaults(clear=True, reply_to=ASKER), other(2))
    taken = [message for _ in range(4) for message in process.read()]
    process.injector.turn()
    assert taken == [done(1), other(2)]
    assert ("peer", done(7)) in process.socket.sent
    assert process.injector.next_due_ns is None


def test_a_coroutine_gets_what_is_late_and_stands_still_when_told() -> None:
    process = Process(Delay(message="CopyDone", ms=30), Pause(ms=500))
    inbox = AsyncFaultyInbox(process.socket, process.injector)
    process.socket.arrive(done(1), other(2))
    begin_ns = process.clock.monotonic_ns()

    async def read() -> list[list[Received]]:
        return [await inbox.receive(), await inbox.receive()]

    first, second = asyncio.run(read())
    assert [received.message for received in first] == [other(2)]
    assert [received.message for received in second] == [done(1)]
    assert process.clock.monotonic_ns() - begin_ns == 530_000_000
    assert process.injector.injected == {"pause": 1, "delay.CopyDone": 1}
