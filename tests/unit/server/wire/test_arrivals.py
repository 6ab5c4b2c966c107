"""A loop that waits for messages goes round in time, whatever interrupts its wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import pytest

from pdtrace.stopping import StopFlag, stop_on_signals
from server.wire import arrivals as module
from server.wire.arrivals import Arrivals

NEVER_S = 60.0
"""Longer than any test takes: who waits for so long was not woken."""
LATE = "the wait went on without an end"


@pytest.fixture
def arrivals() -> Generator[Arrivals[str]]:
    """Ended by an item of its own if a wait in it never ends."""
    arrivals = Arrivals[str]()
    rescue = threading.Timer(NEVER_S / 2, arrivals.put, [LATE])
    rescue.start()
    yield arrivals
    rescue.cancel()
    rescue.join()


@contextmanager
def handler(number: signal.Signals, act: Callable[[], None]) -> Generator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        act()

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def interrupt_soon(number: signal.Signals) -> threading.Timer:
    """A signal to the main thread while it waits."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, signal.pthread_kill, [main, number])
    timer.start()
    return timer


def test_items_come_in_order_and_are_counted(arrivals: Arrivals[str]) -> None:
    for item in "abc":
        arrivals.put(item)
    assert len(arrivals) == 3
    assert arrivals.get(0) == "a"
    assert arrivals.drain() == ["b", "c"]
    assert arrivals.drain() == []
    assert arrivals.get(0) is None


def test_an_item_ends_a_wait(arrivals: Arrivals[str]) -> None:
    timer = threading.Timer(0.05, arrivals.put, ["x"])
    timer.start()
    assert arrivals.get(NEVER_S) == "x"
    timer.join()


def test_a_wait_whose_time_passes_in_a_signal_handler_ends(arrivals: Arrivals[str]) -> None:
    """So it is when a process was stopped or starved between the signal and its handler."""
    with handler(signal.SIGUSR1, lambda: time.sleep(0.4)):
        timer = interrupt_soon(signal.SIGUSR1)
        assert arrivals.get(0.2) is None
        timer.join()


def test_a_wait_that_finds_old_news_when_its_time_is_over_ends(
    arrivals: Arrivals[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`put` and a `get` that did not wait leave news of nothing; on a busy machine its time may be
    over before a wait that begins then has looked for more."""
    times = iter([0.0, 0.0, 1.0, 1.0])

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return next(times)

    arrivals.put("taken")
    assert arrivals.get(0) == "taken"
    monkeypatch.setattr(module, "time", Clock)
    assert arrivals.get(0.5) is None
    assert list(times) == [1.0]  # it looked again, once


def test_a_wait_lasts_its_time_through_signals_that_are_of_no_concern(
    arrivals: Arrivals[str],
) -> None:
    with handler(signal.SIGUSR1, lambda: None):
        begin = time.monotonic()
        timer = interrupt_soon(signal.SIGUSR1)
        assert arrivals.get(0.3) is None
        assert time.monotonic() - begin >= 0.3
        timer.join()


def test_wake_ends_one_wait_and_no_more(arrivals: Arrivals[str]) -> None:
    timer = threading.Timer(0.05, arrivals.wake)
    timer.start()
    begin = time.monotonic()
    assert arrivals.get(NEVER_S) is None
    assert time.monotonic() - begin < NEVER_S / 2
    timer.join()
    begin = time.monotonic()
    assert arrivals.get(0.05) is None
    assert time.monotonic() - begin >= 0.05


def test_wake_loses_nothing(arrivals: Arrivals[str]) -> None:
    arrivals.wake()
    arrivals.put("x")
    assert arrivals.get(NEVER_S) == "x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_look_at_the_flag_and_the_wait_ends_the_loop_at_once(
    arrivals: Arrivals[str], number: signal.Signals
) -> None:
    class ToldBehindTheLook(StopFlag):
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            told = super().is_set()
            if self.looks == 3:
                signal.raise_signal(number)
            return told

    stop = ToldBehindTheLook()
    arrivals.put("a")
    arrivals.put("b")
    taken: list[str | None] = []
    with stop_on_signals(stop, arrivals.wake):
        while not stop.is_set():
            taken.append(arrivals.get(NEVER_S))
    assert taken == ["a", "b", None]


def test_nothing_is_lost_between_threads(arrivals: Arrivals[str]) -> None:
    """The reader waits for each item with timeouts of all sizes."""

    def send(name: str) -> None:
        for number in range(2_000):
            arrivals.put(f"{name}{number}")

    senders = [threading.Thread(target=send, args=[name]) for name in "ab"]
    for sender in senders:
        sender.start()
    received: list[str] = []
    while len(received) < 4_000:
        item = arrivals.get((len(received) % 3) * 1e-5)
        if item is not None:
            assert item != LATE
            received.append(item)
    for name in "ab":
        assert [item for item in received if item[0] == name] == [
            f"{name}{i}" for i in range(2_000)
        ]
    for sender in senders:
        sender.join()
