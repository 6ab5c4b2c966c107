"""The clock fault: what the shifted clock shows, who may have one, and how it is asked for."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.clock import SYSTEM_CLOCK, Clock, take_anchor
from pdtrace.testing import FakeClock
from server.clock_fault import (
    ClockFault,
    SettableClock,
    ShiftedClock,
    make_clock,
    parse_clock_faults,
)
from server.config import ProcessConfig, Settings
from server.errors import StartError
from server.recording import process_clock

S = 1_000_000_000


def test_both_times_are_ahead_by_the_offset_and_drift_from_the_start() -> None:
    true = FakeClock()
    began = (true.monotonic_ns(), true.wall_ns())
    clock = ShiftedClock(ClockFault(offset_s=-5, drift_ppm=100), true)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (began[0] - 5 * S, began[1] - 5 * S)
    true.advance(s=100)
    assert clock.monotonic_ns() - true.monotonic_ns() == -5 * S + 10_000_000
    assert clock.wall_ns() - true.wall_ns() == -5 * S + 10_000_000


def test_it_is_set_once() -> None:
    true = FakeClock()
    clock = ShiftedClock(ClockFault(step_s=0.3, step_after_s=4), true)
    true.advance(s=4, ns=-1)
    assert clock.monotonic_ns() == true.monotonic_ns()
    true.advance(ns=1)
    assert clock.monotonic_ns() == true.monotonic_ns() + 300_000_000
    true.advance(s=100)
    assert clock.monotonic_ns() == true.monotonic_ns() + 300_000_000


def test_it_stands_still_rather_than_runs_back() -> None:
    true = FakeClock()
    clock = ShiftedClock(ClockFault(step_s=-2, step_after_s=4), true)
    true.advance(s=4)
    still_ns = clock.monotonic_ns()
    assert still_ns == true.monotonic_ns()
    for _ in range(4):
        true.advance(s=0.5)
        assert clock.monotonic_ns() == still_ns
    true.advance(s=100)
    assert clock.monotonic_ns() == true.monotonic_ns() - 2 * S


def test_an_anchor_of_it_maps_to_its_own_wall_time() -> None:
    clock = ShiftedClock(ClockFault(offset_s=5))
    anchor = take_anchor(clock)
    assert abs(anchor.to_wall_ns(clock.monotonic_ns()) - clock.wall_ns()) < S // 10


def test_without_a_fault_the_clock_is_the_system_s_own() -> None:
    assert make_clock(None) is SYSTEM_CLOCK


def clock_of(instance: str, settings: Settings) -> Clock:
    return process_clock(
        ProcessConfig(
            settings=settings,
            role=instance.partition("-")[0],
            instance=instance,
            incarnation="1",
            endpoint="ipc:///x",
            gateway_endpoint="ipc:///g",
        )
    )


def test_only_the_named_process_is_shifted() -> None:
    settings = Settings(allow_faults=True, clock_faults={"decode-0": ClockFault(offset_s=500)})
    shifted, other = (clock_of(instance, settings) for instance in ("decode-0", "prefill-0"))
    assert 400 * S < shifted.monotonic_ns() - time.monotonic_ns() < 600 * S
    assert abs(other.monotonic_ns() - time.monotonic_ns()) < 100 * S


def test_without_allowed_faults_every_process_has_the_system_s_clock() -> None:
    assert clock_of("decode-0", Settings()) is SYSTEM_CLOCK


def test_a_clock_that_is_set_shows_both_times_ahead() -> None:
    true = FakeClock()
    clock = SettableClock(true)
    for ahead_s, shift_s in ((0, 0), (30, 30), (31.5, 1.5)):
        clock.shift(shift_s)
        assert clock.monotonic_ns() - true.monotonic_ns() == round(ahead_s * S)
        assert clock.wall_ns() - true.wall_ns() == round(ahead_s * S)
        true.advance(s=7)


@given(shifts=st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 20)), max_size=12))
def test_a_clock_that_is_set_never_runs_back(shifts: list[tuple[float, float]]) -> None:
    true = FakeClock()
    clock = SettableClock(true)
    wall_ahead_ns = true.wall_ns() - true.monotonic_ns()
    shown_ns = clock.monotonic_ns()
    ahead_ns = 0
    for shift_s, then_s in shifts:
        clock.shift(shift_s)
        ahead_ns += round(shift_s * S)
        true.advance(s=then_s)
        assert clock.monotonic_ns() >= shown_ns
        assert clock.wall_ns() - clock.monotonic_ns() == wall_ahead_ns
        shown_ns = clock.monotonic_ns()
    true.advance(s=1000)
    assert clock.monotonic_ns() == true.monotonic_ns() + ahead_ns


def test_a_clock_that_was_set_back_stands_still_for_as_long() -> None:
    true = FakeClock()
    clock = SettableClock(true)
    clock.shift(-2)
    still_ns = clock.monotonic_ns()
    assert still_ns == true.monotonic_ns()
    true.advance(s=1.5)
    assert clock.monotonic_ns() == still_ns
    true.advance(s=1)
    assert clock.monotonic_ns() == still_ns + S // 2
    assert clock.wall_ns() - true.wall_ns() == -2 * S


def test_faults_survive_the_way_to_the_process() -> None:
    settings = Settings(allow_faults=True, clock_faults={"decode-0": ClockFault(step_s=0.5)})
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clock_faults": {"decode-0": ClockFault()}}, "needs --allow-faults"),
        (
            {"allow_faults": True, "clock_faults": {"gateway-0": ClockFault()}},
            "no clock fault for gateway-0: expected one of decode-0, prefill-0, transfer-0",
        ),
        ({"allow_faults": True, "clock_faults": {"decode-1": ClockFault()}}, "decode-1"),
        (
            {"allow_faults": True, "mode": "colocated", "clock_faults": {"decode-0": ClockFault()}},
            "expected one of worker-0",
        ),
    ],
)
def test_settings_refuse_faults_that_nobody_can_have(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        Settings(**values)  # pyright: ignore[reportArgumentType]


def test_options_name_the_instance_and_what_is_off() -> None:
    options = [
        "decode-0:offset_s=5, drift_ppm=-50,step_s=0.3,step_after_s=4,host=host-b",
        "prefill-0:offset_s=-5",
    ]
    assert parse_clock_faults(options) == {
        "decode-0": ClockFault(
            offset_s=5, drift_ppm=-50, step_s=0.3, step_after_s=4, host="host-b"
        ),
        "prefill-0": ClockFault(offset_s=-5),
    }


@pytest.mark.parametrize(
    "option",
    [
        "",
        "decode-0",
        "decode-0:",
        ":offset_s=5",
        "decode-0:offset=5",
        "decode-0:offset_s",
        "decode-0:offset_s=",
        "decode-0:offset_s=five",
        "decode-0:offset_s=nan",
        "decode-0:offset_s=1e9",
        "decode-0:offset_s=1,offset_s=2",
        "decode-0:step_after_s=-1",
        "decode-0:host=",
    ],
)
def test_a_malformed_option_is_one_clear_line(option: str) -> None:
    with pytest.raises(StartError, match="clock fault") as caught:
        parse_clock_faults([option])
    assert "\n" not in str(caught.value)


def test_an_instance_is_named_once() -> None:
    with pytest.raises(StartError, match="once"):
        parse_clock_faults(["decode-0:offset_s=1", "decode-0:offset_s=2"])
