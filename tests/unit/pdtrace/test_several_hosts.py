"""Rings of two hosts become one timeline: from marks and round trips to the partition.

The truth is known: the marks are recorded at chosen instants of the gateway's clock, as another
host's clock shows them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.analysis.attributes import integer
from pdtrace.analysis.skew import ClockBasis
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.check import check_recording
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder, RequestTrace
from pdtrace.ring.records import Value
from pdtrace.spans import Span, Trace
from pdtrace.stages import Mark, Role
from pdtrace.testing import FakeClock, MemoryRings, RecordedRequest, SequentialIds, record_request
from tests.unit.pdtrace.test_offsets import Host as HostModel
from tests.unit.pdtrace.test_offsets import Trip, sample
from tests.unit.pdtrace.test_skew import assert_adds_up, recording_of

MS = 1_000_000
S = 1_000_000_000
BEGIN = 1_000 * S
"""Where the clocks of `test_offsets` begin to part."""


PD = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)


class OtherClock:
    """The clock of a host, at an instant of the gateway's."""

    def __init__(self, host: HostModel, true: FakeClock) -> None:
        self._host = host
        self._true = true

    def monotonic_ns(self) -> int:
        return self._host.reads(self._true.monotonic_ns())

    def wall_ns(self) -> int:
        ahead_ns = self.monotonic_ns() - self._true.monotonic_ns()
        return self._true.wall_ns() + ahead_ns


class ShownTrace:
    """A `RequestTrace` whose instants are the gateway's; it records what its host's clock shows."""

    def __init__(self, trace: RequestTrace, host: HostModel) -> None:
        self._trace = trace
        self._host = host

    def mark(self, mark: Mark, *values: Value, at_ns: int) -> None:
        self._trace.mark(mark, *values, at_ns=self._host.reads(at_ns))

    def end(self, *, at_ns: int) -> None:
        self._trace.end(at_ns=self._host.reads(at_ns))


class ShownRecorder:
    """A `Recorder` in the same way."""

    def __init__(self, recorder: Recorder, host: HostModel) -> None:
        self.instance = recorder.instance
        self._recorder = recorder
        self._host = host

    def begin(self, context: RequestContext, *, at_ns: int) -> ShownTrace:
        at_own_ns = self._host.reads(at_ns)
        return ShownTrace(self._recorder.begin(context, at_ns=at_own_ns), self._host)


@dataclass(frozen=True)
class Traced:
    """A request: as it was, as its spans are, and as its timeline shows it."""

    true: RecordedRequest
    spans: list[Span]
    timeline: Timeline

    def named(self, name: str) -> Span:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def trace_requests(
    host: HostModel,
    role: Role,
    starts_ns: list[int],
    *,
    stage_ms: Mapping[str, float] | None = None,
    beat_ns: int = S // 2,
    beats: int = 40,
    seed: int = 1,
    ways_ms: tuple[float, float] = (0.05, 0.4),
) -> list[Traced]:
    """Requests that begin at `starts_ns` after BEGIN, with `role` on `host`, whose process beats
    all the while; a beat into which the setting of its clock falls is left out."""
    rng = random.Random(seed)
    true = FakeClock(monotonic_ns=BEGIN)
    here = MemoryRings(clock=true)
    with mock.patch.dict(os.environ, PDTRACE_HOST_ID="host-b"):
        there_rings = MemoryRings(clock=OtherClock(host, true))
        recorder = there_rings.recorder(role)
    home = here.recorder(Role.GATEWAY).clock_id
    assert recorder.clock_id != home
    for beat in range(beats):
        there, work, back = (round(rng.uniform(*ways_ms) * MS) for _ in range(3))
        trip = Trip(BEGIN + beat * beat_ns, there, work, back)
        if host.is_set_during(trip.at, trip.at + there + work + back):
            continue
        found = sample(host, trip)
        recorder.clock_sample(
            peer="gateway-0",
            peer_clock_id=home,
            offset_ns=found.offset_ns,
            error_ns=found.error_ns,
            at_ns=found.t_ns,
        )
    ids = SequentialIds()
    shown = cast("Recorder", ShownRecorder(recorder, host))
    recorded = [
        record_request(
            {**{each: here.recorder(each) for each in PD}, role: shown},
            request_id=ids.request_id(),
            start_ns=BEGIN + start_ns,
            stage_ms=stage_ms,
        )
        for start_ns in starts_ns
    ]
    tracker = RequestTracker()
    for each in PD:
        rings = there_rings if each is role else here
        tracker.add_ring(each.value, process_of(rings.reader(each).identity, {}))
        tracker.feed(each.value, rings.records(each), 0)
    found_requests = {request.request_id: request for request in tracker.finished(0)}
    result: list[Traced] = []
    for one in recorded:
        spans = assemble(found_requests[one.context.request_id])
        trace = Trace(trace_id=one.context.trace_id, spans=tuple(spans))
        result.append(Traced(one, spans, build_timeline(trace)))
    return result


