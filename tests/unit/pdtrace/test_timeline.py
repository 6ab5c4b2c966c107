"""The partition is exact for any spans, and what is wrong with a trace is listed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.analysis.placement import split_requests
from pdtrace.analysis.timeline import (
    UNEXPLAINED,
    Timeline,
    ViolationKind,
    build_timeline,
    build_timelines,
)
from pdtrace.analysis.waits import describe_wait
from pdtrace.spans import AttrValue, Event, Resource, Span, SpanKind, StatusCode, Trace
from pdtrace.stages import ATTEMPT_SPAN, CHAINS, ROOT_SPAN, STAGES, Mode, Outcome
from pdtrace.terminal.why_lines import gap_lines
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, Story, noisy, retried

MS = 1_000_000
NAMES = [ROOT_SPAN, ATTEMPT_SPAN, "GET /x", *(stage.name for stage in STAGES)]
SERVICES = ["pd-gateway", "pd-prefill", "pd-transfer", "pd-decode", "pd-worker", "client"]

_times = st.integers(-(10**6), 10**7)
_keys = [a.ATTEMPT, a.BEGIN_NS, a.END_NS, a.OUTPUT_TOKENS, a.MODE, a.OUTCOME, a.WAIT_REASON]
_values = st.one_of(
    st.integers(-3, 10**7),
    st.floats(),
    st.booleans(),
    st.sampled_from(["", "pd", "completed", "failed", "12", "kv_pages", "colocated"]),
)
_attributes = st.dictionaries(st.sampled_from([attr.key for attr in _keys]), _values, max_size=5)


@st.composite
def any_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    count = draw(st.integers(0, 14))
    spans: list[Span] = []
    for index in range(count):
        parent = draw(st.one_of(st.none(), st.integers(0, count)))
        spans.append(
            Span(
                trace_id="t",
                span_id=f"{index}",
                parent_id=None if parent is None else f"{parent}",
                name=draw(st.sampled_from(NAMES)),
                kind=SpanKind.INTERNAL,
                start_ns=draw(_times),
                end_ns=draw(_times),
                resource=Resource(
                    attributes={
                        "service.name": draw(st.sampled_from(SERVICES)),
                        "host.id": draw(st.sampled_from(["h1", "h2"])),
                    }
                ),
                attributes=draw(_attributes),
                events=(Event(name="pd.wait", time_ns=draw(_times), attributes=draw(_attributes)),),
                status=draw(st.sampled_from(list(StatusCode))),
            )
        )
    return tuple(spans)


def assert_exact(timeline: Timeline) -> None:
    assert sum(part.ns for part in timeline.parts) == timeline.total_ns
    assert all(part.ns >= 0 for part in timeline.parts)
    at = 0
    for segment in timeline.segments:
        assert segment.begin_ns == at
        assert segment.end_ns > at
        at = segment.end_ns
    assert at == timeline.total_ns
    for outer, parts in timeline.details.items():
        assert sum(part.ns for part in parts) == timeline.part_ns(outer)
        assert all(part.ns >= 0 for part in parts)
    owned = sum(visit.owned_ns for visit in timeline.visits)
    assert owned + timeline.unexplained_ns == timeline.total_ns


@settings(max_examples=150, deadline=None)
@given(any_spans())
def test_any_spans_partition_exactly(spans: tuple[Span, ...]) -> None:
    trace = Trace(trace_id="t", spans=spans)
    assert_exact(build_timeline(trace))
    for timeline in build_timelines([trace]):
        assert_exact(timeline)


@settings(max_examples=80, deadline=None)
@given(any_spans(), st.randoms(use_true_random=False))
def test_order_of_spans_does_not_matter(spans: tuple[Span, ...], rng: random.Random) -> None:
    shuffled = list(spans)
    rng.shuffle(shuffled)
    one = build_timeline(Trace(trace_id="t", spans=spans))
    other = build_timeline(Trace(trace_id="t", spans=tuple(shuffled)))
    assert one.segments == other.segments
    assert one.parts == other.parts
    assert sorted(map(repr, one.violations)) == sorted(map(repr, other.violations))


@pytest.mark.parametrize("mode", list(Mode))
def test_healthy_requests_keep_every_rule(mode: Mode) -> None:
    rng = random.Random(mode.value)
    for index in range(20):
        timeline = build_timeline(noisy(f"req-{index}", rng, mode).trace())
        assert_exact(timeline)
        assert timeline.violations == ()
        assert timeline.unexplained_ns == 0
        assert timeline.exact
        assert timeline.mode is mode
        names = [part.name for part in timeline.parts]
        assert names == [stage.name for stage in CHAINS[mode]] + [UNEXPLAINED]


def test_parts_are_the_lengths_that_were_recorded() -> None:
    timeline = build_timeline(Story().trace())
    expected = {name: round(seconds * 1e9) for name, seconds in HEALTHY_S.items()}
    # The first token travels while generation begins; that time counts once.
    expected["decode.generate"] -= expected["hop.token"]
    assert {p.name: p.ns for p in timeline.parts if p.name != UNEXPLAINED} == expected
    assert [(o.first, o.second, o.expected) for o in timeline.overlaps] == [
        ("hop.token", "decode.generate", True)
    ]


def test_without_exact_times_gaps_of_exported_times_are_closed() -> None:
    timeline = build_timeline(Story(exact=False).trace())
    assert_exact(timeline)
    assert not timeline.exact
    assert timeline.unexplained_ns == 0
    assert timeline.violations == ()
    for part in timeline.parts:
        if part.name not in {UNEXPLAINED, "decode.generate"}:
            assert abs(part.ns - HEALTHY_S[part.name] * 1e9) <= 3_000
    assert any("about 2 µs" in sentence for sentence in timeline.unknowns)


def test_exact_times_of_another_clock_are_not_mixed_in() -> None:
    def foreign_clock(span: Span) -> Span:
        if span.name != "transfer":
            return span
        moved = {key: int(str(span.attributes[key])) + 10**15 for key in (BEGIN, END)}
        return replace(span, attributes={**span.attributes, **moved})

    timeline = build_timeline(edited(Story().trace(), foreign_clock))
    assert_exact(timeline)
    assert not timeline.exact
    transfer = timeline.part_ns("transfer")
    assert transfer is not None
    assert abs(transfer - 8 * MS) <= 2_000


BEGIN, END = a.BEGIN_NS.key, a.END_NS.key


def edited(trace: Trace, edit: Callable[[Span], Span | None]) -> Trace:
    spans = [changed for span in trace.spans if (changed := edit(span)) is not None]
    return Trace(trace_id=trace.trace_id, spans=tuple(spans))


def without(name: str, story: Story | None = None) -> Trace:
    return edited((story or Story()).trace(), lambda s: None if s.name == name else s)


def changed(name: str, **changes: object) -> Trace:
    def edit(span: Span) -> Span:
        return replace(span, **changes) if span.name == name else span  # type: ignore[arg-type]

    return edited(Story().trace(), edit)


def attributed(name: str, attributes: dict[str, AttrValue], story: Story | None = None) -> Trace:
    def edit(span: Span) -> Span:
        if span.name != name:
            return span
        return replace(span, attributes={**span.attributes, **attributes})

    return edited((story or Story()).trace(), edit)


def kinds(timeline: Timeline) -> list[ViolationKind]:
    return [violation.kind for violation in timeline.violations]


def test_missing_stage_is_listed_and_its_time_unexplained() -> None:
    timeline = build_timeline(without("transfer"))
    assert kinds(timeline) == [ViolationKind.MISSING_STAGE]
    assert timeline.violations[0].stage == "transfer"
    assert timeline.unexplained_ns == 8 * MS
    assert timeline.part_ns("transfer") is None


def test_one_output_token_excuses_everything_after_the_boundary() -> None:
    lengths = {k: v for k, v in HEALTHY_S.items() if k not in {"decode.generate", "transfer"}}
    timeline = build_timeline(Story(lengths_s=lengths, output_tokens=1).trace())
    assert timeline.violations == ()


def test_first_token_hop_may_be_absent() -> None:
    timeline = build_timeline(without("hop.token"))
    assert timeline.violations == ()
    assert timeline.ttft_ns is None


def test_stages_never_reached_are_not_missed() -> None:
    story = Story(outcome=Outcome.TIMED_OUT, ends_in="prefill.queue", reason="deadline")
    timeline = build_timeline(story.trace())
    assert timeline.violations == ()
    assert timeline.outcome is Outcome.TIMED_OUT
    assert timeline.outcome_stage == "prefill.queue"
    assert timeline.part_ns("prefill.compute") is None


def test_stage_in_which_a_request_ended_is_found_without_the_root_saying_so() -> None:
    story = Story(outcome=Outcome.CANCELLED, ends_in="decode.generate")
    trace = edited(
        story.trace(),
        lambda s: replace(
            s, attributes={k: v for k, v in s.attributes.items() if k != a.OUTCOME_STAGE.key}
        ),
    )
    assert build_timeline(trace).outcome_stage == "decode.generate"


def test_lost_root_leaves_a_timeline_that_says_so() -> None:
    timeline = build_timeline(without("chat smol"))
    assert_exact(timeline)
    assert ViolationKind.NO_ROOT in kinds(timeline)
    assert timeline.outcome is None
    assert any("root span is missing" in sentence for sentence in timeline.unknowns)


def test_missing_parent_and_orphan_are_told_apart() -> None:
    timeline = build_timeline(changed("transfer", parent_id="feedfeedfeedfeed"))
    assert kinds(timeline) == [ViolationKind.MISSING_PARENT]
    timeline = build_timeline(changed("transfer", parent_id=None))
    assert kinds(timeline) == [ViolationKind.ORPHAN]


def test_lost_attempt_span_is_told_once_per_child_and_times_stay() -> None:
    timeline = build_timeline(without(ATTEMPT_SPAN))
    assert set(kinds(timeline)) == {ViolationKind.MISSING_PARENT}
    assert timeline.unexplained_ns == 0


def test_cycle_of_parents_is_an_orphan_and_ends() -> None:
    def edit(span: Span) -> Span:
        if span.name == "transfer":
            return replace(span, span_id="cc", parent_id="dd")
        return replace(span, span_id="dd", parent_id="cc") if span.name == "hop.notice" else span

    timeline = build_timeline(edited(Story().trace(), edit))
    assert kinds(timeline) == [ViolationKind.ORPHAN, ViolationKind.ORPHAN]


def test_span_that_ends_before_it_begins_is_negative_and_owns_nothing() -> None:
    def edit(span: Span) -> Span:
        if span.name != "prefill.queue":
            return span
        before = int(str(span.attributes[BEGIN])) - 1 * MS
        return replace(span, attributes={**span.attributes, END: before})

    timeline = build_timeline(edited(Story().trace(), edit))
    assert_exact(timeline)
    assert ViolationKind.NEGATIVE in kinds(timeline)
    assert timeline.part_ns("prefill.queue") == 0
    assert timeline.unexplained_ns == 30 * MS


def shifted(name: str, ns: int) -> Trace:
    def edit(span: Span) -> Span:
        if span.name != name:
            return span
        exact = {key: int(str(span.attributes[key])) + ns for key in (BEGIN, END)}
        return replace(
            span,
            start_ns=span.start_ns + ns,
            end_ns=span.end_ns + ns,
            attributes={**span.attributes, **exact},
        )

    return edited(Story().trace(), edit)


def test_overlap_counts_once_for_the_earlier_stage_and_is_listed() -> None:
    timeline = build_timeline(shifted("prefill.compute", -5 * MS))
    assert_exact(timeline)
    assert kinds(timeline) == [ViolationKind.OVERLAP]
    assert timeline.part_ns("prefill.queue") == 30 * MS
    assert timeline.part_ns("prefill.compute") == 115 * MS
    assert timeline.unexplained_ns == 5 * MS


def test_stage_before_its_predecessor_is_out_of_order_and_keeps_its_time() -> None:
    timeline = build_timeline(shifted("hop.notice", -200 * MS))
    assert_exact(timeline)
    assert ViolationKind.OUT_OF_ORDER in kinds(timeline)


def test_repeated_stage_is_listed() -> None:
    trace = Story().trace()
    again = [replace(s, span_id="ab") for s in trace.spans if s.name == "transfer"]
    timeline = build_timeline(replace(trace, spans=(*trace.spans, *again)))
    assert_exact(timeline)
    assert kinds(timeline) == [ViolationKind.REPEATED]
    assert timeline.part_ns("transfer") == 8 * MS


def test_stage_outside_of_the_request_is_listed() -> None:
    timeline = build_timeline(shifted("gateway.ingest", -2 * MS))
    assert kinds(timeline) == [ViolationKind.OUTSIDE_ROOT]


def test_other_request_ids_are_listed_with_their_service() -> None:
    timeline = build_timeline(attributed("transfer", {a.REQUEST_ID.key: "req-2"}))
    assert kinds(timeline) == [ViolationKind.MIXED_REQUEST_IDS]
    assert "pd-transfer" in timeline.violations[0].message
    assert timeline.request_id == "req-1"


def test_impossible_marks_of_the_assembler_are_passed_on() -> None:
    timeline = build_timeline(attributed("transfer", {a.VIOLATION.key: "recorded twice"}))
    assert kinds(timeline) == [ViolationKind.IMPOSSIBLE_MARKS]
    assert "recorded twice" in timeline.violations[0].message


def test_what_the_recording_lacks_is_told_clause_by_clause() -> None:
    why = "decode-0 lost 123 records; prefill-0 lost 1 records; no completed mark"
    timeline = build_timeline(attributed("chat smol", {a.INCOMPLETE.key: why}))
    assert timeline.lacks == (
        "The recorder of decode-0 lost 123 records while this request was open.",
        "The recorder of prefill-0 lost 1 record while this request was open.",
        "The recording lacks something: no completed mark.",
    )
    assert build_timeline(Story().trace()).lacks == ()


def test_blockers_are_read_as_a_list_or_as_one_text() -> None:
    for listed in (("req-7", "req-8"), "req-7\x1freq-8"):
        attributes: dict[str, AttrValue] = {
            a.WAIT_REASON.key: "kv_pages",
            a.WAIT_BLOCKER.key: "req-7",
            a.WAIT_BLOCKERS.key: listed,
        }
        timeline = build_timeline(Story(waits={"decode.reserve": attributes}).trace())
        [wait] = timeline.visits_of("decode.reserve")[0].waits
        assert (wait.blocker, wait.blockers) == ("req-7", ("req-7", "req-8"))


def test_gap_says_cause_step_and_what_the_cause_explains() -> None:
    gap: dict[str, AttrValue] = {
        a.GAP_CAUSE.key: "interfering_prefill",
        a.GAP_CAUSE_SECONDS.key: 0.15,
        a.STEP_NUMBER.key: 42,
        a.BATCH_SIZE.key: 3,
        a.WAIT_BLOCKER.key: "req-17",
    }
    timeline = build_timeline(Story(gap_s=0.2, waits={"decode.gap": gap}).trace())
    [visit] = timeline.visits_of("decode.gap")
    assert visit.cause is not None
    assert (visit.cause.reason, visit.cause.step, visit.cause.batch) == (
        "interfering_prefill",
        42,
        3,
    )
    assert (visit.cause.explained_ns, visit.cause.blockers) == (150 * MS, ("req-17",))
    assert visit.cause.for_ns == pytest.approx(200 * MS, abs=10_000)


def test_gap_that_outlives_its_request_is_as_long_as_the_request() -> None:
    """The worker stood still, the request was given up, and the token came much later."""
    gap: dict[str, AttrValue] = {a.GAP_CAUSE.key: "process_paused", a.GAP_CAUSE_SECONDS.key: 7.0}
    story = Story(
        gap_s=2.0, waits={"decode.gap": gap}, ends_in="decode.generate", outcome=Outcome.FAILED
    )

    def later(span: Span) -> Span:
        if span.name != "decode.gap":
            return span
        end_ns = span.end_ns + 5_000 * MS
        end = int(str(span.attributes[a.END_NS.key])) + 5_000 * MS
        moved: dict[str, AttrValue] = {a.END_NS.key: end}
        return replace(span, end_ns=end_ns, attributes={**span.attributes, **moved})

    timeline = build_timeline(edited(story.trace(), later))
    [visit] = timeline.visits_of("decode.gap")
    assert visit.end_ns == timeline.total_ns
    assert visit.cause is not None
    assert visit.cause.for_ns == visit.cause.explained_ns == visit.duration_ns
    assert visit.duration_ns == timeline.detail_ns("decode.generate", "decode.gap")
    [line] = gap_lines(timeline)
    assert line.endswith("gap, 100 %")
    assert "7.0" not in line


def test_pause_of_a_process_explains_no_more_than_it_lasted() -> None:
    """It is in force until the stage ends, but the process went on before that."""

    def paused(span: Span) -> Span:
        if span.name != "prefill.compute":
            return span
        told: dict[str, AttrValue] = {a.WAIT_REASON.key: "process_paused", a.WAIT_NEEDED.key: 400}
        event = Event(name="pd.wait", time_ns=span.start_ns + 100 * MS, attributes=told)
        return replace(span, events=(event,), attributes={**span.attributes, **told})

    timeline = build_timeline(edited(Story().stalled("prefill.compute", 2.0).trace(), paused))
    [wait] = timeline.visits_of("prefill.compute")[0].waits
    assert (wait.reason, wait.for_ns) == ("process_paused", 400 * MS)
    assert "stood still for 400 ms" in describe_wait(wait)


def test_pause_that_was_over_when_a_stage_began_explains_nothing_of_it() -> None:
    told: dict[str, AttrValue] = {a.WAIT_REASON.key: "process_paused", a.WAIT_NEEDED.key: 400}

    def paused(span: Span) -> Span:
        if span.name != "hop.dispatch":
            return span
        event = Event(name="pd.wait", time_ns=span.start_ns - 401 * MS, attributes=told)
        return replace(span, events=(event,), attributes={**span.attributes, **told})

    [visit] = build_timeline(edited(Story().trace(), paused)).visits_of("hop.dispatch")
    assert (visit.waits, visit.cause) == ((), None)


def test_steps_attempts_and_stuck_reports_are_read() -> None:
    trace = edited(
        retried(),
        lambda s: (
            replace(
                s,
                attributes={
                    **s.attributes,
                    a.STEPS.key: 7,
                    a.STEP_SLOWEST_NUMBER.key: 3,
                    a.STEP_SLOWEST_SECONDS.key: 0.25,
                },
                events=(
                    Event(
                        name="pd.stuck",
                        time_ns=s.start_ns + 5 * MS,
                        attributes={a.STUCK_SECONDS.key: 0.005, a.STUCK_AFTER_SECONDS.key: 0.004},
                    ),
                ),
            )
            if s.name == "decode.generate"
            else s
        ),
    )
    timeline = build_timeline(trace)
    [steps] = timeline.steps
    assert (steps.stage, steps.count, steps.slowest, steps.slowest_ns) == (
        "decode.generate",
        7,
        3,
        250 * MS,
    )
    [report] = timeline.stuck
    assert (report.stage, report.age_ns, report.threshold_ns) == (
        "decode.generate",
        5 * MS,
        4 * MS,
    )
    generate = timeline.visits_of("decode.generate")[0]
    assert report.at_ns - generate.begin_ns == pytest.approx(5 * MS, abs=2_000)
    assert [one.number for one in timeline.tries] == [1, 2]
    assert timeline.tries[0].prefill_worker == "prefill-0"
    assert timeline.tries[1].begin_ns > timeline.tries[0].begin_ns


def test_several_hosts_are_among_the_unknowns() -> None:
    resource = Resource(attributes={"service.name": "pd-decode", "host.id": "host-b"})
    timeline = build_timeline(changed("decode.generate", resource=resource))
    assert timeline.hosts == {"host-a", "host-b"}
    assert any("2 hosts" in sentence for sentence in timeline.unknowns)


def test_answer_that_is_not_streamed_gives_its_time_to_generation() -> None:
    story = Story(stream=False)
    whole = round(HEALTHY_S["decode.generate"] * 1e9)

    def edit(span: Span) -> Span:
        if span.name != "hop.token":
            return span
        # The first token leaves with the last: its way ends when the answer is written.
        end = int(str(span.attributes[BEGIN])) + whole + 1 * MS
        return replace(span, attributes={**span.attributes, END: end})

    timeline = build_timeline(edited(story.trace(), edit))
    assert_exact(timeline)
    assert timeline.part_ns("decode.generate") == whole
    assert timeline.part_ns("hop.token") == 0
    assert timeline.violations == ()


def test_early_token_may_travel_over_the_transfer() -> None:
    lengths = {**HEALTHY_S, "hop.token": 0.005}
    trace = Story(mode=Mode.PD_EARLY, lengths_s=lengths).trace()

    def edit(span: Span) -> Span:
        if span.name != "hop.token":
            return span
        times = {
            BEGIN: int(str(span.attributes[BEGIN])),
            END: int(str(span.attributes[END])) + 6 * MS,
        }
        return replace(span, attributes={**span.attributes, **times})

    timeline = build_timeline(edited(trace, edit))
    assert_exact(timeline)
    assert timeline.violations == ()
    assert [(o.first, o.second) for o in timeline.overlaps] == [("hop.token", "transfer")]


def test_pauses_are_leaves_of_generation() -> None:
    timeline = build_timeline(Story(gap_s=0.4, preempted_s=0.3).trace())
    assert timeline.detail_ns("decode.generate", "decode.gap") == 400 * MS
    assert timeline.detail_ns("decode.generate", "decode.preempted") == 300 * MS
    assert timeline.detail_ns("decode.generate", "decode.generate") == 699 * MS


def test_transfer_is_shared_out_among_queue_and_copy() -> None:
    timeline = build_timeline(Story().stalled("transfer", 0.292).trace())
    assert timeline.part_ns("transfer") == 300 * MS
    assert timeline.detail_ns("transfer", "transfer.queue") == 100 * MS
    assert timeline.detail_ns("transfer", "transfer.copy") == 200 * MS


def test_attempts_follow_each_other_in_the_partition() -> None:
    timeline = build_timeline(retried())
    assert_exact(timeline)
    assert timeline.attempts == 2
    assert ViolationKind.REPEATED not in kinds(timeline)
    numbers = [s.attempt for s in timeline.segments if s.name == "prefill.compute"]
    assert numbers == [1, 2]
    assert timeline.part_ns("prefill.compute") == 240 * MS


def test_attempt_given_up_late_does_not_take_the_next_ones_time() -> None:
    def edit(span: Span) -> Span:
        if span.name == "transfer" and span.attributes[a.ATTEMPT.key] == 1:
            late = int(str(span.attributes[END])) + 2_000 * MS
            return replace(span, attributes={**span.attributes, END: late})
        return span

    timeline = build_timeline(edited(retried(), edit))
    assert_exact(timeline)
    assert timeline.part_ns("prefill.compute") == 240 * MS
    assert {ViolationKind.OVERLAP, ViolationKind.OUTSIDE_ROOT}.isdisjoint(kinds(timeline))


def test_requests_that_share_a_trace_are_split() -> None:
    shared = "ab" * 16

    def rehomed(story: Story) -> Sequence[Span]:
        return [replace(s, trace_id=shared) for s in story.trace().spans]

    caller = replace(Story().trace().spans[0], name="caller", span_id="ca", parent_id=None)
    spans = (
        *rehomed(Story(request_id="one")),
        *rehomed(Story(request_id="two", start_s=3).stalled("transfer", 1)),
        replace(caller, trace_id=shared, attributes={}),
    )
    timelines = build_timelines([Trace(trace_id=shared, spans=spans)])
    assert [t.request_id for t in timelines] == ["one", "two"]
    assert [t.violations for t in timelines] == [(), ()]
    assert timelines[1].part_ns("transfer") == 1_008 * MS
    assert len({t.key for t in timelines}) == 2


def test_tries_under_one_request_id_in_one_trace_are_split() -> None:
    """A client that tries again sends the same id and its own span's trace."""
    failed = Story(request_id="same", ends_in="transfer", outcome=Outcome.FAILED)
    tries = [story.trace() for story in (failed, Story(request_id="same", start_s=3))]
    shared = [replace(s, trace_id="ab" * 16) for trace in tries for s in trace.spans]
    timelines = build_timelines([Trace(trace_id="ab" * 16, spans=shared)])
    assert [t.outcome for t in timelines] == [Outcome.FAILED, Outcome.COMPLETED]
    assert [t.violations for t in timelines] == [(), ()]
    assert [t.span_count for t in timelines] == [len(trace.spans) for trace in tries]


