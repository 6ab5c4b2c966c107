"""What a command that takes long is doing, on one line of a terminal.

Owns when it is shown and how it goes away; knows nothing of what is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol, TextIO

FIRST_S = 1.0
"""Nothing is shown of what takes less."""
EVERY_S = 0.2


class Progress(Protocol):
    """Is told what is done, and which part of it, 0 to 1, if that is known."""

    def __call__(self, doing: str, share: float | None) -> None: ...


def no_progress(doing: str, share: float | None) -> None:
    """Nobody wants to know."""


class Patience:
    """Shows progress on a terminal; anywhere else nothing.

    clock  seconds, monotonic
    """

    def __init__(
        self, stream: TextIO | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        can_erase = os.environ.get("TERM", "dumb") != "dumb"
        self._stream = stream if stream is not None and stream.isatty() and can_erase else None
        self._clock = clock
        self._due_s = clock() + FIRST_S
        self._doing: str | None = None
        self._shown = False

    def __call__(self, doing: str, share: float | None) -> None:
        """Shows it, at most every EVERY_S unless it is something new."""
        if self._stream is None:
            return
        now_s = self._clock()
        late_s = now_s - self._due_s
        if late_s < 0 and not (self._shown and doing != self._doing):
            return
        self._due_s, self._doing, self._shown = now_s + EVERY_S, doing, True
        part = "" if share is None else f" {min(share, 1.0) * 100:.0f} %"
        self._write(f"\r\x1b[Kpdtrace: {doing}{part}")

    def clear(self) -> None:
        """Takes the line away. Idempotent."""
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._stream, self._shown = None, False  # the terminal is gone
