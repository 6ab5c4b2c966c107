"""Goodput: who counts, limits to the nanosecond, what is not known, what is to blame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.analysis.goodput import Attainment, Choice, GapForm, SloReport, measure
from pdtrace.analysis.objectives import Aim, Gaps, Held, gaps_of
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.gaps import GapCount
from pdtrace.slo import Slo, with_target
from pdtrace.spans import AttrValue, Trace
from pdtrace.stages import Outcome
from pdtrace.terminal.slo_view import share_text, strip_of
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, WALL_NS, Story, retried

MS = 1_000_000
SLO = Slo(ttft_s=0.5, token_gap_s=0.2, ttft_objective=0.9, token_gap_objective=0.9)
TTFT_MS = 1e3 * sum(
    s for name, s in HEALTHY_S.items() if name not in {"decode.generate", "gateway.finish"}
)


def timeline(
    story: Story | Trace, root: Mapping[str, AttrValue | None] | None = None, **fields: object
) -> Timeline:
    """A story's timeline; `root` changes attributes of its root span (None: absent)."""
    trace = story.trace() if isinstance(story, Story) else story
    spans = [
        replace(
            span,
            attributes={
                key: value
                for key, value in {**span.attributes, **(root or {})}.items()
                if value is not None
            },
        )
        if a.SPAN.key in span.attributes and span.attributes[a.SPAN.key] == "request"
        else span
        for span in trace.spans
    ]
    found = build_timeline(Trace(trace_id=trace.trace_id, spans=spans))
    return replace(found, **fields) if fields else found


def gaps(count: int, longest_s: float | None) -> dict[str, AttrValue | None]:
    """As a gateway records them."""
    return {a.CONTENT_GAPS.key: count, a.LONGEST_GAP_SECONDS.key: longest_s}


SHORT_GAPS = gaps(31, 0.05)


def request(number: int, **more: object) -> Timeline:
    """A plain request that keeps everything."""
    story = Story(request_id=f"ok-{number}", start_s=float(number))
    return timeline(story, SHORT_GAPS, **more)


def kept(report: SloReport, aim: Aim) -> Attainment:
    return next(one for one in report.total.attainments if one.aim is aim)


def counts(report: SloReport, aim: Aim) -> tuple[int, int, int]:
    one = kept(report, aim)
    return one.counted, one.kept_least, one.kept_most


# -- limits ---------------------------------------------------------------------------------------


def test_limit_itself_is_kept_and_a_nanosecond_more_is_not() -> None:
    for over, held in ((0, 1), (1, 0)):
        at = [request(0, ttft_ns=500 * MS + over)]
        assert counts(measure(at, SLO), Aim.TTFT) == (1, held, held)
        long = [request(0, total_ns=2_000 * MS + over)]
        slo = Slo(ttft_s=9, e2e_s=2.0)
        assert counts(measure(long, slo), Aim.E2E) == (1, held, held)
    for longest, held in ((0.2, 31), (0.200000001, 30)):
        gap = [timeline(Story(), gaps(31, longest))]
        least = counts(measure(gap, SLO), Aim.TOKEN_GAP)[2]
        assert least == held


def test_share_that_is_just_the_target_meets_it() -> None:
    """Whatever binary fractions make of 0.9, 0.99 and 0.999."""
    for target, requests in ((0.9, 10), (0.99, 100), (0.999, 1000), (0.68, 25)):
        missed = round((1 - target) * requests)
        of = [request(0)] * (requests - missed) + [request(0, ttft_ns=10**10)] * missed
        report = measure(of, Slo(ttft_objective=target), aims=[Aim.TTFT])
        assert kept(report, Aim.TTFT).met is True
        worse = measure([*of[1:], of[-1]], Slo(ttft_objective=target), aims=[Aim.TTFT])
        assert kept(worse, Aim.TTFT).met is False


def test_share_shown_is_never_rounded_up_to_the_target() -> None:
    assert share_text(0.98999, 0.98999) == "98.99 %"
    assert share_text(0.9, 0.99) == "90.00 to 99.00 %"
    assert share_text(1.0, 1.0) == "100.00 %"
    assert share_text(0.29, 0.29) == "29.00 %"
    assert share_text(None, None) == ""


