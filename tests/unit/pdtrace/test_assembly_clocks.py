"""Legs of other hosts: aligned for reasoning, raw for looking at, with the bound beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest

from pdtrace import semconv as a
from pdtrace.analysis.timeline import build_timeline
from pdtrace.assembly.alignment import align
from pdtrace.assembly.collected import CollectedRequest, Leg
from pdtrace.assembly.request_spans import assemble
from pdtrace.clock import ClockAnchor
from pdtrace.duration import seconds_text
from pdtrace.offsets import ClockOffsets
from pdtrace.ring.records import ClockRecord, MarkRecord
from pdtrace.spans import Span, Trace
from pdtrace.stages import CHAINS, Mark, Mode, Role
from tests.support.marked_requests import (
    DECODE,
    GATEWAY,
    MS,
    PREFILL,
    START_NS,
    TRACE_ID,
    TRANSFER,
    US,
    WALL_NS,
    pd_moments,
    process,
    request_of,
)

SHIFT_NS = 3_600_000 * MS
"""The other host's monotonic clock is this far ahead."""
SKEW_NS = 300 * MS
"""Its wall clock is this far ahead."""
ERROR_NS = 20 * US


def clock_to(peer: str, offset_ns: int, *, at_ns: int, error_ns: int = ERROR_NS) -> ClockOffsets:
    clock = ClockOffsets()
    for step in range(-50, 51):
        clock.add(
            ClockRecord(
                t_ns=at_ns + step * MS,
                peer="x",
                peer_clock_id=peer,
                offset_ns=offset_ns,
                error_ns=error_ns,
            )
        )
    return clock


def on_other_host(
    request: CollectedRequest, roles: Collection[Role], *, clock: ClockOffsets | None = None
) -> CollectedRequest:
    """Moves legs to a host whose clocks are ahead."""
    legs: list[Leg] = []
    for leg in request.legs:
        if leg.process.role not in roles:
            legs.append(leg)
            continue
        anchor = ClockAnchor(monotonic_ns=START_NS + SHIFT_NS, wall_ns=WALL_NS + SKEW_NS)
        moved = dataclasses.replace(leg.process, clock_id="host-2", anchor=anchor)
        marks = [
            MarkRecord(mark=m.mark, key=1, attempt=1, t_ns=m.t_ns + SHIFT_NS, values=m.values)
            for m in leg.marks
        ]
        legs.append(Leg(process=moved, marks=marks, clock=clock))
    request.legs = legs
    return request


def exact(span: Span) -> tuple[object, object]:
    return span.attributes[a.BEGIN_NS.key], span.attributes[a.END_NS.key]


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


@pytest.mark.parametrize("measured_by", ["worker", "gateway", "a neighbour of the worker"])
def test_measured_offset_puts_another_hosts_marks_on_the_gateways_clock(measured_by: str) -> None:
    forward = clock_to("host-1", -SHIFT_NS, at_ns=START_NS + SHIFT_NS)
    request = on_other_host(request_of(pd_moments()), {DECODE, TRANSFER})
    role = {"worker": DECODE, "gateway": GATEWAY}.get(measured_by, TRANSFER)
    [leg] = [leg for leg in request.legs if leg.process.role is role]
    leg.clock = clock_to("host-2", SHIFT_NS, at_ns=START_NS) if role is GATEWAY else forward
    spans = by_name(assemble(request))
    expected = by_name(assemble(request_of(pd_moments())))
    for name, span in spans.items():
        begin, end = exact(span)
        assert (begin, end) == pytest.approx(exact(expected[name]), abs=ERROR_NS)
    timeline = build_timeline(Trace(trace_id=TRACE_ID, spans=list(spans.values())))
    assert timeline.unexplained_ns == 0


def test_offset_and_bound_stand_on_spans_of_other_hosts_alone() -> None:
    clock = clock_to("host-1", -SHIFT_NS, at_ns=START_NS + SHIFT_NS)
    request = on_other_host(request_of(pd_moments()), {DECODE}, clock=clock)
    for span in assemble(request):
        offset = span.attributes.get(a.CLOCK_OFFSET_NS.key)
        error = span.attributes.get(a.CLOCK_ERROR_NS.key)
        if span.resource.service_name == "pd-decode":
            assert offset == pytest.approx(-SHIFT_NS, abs=ERROR_NS)
            assert isinstance(error, int) and ERROR_NS <= error < 2 * ERROR_NS
        else:
            assert (offset, error) == (None, None)


def test_span_itself_shows_the_clock_of_its_own_host() -> None:
    clock = clock_to("host-1", -SHIFT_NS, at_ns=START_NS + SHIFT_NS)
    request = on_other_host(request_of(pd_moments()), {DECODE}, clock=clock)
    spans = by_name(assemble(request))
    assert spans["gateway.queue"].start_ns == WALL_NS + 400 * US
    reserve = spans["decode.reserve"]
    assert reserve.start_ns == WALL_NS + SKEW_NS + 720 * US
    assert reserve.end_ns == WALL_NS + SKEW_NS + 1_719 * US
    [event] = reserve.events
    assert event.time_ns == WALL_NS + SKEW_NS + 730 * US


