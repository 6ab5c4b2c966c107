"""One request in a colocated worker: its prompt, its pages and its output."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.base import SamplingParams
from server.generating_leg import GeneratingLeg
from server.kv.radix import Match
from server.request import COLOCATED_INFO, COLOCATED_TRANSITIONS, ColocatedState


@dataclass(slots=True, kw_only=True, eq=False)
class ColocatedLeg(GeneratingLeg[ColocatedState]):
    """State of one request. Pages in order of positions: those of `match`, then `own_pages`.

    match      cached prefix, locked while its pages are used; None once preempted
    started    number of the step that ran its first chunk
    computed   prompt positions whose KV is in the pages, the cached ones included
    token_id   boundary token, once the last chunk has run
    """

    transitions = COLOCATED_TRANSITIONS
    infos = COLOCATED_INFO
    committing = ColocatedState.COMMITTING
    running = ColocatedState.RUNNING
    preempted = ColocatedState.PREEMPTED
    recomputing = ColocatedState.RECOMPUTING
    finished = ColocatedState.FINISHED

    match: Match | None = None
    started: int = 0
    computed: int = 0
    num_chunks: int = 0
    token_id: int | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def table(self) -> list[int]:
        """Page table of the sequence."""
        return self.own_pages if self.match is None else [*self.match.pages, *self.own_pages]

    @property
    def sampling(self) -> SamplingParams:
        return self.generation.sampling