# -- who counts -----------------------------------------------------------------------------------


def test_nothing_at_all() -> None:
    report = measure([], SLO)
    assert (report.total.requests, report.total.good_most, report.total.ok) == (0, 0, False)
    assert [one.met for one in report.total.attainments] == [None, None, None]
    assert report.total.per_second(1) is None
    assert report.sentence == "0 of 0 requests were good."
    json.dumps(report.document(), allow_nan=False)


def test_requests_that_do_not_stream_have_no_first_token_and_no_gaps_to_judge() -> None:
    report = measure([timeline(Story(stream=False)), timeline(Story(start_s=1, stream=False))], SLO)
    assert counts(report, Aim.TTFT) == counts(report, Aim.TOKEN_GAP) == (0, 0, 0)
    assert [kept(report, aim).met for aim in (Aim.TTFT, Aim.TOKEN_GAP)] == [None, None]
    assert (report.total.good_least, report.total.good_most, report.total.ok) == (2, 2, True)


@pytest.mark.parametrize(
    ("outcome", "counted", "good"),
    [
        (Outcome.COMPLETED, (1, 1, 1), 1),
        (Outcome.FAILED, (1, 0, 0), 0),
        (Outcome.TIMED_OUT, (1, 0, 0), 0),
        (Outcome.LOST, (1, 0, 0), 0),
        (Outcome.REJECTED, (0, 0, 0), 0),
        (Outcome.CANCELLED, (0, 0, 0), 0),
    ],
)
def test_what_ended_how(outcome: Outcome, counted: tuple[int, int, int], good: int) -> None:
    """Each of them is in the rate beside goodput."""
    report = measure([timeline(Story(), {**SHORT_GAPS, a.OUTCOME.key: outcome.value})], SLO)
    assert counts(report, Aim.ERRORS) == counted
    assert (report.total.requests, report.total.good_least) == (1, good)
    assert report.outcomes == {outcome.value: 1}


def test_goodput_counts_per_second_from_the_first_begin_to_the_last_end() -> None:
    ended_badly = timeline(
        Story(request_id="f", start_s=3, ends_in="prefill.queue", outcome=Outcome.FAILED)
    )
    report = measure([request(0), request(4), ended_badly], SLO)
    total = report.total
    seconds = 4 + request(4).total_ns / 1e9
    assert total.seconds == pytest.approx(seconds, abs=1e-5)
    assert (total.requests, total.good_least, total.good_most) == (3, 2, 2)
    assert total.per_second(total.good_least) == pytest.approx(2 / seconds, rel=1e-5)
    assert (total.tokens, total.tokens_unknown) == (64, 0)
    assert report.sentence.startswith("2 of 3 requests were good: goodput 0.4")


def test_stream_that_ended_before_its_first_token_is_told_beside_ttft() -> None:
    def left(seconds: float) -> Timeline:
        lengths = {**HEALTHY_S, "prefill.queue": seconds}
        story = Story(lengths_s=lengths, ends_in="prefill.queue", outcome=Outcome.CANCELLED)
        return timeline(replace(story, start_s=seconds))

    report = measure([left(0.1), left(2.0), request(9)], SLO)
    assert counts(report, Aim.TTFT) == (1, 1, 1)
    assert report.cut_off == (2, 1)
    refused = {a.OUTCOME.key: "rejected", a.STREAM.key: None}
    assert measure([timeline(left_story(), refused)], SLO).cut_off == (0, 0)


def left_story() -> Story:
    return Story(ends_in="gateway.ingest", outcome=Outcome.REJECTED)


def test_request_in_flight_and_request_without_a_root_are_counted_apart() -> None:
    rootless = [span for span in Story().trace().spans if span.name != "chat smol"]
    lost_root = build_timeline(Trace(trace_id=rootless[0].trace_id, spans=rootless))
    report = measure([request(0), request(1, open=True), lost_root], SLO, in_flight=3)
    assert (report.total.requests, report.open, report.rootless) == (1, 4, 1)


