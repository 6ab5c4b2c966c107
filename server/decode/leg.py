"""One request in a decode worker: its pages, what has landed in them, and its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.generating_leg import GeneratingLeg
from server.request import (
    DECODE_INFO,
    DECODE_TRANSITIONS,
    PREFILL_INFO,
    DecodeState,
)
from server.wire.messages import Handoff, Peer

_PREFILL_STAGES = {state.value: info.stage for state, info in PREFILL_INFO.items()}
"""By the word in a message, which may be one of another build."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeLeg(GeneratingLeg[DecodeState]):
    """State of one continuation.

    published    prefill was told the pages, so that a transfer may write them
    handoff      boundary token, once prefill sent it
    copied       bytes per copy job whose completion was observed
    last_job     index of the last copy job, once it is known
    settled      the transfer said that it will not write the pages any more
    """

    transitions = DECODE_TRANSITIONS
    infos = DECODE_INFO
    committing = DecodeState.COMMITTING
    running = DecodeState.RUNNING
    preempted = DecodeState.PREEMPTED
    recomputing = DecodeState.RECOMPUTING
    finished = DecodeState.FINISHED

    prompt_digest: str
    prefill: Peer
    published: bool = False
    handoff: Handoff | None = None
    copied: dict[int, int] = field(default_factory=dict[int, int])
    last_job: int | None = None
    settled: bool = False

    @property
    def all_copied(self) -> bool:
        """Whether the completion of every copy job was observed."""
        return self.last_job is not None and len(self.copied) == self.last_job + 1

    @property
    def may_be_written(self) -> bool:
        """Whether a transfer may still write the pages."""
        return self.published and not self.all_copied and not self.settled

    @property
    def waits_in(self) -> str:
        """While KV is awaited: the stage in which prefill has the request, as far as is known."""
        if self.state is not DecodeState.AWAITING_KV:
            return self.stage
        return _PREFILL_STAGES.get(self.other, self.stage)
