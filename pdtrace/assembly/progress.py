"""Which chain stage a request is in, mark by mark: O(1) each, with marks missing or disordered.

The rule: the stage after the furthest end mark seen of the latest attempt. A mark nested in a stage
(a chunk, a token gap) shows that this stage has begun. Knows nothing of rings or of who recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from pdtrace.assembly.evidence import BEGIN_MARKS
from pdtrace.stages import CHAINS, ROOT_SPAN, STAGES, Mark, Mode, Stage

NOT_BEGUN = -1


class Plan(NamedTuple):
    """One mode's chain, as a table over marks.

    reaches      by mark: the number of the stage that the request is in after it; -1 for marks
                 that say nothing of it, the number of stages when the request is over
    num_ingress  stages before any attempt
    token        the first token's way to the client, which the next stage does not wait for
    token_mark   what opens it
    resume_mark  what opens the stage after that one
    """

    stages: tuple[Stage, ...]
    reaches: tuple[int, ...]
    num_ingress: int
    token: int
    token_mark: Mark
    resume_mark: Mark


def _plan(mode: Mode, chain: tuple[Stage, ...]) -> Plan:
    reaches = [NOT_BEGUN] * (max(Mark) + 1)
    for number, stage in enumerate(chain):
        reaches[stage.end] = number + 1
    for number, stage in enumerate(chain):
        for mark in BEGIN_MARKS[mode, stage.name]:
            if reaches[mark] == NOT_BEGUN:
                reaches[mark] = number
    parents = {stage.name: stage for stage in chain}
    for stage in STAGES:
        parent = parents.get(stage.parent)
        if parent is not None:
            for mark in (*stage.begin, stage.end):
                reaches[mark] = reaches[BEGIN_MARKS[mode, parent.name][0]]
    token = next(i for i, stage in enumerate(chain) if stage.end is Mark.FIRST_TOKEN_SENT)
    return Plan(
        stages=chain,
        reaches=tuple(reaches),
        num_ingress=next(i for i, stage in enumerate(chain) if stage.parent != ROOT_SPAN),
        token=token,
        token_mark=BEGIN_MARKS[mode, chain[token].name][0],
        resume_mark=BEGIN_MARKS[mode, chain[token + 1].name][0],
    )


PLANS: Mapping[Mode, Plan] = MappingProxyType(
    {mode: _plan(mode, chain) for mode, chain in CHAINS.items()}
)


class Progress(msgspec.Struct, eq=False, gc=False):
    """How far one request has come.

    at          number of its stage in `plan.stages`; NOT_BEGUN before any mark that says it
    since_ns    when it got there
    token_ns    when the token's way began; 0 before
    resumed_ns  when the stage after it did
    """

    plan: Plan
    attempt: int = 1
    at: int = NOT_BEGUN
    since_ns: int = 0
    token_ns: int = 0
    resumed_ns: int = 0

    def begin_attempt(self, attempt: int, t_ns: int) -> None:
        """A later attempt starts over behind the stages that come before any."""
        self.attempt = attempt
        self.token_ns = self.resumed_ns = 0
        if self.at > self.plan.num_ingress:
            self.at = self.plan.num_ingress
            self.since_ns = t_ns

    def reach(self, mark: Mark, attempt: int, t_ns: int) -> None:
        """Takes in a mark."""
        plan = self.plan
        number = plan.reaches[mark]
        if number < 0:
            return
        if attempt != self.attempt:
            if attempt > self.attempt:
                self.begin_attempt(attempt, t_ns)
            elif number > plan.num_ingress or number <= self.at:
                return  # late word of an attempt that is over
        if mark is plan.token_mark:
            self.token_ns = t_ns
        if mark is plan.resume_mark:
            self.resumed_ns = t_ns
        if number > self.at:
            self.at, self.since_ns = number, t_ns
        elif number == self.at and t_ns < self.since_ns:
            self.since_ns = t_ns  # the mark that counts was read after one inside the stage

    def restart(self, plan: Plan) -> None:
        """Forgets all but the attempt: the mode was another, and the marks come again."""
        self.plan = plan
        self.at = NOT_BEGUN
        self.since_ns = self.token_ns = self.resumed_ns = 0

    def stage(self, *, token_awaited: bool) -> tuple[Stage | None, int]:
        """The chain stage and when it began; None before the first mark and after the last.

        token_awaited  whether somebody will say when the first token has been sent
        """
        plan, at, since_ns = self.plan, self.at, self.since_ns
        if at == plan.token:
            if self.token_ns and token_awaited:
                since_ns = self.token_ns
            else:
                at += 1
        if at == plan.token + 1:
            since_ns = self.resumed_ns or since_ns
        return (plan.stages[at] if 0 <= at < len(plan.stages) else None), since_ns
