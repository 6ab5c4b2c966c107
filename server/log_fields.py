"""Values that callers chose, as they stand in a `key=value` log line. Pure.

Owns the spelling: a value cannot end its line, begin another, or pass for a field of its own.
"""

from __future__ import annotations

import json
import re

MAX_CHARS = 300
_PLAIN = re.compile(r"[\w.:/@%+~#!$&*?^|<>(){}\[\],;-]+", re.ASCII)


def logged(value: str) -> str:
    """`value` itself if it is one plain word, else as a JSON string in ASCII; cut when long."""
    if len(value) > MAX_CHARS:
        value = f"{value[:MAX_CHARS]}…"
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