def test_spans_whose_attempt_is_lost_follow_the_try_that_had_begun() -> None:
    tries = [Story(request_id="same", start_s=start_s).trace() for start_s in (0, 3)]
    shared = [
        replace(s, trace_id="ab" * 16)
        for trace in tries
        for s in trace.spans
        if s.name != "attempt"
    ]
    timelines = build_timelines([Trace(trace_id="ab" * 16, spans=shared)])
    assert [t.span_count for t in timelines] == [len(trace.spans) - 1 for trace in tries]


def test_gateway_behind_a_gateway_is_one_request_with_two_roots() -> None:
    outer, inner = Story().trace(), Story(start_s=0.01).trace()
    dispatch = next(s for s in outer.spans if s.name == "gateway.dispatch")
    root = next(s for s in inner.spans if s.name == "chat smol")
    nested = [
        replace(
            s,
            trace_id=outer.trace_id,
            parent_id=dispatch.span_id if s is root else s.parent_id,
        )
        for s in inner.spans
    ]
    both = replace(outer, spans=(*nested, *outer.spans))
    assert [len(part.spans) for part in split_requests(both)] == [len(both.spans)]
    assert ViolationKind.TWO_ROOTS in kinds(build_timeline(both))


def test_two_roots_of_one_request_stay_together_and_are_a_violation() -> None:
    trace = Story().trace()
    root = next(s for s in trace.spans if s.name == "chat smol")
    doubled = replace(trace, spans=(*trace.spans, replace(root, span_id="aa")))
    assert len(split_requests(doubled)) == 1
    assert kinds(build_timeline(doubled)) == [ViolationKind.TWO_ROOTS]


