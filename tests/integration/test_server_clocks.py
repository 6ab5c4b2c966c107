"""Servers of which one process runs on another host's clock: its times are brought back.

All processes really share one clock, so the truth is known: what a shifted process recorded, less
the shift.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdtrace import RingReader
from pdtrace import semconv as a
from pdtrace.analysis.attributes import integer, text
from pdtrace.analysis.skew import ClockBasis
from pdtrace.analysis.sources import Recording, read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.check import CheckReport, check_recording
from pdtrace.ring.records import ClockRecord, MarkRecord, OpenRecord
from pdtrace.stages import Mark, Outcome
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Ask, ask, ask_all
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.server

S = 1_000_000_000
LIMIT_S = 60.0


@dataclass(frozen=True)
class Run:
    run_dir: Path
    recording: Recording
    timelines: list[Timeline]
    report: CheckReport


def recorded(run_dir: Path) -> Run:
    recording = read_source(run_dir)
    return Run(run_dir, recording, build_timelines(recording.traces), check_recording(recording))


def ring_of(run_dir: Path, instance: str) -> RingReader:
    (path,) = (run_dir / "rings").glob(f"{instance}-*.ring")
    return RingReader(path)


def samples_of(run_dir: Path, instance: str) -> list[ClockRecord]:
    records = ring_of(run_dir, instance).read()
    return [record for record in records if isinstance(record, ClockRecord)]


def marked(run_dir: Path, instance: str, mark: Mark) -> Mapping[str, int]:
    """Request id → when the instance recorded `mark`, on its own clock."""
    ids: dict[int, str] = {}
    times: dict[str, int] = {}
    for record in ring_of(run_dir, instance).read():
        if isinstance(record, OpenRecord):
            ids[record.key] = record.context.request_id
        elif isinstance(record, MarkRecord) and record.mark is mark:
            times[ids[record.key]] = record.t_ns
    return times


def assert_sound(run: Run, requests: int) -> None:
    """What every request keeps, whatever the clocks are."""
    assert len(run.timelines) == requests
    for timeline in run.timelines:
        assert timeline.outcome is Outcome.COMPLETED
        assert timeline.violations == (), timeline.request_id
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns
        assert all(part.ns >= 0 for part in timeline.parts)
        assert not any(visit.moved_ns for visit in timeline.visits if visit.error_ns is None)
    broken = [(rule.name, rule.examples) for rule in run.report.rules if rule.broken]
    assert run.report.ok, broken


@pytest.mark.parametrize(
    ("instance", "shift", "stage", "mark"),
    [
        ("decode-0", (5, 0), "decode.reserve", Mark.PAGES_RESERVED),
        ("decode-0", (5, 150), "decode.reserve", Mark.PAGES_RESERVED),
        ("prefill-0", (-5, 0), "prefill.compute", Mark.PREFILL_FINISHED),
        ("transfer-0", (5, 0), "transfer", Mark.KV_LANDED),
        ("worker-0", (-5, 0), "prefill.compute", Mark.PREFILL_FINISHED),
    ],
)
def test_times_of_a_shifted_process_are_right_to_within_the_bound(
    tmp_path: Path, instance: str, shift: tuple[int, int], stage: str, mark: Mark
) -> None:
    """`shift`: seconds that its clock is ahead, and millionths by which it runs fast."""
    shift_s, drift_ppm = shift
    mode = "colocated" if instance.startswith("worker") else "pd"
    options = [
        *("--allow-faults", "--mode", mode),
        *("--clock-fault", f"{instance}:offset_s={shift_s},drift_ppm={drift_ppm},host=host-b"),
    ]
    asks = [
        Ask(prompt="p" * (7 + 53 * i), max_tokens=4 + i, stream=i % 2 == 0, request_id=f"r-{i}")
        for i in range(16)
    ]
    begun_ns = time.monotonic_ns()
    with running_server(tmp_path / "run", *options, model=FAST_FAKE) as server:
        assert {answer.status for answer in ask_all(server, asks, at_once=4)} == {200}
        lived_ns = time.monotonic_ns() - begun_ns
    run = recorded(tmp_path / "run")
    assert_sound(run, len(asks))

    # Its clock runs fast from the process's start on, which is some time behind `begun_ns`.
    drifted_ns = lived_ns * drift_ppm // 1_000_000
    true_offset_ns = -shift_s * S

    def is_right(offset_ns: int, error_ns: int) -> bool:
        return -drifted_ns - error_ns <= offset_ns - true_offset_ns <= error_ns

    own_times = marked(run.run_dir, instance, mark)
    spans = [span for trace in run.recording.traces for span in trace.spans if span.name == stage]
    assert len(spans) == len(asks)
    for span in spans:
        assert span.resource.attributes["host.id"] == "host-b"
        offset_ns = integer(span.attributes, a.CLOCK_OFFSET_NS)
        error_ns = integer(span.attributes, a.CLOCK_ERROR_NS)
        end_ns = integer(span.attributes, a.END_NS)
        assert offset_ns is not None and error_ns is not None and end_ns is not None
        assert error_ns < S
        assert is_right(offset_ns, error_ns)
        own_end_ns = own_times[text(span.attributes, a.REQUEST_ID) or ""]
        assert is_right(end_ns - own_end_ns, error_ns)
        # Its own clock is what the recorded times show.
        root = next(
            root
            for trace in run.recording.traces
            if trace.trace_id == span.trace_id
            for root in trace.spans
            if text(root.attributes, a.SPAN) == "request"
        )
        assert abs(span.start_ns - root.start_ns - shift_s * S) < S

    (clock,) = run.report.clocks
    assert (clock.host, clock.instances, clock.basis) == (
        "host-b",
        (instance,),
        ClockBasis.MEASURED,
    )
    assert clock.offsets_ns is not None and clock.error_ns is not None
    assert all(is_right(offset, clock.error_ns) for offset in clock.offsets_ns)
    (fact,) = [fact for fact in run.report.facts if fact.startswith("Clock of host-b")]
    assert f"offset {'-' if shift_s > 0 else '+'}" in fact


def test_a_clock_that_is_set_while_requests_run_leaves_them_whole(tmp_path: Path) -> None:
    """Decode's clock is 5 s behind, then 4.7 s."""
    run_dir = tmp_path / "run"
    fault = "decode-0:offset_s=-5,step_s=0.3,step_after_s=8,host=host-b"
    with running_server(
        run_dir, "--allow-faults", "--clock-fault", fault, model=FAST_FAKE
    ) as server:
        sent = ask_until_set(server, run_dir)
    run = recorded(run_dir)
    assert_sound(run, sent)
    for timeline in run.timelines:
        for visit in timeline.visits:
            offset_ns = integer(visit.attributes, a.CLOCK_OFFSET_NS)
            error_ns = integer(visit.attributes, a.CLOCK_ERROR_NS)
            if offset_ns is not None and error_ns is not None:
                off_by = min(abs(offset_ns - 5 * S), abs(offset_ns - 4.7 * S))
                assert off_by <= error_ns, (timeline.request_id, visit.name)


def ask_until_set(server: RunningServer, run_dir: Path) -> int:
    """Keep requests in flight until round trips have shown the clock before and after, and then
    some; returns how many there were."""
    sent = 0
    seen: set[bool] = set()
    end_s = time.monotonic() + LIMIT_S

    def send(request: Ask) -> int:
        return ask(server, request).status

    with ThreadPoolExecutor(2) as pool:
        while len(seen) < 2 and time.monotonic() < end_s:
            requests = [
                Ask(prompt="p" * 64, max_tokens=150, stream=True, request_id=f"s-{sent + i}")
                for i in range(2)
            ]
            assert set(pool.map(send, requests)) == {200}
            sent += len(requests)
            samples = samples_of(run_dir, "decode-0")
            seen = {sample.offset_ns > 4.85 * S for sample in samples if sample.error_ns < S // 10}
    assert seen == {True, False}, "the clock was not seen before and after it was set"
    after = [Ask(prompt="q" * 64, max_tokens=20, request_id=f"s-{sent + i}") for i in range(4)]
    assert {answer.status for answer in ask_all(server, after)} == {200}
    return sent + len(after)
