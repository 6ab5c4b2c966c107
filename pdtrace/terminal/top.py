"""`pdtrace top`: the requests in flight, the worst first, and the processes that serve them.

Owns the order and the layout; where looks come from is `pdtrace.live.looks`'s, looking again and
again `pdtrace.terminal.following`'s. Pure.

The order: requests that are stuck; those whose stage is older than usual, by how many times; those
whose stage has no usual time yet, by the stage's age; then the others. What was answered already
comes last. A usual time below a millisecond counts as one.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pdtrace.analysis.waits import describe_wait_now, listed
from pdtrace.duration import seconds_text
from pdtrace.inflight import END_UNKNOWN, InFlight, Look, ProcessNow, ProcessState
from pdtrace.stages import Role
from pdtrace.terminal.palette import COLOURS
from pdtrace.terminal.render import clean, translated
from pdtrace.terminal.standings import Standings

TOP_SCHEMA = "pdtrace.top/1"
DEFAULT_LIMIT = 20

_WIDE = 110
"""Columns from which on attempt and workers stand in the row, not below it."""
_NARROW = 72
"""Columns below which a process's gauges stand below the table."""
_FEW = 5
"""So many requests show by themselves in which stages they are."""
_SEVERAL = 2
_ID_LEAST = 8
"""Columns that a request's id has at least; others make room for it."""
_LEAST_USUAL_S = 1e-3
_SLOW_RATIO = 3.0
_FULL_DETAIL = 3
_ROLES = tuple(role.value for role in Role)
_STATE_STYLES = {
    ProcessState.ALIVE: "green",
    ProcessState.STALLED: "bold red",
    ProcessState.CLOSED: "dim",
    ProcessState.LOST: "bold red",
}


def times_usual(request: InFlight) -> float | None:
    """How many times its usual length the stage is old; None without a usual length."""
    if request.usual_s is None:
        return None
    return request.stage_age_s / max(request.usual_s, _LEAST_USUAL_S)


def ordered(requests: Sequence[InFlight], stage: str | None = None) -> list[InFlight]:
    """The worst first; only those in `stage` if one is given."""
    wanted = [request for request in requests if stage is None or request.stage == stage]
    return sorted(wanted, key=_rank)


def _rank(request: InFlight) -> tuple[bool, bool, int, float, float, str]:
    ratio = times_usual(request)
    group = 1 if ratio is None else 0 if ratio > 1 else 2
    age = -(request.age_s if request.stage is None else request.stage_age_s)
    late = (not request.stuck, group, -(ratio or 0.0), age)
    return (request.ended is not None, *late, request.root_span_id)


