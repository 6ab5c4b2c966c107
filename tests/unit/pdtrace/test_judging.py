"""The agent's quick verdict is the full verdict: leaf by leaf, attribute by attribute."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.agent.judging import RollingJudge
from pdtrace.agent.screening import screen
from pdtrace.analysis.baselines import RollingBaselines, is_peer, leaves
from pdtrace.analysis.timeline import build_timeline
from pdtrace.analysis.verdict import judge, stall_attributes
from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.spans import AttrValue, Resource, Span, Trace
from pdtrace.stages import CHAINS, Mode, Outcome, WaitReason
from pdtrace.testing import FakeClock, MemoryRings, Wait, record_request
from tests.support.copies import replace
from tests.support.marked_requests import Moment, colocated_moments, pd_moments, request_of
from tests.support.pd_traces import HEALTHY_S, noisy, retried

WAIT: Mapping[str, AttrValue] = {
    a.WAIT_REASON.key: WaitReason.KV_PAGES.value,
    a.WAIT_NEEDED.key: 18,
    a.WAIT_FREE.key: 2,
    a.WAIT_BLOCKER.key: "req-0",
}


class FullJudge:
    """What `RollingJudge` is to equal: every request takes the whole way."""

    def __init__(self, window: int) -> None:
        self.baselines = RollingBaselines(window)

    def __call__(self, spans: Sequence[Span]) -> Mapping[str, AttrValue]:
        timeline = build_timeline(Trace(trace_id=spans[0].trace_id, spans=spans))
        attributes = stall_attributes(judge(timeline, self.baselines))
        self.baselines.add(timeline)
        return attributes


def root_first(trace: Trace) -> list[Span]:
    return sorted(trace.spans, key=lambda span: span.attributes.get(a.SPAN.key) != "request")


def story_of(rng: random.Random, number: int) -> list[Span]:
    """A request of any kind, most of them healthy."""
    mode = rng.choice([Mode.PD, Mode.PD, Mode.PD, Mode.PD_EARLY, Mode.COLOCATED])
    story = replace(noisy(f"r{number}", rng, mode), stream=rng.random() < 0.8)
    chance = rng.random()
    names = [*(stage.name for stage in CHAINS[mode]), "decode.gap", "decode.preempted"]
    stage = rng.choice(names)
    if chance < 0.25:
        story = replace(story, waits={stage: WAIT}).stalled(stage, rng.choice([0.1, 0.5, 2, 20]))
        if rng.random() < 0.3:
            story = story.stalled(rng.choice(names), 1.0)
    elif chance < 0.35:
        outcome = rng.choice([Outcome.FAILED, Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.LOST])
        story = replace(
            story, ends_in=stage if stage in HEALTHY_S else None, outcome=outcome, reason="engine"
        ).stalled(stage, rng.choice([0.0, 3.0]))
    elif chance < 0.4:
        story = replace(story, exact=False).stalled(stage, 1.0)
    elif chance < 0.45:
        return root_first(retried())
    elif chance < 0.5:
        story = replace(story, gap_s=0.2, preempted_s=0.4)
    return root_first(story.trace())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [16, 64])
def test_quick_verdicts_are_the_full_ones_in_any_traffic(seed: int, window: int) -> None:
    rng = random.Random(seed)
    quick, full = RollingJudge(window), FullJudge(window)
    said: list[object] = []
    shortcuts = 0
    for number in range(300):
        spans = story_of(rng, number)
        shortcuts += screen(spans) is not None
        attributes = full(spans)
        said += [attributes[a.STALL_STAGE.key]] if attributes else []
        assert dict(quick(spans)) == dict(attributes), number
    assert shortcuts > 200  # else this compares the full judge with itself
    assert len(set(said)) > 5


def test_both_learn_the_same_whoever_is_judged() -> None:
    rng = random.Random(7)
    quick, full = RollingJudge(32), FullJudge(32)
    for number in range(200):
        spans = root_first(noisy(f"r{number}", rng).trace())
        quick(spans)
        full(spans)
        probe = build_timeline(noisy(f"probe{number}", rng).trace())
        if number % 50 == 49:  # to ask is to sort in what was learnt
            for leaf in leaves(probe):
                expected = full.baselines.usual(probe, leaf)
                assert quick.baselines.usual(probe, leaf) == expected
                assert expected is not None


def recorded(rng: random.Random, number: int) -> list[Span]:
    """Through rings, tracker and assembly."""
    mode = rng.choice(list(Mode))
    names = [stage.name for stage in CHAINS[mode]]
    outcome = rng.choice([Outcome.COMPLETED] * 6 + [Outcome.FAILED, Outcome.TIMED_OUT])
    waits: dict[str, Wait] = {
        "gateway.queue": {"reason": WaitReason.CONCURRENCY, "position": 3, "blocker": "req-0"}
    }
    rings = MemoryRings(clock=FakeClock())
    record_request(
        rings.recorders,
        request_id=f"req-{number}",
        mode=mode,
        stage_ms={rng.choice(names): rng.choice([1.0, 50.0, 900.0, 6_000.0])},
        waits=waits,
        outcome=outcome,
        stop_in=None if outcome is Outcome.COMPLETED else rng.choice(names[2:]),
        reason=None if outcome is Outcome.COMPLETED else "deadline",
        prompt_tokens=rng.randint(16, 2_000),
        output_tokens=rng.randint(1, 200),
        chunks=rng.randint(1, 4),
    )
    tracker = RequestTracker()
    known: set[str] = set()
    for identity, record in rings.read():
        if identity.instance not in known:
            known.add(identity.instance)
            tracker.add_ring(identity.instance, process_of(identity, {}))
        tracker.feed(identity.instance, [record], 0)
    [request] = tracker.finish_ended(1)
    return assemble(request)


def test_quick_verdicts_are_the_full_ones_for_what_the_agent_assembles() -> None:
    rng = random.Random(3)
    quick, full = RollingJudge(16), FullJudge(16)
    stalls = 0
    for number in range(250):
        spans = recorded(rng, number)
        attributes = full(spans)
        stalls += bool(attributes)
        assert dict(quick(spans)) == dict(attributes), number
        assert_same_leaves(spans)
    assert stalls > 20


def assert_same_leaves(spans: list[Span]) -> bool:
    """Whether the shortcut was taken."""
    screened = screen(spans)
    if screened is None:
        return False
    timeline = build_timeline(Trace(trace_id=spans[0].trace_id, spans=spans))
    assert sorted(screened.leaves) == sorted(leaves(timeline))
    assert (screened.mode, screened.key) == (timeline.mode, timeline.key)
    assert screened.total_ns == timeline.total_ns
    assert screened.completed == is_peer(timeline)
    return True


MOMENTS = [
    pd_moments(),
    pd_moments(stream=False),
    pd_moments(Mode.PD_EARLY),
    pd_moments(Mode.PD_EARLY, stream=False),
    colocated_moments(),
]


@pytest.mark.parametrize("moments", MOMENTS)
def test_assembled_requests_take_the_shortcut(moments: list[Moment]) -> None:
    assert assert_same_leaves(assemble(request_of(moments)))


def moved(span: Span, shift: int) -> Span:
    """Elsewhere in time, and shorter or longer; the wall time says so too."""
    begin, end = span.attributes.get(a.BEGIN_NS.key), span.attributes.get(a.END_NS.key)
    if type(begin) is not int or type(end) is not int:
        return span
    exact = {a.BEGIN_NS.key: begin + shift, a.END_NS.key: end - shift // 3}
    wall = span.start_ns + shift // 1_000 * 1_000
    return replace(span, attributes={**span.attributes, **exact}, start_ns=wall, end_ns=wall + 5)


def is_beside(span: Span, other: Span) -> bool:
    """Whether both come from one process."""
    return span.resource.attributes["service.name"] == other.resource.attributes["service.name"]


def elsewhere(span: Span, how: str, shift: int) -> Span:
    """Read on the clock of another host, measured or not, or of one without a name."""
    resource = dict(span.resource.attributes)
    resource["host.id"] = "host-b"
    if how == "nameless":
        del resource["host.id"]
    facts = dict(span.attributes)
    if how == "measured":
        facts |= {a.CLOCK_OFFSET_NS.key: shift, a.CLOCK_ERROR_NS.key: 20_000}
        span = replace(span, start_ns=span.start_ns + shift, end_ns=span.end_ns + shift)
    elif how == "away":
        span = moved(span, shift)
        facts = dict(span.attributes)
    return replace(span, resource=Resource(attributes=resource), attributes=facts)


SHIFTS = st.integers(-3_000_000, 3_000_000) | st.integers(-(10**10), 10**10)
ODD_VALUES: st.SearchStrategy[AttrValue | None] = st.one_of(
    st.none(),
    st.sampled_from(["", "request", "attempt", "transfer", "decode.gap", "pd", "colocated", "7"]),
    st.sampled_from([0, 1, 2, 5 * 10**12]),
    st.booleans(),
    st.just(2.0),
    st.just((1, 2)),
)
CHANGES = ["cut", "twice", "move", "clock", "name", "away", "measured", "nameless"]
KEYS = st.sampled_from(
    [
        *(a.SPAN, a.STAGE, a.ATTEMPT, a.BEGIN_NS, a.END_NS, a.MODE, a.STREAM, a.OUTCOME),
        *(a.PROMPT_TOKENS, a.CACHED_TOKENS, a.OUTPUT_TOKENS, a.CLOCK_OFFSET_NS, a.CLOCK_ERROR_NS),
    ]
)


@given(
    seed=st.integers(0, 50),
    changes=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(CHANGES))
        | st.tuples(st.integers(0, 40), st.tuples(KEYS, ODD_VALUES)),
        max_size=3,
    ),
    shift=SHIFTS,
)
@settings(max_examples=400, deadline=None)
def test_odd_spans_change_the_leaves_or_the_way_but_never_the_result(
    seed: int, changes: list[tuple[int, str | tuple[a.Attr, AttrValue | None]]], shift: int
) -> None:
    spans = story_of(random.Random(seed), seed)
    for position, change in changes:
        index = position % len(spans)
        span = spans[index]
        facts = dict(span.attributes)
        if isinstance(change, tuple):
            attr, value = change
            if value is None:
                facts.pop(attr.key, None)
            else:
                facts[attr.key] = value
            spans[index] = replace(span, attributes=facts)
        elif change == "cut" and index:
            del spans[index]
        elif change == "twice" and index:
            spans.append(replace(moved(span, shift), span_id=f"{position:016x}"))
        elif change == "name":
            spans[index] = replace(span, name="decode.first")
        elif change == "clock":
            spans[index] = replace(span, start_ns=max(0, span.start_ns + shift))
        elif change == "move":
            spans[index] = moved(span, shift)
        elif change in {"away", "measured", "nameless"}:
            spans = [
                elsewhere(other, change, shift) if is_beside(other, span) else other
                for other in spans
            ]
    assert_same_leaves(spans)


def test_a_window_below_eight_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        RollingJudge(7)
