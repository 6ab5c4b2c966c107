"""Which answer counts, and what it says: late, repeated, foreign and absurd ones say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.ring.records import ClockRecord
from pdtrace.stages import Role
from pdtrace.testing import MemoryRings
from server.gateway.worker import acknowledge
from server.recording import record_round_trip
from server.round_trips import MAX_UNDER_WAY, RoundTrip, RoundTrips
from server.wire.messages import Heartbeat, HeartbeatAck, Peer, WorkerLoad

MS = 1_000_000
S = 1_000_000_000
GATEWAY = Peer(instance="gateway-0", endpoint="ipc:///g", incarnation="g")


def ack(**fields: object) -> HeartbeatAck:
    values: dict[str, object] = {
        "incarnation": "abc",
        "seq": 1,
        "sent_ns": 100 * S,
        "received_ns": 200 * S + 1 * MS,
        "answered_ns": 200 * S + 4 * MS,
        "clock_id": "host-a/boot-1",
        "gateway": GATEWAY,
        **fields,
    }
    return HeartbeatAck(**values)  # pyright: ignore[reportArgumentType]


def under_way(*beats: tuple[int, int]) -> RoundTrips:
    trips = RoundTrips("abc")
    for seq, sent_ns in beats or ((1, 100 * S),):
        trips.sending(seq, sent_ns)
    return trips


def test_a_round_trip_is_its_midpoint_and_half_of_the_time_on_the_way() -> None:
    trips = under_way()
    trip = trips.answered(ack(), 100 * S + 5 * MS)
    assert trip == RoundTrip(
        peer="gateway-0",
        peer_clock_id="host-a/boot-1",
        at_ns=100 * S + 2_500_000,
        offset_ns=100 * S,
        error_ns=1 * MS + 1,
    )
    assert not trips.ignored


@given(
    offset=st.integers(-(10**15), 10**15),
    there=st.integers(0, 10 * S),
    work=st.integers(0, S),
    back=st.integers(0, 10 * S),
)
def test_the_true_offset_is_within_the_error(offset: int, there: int, work: int, back: int) -> None:
    trips = under_way()
    received = 100 * S + there + offset
    answer = ack(received_ns=received, answered_ns=received + work)
    trip = trips.answered(answer, 100 * S + there + work + back)
    assert trip is not None
    assert abs(trip.offset_ns - offset) <= trip.error_ns


def test_an_answer_counts_once() -> None:
    trips = under_way()
    assert trips.answered(ack(), 100 * S + 5 * MS) is not None
    assert trips.answered(ack(), 100 * S + 5 * MS) is None
    assert trips.ignored == {"unknown": 1}


def test_answers_may_overtake_each_other() -> None:
    trips = under_way((1, 100 * S), (2, 101 * S))
    late = ack(seq=2, sent_ns=101 * S, received_ns=201 * S, answered_ns=201 * S)
    assert trips.answered(late, 101 * S + MS) is not None
    assert trips.answered(ack(), 101 * S + MS) is not None


@pytest.mark.parametrize(
    ("fields", "arrived_ns", "why"),
    [
        ({"seq": 2}, 100 * S + 5 * MS, "unknown"),
        ({"incarnation": "of the process before"}, 100 * S + 5 * MS, "foreign"),
        ({"sent_ns": 100 * S + 1}, 100 * S + 5 * MS, "absurd"),
        ({"answered_ns": 200 * S}, 100 * S + 5 * MS, "absurd"),  # before it was received
        ({}, 100 * S + 2 * MS, "absurd"),  # the gateway alone took longer
    ],
)
def test_an_answer_that_cannot_be_is_ignored_and_counted(
    fields: dict[str, object], arrived_ns: int, why: str
) -> None:
    trips = under_way()
    assert trips.answered(ack(**fields), arrived_ns) is None
    assert trips.ignored == {why: 1}
    assert trips.answered(ack(), 100 * S + 5 * MS) is not None, "the beat still waits for its own"


def test_beats_without_an_answer_are_given_up_at_last() -> None:
    trips = under_way(*((seq, 100 * S) for seq in range(1, MAX_UNDER_WAY + 2)))
    assert trips.answered(ack(seq=1), 100 * S + 5 * MS) is None
    assert trips.answered(ack(seq=2), 100 * S + 5 * MS) is not None


def test_the_gateway_answers_with_what_the_beat_said_and_its_own_times() -> None:
    beat = Heartbeat(
        peer=Peer(instance="decode-0", endpoint="ipc:///d", incarnation="abc"),
        role="decode",
        seq=7,
        sent_ns=5,
        load=WorkerLoad(),
        progress_age_s=0.0,
        busy=False,
    )
    answer = acknowledge(beat, 11, GATEWAY, "host-a/boot-1", 12)
    assert (answer.incarnation, answer.seq, answer.sent_ns) == ("abc", 7, 5)
    assert (answer.gateway, answer.clock_id) == (GATEWAY, "host-a/boot-1")
    assert answer.received_ns == 11 < answer.answered_ns


@pytest.mark.parametrize("foreign", [True, False])
def test_only_another_host_s_clock_is_recorded(foreign: bool) -> None:
    rings = MemoryRings()
    recorder = rings.recorder(Role.DECODE)
    peer_clock_id = "host-a/boot-1" if foreign else recorder.clock_id
    trip = RoundTrip(
        peer="gateway-0", peer_clock_id=peer_clock_id, at_ns=7, offset_ns=5, error_ns=2
    )
    record_round_trip(recorder, trip)
    record_round_trip(recorder, replace(trip, peer_clock_id=""))  # it records nothing itself
    expected = ClockRecord(
        t_ns=7, peer="gateway-0", peer_clock_id="host-a/boot-1", offset_ns=5, error_ns=2
    )
    assert rings.records(Role.DECODE) == ([expected] if foreign else [])


@pytest.mark.parametrize(("incarnation", "mine"), [("abc", True), ("ab", False), ("", False)])
def test_an_answer_to_another_life_says_nothing_of_the_gateway(
    incarnation: str, mine: bool
) -> None:
    """Whatever else is in it, and whether or not it was asked for."""
    trips = under_way()
    for seq in (1, 99):
        assert trips.is_mine(ack(incarnation=incarnation, seq=seq)) is mine
    assert trips.ignored == {}, "to be asked counts nothing"
    trip = trips.answered(ack(incarnation=incarnation), 100 * S + 10 * MS)
    assert (trip is not None) is mine
    assert trips.ignored == ({} if mine else {"foreign": 1})
