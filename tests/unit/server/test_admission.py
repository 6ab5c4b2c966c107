"""First come, first served for pages, with bounded overtaking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import WaitReason
from server.admission import Candidate, FifoAdmission, PageBudget


def candidate(name: str, needed: int, *, passes: int = 0, held: bool = False) -> Candidate:
    return Candidate(
        handoff_id=f"h-{name}", request_id=name, needed=needed, passes=passes, held=held
    )


def offer_all(admission: FifoAdmission, *queue: Candidate) -> list[str]:
    return [c.request_id for i, c in enumerate(queue) if admission.offer(c, i)]


def pages(free: int) -> PageBudget:
    return PageBudget(free=free, total=10)


def test_pages_go_in_order_while_they_last() -> None:
    admission = FifoAdmission(pages(5))
    assert offer_all(admission, candidate("a", 2), candidate("b", 3), candidate("c", 1)) == [
        "a",
        "b",
    ]
    assert admission.free == 0


def test_small_request_passes_one_that_lacks_pages() -> None:
    admission = FifoAdmission(pages(3))
    assert offer_all(admission, candidate("big", 9), candidate("small", 2)) == ["small"]
    assert admission.passes == {"h-big": 1}
    (wait,) = admission.waits
    assert (wait.reason, wait.needed, wait.free, wait.limit, wait.position, wait.blockers) == (
        WaitReason.KV_PAGES,
        9,
        3,
        10,
        0,
        (),
    )


def test_nobody_passes_a_request_that_was_passed_often_enough() -> None:
    admission = FifoAdmission(pages(3), max_passes=2)
    queue = [candidate("big", 9, passes=2), candidate("small", 1)]
    assert offer_all(admission, *queue) == []
    assert [(w.reason, w.blockers) for w in admission.waits] == [
        (WaitReason.KV_PAGES, ()),
        (WaitReason.HEAD_OF_LINE, ("big",)),
    ]


def test_passes_of_one_plan_count_too() -> None:
    admission = FifoAdmission(pages(9), max_passes=2)
    queue = [candidate("big", 10), *(candidate(f"s{i}", 1) for i in range(4))]
    assert offer_all(admission, *queue) == ["s0", "s1"]
    assert admission.passes == {"h-big": 2}


def test_held_request_is_passed_freely_and_says_so() -> None:
    admission = FifoAdmission(pages(2), max_passes=0)
    assert offer_all(admission, candidate("held", 1, held=True), candidate("next", 1)) == ["next"]
    assert admission.passes == {}
    assert [wait.reason for wait in admission.waits] == [WaitReason.INJECTED]


def test_headroom_stays_free() -> None:
    admission = FifoAdmission(pages(5), headroom=2)
    assert offer_all(admission, candidate("a", 4)) == []
    assert offer_all(admission, candidate("b", 3)) == ["b"]
    assert admission.free == 2


@given(
    st.integers(0, 20),
    st.integers(0, 5),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.booleans()), max_size=12),
)
def test_everyone_is_taken_or_told_why_and_pages_are_never_overdrawn(
    free: int, headroom: int, max_passes: int, rows: list[tuple[int, int, bool]]
) -> None:
    queue = [
        candidate(str(i), needed, passes=passes, held=held)
        for i, (needed, passes, held) in enumerate(rows)
    ]
    admission = FifoAdmission(pages(free), headroom=headroom, max_passes=max_passes)
    taken = set(offer_all(admission, *queue))
    told = {wait.handoff_id.removeprefix("h-") for wait in admission.waits}
    assert taken | told == {c.request_id for c in queue}
    assert not taken & told
    used = sum(c.needed for c in queue if c.request_id in taken)
    assert admission.free == free - used
    assert not used or admission.free >= headroom
    for c in queue:
        assert admission.passes.get(c.handoff_id, 0) <= max(max_passes, c.passes)
