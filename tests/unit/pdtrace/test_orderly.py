"""What is built by the plan of a shape is what assembly builds, span by span and byte by byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from pdtrace.agent.screening import screen
from pdtrace.assembly.collected import CollectedRequest, StepStats
from pdtrace.assembly.orderly import OrderlySpans, spans_in_order
from pdtrace.assembly.request_plans import MAX_SHAPES
from pdtrace.assembly.request_spans import assemble, assemble_by_rule
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.live.stuck import stage_lengths
from pdtrace.otlp.json_lines import decode_line, encode_line
from pdtrace.otlp.protobuf import encode_request, readable_spans
from pdtrace.ring.records import MarkRecord, Value
from pdtrace.spans import Span, SpanBatch
from pdtrace.stages import CHAINS, Mark, Mode, Outcome, StepKind, WaitReason
from pdtrace.testing import FakeClock, MemoryRings, Wait, record_request
from tests.support.copies import replace
from tests.support.marked_requests import (
    MS,
    US,
    Moment,
    colocated_moments,
    pd_moments,
    request_of,
)

PAUSES = {Mark.TOKEN_GAP, Mark.PREEMPTED, Mark.RESUMED}


def calm(moments: Sequence[Moment]) -> list[Moment]:
    """Without what interrupts a generation: that is for assembly."""
    return [moment for moment in moments if moment[1] not in PAUSES]


MOMENTS = [
    calm(pd_moments()),
    calm(pd_moments(stream=False)),
    calm(pd_moments(Mode.PD_EARLY)),
    calm(pd_moments(Mode.PD_EARLY, stream=False)),
    calm(colocated_moments()),
]


def by_plan(request: CollectedRequest) -> OrderlySpans | None:
    """The spans by the plan of the shape; a plan is made when a shape comes again."""
    spans_in_order(request)
    return spans_in_order(request)


def planned(request: CollectedRequest) -> OrderlySpans:
    spans = by_plan(request)
    assert spans is not None
    return spans


def told(spans: Sequence[Span]) -> list[tuple[Span, list[tuple[str, Any]]]]:
    """Spans, and the order of their attributes, which goes over the wire."""
    return [(span, list(span.attributes.items())) for span in spans]


def assert_same(request: CollectedRequest) -> bool:
    """Whether the shortcut was taken; if so, that every consumer gets what it gets without it."""
    spans = by_plan(request)
    if spans is None:
        return False
    expected = assemble_by_rule(request)
    again = planned(request)
    assert again.num_parts == sum(1 + len(s.events) + len(s.links) for s in expected)
    assert sorted(again.stage_lengths()) == sorted(stage_lengths(expected))
    assert screen(again) == screen(expected)
    assert again[0] == expected[0]
    # Before its spans are made: so they are sent.
    assert encode_request(SpanBatch([again])) == encode_spans(readable_spans(expected))
    assert len(spans) == len(expected)
    assert told(list(spans)) == told(expected)
    assert told(spans[:3]) == told(expected[:3])
    assert spans[-1] == expected[-1]
    spans.forget()
    assert list(decode_line(encode_line(spans))) == list(decode_line(encode_line(expected)))
    return True


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_healthy_request_of_any_mode_is_built_by_plan(moments: list[Moment]) -> None:
    assert assert_same(request_of(moments))
    assert assemble(request_of(moments)) == assemble_by_rule(request_of(moments))


@pytest.mark.parametrize("late_us", [18_999, 19_000, 19_001, 19_500, 20_000])
def test_a_first_token_that_takes_longer_than_generation_changes_nothing(late_us: int) -> None:
    for mode in (Mode.PD, Mode.PD_EARLY):
        moments = [
            (r, m, late_us if m is Mark.FIRST_TOKEN_SENT else t, v)
            for r, m, t, v in calm(pd_moments(mode))
        ]
        assert assert_same(request_of(sorted(moments, key=lambda moment: moment[2])))


def recorded(rng: random.Random, number: int) -> CollectedRequest:
    """Through rings and tracker; most of them healthy, some waiting for several reasons."""
    mode = rng.choice(list(Mode))
    names = [stage.name for stage in CHAINS[mode]]
    outcome = rng.choice([Outcome.COMPLETED] * 9 + [Outcome.FAILED])
    wait: Wait = {
        "reason": rng.choice(list(WaitReason)),
        "needed": rng.randrange(2_000),
        "free": rng.choice([0, 7, 10**6, 10**13]),
        "blocker": rng.choice(["req-0", "é" * 80, ["req-0", "req-2"]]),
    }
    rings = MemoryRings(clock=FakeClock())
    record_request(
        rings.recorders,
        request_id=f"req-{number}" if rng.random() < 0.9 else f"ü\ud800{number}",
        mode=mode,
        stage_ms={rng.choice(names): rng.choice([0.0, 0.0005, 1.0, 50.0, 900.0])},
        waits={rng.choice(names): wait for _ in range(rng.randrange(3))},
        outcome=outcome,
        stop_in=None if outcome is Outcome.COMPLETED else rng.choice(names[2:]),
        prompt_tokens=rng.randint(16, 2_000),
        output_tokens=rng.randint(1, 200),
        chunks=rng.randint(1, 3),
        steps=rng.random() < 0.5,
    )
    tracker = RequestTracker()
    known: set[str] = set()
    for identity, record in rings.read():
        if identity.instance not in known:
            known.add(identity.instance)
            tracker.add_ring(identity.instance, process_of(identity, {}))
        tracker.feed(identity.instance, [record], 0)
    [request] = tracker.finish_ended(1)
    blockers = {"req-0": ("c" * 32, "d" * 16), "req-2": (request.trace_id, "e" * 16)}
    return replace(request, blockers=blockers)


def test_requests_that_went_through_rings_and_tracker_are_the_same() -> None:
    rng = random.Random(1)
    taken = sum(assert_same(recorded(rng, number)) for number in range(150))
    assert taken > 100  # else this compares assembly with itself


CHANGES = ["drop", "twice", "attempt", "short", "move", "swap"]
VALUES: st.SearchStrategy[Value] = st.one_of(
    st.none(),
    st.integers(-3, 2_000),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    st.sampled_from(["", "completed", "failed", "transfer", "decode.reserve", "pd", "é\ud800"]),
)


def changed(record: MarkRecord, change: str | tuple[int, Value], shift: int) -> list[MarkRecord]:
    """What stands in the place of a record."""
    if isinstance(change, tuple):
        place, value = change
        values = list(record.values)
        if values:
            values[place % len(values)] = value
        return [replace(record, values=tuple(values))]
    match change:
        case "drop":
            return []
        case "twice":
            return [record, replace(record, t_ns=record.t_ns + shift)]
        case "short":
            return [replace(record, values=record.values[:1])]
        case "attempt":
            return [replace(record, attempt=2)]
        case _:
            return [replace(record, t_ns=max(record.t_ns + shift, 0))]


@given(
    moments=st.sampled_from(MOMENTS),
    changes=st.lists(
        st.tuples(
            st.integers(0, 50),
            st.sampled_from(CHANGES) | st.tuples(st.integers(0, 7), VALUES),
            st.integers(-3 * MS, 3 * MS) | st.integers(-3 * US, 3 * US),
        ),
        max_size=4,
    ),
    start_ns=st.sampled_from([0, 2**35 - 5 * 10**9, 2**42, 2**49 - 5_010_000_000, 2**56]),
    wait_at=st.lists(st.integers(-2, 21).map(lambda ms: ms * MS), max_size=3),
    wait_for=st.sampled_from([*(stage.name for stage in CHAINS[Mode.PD]), "prefill.chunk", "x"]),
)
@settings(max_examples=500, deadline=None)
def test_whatever_is_odd_changes_the_way_but_never_the_result(
    moments: list[Moment],
    changes: list[tuple[int, str | tuple[int, Value], int]],
    start_ns: int,
    wait_at: list[int],
    wait_for: str,
) -> None:
    request = request_of(moments)
    first_ns = request.legs[0].marks[0].t_ns
    for index, at_ns in enumerate(wait_at):
        leg = request.legs[index % len(request.legs)]
        reason = ("kv_pages", "slots")[index % 2]
        values = (wait_for, reason, 1, None, None, index, "req-0", None)
        leg.marks.append(MarkRecord(Mark.WAITING, 1, 1, first_ns + at_ns, values))
    for position, change, shift in changes:
        leg = request.legs[position % len(request.legs)]
        at = position // len(request.legs) % max(len(leg.marks), 1)
        if change == "swap":
            leg.marks.reverse()
        elif leg.marks:
            leg.marks[at : at + 1] = changed(leg.marks[at], change, shift)
    for leg in request.legs:
        leg.marks = [replace(mark, t_ns=mark.t_ns + start_ns) for mark in leg.marks]
        leg.steps = [
            StepStats(kind=kind, count=3, total_ns=9, slowest_ns=4, slowest_number=2)
            for kind in StepKind
        ]
    request.blockers = {"req-0": ("c" * 32, "d" * 16)}
    assert_same(request)


def test_what_is_known_to_be_missing_or_lost_is_for_assembly() -> None:
    request = request_of(MOMENTS[0])
    planned(request)
    assert by_plan(replace(request, gave_up="decode-0 did not finish")) is None
    assert by_plan(replace(request, open_at_ns=10**18)) is None
    for changes in ({"records_missed": 1}, {"lost_at_ns": 7}):
        legs = [replace(request.legs[0], **changes), *request.legs[1:]]
        assert by_plan(replace(request, legs=legs)) is None
    elsewhere = replace(request.legs[1].process, clock_id="another host")
    legs = [request.legs[0], replace(request.legs[1], process=elsewhere), *request.legs[2:]]
    assert by_plan(replace(request, legs=legs)) is None


def test_several_requests_are_sent_as_their_spans_would_be_in_one_list() -> None:
    """Groups of resources come in the order of their first spans, over all of them."""
    rng = random.Random(5)
    requests = [recorded(rng, number) for number in range(40)]
    parts = [by_plan(request) or assemble_by_rule(request) for request in requests]
    assert {type(part) for part in parts} == {list, OrderlySpans}
    batch = SpanBatch(parts)
    flat = [span for request in requests for span in assemble_by_rule(request)]
    assert encode_request(batch) == encode_spans(readable_spans(flat))
    assert len(batch) == len(flat)
    assert list(batch) == flat
    assert batch[len(flat) - 1] == flat[-1]
    assert batch[3:9] == flat[3:9]


@pytest.mark.parametrize(
    "broken", [{"trace_id": "a" * 31}, {"trace_id": "g" * 32}, {"root_span_id": "a"}]
)
def test_ids_that_have_no_form_are_refused(broken: dict[str, str]) -> None:
    request = replace(request_of(MOMENTS[0]), **broken)
    with pytest.raises(ValueError, match=r"OTLP form|hex"):
        encode_request(SpanBatch([planned(request)]))


def test_more_shapes_than_are_remembered_change_nothing() -> None:
    rng = random.Random(2)
    for _ in range(MAX_SHAPES + 10):
        request = request_of(MOMENTS[0])
        for leg in request.legs:
            rng.shuffle(leg.marks)
        spans_in_order(request)
    assert assert_same(request_of(MOMENTS[0]))
