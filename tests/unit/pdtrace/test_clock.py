from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from pdtrace.clock import SYSTEM_CLOCK, ClockAnchor, take_anchor
from pdtrace.testing import FakeClock

_NS = st.integers(min_value=0, max_value=2**62)


class ScriptedClock:
    """Returns scripted monotonic readings; wall time is monotonic plus a constant."""

    def __init__(self, *readings: int) -> None:
        self._readings = list(readings)
        self._last = 0

    def monotonic_ns(self) -> int:
        self._last = self._readings.pop(0)
        return self._last

    def wall_ns(self) -> int:
        return self._last + 1_000_000


def test_system_clock_is_the_clock_that_processes_of_a_host_share():
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    reading = SYSTEM_CLOCK.monotonic_ns()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert before <= reading <= after


def test_anchor_maps_the_present_to_wall_time():
    anchor = take_anchor()
    before = time.time_ns()
    mapped = anchor.to_wall_ns(time.monotonic_ns())
    after = time.time_ns()
    # 50 ms of tolerance for a time server that steps the wall clock in between.
    assert before - anchor.error_ns - 50_000_000 <= mapped <= after + anchor.error_ns + 50_000_000


def test_anchor_keeps_the_pair_read_fastest():
    slow, fast = (0, 900), (2000, 2010)
    clock = ScriptedClock(*slow, *slow, *fast, *slow, *slow)
    anchor = take_anchor(clock)
    assert anchor == ClockAnchor(monotonic_ns=2005, wall_ns=1_002_000, error_ns=5)


@given(monotonic=_NS, wall=_NS, later=_NS)
def test_anchor_conversions_are_inverse(monotonic: int, wall: int, later: int):
    anchor = ClockAnchor(monotonic_ns=monotonic, wall_ns=wall)
    assert anchor.to_wall_ns(monotonic) == wall
    assert anchor.to_monotonic_ns(anchor.to_wall_ns(later)) == later


def test_fake_clock_stands_still_and_steps_wall_time_alone():
    clock = FakeClock(monotonic_ns=10, wall_ns=1000)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (10, 1000)
    clock.advance(s=1, ms=2, ns=3)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (1_002_000_013, 1_002_001_003)
    clock.step_wall(-500)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (1_002_000_013, 1_002_000_503)
