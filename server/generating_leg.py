"""One request whose output grows token by token, in a decode or a colocated worker.

Owns the record; what becomes of it is `server.generating`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pdtrace.stages import GapCause
from server.gaps import Absence
from server.output import Generation
from server.request import Leg, StateT


@dataclass(slots=True, kw_only=True, eq=False)
class GeneratingLeg(Leg[StateT]):
    """A leg whose sequence grows token by token.

    prompt_ids    of the prompt, from which its KV can be computed again; none: it cannot be
    own_pages     pages held under the handoff id; after those of a cached prefix in `table`
    saved         KV in host memory while preempted; None: it must be computed again
    recomputes    how often that was begun
    recomputed    positions of which it has been done, while it is under way
    admitted      order of admission: the latest loses its pages first
    finish_held   its last token is out, but a fault hook keeps it from finishing
    finish_said   the gateway has the finish reason: prefill sent it with the boundary token
    marked_pages  number of pages that the next mark speaks of
    absent        why, since when and because of whom it takes no part in steps; None while it does
    absences      those that ended since its latest token
    """

    committing: ClassVar[Any]
    running: ClassVar[Any]
    preempted: ClassVar[Any]
    recomputing: ClassVar[Any]
    finished: ClassVar[Any]

    generation: Generation
    max_tokens: int
    prompt_ids: tuple[int, ...] = ()
    early: bool = False
    own_pages: list[int] = field(default_factory=list[int])
    cached_tokens: int = 0
    saved: bytes | None = None
    admitted: int = 0
    preemptions: int = 0
    recomputes: int = 0
    recomputed: int = 0
    finish_held: bool = False
    finish_said: bool = False
    batch_size: int = 0
    marked_pages: int = 0
    passes: int = 0
    absent: tuple[GapCause, int, str | None] | None = None
    absences: list[Absence] = field(default_factory=list[Absence])

    @property
    def table(self) -> list[int]:
        """Page table of the sequence."""
        return self.own_pages

    @property
    def kv_tokens(self) -> tuple[int, ...]:
        """Tokens whose KV is in the pages, or would be: the last one's is never."""
        return (*self.prompt_ids, *self.generation.token_ids[:-1])

    def leave(self, cause: GapCause, at_ns: int, blocker: str | None = None) -> None:
        """From here on the sequence takes no part in steps."""
        self.come_back(at_ns)
        self.absent = (cause, at_ns, blocker)

    def come_back(self, at_ns: int) -> None:
        """It takes part again; no effect if it does already."""
        if self.absent is not None:
            cause, left_ns, blocker = self.absent
            self.absences.append(Absence(cause, left_ns, at_ns, blocker))
            self.absent = None


GenLegT = TypeVar("GenLegT", bound=GeneratingLeg[Any])
