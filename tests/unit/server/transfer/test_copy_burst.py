"""A burst of handoffs at a transfer process: what it records tells waiting for a place from moving
bytes, and the verdict names the first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdtrace.analysis.baselines import Baselines
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.analysis.verdict import VerdictKind, judge
from pdtrace.assembly.request_spans import assemble
from pdtrace.ring.records import MarkRecord, OpenRecord
from pdtrace.spans import Trace
from pdtrace.stages import MARKS, Mark, Role, WaitReason
from server.kv.transfer.memory import Delay
from tests.support.copies import replace
from tests.support.marked_requests import Moment, pd_moments, request_of
from tests.support.transfer_rig import MakeRig, Rig, job

COPY_MS = 20
ROUTES = ("10.0.0.1:7000", "10.0.0.2:7000")
COMPUTED_US = 6_000  # when `pd_moments` has the prompt computed
MS = 1_000_000


def burst(rig: Rig, names: Sequence[str]) -> None:
    """A handoff of one job each, all at one instant, over two routes with a place each."""
    jobs = [
        job(handoff=name, last=True, address=ROUTES[number % 2])
        for number, name in enumerate(names)
    ]
    rig.step(*jobs)
    while not rig.worker.jobs.is_idle:
        rig.clock.advance(ms=COPY_MS)
        rig.step(times=2)
        rig.read()  # the ring is small


def timelines_of(rig: Rig, names: Sequence[str]) -> dict[str, Timeline]:
    """Requests whose transfer was recorded by the rig, and all else is usual and equal."""
    marks: dict[str, list[MarkRecord]] = {}
    by_key: dict[int, str] = {}
    for record in rig.read():
        if isinstance(record, OpenRecord):
            by_key[record.key] = record.context.request_id
        elif isinstance(record, MarkRecord):
            marks.setdefault(by_key[record.key], []).append(record)
    traces: list[Trace] = []
    for number, name in enumerate(names, 1):
        own = marks[f"req-{name}"]
        queued_ns = own[0].t_ns
        took_us = (own[-1].t_ns - queued_ns) // 1000
        moments: list[Moment] = [
            (role, mark, at_us if at_us <= COMPUTED_US else at_us + took_us, values)
            for role, mark, at_us, values in pd_moments()
            if role is not Role.TRANSFER
        ]
        for record in own:
            at_us = COMPUTED_US + (record.t_ns - queued_ns) // 1000
            values = dict(zip(MARKS[Mark(record.mark)].attrs, record.values, strict=False))
            moments.append((Role.TRANSFER, Mark(record.mark), at_us, values))
        request = replace(request_of(moments), request_id=name, trace_id=f"{number:032x}")
        spans = tuple(assemble(request))
        traces.append(Trace(trace_id=f"{number:032x}", spans=spans))
    return {timeline.request_id or "": timeline for timeline in build_timelines(traces)}


@pytest.mark.case("XFER-04")
def test_a_burst_waits_for_its_place_and_not_for_bytes(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Delay(COPY_MS / 1000))
    usual = [f"usual-{number}" for number in range(10)]
    for name in usual:
        burst(rig, [name])
    crowd = [f"burst-{number}" for number in range(200)]
    burst(rig, crowd)
    timelines = timelines_of(rig, [*usual, *crowd])
    assert len(timelines) == 210

    def nested_ns(name: str, stage: str) -> int:
        return sum(visit.duration_ns for visit in timelines[name].visits_of(stage))

    for number, name in enumerate(crowd):
        ahead = number // 2  # on its route, all of the same size
        assert nested_ns(name, "transfer.copy") == COPY_MS * MS
        assert abs(nested_ns(name, "transfer.queue") - ahead * COPY_MS * MS) <= MS
        timeline = timelines[name]
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns
        assert timeline.violations == ()
    baselines = Baselines([timelines[name] for name in usual])
    verdict = judge(timelines["burst-199"], baselines)
    assert (verdict.kind, verdict.stage, verdict.detail) == (
        VerdictKind.STALLED,
        "transfer",
        "transfer.queue",
    )
    assert verdict.wait is not None
    assert verdict.wait.reason == WaitReason.COPY_QUEUE
    assert "transfer.queue" in verdict.sentence
