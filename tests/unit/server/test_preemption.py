"""Who keeps pages, who loses them, who gets them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import WaitReason
from server.admission import PageBudget
from server.preemption import PagePlan, PreemptedSequence, RunningSequence, plan_pages


def run(name: str, pages: int, *, grow: int = 0, held: bool = False) -> RunningSequence:
    return RunningSequence(
        handoff_id=name, request_id=f"r-{name}", pages=pages, grow=grow, held=held
    )


def out(name: str, pages: int) -> PreemptedSequence:
    return PreemptedSequence(handoff_id=name, request_id=f"r-{name}", pages=pages)


def plan(
    running: list[RunningSequence],
    preempted: list[PreemptedSequence],
    free: int,
    *,
    slots: int = 8,
    total: int = 20,
) -> PagePlan:
    budget = PageBudget(free=free, total=total)
    return plan_pages(tuple(running), tuple(preempted), budget, slots=slots, max_running=8)


def lost(result: PagePlan) -> list[tuple[str, str]]:
    return [(preemption.handoff_id, preemption.blocker) for preemption in result.preempt]


def test_sequences_grow_while_pages_are_free() -> None:
    result = plan([run("a", 2, grow=1), run("b", 3), run("c", 1, grow=1)], [], free=2)
    assert (result.grow, lost(result), result.free) == (("a", "c"), [], 0)
    assert result.running == ("a", "b", "c")


def test_latest_admitted_gives_its_pages_to_the_one_that_grows() -> None:
    result = plan([run("a", 2, grow=1), run("b", 3), run("c", 4)], [], free=0)
    assert lost(result) == [("c", "r-a")]
    assert (result.grow, result.running, result.free) == (("a",), ("a", "b"), 3)
    assert result.returning == "r-c"


def test_several_lose_their_pages_when_one_is_not_enough() -> None:
    result = plan([run("a", 2, grow=1), run("b", 3, grow=1), run("c", 1)], [], free=0)
    assert lost(result) == [("c", "r-a"), ("b", "r-b")]
    assert (result.grow, result.running) == (("a",), ("a",))


def test_lone_sequence_gives_way_itself_when_others_hold_the_pages() -> None:
    result = plan([run("a", 5, grow=1)], [], free=0)
    assert lost(result) == [("a", "r-a")]
    assert (result.grow, result.running, result.free) == ((), (), 5)


def test_sequence_that_sits_out_needs_nothing_but_may_lose_its_pages() -> None:
    assert lost(plan([run("a", 2, grow=1, held=True)], [], free=0)) == []
    result = plan([run("a", 2, grow=1), run("b", 2, held=True)], [], free=0)
    assert lost(result) == [("b", "r-a")]


def test_sequences_come_back_in_order_of_admission() -> None:
    result = plan([], [out("a", 3), out("b", 2), out("c", 9)], free=6)
    assert (result.resume, result.free, result.returning) == (("a", "b"), 1, "r-c")


def test_nobody_comes_back_before_an_earlier_one() -> None:
    result = plan([], [out("a", 9), out("b", 1)], free=6)
    assert result.resume == ()
    assert [
        (w.handoff_id, w.reason, w.needed, w.free, w.position, w.blockers) for w in result.waits
    ] == [
        ("a", WaitReason.KV_PAGES, 9, 6, 0, ()),
        ("b", WaitReason.HEAD_OF_LINE, None, None, 1, ("r-a",)),
    ]


def test_coming_back_leaves_a_page_for_each_running_sequence() -> None:
    running = [run("a", 2), run("b", 2)]
    assert plan(running, [out("c", 3)], free=4).resume == ()
    assert plan(running, [out("c", 3)], free=5).resume == ("c",)


def test_coming_back_needs_a_slot() -> None:
    result = plan([run("a", 2)], [out("b", 1)], free=9, slots=0)
    assert result.resume == ()
    (wait,) = result.waits
    assert (wait.reason, wait.needed, wait.free, wait.blockers) == (
        WaitReason.SLOTS,
        1,
        0,
        ("r-a",),
    )


def test_one_that_would_fit_while_another_goes_waits_for_who_takes_the_pages() -> None:
    result = plan([run("a", 2, grow=1), run("b", 3), run("c", 9)], [out("d", 2)], free=0)
    assert lost(result) == [("c", "r-a")]
    (wait,) = result.waits
    assert (wait.reason, wait.needed, wait.free) == (WaitReason.PREEMPTED, None, None)
    assert (wait.position, wait.blockers) == (0, ("r-a",))


def test_nobody_comes_back_in_a_turn_in_which_somebody_goes() -> None:
    result = plan([run("a", 2, grow=1), run("b", 9)], [out("c", 1)], free=0)
    assert lost(result) == [("b", "r-a")]
    assert result.resume == ()


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1), st.booleans()), max_size=6),
    st.lists(st.integers(1, 8), max_size=4),
    st.integers(0, 8),
    st.integers(0, 3),
)
def test_pages_add_up_and_nobody_is_in_two_places(
    rows: list[tuple[int, int, bool]], waiting: list[int], free: int, slots: int
) -> None:
    running = [run(f"a{i}", n, grow=g, held=h) for i, (n, g, h) in enumerate(rows)]
    preempted = [out(f"b{i}", n) for i, n in enumerate(waiting)]
    result = plan(running, preempted, free, slots=slots)
    gone = {preemption.handoff_id for preemption in result.preempt}
    pages_of = {s.handoff_id: s.pages for s in (*running, *preempted)}
    assert result.free >= 0
    assert result.free == (
        free
        + sum(pages_of[name] for name in gone)
        - len(result.grow)
        - sum(pages_of[name] for name in result.resume)
    )
    assert set(result.running) == {s.handoff_id for s in running} - gone | set(result.resume)
    assert set(result.grow) <= set(result.running)
    # Who needs a page and stays gets it.
    for sequence in running:
        if sequence.handoff_id not in gone and sequence.grow and not sequence.held:
            assert sequence.handoff_id in result.grow
    # The latest go first.
    names = [s.handoff_id for s in running]
    assert not gone or gone == set(names[-len(gone) :])
    told = {wait.handoff_id for wait in result.waits}
    assert told == {s.handoff_id for s in preempted} - set(result.resume)
    assert len(result.resume) <= slots
    lost_theirs = {f"r-{name}" for name in gone}
    for wait in result.waits:
        assert wait.needed is None or (wait.free is not None and wait.needed > wait.free)
        assert wait.reason is not WaitReason.PREEMPTED or lost_theirs.isdisjoint(wait.blockers)


@pytest.mark.parametrize("free", range(1, 5))
def test_the_only_sequence_that_needs_pages_gets_on_when_any_are_free(free: int) -> None:
    assert plan([run("a", 3, grow=1)], [], free=free).grow == ("a",)
    assert plan([], [out("a", free)], free=free).resume == ("a",)
