"""The requests of a soak: a fixed set of prompts, of which each one sent is one.

Owns sizes and chances; knows nothing of HTTP. Few prompts, asked again and again: each has one
right answer, and the prefix cache is used.
"""

from __future__ import annotations

import random

import msgspec

_LENGTHS = (1, 3, 15, 16, 17, 40, 100, 260, 500)
_OUTPUTS = (1, 2, 6, 12, 24, 40)
_FIRST_PRINTABLE = 33
_NUM_PRINTABLE = 90


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids. `text` is its one right answer, once that is known."""

    prompt: tuple[int, ...]
    max_tokens: int
    text: str = ""


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is to be sent.

    question   which of the questions
    drop_s     when its client goes away, seconds after it began; None: it stays
    """

    request_id: str
    question: int
    stream: bool
    drop_s: float | None


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How clients behave.

    rate          requests a second, at random times
    at_once       no more are open at a time
    drop_share    of the clients mean to go away; some of them have their answer before: 30 % do
    drop_mean_s   mean of the random time after which they go
    """

    rate: float = 12.0
    at_once: int = 48
    drop_share: float = 0.4
    drop_mean_s: float = 0.05
    stream_share: float = 0.6


def questions(count: int = 24) -> list[Question]:
    """Prompts of all sizes with outputs of all sizes. The same ones every time."""
    chance = random.Random(20)
    found: list[Question] = []
    for number in range(count):
        length = _LENGTHS[number % len(_LENGTHS)]
        # Every third shares its beginning with others, as chats do.
        first = 0 if number % 3 == 0 else chance.randrange(_NUM_PRINTABLE)
        prompt = [_FIRST_PRINTABLE + (first + 7 * i) % _NUM_PRINTABLE for i in range(length)]
        prompt[-1] = _FIRST_PRINTABLE + number % _NUM_PRINTABLE
        found.append(Question(prompt=tuple(prompt), max_tokens=chance.choice(_OUTPUTS)))
    return found


def next_sending(chance: random.Random, habits: Habits, num_questions: int) -> Sending:
    """One client's request."""
    drops = chance.random() < habits.drop_share
    return Sending(
        request_id=f"soak-{chance.getrandbits(64):016x}",
        question=chance.randrange(num_questions),
        stream=chance.random() < habits.stream_share,
        drop_s=chance.expovariate(1 / habits.drop_mean_s) if drops else None,
    )
