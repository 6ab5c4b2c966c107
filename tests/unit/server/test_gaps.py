"""The cause of a late token, from what the loop did."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import GapCause
from server.gaps import (
    FAIR_SHARE,
    Absence,
    BatchChange,
    GapReason,
    account_gap,
    explain_gap,
    gap_parts,
)
from server.loop_log import BUSY_FLOOR_NS, Doing, LoopLog, Spell

MS = 1_000_000
SAME = BatchChange(usual_ns=10 * MS, size=4, size_before=4)


def reason(
    length_ms: float,
    *spells: tuple[float, float, Doing, str],
    absences: Sequence[Absence] = (),
    pauses: Sequence[tuple[int, int]] = (),
    change: BatchChange = SAME,
    known_from_ns: int = 0,
) -> GapReason:
    """Of a gap that begins at 0; `spells` in milliseconds."""
    account = account_gap(
        0,
        round(length_ms * MS),
        spells=[
            Spell(round(begin * MS), round(end * MS), doing, (who,) if who else ())
            for begin, end, doing, who in spells
        ],
        absences=absences,
        pauses=pauses,
        known_from_ns=known_from_ns,
    )
    return explain_gap(account, change)


def step(begin_ms: float, end_ms: float) -> tuple[float, float, Doing, str]:
    return begin_ms, end_ms, Doing.DECODE, "r-batch"


def test_prompt_of_another_request_is_named_with_the_time_of_its_passes() -> None:
    assert reason(
        100,
        (0, 20, Doing.PREFILL, "a"),
        (20, 50, Doing.PREFILL, "b"),
        (50, 70, Doing.PREFILL, "a"),
        step(80, 100),
    ) == (GapCause.INTERFERING_PREFILL, 0.07, "a")


def test_step_like_the_one_before_is_no_cause_beside_a_prompt() -> None:
    change = BatchChange(usual_ns=60 * MS, size=4, size_before=4)
    found = reason(100, (0, 40, Doing.PREFILL, "a"), step(40, 100), change=change)
    assert found == (GapCause.INTERFERING_PREFILL, 0.04, "a")


def test_step_that_grew_with_its_batch_is_blamed_on_who_joined() -> None:
    change = BatchChange(usual_ns=10 * MS, size=16, size_before=4, joined="new")
    assert reason(100, step(0, 100), change=change) == (GapCause.BATCH_GROWTH, 0.09, "new")
    change = BatchChange(
        usual_ns=10 * MS,
        size=4,
        size_before=4,
        kv_tokens=1000,
        kv_tokens_before=100,
        joined="long",
    )
    assert reason(100, step(0, 100), change=change) == (GapCause.BATCH_GROWTH, 0.09, "long")


def test_one_more_in_the_batch_does_not_explain_a_step_of_many_times_the_length() -> None:
    change = BatchChange(
        usual_ns=10 * MS,
        size=5,
        size_before=4,
        kv_tokens=110,
        kv_tokens_before=100,
        joined="new",
    )
    assert reason(100, step(0, 100), change=change)[0] is GapCause.UNKNOWN


def test_slow_step_after_a_slow_step_is_not_the_batchs_fault_if_others_were_fast() -> None:
    change = BatchChange(usual_ns=95 * MS, fastest_ns=6 * MS, size=6, size_before=6)
    assert reason(100, step(0, 100), change=change)[0] is GapCause.UNKNOWN


def test_first_step_of_all_did_not_grow() -> None:
    change = BatchChange(usual_ns=0, size=1, size_before=0, kv_tokens=9)
    assert reason(100, step(0, 100), change=change) == (GapCause.UNKNOWN, 0.1, None)


@pytest.mark.parametrize("doing", [Doing.PREFILL, Doing.DECODE, Doing.LANDING, None])
def test_pause_of_the_process_is_not_what_the_loop_was_at_by_chance(doing: Doing | None) -> None:
    change = BatchChange(usual_ns=10 * MS, size=8, size_before=1, joined="new")
    spells = [] if doing is None else [(0, 1000, doing, "new")]
    found = reason(
        1010,
        *spells,
        step(1000, 1010),
        pauses=[(50 * MS, 900 * MS), (60 * MS, 950 * MS)],  # noticed twice
        change=change,
    )
    assert found == (GapCause.PROCESS_PAUSED, pytest.approx(0.9, abs=0.1), None)


def test_pause_while_the_sequence_was_away_counts_once() -> None:
    absence = Absence(GapCause.PREEMPTION, 10 * MS, 90 * MS, "a")
    found = reason(100, step(95, 100), absences=[absence], pauses=[(0, 95 * MS)])
    assert found == (GapCause.PREEMPTION, 0.08, "a")


def test_batch_whose_every_step_is_long_is_blamed_for_its_size() -> None:
    change = BatchChange(usual_ns=95 * MS, size=16, size_before=16)
    assert reason(100, step(2, 100), change=change) == (GapCause.BATCH_GROWTH, 0.095, None)


def test_step_that_took_long_with_no_more_to_compute_is_not_explained() -> None:
    assert reason(100, step(0, 100)) == (GapCause.UNKNOWN, 0.09, None)


def test_what_the_loop_did_while_the_sequence_was_away_does_not_count() -> None:
    absence = Absence(GapCause.PREEMPTION, 10 * MS, 90 * MS, "a")
    found = reason(100, (10, 80, Doing.PREFILL, "b"), step(90, 100), absences=[absence])
    assert found == (GapCause.PREEMPTION, 0.08, "a")


def test_longest_absence_is_named_and_its_request() -> None:
    absences = [
        Absence(GapCause.PREEMPTION, 0, 20 * MS, "a"),
        Absence(GapCause.PREEMPTION, 25 * MS, 55 * MS, "b"),
        Absence(GapCause.INJECTED, 60 * MS, 80 * MS),
    ]
    assert reason(100, step(90, 100), absences=absences) == (GapCause.PREEMPTION, 0.05, "b")


def test_landing_and_the_loop_itself_are_told_apart() -> None:
    assert reason(100, (0, 60, Doing.LANDING, "a"), step(90, 100)) == (
        GapCause.TRANSFER_LANDING,
        0.06,
        "a",
    )
    assert reason(100, (0, 20, Doing.LANDING, "a"), step(90, 100)) == (
        GapCause.SCHEDULER_BUSY,
        0.07,
        None,
    )


def test_idle_and_forgotten_time_is_unknown() -> None:
    assert reason(100, (0, 85, Doing.IDLE, ""), step(90, 100)) == (GapCause.UNKNOWN, 0.085, None)
    assert reason(100, step(90, 100), known_from_ns=88 * MS) == (GapCause.UNKNOWN, 0.088, None)


def test_parts_of_equal_length_are_decided_by_the_order_of_causes() -> None:
    halves = [(0, 50, Doing.LANDING, "b"), (50, 100, Doing.PREFILL, "a")]
    for spells in (halves, halves[::-1]):
        ordered = sorted(spells)
        assert reason(100, *ordered)[:2] == (GapCause.INTERFERING_PREFILL, 0.05)


@st.composite
def cut(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Disjoint stretches in order, some of them reaching over the ends."""
    edges = sorted(draw(st.lists(st.integers(-20, length + 20), max_size=12)))
    return list(pairwise(edges))