def top_document(
    look: Look, *, source: str, stage: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """`pdtrace top --json`: the look, its requests in the order shown."""
    requests = ordered(look.requests, stage)
    return {
        "schema": TOP_SCHEMA,
        "source": source,
        "at_unix_ns": look.at_ns,
        "in_flight": len(look.requests),
        "requests": [
            {
                **msgspec.to_builtins(request),
                "times_usual": times_usual(request),
                "waits_for": _waits_for(request),
            }
            for request in requests[:limit]
        ],
        "processes": [msgspec.to_builtins(process) for process in look.processes],
        "problems": list(look.problems),
    }


def top_view(
    look: Look,
    *,
    source: str,
    width: int,
    stage: str | None = None,
    limit: int = DEFAULT_LIMIT,
    height: int | None = None,
    ascii_only: bool = False,
) -> RenderableType:
    """One look, at most `width` columns; with `height` no more lines than that, about."""
    requests = ordered(look.requests, stage)
    processes = sorted(look.processes, key=_place)
    blocks: list[RenderableType] = [_headline(look, processes, requests, source, stage)]
    below = [*_process_blocks(processes, width), *_problem_blocks(look.problems)]
    if requests:
        rows = _Rows(look, wide=width >= _WIDE)
        room = None
        if height is not None:
            per_process = 1 if width >= _NARROW else 2
            rest = per_process * len(look.processes) + 2 * len(look.problems)
            room = max(3, height - rest - 7)
        shown = rows.fitting(requests[:limit], width, room)
        blocks += [Text(), *rows.build(requests[:shown], width)]
        if shown < len(requests):
            blocks.append(Text(f"… and {len(requests) - shown} more", style="dim"))
    return translated([*blocks, *below], ascii_only=ascii_only)


def _place(process: ProcessNow) -> tuple[int, str, str]:
    """As requests go through them."""
    role = _ROLES.index(process.role) if process.role in _ROLES else len(_ROLES)
    return (role, process.host_id, process.instance)


def _headline(
    look: Look,
    processes: Sequence[ProcessNow],
    requests: Sequence[InFlight],
    source: str,
    stage: str | None,
) -> RenderableType:
    at = datetime.fromtimestamp(look.at_ns // 10**9, UTC)
    where = f" in {stage}" if stage else ""
    if not requests:
        if look.problems and not processes:
            return Text("What is in flight cannot be told.", style="bold")
        return Text(clean(f"No request is in flight{where}{_standing(processes)}."))
    waiting = [request for request in requests if request.ended is None]
    parts = [f"{_many(len(waiting), 'request')} in flight{where}"]
    if stuck := sum(request.stuck for request in waiting):
        parts.append(f"{stuck} stuck")
    if finishing := len(requests) - len(waiting):
        parts.append(f"{finishing} answered and not let go of")
    line = Text(", ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
    line.append(clean(f" · {source} · {at:%H:%M:%S} UTC"), style="dim")
    stages = Tally(request.stage for request in waiting if request.stage)
    if len(waiting) <= _FEW or len(stages) < _SEVERAL:
        return line
    counts = ", ".join(f"{count} in {name}" for name, count in stages.most_common())
    return Group(line, Text(clean(counts)))


def _standing(processes: Sequence[ProcessNow]) -> str:
    """`: gateway-0 and worker-0 are alive`, in one clause for each state."""
    if not processes:
        return ": no process has recorded anything yet"
    by_state: defaultdict[ProcessState, list[str]] = defaultdict(list)
    for process, name in zip(processes, _called(processes), strict=True):
        by_state[process.state].append(name)
    clauses = [
        f"{listed(by_state[state])} {'is' if len(by_state[state]) == 1 else 'are'} {state.value}"
        for state in ProcessState
        if by_state[state]
    ]
    return ": " + ", ".join(clauses)


def _called(processes: Sequence[ProcessNow]) -> list[str]:
    """What to call each: by its instance, and by its pid where another one has or had that name."""
    namesakes = Tally((process.host_id, process.instance) for process in processes)
    return [
        process.instance
        if namesakes[process.host_id, process.instance] == 1
        else f"{process.instance} (pid {process.pid})"
        for process in processes
    ]


class _Rows:
    """The table of requests: a row each, and lines below it for what has no column."""

    def __init__(self, look: Look, *, wide: bool) -> None:
        self._wide = wide
        self._standings = Standings(look)

    def fitting(self, requests: Sequence[InFlight], width: int, room: int | None) -> int:
        """How many requests have room in so many lines; at least one."""
        if room is None:
            return len(requests)
        used = 0
        for count, request in enumerate(requests):
            lines = [len(line) // max(1, width - 4) + 1 for line in self._below(request)]
            used += 1 + sum(lines)
            if used > room and count:
                return count
        return len(requests)

    def build(self, requests: Sequence[InFlight], width: int) -> list[RenderableType]:
        """The rows, under one header."""
        cells = [self._cells(request) for request in requests]
        header = ["", "request", "stage", "in stage", "usual", "times", "in all"]
        if self._wide:
            header += ["try", "workers"]
        fixed = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
        columns = list(range(len(header)))

        def others() -> int:
            return sum(fixed[i] for i in columns if i != 1) + 2 * (len(columns) - 1)

        for dispensable in (6, 4, 5):  # the age in all, what is usual, how many times that
            if width - others() < _ID_LEAST and dispensable in columns:
                columns.remove(dispensable)
        fixed[1] = min(fixed[1], max(_ID_LEAST, width - others()))
        right = {3, 4, 5, 6}

        def line(row: Sequence[str]) -> list[str]:
            return [
                _cut(text, fixed[i]).rjust(fixed[i])
                if i in right
                else _cut(text, fixed[i]).ljust(fixed[i])
                for i, text in enumerate(row)
                if i in columns
            ]

        blocks: list[RenderableType] = [Text("  ".join(line(header)), style="dim", no_wrap=True)]
        for request, row in zip(requests, cells, strict=True):
            styles = _styles(request)
            shown = Text(no_wrap=True, overflow="crop")
            for position, text in zip(columns, line(row), strict=True):
                shown.append(("  " if position else "") + text, style=styles.get(position, ""))
            blocks.append(shown)
            blocks += [
                Padding(Text(below, style=style), (0, 0, 0, 4), expand=False)
                for below, style in self._below(request).items()
            ]
        return blocks

    def _cells(self, request: InFlight) -> list[str]:
        ratio = times_usual(request)
        cells = [
            "!" if request.stuck else "",
            clean(request.request_id, 128),
            clean(request.stage or ("answered" if request.ended else "?")),
            _age(request.stage_age_s) if request.stage else "",
            _usual(request.usual_s),
            "" if ratio is None else f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x",
            _age(request.age_s),
        ]
        if self._wide:
            cells += [str(request.attempt), _workers(request)]
        return cells

    def _below(self, request: InFlight) -> dict[str, str]:
        """Line → style."""
        lines: dict[str, str] = {}
        if not self._wide:
            attempt = f"try {request.attempt}" if request.attempt > 1 else ""
            facts = [fact for fact in (_workers(request), attempt) if fact]
            if facts:
                lines[clean(" · ".join(facts))] = "dim"
        if waits := _waits_for(request):
            lines[clean(waits)] = ""
        for sentence in self._standings.of(request, all_legs=False):
            lines[clean(sentence)] = "bold red"
        if request.ended == END_UNKNOWN:
            lines["over, but how it ended was not recorded"] = "dim"
        elif request.ended is not None:
            lines[clean(f"answered ({request.ended}), not yet let go of by all workers")] = "dim"
        if request.incomplete:
            lines[clean(f"incomplete: {request.incomplete}")] = "dim"
        return lines


def _styles(request: InFlight) -> dict[int, str]:
    """Column → style."""
    ratio = times_usual(request)
    late = "bold red" if request.stuck else "yellow" if ratio and ratio >= _SLOW_RATIO else ""
    if request.ended is not None:
        return dict.fromkeys(range(9), "dim")
    colour = COLOURS.get(request.stage or "", "")
    return {0: "bold red", 2: colour, 3: late, 4: "dim", 5: late, 7: "dim", 8: "dim"}


def _waits_for(request: InFlight) -> str | None:
    """The wait in words; None if none was recorded."""
    wait = request.wait
    if wait is None:
        return None
    clause = describe_wait_now(wait.stage or request.stage, wait)
    return f"{wait.stage}: {clause}" if wait.stage else clause


def _workers(request: InFlight) -> str:
    workers = [w for w in (request.prefill_worker, request.decode_worker) if w]
    return clean(" → ".join(dict.fromkeys(workers)))


def _process_blocks(processes: Sequence[ProcessNow], width: int) -> list[RenderableType]:
    if not processes:
        return []
    many_hosts = len({process.host_id for process in processes}) > 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("process", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("progress", justify="right", no_wrap=True)
    table.add_column("open", justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("pid", justify="right", no_wrap=True)
    if width >= _NARROW:
        table.add_column("", ratio=1)
    below: list[RenderableType] = []
    # A column of pids tells namesakes apart, too.
    names = [process.instance for process in processes] if width >= _WIDE else _called(processes)
    for process, name in zip(processes, names, strict=True):
        host = f" @{process.host_id[:8]}" if many_hosts else ""
        progress = process.progress_age_s
        cells: list[RenderableType] = [
            clean(name + host),
            Text(process.halt or process.state, style=_STATE_STYLES[process.state]),
            "" if progress is None else f"{_age(progress)} ago",
            str(process.open_requests),
        ]
        if width >= _WIDE:
            cells.append(str(process.pid))
        gauges = Text(clean(_gauges(process.gauges)), style="dim")
        if width >= _NARROW:
            cells.append(gauges)
        elif gauges:
            below.append(Text.assemble(clean(name), ": ", gauges))
        table.add_row(*cells)
    return [Text(), table, *below]


def _gauges(gauges: Mapping[str, int]) -> str:
    """`KV 30 of 112 pages free, 12 reserved · 4 running, 3 waiting`."""
    parts: list[str] = []
    total, free = gauges.get("kv_pages_total"), gauges.get("kv_pages_free")
    if total and free is not None:
        # Cached pages come free when they are needed.
        more = [
            f", {gauges[name]} {word}"
            for name, word in (("kv_pages_cached", "cached"), ("kv_pages_reserved", "reserved"))
            if gauges.get(name)
        ]
        parts.append(f"KV {free} of {total} pages free{''.join(more)}")
    busy = [
        f"{gauges[name]} {word}"
        for name, word in (
            ("running", "running"),
            ("waiting", "waiting"),
            ("reserving", "reserving"),
            ("transferring", "transferring"),
        )
        if gauges.get(name)
    ]
    if copies := gauges.get("copy_jobs_waiting"):
        busy.append(f"{copies} {'copy' if copies == 1 else 'copies'} waiting")
    if busy:
        parts.append(", ".join(busy))
    detail = gauges.get("recording_detail")
    if detail is not None and detail < _FULL_DETAIL:
        parts.append(f"records at detail {detail} of {_FULL_DETAIL}")
    return " · ".join(parts)


def _problem_blocks(problems: Sequence[str]) -> list[RenderableType]:
    if not problems:
        return []
    lines = [Padding(Text(clean(line)), (0, 0, 0, 2), expand=False) for line in problems]
    return [Text(), Text("Problems", style="bold yellow"), *lines]


def _usual(seconds: float | None) -> str:
    """What `times_usual` reckons with."""
    if seconds is None:
        return ""
    return "<1 ms" if seconds < _LEAST_USUAL_S else _age(seconds)


def _age(seconds: float) -> str:
    return seconds_text(round(seconds * 1e9))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
