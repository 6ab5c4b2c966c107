"""How much detail a load may have: levels follow the demand, and do not flap."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.budget import (
    ESSENTIAL_MARKS,
    HOLD_NS,
    LOWER_AT,
    RAISE_AT,
    Budget,
    Costs,
    Detail,
    Work,
    read_budget,
)
from pdtrace.stages import MARKS, Mark

COSTS = Costs(record=1000, byte=10, attributes=500, wait=3000, step=2000, member=20)
BUDGET = 0.02
MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What a process does per second."""

    marks: int = 0
    waits: int = 0
    steps: int = 0

    def work(self, seconds: float, detail: Detail, total: Work) -> None:
        """Adds what a recorder at `detail` does with it; each mark has values of 16 bytes."""
        marks, waits, steps = (round(n * seconds) for n in (self.marks, self.waits, self.steps))
        total.records += marks
        if detail >= Detail.MARKS:
            total.bytes += marks * 16
        else:
            total.shed_attributes += marks
        if detail >= Detail.WAITS:
            total.waits += waits
            total.records += waits
            total.bytes += waits * 96
        else:
            total.shed_waits += waits
        if detail >= Detail.FULL:
            total.steps += steps
            total.records += steps
            total.members += steps * 16
        else:
            total.shed_steps += steps
            total.shed_members += steps * 16


def run(
    loads: list[tuple[float, Load]], *, look_s: float = 0.1
) -> tuple[list[Detail], list[float]]:
    """Levels and shares at each look of a process with these loads, each for some seconds."""
    budget = Budget(BUDGET, COSTS, now_ns=0)
    total = Work()
    now_ns = 0
    details: list[Detail] = []
    shares: list[float] = []
    for seconds, load in loads:
        for _ in range(round(seconds / look_s)):
            load.work(look_s, budget.detail, total)
            now_ns += round(look_s * 1e9)
            changed = budget.look(now_ns, total)
            assert changed == (budget.detail != (details[-1] if details else Detail.FULL))
            details.append(budget.detail)
            shares.append(budget.share)
    return details, shares


@pytest.mark.parametrize(
    ("load", "detail"),
    [
        (Load(), Detail.FULL),
        (Load(marks=5000, waits=1000, steps=600), Detail.FULL),  # 0.58 + 0.3 + 0.14 %
        (Load(marks=5000, waits=1000, steps=10_000), Detail.WAITS),
        (Load(marks=5000, waits=10_000, steps=600), Detail.MARKS),
        (Load(marks=16_000), Detail.ESSENTIAL),  # 1.9 % with attributes, 1.6 % without
        (Load(marks=100_000, waits=1000, steps=600), Detail.ESSENTIAL),
    ],
)
def test_the_most_detail_that_fits_is_kept(load: Load, detail: Detail):
    details, _ = run([(20.0, load)])
    assert details[-1] is detail
    assert set(details[150:]) == {detail}


@given(
    marks=st.integers(0, 60_000),
    waits=st.integers(0, 20_000),
    steps=st.integers(0, 20_000),
    look_s=st.sampled_from([0.011, 0.1, 0.7]),
)
def test_a_steady_load_settles_on_one_level(marks: int, waits: int, steps: int, look_s: float):
    details, _ = run([(15.0, Load(marks, waits, steps))], look_s=look_s)
    changes = [pair for pair in pairwise(details) if pair[0] is not pair[1]]
    assert all(later < earlier for earlier, later in changes)  # what was given up is not tried
    assert len(changes) <= 3


@pytest.mark.parametrize("factor", [1.1, 2.0, 4.0])
def test_detail_goes_down_before_the_budget_is_exceeded(factor: float):
    steps = round(factor * BUDGET * 1e9 / (COSTS.step + 16 * COSTS.member))
    details, shares = run([(10.0, Load(marks=1000, steps=steps))], look_s=0.011)
    assert details[-1] is Detail.WAITS
    assert max(shares) <= BUDGET


