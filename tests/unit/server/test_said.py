"""How often the trace is told of a wait."""

from __future__ import annotations

import pytest

from pdtrace.stages import WaitReason
from server.said import AGAIN_NS, EXACT_POSITIONS, NS_PER_MS, Said, is_due

BEFORE = Said("prefill.queue", WaitReason.TOKEN_BUDGET, 0)


def due(
    position: int | None,
    at_ns: int,
    *,
    said: Said | None = BEFORE,
    stage: str = BEFORE.stage,
    reason: WaitReason = BEFORE.reason,
) -> bool:
    return is_due(said, stage, reason, position, at_ns)


def test_first_wait_and_another_reason_are_said_at_once() -> None:
    assert due(1000, 0, said=None)
    assert due(1000, 1, reason=WaitReason.KV_PAGES)
    assert due(1000, 1, stage="decode.reserve")


@pytest.mark.parametrize("position", [None, 0, EXACT_POSITIONS - 1])
def test_head_of_a_queue_and_what_is_in_no_queue_are_followed_exactly(
    position: int | None,
) -> None:
    assert due(position, 1)


@pytest.mark.parametrize(
    ("position", "every_ns"), [(EXACT_POSITIONS, AGAIN_NS), (100, AGAIN_NS), (250, 250 * NS_PER_MS)]
)
def test_further_back_the_same_reason_is_said_now_and_then(position: int, every_ns: int) -> None:
    assert not due(position, every_ns - 1)
    assert due(position, every_ns)
