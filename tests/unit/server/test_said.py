"""How often the trace is told of a wait."""

from __future__ import annotations

import pytest

from pdtrace.stages import WaitReason
from server.said import AGAIN_NS, EXACT_POSITIONS, NS_PER_MS, Said, is_due

BEFORE = Said("prefill.queue", WaitReason.TOKEN_BUDGET, 0)


def later(ns: int, *, stage: str = BEFORE.stage, reason: WaitReason = BEFORE.reason) -> Said:
    return Said(stage, reason, ns)


def test_first_wait_and_another_reason_are_said_at_once() -> None:
    assert is_due(None, later(0), 1000)
    assert is_due(BEFORE, later(1, reason=WaitReason.KV_PAGES), 1000)
    assert is_due(BEFORE, later(1, stage="decode.reserve"), 1000)


@pytest.mark.parametrize("position", [None, 0, EXACT_POSITIONS - 1])
def test_head_of_a_queue_and_what_is_in_no_queue_are_followed_exactly(
    position: int | None,
) -> None:
    assert is_due(BEFORE, later(1), position)


@pytest.mark.parametrize(
    ("position", "every_ns"), [(EXACT_POSITIONS, AGAIN_NS), (100, AGAIN_NS), (250, 250 * NS_PER_MS)]
)
def test_further_back_the_same_reason_is_said_now_and_then(position: int, every_ns: int) -> None:
    assert not is_due(BEFORE, later(every_ns - 1), position)
    assert is_due(BEFORE, later(every_ns), position)
