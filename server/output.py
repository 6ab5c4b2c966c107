"""The output of one request: which tokens it has, and when it is complete.

Owns the stop rules (end of sequence, length, stop strings); knows nothing of pages or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.detokenize import IncrementalDetokenizer, StopMatcher, TokenBytes
from server.engine.base import SamplingParams

STOP = "stop"
LENGTH = "length"


class StopRules:
    """Decides after each token whether it was the last.

    stop        stop strings; the tokenizer is asked for only when there are any
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        ignore_eos: bool,
        stop: Sequence[str] = (),
        tokenizer: Callable[[], TokenBytes] | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._eos = frozenset(() if ignore_eos else eos_token_ids)
        self._matcher: StopMatcher | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        if stop:
            assert tokenizer is not None
            self._matcher = StopMatcher(stop)
            self._detokenizer = IncrementalDetokenizer(tokenizer())

    def finish_reason(self, token_id: int, count: int) -> str | None:
        """ "stop", "length" or None, after `token_id` became output token number `count`.

        Call it once per token, in order: stop strings may span tokens.
        """
        if token_id in self._eos:
            return STOP
        if self._matcher is not None and self._detokenizer is not None:
            self._matcher.append(self._detokenizer.append((token_id,)))
            if self._matcher.matched is not None:
                return STOP
        return LENGTH if count >= self._max_tokens else None


class Generation:
    """Tokens of one sequence and the instants between them.

    prompt_len     tokens of the prompt; their KV is in the pages before the first commit
    token_ids      output tokens, in order
    num_tokens     how many they are
    last_token_id  the latest of them; its own KV is written by the next step
    last_ns        when it was committed, CLOCK_MONOTONIC nanoseconds
    finish_reason  set with the last token
    """

    __slots__ = (
        "_rules",
        "finish_reason",
        "last_ns",
        "last_token_id",
        "num_tokens",
        "prompt_len",
        "sampling",
        "token_ids",
    )

    def __init__(self, *, prompt_len: int, sampling: SamplingParams, rules: StopRules) -> None:
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.last_token_id = -1
        self.last_ns = 0
        self.finish_reason: str | None = None
        self._rules = rules

    @property
    def kv_len(self) -> int:
        """Positions whose KV is in the pages."""
        return self.prompt_len + max(0, self.num_tokens - 1)

    def commit(self, token_id: int, at_ns: int) -> float | None:
        """Take the next output token. Returns seconds since the one before, None for the first."""
        gap_s = (at_ns - self.last_ns) / 1e9 if self.num_tokens else None
        self.token_ids.append(token_id)
        self.num_tokens += 1
        self.last_token_id = token_id
        self.last_ns = at_ns
        self.finish_reason = self._rules.finish_reason(token_id, self.num_tokens)
        return gap_s
