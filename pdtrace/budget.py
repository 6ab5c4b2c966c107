"""How much recording a process can afford: from what it has cost lately to how much detail is kept.

Owns the levels of detail, what belongs to each and when to change between them; pure, it reads no
clock and writes no ring. The recorder hands over its totals once per ring block and obeys.

    demand of a level   what recording at that level would have cost lately, as a share of one core:
                        what was recorded, and what was left out at what it usually costs
    lowered at once     to the highest level whose demand is below LOWER_AT of the budget
    raised              to the highest level whose demand is below RAISE_AT of it, HOLD_NS after the
                        last change at the earliest

What is left out stays part of the demand of the levels that have it, so a level that proved too
dear is not tried again until the load has gone, and the detail does not flap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from pdtrace import semconv as a
from pdtrace.stages import MARKS, Mark

BUDGET_VARIABLE = "PDTRACE_BUDGET"
DEFAULT_BUDGET = 0.02
LOWER_AT = 0.9
RAISE_AT = 0.6
WINDOW_NS = 1_000_000_000
"""Costs count for about this long: a burst as short as a few blocks lowers nothing."""
WAIT_BYTES = 96
"""Of the values of a wait, about."""
SHED_PART = 0.3
"""Of a record's cost: the call that leaves something out, and its count."""
HOLD_NS = 2_000_000_000
MIN_LOOK_NS = 10_000_000
"""Looks closer together than this are put together: a share of less time says little."""


class Detail(IntEnum):
    """What is recorded; each level has what the ones below it have. Values go to a gauge."""

    ESSENTIAL = 0  # marks, without attributes except those of ESSENTIAL_MARKS
    MARKS = 1  # marks with all their attributes
    WAITS = 2  # why requests wait
    FULL = 3  # steps


# Without these a trace is wrong rather than poorer: how it ended, who did it, how large it was, and
# which of several chunks, copies or gaps a mark belongs to.
_ESSENTIAL_ATTRS = frozenset(
    {
        a.OUTCOME,
        a.PREFILL_WORKER,
        a.DECODE_WORKER,
        a.PROMPT_TOKENS,
        a.OUTPUT_TOKENS,
        a.CACHED_TOKENS,
        a.MODE,
        a.CHUNK_INDEX,
        a.TOKEN_INDEX,
    }
)
ESSENTIAL_MARKS: frozenset[Mark] = frozenset(
    mark for mark, spec in MARKS.items() if not _ESSENTIAL_ATTRS.isdisjoint(spec.attrs)
)
"""Marks that keep their attributes at every level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU nanoseconds of the recording thread.

    record      one record without values
    byte        each byte of values that it carries
    attributes  what the values of one mark take, about
    wait        a wait that is recorded
    step        a step record, and `member` for each of its members
    """

    record: float
    byte: float
    attributes: float
    wait: float
    step: float
    member: float


@dataclass(slots=True, kw_only=True)
class Work:
    """Totals of one ring since it was made. `bytes` are those of values, steps not among them."""

    records: int = 0
    bytes: int = 0
    waits: int = 0
    steps: int = 0
    members: int = 0
    shed_attributes: int = 0
    shed_waits: int = 0
    shed_steps: int = 0
    shed_members: int = 0


class Budget:
    """The level of detail of one recorder.

    detail    in force
    share     of one core that recording took lately, as far as it is known
    """

    def __init__(self, budget: float, costs: Costs, *, now_ns: int) -> None:
        self.detail = Detail.FULL
        self.share = 0.0
        self._budget = budget
        self._costs = costs
        self._then = Work()
        self._looked_ns = now_ns
        self._changed_ns = now_ns
        self._demand = [0.0] * len(Detail)  # of each level, as a share of one core

    def look(self, now_ns: int, work: Work) -> bool:
        """Takes in the totals at `now_ns` (CLOCK_MONOTONIC); whether `detail` changed."""
        passed_ns = now_ns - self._looked_ns
        if passed_ns < MIN_LOOK_NS:
            return False
        spent_ns, demand_ns = self._price(work)
        self._then = replace(work)
        self._looked_ns = now_ns
        keep = math.exp(-passed_ns / WINDOW_NS)
        self.share = self.share * keep + spent_ns / passed_ns * (1 - keep)
        self._demand = [
            before * keep + level_ns / passed_ns * (1 - keep)
            for before, level_ns in zip(self._demand, demand_ns, strict=True)
        ]
        detail = self._choose(now_ns)
        if detail is self.detail:
            return False
        self.detail = detail
        self._changed_ns = now_ns
        return True

    def _price(self, work: Work) -> tuple[float, list[float]]:
        """What was done since the last look took, and would have taken at each level. CPU ns."""
        then, costs = self._then, self._costs
        waits = (work.waits - then.waits) * costs.wait
        steps = (work.steps - then.steps) * costs.step + (
            work.members - then.members
        ) * costs.member
        num_waits = work.waits - then.waits
        num_marks = work.records - then.records - num_waits - (work.steps - then.steps)
        num_bytes = work.bytes - then.bytes - num_waits * WAIT_BYTES
        essential = max(0, num_marks) * costs.record + max(0, num_bytes) * costs.byte
        num_shed = (
            (work.shed_attributes - then.shed_attributes)
            + (work.shed_waits - then.shed_waits)
            + (work.shed_steps - then.shed_steps)
        )
        essential += num_shed * SHED_PART * costs.record
        marks = essential + (work.shed_attributes - then.shed_attributes) * costs.attributes
        with_waits = marks + waits + (work.shed_waits - then.shed_waits) * costs.wait
        full = (
            with_waits
            + steps
            + (work.shed_steps - then.shed_steps) * costs.step
            + (work.shed_members - then.shed_members) * costs.member
        )
        return essential + waits + steps, [essential, marks, with_waits, full]

    def _choose(self, now_ns: int) -> Detail:
        fits = self._fitting(LOWER_AT)
        if fits < self.detail:
            return fits
        if now_ns - self._changed_ns < HOLD_NS:
            return self.detail
        return max(self.detail, self._fitting(RAISE_AT))

    def _fitting(self, part: float) -> Detail:
        """The highest level whose demand is within that part of the budget; the lowest if none."""
        limit = part * self._budget
        return max(
            (level for level in Detail if self._demand[level] <= limit), default=Detail.ESSENTIAL
        )


def read_budget(environ: Mapping[str, str], budget: float | None) -> float | None:
    """PDTRACE_BUDGET where it is set, else `budget`; None: no guard. Raises ValueError."""
    text = environ.get(BUDGET_VARIABLE, "").strip()
    if not text:
        return None if budget is None else _checked(budget, "budget")
    if text.lower() == "off":
        return None
    try:
        share = float(text)
    except ValueError:
        raise ValueError(_refusal(BUDGET_VARIABLE, text)) from None
    return _checked(share, BUDGET_VARIABLE)


def _checked(share: float, name: str) -> float:
    if not 0 < share <= 1:
        raise ValueError(_refusal(name, share))
    return share


def _refusal(name: str, got: object) -> str:
    off = "off" if name == BUDGET_VARIABLE else "None"
    return (
        f"{name} takes a share of one core above 0 and up to 1, as {DEFAULT_BUDGET}, or {off}; "
        f"got {got!r}"
    )
