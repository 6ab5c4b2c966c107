"""When a process stood still, from when a thread wakes and what the process computed."""

from __future__ import annotations

import pytest

from pdtrace.testing import FakeClock
from server.pauses import EVERY_NS, FLOOR_NS, Pauses

MS = 1_000_000
S = 1_000 * MS


class Host:
    """A clock, and the processor time that a process got."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.begin_ns = self.clock.monotonic_ns()
        self.cpu_ns = 0
        self.pauses = Pauses(self.clock, lambda: self.cpu_ns)

    def pass_by(self, ns: int, *, busy: float = 0.0) -> None:
        self.clock.advance(ns=ns)
        self.cpu_ns += round(ns * busy)

    def found(self) -> list[tuple[int, int]]:
        pauses = self.pauses.within(self.begin_ns, self.clock.monotonic_ns())
        return [(begin - self.begin_ns, end - self.begin_ns) for begin, end in pauses]


@pytest.mark.parametrize("looks", [True, False])
def test_time_in_which_nothing_ran_is_a_pause_seen_at_once_by_whoever_asks(*, looks: bool) -> None:
    host = Host()
    host.pass_by(EVERY_NS, busy=1.0)
    host.pauses.look()
    host.pass_by(2 * S)
    if looks:
        host.pauses.look()
    assert host.found() == [(2 * EVERY_NS, EVERY_NS + 2 * S)]


@pytest.mark.parametrize("busy", [1.0, 4.0])
def test_thread_that_wakes_late_because_the_process_computed_saw_no_pause(busy: float) -> None:
    host = Host()
    host.pass_by(2 * S, busy=busy)
    assert host.found() == []
    host.pauses.look()
    assert host.found() == []


def test_process_that_got_a_tenth_of_a_processor_stood_still_for_the_rest() -> None:
    host = Host()
    host.pass_by(2 * S, busy=0.1)
    ((begin, end),) = host.found()
    assert end == 2 * S
    assert end - begin == pytest.approx(1.8 * S, rel=0.01)


def test_short_delays_of_a_thread_are_no_pauses() -> None:
    host = Host()
    for _ in range(10):
        host.pass_by(EVERY_NS + FLOOR_NS - 1)
        host.pauses.look()
    assert host.found() == []


def test_only_pauses_of_the_time_asked_about_are_given() -> None:
    host = Host()
    host.pass_by(1 * S)
    host.pauses.look()
    assert host.pauses.within(host.begin_ns, host.begin_ns + EVERY_NS) == ()
    assert host.pauses.within(host.begin_ns + 1 * S, host.begin_ns + 2 * S) == ()
    assert len(host.pauses.within(host.begin_ns + 500 * MS, host.begin_ns + 501 * MS)) == 1
