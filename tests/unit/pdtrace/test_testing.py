"""The public test kit records what it says it records."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.propagation import RemoteParent, RequestContext
from pdtrace.ring import EndRecord, MarkRecord, OpenRecord, RingReader, StepRecord, scan_rings
from pdtrace.stages import CHAINS, MARKS, Mark, Mode, Outcome, Role, StepKind, WaitReason
from pdtrace.testing import (
    HEALTHY_STAGE_MS,
    FakeClock,
    MemoryRings,
    SequentialIds,
    open_recorders,
    record_request,
)

ROLES = {
    Mode.PD: {Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE},
    Mode.PD_EARLY: {Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE},
    Mode.COLOCATED: {Role.GATEWAY, Role.WORKER},
}
_MILLISECONDS = st.dictionaries(
    st.sampled_from(sorted(HEALTHY_STAGE_MS)), st.floats(0, 10_000, allow_nan=False)
)


def marks_by_role(rings: MemoryRings) -> dict[Role, list[MarkRecord]]:
    found: dict[Role, list[MarkRecord]] = {}
    for identity, record in rings.read():
        if isinstance(record, MarkRecord):
            found.setdefault(identity.role, []).append(record)
    return found


@given(mode=st.sampled_from(list(Mode)), stage_ms=_MILLISECONDS, chunks=st.integers(1, 5))
def test_a_recorded_request_has_the_whole_chain_and_its_stages_sum_up(
    mode: Mode, stage_ms: dict[str, float], chunks: int
):
    chain = CHAINS[mode]
    stage_ms = {name: ms for name, ms in stage_ms.items() if name in {s.name for s in chain}}
    rings = MemoryRings(clock=FakeClock())
    recorded = record_request(rings.recorders, mode=mode, stage_ms=stage_ms, chunks=chunks)

    assert list(recorded.stages) == [stage.name for stage in chain]
    assert recorded.end_ns - recorded.begin_ns == sum(e - b for b, e in recorded.stages.values())
    for name, (begin_ns, end_ns) in recorded.stages.items():
        assert end_ns - begin_ns == round({**HEALTHY_STAGE_MS, **stage_ms}[name] * 1e6)

    found = marks_by_role(rings)
    assert found.keys() == ROLES[mode]
    read = sorted((mark.t_ns, role, mark.mark) for role, marks in found.items() for mark in marks)
    assert read == sorted(recorded.marks)
    for role, marks in found.items():
        assert all(a.t_ns <= b.t_ns for a, b in pairwise(marks)), role
        assert all(role in MARKS[mark.mark].roles for mark in marks)
    ends = {mark.mark: mark.t_ns for marks in found.values() for mark in marks}
    for stage in chain:
        assert ends[stage.end] == recorded.stages[stage.name][1]


def test_every_process_opens_and_ends_the_request_with_the_same_identity():
    rings = MemoryRings()
    context = RequestContext.create(
        request_id="r", parent=RemoteParent("a" * 32, "b" * 16, sampled=False)
    )
    record_request(rings.recorders, context=context)
    for role in ROLES[Mode.PD]:
        records = rings.records(role)
        assert isinstance(records[0], OpenRecord)
        assert records[0].context == context
        assert isinstance(records[-1], EndRecord)


def test_every_mark_of_a_disaggregated_request_can_be_recorded():
    """Marks that a healthy request lacks are those of faults and of the other modes."""
    rings = MemoryRings()
    seen: set[Mark] = set()
    for mode in Mode:
        record_request(rings.recorders, mode=mode, chunks=2)
    for marks in marks_by_role(rings).values():
        seen |= {mark.mark for mark in marks}
    assert set(Mark) - seen == {
        Mark.PREEMPTED,
        Mark.RESUMED,
        Mark.TOKEN_GAP,
        Mark.WAITING,
        Mark.ABORTED,
    }


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.LOST, None]
)
def test_a_request_that_stops_records_nothing_beyond(mode: Mode, outcome: Outcome | None):
    for stage in CHAINS[mode]:
        rings = MemoryRings(clock=FakeClock())
        recorded = record_request(
            rings.recorders, mode=mode, outcome=outcome, stop_in=stage.name, reason="why", by="who"
        )
        found = marks_by_role(rings)
        by_mark = {mark.mark: mark for marks in found.values() for mark in marks}
        reached = [one.end for one in CHAINS[mode] if one.name in recorded.stages]
        if outcome is not None:
            assert reached.pop() is stage.end  # the stage it stopped in is given, not completed
            completed = by_mark[Mark.COMPLETED]
            assert completed.values[:3] == (outcome, "why", "who")
            assert completed.t_ns == recorded.end_ns
        missing = {one.end for one in CHAINS[mode]} - set(reached) - {Mark.COMPLETED}
        assert not missing & by_mark.keys()
        assert set(reached) <= by_mark.keys()
        assert (Mark.ABORTED in by_mark) is (outcome not in (Outcome.LOST, None))


def test_a_lost_process_and_a_request_in_flight_have_no_end_record():
    rings = MemoryRings()
    record_request(rings.recorders, outcome=Outcome.LOST, stop_in="prefill.compute")
    assert not any(isinstance(record, EndRecord) for record in rings.records(Role.PREFILL))
    assert any(isinstance(record, EndRecord) for record in rings.records(Role.GATEWAY))
    rings = MemoryRings()
    record_request(rings.recorders, outcome=None, stop_in="transfer")
    assert not any(isinstance(record, EndRecord) for _, record in rings.read())


def test_waits_are_said_by_the_stages_owner_at_its_begin():
    rings = MemoryRings()
    recorded = record_request(
        rings.recorders,
        waits={"decode.reserve": {"reason": WaitReason.KV_PAGES, "needed": 9, "blocker": "b"}},
    )
    (wait,) = (m for m in marks_by_role(rings)[Role.DECODE] if m.mark is Mark.WAITING)
    assert wait.values == ("decode.reserve", "kv_pages", 9, None, None, None, "b", None)
    assert wait.t_ns == recorded.stages["decode.reserve"][0]


def test_several_blockers_of_a_wait_are_all_recorded():
    rings = MemoryRings()
    blockers = ["a", "b", "c", "d", "e"]
    record_request(rings.recorders, waits={"decode.queue": {"blocker": blockers}})
    (wait,) = (m for m in marks_by_role(rings)[Role.DECODE] if m.mark is Mark.WAITING)
    assert wait.values[6:] == ("a", "a\x1fb\x1fc\x1fd")


@pytest.mark.parametrize("mode", list(Mode))
def test_steps_fill_the_compute_of_both_legs(mode: Mode):
    rings = MemoryRings(clock=FakeClock())
    recorded = record_request(
        rings.recorders, mode=mode, steps=True, chunks=3, prompt_tokens=100, output_tokens=8
    )
    found = [
        (record.begin_ns, record.end_ns, identity.role, record.kind, record.tokens, record.members)
        for identity, record in rings.read()
        if isinstance(record, StepRecord)
    ]
    assert sorted(one[:4] for one in found) == sorted(recorded.steps)
    for stage, kind, count, tokens in (
        ("prefill.compute", StepKind.PREFILL, 3, 100),
        ("decode.generate", StepKind.DECODE, 7, 7),
    ):
        steps = [one for one in found if one[3] is kind]
        assert (steps[0][0], steps[-1][1]) == recorded.stages[stage]
        assert [one[0] for one in steps[1:]] == [one[1] for one in steps[:-1]]  # no time between
        assert (len(steps), sum(one[4] for one in steps)) == (count, tokens)
        assert all(len(one[5]) == 1 for one in steps)


def test_a_request_that_stops_has_the_steps_that_it_came_through():
    rings = MemoryRings(clock=FakeClock())
    recorded = record_request(rings.recorders, steps=True, outcome=None, stop_in="decode.generate")
    assert {kind for *_, kind in recorded.steps} == {StepKind.PREFILL}


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage_ms": {"prefill.hold": 1.0}},
        {"stop_in": "transfer"},
        {"outcome": Outcome.FAILED},
        {"outcome": None},
        {"mode": Mode.COLOCATED, "outcome": Outcome.FAILED, "stop_in": "transfer"},
    ],
)
def test_requests_that_cannot_be_are_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=r"chain|stop_in"):
        record_request(MemoryRings().recorders, **wrong)  # pyright: ignore[reportArgumentType] wrong on purpose


def test_requests_go_into_ring_files_as_well(tmp_path: Path):
    recorders = open_recorders(tmp_path, roles=sorted(ROLES[Mode.PD]), clock=FakeClock())
    recorded = record_request(recorders, request_id="on-disk")
    for recorder in recorders.values():
        recorder.close()
    marks: list[tuple[int, Role, Mark]] = []
    for path in scan_rings(tmp_path):
        with RingReader(path) as reader:
            assert reader.closed
            marks += [
                (record.t_ns, reader.identity.role, record.mark)
                for record in reader.read()
                if isinstance(record, MarkRecord)
            ]
    assert sorted(marks) == sorted(recorded.marks)


def test_several_instances_of_a_role_have_rings_of_their_own():
    rings = MemoryRings()
    assert rings.recorder(Role.DECODE) is rings.recorders[Role.DECODE]
    second = rings.recorder(Role.DECODE, "decode-1")
    assert second is not rings.recorders[Role.DECODE]
    second.begin(RequestContext.create()).end()
    assert rings.records(Role.DECODE) == []
    assert len(rings.records(Role.DECODE, "decode-1")) == 2


def test_sequential_ids_are_predictable_and_valid():
    ids = SequentialIds(first=7)
    assert ids.trace_id() == f"{7:032x}"
    assert [ids.span_id(), ids.span_id()] == [f"{7:016x}", f"{8:016x}"]
    assert (ids.request_id(), ids.handoff_id()) == ("req-7", "ho-7")