def test_waits_carry_their_numbers_and_how_long_they_held() -> None:
    waits = {
        "decode.reserve": {
            a.WAIT_REASON.key: "kv_pages",
            a.WAIT_NEEDED.key: 12,
            a.WAIT_FREE.key: 3,
            a.WAIT_BLOCKER.key: "req-9",
        }
    }
    timeline = build_timeline(Story(waits=waits).stalled("decode.reserve", 0.5).trace())
    (wait,) = timeline.visits_of("decode.reserve")[0].waits
    assert (wait.reason, wait.needed, wait.free, wait.blocker) == ("kv_pages", 12, 3, "req-9")
    assert wait.for_ns is not None
    assert abs(wait.for_ns - 502 * MS) < 2_000


def test_cause_is_the_reason_that_the_recorder_names() -> None:
    trace = Story(waits={"prefill.queue": {a.WAIT_REASON.key: "token_budget"}}).trace()

    def edit(span: Span) -> Span:
        if span.name != "prefill.queue":
            return span
        late = Event(
            name="pd.wait",
            time_ns=span.end_ns - 1_000,
            attributes={a.WAIT_REASON.key: "kv_pages", a.WAIT_NEEDED.key: 2},
        )
        return replace(span, events=(*span.events, late))

    (visit,) = build_timeline(edited(trace, edit)).visits_of("prefill.queue")
    assert [wait.reason for wait in visit.waits] == ["token_budget", "kv_pages"]
    assert visit.cause is not None
    assert visit.cause.reason == "token_budget"


