"""The requests written last to a folder of traces: what usual times are learnt from at a start."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdtrace.analysis.placement import is_root
from pdtrace.otlp.json_lines import decode_line
from pdtrace.spans import Span

MAX_BASELINE_BYTES = 4 * 1024 * 1024
"""How much of the newest files is read."""
MAX_BASELINE_REQUESTS = 512
"""No usual time counts more."""


def recent_requests(traces: Path) -> Iterable[Sequence[Span]]:
    """Spans of the requests written last, the earliest of them first, each root first; what cannot
    be read is left out: usual times are a help, not a promise."""
    found: list[list[Span]] = []
    for line in reversed(_last_lines(traces)):
        if len(found) >= MAX_BASELINE_REQUESTS:
            break
        try:
            spans = decode_line(line)
        except ValueError:
            continue
        if any(is_root(span) for span in spans):
            found.append(sorted(spans, key=lambda span: not is_root(span)))
    return reversed(found)


def _last_lines(traces: Path) -> list[bytes]:
    """Whole lines at the end of the newest files, in their order."""
    try:
        files = sorted(
            path for path in traces.iterdir() if path.is_file() and not path.name.startswith(".")
        )
    except OSError:
        return []
    lines: list[bytes] = []
    left = MAX_BASELINE_BYTES
    for path in reversed(files):
        if left <= 0:
            break
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - left))
                found = file.read(left).split(b"\n")
        except OSError:
            continue
        lines[:0] = [line for line in (found[1:] if size > left else found) if line]
        left -= size
    return lines
