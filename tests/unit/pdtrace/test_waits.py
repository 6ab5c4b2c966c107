"""One clause per reason, with its numbers."""

from __future__ import annotations

import pytest

from pdtrace.analysis.facts import Wait
from pdtrace.analysis.waits import describe_wait, describe_wait_now, listed
from pdtrace.inflight import WaitNow
from pdtrace.stages import GapCause, WaitReason


@pytest.mark.parametrize(
    ("wait", "clause"),
    [
        (
            Wait(stage="s", reason="kv_pages", needed=12, free=3, blocker="req-17"),
            "needed 12 KV pages, 3 free; behind req-17",
        ),
        (Wait(stage="s", reason="kv_pages"), "waited for KV pages"),
        (
            Wait(stage="s", reason="slots", needed=1, free=0, limit=8, position=2),
            "needed 1 slot in the running batch, 0 free, limit 8; 2 ahead in the queue",
        ),
        (
            Wait(stage="s", reason="token_budget", needed=512, free=64, limit=256),
            "needed 512 tokens of the step's budget, 64 free, limit 256",
        ),
        (
            Wait(stage="s", reason="concurrency", needed=1, free=0, limit=4),
            "the concurrency limit of 4 was reached",
        ),
        (
            Wait(stage="s", reason="head_of_line", blocker="req-3", position=1),
            "an earlier request in the same queue came first: req-3; 1 ahead in the queue",
        ),
        (
            Wait(stage="s", reason="worker_busy", blocker="req-3"),
            "the worker was running a step of other requests: req-3",
        ),
        (
            Wait(stage="s", reason="no_worker", needed=2, free=1),
            "needed 2 ready workers, had 1",
        ),
        (
            Wait(stage="s", reason="preempted", needed=4, free=1),
            "its pages went to running requests; needed 4 KV pages, 1 free",
        ),
        (
            Wait(stage="s", reason="kv_pages", blocker="a", blockers=("a", "b", "c")),
            "waited for KV pages; behind a, b and c",
        ),
        (
            Wait(stage="s", reason="head_of_line", blocker="a", blockers=("a", "b")),
            "an earlier request in the same queue came first; behind a and b",
        ),
        (
            Wait(
                stage="decode.gap",
                reason="interfering_prefill",
                blocker="req-17",
                blockers=("req-17",),
                step=42,
                for_ns=910_000_000,
                explained_ns=830_000_000,
            ),
            "a prompt ran in the same worker: req-17 (step 42); that is 830 ms of the 910 ms gap, "
            "91 %",
        ),
        (
            Wait(stage="decode.gap", reason="batch_growth", batch=9),
            "the step itself took longer, with 9 requests in the batch",
        ),
        (
            # The same word, but a wait inside a stage that is no gap.
            Wait(stage="decode.reserve", reason="injected"),
            "delayed by a fault hook",
        ),
        (
            Wait(stage="s", reason="disk", needed=3),
            "waited for disk: 3 units",
        ),
    ],
)
def test_clause_of_a_reason(wait: Wait, clause: str) -> None:
    assert describe_wait(wait) == clause


@pytest.mark.parametrize("reason", list(WaitReason))
def test_every_reason_has_a_clause(reason: WaitReason) -> None:
    clause = describe_wait(Wait(stage="s", reason=reason.value))
    assert clause
    assert not clause.endswith(".")


@pytest.mark.parametrize("cause", list(GapCause))
def test_every_gap_cause_has_a_clause_of_its_own(cause: GapCause) -> None:
    clause = describe_wait(Wait(stage="decode.gap", reason=cause.value))
    assert clause
    assert not clause.startswith("waited for")
    assert not clause.endswith(".")


def test_wait_of_a_look_reads_the_same() -> None:
    now = WaitNow(reason="kv_pages", needed=12, free=3, blockers=("a", "b"), age_s=2.0)
    then = Wait(stage="s", reason="kv_pages", needed=12, free=3, blocker="a", blockers=("a", "b"))
    assert describe_wait_now("decode.reserve", now) == describe_wait(then)
    assert describe_wait_now(None, now) == describe_wait(then)


def test_names_are_listed_as_in_a_sentence() -> None:
    assert [listed(list("abc"[:n])) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_blocker_whose_id_is_part_of_the_clause_is_named_all_the_same() -> None:
    wait = Wait(
        stage="decode.reserve",
        reason="kv_pages",
        needed=9,
        free=1,
        limit=64,
        blocker="64",
        blockers=("64",),
    )
    assert describe_wait(wait) == "needed 9 KV pages, 1 free, limit 64; behind 64"
