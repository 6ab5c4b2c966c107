"""Token ids to text as a stream: whole characters only, and nothing past a stop string.

Pure state machines of one request; they know nothing of vocabularies, models or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The one thing detokenization asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that `token_id` adds to the text; empty for control tokens."""
        ...


class IncrementalDetokenizer:
    """Turns token ids into text deltas that never split a character.

    Bytes that begin a character wait until the character is whole. Bytes that can never become
    one are replaced by U+FFFD, as a full decode does. The deltas plus `flush()` concatenate to
    `tokenizer.decode(all ids)`.
    """

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_ids: Iterable[int]) -> str:
        """Text that became complete with `token_ids`; may be empty."""
        data = b"".join(self._tokenizer.token_bytes(token_id) for token_id in token_ids)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an incomplete character at the end decodes to: "" or U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in a stream of text deltas.

    Text that may be the beginning of a stop string is held back. After a match the text before
    the stop string has been returned, `matched` is the stop string found, and every further call
    returns "". The occurrence that begins first wins; of two that begin at one place, the
    shorter. The result does not depend on how the text was cut into deltas.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string is empty, expected at least one character")
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def append(self, delta: str) -> str:
        """Text that is certainly not part of a stop string."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return delta
        text = self._held + delta
        # A longer stop string that begins earlier may still complete, so an occurrence counts
        # only if no partial match begins before it.
        partial = self._partial_start(text)
        found = self._first_match(text)
        if found is not None and found[0] <= partial:
            return self._finish(text, found)
        self._held = text[partial:]
        return text[:partial]

    def flush(self) -> str:
        """The held text, once no more comes: a partial match is ordinary text."""
        if self.matched is not None:
            return ""
        text, self._held = self._held, ""
        found = self._first_match(text)
        return text if found is None else self._finish(text, found)

    def _finish(self, text: str, found: tuple[int, str]) -> str:
        start, self.matched = found
        self._held = ""
        return text[:start]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that begins first, the shorter on a tie."""
        found = [(at, len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _partial_start(self, text: str) -> int:
        """Where the longest suffix that begins a stop string starts; len(text) if none."""
        longest = max(len(s) for s in self._stop)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(len(s) > len(tail) and s.startswith(tail) for s in self._stop):
                return start
        return len(text)
