"""One request in a prefill worker: its prompt, its source pages and its copy jobs."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.base import SamplingParams
from server.kv.radix import Match
from server.request import PREFILL_INFO, PREFILL_TRANSITIONS, Leg, PrefillState
from server.wire.messages import CopyDone, CopyJob, Handoff, PagesReserved, Peer


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillLeg(Leg[PrefillState]):
    """State of one prompt. Pages in order of positions: those of `match`, then `own_pages`.

    reservation   decode's pages; set when they are known, compared when the hold is over
    match         cached prefix, locked from the start until the source is released
    started       number of the step that ran its first chunk
    computed      positions whose KV is in the pages, the cached ones included
    pages_sent    source pages that copy jobs name so far
    jobs          copy jobs sent so far
    job_sent_ns   when one was sent last, again or for the first time
    jobs_done     completions observed, by index of the job
    landed        decode has all of the KV, whatever became of its completions' messages here
    handoff       what decode was sent, once the prompt was computed
    token_id      boundary token, once the last chunk has run
    passes        how often later prompts started while this one lacked pages
    """

    transitions = PREFILL_TRANSITIONS
    infos = PREFILL_INFO

    prompt_ids: tuple[int, ...]
    prompt_digest: str
    max_tokens: int
    sampling: SamplingParams
    early: bool
    ignore_eos: bool
    decode: Peer
    faults: dict[str, int]
    reservation: PagesReserved | None = None
    match: Match | None = None
    own_pages: list[int] = field(default_factory=list[int])
    started: int = 0
    computed: int = 0
    num_chunks: int = 0
    pages_sent: int = 0
    jobs: list[CopyJob] = field(default_factory=list[CopyJob])
    job_sent_ns: int = 0
    last_job_sent: bool = False
    jobs_done: dict[int, CopyDone] = field(default_factory=dict[int, CopyDone])
    landed: bool = False
    handoff: Handoff | None = None
    token_id: int | None = None
    passes: int = 0
    batch_size: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def cached_tokens(self) -> int:
        return 0 if self.match is None else self.match.num_tokens

    @property
    def table(self) -> list[int]:
        """Page table of the prompt."""
        cached = () if self.match is None else self.match.pages
        return [*cached, *self.own_pages]

    @property
    def num_pages(self) -> int:
        return len(self.own_pages) + (0 if self.match is None else len(self.match.pages))

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    @property
    def destination_pages(self) -> tuple[int, ...]:
        return () if self.reservation is None else self.reservation.pages

    @property
    def copies_open(self) -> bool:
        """Whether the transfer may still read source pages."""
        return len(self.jobs_done) < self.num_jobs and not self.landed

    @property
    def all_copied(self) -> bool:
        return self.last_job_sent and not self.copies_open
