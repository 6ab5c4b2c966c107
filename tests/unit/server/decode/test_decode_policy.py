"""Who gets pages and slots on a decode worker, case by case."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import WaitReason
from server.admission import Candidate, PageBudget
from server.decode.policy import DecodePlan, DecodeSnapshot, LandedSequence, plan_decode
from server.preemption import PreemptedSequence, RunningSequence


def reserving(name: str, needed: int, *, passes: int = 0) -> Candidate:
    return Candidate(handoff_id=name, request_id=f"r-{name}", needed=needed, passes=passes)


def landed(name: str, *, held: bool = False) -> LandedSequence:
    return LandedSequence(handoff_id=name, request_id=f"r-{name}", held=held)


def running(name: str, pages: int = 2, grow: int = 0) -> RunningSequence:
    return RunningSequence(handoff_id=name, request_id=f"r-{name}", pages=pages, grow=grow)


def preempted(name: str, pages: int) -> PreemptedSequence:
    return PreemptedSequence(handoff_id=name, request_id=f"r-{name}", pages=pages)


def plan(*, free: int = 10, pages_new: int | None = None, **parts: Any) -> DecodePlan:
    arguments: dict[str, Any] = {
        "reserving": (),
        "landed": (),
        "running": (),
        "preempted": (),
        "max_running": 4,
        **{key: tuple(value) if isinstance(value, list) else value for key, value in parts.items()},
    }
    return plan_decode(
        DecodeSnapshot(
            pages=PageBudget(free=free, total=20),
            pages_new=free if pages_new is None else pages_new,
            **arguments,
        )
    )


def waits(result: DecodePlan) -> list[tuple[str, WaitReason, int | None, tuple[str, ...]]]:
    return [(w.handoff_id, w.reason, w.needed, w.blockers) for w in result.waits]


def test_request_gets_its_pages_when_they_are_free() -> None:
    result = plan(reserving=[reserving("a", 10)])
    assert (result.reserve, result.waits) == (("a",), ())


def test_request_without_pages_says_how_many_are_missing() -> None:
    result = plan(reserving=[reserving("a", 11)])
    assert result.reserve == ()
    (wait,) = result.waits
    assert (wait.reason, wait.needed, wait.free, wait.limit, wait.blockers) == (
        WaitReason.KV_PAGES,
        11,
        10,
        20,
        (),
    )


def test_reserving_leaves_a_page_for_each_running_sequence() -> None:
    batch = [running("x"), running("y")]
    assert plan(reserving=[reserving("a", 9)], running=batch).reserve == ()
    assert plan(reserving=[reserving("a", 8)], running=batch).reserve == ("a",)


def test_growth_takes_pages_before_reservations_do() -> None:
    result = plan(reserving=[reserving("a", 2)], running=[running("x", grow=1)], free=3)
    assert (result.pages.grow, result.reserve) == (("x",), ())


def test_landed_sequences_take_the_free_slots_in_order() -> None:
    result = plan(
        landed=[landed("a"), landed("b"), landed("c")], running=[running("x")], max_running=3
    )
    assert result.admit == ("a", "b")
    assert waits(result) == [("c", WaitReason.SLOTS, 1, ("r-x",))]
    assert (result.waits[0].free, result.waits[0].limit, result.waits[0].position) == (0, 3, 0)


def test_sequence_that_commits_holds_a_slot() -> None:
    assert plan(landed=[landed("a")], committing=4).admit == ()


def test_held_sequence_takes_no_slot() -> None:
    result = plan(landed=[landed("a", held=True), landed("b")], max_running=1)
    assert result.admit == ("b",)
    assert waits(result) == [("a", WaitReason.INJECTED, None, ())]


def test_preempted_sequence_comes_before_landed_and_reserving_ones() -> None:
    result = plan(
        preempted=[preempted("p", 4)],
        landed=[landed("a")],
        reserving=[reserving("b", 7)],
        max_running=1,
    )
    assert (result.pages.resume, result.admit, result.reserve) == (("p",), (), ())


def test_nobody_reserves_while_a_preempted_sequence_waits_for_pages() -> None:
    result = plan(preempted=[preempted("p", 11)], reserving=[reserving("b", 1)])
    assert result.reserve == ()
    assert ("b", WaitReason.HEAD_OF_LINE, None, ("r-p",)) in waits(result)


def test_landed_sequence_may_run_while_a_preempted_one_waits_for_pages() -> None:
    assert plan(preempted=[preempted("p", 11)], landed=[landed("a")]).admit == ("a",)


def test_pages_that_a_fault_holds_are_for_running_sequences_only() -> None:
    result = plan(
        free=6, pages_new=0, running=[running("x", grow=1)], reserving=[reserving("a", 1)]
    )
    assert result.pages.grow == ("x",)
    assert waits(result) == [("a", WaitReason.KV_PAGES, 2, ())]  # one stays free for x
    assert result.waits[0].free == 0


@given(
    reserve=st.lists(st.integers(1, 8), max_size=5),
    land=st.lists(st.booleans(), max_size=5),
    run=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1)), max_size=4),
    out=st.lists(st.integers(1, 6), max_size=3),
    free=st.integers(0, 12),
)
def test_pages_and_slots_are_never_overdrawn_and_everyone_left_out_is_told_why(
    reserve: list[int],
    land: list[bool],
    run: list[tuple[int, int]],
    out: list[int],
    free: int,
) -> None:
    queue = [reserving(f"q{i}", n) for i, n in enumerate(reserve)]
    ready = [landed(f"l{i}", held=h) for i, h in enumerate(land)]
    batch = [running(f"x{i}", n, g) for i, (n, g) in enumerate(run)]
    gone = [preempted(f"p{i}", n) for i, n in enumerate(out)]
    result = plan(reserving=queue, landed=ready, running=batch, preempted=gone, free=free)
    taken = sum(c.needed for c in queue if c.handoff_id in result.reserve)
    assert taken <= result.pages.free
    assert len(result.pages.running) + len(result.admit) <= 4
    told = {wait.handoff_id for wait in result.waits}
    left_out = {s.handoff_id for s in (*queue, *ready, *gone)}
    left_out -= {*result.reserve, *result.admit, *result.pages.resume}
    assert told == left_out
