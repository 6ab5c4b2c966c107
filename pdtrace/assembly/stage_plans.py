"""What the spans of each stage have in common, worked out once for each mode.

Owns which stage takes a mark's attributes and what a span of it starts out with. Tables only: they
follow from `pdtrace.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdtrace.assembly.drafts import CHAIN_GAP_NS, SIDE_GAP_NS
from pdtrace.assembly.evidence import BEGIN_MARKS, span_id_salt
from pdtrace.spans import SpanKind
from pdtrace.stages import ATTEMPT_SPAN, CHAINS, ROOT_SPAN, STAGES, Mark, Mode, Stage


def _landing(chain: Sequence[Stage]) -> Mapping[Mark, str]:
    """Stage that takes a mark's attributes: the one it ends (chain first), else one it opens."""
    table: dict[Mark, str] = {}
    side = [stage for stage in STAGES if stage not in chain]
    for stage in side:
        for mark in stage.begin:
            table.setdefault(mark, stage.name)
    for stage in (*side, *chain):
        table[stage.end] = stage.name
    # The request's outcome stands on the root; gateway.finish would only repeat it.
    del table[Mark.COMPLETED]
    return table


LANDING = {mode: _landing(chain) for mode, chain in CHAINS.items()}
"""Stage by mark, per mode; a mark that is absent has its attributes on no stage."""
_CHAINED = {mode: frozenset(s.name for s in chain) for mode, chain in CHAINS.items()}


@dataclass(slots=True, frozen=True, kw_only=True)
class StagePlan:
    """A stage in one mode, with what all its spans have in common.

    begin       marks that open it there
    is_ingress  before any attempt: its marks are the request's first ones
    is_last     it ends with the request
    lands       whether its first begin mark's attributes stand on it
    kind_of_time  work, wait, …: what stands in `pd.stage.kind`
    """

    stage: Stage
    name: str
    begin: tuple[Mark, ...]
    end: Mark
    in_chain: bool
    at_root: bool
    is_ingress: bool
    is_last: bool
    lands: bool
    nested_in: str | None
    gap_ns: int
    kind: SpanKind
    kind_of_time: str
    salt: int


@lru_cache(maxsize=10_000)
def numbered_salt(name: str, index: int) -> int:
    """What tells a repeated stage's spans from each other: number `index` of an attempt, from 1."""
    return span_id_salt(f"{name}/{index}")


def _plan(stage: Stage, mode: Mode) -> StagePlan:
    in_chain = stage.name in _CHAINED[mode]
    at_root = stage.parent == ROOT_SPAN
    begin = BEGIN_MARKS[mode, stage.name] if in_chain else stage.begin
    return StagePlan(
        stage=stage,
        name=stage.name,
        begin=begin,
        end=stage.end,
        in_chain=in_chain,
        at_root=at_root,
        is_ingress=at_root and stage.end is not Mark.COMPLETED,
        is_last=stage.end is Mark.COMPLETED,
        lands=bool(begin) and LANDING[mode].get(begin[0]) == stage.name,
        nested_in=None if stage.parent in (ROOT_SPAN, ATTEMPT_SPAN) else stage.parent,
        gap_ns=CHAIN_GAP_NS if in_chain else SIDE_GAP_NS,
        kind=SpanKind.SERVER if stage.server else SpanKind.INTERNAL,
        kind_of_time=stage.kind.value,
        salt=span_id_salt(stage.name),
    )


PLANS = {mode: {stage.name: _plan(stage, mode) for stage in STAGES} for mode in Mode}
CHAIN_PLANS = {
    mode: tuple(PLANS[mode][stage.name] for stage in chain) for mode, chain in CHAINS.items()
}
SIDE_PLANS = {
    mode: tuple(plan for plan in plans.values() if not plan.in_chain)
    for mode, plans in PLANS.items()
}
