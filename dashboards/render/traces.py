"""Which trace the board of one request shows when nobody named one: the slowest that stalled."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from dashboards.render.page import RenderError

_LIMIT = 100
_TIMEOUT_S = 30.0
_REQUESTS = {"pd.span": "request"}


def slowest_trace(jaeger: str, from_ms: int, to_ms: int) -> str:
    """Its id, of the newest 100 requests; one with a verdict before those without.

    Raises RenderError when Jaeger does not answer or has no trace of that time.
    """
    query = {
        "service": "pd-gateway",
        "tags": json.dumps(_REQUESTS),
        "limit": _LIMIT,
        "start": from_ms * 1000,
        "end": to_ms * 1000,
    }
    url = f"{jaeger.rstrip('/')}/api/traces?{urlencode(query)}"
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the user's own address
            found: list[dict[str, Any]] = json.load(answer)["data"]
    except (URLError, OSError, ValueError, KeyError) as error:
        raise RenderError(f"Jaeger at {jaeger} does not answer a search: {error}") from error
    if not found:
        raise RenderError(f"Jaeger at {jaeger} has no trace of that time; --var trace=ID names one")
    return max(found, key=_rank)["traceID"]


def _rank(trace: dict[str, Any]) -> tuple[bool, int]:
    tags = [tag["key"] for span in trace["spans"] for tag in span["tags"]]
    return "pd.stall.stage" in tags, max(span["duration"] for span in trace["spans"])
