"""What a command that takes long is doing, on one line of a terminal or in a few plain ones.

Owns when it is shown and how it goes away; knows nothing of what is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol, TextIO

FIRST_S = 1.0
"""Nothing is shown on a terminal of what takes less."""
EVERY_S = 0.2
LINE_FIRST_S = 5.0
"""The same where lines stay, as in a log: a line is worth more patience there."""
LINE_EVERY_S = 10.0

_ERASE = "\r\x1b[K"


class Progress(Protocol):
    """Is told what is done, and which part of it, 0 to 1, if that is known."""

    def __call__(self, doing: str, share: float | None) -> None: ...


def no_progress(doing: str, share: float | None) -> None:
    """Nobody wants to know."""


class Patience:
    """Shows progress: on a terminal in one line that goes away, anywhere else in lines of its own,
    the first after LINE_FIRST_S, further ones every LINE_EVERY_S.

    clock  seconds, monotonic
    """

    def __init__(
        self, stream: TextIO | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        can_erase = os.environ.get("TERM", "dumb") != "dumb"
        self._erases = stream is not None and stream.isatty() and can_erase
        self._every_s = EVERY_S if self._erases else LINE_EVERY_S
        self._clock = clock
        self._due_s = clock() + (FIRST_S if self._erases else LINE_FIRST_S)
        self._doing: str | None = None
        self._shown = False

    def __call__(self, doing: str, share: float | None) -> None:
        """Shows it, as often as may be; on a terminal something new at once."""
        if self._stream is None:
            return
        now_s = self._clock()
        is_news = self._erases and self._shown and doing != self._doing
        if now_s < self._due_s and not is_news:
            return
        self._due_s, self._doing, self._shown = now_s + self._every_s, doing, True
        part = "" if share is None else f" {min(share, 1.0) * 100:.0f} %"
        line = f"pdtrace: {doing}{part}"
        self._write(f"{_ERASE}{line}" if self._erases else f"{line}\n")

    def clear(self) -> None:
        """Takes the line of a terminal away. Idempotent."""
        if self._shown and self._erases:
            self._shown = False
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream, self._shown = None, False  # the terminal is gone