def test_request_whose_outcome_was_not_recorded_may_be_good() -> None:
    report = measure([request(0, outcome=None)], SLO)
    assert (report.total.good_least, report.total.good_most) == (0, 1)
    assert counts(report, Aim.ERRORS) == (1, 0, 1)
    assert kept(report, Aim.ERRORS).met is None
    assert not report.total.ok
    assert report.outcomes == {"unknown": 1}


def test_retried_request_counts_once_with_all_its_time() -> None:
    again = timeline(retried(), SHORT_GAPS)
    report = measure([again], Slo(ttft_s=0.5))
    assert (report.total.requests, report.retried, report.total.good_least) == (1, 1, 0)
    assert counts(report, Aim.TTFT) == (1, 0, 0)  # from the first byte, not from the last try


def test_choice_of_model_and_time() -> None:
    def of(model: str | None, number: int) -> Timeline:
        return timeline(
            Story(request_id=f"r{number}", start_s=number),
            {**SHORT_GAPS, a.REQUEST_MODEL.key: model},
        )

    found = [of("small", 0), of("small", 5), of("large", 7), of(None, 9)]
    report = measure(found, SLO)
    assert {name: one.requests for name, one in report.models.items()} == {
        "(not recorded)": 1,
        "large": 1,
        "small": 2,
    }
    assert measure(found[:2], SLO).models == {}
    assert measure(found, SLO, choice=Choice(model="small")).total.requests == 2
    five = WALL_NS + 5 * 10**9
    assert measure(found, SLO, choice=Choice(since_ns=five)).total.requests == 3
    assert measure(found, SLO, choice=Choice(since_ns=five, until_ns=five)).total.requests == 1
    assert (
        measure(found, SLO, choice=Choice(since_ns=five + 1, until_ns=five + 2)).total.ok is False
    )


def test_only_what_is_promised_is_judged() -> None:
    report = measure([request(0)], SLO)
    assert [one.aim for one in report.total.attainments] == [Aim.TTFT, Aim.TOKEN_GAP, Aim.ERRORS]
    report = measure([request(0, ttft_ns=10**10)], Slo(e2e_s=60.0), aims=[Aim.E2E, Aim.ERRORS])
    assert [one.aim for one in report.total.attainments] == [Aim.ERRORS, Aim.E2E]
    assert report.total.good_least == 1
    assert report.goods == "A request is good if it completed and it took at most 60.0 s."


# -- gaps -----------------------------------------------------------------------------------------


def test_two_forms_of_a_promise_on_gaps_differ() -> None:
    """One long gap in each of two of three streams: two of 93 gaps, two of three streams."""
    found = [timeline(Story(start_s=n), gaps(31, s)) for n, s in enumerate((0.5, 0.6, 0.01))]
    pooled = measure(found, SLO, gap_form=GapForm.POOLED)
    streams = measure(found, SLO, gap_form=GapForm.REQUESTS)
    assert counts(streams, Aim.TOKEN_GAP) == (3, 1, 1)
    assert kept(streams, Aim.TOKEN_GAP).met is False
    of, least, most = counts(pooled, Aim.TOKEN_GAP)
    assert (of, most) == (93, 91)
    assert least <= most
    assert kept(pooled, Aim.TOKEN_GAP).met is True
    assert kept(pooled, Aim.TOKEN_GAP).promise == (
        "the 90th percentile of pooled gaps between tokens is at most 200 ms"
    )
    assert kept(streams, Aim.TOKEN_GAP).promise == (
        "every gap between tokens is at most 200 ms in 90 % of streams"
    )
    # Goodput is about requests in either form.
    assert pooled.total.good_least == streams.total.good_least == 1


def test_gateways_word_is_exact_and_one_write_has_no_gap() -> None:
    found = gaps_of(timeline(Story(), gaps(5, 0.25)))
    assert found is not None
    assert (found.count, found.least_ns, found.most_ns, found.exact) == (
        5,
        250 * MS,
        250 * MS,
        True,
    )
    assert gaps_of(timeline(Story(), gaps(0, None))) is None
    assert gaps_of(timeline(Story(stream=False), gaps(5, 0.25))) is None


