"""What the demo sends: ordinary chat requests, and some that a named stage is to hold up. Pure.

Owns prompts, order and faults; knows nothing of HTTP or of how a recording is judged.

A *warm-up* tells how fast this machine is. In *traffic*, a few requests are in flight at a time,
few enough that they rarely wait for each other; every third one carries a fault header for one
stage. In *full pool*, two long requests take most of the decode worker's KV pages and are held
while they have them, so that a third finds no room: nothing delays it but the pool.
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
MIN_STALL_S = 3.0
MAX_STALL_S = 24.0  # the ballast's 60 s are the most that a fault header takes
BALLAST = 2.5  # times as long as the other stalls
AT_ONCE = 3
DECODE_PAGES = 112
GAP_S = 1.5
SERVER_OPTIONS = (
    *("--allow-faults", "--decode-pages", str(DECODE_PAGES)),
    *("--gap-threshold-s", str(GAP_S)),
)
"""The pool is small so that two long requests fill it; ordinary traffic uses a fraction of it. A
pause of the machine itself, under a second or so on a busy one, is not to count as a gap."""

# A word is about a token. Two requests of this length take 82 of the 112 pages, a third needs 40.
_LONG_WORDS = 600
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

    faults      stage → milliseconds, sent as a header; empty for most
    expected    stage that must be blamed; None: no stage may be
    stall_ms    how long that stage is held at least
    """

    request_id: str
    prompt: str
    max_tokens: int
    faults: dict[str, int] = field(default_factory=dict[str, int])
    expected: str | None = None
    stall_ms: int = 0

    @property
    def fault_header(self) -> str:
        return ", ".join(f"{stage}={delay}" for stage, delay in self.faults.items())


def stall_ms(usual_s: float) -> int:
    """How long to hold a stage where an unhindered request takes `usual_s` seconds.

    A stall has to stand out: on a slow or busy machine it has to be longer. Not without end, as
    the server refuses delays that are too long, and gives a transfer up after 30 s.
    """
    return round(min(max(MIN_STALL_S, 1.5 * usual_s), MAX_STALL_S) * 1000)


def warm_up() -> list[DemoRequest]:
    """Ordinary requests, one after the other. The first leaves the long prefix in the cache."""
    rng = random.Random(_SEED + 2)  # noqa: S311  prompts, not secrets
    prompts = [_long_prompt("hello"), prompt(rng, 40), prompt(rng, 40)]
    return [
        DemoRequest(request_id=f"demo-first-{number}", prompt=text, max_tokens=20)
        for number, text in enumerate(prompts, start=1)
    ]


def traffic(stall_ms: int) -> list[DemoRequest]:
    """14 requests with a fault each among 28 without, of mixed lengths."""
    rng = random.Random(_SEED)  # noqa: S311
    victims = list(HEADER_STAGES) * ROUNDS
    rng.shuffle(victims)
    requests: list[DemoRequest] = []
    for victim in victims:
        for expected in (*[None] * HEALTHY_PER_VICTIM, victim):
            requests.append(
                DemoRequest(
                    request_id=f"demo-{len(requests) + 1:02d}",
                    prompt=prompt(rng, rng.choice((5, 10, 20, 40, 80))),
                    max_tokens=rng.randrange(12, 25, 4),
                    faults={} if expected is None else {expected: stall_ms},
                    expected=expected,
                    stall_ms=0 if expected is None else stall_ms,
                )
            )
    return requests


def full_pool(stall_ms: int) -> list[DemoRequest]:
    """Two that hold the pool, and the one that waits for its pages; sent a moment apart."""
    ballast_ms = round(stall_ms * BALLAST)
    ballast = [
        DemoRequest(
            request_id=f"demo-ballast-{number}",
            prompt=_long_prompt(f"ballast {number}"),
            max_tokens=12,
            faults={"decode.queue": ballast_ms},
            expected="decode.queue",
            stall_ms=ballast_ms,
        )
        for number in (1, 2)
    ]
    blocked = DemoRequest(
        request_id="demo-full-pool",
        prompt=_long_prompt("last"),
        max_tokens=12,
        expected="decode.reserve",
        stall_ms=stall_ms,
    )
    return [*ballast, blocked]


def _long_prompt(ending: str) -> str:
    """The same long text with an ending of its own: pages are full, hardly anything is computed."""
    return f"{prompt(random.Random(_SEED + 1), _LONG_WORDS)} {ending}"  # noqa: S311


def prompt(rng: random.Random, num_words: int) -> str:
    """A question about `num_words` words."""
    words: Sequence[str] = rng.choices(_WORDS, k=num_words)
    return f"{rng.choice(_QUESTIONS)} {' '.join(words)}."
