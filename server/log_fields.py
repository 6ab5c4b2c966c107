"""Values that callers chose, as they stand in a `key=value` log line, and the line itself. Pure.

Owns the spelling: a value cannot end its line, begin another, or pass for a field of its own. What
is logged without that thought, such as the words of another process, is kept to one line at least.
"""

from __future__ import annotations

import json
import logging
import re

MAX_CHARS = 300
MAX_LINE_CHARS = 4000
_PLAIN = re.compile(r"[\w.:/@%+~#!$&*?^|<>(){}\[\],;-]+", re.ASCII)


def logged(value: str) -> str:
    """`value` itself if it is one plain word, else as a JSON string in ASCII; cut when long."""
    if len(value) > MAX_CHARS:
        value = f"{value[:MAX_CHARS]}…"
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


class OneLine(logging.Formatter):
    """Makes each message one printable line of bounded length; a traceback follows as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  as logging has it
        text = record.message
        if len(text) > MAX_LINE_CHARS:
            text = f"{text[:MAX_LINE_CHARS]}…"
        if not text.isprintable():
            text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        record.message = text
        return super().formatMessage(record)
