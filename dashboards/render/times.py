"""Times as a user gives them: `now-30m`, seconds since 1970, or ISO 8601."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from dashboards.render.page import RenderError

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_RELATIVE = re.compile(r"now(?:-(\d+)([smhd]))?")


def milliseconds(text: str, now: datetime) -> int:
    """Unix time. A time without a zone is UTC. Raises RenderError for anything else."""
    if match := _RELATIVE.fullmatch(text):
        ago = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match[1] else timedelta()
        return int((now - ago).timestamp() * 1000)
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return int(float(text) * 1000)
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise RenderError(
            f"a time is now, now-30m, seconds since 1970 or 2026-01-31T12:00:00Z, not {text!r}"
        ) from error
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
