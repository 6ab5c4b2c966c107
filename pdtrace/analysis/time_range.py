"""Which requests of a source to look at: begun when, how many, which one. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from pdtrace.errors import PdtraceError

DEFAULT_SINCE_S = 3600.0
DEFAULT_TRACES = 500
"""Traces; some 20 kB each."""
DEFAULT_ANSWER_S = 30.0

_LONGEST_AGO_S = 1e12
_LAST_NS = 2**63 - 1
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class TimeRangeError(PdtraceError):
    """A time is not written so that it can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuery:
    """What to ask a store of traces for. Files and run directories are read whole instead.

    wanted     id of a request, trace or root span that has to be among them; None: no special one
    since_ns   Unix time from which requests began; None: an hour ago, for `wanted` as long as kept
    until_ns   until which; None: now
    limit      traces, the latest
    timeout_s  for each answer
    """

    wanted: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    limit: int = DEFAULT_TRACES
    timeout_s: float = DEFAULT_ANSWER_S


def parse_instant(text: str, now_ns: int) -> int:
    """`15m` (ago; s, m, h, d), or a time such as 2026-11-30T12:00:00Z; Unix nanoseconds.

    A time without a zone is UTC; what lies before 1970 is 1970. Raises TimeRangeError.
    """
    if match := _AGO.fullmatch(text):
        ago_s = min(float(match[1]) * _SECONDS[match[2]], _LONGEST_AGO_S)
        return _within_reach(now_ns - round(ago_s * 1e9))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise TimeRangeError(
            f"{text!r} is no time: give how long ago, such as 15m, or 2026-11-30T12:00:00Z"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _within_reach(round(moment.timestamp() * 1e9))


def _within_reach(unix_ns: int) -> int:
    """Spans have times from 1970 to 2262: before and after there are none."""
    return min(max(unix_ns, 0), _LAST_NS)


def instant_text(unix_ns: int) -> str:
    """RFC 3339, UTC, to the microsecond."""
    moment = datetime.fromtimestamp(unix_ns / 1e9, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