def test_leaving_out_costs_something_too():
    """So many steps that counting them alone exceeds the budget: the share says so."""
    details, shares = run([(10.0, Load(steps=100_000))])
    assert details[-1] is Detail.ESSENTIAL
    assert shares[-1] > BUDGET


def test_a_burst_lowers_nothing():
    quiet, burst = Load(marks=500), Load(marks=20_000, waits=2000)  # 3 % of a core
    details, _ = run([(5.0, quiet), (0.2, burst), (5.0, quiet)], look_s=0.05)
    assert set(details) == {Detail.FULL}


def test_detail_comes_back_once_the_load_has_gone_and_not_at_once():
    busy, quiet = Load(marks=8000, waits=5000, steps=8000), Load(marks=1000, steps=500)
    details, _ = run([(10.0, busy), (10.0, quiet)])
    assert details[99] < Detail.FULL
    assert details[-1] is Detail.FULL
    back = next(i for i in range(100, 200) if details[i] > details[i - 1])
    changed = max(i for i in range(1, back) if details[i] is not details[i - 1])
    assert (back - changed) * 100 * MS >= HOLD_NS
    assert details[back:] == sorted(details[back:])  # upwards from there


def test_a_load_between_the_two_bounds_keeps_the_level_it_has():
    between = Load(steps=round((LOWER_AT + RAISE_AT) / 2 * BUDGET * 1e9 / 2320))
    kept, _ = run([(20.0, between)])
    assert set(kept) == {Detail.FULL}
    lowered, _ = run([(5.0, Load(steps=20_000)), (20.0, between)])
    assert lowered[-1] is Detail.WAITS


def test_looks_too_close_together_wait_for_each_other():
    budget = Budget(BUDGET, COSTS, now_ns=0)
    work = Work()
    for _ in range(100):
        work.records += 1_000_000
        assert not budget.look(0, work)  # no time passed: no share can be told
    assert (budget.detail, budget.share) == (Detail.FULL, 0.0)
    assert budget.look(50 * MS, work)
    assert budget.detail is Detail.ESSENTIAL


def test_attributes_without_which_a_trace_would_be_wrong_are_always_kept():
    assert {
        Mark.TOKENIZED,
        Mark.ROUTED,
        Mark.COMPLETED,
        Mark.ABORTED,
        Mark.DECODE_FINISHED,
        Mark.PREFILL_STARTED,
        Mark.CHUNK_STARTED,
        Mark.CHUNK_FINISHED,
        Mark.COPY_QUEUED,
        Mark.COPY_STARTED,
        Mark.COPY_FINISHED,
        Mark.TOKEN_GAP,
    } == ESSENTIAL_MARKS
    assert any(spec.attrs for mark, spec in MARKS.items() if mark not in ESSENTIAL_MARKS)


@pytest.mark.parametrize(
    ("text", "given_budget", "expected"),
    [
        (None, 0.02, 0.02),
        ("", 0.02, 0.02),
        (None, None, None),
        ("off", 0.02, None),
        (" OFF ", 0.02, None),
        ("0.05", 0.02, 0.05),
        ("1", None, 1.0),
    ],
)
def test_the_variable_has_the_last_word(
    text: str | None, given_budget: float | None, expected: float | None
):
    environ = {} if text is None else {"PDTRACE_BUDGET": text}
    assert read_budget(environ, given_budget) == expected


@pytest.mark.parametrize("text", ["0", "-0.1", "1.5", "nan", "2 %", "on", "none"])
def test_what_is_no_budget_is_refused_with_what_is(text: str):
    with pytest.raises(ValueError, match="PDTRACE_BUDGET takes a share of one core above 0") as got:
        read_budget({"PDTRACE_BUDGET": text}, 0.02)
    assert "or off" in str(got.value)


@pytest.mark.parametrize("budget", [0, -1.0, 2, float("nan")])
def test_an_argument_that_is_no_budget_is_refused(budget: float):
    with pytest.raises(ValueError, match="budget takes a share of one core"):
        read_budget({}, budget)
