"""`pdtrace top` without `--once`: look, show, wait, and again. What is shown is
`pdtrace.terminal.top`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from pdtrace.errors import LiveError
from pdtrace.live.looks import LookSource
from pdtrace.stages import STAGE_BY_NAME
from pdtrace.terminal.top import DEFAULT_LIMIT, top_document, top_view

DEFAULT_INTERVAL_S = 1.0


def follow(
    source: LookSource,
    console: Console,
    *,
    stage: str | None,
    limit: int | None,
    interval_s: float,
    as_json: bool,
    ascii_only: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Looks again every `interval_s` until interrupted, or until the output's reader leaves.

    On a terminal the view stays in place; elsewhere each look is printed below the last, as JSON on
    one line with `as_json`. A source that stops answering is told among the problems, under what it
    said last. Raises LiveError if the first look fails, BrokenPipeError if JSON has no reader.
    """
    if stage is not None:
        assert stage in STAGE_BY_NAME
    last = source.look()
    in_place = console.is_terminal and not as_json

    def view() -> RenderableType:
        return top_view(
            last,
            source=source.name,
            width=console.width,
            stage=stage,
            limit=limit or DEFAULT_LIMIT,
            height=console.height if in_place else None,
            ascii_only=ascii_only,
        )

    def following() -> None:
        nonlocal last
        sleep(interval_s)
        try:
            last = source.look()
        except LiveError as error:
            last = msgspec.structs.replace(last, problems=(str(error),))

    if in_place:
        with Live(view(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                following()
                live.update(view(), refresh=True)
    while not console.quiet:
        if as_json:
            document = top_document(last, source=source.name, stage=stage, limit=limit)
            print(json.dumps(document, allow_nan=False), flush=True)
        else:
            console.print(view())
            console.print(Text())
        following()
