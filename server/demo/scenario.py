"""What the demo sends: ordinary chat requests, and some that a named stage is to hold up. Pure.

Owns prompts, arrival times and faults; knows nothing of HTTP or of how a recording is judged.

Two scenes follow a warm-up. In *traffic*, requests arrive at a steady pace, slow enough
that they rarely wait for each other; every third one carries a fault header for one stage. In *full
pool*, two long requests take most of the decode worker's KV pages and are held while they have
them, so that a third finds no room: nothing delays it but the pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

HEADER_STAGES = (
    "gateway.queue",
    "prefill.queue",
    "prefill.compute",
    "transfer",
    "decode.queue",
    "decode.gap",
    "hop.token",
)
"""Stages that a fault header holds up, each in `ROUNDS` requests."""

ROUNDS = 2
HEALTHY_PER_VICTIM = 2
STALL_MS = 2000
BALLAST_MS = 5000
DECODE_PAGES = 112
SERVER_OPTIONS = ("--allow-faults", "--decode-pages", str(DECODE_PAGES))
"""The pool is small so that two long requests fill it; ordinary traffic uses half of it."""

_BALLAST_WORDS = 600  # about as many tokens: 40 of the 112 pages each
_BLOCKED_WORDS = 760  # 50 pages, with 32 left
_SEED = 20

# Common words, so that a word is about a token.
_TEXT = (
    "the a an old new small large green river stone house road tree light water story people city "
    "garden letter music winter summer morning evening window table chair book page name answer "
    "question reason friend teacher student doctor farmer sailor captain island mountain valley "
    "bridge market bread sugar coffee paper color number circle line point time year day hour"
)
_WORDS = tuple(_TEXT.split())
_QUESTIONS = (
    "Write a short story with these words:",
    "Sort these words by what they have in common:",
    "Explain what these words make you think of:",
    "Make a poem out of the following words:",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """One chat request.

    at          arrival, in paces from the scene's begin
    faults      stage → milliseconds, sent as a header; empty for most
    expected    stage that must be blamed; None: no stage may be
    stall_ms    how long that stage is held at least
    """

    request_id: str
    at: float
    prompt: str
    max_tokens: int
    faults: dict[str, int] = field(default_factory=dict[str, int])
    expected: str | None = None
    stall_ms: int = 0

    @property
    def fault_header(self) -> str:
        return ", ".join(f"{stage}={delay}" for stage, delay in self.faults.items())


def warm_up() -> list[DemoRequest]:
    """Two ordinary requests, one after the other; they tell how fast this machine is."""
    rng = random.Random(_SEED + 2)  # noqa: S311
    return [
        DemoRequest(request_id=f"demo-first-{number}", at=0, prompt=prompt(rng, 60), max_tokens=24)
        for number in (1, 2)
    ]


def traffic() -> list[DemoRequest]:
    """The first scene: 14 requests with a fault each among 28 without, of mixed lengths."""
    rng = random.Random(_SEED)  # noqa: S311  prompts, not secrets
    victims = list(HEADER_STAGES) * ROUNDS
    rng.shuffle(victims)
    requests: list[DemoRequest] = []
    for victim in victims:
        for expected in (*[None] * HEALTHY_PER_VICTIM, victim):
            number = len(requests) + 1
            requests.append(
                DemoRequest(
                    request_id=f"demo-{number:02d}",
                    at=number - 1,
                    prompt=prompt(rng, rng.choice((10, 20, 40, 80, 120))),
                    max_tokens=rng.randrange(16, 33, 4),
                    faults={} if expected is None else {expected: STALL_MS},
                    expected=expected,
                    stall_ms=0 if expected is None else STALL_MS,
                )
            )
    return requests


def full_pool() -> list[DemoRequest]:
    """The second scene: two that hold the pool, and the one that waits for its pages."""
    rng = random.Random(_SEED + 1)  # noqa: S311
    ballast = [
        DemoRequest(
            request_id=f"demo-ballast-{number}",
            at=0,
            prompt=prompt(rng, _BALLAST_WORDS),
            max_tokens=16,
            faults={"decode.queue": BALLAST_MS},
            expected="decode.queue",
            stall_ms=BALLAST_MS,
        )
        for number in (1, 2)
    ]
    blocked = DemoRequest(
        request_id="demo-full-pool",
        at=1,
        prompt=prompt(rng, _BLOCKED_WORDS),
        max_tokens=16,
        expected="decode.reserve",
        stall_ms=STALL_MS,
    )
    return [*ballast, blocked]


def prompt(rng: random.Random, num_words: int) -> str:
    """A question about `num_words` words."""
    words: Sequence[str] = rng.choices(_WORDS, k=num_words)
    return f"{rng.choice(_QUESTIONS)} {' '.join(words)}."
