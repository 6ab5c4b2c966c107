"""What a prefill step computes, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import WaitReason
from server.admission import PageBudget
from server.prefill.policy import (
    PrefillPlan,
    PrefillSnapshot,
    QueuedPrompt,
    RunningPrompt,
    plan_prefill,
)


def queued(name: str, tokens: int, pages: int = 1, *, held: bool = False) -> QueuedPrompt:
    return QueuedPrompt(
        handoff_id=name, request_id=f"r-{name}", tokens=tokens, pages=pages, held=held
    )


def running(name: str, tokens: int) -> RunningPrompt:
    return RunningPrompt(handoff_id=name, request_id=f"r-{name}", tokens=tokens)


def plan(
    runs: list[RunningPrompt] | None = None,
    queue: list[QueuedPrompt] | None = None,
    *,
    budget: int = 8,
    free: int = 100,
) -> PrefillPlan:
    return plan_prefill(
        PrefillSnapshot(
            running=tuple(runs or ()),
            queue=tuple(queue or ()),
            pages=PageBudget(free=free, total=100),
            budget=budget,
        )
    )


def chunks(result: PrefillPlan) -> list[tuple[str, int]]:
    return [(chunk.handoff_id, chunk.tokens) for chunk in result.chunks]


def waits(result: PrefillPlan) -> list[tuple[str, WaitReason, int | None, tuple[str, ...]]]:
    return [(w.handoff_id, w.reason, w.needed, w.blockers) for w in result.waits]


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (7, 7), (8, 8), (9, 8), (80, 8)])
def test_chunk_is_the_prompt_or_the_budget(tokens: int, expected: int) -> None:
    result = plan(queue=[queued("a", tokens)])
    assert (result.start, chunks(result)) == (("a",), [("a", expected)])


def test_nothing_to_do_is_an_empty_plan() -> None:
    result = plan()
    assert (result.start, result.chunks, result.waits) == ((), (), ())


def test_budget_is_shared_in_order_and_the_last_gets_what_is_left() -> None:
    result = plan([running("a", 3)], [queued("b", 4), queued("c", 5), queued("d", 1)])
    assert chunks(result) == [("a", 3), ("b", 4), ("c", 1)]
    assert result.start == ("b", "c")
    assert waits(result) == [("d", WaitReason.TOKEN_BUDGET, 1, ("r-b", "r-a", "r-c"))]
    assert (result.waits[0].free, result.waits[0].limit, result.waits[0].position) == (0, 8, 0)


def test_running_prompt_goes_before_queued_ones() -> None:
    result = plan([running("long", 50)], [queued("short", 1)])
    assert chunks(result) == [("long", 8)]
    assert waits(result) == [("short", WaitReason.TOKEN_BUDGET, 1, ("r-long",))]


def test_running_prompt_without_tokens_left_in_the_budget_says_who_took_them() -> None:
    result = plan([running("a", 8), running("b", 2)])
    assert waits(result) == [("b", WaitReason.TOKEN_BUDGET, 2, ("r-a",))]


def test_prompt_without_pages_waits_and_a_small_one_passes() -> None:
    result = plan(queue=[queued("big", 4, pages=9), queued("small", 2, pages=1)], free=3)
    assert result.start == ("small",)
    assert result.passes == {"big": 1}
    assert waits(result) == [("big", WaitReason.KV_PAGES, 9, ())]


def test_held_prompt_waits_as_injected_even_when_the_budget_is_spent() -> None:
    result = plan([running("a", 8)], [queued("held", 1, held=True), queued("b", 1)])
    assert waits(result) == [
        ("b", WaitReason.TOKEN_BUDGET, 1, ("r-a",)),
        ("held", WaitReason.INJECTED, None, ()),
    ]


@given(
    st.lists(st.integers(1, 30), max_size=5),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.booleans()), max_size=8),
    st.integers(1, 16),
    st.integers(0, 12),
)
def test_budget_and_pages_hold_and_everyone_is_served_or_told_why(
    runs: list[int], rows: list[tuple[int, int, bool]], budget: int, free: int
) -> None:
    prompts = [running(f"a{i}", n) for i, n in enumerate(runs)]
    queue = [queued(f"b{i}", n, p, held=h) for i, (n, p, h) in enumerate(rows)]
    result = plan(prompts, queue, budget=budget, free=free)
    left = {p.handoff_id: p.tokens for p in (*prompts, *queue)}
    assert sum(chunk.tokens for chunk in result.chunks) <= budget
    assert all(0 < chunk.tokens <= left[chunk.handoff_id] for chunk in result.chunks)
    served = {chunk.handoff_id for chunk in result.chunks}
    told = {wait.handoff_id for wait in result.waits}
    assert served | told == set(left)
    assert not served & told
    assert set(result.start) == served & {q.handoff_id for q in queue}
    assert sum(q.pages for q in queue if q.handoff_id in result.start) <= free
    if prompts:
        assert result.chunks[0].handoff_id == "a0"
