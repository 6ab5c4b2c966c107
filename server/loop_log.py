"""What a worker's loop did lately: a short memory that its requests share.

Owns the memory and its bound; what it says about a late token is `server.gaps`' business. The loop
adds an entry for each step, not for each request, so that it costs the same for any batch.

Whatever lies between two entries is the loop's own work: planning, preempting, sending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

MAX_SPELLS = 64
"""Entries kept. A sequence that takes part in every step needs those of one turn."""
BUSY_FLOOR_NS = 1_000_000
"""A message that waited less than this for a step to end is not worth a word."""


class Doing(Enum):
    """What the loop's time went to."""

    PREFILL = auto()  # a forward pass over prompts
    DECODE = auto()  # a forward pass of the batch
    LANDING = auto()  # messages of transfers, and KV that was found whole
    IDLE = auto()  # nothing to do: it waited for a message


STEPS = frozenset({Doing.PREFILL, Doing.DECODE})


class Spell(NamedTuple):
    """A stretch of the loop's time. CLOCK_MONOTONIC nanoseconds.

    who   request ids that it was spent on, most important first
    """

    begin_ns: int
    end_ns: int
    doing: Doing
    who: tuple[str, ...] = ()


class LoopLog:
    """The latest spells, in order and without overlap."""

    def __init__(self, *, max_spells: int = MAX_SPELLS) -> None:
        self._spells: deque[Spell] = deque(maxlen=max_spells)

    @property
    def spells(self) -> Sequence[Spell]:
        return self._spells

    @property
    def known_from_ns(self) -> int:
        """What happened before this instant is forgotten."""
        return self._spells[0].begin_ns if len(self._spells) == self._spells.maxlen else 0

    def add(self, begin_ns: int, end_ns: int, doing: Doing, who: tuple[str, ...] = ()) -> None:
        self._spells.append(Spell(begin_ns, end_ns, doing, who))

    def kept_waiting(self, arrived_ns: int) -> Spell | None:
        """The step that kept a message of `arrived_ns` waiting longest, if any did so for long."""
        longest: Spell | None = None
        longest_ns = BUSY_FLOOR_NS - 1
        for spell in reversed(self._spells):
            if spell.end_ns <= arrived_ns:
                break
            waited_ns = spell.end_ns - max(spell.begin_ns, arrived_ns)
            if spell.doing in STEPS and waited_ns > longest_ns:
                longest, longest_ns = spell, waited_ns
        return longest
