"""Compares what the recording says with what was done to each request.

Owns the demo's pass criterion; verdicts come from `pdtrace.analysis.verdict`, never from the
scenario. A request passes if the stage blamed is the one that was held up, and for at least as
long; one that nobody touched passes if no stage is blamed, or only as a guess: the first request
with a long prompt is like no other, and a busy machine may well have stalled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.analysis.verdict import Confidence, Verdict, VerdictPolicy, judge_all
from pdtrace.stages import Outcome
from server.demo.drive import ClientView
from server.demo.scenario import DemoRequest

MAX_UNEXPLAINED = 0.01
MIN_SEEN = 0.95
"""Part of an injected stall that its stage must show: its edges may lie under a stage before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One request: what was done, what the recording says. `problems` is empty if both agree."""

    request: DemoRequest
    timeline: Timeline | None
    verdict: Verdict | None
    problems: tuple[str, ...]

    @property
    def blamed(self) -> str | None:
        """Stage that the recording blames; None if none, or if the request is not in it."""
        return self.verdict.stage if self.verdict is not None and self.verdict.stalled else None

    @property
    def share(self) -> float:
        return self.verdict.share if self.verdict is not None else 0.0

    @property
    def total_ns(self) -> int:
        return self.timeline.total_ns if self.timeline is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a demo.

    judged        in order of sending
    problems      what is wrong with the recording as a whole
    unexplained   part of all requests' time that no stage covers
    """

    judged: tuple[Judged, ...]
    problems: tuple[str, ...]
    unexplained: float

    @property
    def passed(self) -> bool:
        return not self.problems and not any(item.problems for item in self.judged)

    @property
    def slow(self) -> list[Judged]:
        """Requests that were held up or are blamed, longest first."""
        found = [item for item in self.judged if item.request.expected or item.blamed]
        return sorted(found, key=lambda item: -item.total_ns)


def read_report(
    run_dir: Path, requests: Sequence[DemoRequest], views: Sequence[ClientView]
) -> Report:
    """Judge a recording. Raises SourceError when there is none."""
    return compare(build_timelines(read_source(run_dir).traces), requests, views)


def compare(
    timelines: Sequence[Timeline], requests: Sequence[DemoRequest], views: Sequence[ClientView]
) -> Report:
    """Judge each request against all others of the recording.

    An excess counts from half of the shortest stall that was injected: shorter ones are the
    machine's own.
    """
    injected = [request.stall_ms for request in requests if request.stall_ms]
    floor_s = min(injected) / 2000 if injected else VerdictPolicy().floor_s
    verdicts = judge_all(timelines, VerdictPolicy(floor_s=floor_s))
    found = {
        timeline.request_id: (timeline, verdict)
        for timeline, verdict in zip(timelines, verdicts, strict=True)
    }
    errors = {view.request_id: view.error for view in views}
    judged = tuple(_judge(request, found, errors) for request in requests)
    total = sum(timeline.total_ns for timeline in timelines)
    unexplained = sum(timeline.unexplained_ns for timeline in timelines) / total if total else 0.0
    problems: list[str] = []
    if len(timelines) != len(requests):
        problems.append(f"the recording has {len(timelines)} requests, {len(requests)} were sent")
    if unexplained > MAX_UNEXPLAINED:
        problems.append(f"{unexplained * 100:.1f} % of the time is unexplained")
    for timeline in timelines:
        inexact = sum(part.ns for part in timeline.parts) != timeline.total_ns
        if inexact or timeline.violations:
            what = timeline.violations[0].message if timeline.violations else "parts do not add up"
            problems.append(f"{timeline.request_id}: {what}")
    return Report(judged=judged, problems=tuple(problems), unexplained=unexplained)


def _judge(
    request: DemoRequest,
    found: Mapping[str | None, tuple[Timeline, Verdict]],
    errors: Mapping[str, str | None],
) -> Judged:
    timeline, verdict = found.get(request.request_id, (None, None))
    if timeline is None or verdict is None:
        problem = f"not in the recording ({errors.get(request.request_id) or 'it was answered'})"
        return Judged(request=request, timeline=None, verdict=None, problems=(problem,))
    problems: list[str] = []
    error = errors.get(request.request_id)
    if error or timeline.outcome is not Outcome.COMPLETED:
        problems.append(f"did not complete: {error or timeline.outcome_reason}")
    blamed = verdict.stage if verdict.stalled else None
    is_guess = verdict.confidence is not Confidence.HIGH
    if blamed != request.expected and not (is_guess and request.expected is None):
        wanted = f", not {request.expected}" if request.expected else ", and nothing held it up"
        problems.append(f"{blamed or 'nothing'} is blamed{wanted}")
    elif verdict.stage_ns < MIN_SEEN * request.stall_ms * 1_000_000:
        problems.append(
            f"{blamed} shows {verdict.stage_ns / 1e9:.2f} s, {request.stall_ms} ms were injected"
        )
    return Judged(request=request, timeline=timeline, verdict=verdict, problems=tuple(problems))
