"""Which ends of an attempt are followed by another one."""

from __future__ import annotations

import pytest

from server.errors import (
    DeadlineExceeded,
    HandshakeMismatch,
    Overloaded,
    TransferFailed,
    WorkerLost,
)
from server.gateway.errors import SHUTTING_DOWN, STREAM_INCOMPLETE
from server.gateway.retry import RULES, Blame, may_retry, rule_of
from server.kv.transfer.base import Reason

SAFE = sorted(reason for reason, rule in RULES.items() if rule is not None)
UNSAFE = sorted(reason for reason, rule in RULES.items() if rule is None)


def test_table_names_every_reason_of_the_transfer_and_of_the_error_tree() -> None:
    assert set(Reason) <= set(RULES)
    errors = (HandshakeMismatch, DeadlineExceeded, TransferFailed, WorkerLost, Overloaded)
    assert {error.code for error in errors} | {SHUTTING_DOWN, STREAM_INCOMPLETE} <= set(RULES)


@pytest.mark.parametrize("reason", SAFE)
def test_safe_reason_is_tried_again_as_often_as_allowed_and_never_behind_a_byte(
    reason: str,
) -> None:
    assert may_retry(reason, attempt=1, max_retries=1, written=False)
    assert may_retry(reason, attempt=2, max_retries=2, written=False)
    assert not may_retry(reason, attempt=1, max_retries=1, written=True)
    assert not may_retry(reason, attempt=2, max_retries=1, written=False)
    assert not may_retry(reason, attempt=1, max_retries=0, written=False)


@pytest.mark.parametrize("reason", [*UNSAFE, "a word that nobody knows", ""])
def test_other_reasons_end_the_request(reason: str) -> None:
    assert not may_retry(reason, attempt=1, max_retries=9, written=False)


def test_time_that_is_spent_and_requests_that_break_an_engine_are_not_tried_again() -> None:
    assert {"deadline_exceeded", "engine_error", "internal", "kv_capacity"} <= set(UNSAFE)


def test_what_a_reason_says_of_the_workers() -> None:
    full, gone, unreachable = map(rule_of, ("overloaded", "shutting_down", "peer_unreachable"))
    mismatch, copy = map(rule_of, ("handshake_mismatch", "checksum_mismatch"))
    assert full and gone and unreachable and mismatch and copy
    assert (full.blame, full.elsewhere, full.doubt) == (Blame.WORKER, True, False)
    assert (gone.blame, gone.elsewhere, gone.doubt) == (Blame.WORKER, False, True)
    assert (unreachable.blame, unreachable.doubt) == (Blame.PARTNER, True)
    assert (mismatch.blame, mismatch.refuse) == (Blame.PAIR, True)
    assert (copy.blame, copy.refuse, copy.doubt) == (Blame.PAIR, False, False)
