"""Words of somebody else for a log line: printable, on one line, bounded. Pure.

A request id, a worker's name or a collector's answer may hold anything, also line breaks that would
make log lines of their own, and what a terminal takes for commands.
"""

from __future__ import annotations

MAX_CHARS = 300


def one_line(text: str, limit: int = MAX_CHARS) -> str:
    """`text` with runs of spaces and of what is not printable as one space, cut to `limit`."""
    if text.isascii() and text.isprintable() and len(text) <= limit and "  " not in text:
        return text.strip()
    head = text[: 4 * limit]
    line = " ".join("".join(c if c.isprintable() else " " for c in head).split())
    return line if len(line) <= limit else line[:limit] + "…"
