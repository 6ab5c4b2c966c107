"""When an output is complete, and how its tokens are counted."""

from __future__ import annotations

import pytest

from server.engine.base import SamplingParams
from server.fake_tokenizer import FakeTokenizer
from server.output import Generation, StopRules

EOS = 256


def rules(
    *, max_tokens: int = 3, ignore_eos: bool = False, stop: tuple[str, ...] = ()
) -> StopRules:
    return StopRules(
        max_tokens=max_tokens,
        eos_token_ids=(EOS,),
        ignore_eos=ignore_eos,
        stop=stop,
        tokenizer=FakeTokenizer,
    )


def reasons(stop_rules: StopRules, tokens: list[int]) -> list[str | None]:
    return [stop_rules.finish_reason(token, count) for count, token in enumerate(tokens, start=1)]


@pytest.mark.parametrize(
    ("given", "tokens", "expected"),
    [
        (rules(), [65, 66, 67], [None, None, "length"]),
        (rules(max_tokens=1), [65], ["length"]),
        (rules(), [65, EOS], [None, "stop"]),
        (rules(max_tokens=1), [EOS], ["stop"]),
        (rules(ignore_eos=True), [EOS, EOS, EOS], [None, None, "length"]),
        (rules(max_tokens=9, stop=("BC",)), [65, 66, 67], [None, None, "stop"]),
        (rules(max_tokens=9, stop=("BC",)), [66, 66, 67], [None, None, "stop"]),
        (rules(max_tokens=9, stop=("X", "A")), [65], ["stop"]),
        (rules(max_tokens=2, stop=("BC",)), [66, 67], [None, "stop"]),
    ],
)
def test_last_token_has_the_reason_that_applies_first(
    given: StopRules, tokens: list[int], expected: list[str | None]
) -> None:
    assert reasons(given, tokens) == expected


def test_tokenizer_is_loaded_only_for_stop_strings() -> None:
    def load() -> FakeTokenizer:
        raise AssertionError("loaded")

    plain = StopRules(max_tokens=2, eos_token_ids=(), ignore_eos=False, tokenizer=load)
    assert plain.finish_reason(65, 1) is None
    with pytest.raises(AssertionError, match="loaded"):
        StopRules(max_tokens=2, eos_token_ids=(), ignore_eos=False, stop=("x",), tokenizer=load)


def test_kv_of_the_last_token_is_not_there_yet() -> None:
    generation = Generation(prompt_len=5, sampling=SamplingParams(), rules=rules(max_tokens=9))
    assert generation.kv_len == 5
    generation.commit(65, 100)
    assert (generation.kv_len, generation.last_token_id) == (5, 65)
    generation.commit(66, 200)
    assert (generation.kv_len, generation.num_tokens) == (6, 2)


def test_gap_is_the_time_since_the_token_before() -> None:
    generation = Generation(prompt_len=5, sampling=SamplingParams(), rules=rules())
    assert generation.commit(65, 1_000_000_000) is None
    assert generation.commit(66, 1_250_000_000) == 0.25
