"""What `check` says of the clocks of a recording's hosts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from pdtrace.analysis.host_clocks import clock_breach, summarize_clocks
from pdtrace.analysis.skew import ClockBasis
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.check import check_recording
from tests.support.pd_traces import Story
from tests.unit.pdtrace.test_skew import FOREIGN, recording_of, shifted

MS = 1_000_000
S = 1_000_000_000


def over_time(ahead_ns: Callable[[int], int], error_ns: int = 200_000) -> list[Timeline]:
    """A request every two seconds; decode's clock is ahead by a function of the second."""
    return [
        build_timeline(
            shifted(
                Story(request_id=f"req-{second}", start_s=second).trace(),
                ahead_ns(second),
                error_ns=error_ns,
            )
        )
        for second in range(0, 60, 2)
    ]


def test_a_steady_clock_has_one_offset_and_no_drift() -> None:
    (clock,) = summarize_clocks(over_time(lambda _: 5 * S))
    assert (clock.host, clock.instances, clock.requests) == ("host-b", ("decode-0",), 30)
    assert (clock.basis, clock.offsets_ns) == (ClockBasis.MEASURED, (-5 * S, -5 * S))
    assert (clock.error_ns, clock.settings, clock.moved) == (200_000, 0, 0)
    assert clock.drift_ppm == pytest.approx(0, abs=0.01)
    assert "host-b (decode-0): offset -5.000000 s, known to ± 200 µs, drift +0" in clock.sentence


@pytest.mark.parametrize("ppm", [100, -100])
def test_a_drifting_clock_is_told_with_its_rate(ppm: int) -> None:
    (clock,) = summarize_clocks(over_time(lambda second: second * ppm * 1000))
    assert clock.drift_ppm == pytest.approx(ppm, abs=0.1)
    assert clock.drift_doubt is not None and clock.drift_doubt < 20
    assert clock.settings == 0
    assert f"drift {ppm:+d}" in clock.sentence


def test_a_clock_that_was_set_is_told_with_both_offsets() -> None:
    (clock,) = summarize_clocks(over_time(lambda second: 300 * MS if second > 30 else 0))
    assert clock.settings == 1
    assert clock.offsets_ns == (-300 * MS, 0)
    assert clock.drift_ppm == pytest.approx(0, abs=0.01)
    assert "set 1 time" in clock.sentence


def test_requests_that_end_in_another_order_than_they_left_the_worker_see_one_setting() -> None:
    timelines: list[Timeline] = []
    for i in range(20):
        story = Story(request_id=f"req-{i}", start_s=i / 10)
        trace = shifted(story.trace(), 300 * MS if i >= 10 else 0, error_ns=200_000)
        made = build_timeline(trace)
        if i % 2:  # it streams on at the gateway for long
            made = dataclasses.replace(made, total_ns=made.total_ns + 1 * S)
        timelines.append(made)
    (clock,) = summarize_clocks(timelines)
    assert clock.settings == 1


def test_too_little_to_tell_a_drift_is_not_told_as_one() -> None:
    (clock,) = summarize_clocks(over_time(lambda _: 0, error_ns=50 * MS))
    assert clock.drift_ppm is None
    assert "drift" not in clock.sentence


def test_check_prints_hosts_and_keeps_the_rule() -> None:
    traces = [
        shifted(Story(request_id=f"req-{i}", start_s=i).trace(), -5 * S, error_ns=150_000)
        for i in range(3)
    ]
    report = check_recording(recording_of(*traces))
    assert report.ok
    assert any("Clock of host-b (decode-0): offset +5.000000 s" in fact for fact in report.facts)
    document = json.loads(json.dumps(report.document()))
    (clock,) = document["clocks"]
    assert (clock["host"], clock["offsets_ns"], clock["error_ns"]) == (
        "host-b",
        [5 * S, 5 * S],
        150_000,
    )
    assert (clock["basis"], clock["instances"]) == ("measured", ["decode-0"])


def test_on_one_host_there_is_nothing_to_print() -> None:
    report = check_recording(recording_of(Story().trace()))
    assert report.clocks == () and report.document()["clocks"] == []
    assert not any("Clock" in fact for fact in report.facts)


def test_a_clock_that_nobody_measured_is_said_to_be_unknown() -> None:
    (clock,) = summarize_clocks([build_timeline(shifted(FOREIGN.trace(), 0))])
    assert (clock.basis, clock.offsets_ns, clock.error_ns) == (ClockBasis.WALL, None, None)
    assert "its error is not known" in clock.sentence


def test_a_request_breaks_the_rule_by_what_no_error_explains() -> None:
    sound = build_timeline(shifted(Story().trace(), 5 * S, error_ns=400_000))
    wrong = build_timeline(shifted(Story().trace(), 5 * S, error_ns=400_000, wrong_ns=-20 * MS))
    assert clock_breach(sound) is None
    breach = clock_breach(wrong)
    assert breach is not None and "± 400 µs" in breach
