from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.analysis.verdict import Confidence
from pdtrace.stages import Outcome
from server.config import Deadlines
from server.demo.drive import ClientView
from server.demo.report import Judged, Report, compare
from server.demo.scenario import DemoRequest, full_pool, stall_ms, traffic, warm_up
from server.faults import parse_faults
from tests.support.pd_traces import Story, noisy


def healthy_stories(count: int = 12) -> list[Story]:
    rng = random.Random(3)
    return [noisy(f"healthy-{i}", rng) for i in range(count)]


def planned(stories: Iterable[Story], expected: dict[str, str]) -> list[DemoRequest]:
    return [
        DemoRequest(
            request_id=story.request_id,
            prompt="",
            max_tokens=1,
            expected=expected.get(story.request_id),
            stall_ms=2000 if story.request_id in expected else 0,
        )
        for story in stories
    ]


def report_on(
    stories: list[Story], expected: dict[str, str], *, recorded: list[Story] | None = None
) -> Report:
    timelines: list[Timeline] = [
        build_timeline(story.trace()) for story in (stories if recorded is None else recorded)
    ]
    views = [
        ClientView(request_id=s.request_id, first_token_s=1.0, total_s=2.0, num_chunks=3)
        for s in stories
    ]
    return compare(timelines, planned(stories, expected), views)


def of(report: Report, request_id: str) -> Judged:
    return next(item for item in report.judged if item.request.request_id == request_id)


def stalled(stage: str, seconds: float = 2.5) -> Story:
    return replace(Story(request_id="victim").stalled(stage, seconds), start_s=5.0)


@pytest.mark.parametrize("stage", ["gateway.queue", "decode.reserve", "transfer", "decode.gap"])
def test_stall_blamed_on_its_own_stage_passes(stage: str) -> None:
    report = report_on([*healthy_stories(), stalled(stage)], {"victim": stage})
    assert report.passed, [item.problems for item in report.judged]
    assert of(report, "victim").blamed == stage
    assert [item.request.request_id for item in report.slow] == ["victim"]


def test_stall_blamed_on_another_stage_fails() -> None:
    report = report_on([*healthy_stories(), stalled("transfer")], {"victim": "prefill.queue"})
    assert not report.passed
    assert of(report, "victim").problems == ("transfer is blamed, not prefill.queue",)


def test_blamed_healthy_request_fails() -> None:
    report = report_on([*healthy_stories(), stalled("transfer")], {})
    assert not report.passed
    assert of(report, "victim").problems == ("transfer is blamed, and nothing held it up",)


def test_healthy_request_that_is_like_no_other_may_be_blamed_as_a_guess() -> None:
    """The first long prompt of a server that has served none, on a machine busy with others."""
    cold = replace(stalled("prefill.compute", 30.0), prompt_tokens=1000)
    report = report_on([*healthy_stories(), cold], {})
    assert report.passed
    assert of(report, "victim").blamed == "prefill.compute"
    verdict = of(report, "victim").verdict
    assert verdict is not None
    assert verdict.confidence is Confidence.LOW
    wanted = report_on([*healthy_stories(), cold], {"victim": "transfer"})
    assert not wanted.passed


def test_stall_that_nobody_saw_fails() -> None:
    stories = healthy_stories()
    report = report_on(stories, {"healthy-3": "transfer"})
    assert of(report, "healthy-3").problems == ("nothing is blamed, not transfer",)


def test_stall_shorter_than_injected_fails() -> None:
    report = report_on([*healthy_stories(), stalled("transfer", 1.5)], {"victim": "transfer"})
    (problem,) = of(report, "victim").problems
    assert "2000 ms were injected" in problem


def test_request_missing_from_the_recording_fails() -> None:
    stories = healthy_stories()
    report = report_on(stories, {}, recorded=stories[1:])
    assert not report.passed
    assert of(report, "healthy-0").problems
    assert report.problems == ("the recording has 11 requests, 12 were sent",)


def test_request_that_failed_fails() -> None:
    failed = Story(request_id="failed", outcome=Outcome.FAILED, reason="x", ends_in="transfer")
    report = report_on([*healthy_stories(), failed], {})
    assert any("did not complete" in problem for problem in of(report, "failed").problems)


def test_scenario_is_as_large_and_as_mixed_as_promised() -> None:
    requests = [*warm_up(), *traffic(2000), *full_pool(2000)]
    assert len(requests) >= 40
    assert len({request.request_id for request in requests}) == len(requests)
    stages = {request.expected for request in requests if request.expected}
    assert stages >= {
        "gateway.queue",
        "decode.reserve",
        "prefill.queue",
        "transfer",
        "decode.queue",
        "decode.gap",
    }
    assert len({len(request.prompt.split()) for request in requests}) >= 5
    assert sum(request.expected is None for request in requests) >= 25


def test_fault_headers_are_understood_and_each_victim_has_one_fault_of_its_stage() -> None:
    for request in [*traffic(2000), *full_pool(2000)]:
        assert parse_faults(request.fault_header) == request.faults
        if request.faults:
            assert list(request.faults) == [request.expected]


def test_scenario_is_the_same_every_time() -> None:
    assert traffic(2000) == traffic(2000)


def test_stalls_stand_out_on_a_slow_machine_too() -> None:
    assert stall_ms(0.5) == 3000
    assert stall_ms(10.0) == 15_000


def test_stalls_stay_below_what_the_server_refuses_and_gives_up() -> None:
    longest = stall_ms(1000.0)
    assert longest < Deadlines().transfer_s * 1000
    for request in [*traffic(longest), *full_pool(longest)]:
        assert parse_faults(request.fault_header) == request.faults
