"""Requests over several hosts: clocks that were measured, and clocks that causality contradicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdtrace import semconv as a
from pdtrace.analysis.skew import (
    MAX_SKEW_NS,
    OWN_CLOCK,
    ClockBasis,
    Skew,
    Step,
    estimate_skews,
)
from pdtrace.analysis.sources import Problems, Recording
from pdtrace.analysis.timeline import Timeline, ViolationKind, build_timeline
from pdtrace.check import check_recording
from pdtrace.cli import app
from pdtrace.otlp import json_lines
from pdtrace.spans import AttrValue, Resource, Span, Trace
from pdtrace.stages import Outcome
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, WALL_NS, Story

MS = 1_000_000
S = 1_000_000_000
DECODE = ("pd-decode",)


def shifted(
    trace: Trace,
    shift_ns: int,
    *,
    services: Sequence[str] = DECODE,
    host: str | None = "host-b",
    error_ns: int | None = None,
    wrong_ns: int = 0,
) -> Trace:
    """`trace` with spans of `services` as another host records them, whose clock is `shift_ns`
    ahead.

    error_ns  the agent's bound where round trips measured the clock; None: nobody did
    wrong_ns  by how much the measured offset is wrong
    """

    def shift(span: Span) -> Span:
        if span.resource.service_name not in services:
            return span
        attributes: dict[str, AttrValue] = dict(span.attributes)
        for key in (a.BEGIN_NS.key, a.END_NS.key):
            if key in attributes:
                time_ns = attributes[key]
                assert isinstance(time_ns, int)
                attributes[key] = time_ns + wrong_ns
        if error_ns is not None:
            attributes[a.CLOCK_OFFSET_NS.key] = wrong_ns - shift_ns
            attributes[a.CLOCK_ERROR_NS.key] = error_ns
        resource = {k: v for k, v in span.resource.attributes.items() if k != "host.id"}
        if host is not None:
            resource["host.id"] = host
        return replace(
            span,
            start_ns=span.start_ns + shift_ns,
            end_ns=span.end_ns + shift_ns,
            attributes=attributes,
            resource=Resource(attributes=resource),
        )

    return replace(trace, spans=tuple(shift(span) for span in trace.spans))


def without_hosts(trace: Trace) -> Trace:
    def strip(span: Span) -> Span:
        resource = {k: v for k, v in span.resource.attributes.items() if k != "host.id"}
        return replace(span, resource=Resource(attributes=resource))

    return replace(trace, spans=tuple(strip(span) for span in trace.spans))


def assert_adds_up(timeline: Timeline) -> None:
    assert sum(part.ns for part in timeline.parts) == timeline.total_ns
    assert all(part.ns >= 0 for part in timeline.parts)
    assert sum(segment.duration_ns for segment in timeline.segments) == timeline.total_ns


def recording_of(*traces: Trace) -> Recording:
    return Recording(
        source="test",
        traces=traces,
        files=1,
        lines=1,
        spans=sum(len(trace.spans) for trace in traces),
        problems=Problems(),
    )


def rule(report_of: Recording, name: str) -> tuple[int, tuple[str, ...]]:
    (found,) = (rule for rule in check_recording(report_of).rules if rule.name == name)
    return found.broken, found.examples


# -- measured clocks --------------------------------------------------------------------------


@pytest.mark.parametrize("shift_ns", [5 * S, -5 * S, 3 * 86_400 * S])
def test_a_measured_clock_is_taken_at_its_word_however_far_it_is_off(shift_ns: int) -> None:
    plain = build_timeline(Story().trace())
    timeline = build_timeline(shifted(Story().trace(), shift_ns, error_ns=200_000))
    assert timeline.violations == ()
    assert timeline.exact
    assert timeline.parts == plain.parts
    (clock,) = timeline.clocks
    assert (clock.host, clock.instances) == ("host-b", ("decode-0",))
    assert (clock.basis, clock.offset_ns, clock.error_ns) == (
        ClockBasis.MEASURED,
        -shift_ns,
        200_000,
    )
    assert any("200 µs" in sentence for sentence in timeline.unknowns)


@pytest.mark.parametrize("wrong_ns", [-400_000, -100_000, 100_000, 400_000])
def test_what_lies_within_the_error_is_explained(wrong_ns: int) -> None:
    trace = shifted(Story().trace(), 5 * S, error_ns=400_000, wrong_ns=wrong_ns)
    timeline = build_timeline(trace)
    assert timeline.violations == ()
    assert_adds_up(timeline)
    assert rule(recording_of(trace), "clocks") == (0, ())
    assert timeline.explained
    assert all("within the clocks' error" in text for text in timeline.explained)


@pytest.mark.parametrize("wrong_ns", [-20 * MS, 20 * MS])
def test_what_lies_beyond_it_is_reported_with_offset_and_bound(wrong_ns: int) -> None:
    trace = shifted(Story().trace(), 5 * S, error_ns=400_000, wrong_ns=wrong_ns)
    timeline = build_timeline(trace)
    found = [v for v in timeline.violations if v.between_clocks]
    assert {v.kind for v in found} & {ViolationKind.OVERLAP, ViolationKind.OUT_OF_ORDER}
    for violation in found:
        assert "decode-0 on host-b: offset -" in violation.message
        assert "± 400 µs" in violation.message
    assert not any(visit.moved_ns for visit in timeline.visits), "a measured clock is never moved"
    assert_adds_up(timeline)
    broken, examples = rule(recording_of(trace), "clocks")
    assert broken == 1
    assert "± 400 µs" in examples[0]


def test_a_hop_begun_on_another_host_is_as_uncertain_as_that_host() -> None:
    timeline = build_timeline(shifted(Story().trace(), 5 * S, error_ns=300_000))
    errors = {visit.name: visit.error_ns for visit in timeline.visits}
    assert errors["decode.reserve"] == errors["hop.publish"] == errors["hop.token"] == 300_000
    assert errors["prefill.compute"] == errors["gateway.queue"] == 0


def test_a_hop_that_the_estimate_makes_negative_is_shown_as_nothing() -> None:
    """The assembler clamps it; what follows begins too early, within the error."""
    story = Story(lengths_s={**HEALTHY_S, "hop.dispatch": 0.0001})
    timeline = build_timeline(shifted(story.trace(), 5 * S, error_ns=400_000, wrong_ns=-350_000))
    assert timeline.violations == ()
    assert_adds_up(timeline)


def test_on_one_host_nothing_is_said_of_clocks() -> None:
    timeline = build_timeline(Story().trace())
    assert (timeline.clocks, timeline.explained) == ((), ())
    assert {visit.error_ns for visit in timeline.visits} == {0}


# -- clocks that nobody measured --------------------------------------------------------------

FOREIGN = Story(exact=False)


@pytest.mark.case("CLK-08")
@pytest.mark.parametrize("named", [True, False])
def test_a_decode_span_before_its_dispatch_is_a_skew_and_the_verdict_respects_causality(
    named: bool,
) -> None:
    """Decode's clock is behind: its first span begins 120 ms before the gateway's dispatch span."""
    plain = FOREIGN.trace() if named else without_hosts(FOREIGN.trace())
    dispatch = next(s for s in plain.spans if s.name == "gateway.dispatch")
    first = min(s.start_ns for s in plain.spans if s.resource.service_name == "pd-decode")
    early_ns = 120 * MS + first - dispatch.start_ns
    trace = shifted(plain, -early_ns, host="host-b" if named else None)
    begun = min(s.start_ns for s in trace.spans if s.resource.service_name == "pd-decode")
    assert dispatch.start_ns - begun == 120 * MS

    timeline = build_timeline(trace)
    assert timeline.violations == ()
    assert_adds_up(timeline)
    (clock,) = timeline.clocks
    assert clock.basis is ClockBasis.CAUSALITY
    assert clock.skew_ns is not None and clock.skew_most_ns is not None
    assert clock.skew_ns - 3_000 <= early_ns <= clock.skew_most_ns + 3_000
    assert timeline.unexplained_ns < 0.01 * timeline.total_ns
    healthy = build_timeline(plain)
    for part in timeline.parts:  # hops alone may be wrong, by what the skew is not known
        usual = healthy.part_ns(part.name)
        assert usual is not None
        assert abs(part.ns - usual) <= clock.skew_most_ns - clock.skew_ns + 10_000
    (sentence,) = [s for s in timeline.unknowns if "behind by the order of the stages" in s]
    assert "moved by +12" in sentence and "recorded times are kept" in sentence
    report = check_recording(recording_of(trace))
    assert rule(recording_of(trace), "clocks") == (0, ())
    assert any("spans of 1 request moved" in fact for fact in report.facts)


@pytest.mark.case("CLK-06")
def test_a_child_300_ms_early_is_moved_in_the_analysis_alone_and_labelled() -> None:
    trace = shifted(FOREIGN.trace(), -300 * MS)
    recorded = {span.span_id: span.start_ns for span in trace.spans}
    timeline = build_timeline(trace)
    assert {span.span_id: span.start_ns for span in trace.spans} == recorded
    (clock,) = timeline.clocks
    assert clock.moved_ns == pytest.approx(300 * MS, abs=2 * MS)
    for visit in timeline.visits:
        raw_ns = recorded[visit.span_id] - WALL_NS
        assert visit.moved_ns == (clock.moved_ns if visit.service == "pd-decode" else 0)
        assert visit.begin_ns == raw_ns + visit.moved_ns
    assert any("moved by" in sentence for sentence in timeline.unknowns)
    assert timeline.violations == ()


@pytest.mark.case("CLK-06")
@pytest.mark.parametrize("shift_ns", [-3600 * S, 3600 * S])
def test_an_hour_is_above_the_limit_and_only_warned_about(shift_ns: int) -> None:
    trace = shifted(FOREIGN.trace(), shift_ns)
    timeline = build_timeline(trace)
    (clock,) = timeline.clocks
    assert clock.moved_ns == 0
    assert {visit.moved_ns for visit in timeline.visits} == {0}
    assert clock.skew_ns == pytest.approx(-shift_ns, abs=2 * S)
    (warning,) = [s for s in timeline.unknowns if "stay where they were recorded" in s]
    assert "the limit is 60 s" in warning
    assert "3,6" in warning or "3,59" in warning
    assert_adds_up(timeline)
    assert rule(recording_of(trace), "clocks")[0] == 1


@pytest.mark.case("CLK-06")
def test_moving_can_be_switched_off_and_limited() -> None:
    trace = shifted(FOREIGN.trace(), -300 * MS)
    off = build_timeline(trace, max_skew_ns=0)
    assert {visit.moved_ns for visit in off.visits} == {0}
    assert off.violations and any("switched off" in sentence for sentence in off.unknowns)
    limited = build_timeline(trace, max_skew_ns=200 * MS)
    assert any("the limit is 0.2 s" in sentence for sentence in limited.unknowns)


def test_several_hosts_are_moved_each_by_its_own_amount() -> None:
    trace = shifted(FOREIGN.trace(), -300 * MS)
    trace = shifted(trace, 900 * MS, services=("pd-prefill", "pd-transfer"), host="host-c")
    timeline = build_timeline(trace)
    assert timeline.violations == ()
    moved = {clock.host: clock.moved_ns for clock in timeline.clocks}
    assert moved["host-b"] == pytest.approx(300 * MS, abs=20 * MS)
    assert moved["host-c"] == pytest.approx(-900 * MS, abs=20 * MS)
    assert_adds_up(timeline)


def test_a_clock_that_contradicts_nothing_stays_and_its_error_is_unknown() -> None:
    timeline = build_timeline(shifted(FOREIGN.trace(), 0))
    (clock,) = timeline.clocks
    assert (clock.basis, clock.skew_ns, clock.moved_ns) == (ClockBasis.WALL, None, 0)
    assert any("2 hosts; the error" in sentence for sentence in timeline.unknowns)


def test_stages_of_one_host_that_contradict_each_other_are_no_matter_of_clocks() -> None:
    trace = FOREIGN.trace()
    early = tuple(
        replace(s, start_ns=s.start_ns - 300 * MS, end_ns=s.end_ns - 300 * MS)
        if s.name == "decode.reserve"
        else s
        for s in trace.spans
    )
    timeline = build_timeline(replace(trace, spans=early))
    assert timeline.violations and not timeline.clocks
    assert not any(v.between_clocks for v in timeline.violations)


def test_a_request_that_failed_is_not_moved_because_a_worker_noticed_late() -> None:
    story = Story(exact=False, outcome=Outcome.CANCELLED, ends_in="decode.generate")
    trace = shifted(story.trace(), 0)
    late = tuple(
        replace(span, end_ns=span.end_ns + 30 * MS) if span.name == "decode.generate" else span
        for span in trace.spans
    )
    timeline = build_timeline(replace(trace, spans=late))
    assert {visit.moved_ns for visit in timeline.visits} == {0}
    assert_adds_up(timeline)


# -- the estimate alone -----------------------------------------------------------------------


def steps_of(*spans: tuple[str, int, int]) -> list[Step]:
    return [Step(clock, 1, begin, end) for clock, begin, end in spans]


def test_the_least_move_that_restores_the_order_is_taken() -> None:
    steps = steps_of(("", 0, 10 * MS), ("b", -50 * MS, 40 * MS), ("", 120 * MS, 200 * MS))
    skews = estimate_skews(steps, {"b"}, length=200 * MS, completed=True)
    assert skews == {"b": Skew(60 * MS, 80 * MS)}
    assert skews["b"].amount == 60 * MS


def test_no_single_amount_is_said_to_be_none() -> None:
    steps = steps_of(
        ("", 0, 10 * MS),
        ("b", -50 * MS, -45 * MS),
        ("", 20 * MS, 30 * MS),
        ("b", 100 * MS, 105 * MS),
        ("", 40 * MS, 50 * MS),
    )
    (skew,) = estimate_skews(steps, {"b"}, length=60 * MS, completed=True).values()
    assert skew.is_contradictory


@given(
    lengths=st.lists(st.integers(10_000, 10**9), min_size=3, max_size=12),
    clocks=st.lists(st.sampled_from([OWN_CLOCK, "b", "c"]), min_size=12, max_size=12),
    skews=st.tuples(st.integers(-MAX_SKEW_NS, MAX_SKEW_NS), st.integers(-MAX_SKEW_NS, MAX_SKEW_NS)),
)
def test_moving_by_the_estimate_restores_the_order_of_any_chain(
    lengths: list[int], clocks: list[str], skews: tuple[int, int]
) -> None:
    off = {OWN_CLOCK: 0, "b": skews[0], "c": skews[1]}
    steps: list[Step] = []
    now = 0
    for length, clock in zip(lengths, clocks, strict=False):
        steps.append(Step(clock, 1, now + off[clock], now + length + off[clock]))
        now += length
    found = estimate_skews(steps, {"b", "c"}, length=now, completed=True)
    assert not any(skew.is_contradictory for skew in found.values())
    moves = {clock: skew.amount for clock, skew in found.items()}
    at = 0
    for step in steps:
        move = moves.get(step.clock, 0)
        assert step.begin + move >= at - 4_000
        at = step.end + move
    for clock, skew in found.items():
        assert skew.least is not None and skew.most is not None
        truth = -off[clock]
        others = [c for c in found if c != clock]
        if not others:
            assert skew.least <= truth <= skew.most


@pytest.mark.case("CLK-06")
def test_the_commands_move_only_as_far_as_they_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_bytes(json_lines.encode_line(shifted(FOREIGN.trace(), -300 * MS).spans))
    runner = CliRunner()
    moved = runner.invoke(app, ["check", "--from", str(path), "--json"])
    (clock,) = json.loads(moved.stdout)["clocks"]
    assert (moved.exit_code, clock["moved"], clock["basis"]) == (0, 1, "causality")
    kept = runner.invoke(app, ["check", "--from", str(path), "--max-skew", "0", "--json"])
    (clock,) = json.loads(kept.stdout)["clocks"]
    assert (kept.exit_code, clock["moved"]) == (1, 0)
    why = runner.invoke(app, ["why", "--from", str(path), "--max-skew", "0.1"])
    assert why.exit_code == 0
    assert "the limit is 0.1 s" in " ".join(why.stdout.split())
