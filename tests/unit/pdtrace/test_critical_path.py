"""What Jaeger highlights as a request's critical path is the chain of its stages (ADR 001)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.assembly.request_spans import assemble
from pdtrace.spans import Span
from pdtrace.stages import CHAINS, MARKS, Mark, Mode, Role
from tests.support.jaeger_critical_path import critical_path
from tests.support.marked_requests import (
    COMPLETED,
    PREFILL,
    RECEIVED,
    ROUTED,
    START_NS,
    Moment,
    colocated_moments,
    pd_moments,
    request_of,
    tokenized,
)


def names_on_path(spans: list[Span]) -> set[str]:
    return {name for name, _, _ in critical_path(spans)}


def released_at(moments: list[Moment], at_us: int) -> list[Moment]:
    """The same request, its source pages released at another time."""
    return [
        (role, mark, at_us if mark is Mark.SOURCE_RELEASED else t, values)
        for role, mark, t, values in moments
    ]


def short_of(mode: Mode, names: set[str], *, streamed: bool = True) -> set[str]:
    """Chain stages that are not on a path. A stream's first token travels beside generation."""
    beside = {"hop.token"} if mode is not Mode.PD_EARLY or not streamed else set[str]()
    return {stage.name for stage in CHAINS[mode]} - names - beside


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("released_us", [6_700, 7_350, 7_352, 18_999, 19_000, 19_700, 25_000])
def test_chain_is_the_critical_path_whenever_the_source_is_released(
    released_us: int, stream: bool
) -> None:
    moments = released_at(pd_moments(stream=stream), released_us)
    if not stream:
        moments = [(r, m, 19_990 if m is Mark.FIRST_TOKEN_SENT else t, v) for r, m, t, v in moments]
    spans = assemble(request_of(moments))
    assert short_of(Mode.PD, names_on_path(spans), streamed=stream) == set()
    sections = critical_path(spans)
    assert (sections[0][1], sections[-1][2]) == (0, 20_000)
    assert all(one[2] == two[1] for one, two in pairwise(sections))


def test_chain_of_one_worker_is_the_critical_path() -> None:
    names = names_on_path(assemble(request_of(colocated_moments())))
    assert short_of(Mode.COLOCATED, names) == set()


def test_first_token_that_outlasts_generation_is_the_critical_path() -> None:
    moments = [
        (r, m, 19_900 if m is Mark.FIRST_TOKEN_SENT else t, v) for r, m, t, v in pd_moments()
    ]
    spans = assemble(request_of(moments))
    assert "hop.token" in names_on_path(spans)
    by_id = {span.span_id: span for span in spans}
    late = {s.name for s in spans if s.parent_id and s.end_ns > by_id[s.parent_id].end_ns}
    assert late == set(), "Jaeger warns of children that end after their parents"
    (token,) = [span for span in spans if span.name == "hop.token"]
    assert token.attributes[a.END_NS.key] == START_NS + 19_900_000  # type: ignore[operator]


def test_span_that_outlasts_its_attempt_keeps_its_exact_end() -> None:
    spans = {s.name: s for s in assemble(request_of(released_at(pd_moments(), 25_000)))}
    hold, attempt, generate = (
        spans[name] for name in ("prefill.hold", "attempt", "decode.generate")
    )
    assert hold.end_ns < generate.end_ns <= attempt.end_ns
    exact = [hold.attributes[key] for key in (a.BEGIN_NS.key, a.END_NS.key)]
    assert exact[1] == exact[0] + 19_000_000  # type: ignore[operator]


_VALUES = {
    Mark.RECEIVED: RECEIVED,
    Mark.ROUTED: ROUTED,
    Mark.COMPLETED: COMPLETED,
}


def test_chain_is_the_critical_path_when_the_source_is_released_just_after_a_boundary() -> None:
    """Its span must not end in the microsecond in which the chain stage before ends."""
    moments = pd_moments()
    finished = next(t for _, mark, t, _ in moments if mark is Mark.PREFILL_FINISHED)
    boundaries = {t for _, _, t, _ in moments if t > finished}
    assert len(boundaries) >= 5
    for boundary in boundaries:
        for late_us in (0, 1, 2):
            names = names_on_path(assemble(request_of(released_at(moments, boundary + late_us))))
            assert short_of(Mode.PD, names, streamed=True) == set(), (boundary, late_us)


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from([Mode.PD, Mode.COLOCATED]),
    stream=st.booleans(),
    lengths_us=st.lists(st.integers(2, 50_000), min_size=16, max_size=16),
    released_us=st.integers(0, 200_000),
)
def test_chain_is_the_critical_path_whatever_its_stages_last(
    mode: Mode, stream: bool, lengths_us: list[int], released_us: int
) -> None:
    moments: list[Moment] = [(Role.GATEWAY, Mark.RECEIVED, 0, RECEIVED)]
    now_us = 0
    for stage, length in zip(CHAINS[mode], lengths_us, strict=False):
        if stage.end is Mark.FIRST_TOKEN_SENT:
            continue  # beside the chain: its time is set below
        now_us += length
        worker = mode is Mode.COLOCATED and Role.WORKER in stage.roles
        (role,) = {Role.WORKER} if worker else stage.roles - {Role.WORKER}
        values = tokenized(mode, stream=stream) if stage.end is Mark.TOKENIZED else None
        moments.append((role, stage.end, now_us, values or _VALUES.get(stage.end, {})))
        if stage.end is Mark.FIRST_TOKEN_COMMITTED and stream:
            moments.append((Role.GATEWAY, Mark.FIRST_TOKEN_SENT, now_us + 1, {}))
    if not stream:
        moments.append((Role.GATEWAY, Mark.FIRST_TOKEN_SENT, now_us, {}))
    if mode is Mode.PD:
        finished = next(t for _, mark, t, _ in moments if mark is Mark.PREFILL_FINISHED)
        released = finished + released_us
        moments.append((PREFILL, Mark.SOURCE_RELEASED, released, {}))
    assert all(set(values) <= set(MARKS[mark].attrs) for _, mark, _, values in moments)
    names = names_on_path(assemble(request_of(moments)))
    assert short_of(mode, names, streamed=stream) == set()