def test_without_round_trips_wall_clocks_count_and_no_bound_is_claimed() -> None:
    request = on_other_host(request_of(pd_moments()), {DECODE})
    reserve = by_name(assemble(request))["decode.reserve"]
    assert reserve.attributes[a.BEGIN_NS.key] == START_NS + SKEW_NS + 720 * US
    assert reserve.attributes[a.CLOCK_OFFSET_NS.key] == SKEW_NS - SHIFT_NS
    assert a.CLOCK_ERROR_NS.key not in reserve.attributes


def notice(request: CollectedRequest, *, landed_late_ns: int) -> CollectedRequest:
    """KV_LANDED (transfer, here) seems to be after KV_NOTICED (decode, the other host)."""
    for leg in request.legs:
        leg.marks = [
            MarkRecord(
                mark=m.mark,
                key=1,
                attempt=1,
                t_ns=m.t_ns + (490 * US + landed_late_ns if m.mark is Mark.KV_LANDED else 0),
                values=m.values,
            )
            for m in leg.marks
        ]
    return request


@pytest.mark.parametrize(
    ("late_ns", "told"),
    [
        (ERROR_NS // 2, None),
        (50 * MS, "end mark 50.0 ms before begin mark, clocks are good to"),
    ],
)
def test_effect_before_its_cause_is_told_only_beyond_the_clocks_bound(
    late_ns: int, told: str | None
) -> None:
    clock = clock_to("host-1", -SHIFT_NS, at_ns=START_NS + SHIFT_NS)
    request = notice(request_of(pd_moments()), landed_late_ns=late_ns)
    span = by_name(assemble(on_other_host(request, {DECODE}, clock=clock)))["hop.notice"]
    begin, end = exact(span)
    assert begin == end
    said = span.attributes.get(a.VIOLATION.key)
    assert said is None if told is None else str(said).startswith(told)


def test_effect_before_its_cause_on_unmeasured_clocks_says_so() -> None:
    request = notice(request_of(pd_moments()), landed_late_ns=400 * MS)
    span = by_name(assemble(on_other_host(request, {DECODE})))["hop.notice"]
    assert "whose error is not known" in str(span.attributes[a.VIOLATION.key])


def test_the_tighter_of_two_measurements_counts() -> None:
    far = dataclasses.replace(process(DECODE), clock_id="host-2")
    loose = clock_to("host-1", -SHIFT_NS, at_ns=START_NS + SHIFT_NS, error_ns=5 * MS)
    tight = clock_to("host-2", SHIFT_NS + 7, at_ns=START_NS, error_ns=US)
    found = align(far, process(GATEWAY), START_NS + SHIFT_NS, own=[loose], theirs=[tight])
    assert found.error_ns is not None and found.error_ns < 5 * MS
    assert found.offset_ns == pytest.approx(-SHIFT_NS - 7, abs=found.error_ns)


def test_lost_process_of_another_host_ends_on_the_gateways_clock() -> None:
    clock = clock_to("host-1", -SHIFT_NS, at_ns=START_NS + SHIFT_NS)
    moments = [m for m in pd_moments() if m[2] < 5_000]
    request = on_other_host(request_of(moments), {PREFILL}, clock=clock)
    for leg in request.legs:
        if leg.process.role is PREFILL:
            leg.lost_at_ns = START_NS + SHIFT_NS + 5_500 * US
    request.gave_up = "prefill-0 did not finish"
    compute = by_name(assemble(request))["prefill.compute"]
    assert compute.attributes[a.OUTCOME.key] == "lost"
    begin, _ = exact(compute)
    assert begin == pytest.approx(START_NS + 2_000 * US, abs=2 * ERROR_NS)


@pytest.mark.case("CLK-04")
@pytest.mark.parametrize("mode", [Mode.PD, Mode.PD_EARLY])
def test_admission_before_the_handshake_ends_is_an_overlap_and_nothing_is_negative(
    mode: Mode,
) -> None:
    """Prefill starts on the prompt at once; the destination is known only while it computes."""
    handshake_us = 3_500
    moments = [
        (role, mark, handshake_us if mark is Mark.HANDSHAKE_DONE else at_us, values)
        for role, mark, at_us, values in pd_moments(mode)
    ]
    spans = assemble(request_of(moments))
    for span in spans:
        begin, end = exact(span)
        assert isinstance(begin, int) and isinstance(end, int) and begin <= end
        assert span.start_ns <= span.end_ns
    timeline = build_timeline(Trace(trace_id=TRACE_ID, spans=spans))
    assert all(segment.duration_ns >= 0 for segment in timeline.segments)
    assert all(part.ns >= 0 for part in timeline.parts)
    assert sum(part.ns for part in timeline.parts) == timeline.total_ns == 20 * MS
    assert all(visit.owned_ns >= 0 and visit.duration_ns >= 0 for visit in timeline.visits)
    shared = {(o.first, o.second): o.ns for o in timeline.overlaps}
    assert shared["hop.publish", "prefill.compute"] == (handshake_us - 2_000) * US
    queue = by_name(spans)["prefill.queue"]
    assert queue.attributes[a.VIOLATION.key] == (
        f"end mark {seconds_text((handshake_us - 2_000) * US)} before begin mark"
    )
    assert {span.name for span in spans} >= {stage.name for stage in CHAINS[mode]}