def test_without_the_gateways_word_the_worker_bounds_it() -> None:
    """Generation took 0.7 s: no gap is longer. Gaps above the worker's threshold are spans."""
    plain = gaps_of(timeline(Story()))
    assert plain is not None
    assert (plain.count, plain.least_ns, plain.exact) == (31, 0, False)
    assert plain.most_ns == pytest.approx(700 * MS, abs=5_000)
    assert [plain.held(limit * MS) for limit in (200, 699, 701)] == [
        Held.UNKNOWN,
        Held.UNKNOWN,
        Held.KEPT,
    ]
    paused = gaps_of(timeline(Story().stalled("decode.gap", 2.0)))
    assert paused is not None
    assert paused.least_ns == paused.most_ns == pytest.approx(2_000 * MS, abs=5_000)
    assert paused.held(200 * MS) is Held.MISSED
    short = gaps_of(timeline(Story().stalled("decode.gap", 0.3)))
    assert short is not None
    assert (short.held(250 * MS), short.held(400 * MS)) == (Held.MISSED, Held.UNKNOWN)
    assert gaps_of(timeline(Story(output_tokens=1))) is None


def test_unknown_gaps_leave_a_range_and_no_verdict() -> None:
    report = measure([timeline(Story(start_s=n)) for n in range(3)], SLO)
    of, least, most = counts(report, Aim.TOKEN_GAP)
    assert (of, most) == (93, 93)
    assert least == 93 - 3 * 3  # 0.7 s have room for three gaps of more than 0.2 s
    assert (report.total.good_least, report.total.good_most) == (0, 3)
    assert report.seen_late == 3
    tight = replace(SLO, token_gap_objective=0.95)
    assert kept(measure([timeline(Story())], tight), Aim.TOKEN_GAP).met is None
    assert not measure([timeline(Story())], tight).total.ok


def test_streams_whose_gaps_nobody_counted_leave_a_pooled_share_open() -> None:
    unknown = timeline(Story().stalled("decode.gap", 2.0), output_tokens=None)
    one = kept(measure([request(0), unknown], SLO), Aim.TOKEN_GAP)
    assert (one.counted, one.uncounted, one.met) == (31, 1, None)
    streams = measure([request(0), unknown], SLO, gap_form=GapForm.REQUESTS)
    assert counts(streams, Aim.TOKEN_GAP) == (2, 1, 1)


def test_counts_by_length_make_a_pooled_share_exact() -> None:
    counted = {**gaps(31, 0.45), a.GAP_COUNTS.key: "0.025-0.05:20 0.15-0.2:8 0.3-0.5:3"}
    found = [timeline(Story(), counted), timeline(Story(start_s=1), SHORT_GAPS)]
    assert counts(measure(found, SLO), Aim.TOKEN_GAP) == (62, 59, 59)
    # Between two edges, one bucket may lie on either side.
    assert counts(measure(found, replace(SLO, token_gap_s=0.17)), Aim.TOKEN_GAP) == (62, 51, 59)
    assert counts(measure(found, replace(SLO, token_gap_s=0.4)), Aim.TOKEN_GAP) == (62, 59, 61)
    # A text that was cut, or is none, is passed over.
    for odd in ("0.025-0.05:20 0.15-0", "0.025-0.05:20", "many", "0.5-0.3:31", "-:31"):
        broken = [timeline(Story(), {**counted, a.GAP_COUNTS.key: odd}), found[1]]
        # One is longer for certain; 0.7 s have room for another one.
        assert counts(measure(broken, SLO), Aim.TOKEN_GAP) == (62, 60, 61)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.integers(1, 10**9))
def test_bounds_hold_for_any_gaps(lengths: Sequence[int], limit: int) -> None:
    known = Gaps(
        count=len(lengths),
        least_ns=max(lengths),
        most_ns=max(lengths),
        within_ns=sum(lengths),
        exact=True,
    )
    least, most = known.longer(limit)
    assert least <= sum(length > limit for length in lengths) <= most <= len(lengths)
    assert known.held(limit) is (Held.MISSED if max(lengths) > limit else Held.KEPT)
    threshold = limit // 2
    told = [length for length in lengths if length > threshold]
    worker = Gaps(
        count=len(lengths),
        least_ns=max(told, default=0),
        most_ns=max([sum(lengths) - sum(told), *told]),
        within_ns=sum(lengths),
        exact=False,
    )
    least, most = worker.longer(limit)
    assert least <= sum(length > limit for length in lengths) <= most


