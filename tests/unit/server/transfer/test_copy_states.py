"""The states of a copy job: every pair, and the bounded memory of handoffs that are over."""

from __future__ import annotations

import itertools

import pytest

from server.errors import IntegrityError
from server.kv.transfer.base import TERMINAL, TRANSITIONS, CopyState, check_transition
from server.kv.transfer.tombstones import Tombstones

ALLOWED = {
    (CopyState.QUEUED, CopyState.COPYING),
    (CopyState.QUEUED, CopyState.FAILED),
    (CopyState.QUEUED, CopyState.CANCELLED),
    (CopyState.COPYING, CopyState.COPIED),
    (CopyState.COPYING, CopyState.FAILED),
    (CopyState.COPYING, CopyState.DRAINING),
    (CopyState.DRAINING, CopyState.CANCELLED),
}


@pytest.mark.parametrize(("state", "target"), list(itertools.product(CopyState, CopyState)))
def test_every_pair_of_states_is_allowed_or_refused(state: CopyState, target: CopyState) -> None:
    if (state, target) in ALLOWED:
        check_transition(state, target)
    else:
        with pytest.raises(IntegrityError, match=f"from {state} to {target}"):
            check_transition(state, target)


def test_every_state_is_in_the_table_and_can_end() -> None:
    assert set(TRANSITIONS) == set(CopyState)
    assert {CopyState.COPIED, CopyState.FAILED, CopyState.CANCELLED} == TERMINAL
    for state in CopyState:
        reached = {state}
        while more := {t for s in reached for t in TRANSITIONS[s]} - reached:
            reached |= more
        assert reached & TERMINAL


def test_tombstones_keep_the_latest_ids() -> None:
    tombstones = Tombstones(max_remembered=3)
    for handoff_id in ("a", "b", "c", "a", "d"):
        tombstones.add(handoff_id)
    assert [name in tombstones for name in "abcd"] == [True, False, True, True]
    assert len(tombstones) == 3
