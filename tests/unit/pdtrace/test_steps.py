"""Which forward passes become spans, and what these say."""

from __future__ import annotations

import pytest

from pdtrace import semconv as a
from pdtrace.analysis.placement import split_requests
from pdtrace.assembly.steps import (
    MAX_LINKS,
    ChosenStep,
    Member,
    StepPolicy,
    StepWatch,
    is_step,
    step_delivery,
    step_span,
)
from pdtrace.otlp.json_lines import decode_line, encode_line
from pdtrace.ring.records import StepRecord
from pdtrace.spans import Trace
from pdtrace.stages import Role, StepKind
from tests.support.marked_requests import MS, START_NS, WALL_NS, process

SECOND = 1_000 * MS


def step(number: int, ms: int, *, kind: StepKind = StepKind.DECODE, at_ns: int = 0) -> StepRecord:
    begin_ns = START_NS + at_ns
    return StepRecord(
        number=number, kind=kind, begin_ns=begin_ns, end_ns=begin_ns + ms * MS, tokens=7, size=3
    )


def member(number: int, *, sampled: bool = True) -> Member:
    return Member(f"req-{number}", f"{number + 1:032x}", f"{number + 1:016x}", sampled)


def test_pass_that_is_slow_against_its_own_kind_is_chosen() -> None:
    watch = StepWatch(StepPolicy(sample_every=0))
    for number in range(1, 100):
        assert not watch.choose("decode-0", step(number, 20))
        assert not watch.choose("decode-0", step(number, 200, kind=StepKind.PREFILL))
    assert watch.choose("decode-0", step(100, 61))
    assert not watch.choose("decode-0", step(101, 60))
    assert not watch.choose("decode-0", step(102, 590, kind=StepKind.PREFILL))
    assert watch.choose("decode-0", step(103, 601, kind=StepKind.PREFILL))
    assert watch.chosen == 2


def test_nothing_is_slow_below_the_floor_or_before_enough_passes() -> None:
    watch = StepWatch(StepPolicy(sample_every=0))
    assert not watch.choose("decode-0", step(1, 9_000))
    for number in range(2, 60):
        assert not watch.choose("decode-0", step(number, 1))
    assert not watch.choose("decode-0", step(60, 49))
    assert watch.choose("decode-0", step(61, 50))


def test_rings_have_medians_of_their_own_and_finished_ones_are_forgotten() -> None:
    watch = StepWatch(StepPolicy(sample_every=0))
    for number in range(1, 30):
        watch.choose("slow", step(number, 300))
        watch.choose("fast", step(number, 20))
    assert not watch.choose("slow", step(30, 300))
    assert watch.choose("fast", step(30, 300))
    watch.keep({"slow"})
    assert not watch.choose("fast", step(31, 300))


def test_sampling_follows_the_step_number() -> None:
    first, second = (StepWatch(StepPolicy(sample_every=10)) for _ in range(2))
    chosen = [n for n in range(1, 51) if first.choose("decode-0", step(n, 1, at_ns=n * SECOND))]
    assert chosen == [10, 20, 30, 40, 50]
    # Another agent that begins later samples the same ones.
    later = [n for n in range(25, 51) if second.choose("decode-0", step(n, 1, at_ns=n * SECOND))]
    assert later == [30, 40, 50]


def test_what_is_beyond_the_limit_per_second_is_counted() -> None:
    watch = StepWatch(StepPolicy(sample_every=1, max_per_s=5))
    assert sum(watch.choose("a", step(n, 1, at_ns=n)) for n in range(1, 9)) == 5
    assert watch.choose("a", step(9, 1, at_ns=2 * SECOND))
    assert (watch.chosen, watch.left_out) == (6, 3)


def test_policy_out_of_range_is_refused() -> None:
    for fields in ({"slow_factor": 0.5}, {"floor_s": -1.0}, {"sample_every": -1}):
        with pytest.raises(ValueError, match="must be"):
            StepPolicy(**fields)  # pyright: ignore[reportArgumentType]


def test_span_says_kind_number_size_tokens_and_members() -> None:
    chosen = ChosenStep(process(Role.DECODE), step(41, 80), (member(0), member(1)))
    span = step_span(chosen)
    assert span.name == "step.decode"
    assert (span.start_ns, span.end_ns) == (WALL_NS, WALL_NS + 80 * MS)
    assert span.attributes == {
        a.STEP_NUMBER.key: 41,
        a.STEP_KIND.key: "decode",
        a.STEP_TOKENS.key: 7,
        a.STEP_MEMBERS.key: ("req-0", "req-1"),
        a.BATCH_SIZE.key: 3,
        a.BEGIN_NS.key: START_NS,
        a.END_NS.key: START_NS + 80 * MS,
    }
    assert [(link.trace_id, link.span_id) for link in span.links] == [
        (member.trace_id, member.attempt_span_id) for member in chosen.members
    ]
    assert is_step(span)
    assert decode_line(encode_line([span]))[0].span_id == span.span_id


def test_span_of_the_same_pass_made_again_is_equal_and_of_another_one_is_not() -> None:
    decode = process(Role.DECODE)
    one, again, other = (
        step_span(ChosenStep(decode, step(number, 80), ())) for number in (41, 41, 42)
    )
    assert one == again
    assert (one.trace_id, one.span_id) != (other.trace_id, other.span_id)
    assert (len(one.trace_id), len(one.span_id)) == (32, 16)


def test_links_are_few_and_lead_to_sampled_requests_only() -> None:
    members = tuple(member(number, sampled=number > 0) for number in range(40))
    request, [span] = step_delivery(ChosenStep(process(Role.DECODE), step(1, 80), members))
    assert len(span.links) == MAX_LINKS - 1
    assert len(span.attributes[a.STEP_MEMBERS.key]) == MAX_LINKS  # pyright: ignore[reportArgumentType]
    assert request.sampled
    alone, _ = step_delivery(ChosenStep(process(Role.DECODE), step(1, 80), members[:1]))
    assert not alone.sampled, "a caller that wants no traces gets none of its passes"


def test_trace_of_a_pass_is_no_request() -> None:
    span = step_span(ChosenStep(process(Role.DECODE), step(1, 80), (member(0),)))
    assert split_requests(Trace(trace_id=span.trace_id, spans=[span])) == ()
