"""The requests written last to a folder of traces: what usual times are learnt from at a start."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdtrace.otlp import decode_line
from pdtrace.placement import is_root
from pdtrace.spans import Span

MAX_BASELINE_BYTES = 4 * 1024 * 1024
"""How much of the newest file is read."""


def recent_requests(traces: Path) -> Iterable[Sequence[Span]]:
    """Spans of the requests written last, one request at a time; what cannot be read is left out:
    usual times are a help, not a promise."""
    try:
        files = sorted(
            path for path in traces.iterdir() if path.is_file() and not path.name.startswith(".")
        )
        newest = files[-1] if files else None
        if newest is None:
            return
        with newest.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_BASELINE_BYTES))
            lines = file.read(MAX_BASELINE_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines[1:] if size > MAX_BASELINE_BYTES else lines:
        try:
            spans = decode_line(line) if line else []
        except ValueError:
            continue
        if spans:
            yield sorted(spans, key=lambda span: not is_root(span))