@given(data=st.data(), length=st.integers(1, 200), usual=st.integers(0, 250))
def test_parts_never_exceed_the_gap_and_the_largest_one_is_named(
    data: st.DataObject, length: int, usual: int
) -> None:
    who = st.sampled_from([(), ("a",), ("b",)])
    spells = [
        Spell(begin, end, data.draw(st.sampled_from(list(Doing))), data.draw(who))
        for begin, end in data.draw(cut(length))
        if data.draw(st.booleans())
    ]
    absences = [
        Absence(data.draw(st.sampled_from([GapCause.PREEMPTION, GapCause.INJECTED])), begin, end)
        for begin, end in data.draw(cut(length))
        if data.draw(st.booleans())
    ]
    change = BatchChange(
        usual_ns=usual,
        size=data.draw(st.integers(1, 4)),
        size_before=data.draw(st.integers(0, 4)),
        joined=data.draw(st.sampled_from([None, "j"])),
    )
    known_from_ns = data.draw(st.integers(-10, length + 10))
    pauses = data.draw(st.lists(st.tuples(st.integers(-9, 220), st.integers(-9, 220)), max_size=3))
    account = account_gap(
        0,
        length,
        spells=spells,
        absences=absences,
        pauses=[(min(pause), max(pause)) for pause in pauses],
        known_from_ns=known_from_ns,
    )
    away = sum(sum(by.values()) for by in account.away.values())
    inside = [*account.prompts.values(), *account.landings.values(), account.step_ns]
    assert (
        away + sum(inside) + account.loop_ns + account.paused_ns + account.lost_ns
        == account.gap_ns
        == length
    )
    assert min([account.loop_ns, account.paused_ns, account.lost_ns, *inside]) >= 0
    parts = gap_parts(account, change)
    assert all(ns >= 0 for ns in parts.values())
    assert sum(parts.values()) + min(account.step_ns, usual) <= length
    found = explain_gap(account, change)
    assert found == explain_gap(account, change)
    assert 0 <= found.seconds * 1e9 <= length + 1e-6
    largest = max(parts.values())
    if largest >= FAIR_SHARE * length:
        assert parts[found.cause] == largest == pytest.approx(found.seconds * 1e9)
    elif found.cause is not GapCause.BATCH_GROWTH:
        assert found.cause is GapCause.UNKNOWN
        assert found.blocker is None


def test_log_keeps_the_latest_and_says_what_it_forgot() -> None:
    log = LoopLog(max_spells=2)
    log.add(0, 1, Doing.PREFILL)
    assert log.known_from_ns == 0
    log.add(1, 2, Doing.IDLE)
    log.add(3, 4, Doing.DECODE)
    assert [spell.begin_ns for spell in log.spells] == [1, 3]
    assert log.known_from_ns == 1


def test_message_that_came_during_a_step_was_kept_waiting_by_it() -> None:
    log = LoopLog()
    log.add(0, 5 * MS, Doing.DECODE, ("a",))
    log.add(5 * MS, 6 * MS, Doing.IDLE)
    log.add(6 * MS, 30 * MS, Doing.PREFILL, ("b",))
    log.add(30 * MS, 34 * MS, Doing.DECODE, ("a",))

    def culprit(arrived_ns: int) -> tuple[str, ...] | None:
        spell = log.kept_waiting(arrived_ns)
        return None if spell is None else spell.who

    assert culprit(0) == ("b",)
    assert culprit(28 * MS) == ("a",)
    assert culprit(34 * MS - BUSY_FLOOR_NS) == ("a",)
    assert culprit(34 * MS - BUSY_FLOOR_NS + 1) is None
    assert culprit(40 * MS) is None