def assert_right(traced: Traced) -> None:
    """Sums, order, and every stage's ends to within its own error."""
    timeline = traced.timeline
    assert timeline.violations == ()
    assert_adds_up(timeline)
    assert timeline.total_ns == traced.true.end_ns - traced.true.begin_ns
    for visit in timeline.visits:
        if visit.name not in traced.true.stages:
            continue
        begin_ns, end_ns = traced.true.stages[visit.name]
        if visit.name == "decode.generate":  # it begins as the first token leaves
            begin_ns, _ = traced.true.stages["hop.token"]
        assert visit.error_ns is not None
        assert abs(visit.begin_ns - (begin_ns - traced.true.begin_ns)) <= visit.error_ns
        # A hop that came out negative was given its begin as its end.
        assert abs(visit.end_ns - (end_ns - traced.true.begin_ns)) <= 2 * visit.error_ns


ROLES = [Role.DECODE, Role.PREFILL, Role.TRANSFER]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("offset_s", [5, -5])
def test_five_seconds_apart(role: Role, offset_s: int) -> None:
    host = HostModel(offset=offset_s * S)
    for traced in trace_requests(host, role, [0, 3 * S, 7 * S]):
        assert_right(traced)
        (clock,) = traced.timeline.clocks
        assert (clock.basis, clock.host) == (ClockBasis.MEASURED, "host-b")
        assert clock.offset_ns == pytest.approx(-offset_s * S, abs=MS)
        assert clock.error_ns is not None and clock.error_ns < MS


def test_the_recorded_times_are_those_of_the_other_host_s_own_clock() -> None:
    (traced,) = trace_requests(HostModel(offset=5 * S), Role.DECODE, [2 * S])
    root, reserve = traced.spans[0], traced.named("decode.reserve")
    begin_ns, _ = traced.true.stages["decode.reserve"]
    true_ns = begin_ns - traced.true.begin_ns
    assert reserve.start_ns - root.start_ns == pytest.approx(true_ns + 5 * S, abs=MS)
    aligned = integer(reserve.attributes, a.BEGIN_NS)
    assert aligned == pytest.approx(begin_ns, abs=MS)
    assert integer(reserve.attributes, a.CLOCK_OFFSET_NS) == pytest.approx(-5 * S, abs=MS)
    assert integer(reserve.attributes, a.CLOCK_ERROR_NS) is not None
    assert a.CLOCK_OFFSET_NS.key not in root.attributes


@pytest.mark.parametrize("role", ROLES)
def test_a_slow_drift_over_an_hour(role: Role) -> None:
    host = HostModel(offset=S, drift_ppm=100)
    starts = [minute * 60 * S for minute in range(60)]
    traced = trace_requests(host, role, starts, beat_ns=5 * S, beats=720)
    for one in traced:
        assert_right(one)
    offsets = [one.timeline.clocks[0].offset_ns for one in traced]
    assert offsets[0] is not None and offsets[-1] is not None
    assert offsets[0] - offsets[-1] == pytest.approx(59 * 60 * 100_000, rel=0.05)
    report = check_recording(
        recording_of(*(Trace(trace_id=o.timeline.trace_id, spans=tuple(o.spans)) for o in traced))
    )
    assert report.ok
    (clock,) = report.clocks
    assert clock.drift_ppm is None or clock.drift_ppm == pytest.approx(100, abs=5)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("step_ms", [300, -300, 5_000, -5_000])
@pytest.mark.parametrize("at_ms", [100, 135, 300, 480])
def test_a_clock_that_is_set_during_a_request(role: Role, step_ms: int, at_ms: int) -> None:
    """The request takes 540 ms; its prefill ends at 127 ms, its generation begins at 134 ms."""
    begin_ns = 3 * S + 200 * MS
    host = HostModel(offset=S, step=step_ms * MS, step_at=BEGIN + begin_ns + at_ms * MS)
    for traced in trace_requests(host, role, [0, begin_ns, 8 * S]):
        assert_right(traced)


@given(
    role=st.sampled_from(ROLES),
    host=st.builds(
        HostModel,
        offset=st.integers(-5 * S, 5 * S),
        drift_ppm=st.floats(-90, 90),
        step=st.one_of(st.just(0), st.integers(-S, -50 * MS), st.integers(50 * MS, S)),
        step_at=st.integers(BEGIN + S, BEGIN + 10 * S),  # what it was before has been told
    ),
    start=st.integers(0, 10 * S),
    hop_ms=st.floats(0.001, 5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_clock_leaves_requests_whole(
    role: Role, host: HostModel, start: int, hop_ms: float, seed: int
) -> None:
    stage_ms = {"hop.dispatch": hop_ms, "hop.publish": hop_ms / 2, "hop.token": hop_ms}
    for traced in trace_requests(
        host, role, [start, start + 700 * MS], seed=seed, stage_ms=stage_ms, ways_ms=(0.02, 10)
    ):
        assert_right(traced)


def test_without_round_trips_the_anchors_stand_in_and_nobody_knows_the_error() -> None:
    (traced,) = trace_requests(HostModel(offset=0), Role.DECODE, [2 * S], beats=0)
    reserve = traced.named("decode.reserve")
    assert a.CLOCK_ERROR_NS.key not in reserve.attributes
    assert a.CLOCK_OFFSET_NS.key in reserve.attributes
    (clock,) = traced.timeline.clocks
    assert clock.basis is ClockBasis.WALL
    assert any("error between their clocks is not known" in s for s in traced.timeline.unknowns)
    assert_adds_up(traced.timeline)
