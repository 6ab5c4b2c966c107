"""When a request that was sent to a worker counts as lost on its way."""

from __future__ import annotations

import pytest

from pdtrace.stages import Role
from server.gateway.acceptance import Acceptance
from server.wire.messages import Heartbeat
from tests.unit.server.gateway.test_gateway_registry import beat as heartbeat

ACCEPT_S = 1.0


def beat(seq: int, *, heard: int, taken: tuple[str, ...] = (), life: str = "p1") -> Heartbeat:
    return heartbeat("prefill-0", Role.PREFILL, incarnation=life, seq=seq, heard=heard, taken=taken)


@pytest.fixture
def acceptance() -> Acceptance:
    """One request was sent to prefill at 10 s, whose beat 5 had been answered."""
    acceptance = Acceptance(ACCEPT_S)
    acceptance.sent("p1", "h", beat=5, now_s=10.0)
    return acceptance


def test_request_that_is_named_is_never_lost(acceptance: Acceptance) -> None:
    assert acceptance.heard(beat(6, heard=6, taken=("other", "h")), 10.2) == []
    assert acceptance.heard(beat(9, heard=8), 20.0) == []


def test_lost_once_what_was_sent_behind_it_has_come(acceptance: Acceptance) -> None:
    assert acceptance.heard(beat(9, heard=6), 11.0) == ["h"]
    assert acceptance.heard(beat(10, heard=7), 12.0) == [], "told once"


def test_worker_in_a_long_step_has_lost_nothing(acceptance: Acceptance) -> None:
    """It beats, and takes in neither the request nor an answer."""
    for seq in range(6, 200):
        assert acceptance.heard(beat(seq, heard=5), 10.0 + seq) == []
    assert acceptance.heard(beat(200, heard=199, taken=("h",)), 300.0) == []


def test_request_may_be_overtaken_for_a_moment(acceptance: Acceptance) -> None:
    assert acceptance.heard(beat(7, heard=6), 10.9) == []
    assert acceptance.heard(beat(8, heard=7, taken=("h",)), 11.4) == []
    assert acceptance.heard(beat(9, heard=8), 12.0) == []


def test_other_life_of_the_worker_says_nothing(acceptance: Acceptance) -> None:
    assert acceptance.heard(beat(9, heard=9, life="p2"), 12.0) == []


def test_what_is_over_is_not_asked_about(acceptance: Acceptance) -> None:
    acceptance.over("p1", "h")
    acceptance.over("p1", "h")
    assert acceptance.heard(beat(9, heard=9), 12.0) == []
