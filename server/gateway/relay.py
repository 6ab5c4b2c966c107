"""Tokens of one attempt, as they arrive, to text as the client may see it. Pure.

Owns order, duplicates and where the text ends; the characters are `server.detokenize`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.detokenize import IncrementalDetokenizer, StopMatcher, TokenBytes
from server.wire.messages import TokenItem

MAX_EARLY_ITEMS = 1024
"""Items held for tokens before them that have not come; beyond it they are dropped."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one item added. `finish_reason` is set once, with the last text."""

    text: str
    finish_reason: str | None


class OutputStream:
    """The output of one attempt.

    Tokens count by their index: repeated ones are ignored, ones that come before their turn wait.
    A stop string ends the text here; the worker that generates finds it too, and says so.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stop)
        self._early: dict[int, TokenItem] = {}
        self.num_tokens = 0
        self.cached_tokens = 0
        self.ignored = 0
        """Items that said nothing new."""
        self.finish_reason: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the attempt may not have been told."""
        return self._matcher.matched is not None

    def feed(self, item: TokenItem) -> Delta:
        """Text that became certain with `item`."""
        if self.finish_reason is not None:
            self.ignored += 1
            return Delta("", None)
        if item.cached_tokens is not None:
            self.cached_tokens = item.cached_tokens
        if item.index > self.num_tokens:
            if len(self._early) < MAX_EARLY_ITEMS:
                self._early.setdefault(item.index, item)
            else:
                self.ignored += 1
            return Delta("", None)
        text = self._take(item)
        while self.finish_reason is None and (due := self._due()) is not None:
            text += self._take(due)
        return Delta(text, self.finish_reason)

    def _due(self) -> TokenItem | None:
        for index in sorted(self._early):
            if index > self.num_tokens:
                return None
            return self._early.pop(index)
        return None

    def _take(self, item: TokenItem) -> str:
        fresh = item.token_ids[self.num_tokens - item.index :]
        if not fresh and item.finish_reason is None:
            self.ignored += 1
            return ""
        text = ""
        for token_id in fresh:
            self.num_tokens += 1
            text += self._matcher.append(self._detokenizer.append((token_id,)))
            if self.stopped:
                # Tokens of the same step beyond the stop string are no part of the answer.
                self.finish_reason = "stop"
                return text
        if item.finish_reason is not None:
            text += self._matcher.append(self._detokenizer.flush()) + self._matcher.flush()
            self.finish_reason = "stop" if self.stopped else item.finish_reason
        return text