# -- blame ----------------------------------------------------------------------------------------


def peers() -> list[Timeline]:
    return [request(number) for number in range(8)]


@pytest.mark.parametrize("stage", ["gateway.queue", "decode.reserve", "prefill.queue", "hop.token"])
def test_late_first_token_is_blamed_on_the_stage_with_the_excess(stage: str) -> None:
    late = timeline(Story(request_id="late", start_s=20).stalled(stage, 2.0), SHORT_GAPS)
    report = measure([*peers(), late], SLO)
    [blamed] = report.blamed
    assert (blamed.aim, blamed.stage, blamed.count) == (Aim.TTFT, stage, 1)
    assert (blamed.judged, blamed.met_at_median) == (1, 1)
    [miss] = report.worst
    assert miss.timeline.request_id == "late"
    assert miss.without_ns == pytest.approx(TTFT_MS * MS, rel=0.01)
    assert miss.usual_ns == pytest.approx(HEALTHY_S[stage] * 1e9, rel=0.01)
    assert "At its median this request would have met the limit." in miss.sentence


def test_slow_generation_is_not_blamed_for_a_late_first_token() -> None:
    story = Story(start_s=20).stalled("decode.generate", 30.0).stalled("prefill.queue", 1.0)
    [miss] = measure([*peers(), timeline(story, SHORT_GAPS)], SLO).worst
    assert (miss.aim, miss.stage) == (Aim.TTFT, "prefill.queue")


def test_median_that_is_itself_too_slow_is_told() -> None:
    """Where all are slow nobody stands out, and the longest stage is named."""
    slow = [
        timeline(Story(request_id=f"s{n}", start_s=n).stalled("prefill.compute", 2.0), SHORT_GAPS)
        for n in range(6)
    ]
    report = measure(slow, SLO)
    [blamed] = report.blamed
    assert (blamed.stage, blamed.count, blamed.judged, blamed.met_at_median) == (
        "prefill.compute",
        6,
        6,
        0,
    )
    assert "would have missed it as well" in report.worst[0].sentence


def test_without_peers_the_longest_stage_is_named_and_nothing_claimed() -> None:
    alone = timeline(Story().stalled("transfer", 3.0), SHORT_GAPS)
    [miss] = measure([alone], SLO).worst
    assert (miss.stage, miss.usual_ns, miss.would_meet) == ("transfer", None, None)
    assert "median" not in miss.sentence


def test_time_that_no_stage_covers_is_named_as_that() -> None:
    lengths = {**HEALTHY_S, "prefill.queue": 3.0}
    trace = Story(request_id="torn", start_s=20, lengths_s=lengths).trace()
    torn = Trace(
        trace_id=trace.trace_id, spans=[s for s in trace.spans if s.name != "prefill.queue"]
    )
    [miss] = measure([*peers(), timeline(torn, SHORT_GAPS)], SLO).worst
    assert (miss.stage, miss.would_meet) == ("unexplained", None)
    assert "no stage covers" in miss.sentence


def test_long_gap_is_blamed_on_the_pause_that_the_worker_recorded() -> None:
    waits = {"decode.gap": {a.GAP_CAUSE.key: "prefill", a.WAIT_BLOCKER.key: "big"}}
    for stage in ("decode.gap", "decode.preempted"):
        story = Story(request_id="paused", start_s=20, waits=waits).stalled(stage, 1.5)
        for counted, would_meet in (
            ("0.02-0.03:30 1.25-1.75:1", True),
            ("0.02-0.03:28 0.2-0.3:2 1.25-1.75:1", False),
            ("0.02-0.03:28 0.15-0.3:2 1.25-1.75:1", None),
            (None, None),
        ):
            told = {**gaps(31, 1.55), a.GAP_COUNTS.key: counted}
            [miss] = measure([*peers(), timeline(story, told)], SLO).worst
            assert (miss.aim, miss.stage, miss.would_meet) == (Aim.TOKEN_GAP, stage, would_meet)
        [alone] = measure([timeline(story, told)], SLO).worst
        assert alone.would_meet is None
    # What only the gateway saw has no pause to blame, a short one least of all.
    for pause_s, longest_s in ((0.0, 1.5), (0.3, 4.0)):
        story = Story(request_id="late", start_s=20, gap_s=pause_s)
        [miss] = measure([*peers(), timeline(story, gaps(31, longest_s))], SLO).worst
        assert (miss.stage, miss.would_meet) == ("decode.generate", None)


