"""Usual times come from the others, follow token counts, and do not bend to a few stalls."""

from __future__ import annotations

import random

import pytest

from pdtrace import semconv as a
from pdtrace.analysis.baselines import Baselines, Leaf, RollingBaselines, Usual, leaves
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.spans import Span
from pdtrace.stages import Outcome
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, Story, noisy

MS = 1_000_000


def timeline_of(
    request_id: str, *, prompt: int = 100, compute_s: float = 0.12, reserve_s: float = 0.002
) -> Timeline:
    lengths = {**HEALTHY_S, "prefill.compute": compute_s, "decode.reserve": reserve_s}
    story = Story(request_id=request_id, lengths_s=lengths, prompt_tokens=prompt)
    return build_timeline(story.trace())


def leaf_of(timeline: Timeline, name: str) -> Leaf:
    return next(leaf for leaf in leaves(timeline) if leaf.name == name)


def usual_of(baselines: Baselines | RollingBaselines, timeline: Timeline, name: str) -> Usual:
    usual = baselines.usual(timeline, leaf_of(timeline, name))
    assert usual is not None
    return usual


def test_leaves_and_unexplained_sum_to_the_request() -> None:
    timeline = build_timeline(Story(gap_s=0.3, preempted_s=0.2).trace())
    assert sum(leaf.ns for leaf in leaves(timeline)) == timeline.total_ns
    assert leaf_of(timeline, "decode.gap").ns == 300 * MS
    assert leaf_of(timeline, "decode.gap").outer == "decode.generate"
    assert leaf_of(timeline, "decode.generate").ns == 699 * MS


def test_a_request_is_never_its_own_peer() -> None:
    others = [timeline_of(f"r{i}", reserve_s=0.010) for i in range(4)]
    judged = timeline_of("slow", reserve_s=5.0)
    usual = usual_of(Baselines([*others, judged]), judged, "decode.reserve")
    assert usual == Usual(ns=10 * MS, spread_ns=0.0, peers=4)
    alone = Baselines([judged])
    assert alone.usual(judged, leaf_of(judged, "decode.reserve")) is None


def test_median_without_one_is_exact_for_every_member() -> None:
    lengths = [0.001, 0.002, 0.003, 0.005, 0.008, 0.013]
    timelines = [timeline_of(f"r{i}", reserve_s=s) for i, s in enumerate(lengths)]
    baselines = Baselines(timelines)
    for index, timeline in enumerate(timelines):
        rest = sorted(lengths[:index] + lengths[index + 1 :])
        assert usual_of(baselines, timeline, "decode.reserve").ns == pytest.approx(rest[2] * 1e9)


def test_compute_is_compared_along_prompt_tokens() -> None:
    peers = [
        timeline_of(f"r{n}", prompt=n, compute_s=0.020 + 0.001 * n) for n in range(50, 500, 25)
    ]
    judged = timeline_of("long", prompt=800, compute_s=0.9)
    usual = usual_of(Baselines(peers), judged, "prefill.compute")
    assert usual.ns == pytest.approx(820 * MS, rel=0.01)


@pytest.mark.parametrize("count", [20, 200])
def test_a_few_stalled_peers_do_not_bend_the_line(count: int) -> None:
    rng = random.Random(count)
    peers: list[Timeline] = []
    for index in range(count):
        tokens = rng.randint(20, 500)
        stall = 3.0 if index % 10 == 0 else 0.0
        peers.append(
            timeline_of(f"r{index}", prompt=tokens, compute_s=0.02 + 0.001 * tokens + stall)
        )
    baselines = Baselines(peers)
    for timeline in peers:
        assert timeline.prompt_tokens is not None
        usual = usual_of(baselines, timeline, "prefill.compute")
        assert usual.ns == pytest.approx(20 * MS + timeline.prompt_tokens * MS, rel=0.15, abs=5e7)


def test_equal_token_counts_give_a_line_through_zero() -> None:
    peers = [timeline_of(f"r{i}", prompt=100, compute_s=0.1) for i in range(6)]
    judged = timeline_of("double", prompt=200, compute_s=0.2)
    assert usual_of(Baselines(peers), judged, "prefill.compute").ns == pytest.approx(200 * MS)


def test_cached_tokens_are_not_computed() -> None:
    story = Story(prompt_tokens=100)
    timeline = replace(build_timeline(story.trace()), cached_tokens=64)
    assert leaf_of(timeline, "prefill.compute").tokens == 36
    assert leaf_of(timeline, "gateway.ingest").tokens == 100


def test_unknown_size_is_compared_with_requests_of_any_size() -> None:
    peers = [timeline_of(f"r{n}", prompt=n, compute_s=0.001 * n) for n in (50, 100, 150, 200, 250)]
    judged = replace(timeline_of("unknown"), prompt_tokens=None)
    assert usual_of(Baselines(peers), judged, "prefill.compute").ns == pytest.approx(150 * MS)


def test_only_completed_requests_of_the_same_mode_are_peers() -> None:
    failed = [
        build_timeline(Story(request_id=f"f{i}", outcome=Outcome.FAILED).trace()) for i in range(5)
    ]
    judged = timeline_of("judged")
    assert Baselines(failed).usual(judged, leaf_of(judged, "transfer")) is None


def test_rolling_baselines_forget_what_left_the_window() -> None:
    rolling = RollingBaselines(window=16)
    for index in range(100):
        rolling.add(timeline_of(f"old{index}", reserve_s=0.5))
    for index in range(16):
        rolling.add(timeline_of(f"new{index}", reserve_s=0.010))
    judged = timeline_of("judged", reserve_s=0.4)
    assert usual_of(rolling, judged, "decode.reserve") == Usual(10 * MS, 0.0, 16)


def test_rolling_baselines_agree_with_fixed_ones_over_the_same_requests() -> None:
    rng = random.Random(7)
    timelines = [build_timeline(noisy(f"r{i}", rng).trace()) for i in range(200)]
    rolling = RollingBaselines(window=64)
    judged = timelines[0]
    for timeline in timelines[1:]:
        rolling.add(timeline)
        rolling.usual(judged, leaf_of(judged, "decode.generate"))
    fixed = Baselines(timelines[-64:])
    for leaf in leaves(judged):
        one, other = rolling.usual(judged, leaf), fixed.usual(judged, leaf)
        assert one is not None
        assert other is not None
        assert one.peers == other.peers == 64
        # A line may be a few requests old; medians of constant stages are exact.
        assert one.ns == pytest.approx(other.ns, rel=0.1)


def test_rolling_baselines_refuse_a_window_that_says_nothing() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        RollingBaselines(window=3)


def test_way_of_the_first_token_is_compared_among_streams_only() -> None:
    def edit(span: Span) -> Span:
        if span.name != "hop.token":
            return span
        late = int(str(span.attributes[a.END_NS.key])) + 699 * MS
        return replace(span, attributes={**span.attributes, a.END_NS.key: late})

    whole = Story(request_id="whole", stream=False).trace()
    timeline = build_timeline(replace(whole, spans=tuple(map(edit, whole.spans))))
    assert timeline.part_ns("hop.token") == 0
    assert "hop.token" not in {leaf.name for leaf in leaves(timeline)}
    assert sum(leaf.ns for leaf in leaves(timeline)) == timeline.total_ns
