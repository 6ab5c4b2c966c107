"""The true offset lies within the bound: constant, drifting, clocks that are set, uneven ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdtrace.offsets import DRIFT_BOUND_PPM, MAX_SAMPLES, MAX_STRETCHES, ClockOffsets, Offset
from pdtrace.ring.records import ClockRecord

GATEWAY = "host-a/boot-1"
MS = 1_000_000
S = 1_000_000_000
START = 1_000 * S


@dataclass(frozen=True)
class Host:
    """A host's clock as a function of the gateway's, which stands for true time.

    step_at  true time at which the clock is set forward by `step` or, below 0, begins to stand
             still for so long
    """

    offset: int = 0
    drift_ppm: float = 0.0
    step: int = 0
    step_at: int = 1 << 62

    def reads(self, true_ns: int) -> int:
        own = true_ns + self.offset + round(self.drift_ppm / 1e6 * (true_ns - START))
        if true_ns < self.step_at:
            return own
        return own + max(self.step, self.step_at - true_ns)

    def is_set_during(self, begin_ns: int, end_ns: int) -> bool:
        still_until_ns = self.step_at - min(self.step, 0)
        return begin_ns <= still_until_ns and self.step_at <= end_ns


@dataclass(frozen=True)
class Trip:
    """A round trip: begun at true time `at`; the way there, the gateway's work, the way back."""

    at: int
    there: int
    work: int
    back: int