def test_tokens_and_times_per_token_come_from_the_trace() -> None:
    timeline = build_timeline(Story().trace())
    before = sum(HEALTHY_S.values()) - HEALTHY_S["decode.generate"] - HEALTHY_S["gateway.finish"]
    assert timeline.ttft_ns == round(before * 1e9)
    assert timeline.tpot_ns == pytest.approx(HEALTHY_S["decode.generate"] * 1e9 / 31)
    assert (timeline.prompt_tokens, timeline.output_tokens) == (100, 32)
    assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")


def test_large_traces_take_linear_time() -> None:
    story = Story()
    trace = story.trace()
    transfer = next(s for s in trace.spans if s.name == "transfer.copy")
    many = [
        replace(transfer, span_id=f"{index:016x}", attributes={**transfer.attributes})
        for index in range(50_000)
    ]
    timeline = build_timeline(replace(trace, spans=(*trace.spans, *many)))
    assert_exact(timeline)


@pytest.mark.case("CLK-01")
@pytest.mark.parametrize("name", ["decode.reserve", "attempt", "chat smol"])
def test_span_with_monotonic_times_is_flagged_and_distorts_nothing(name: str) -> None:
    sound = Story(exact=False).trace()
    stray = tuple(
        replace(span, start_ns=41_234_567_890_123, end_ns=41_234_569_890_123)
        if span.name == name
        else span
        for span in sound.spans
    )
    timeline = build_timeline(Trace(trace_id=sound.trace_id, spans=stray))
    assert all("no Unix times" in violation.message for violation in timeline.violations)
    assert {v.kind for v in timeline.violations} == {ViolationKind.BAD_CLOCK}
    expected = build_timeline(sound)
    assert timeline.total_ns == pytest.approx(expected.total_ns, abs=10_000)
    assert timeline.started_unix_ns == pytest.approx(expected.started_unix_ns, abs=10_000)
    if name == "decode.reserve":
        assert timeline.unexplained_ns == pytest.approx(2_000_000, abs=10_000)
        assert "1 span has no wall time, and no say here." in timeline.unknowns


@pytest.mark.case("CLK-01")
def test_trace_wholly_on_monotonic_time_keeps_its_parts_and_is_flagged() -> None:
    sound = Story(exact=False).trace()
    shift = sound.spans[0].start_ns - 41_234_567_890_000
    shifted = tuple(
        replace(span, start_ns=span.start_ns - shift, end_ns=span.end_ns - shift)
        for span in sound.spans
    )
    timeline = build_timeline(Trace(trace_id=sound.trace_id, spans=shifted))
    assert timeline.parts == build_timeline(sound).parts
    assert {v.kind for v in timeline.violations} == {ViolationKind.BAD_CLOCK}
