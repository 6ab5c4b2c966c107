"""The scenario has all that boards show, in whatever time it is given."""

from __future__ import annotations

import random

import pytest

from dashboards.intervals import seconds
from dashboards.rules import recordings
from pdtrace.stages import STAGE_BY_NAME, Role
from server.faults import FAULT_STAGES, MAX_DELAY_MS
from tests.pictures.scenario import (
    HELD,
    HELD_MS,
    LONG_WORDS,
    PHASES,
    STALL_MS,
    Harm,
    next_ask,
    phases,
)

SEED = 5
MANY = 4_000


@pytest.mark.parametrize("length_s", [60.0, 1_200.0])
def test_all_phases_are_within_the_time(length_s: float) -> None:
    made = phases(length_s)
    assert [phase.says for phase in made] == [phase.says for phase in PHASES]
    assert sum(phase.seconds for phase in made) == pytest.approx(length_s)


def test_there_is_trouble_of_each_kind_and_health_between() -> None:
    held = {phase.stage for phase in PHASES} - {""}
    assert held | set(HELD) <= FAULT_STAGES
    assert max(STALL_MS, HELD_MS) <= MAX_DELAY_MS
    assert {phase.harm for phase in PHASES} == set(Harm)
    assert any(phase.long_share for phase in PHASES)
    troubled = [phase.stage != "" or phase.long_share > 0 for phase in PHASES]
    assert [True] * 3 not in [troubled[at : at + 3] for at in range(len(troubled) - 2)]


def test_a_request_is_held_in_a_stage_of_each_role_at_the_end() -> None:
    roles = frozenset[Role]().union(*(STAGE_BY_NAME[stage].roles for stage in HELD))
    assert {Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE} <= roles


def test_what_stalls_is_held_against_health_of_more_than_ten_minutes_ago() -> None:
    """Or panels of what is slower than usual would be empty."""
    transfer = next(at for at, phase in enumerate(PHASES) if phase.stage == "transfer")
    ends_s = sum(phase.seconds for phase in PHASES[: transfer + 1])
    assert ends_s > seconds(recordings.BASELINE_AGE) + 30


def test_requests_are_as_the_phase_says() -> None:
    late = next(phase for phase in PHASES if phase.stage == "transfer")
    full = next(phase for phase in PHASES if phase.long_share)
    rng = random.Random(SEED)
    asked = [next_ask(late, rng) for _ in range(MANY)]
    share = sum(ask.stage == late.stage for ask in asked) / MANY
    assert share == pytest.approx(late.share, abs=0.05)
    assert {ask.stage for ask in asked} == {late.stage, ""}
    assert any(ask.is_wrong for ask in asked)
    assert any(ask.leaves_s is not None for ask in asked)
    long = [next_ask(full, rng) for _ in range(MANY)]
    share = sum(len(ask.prompt.split()) >= LONG_WORDS for ask in long) / MANY
    assert share == pytest.approx(full.long_share, abs=0.05)