def sample(host: Host, trip: Trip) -> ClockRecord:
    sent = host.reads(trip.at)
    received = trip.at + trip.there
    answered = received + trip.work
    arrived = host.reads(answered + trip.back)
    round_trip = (arrived - sent) - trip.work
    return ClockRecord(
        t_ns=(sent + arrived) // 2,
        peer="gateway",
        peer_clock_id=GATEWAY,
        offset_ns=(received + answered - sent - arrived) // 2,
        error_ns=-(-round_trip // 2) + 1,
    )


def measured(host: Host, trips: Sequence[Trip]) -> ClockOffsets:
    offsets = ClockOffsets()
    for trip in trips:
        offsets.add(sample(host, trip))
    return offsets


def found(offsets: ClockOffsets, own_ns: int) -> Offset:
    offset = offsets.at(GATEWAY, own_ns)
    assert offset is not None
    return offset


def assert_within(host: Host, offsets: ClockOffsets, true_ns: int) -> Offset:
    own_ns = host.reads(true_ns)
    there = found(offsets, own_ns)
    assert abs(own_ns + there.offset_ns - true_ns) <= there.error_ns
    back = offsets.back(GATEWAY, true_ns)
    assert back is not None
    return there


WAYS = st.integers(20_000, 40 * MS)
TRIPS: st.SearchStrategy[list[tuple[int, int, int]]] = st.lists(
    st.tuples(WAYS, st.integers(0, 5 * MS), WAYS), min_size=1, max_size=60
)


def spaced(ways: Sequence[tuple[int, int, int]], gap: int = S // 2) -> list[Trip]:
    return [Trip(START + i * gap, *way) for i, way in enumerate(ways)]


@given(
    offset=st.integers(-5 * S, 5 * S),
    drift_ppm=st.floats(-0.45 * DRIFT_BOUND_PPM, 0.45 * DRIFT_BOUND_PPM),
    ways=TRIPS,
    look=st.integers(-20 * S, 60 * S),
)
def test_truth_is_within_the_bound_whatever_the_ways_take(
    offset: int, drift_ppm: float, ways: list[tuple[int, int, int]], look: int
) -> None:
    host = Host(offset=offset, drift_ppm=drift_ppm)
    offsets = measured(host, spaced(ways))
    assert_within(host, offsets, START + look)
    back = offsets.back(GATEWAY, START + look)
    assert back is not None
    own_ns = host.reads(START + look)
    assert abs(START + look + back.offset_ns - own_ns) <= back.error_ns


@given(
    step=st.integers(100 * MS, 20 * S) | st.integers(-10 * S, -100 * MS),
    drift_ppm=st.floats(-100, 100),
    ways=st.lists(
        st.tuples(st.integers(20_000, 9 * MS), st.integers(0, 2 * MS), st.integers(20_000, 9 * MS)),
        min_size=16,
        max_size=40,
    ),
    step_at=st.integers(S, 5 * S),
    look=st.integers(-S, 25 * S),
)
@settings(max_examples=300)
def test_truth_is_within_the_bound_around_a_setting_of_the_clock(
    step: int, drift_ppm: float, ways: list[tuple[int, int, int]], step_at: int, look: int
) -> None:
    host = Host(offset=3 * S, drift_ppm=drift_ppm, step=step, step_at=START + step_at)
    trips = [
        trip
        for trip in spaced(ways)
        if not host.is_set_during(trip.at, trip.at + trip.there + trip.work + trip.back)
    ]
    # Until a round trip has told of the setting nobody knows of it.
    assume(trips[-1].at > host.step_at or look < step_at)
    offsets = measured(host, trips)
    assert_within(host, offsets, START + look)


@given(
    ways=st.lists(st.tuples(WAYS, st.just(0), WAYS), min_size=10, max_size=40),
    slow=st.sets(st.integers(0, 39)),
    look=st.integers(0, 20 * S),
)
def test_slow_round_trips_after_a_setting_do_not_hide_it(
    ways: list[tuple[int, int, int]], slow: set[int], look: int
) -> None:
    """A round trip of a second fits both sides: it must not vouch for either."""
    slow -= {0}  # what was never told tightly cannot be contradicted
    ways = [(S, 0, S) if i in slow else way for i, way in enumerate(ways)]
    tight = [i for i in range(len(ways)) if i not in slow]
    host = Host(step=300 * MS, step_at=START + 4 * 3 * S)
    trips = [
        trip
        for trip in spaced(ways, gap=3 * S)
        if not trip.at < host.step_at <= trip.at + trip.there + trip.back
    ]
    offsets = measured(host, trips)
    last = START + max(tight, default=0) * 3 * S
    if START + look <= last:
        assert_within(host, offsets, START + look)


def test_a_single_round_trip_says_its_midpoint_and_half_its_length() -> None:
    host = Host(offset=5 * S)
    offsets = measured(host, [Trip(START, 1 * MS, 7 * MS, 3 * MS)])
    there = found(offsets, host.reads(START))
    assert there.offset_ns == pytest.approx(-5 * S + -1 * MS, abs=10_000)
    assert there.error_ns == pytest.approx(2 * MS, abs=10_000)


def test_the_bound_grows_with_the_distance_by_the_stated_drift() -> None:
    host = Host()
    offsets = measured(host, [Trip(START, MS, 0, MS)])
    errors = [found(offsets, START + away * S).error_ns for away in (0, 10, 100, -100)]
    assert errors[1] - errors[0] == pytest.approx(10 * S * DRIFT_BOUND_PPM / 1e6, rel=0.01)
    assert errors[2] == pytest.approx(errors[3], rel=0.01)


def test_one_tight_round_trip_among_slow_ones_sets_the_bound() -> None:
    slow, tight = (30 * MS, 0, 5 * MS), (100_000, 0, 100_000)
    host = Host(offset=-5 * S)
    ways = [slow] * 6 + [tight] + [slow] * 6
    offsets = measured(host, spaced(ways))
    assert found(offsets, host.reads(START + 4 * S)).error_ns < MS


def test_drift_is_estimated_and_taken_out() -> None:
    host = Host(offset=5 * S, drift_ppm=100)
    offsets = measured(host, spaced([(100_000, 50_000, 300_000)] * 120))
    assert offsets.drift_ppm(GATEWAY) == pytest.approx(-100, abs=20)
    there = assert_within(host, offsets, START + 120 * S)
    assert abs(host.reads(START + 120 * S) + there.offset_ns - START - 120 * S) < 2 * MS


def test_a_setting_is_covered_between_the_round_trips_around_it_and_nowhere_else() -> None:
    ways = [(100_000, 0, 100_000)] * 20
    host = Host(step=300 * MS, step_at=START + 5 * S - 100 * MS)
    offsets = measured(host, spaced(ways))
    before = assert_within(host, offsets, START + 4 * S)
    after = assert_within(host, offsets, START + 6 * S)
    assert before.error_ns < MS and after.error_ns < MS
    assert before.offset_ns - after.offset_ns == pytest.approx(300 * MS, abs=MS)
    for true_ns in (START + 4_600 * MS, host.step_at - 1, host.step_at, START + 4_950 * MS):
        assert_within(host, offsets, true_ns)


@pytest.mark.parametrize("step", [300 * MS, 5 * S])
def test_times_keep_their_order_where_a_clock_was_set_forward(step: int) -> None:
    ways = [(100_000, 0, 100_000)] * 20
    host = Host(step=step, step_at=START + 5 * S - 100 * MS)
    offsets = measured(host, spaced(ways))
    reads = [host.reads(START + ms * MS) for ms in range(4_000, 6_000, 5)]
    aligned = [own + found(offsets, own).offset_ns for own in reads]
    late = [a - b for a, b in pairwise(aligned) if a - b > MS]
    assert not late


def test_history_is_bounded_and_keeps_the_tightest() -> None:
    host = Host(offset=S)
    offsets = ClockOffsets()
    for i in range(20 * MAX_SAMPLES):
        way = 100_000 if i % 64 == 0 else 20 * MS
        offsets.add(sample(host, Trip(START + i * S, way, 0, way)))
    for history in (offsets._to_peer[GATEWAY], offsets._from_peer[GATEWAY]):  # pyright: ignore[reportPrivateUsage]  memory is the point
        assert sum(len(s.samples) for s in history._stretches) <= MAX_SAMPLES  # pyright: ignore[reportPrivateUsage]
    assert found(offsets, host.reads(START + 19 * MAX_SAMPLES * S)).error_ns < 20 * MS
    assert_within(host, offsets, START + 1000 * S)


def test_what_lies_before_the_settings_that_are_remembered_is_unknown() -> None:
    offsets = ClockOffsets()
    for i in range(2 * MAX_STRETCHES):
        host = Host(offset=i * S)
        offsets.add(sample(host, Trip(START + i * 10 * S, 100_000, 0, 100_000)))
    assert offsets.at(GATEWAY, START) is None
    assert offsets.at(GATEWAY, START + 20 * MAX_STRETCHES * S) is not None


def test_hosts_are_told_apart_and_unknown_ones_have_no_offset() -> None:
    offsets = ClockOffsets()
    assert not offsets and offsets.at(GATEWAY, 0) is None and offsets.back(GATEWAY, 0) is None
    for peer, offset in ((GATEWAY, 5 * S), ("host-c/boot-9", -7 * S)):
        offsets.add(
            ClockRecord(t_ns=START, peer="p", peer_clock_id=peer, offset_ns=offset, error_ns=MS)
        )
    assert offsets.peers == (GATEWAY, "host-c/boot-9")
    assert found(offsets, START).offset_ns == 5 * S
    assert offsets.drift_ppm(GATEWAY) is None


def test_a_sample_with_a_negative_error_is_refused() -> None:
    offsets = ClockOffsets()
    offsets.add(ClockRecord(t_ns=1, peer="p", peer_clock_id=GATEWAY, offset_ns=1, error_ns=-1))
    assert offsets.at(GATEWAY, 1) is None


def test_uptimes_of_years_keep_their_nanoseconds() -> None:
    offset = 3 * 365 * 86_400 * S + 7
    offsets = ClockOffsets()
    offsets.add(
        ClockRecord(t_ns=START, peer="p", peer_clock_id=GATEWAY, offset_ns=offset, error_ns=10)
    )
    assert found(offsets, START) == Offset(offset, 12)
