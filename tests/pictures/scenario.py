"""What happens while the pictures are taken: phases, and the requests of each. Pure.

A board is judged by what it shows of trouble. So most phases have one trouble each, in another
place, between times of health. The first minutes are healthy: what is slower than usual is held
against what was more than ten minutes ago.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

RATE = 4.0
"""Requests a second."""
STALL_MS = 900
LONG_WORDS = 230
"""Some six tokens each: with its answer half of a decode worker's pool."""
HELD_MS = 30_000
HELD = ("gateway.queue", "prefill.queue", "transfer", "decode.generate")
"""A stage of each role, in which a request is held at the end: the boards show what is open."""
MODEL = "fake:step_ms=8,token_us=40"
SERVER_OPTIONS = ("--prefill", "2", "--decode", "2", "--decode-pages", "192", "--allow-faults")
"""The pools are small, so that a few long requests fill them."""

_LEAVES, _WRONG = 0.02, 0.01
"""Shares of the clients that leave before they have an answer, and of bodies that are refused."""
_WORDS = ("river", "stone", "house", "road", "tree", "light", "water", "story", "city", "garden")
_INTRODUCTION = " ".join(_WORDS * 5)
"""Many prompts begin alike, and find that in the prefix cache."""


class Harm(Enum):
    """What goes wrong besides requests that are held: it is done to processes."""

    NONE = auto()
    COPY_FAILS = auto()
    """Now and then a copy ends early; the request is tried again."""
    COPIES_FAIL = auto()
    """For a while all copies do; requests fail."""
    WORKER_ENDS = auto()
    """A decode worker is killed, and another started in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some time of the run.

    stage        in which the requests of `share` are held for `STALL_MS`; "" holds none
    long_share   of requests that need much of a decode worker's KV pages
    """

    says: str
    seconds: float
    stage: str = ""
    share: float = 0.5
    long_share: float = 0.0
    harm: Harm = Harm.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `leaves_s`: when its client hangs up; None never."""

    prompt: str
    max_tokens: int
    stage: str = ""
    leaves_s: float | None = None
    is_wrong: bool = False


PHASES: Sequence[Phase] = (
    Phase(says="health", seconds=90),
    Phase(says="decode is told late of KV", seconds=50, stage="hop.publish"),
    Phase(says="health, and copies that are tried again", seconds=40, harm=Harm.COPY_FAILS),
    Phase(says="late tokens", seconds=50, stage="decode.gap"),
    Phase(says="health, and a worker that is killed", seconds=50, harm=Harm.WORKER_ENDS),
    Phase(says="little room for KV", seconds=50, long_share=0.2),
    Phase(says="health", seconds=40),
    Phase(says="requests wait for prefill", seconds=50, stage="prefill.queue"),
    Phase(says="copies that fail", seconds=40, harm=Harm.COPIES_FAIL),
    Phase(says="requests wait for decode", seconds=50, stage="decode.queue"),
    Phase(says="health", seconds=40),
    Phase(says="KV arrives late", seconds=110, stage="transfer"),
    Phase(says="health", seconds=30),
    Phase(says="the gateway holds requests back", seconds=30, stage="gateway.queue"),
)


def phases(seconds: float) -> list[Phase]:
    """All of them, within so many seconds."""
    factor = seconds / sum(phase.seconds for phase in PHASES)
    return [replace(phase, seconds=phase.seconds * factor) for phase in PHASES]


def next_ask(phase: Phase, rng: random.Random) -> Ask:
    chance = rng.random()
    if rng.random() < phase.long_share:
        return Ask(prompt=_prompt(rng, LONG_WORDS), max_tokens=200)
    usual = Ask(prompt=_prompt(rng, rng.randint(20, 120)), max_tokens=rng.randint(8, 40))
    if chance < _WRONG:
        return replace(usual, is_wrong=True)
    if chance < _WRONG + _LEAVES:
        return replace(usual, leaves_s=0.15)
    is_held = phase.stage != "" and rng.random() < phase.share
    return replace(usual, stage=phase.stage) if is_held else usual


def _prompt(rng: random.Random, words: int) -> str:
    own = " ".join(rng.choices(_WORDS, k=words))
    return f"{_INTRODUCTION} {own}" if rng.random() < 0.5 else own
