"""Spans of a request that has not ended: open where it is, silent about what is to come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdtrace import semconv as a
from pdtrace.assembly.collected import CollectedRequest, StepStats, Stuck
from pdtrace.assembly.request_spans import assemble
from pdtrace.ring.codec import ID_SEPARATOR
from pdtrace.spans import Span, StatusCode
from pdtrace.stages import CHAINS, Mark, Mode, StepKind
from tests.support.marked_requests import (
    DECODE,
    GATEWAY,
    MS,
    OPEN_AT_US,
    PREFILL,
    START_NS,
    US,
    WALL_NS,
    Moment,
    aborted,
    colocated_moments,
    completed,
    pd_moments,
    request_of,
    until,
)


def at(request: CollectedRequest, at_us: int) -> list[Span]:
    request.open_at_ns = START_NS + at_us * US
    return assemble(request)


def open_names(spans: Sequence[Span]) -> set[str]:
    return {span.name for span in spans if span.attributes.get(a.OPEN.key) is True}


def named(spans: Sequence[Span], name: str) -> Span:
    [span] = [span for span in spans if span.name == name]
    return span


@pytest.mark.parametrize("name", [stage.name for stage in CHAINS[Mode.PD]])
def test_stage_that_goes_on_lasts_until_the_look_and_is_no_failure(name: str) -> None:
    at_us = OPEN_AT_US[name]
    spans = at(request_of(until(pd_moments(), at_us)), at_us + 50)
    root = spans[0]
    stage = named(spans, name)
    chain = [s.name for s in CHAINS[Mode.PD]]
    reached = chain[: chain.index(name) + 1]
    beside = {"decode.generate"} if name == "hop.token" else set[str]()
    assert {span.name for span in spans if span.name in chain} == set(reached) | beside
    assert open_names(spans) & set(chain) == {name} | beside
    assert root.attributes[a.OPEN.key] is True
    for span in (root, stage):
        assert span.attributes[a.END_NS.key] == START_NS + (at_us + 50) * US
    for span in spans:
        assert span.status is StatusCode.UNSET
        assert a.INCOMPLETE.key not in span.attributes
        if a.OPEN.key in span.attributes:
            assert a.OUTCOME.key not in span.attributes
    attempts = [span for span in spans if span.name == "attempt"]
    if chain.index(name) in range(2, 15):
        assert open_names(attempts) == {"attempt"}


def test_look_before_the_last_mark_never_makes_a_negative_span() -> None:
    spans = at(request_of(until(pd_moments(), 5_000)), -10)
    for span in spans:
        begin, end = span.attributes[a.BEGIN_NS.key], span.attributes[a.END_NS.key]
        assert isinstance(begin, int) and isinstance(end, int)
        assert begin <= end and span.start_ns <= span.end_ns


def test_answer_that_is_out_is_an_end_even_while_the_legs_finish() -> None:
    spans = at(request_of(pd_moments()), 21_000)
    assert open_names(spans) == set()
    assert spans[0].attributes[a.OUTCOME.key] == "completed"
    assert spans[0].attributes[a.END_NS.key] == START_NS + 20_000 * US


def test_stage_overtaken_by_later_marks_is_not_shown_as_open() -> None:
    moments = [m for m in until(pd_moments(), 5_000) if m[1] is not Mark.PAGES_RESERVED]
    spans = at(request_of(moments), 5_000)
    assert "decode.reserve" not in {span.name for span in spans}
    assert "prefill.compute" in open_names(spans)


def test_first_attempt_that_failed_is_closed_while_the_second_goes_on() -> None:
    first = request_of([*until(pd_moments(), 5_000), aborted(GATEWAY, 5_000, "lost", "x", "p")])
    moments = [m for m in until(pd_moments(), 1_000) if m[2] >= 500]
    second = request_of([(r, m, t + 10_000, v) for r, m, t, v in moments], attempt=2)
    first.legs = [*first.legs, *second.legs]
    spans = at(first, 11_500)
    one, two = [span for span in spans if span.name == "attempt"]
    assert one.attributes[a.OUTCOME.key] == "lost"
    assert one.attributes[a.OUTCOME_STAGE.key] == "prefill.compute"
    assert (a.OPEN.key in one.attributes, two.attributes[a.OPEN.key]) == (False, True)
    assert open_names(spans) == {spans[0].name, "attempt", "decode.reserve", "prefill.bootstrap"}


def test_stage_that_its_own_process_gave_up_has_ended_there() -> None:
    moments = [*until(pd_moments(), 5_000), aborted(PREFILL, 5_000, "failed", "engine_error", "p")]
    spans = at(request_of(moments), 5_100)
    compute = named(spans, "prefill.compute")
    assert compute.attributes[a.OUTCOME.key] == "failed"
    assert compute.attributes[a.END_NS.key] == START_NS + 5_000 * US
    assert a.OPEN.key not in compute.attributes
    news = named(spans, "gateway.finish")
    assert news.attributes[a.BEGIN_NS.key] == START_NS + 5_000 * US
    assert news.attributes[a.OPEN.key] is True


def test_where_the_gateway_is_another_hosts_nothing_is_said_of_what_it_hears() -> None:
    moments = [m for m in until(pd_moments(), 5_000) if m[0] is not GATEWAY]
    moments.append(aborted(PREFILL, 5_000, "failed", "engine_error", "p"))
    assert "gateway.finish" not in {span.name for span in at(request_of(moments), 5_100)}


def test_worker_that_is_gone_is_told_before_the_gateway_notices() -> None:
    request = request_of(until(pd_moments(), 15_000), lost={DECODE: 15_200})
    spans = at(request, 16_000)
    assert named(spans, "decode.generate").attributes[a.OPEN.key] is True
    assert spans[0].attributes[a.INCOMPLETE.key] == "decode-0: process_lost"


def test_details_of_an_open_stage_are_open_too() -> None:
    spans = at(request_of(until(pd_moments(), 5_000)), 5_000)
    [done, going_on] = [span for span in spans if span.name == "prefill.chunk"]
    assert (a.OPEN.key in done.attributes, going_on.attributes[a.OPEN.key]) == (False, True)
    spans = at(request_of(until(pd_moments(), 13_500)), 13_600)
    assert named(spans, "decode.preempted").attributes[a.OPEN.key] is True


def test_request_without_gateway_records_shows_its_open_stage() -> None:
    moments = [m for m in until(pd_moments(), 5_000) if m[0] is not GATEWAY]
    assert "prefill.compute" in open_names(at(request_of(moments), 5_100))


@pytest.mark.parametrize("is_open", [True, False])
def test_stuck_report_is_an_event_on_its_stage_alone(is_open: bool) -> None:
    moments = until(pd_moments(), 5_000)
    if not is_open:
        moments.append(completed(6_000, "timed_out", "request_timeout", "gateway", 504))
    request = request_of(moments)
    request.stuck = [
        Stuck(
            stage="prefill.compute",
            attempt=1,
            at_ns=START_NS + 4_500 * US,
            age_ns=2_500 * US,
            threshold_ns=MS,
        ),
        Stuck(stage="decode.queue", attempt=1, at_ns=START_NS, age_ns=1, threshold_ns=1),
        Stuck(stage="prefill.compute", attempt=7, at_ns=START_NS, age_ns=1, threshold_ns=1),
    ]
    spans = at(request, 5_000) if is_open else assemble(request)
    told = [(span.name, event) for span in spans for event in span.events if "stuck" in event.name]
    [(name, event)] = told
    assert name == "prefill.compute"
    assert (event.name, event.time_ns) == ("pd.stuck", WALL_NS + 4_500 * US)
    assert event.attributes == {a.STUCK_SECONDS.key: 0.0025, a.STUCK_AFTER_SECONDS.key: 0.001}


def steps(kind: StepKind, *, attempt: int = 1, count: int = 5) -> StepStats:
    return StepStats(
        kind=kind,
        attempt=attempt,
        count=count,
        total_ns=9 * MS,
        slowest_ns=3 * MS,
        slowest_number=7,
    )


def test_steps_stand_on_the_stages_that_consist_of_them() -> None:
    request = request_of(pd_moments())
    for leg in request.legs:
        if leg.process.role is DECODE:
            leg.steps = [steps(StepKind.DECODE), steps(StepKind.DECODE, attempt=2, count=99)]
        elif leg.process.role is PREFILL:
            leg.steps = [steps(StepKind.PREFILL, count=2)]
    spans = assemble(request)
    counts = {s.name: s.attributes[a.STEPS.key] for s in spans if a.STEPS.key in s.attributes}
    assert counts == {"decode.generate": 5, "prefill.compute": 2}
    generate = named(spans, "decode.generate").attributes
    assert generate[a.STEP_SLOWEST_NUMBER.key] == 7
    assert generate[a.STEP_SLOWEST_SECONDS.key] == 0.003


def test_colocated_worker_tells_both_kinds_of_steps_apart() -> None:
    request = request_of(colocated_moments())
    request.legs[1].steps = [steps(StepKind.PREFILL, count=1), steps(StepKind.DECODE, count=15)]
    spans = assemble(request)
    assert named(spans, "prefill.compute").attributes[a.STEPS.key] == 1
    assert named(spans, "decode.generate").attributes[a.STEPS.key] == 15


def test_gap_names_its_cause_its_step_and_links_to_who_caused_it() -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.TOKEN_GAP]
    values = {
        a.TOKEN_INDEX: 4,
        a.GAP_SECONDS: 0.002,
        a.GAP_CAUSE: "interfering_prefill",
        a.GAP_CAUSE_SECONDS: 0.0015,
        a.STEP_NUMBER: 812,
        a.BATCH_SIZE: 3,
        a.WAIT_BLOCKER: "req-0",
    }
    request = request_of([*moments, (DECODE, Mark.TOKEN_GAP, 12_000, values)])
    request.blockers = {"req-0": ("a" * 32, "b" * 16)}
    gap = named(assemble(request), "decode.gap")
    assert {attr.key: gap.attributes[attr.key] for attr in values} == {
        attr.key: value for attr, value in values.items()
    }
    assert [(link.trace_id, link.span_id) for link in gap.links] == [("a" * 32, "b" * 16)]


def test_all_requests_in_the_way_are_listed_and_linked() -> None:
    ids = ["req-7", "req-8", "req-unknown", "req-9"]
    values = {
        a.WAIT_STAGE: "decode.reserve",
        a.WAIT_REASON: "kv_pages",
        a.WAIT_BLOCKER: "req-7",
        a.WAIT_BLOCKERS: ID_SEPARATOR.join(ids),
    }
    moments: list[Moment] = [m for m in pd_moments() if m[1] is not Mark.WAITING]
    request = request_of([*moments, (DECODE, Mark.WAITING, 800, values)])
    request.blockers = {name: (name[-1] * 32, name[-1] * 16) for name in ids if name[-1].isdigit()}
    reserve = named(assemble(request), "decode.reserve")
    assert reserve.attributes[a.WAIT_BLOCKERS.key] == tuple(ids)
    assert reserve.events[0].attributes[a.WAIT_BLOCKERS.key] == tuple(ids)
    assert [link.span_id[0] for link in reserve.links] == ["7", "8", "9"]
