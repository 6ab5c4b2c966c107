"""How prompts and running sequences share a colocated worker's step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import WaitReason
from server.admission import PageBudget
from server.colocated.policy import ColocatedPlan, ColocatedSnapshot, plan_colocated
from server.preemption import PreemptedSequence, RunningSequence
from server.prefill.policy import QueuedPrompt, RunningPrompt


def queued(name: str, tokens: int, pages: int = 1, *, held: bool = False) -> QueuedPrompt:
    return QueuedPrompt(
        handoff_id=name, request_id=f"r-{name}", tokens=tokens, pages=pages, held=held
    )


def prompt(name: str, tokens: int) -> RunningPrompt:
    return RunningPrompt(handoff_id=name, request_id=f"r-{name}", tokens=tokens)


def running(name: str, grow: int = 0) -> RunningSequence:
    return RunningSequence(handoff_id=name, request_id=f"r-{name}", pages=2, grow=grow)


def plan(*, free: int = 100, chunked: bool = True, **parts: Any) -> ColocatedPlan:
    arguments: dict[str, Any] = {
        "queue": (),
        "prefilling": (),
        "running": (),
        "preempted": (),
        "budget": 8,
        "max_running": 4,
        **{key: tuple(value) if isinstance(value, list) else value for key, value in parts.items()},
    }
    return plan_colocated(
        ColocatedSnapshot(
            pages=PageBudget(free=free, total=100),
            chunked=chunked,
            **arguments,
        )
    )


def chunks(result: ColocatedPlan) -> list[tuple[str, int]]:
    return [(chunk.handoff_id, chunk.tokens) for chunk in result.chunks]


def waits(result: ColocatedPlan) -> list[tuple[str, WaitReason, tuple[str, ...]]]:
    return [(w.handoff_id, w.reason, w.blockers) for w in result.waits]


def test_chunked_prompt_gets_what_the_batch_leaves_of_the_budget() -> None:
    result = plan(running=[running("x"), running("y")], queue=[queued("a", 50)])
    assert (result.decode, chunks(result)) == (True, [("a", 6)])


def test_chunked_prompt_gets_on_however_large_the_batch_is() -> None:
    result = plan(
        running=[running(f"x{i}") for i in range(3)], prefilling=[prompt("a", 9)], budget=2
    )
    assert (result.decode, chunks(result)) == (True, [("a", 1)])


def test_unchunked_prompt_runs_whole_and_the_batch_waits() -> None:
    result = plan(chunked=False, running=[running("x")], queue=[queued("a", 50)])
    assert (result.decode, chunks(result)) == (False, [("a", 50)])


def test_unchunked_prompts_share_a_step_up_to_the_budget() -> None:
    queue = [queued("a", 3), queued("b", 5), queued("c", 1)]
    result = plan(chunked=False, queue=queue)
    assert chunks(result) == [("a", 3), ("b", 5)]
    assert waits(result) == [("c", WaitReason.TOKEN_BUDGET, ("r-b", "r-a"))]


def test_unchunked_prompt_longer_than_the_budget_runs_alone_and_is_not_passed() -> None:
    queue = [queued("a", 3), queued("long", 50), queued("c", 1)]
    result = plan(chunked=False, queue=queue)
    assert chunks(result) == [("a", 3)]
    assert waits(result) == [
        ("long", WaitReason.TOKEN_BUDGET, ("r-a",)),
        ("c", WaitReason.TOKEN_BUDGET, ("r-a",)),
    ]


def test_batch_runs_when_no_prompt_can_start() -> None:
    result = plan(chunked=False, running=[running("x")], queue=[queued("a", 3, pages=500)], free=5)
    assert (result.decode, chunks(result)) == (True, [])
    assert waits(result) == [("a", WaitReason.KV_PAGES, ())]


@pytest.mark.parametrize("chunked", [True, False])
def test_prompt_needs_a_slot(chunked: bool) -> None:
    result = plan(
        chunked=chunked, running=[running("x")], occupied=1, queue=[queued("a", 3)], max_running=2
    )
    assert result.start == ()
    assert waits(result) == [("a", WaitReason.SLOTS, ("r-x",))]


def test_no_prompt_starts_while_a_preempted_sequence_waits() -> None:
    gone = PreemptedSequence(handoff_id="p", request_id="r-p", pages=200)
    result = plan(preempted=[gone], queue=[queued("a", 3)])
    assert result.start == ()
    assert ("a", WaitReason.HEAD_OF_LINE, ("r-p",)) in waits(result)


def test_held_prompt_waits_as_injected_and_is_passed() -> None:
    result = plan(queue=[queued("held", 3, held=True), queued("b", 2)])
    assert result.start == ("b",)
    assert waits(result) == [("held", WaitReason.INJECTED, ())]


@given(
    chunked=st.booleans(),
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6), st.booleans()), max_size=6),
    going=st.lists(st.integers(1, 20), max_size=2),
    batch=st.lists(st.integers(0, 1), max_size=3),
    free=st.integers(0, 12),
)
def test_slots_and_pages_hold_and_every_prompt_is_served_or_told_why(
    chunked: bool,
    rows: list[tuple[int, int, bool]],
    going: list[int],
    batch: list[int],
    free: int,
) -> None:
    queue = [queued(f"q{i}", n, p, held=h) for i, (n, p, h) in enumerate(rows)]
    prefilling = [prompt(f"g{i}", n) for i, n in enumerate(going)]
    sequences = [running(f"x{i}", g) for i, g in enumerate(batch)]
    result = plan(
        chunked=chunked,
        queue=queue,
        prefilling=prefilling,
        running=sequences,
        free=free,
        max_running=6,
    )
    served = {chunk.handoff_id for chunk in result.chunks}
    told = {wait.handoff_id for wait in result.waits}
    assert served | told == {p.handoff_id for p in (*queue, *prefilling)}
    assert not served & told
    assert len(result.pages.running) + len(prefilling) + len(result.start) <= 6
    assert sum(q.pages for q in queue if q.handoff_id in result.start) <= result.pages.free
    assert result.decode or result.chunks
