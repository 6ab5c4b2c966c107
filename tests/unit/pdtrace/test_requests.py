"""Requests come one by one, can be had again by position, and leave nothing large behind."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest

from pdtrace.analysis.goodput import measure
from pdtrace.analysis.requests import RequestsOfTraces
from pdtrace.analysis.sources import Problems, Recording
from pdtrace.analysis.timeline import build_timelines
from pdtrace.analysis.trace_store import TraceStore, join_spans
from pdtrace.check import check_recording
from pdtrace.slo import Slo
from pdtrace.spans import Span, Trace
from tests.support.copies import replace
from tests.support.pd_traces import Story, noisy

SLO = Slo(ttft_s=0.2, token_gap_s=0.01, e2e_s=0.5)


def stories(count: int) -> list[Span]:
    return [
        span
        for number in range(count)
        for span in noisy(f"r-{number}", random.Random(number)).trace().spans
    ]


def of_one_caller(count: int) -> list[Span]:
    """Requests under one `traceparent`."""
    return [
        replace(span, trace_id="ab" * 16)
        for number in range(count)
        for span in Story(request_id=f"shared-{number}", start_s=number).trace().spans
    ]


def test_requests_can_be_had_again_by_position() -> None:
    traces = join_spans([*stories(4), *of_one_caller(5)])
    requests = RequestsOfTraces(traces)
    expected = build_timelines(traces)
    assert len(expected) == 9
    next(iter(requests))  # who looks at the first one alone disturbs nobody
    assert list(requests) == expected
    assert [requests[position] for position in range(9)] == expected
    assert requests[7] == expected[7]


def test_each_trace_is_shown_and_progress_told() -> None:
    traces = join_spans(stories(3))
    seen: list[Trace] = []
    told: list[tuple[str, float | None]] = []
    requests = RequestsOfTraces(
        traces,
        watch=seen.append,
        progress=lambda doing, share: told.append((doing, share)),
    )
    assert len(list(requests)) == 3
    assert tuple(seen) == traces
    assert told == [("looking at requests", 0.0)]


def recording(count: int) -> Recording:
    store = TraceStore(max_held=0)
    for number in range(count):
        store.add(noisy(f"r-{number}", random.Random(number)).trace().spans)
    joined = store.joined()
    return Recording(
        source="t",
        traces=joined.traces,
        files=1,
        lines=count,
        spans=joined.spans,
        problems=Problems(),
    )


def judge(found: Recording) -> object:
    report = measure(RequestsOfTraces(found.traces), SLO, worst=0)
    assert report.total.requests == len(found.traces)
    assert len(report.blamed) > 1
    return report


def check(found: Recording) -> object:
    report = check_recording(found)
    assert report.requests == len(found.traces)
    return report


@pytest.mark.parametrize("look", [judge, check])
def test_a_request_that_was_looked_at_leaves_nothing_of_its_size(
    look: Callable[[Recording], object],
) -> None:
    """Its spans and its timeline take over 30 kB. Most of these requests miss an objective."""
    peaks = [peak_bytes(look, count) for count in (50, 150)]
    assert (peaks[1] - peaks[0]) / 100 < 5_000


def peak_bytes(look: Callable[[Recording], object], count: int) -> int:
    """Of a first look at so many requests, with the reading of them."""
    look(recording(3))  # what is made once is made
    tracemalloc.start()
    try:
        assert look(recording(count)) is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_file_changes_no_report() -> None:
    def reports(spans: Sequence[Span], max_held: int) -> tuple[object, object]:
        store = TraceStore(max_held)
        store.add(spans)
        joined = store.joined()
        found = Recording(
            source="t",
            traces=joined.traces,
            files=1,
            lines=1,
            spans=joined.spans,
            problems=Problems(),
        )
        judged = measure(RequestsOfTraces(joined.traces), SLO, worst=5)
        return judged.document(), check_recording(found).document()

    spans = [*stories(60), *of_one_caller(5)]
    random.Random(3).shuffle(spans)
    held = reports(spans, 10**9)
    # As lists of timelines are judged.
    timelines = build_timelines(join_spans(spans))
    assert measure(timelines, SLO, worst=5).document() == held[0]
    assert reports(spans, 20) == held