def test_error_is_blamed_on_the_stage_it_ended_in() -> None:
    failed = Story(
        request_id="f", start_s=20, ends_in="transfer", outcome=Outcome.FAILED, reason="copy_failed"
    )
    report = measure([*peers(), timeline(failed)], SLO)
    [blamed] = report.blamed
    assert (blamed.aim, blamed.stage, blamed.judged) == (Aim.ERRORS, "transfer", 0)
    assert report.worst[0].sentence.startswith("f: failed in transfer after ")
    assert "(copy_failed)" in report.worst[0].sentence


def test_length_is_blamed_on_the_largest_excess_of_all() -> None:
    slow = timeline(
        Story(request_id="slow", start_s=20).stalled("decode.generate", 9.0), SHORT_GAPS
    )
    [miss] = measure([*peers(), slow], Slo(e2e_s=2.0), aims=[Aim.E2E]).worst
    assert (miss.aim, miss.stage, miss.would_meet) == (Aim.E2E, "decode.generate", True)


def test_worst_come_first_and_as_many_as_asked_for() -> None:
    late = [
        timeline(Story(request_id=f"l{n}", start_s=20 + n).stalled("hop.token", n), SHORT_GAPS)
        for n in (2, 5, 3)
    ]
    report = measure([*peers(), *late], SLO, worst=2)
    assert [miss.timeline.request_id for miss in report.worst] == ["l5", "l3"]
    assert report.blamed[0].count == 3
    assert measure([*peers(), *late], SLO, worst=0).worst == ()


# -- settings and drawing -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("ttft=0.95", {"ttft_objective": 0.95}),
        ("errors=99.9%", {"error_objective": 0.999}),
        ("token_gap = 50 %", {"token_gap_objective": 0.5}),
        (
            "0.8",
            {"ttft_objective": 0.8, "token_gap_objective": 0.8, "e2e_objective": 0.8},
        ),
    ],
)
def test_targets(text: str, changed: Mapping[str, float]) -> None:
    assert with_target(Slo(), text) == Slo(**changed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("speed=0.9", "'speed' is no objective; there are ttft, token_gap, errors, e2e"),
        ("ttft=fast", "'ttft=fast' is no target"),
        ("", "'' is no target"),
        ("ttft=%", "is no target"),
        ("ttft=1.5", "ttft_objective is 1.5; it must be a share between 0 and 1"),
        ("100%", "must be a share between 0 and 1"),
        ("ttft=nan", "ttft_objective is nan"),
    ],
)
def test_targets_that_make_no_sense(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        with_target(Slo(), text)


def test_limit_on_the_whole_length_is_optional_and_checked() -> None:
    assert Slo().e2e_s is None
    with pytest.raises(ValueError, match=r"e2e_s is 0\.0"):
        Slo(e2e_s=0.0)


@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=60),
    st.integers(1, 10**12),
    st.integers(12, 48),
)
def test_drawing_keeps_the_limit_between_bins(values: list[int], limit: int, bins: int) -> None:
    drawn, below = strip_of(sorted(values), limit, bins, "12345678")
    assert len(drawn) == bins
    assert 1 <= below <= bins - 1
    assert bool(drawn[:below].strip()) == any(value <= limit for value in values)
    assert bool(drawn[below:].strip()) == any(value > limit for value in values)


def test_limit_just_below_an_edge_leaves_that_bucket_open() -> None:
    counts = (GapCount(150_000_000, 200_000_000, 5), GapCount(200_000_000, 300_000_000, 1))
    gaps = Gaps(
        count=6,
        least_ns=250_000_000,
        most_ns=250_000_000,
        within_ns=2 * 10**9,
        exact=True,
        counts=counts,
    )
    assert gaps.longer(200_000_000) == (1, 1)
    assert gaps.longer(199_999_500) == (1, 6)
