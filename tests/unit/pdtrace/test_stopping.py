"""Signals end a loop whenever they come, and however many."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import pytest

from pdtrace.stopping import StopFlag, stop_on_signals

WAIT_S = 20.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_wait_and_wakes_once(number: signal.Signals) -> None:
    stop, woken = StopFlag(), list[bool]()
    with stop_on_signals(stop, lambda: woken.append(True)):
        killer = threading.Timer(0.05, lambda: [os.kill(os.getpid(), number) for _ in range(3)])
        killer.start()
        begin = time.monotonic()
        assert stop.wait(WAIT_S)
        assert time.monotonic() - begin < WAIT_S / 2
        killer.join()
    assert woken == [True]


def test_signal_in_the_middle_of_setting_does_no_harm() -> None:
    """A handler may be interrupted by the next signal's; a lock would be taken twice."""
    calls: list[int] = []

    class Interrupted(StopFlag):
        def set(self) -> None:
            calls.append(1)
            assert len(calls) == 1, "the handler was entered again"
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1_000):  # bytecodes between which the second handler runs
                pass
            super().set()

    stop = Interrupted()
    with stop_on_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(WAIT_S)


def test_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(StopFlag()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_wait_without_a_signal_lasts_its_time() -> None:
    begin = time.monotonic()
    assert not StopFlag().wait(0.12)
    assert time.monotonic() - begin >= 0.12


def test_wait_wakes_nobody_until_its_time_or_the_flag_comes() -> None:
    """A loop that waits costs nothing meanwhile: the thread leaves the processor once."""
    stop = StopFlag()
    left: list[int] = []

    def wait() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        assert stop.wait(WAIT_S)
        left.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.6)
    stop.set()
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(left) == 2
    assert max(left) < 6
    assert stop.wait(0.0)
    assert stop.wait(WAIT_S)


def test_other_threads_set_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def inside() -> None:
        with stop_on_signals(StopFlag()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]
