"""An injected stall is blamed on its own stage, healthy requests are not, and the words say why."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.analysis.baselines import Baselines, RollingBaselines
from pdtrace.analysis.sources import Trace
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.analysis.verdict import (
    Confidence,
    Verdict,
    VerdictKind,
    VerdictPolicy,
    judge,
    judge_all,
    stall_attributes,
)
from pdtrace.spans import AttrValue, Event, Span
from pdtrace.stages import ATTEMPT_SPAN, CHAINS, STAGES, Mode, Outcome
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, Story, noisy, retried

STALL_S = 2.0


def healthy(mode: Mode = Mode.PD, count: int = 20, seed: int = 1) -> list[Story]:
    rng = random.Random(f"{seed}/{mode.value}")
    return [noisy(f"req-{index}", rng, mode) for index in range(count)]


def judged(stories: list[Story]) -> list[tuple[Timeline, Verdict]]:
    timelines = [build_timeline(story.trace()) for story in stories]
    return list(zip(timelines, judge_all(timelines), strict=True))


CASES = [
    (mode, name)
    for mode, chain in CHAINS.items()
    for name in [*(stage.name for stage in chain), "decode.gap", "decode.preempted"]
]


@pytest.mark.parametrize(("mode", "stage"), CASES)
def test_stall_is_blamed_on_its_own_stage_and_on_nobody_else(mode: Mode, stage: str) -> None:
    stories = healthy(mode)
    stories[7] = stories[7].stalled(stage, STALL_S)
    blamed = {
        timeline.request_id: verdict.stage
        for timeline, verdict in judged(stories)
        if verdict.kind is VerdictKind.STALLED
    }
    assert blamed == {"req-7": stage}


@pytest.mark.parametrize("seed", range(15))
def test_healthy_noisy_requests_are_not_blamed(seed: int) -> None:
    verdicts = [verdict for _, verdict in judged(healthy(seed=seed, count=40))]
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.HEALTHY}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(CASES[:18]), min_size=3, max_size=6), st.integers(0, 1_000))
def test_several_stalls_in_one_recording_are_each_blamed(
    stalls: list[tuple[Mode, str]], seed: int
) -> None:
    stories = healthy(count=40, seed=seed)
    expected: dict[str, str] = {}
    for index, (_, stage) in enumerate(stalls):
        stories[index * 6] = stories[index * 6].stalled(stage, 3.0)
        expected[f"req-{index * 6}"] = stage
    blamed = {
        timeline.request_id: verdict.stage
        for timeline, verdict in judged(stories)
        if verdict.stalled
    }
    assert blamed == expected


def test_second_stall_of_a_request_is_told() -> None:
    slow = Story(request_id="slow").stalled("transfer", 2.0).stalled("decode.queue", 1.5)
    _, verdict = judged([*healthy(), slow])[-1]
    assert verdict.stage == "transfer"
    assert " Besides, decode.queue took 1.50 s instead of the usual" in verdict.sentence


def test_wait_that_all_share_is_told_with_its_cause() -> None:
    waits = {"prefill.queue": {a.WAIT_REASON.key: "token_budget"}}
    stories = [replace(story, waits=waits).stalled("prefill.queue", 5.0) for story in healthy()]
    for timeline, verdict in judged(stories):
        assert verdict.kind is VerdictKind.HEALTHY
        assert f"{timeline.request_id} is not stalled" in verdict.sentence
        assert verdict.stage == "prefill.queue"
        assert verdict.sentence.endswith("Other requests wait there as long.")
        assert verdict.cause is not None
        assert verdict.cause[1:] in verdict.sentence


def test_short_wait_that_others_do_not_have_is_not_said_to_be_usual() -> None:
    lengths = {**HEALTHY_S, "decode.generate": 0.05, "decode.queue": 0.2}
    odd = Story(request_id="odd", lengths_s=lengths, output_tokens=2)
    _, verdict = judged([*healthy(), odd])[-1]
    assert (verdict.kind, verdict.stage) == (VerdictKind.HEALTHY, "decode.queue")
    assert "Other requests" not in verdict.sentence


@pytest.mark.parametrize("peers", [20, 80])
def test_far_larger_prompt_than_any_peers_is_judged_with_doubt(peers: int) -> None:
    """The line through token counts knows nothing of what grows with their square."""
    stories = healthy(count=peers)
    lengths = {**HEALTHY_S, "prefill.compute": 60.0}
    huge = Story(request_id="huge", prompt_tokens=16_000, lengths_s=lengths)
    timelines = [build_timeline(story.trace()) for story in (*stories, huge)]
    verdict = judge_all(timelines)[-1]
    assert verdict.stage == "prefill.compute"
    assert verdict.confidence is Confidence.LOW
    assert "No other request has half as many tokens" in " ".join(verdict.notes)
    assert stall_attributes(verdict) == {}
    second = Story(request_id="too", prompt_tokens=12_000, lengths_s=lengths, start_s=1)
    timelines.append(build_timeline(second.trace()))
    assert judge_all(timelines)[-2].confidence is Confidence.HIGH
    rolling = RollingBaselines(window=128)
    for timeline in timelines[:-2]:
        rolling.add(timeline)
    assert judge(timelines[-2], rolling).confidence is Confidence.LOW


def stalled_verdict(stage: str, waits: dict[str, AttrValue] | None = None) -> Verdict:
    stories = healthy()
    slow = replace(Story(request_id="slow"), waits={stage: waits} if waits else {})
    return judged([*stories, slow.stalled(stage, STALL_S)])[-1][1]


def test_sentence_names_stage_excess_cause_and_what_would_have_been() -> None:
    verdict = stalled_verdict(
        "decode.reserve",
        {a.WAIT_REASON.key: "kv_pages", a.WAIT_NEEDED.key: 12, a.WAIT_FREE.key: 3},
    )
    assert verdict.sentence == (
        "slow stalled in decode.reserve: 2.00 s instead of the usual 4.37 ms; "
        "the excess is 69 % of the request. Needed 12 KV pages, 3 free. "
        "Without this excess it would have taken 881 ms instead of 2.88 s."
    )
    assert verdict.cause == "needed 12 KV pages, 3 free"
    assert verdict.confidence is Confidence.HIGH
    assert verdict.advice is not None


def test_excess_share_and_counterfactual_agree() -> None:
    stories = [*healthy(), Story(request_id="slow").stalled("transfer", STALL_S)]
    timeline, verdict = judged(stories)[-1]
    assert verdict.excess_ns is not None
    assert verdict.usual_ns is not None
    assert verdict.excess_ns == verdict.stage_ns - verdict.usual_ns
    assert verdict.share == verdict.excess_ns / timeline.total_ns
    assert verdict.counterfactual_ns == timeline.total_ns - verdict.excess_ns


def test_transfer_keeps_the_blame_and_names_its_part() -> None:
    verdict = stalled_verdict("transfer")
    assert (verdict.stage, verdict.detail) == ("transfer", "transfer.copy")
    assert "transfer (mostly transfer.copy)" in verdict.sentence


def test_pause_is_blamed_in_place_of_generation() -> None:
    verdict = stalled_verdict("decode.gap", {a.WAIT_REASON.key: "worker_busy"})
    assert (verdict.stage, verdict.chain_stage) == ("decode.gap", "decode.generate")
    assert verdict.wait is not None
    assert verdict.wait.reason == "worker_busy"
    assert "where others have none" in verdict.sentence


@pytest.mark.parametrize(
    ("stage", "reason", "advice"),
    [
        ("decode.reserve", "process_paused", "Look for who stopped it"),
        ("gateway.route", "no_worker", "Look which workers are dead"),
        ("decode.reserve", "kv_pages", "Decode KV is full"),
    ],
)
def test_what_to_do_follows_from_the_reason_where_it_says_more_than_the_stage(
    stage: str, reason: str, advice: str
) -> None:
    verdict = stalled_verdict(stage, {a.WAIT_REASON.key: reason, a.WAIT_NEEDED.key: 1})
    assert (verdict.stage, verdict.wait and verdict.wait.reason) == (stage, reason)
    assert (verdict.advice or "").startswith(advice)


@pytest.mark.parametrize(("paused_ms", "reason"), [(300, "copy_queue"), (1_900, "process_paused")])
def test_cause_is_what_held_longest_also_where_a_nested_stage_tells(
    paused_ms: int, reason: str
) -> None:
    """A transfer that waited 2 s behind others is not explained by a short pause."""
    trace = Story(request_id="slow").stalled("transfer", STALL_S).trace()

    def waited(span: Span) -> Span:
        told: dict[str, dict[str, AttrValue]] = {
            "transfer": {a.WAIT_REASON.key: "process_paused", a.WAIT_NEEDED.key: paused_ms},
            "transfer.copy": {a.WAIT_REASON.key: "copy_queue"},
        }
        if span.name not in told:
            return span
        late_ns = 1_000_000 if span.name == "transfer" else (span.end_ns - span.start_ns) // 4
        event = Event(name="pd.wait", time_ns=span.start_ns + late_ns, attributes=told[span.name])
        attributes = {**span.attributes, **told[span.name]}
        return replace(span, events=(event,), attributes=attributes)

    timelines = [build_timeline(story.trace()) for story in healthy()]
    timelines.append(
        build_timeline(replace(trace, spans=tuple(waited(span) for span in trace.spans)))
    )
    verdict = judge_all(timelines)[-1]
    assert verdict.stage == "transfer"
    assert verdict.wait is not None
    assert verdict.wait.reason == reason


def test_reason_may_come_from_the_other_side_of_the_handshake() -> None:
    stories = healthy()
    slow = Story(request_id="slow").stalled("decode.reserve", STALL_S)
    trace = slow.trace()
    spans = tuple(
        replace(s, attributes={**s.attributes, a.WAIT_REASON.key: "peer_not_ready"})
        if s.name == "prefill.bootstrap"
        else s
        for s in trace.spans
    )
    timelines = [build_timeline(story.trace()) for story in stories]
    timelines.append(build_timeline(replace(trace, spans=spans)))
    verdict = judge_all(timelines)[-1]
    assert verdict.stage == "decode.reserve"
    assert verdict.wait is not None
    assert verdict.wait.reason == "peer_not_ready"


def test_stages_beside_the_chain_are_never_blamed() -> None:
    beside = {s.name for s in STAGES} - {s.name for c in CHAINS.values() for s in c}
    beside -= {"decode.gap", "decode.preempted"}
    for _, verdict in judged(healthy()):
        assert not {x.leaf.name for x in verdict.assessments} & beside


def test_late_first_token_does_not_promise_a_shorter_request() -> None:
    lengths = {**HEALTHY_S, "decode.generate": 3.0}
    slow = Story(request_id="slow", lengths_s=lengths, output_tokens=150)
    stories = [*healthy(), slow.stalled("hop.token", STALL_S)]
    timeline, verdict = judged(stories)[-1]
    assert verdict.stage == "hop.token"
    assert verdict.counterfactual_ns is not None
    assert verdict.counterfactual_ns > timeline.total_ns - 10_000_000
    assert "the first token came 2.00 s late, the last one did not" in verdict.sentence


@pytest.mark.parametrize(
    ("outcome", "reason", "by", "phrase"),
    [
        (Outcome.TIMED_OUT, "deadline", "gateway", "timed out by gateway (deadline)"),
        (Outcome.CANCELLED, None, "client", "was cancelled by client"),
        (Outcome.FAILED, "transfer_failed", None, "failed (transfer_failed)"),
        (Outcome.LOST, "process_lost", "decode-0", "was lost with decode-0 (process_lost)"),
        (Outcome.REJECTED, "queue_full", None, "was rejected (queue_full)"),
    ],
)
def test_unfinished_request_names_the_stage_it_ended_in(
    outcome: Outcome, reason: str | None, by: str | None, phrase: str
) -> None:
    waits = {"decode.reserve": {a.WAIT_REASON.key: "kv_pages"}}
    ended = Story(
        request_id="ended",
        outcome=outcome,
        reason=reason,
        by=by,
        ends_in="decode.reserve",
        waits=waits,
    ).stalled("decode.reserve", 5.0)
    verdict = judged([*healthy(), ended])[-1][1]
    assert verdict.kind is VerdictKind.ENDED
    assert verdict.stage == "decode.reserve"
    assert (
        f"ended {phrase} in decode.reserve: 5.00 s in that stage, 5.01 s in all."
        in verdict.sentence
    )
    assert "Waited for KV pages." in verdict.sentence


def test_worker_that_vanished_is_named_and_its_wait_ends_with_the_request() -> None:
    """A worker that was stopped goes on later, with what nobody waits for any more."""
    trace = Story(
        request_id="ended",
        outcome=Outcome.FAILED,
        reason="worker_lost",
        by="gateway",
        ends_in="prefill.compute",
    ).trace()
    [computed] = [s for s in trace.spans if s.attributes.get(a.STAGE.key) == "prefill.compute"]
    late = replace(
        computed,
        end_ns=computed.end_ns + 9_000_000_000,
        attributes={**computed.attributes, a.END_NS.key: computed.end_ns + 9_000_000_000},
        events=(Event("wait", computed.start_ns, {a.WAIT_REASON.key: "injected"}),),
    )
    spans = [late if span is computed else span for span in trace.spans]
    timeline = build_timeline(replace(trace, spans=spans))
    [verdict] = judge_all([timeline])
    assert "failed by gateway (worker_lost) in prefill.compute on prefill-0: " in verdict.sentence
    [wait] = timeline.visits_of("prefill.compute")[0].waits
    assert wait.at_ns is not None
    assert wait.for_ns is not None
    assert wait.at_ns + wait.for_ns <= timeline.total_ns


@pytest.mark.parametrize(
    ("reason", "clause", "told"),
    [
        (
            "process_lost",
            "decode-0 was lost",
            "decode-0 was lost with it (killed, or ended without a word); ",
        ),
        ("process_exited", "decode-0 had ended", "decode-0 had ended; "),
    ],
)
@pytest.mark.parametrize("ended_in", ["decode.generate", None])
def test_process_that_took_a_stage_with_it_is_named_first(
    reason: str, clause: str, told: str, ended_in: str | None
) -> None:
    """The gateway only saw that no answer came; the stage knows what became of its process."""
    trace = Story(
        request_id="kill-1",
        outcome=Outcome.FAILED,
        reason="worker_lost",
        by="gateway",
        ends_in="decode.generate",
    ).trace()
    gone = {a.OUTCOME.key: "lost", a.OUTCOME_BY.key: "decode-0", a.OUTCOME_REASON.key: reason}
    spans = [
        replace(span, attributes={**span.attributes, **gone})
        if span.attributes.get(a.STAGE.key) == "decode.generate"
        else replace(span, attributes={**span.attributes, a.OUTCOME_STAGE.key: ended_in or "x"})
        if span.parent_id is None
        else span
        for span in trace.spans
    ]
    [verdict] = judge_all([build_timeline(replace(trace, spans=spans))])
    assert verdict.cause == clause
    if ended_in:
        beginning = f"kill-1 failed (worker_lost) in decode.generate: {told}"
        assert verdict.sentence.startswith(beginning)
        assert " in that stage, " in verdict.sentence
    else:
        assert verdict.sentence.startswith("kill-1 failed (worker_lost) after ")
        assert f": {told}decode.generate took " in verdict.sentence


@pytest.mark.parametrize(
    ("lost", "blamed"), [("prefill.bootstrap", False), ("decode.generate", True)]
)
def test_cancelled_request_is_not_put_down_to_a_process_lost_beside_it(
    lost: str, blamed: bool
) -> None:
    """The client left; that another leg of it died meanwhile is not why."""
    trace = Story(
        request_id="left",
        outcome=Outcome.CANCELLED,
        reason="client_disconnected",
        by="client",
        ends_in="decode.generate",
    ).trace()
    gone = {a.OUTCOME.key: "lost", a.OUTCOME_BY.key: "w-0", a.OUTCOME_REASON.key: "process_lost"}
    assert lost in {span.attributes.get(a.STAGE.key) for span in trace.spans}
    spans = [
        replace(span, attributes={**span.attributes, **gone})
        if span.attributes.get(a.STAGE.key) == lost
        else span
        for span in trace.spans
    ]
    [verdict] = judge_all([build_timeline(replace(trace, spans=spans))])
    assert verdict.cause == ("w-0 was lost" if blamed else None)
    assert ("w-0 was lost with it" in verdict.sentence) is blamed
    assert ("by client" in verdict.sentence) is not blamed


def test_what_the_end_took_is_told_as_after_the_stage_it_ended_in() -> None:
    left = Story(request_id="left", outcome=Outcome.CANCELLED, by="client")
    trace = left.stalled("gateway.finish", 2.0).trace()
    spans = [
        replace(span, attributes={**span.attributes, a.OUTCOME_STAGE.key: "decode.generate"})
        if span.parent_id is None
        else span
        for span in trace.spans
    ]
    timelines = [build_timeline(story.trace()) for story in healthy()]
    timelines.append(build_timeline(replace(trace, spans=spans)))
    verdict = judge_all(timelines)[-1]
    assert verdict.stage == "decode.generate"
    assert " After that, gateway.finish took " in verdict.sentence


def test_unfinished_request_also_tells_what_held_it_up_before() -> None:
    ended = Story(request_id="ended", outcome=Outcome.TIMED_OUT, ends_in="decode.queue")
    verdict = judged([*healthy(), ended.stalled("transfer", 4.0)])[-1][1]
    assert (verdict.kind, verdict.stage) == (VerdictKind.ENDED, "decode.queue")
    assert verdict.stall is not None
    assert verdict.stall.leaf.name == "transfer"
    assert "Before that, transfer took 4.01 s" in verdict.sentence


def test_without_peers_the_longest_stage_is_named_and_nothing_is_claimed() -> None:
    ((_, verdict),) = judged([Story(request_id="only")])
    assert verdict.kind is VerdictKind.UNKNOWN
    assert verdict.confidence is Confidence.NONE
    assert verdict.stage == "decode.generate"
    assert (verdict.usual_ns, verdict.excess_ns, verdict.stalled) == (None, None, False)
    assert "no other completed request" in verdict.sentence
    assert verdict.notes


def test_few_peers_lower_the_confidence() -> None:
    stories = [*healthy(count=3), Story(request_id="slow").stalled("transfer", STALL_S)]
    verdict = judged(stories)[-1][1]
    assert (verdict.stage, verdict.stalled) == ("transfer", True)
    assert verdict.confidence is Confidence.LOW
    assert any("only 3 requests" in note for note in verdict.notes)
    assert stall_attributes(verdict) == {}


def test_time_without_a_stage_is_no_confident_verdict() -> None:
    slow = Story(request_id="slow").stalled("transfer", STALL_S).trace()
    spans = tuple(span for span in slow.spans if not span.name.startswith("transfer"))
    timelines = [build_timeline(story.trace()) for story in healthy()]
    timelines.append(build_timeline(replace(slow, spans=spans)))
    verdict = judge_all(timelines)[-1]
    assert not verdict.stalled
    assert verdict.confidence is Confidence.NONE
    assert any("missing: transfer" in note for note in verdict.notes)


@pytest.mark.parametrize("alone", [True, False])
def test_where_most_is_unexplained_that_is_said_first(alone: bool) -> None:
    slow = Story(request_id="slow").stalled("transfer", STALL_S).trace()
    spans = tuple(span for span in slow.spans if not span.name.startswith("transfer"))
    timelines = [] if alone else [build_timeline(story.trace()) for story in healthy()]
    timelines.append(build_timeline(replace(slow, spans=spans)))
    verdict = judge_all(timelines)[-1]
    end = (
        r"There is no other completed request to say whether that is slow\."
        if alone
        else r"Whether it stalled there is not known\."
    )
    assert verdict.kind is VerdictKind.UNKNOWN
    assert re.fullmatch(
        r"slow took [\d.]+ s, \d\d % of it unexplained: no stage covers it\. Of the rest "
        rf"decode\.generate took most: [\d.]+ ms \(\d\d %\)\. {end}",
        verdict.sentence,
    ), verdict.sentence


def test_trace_without_spans_is_judged_without_a_stage() -> None:
    empty = build_timeline(replace(Story().trace(), spans=()))
    verdict = judge(empty, Baselines([]))
    assert (verdict.kind, verdict.stage) == (VerdictKind.UNKNOWN, None)
    assert "no stage was recorded" in verdict.sentence


def test_policy_decides_what_counts() -> None:
    stories = [*healthy(), Story(request_id="slow").stalled("transfer", 0.2)]
    timelines = [build_timeline(story.trace()) for story in stories]
    assert not judge_all(timelines)[-1].stalled
    strict = VerdictPolicy(floor_s=0.1, share=0.1)
    assert judge_all(timelines, strict)[-1].stage == "transfer"


@pytest.mark.parametrize(
    "wrong",
    [{"floor_s": -1.0}, {"share": 1.5}, {"ratio": 0.5}, {"spreads": -1.0}, {"enough_peers": 0}],
)
def test_policy_refuses_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        VerdictPolicy(**wrong)  # type: ignore[arg-type]


def test_common_queueing_is_usual() -> None:
    rng = random.Random(3)
    stories = [
        replace(story, lengths_s={**story.lengths_s, "decode.queue": rng.uniform(0.0, 1.5)})
        for story in healthy(count=30)
    ]
    assert not any(verdict.stalled for _, verdict in judged(stories))


def test_root_attributes_name_the_stall_and_its_reason() -> None:
    verdict = stalled_verdict("prefill.queue", {a.WAIT_REASON.key: "token_budget"})
    attributes = stall_attributes(verdict)
    assert attributes[a.STALL_STAGE.key] == "prefill.queue"
    assert attributes[a.STALL_REASON.key] == "token_budget"
    seconds = attributes[a.STALL_SECONDS.key]
    assert isinstance(seconds, float)
    assert seconds == pytest.approx(STALL_S, abs=0.2)


def test_healthy_requests_get_no_stall_attributes() -> None:
    for _, verdict in judged(healthy()):
        assert stall_attributes(verdict) == {}


def test_rolling_baselines_judge_a_stream_of_requests() -> None:
    rolling = RollingBaselines(window=32)
    stages = [name for mode, name in CASES if mode is Mode.PD]
    blamed: list[str | None] = []
    rng = random.Random(11)
    for index in range(40 + len(stages) * 4):
        story = noisy(f"req-{index}", rng)
        stage = stages[(index - 40) // 4] if index >= 40 and index % 4 == 0 else None
        if stage is not None:
            story = story.stalled(stage, 3.0)
        timeline = build_timeline(story.trace())
        verdict = judge(timeline, rolling)
        rolling.add(timeline)
        if index >= 40:
            assert verdict.stalled is (stage is not None), verdict.sentence
            if stage is not None:
                blamed.append(verdict.stage)
    assert blamed == stages


def test_a_failed_attempt_is_told_of_a_request_that_completed() -> None:
    trace = retried()
    failed = {
        a.OUTCOME.key: "failed",
        a.OUTCOME_REASON.key: "worker_lost",
        a.OUTCOME_BY.key: "prefill-0",
        a.OUTCOME_STAGE.key: "transfer",
    }
    spans = tuple(
        replace(span, attributes={**span.attributes, **failed})
        if span.name == ATTEMPT_SPAN and span.attributes[a.ATTEMPT.key] == 1
        else span
        for span in trace.spans
    )
    timelines = [build_timeline(replace(trace, spans=spans)), *map(build_timeline, peers_of(20))]
    verdict = judge_all(timelines)[0]
    assert verdict.kind in {VerdictKind.HEALTHY, VerdictKind.STALLED}
    told = (
        "It was tried again: attempt 1 took 161 ms, ended in transfer (worker_lost, by prefill-0)."
    )
    assert verdict.sentence.endswith(told)
    assert "tried again" not in judge_all(timelines)[1].sentence


def peers_of(count: int) -> list[Trace]:
    return [story.trace() for story in healthy(count=count)]
