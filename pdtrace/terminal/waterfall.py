"""One request drawn over time: gateway, prefill, transfer and decode lanes above each other.

Pure: a timeline and a width in, lines of cells out. Each cell shows the stage that fills most of
its share of time in that lane; a stage too short for a cell of its own is only in the table. Stages
beside the chain are drawn where no chain stage is, pauses over the generation they interrupt. A
stage that goes on in a request in flight ends in an arrow at the right edge. Of one that was lost
with its process, or whose worker gave no sign any more, what comes after the last that the process
recorded of the request, or, where that is known, after its loop last went round, is drawn apart:
nobody knows how long it lived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text as attribute_text
from pdtrace.analysis.intervals import paint
from pdtrace.analysis.placement import FIRST_TOKEN_HOP
from pdtrace.analysis.timeline import UNEXPLAINED, StageVisit, Timeline
from pdtrace.duration import seconds_text
from pdtrace.stages import CHAINS, STAGE_BY_NAME, Outcome
from pdtrace.terminal.palette import LETTERS, fill_of

LABEL_WIDTH = 10
MIN_CELLS = 20
_WORKER_LOST = "worker_lost"

LastSigns = Mapping[str, Sequence[int]]
"""Unix times, nanoseconds, at which processes that are gone last went round, by instance."""
NO_SIGNS: LastSigns = MappingProxyType({})

_LANES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "gateway",
        (
            "gateway.ingest",
            "gateway.queue",
            "gateway.route",
            "gateway.dispatch",
            "hop.token",
            "gateway.finish",
        ),
    ),
    (
        "prefill",
        ("hop.publish", "prefill.queue", "prefill.compute", "prefill.bootstrap", "prefill.hold"),
    ),
    ("transfer", ("transfer.copy", "transfer.queue", "transfer")),
    (
        "decode",
        (
            "hop.dispatch",
            "decode.reserve",
            "hop.notice",
            "decode.queue",
            "decode.first",
            "decode.preempted",
            "decode.gap",
            "decode.generate",
        ),
    ),
)
"""Lane by lane, the stages drawn in it; where two cover a cell, the earlier one is shown."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring cells of one stage, or empty ones (`stage` None)."""

    stage: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of the picture; its runs are `cells` wide together."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Waterfall:
    """ticks    the time axis: labels, then marks, each `cells` wide
    lanes     top to bottom
    stages    every stage that has a cell
    pointer   (lane label, line) that points at one stage below its lane; None if it has no cell
    """

    cells: int
    ticks: tuple[str, str]
    lanes: tuple[Lane, ...]
    pointer: tuple[str, str] | None
    stages: frozenset[str] = frozenset()


def draw(
    timeline: Timeline,
    *,
    width: int,
    ascii_only: bool,
    point_at: str | None,
    last_signs: LastSigns = NO_SIGNS,
) -> Waterfall:
    """Draw a request in `width` columns, labels included; `point_at` is a stage to point at.

    A request without length has no lanes.
    """
    cells = max(MIN_CELLS, width - LABEL_WIDTH)
    total = timeline.total_ns
    if total <= 0:
        return Waterfall(cells, ("", ""), (), None)
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for visit in timeline.visits:
        if visit.name == FIRST_TOKEN_HOP and not timeline.streamed:
            continue  # it spans the generation and says nothing
        spans[visit.name].append((visit.begin_ns, visit.end_ns))
    going_on = {visit.name for visit in timeline.visits if visit.open}
    lost = _lost(timeline, last_signs)
    lanes: list[Lane] = []
    pointer: tuple[str, str] | None = None
    for label, names in _LANES:
        present = [name for name in names if spans[name]]
        if not present:
            continue
        row = _cells(present, spans, total, cells)
        gone = {
            cell
            for cell, name in enumerate(row)
            for begin, end in lost.get(name or "", ())
            if begin * cells < (cell + 1) * total and cell * total < end * cells
        }
        lanes.append(Lane(label, _runs(row, going_on, gone, ascii_only=ascii_only)))
        if point_at in names:
            line = _pointer(timeline, point_at, cells, ascii_only=ascii_only)
            pointer = (label, line) if line else None
    gaps = [(s.begin_ns, s.end_ns) for s in timeline.segments if s.name == UNEXPLAINED]
    if gaps:
        row = _cells([UNEXPLAINED], {UNEXPLAINED: gaps}, total, cells, least=0.5)
        if any(row):
            lanes.append(Lane("no stage", _runs(row, ascii_only=ascii_only)))
    drawn = frozenset(run.stage for lane in lanes for run in lane.runs if run.stage)
    if timeline.attempts > 1:
        lanes.insert(0, _attempts(timeline, cells))
    ticks = _ticks(total, cells, ascii_only=ascii_only)
    return Waterfall(cells, ticks, tuple(lanes), pointer, drawn)


def _lost(timeline: Timeline, last_signs: LastSigns) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Per stage the time in which its process may have been gone, or stopped."""
    lost: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for visit in timeline.visits:
        reason = attribute_text(visit.attributes, a.OUTCOME_REASON)
        if visit.outcome is Outcome.LOST or (visit.outcome and reason == _WORKER_LOST):
            lost[visit.name].append((_last_sign(timeline, visit, last_signs), visit.end_ns))
    return lost


def _last_sign(timeline: Timeline, lost: StageVisit, last_signs: LastSigns) -> int:
    """The last that its process recorded of the request in a stage that it was lost in, or when it
    last went round."""
    signs = [lost.begin_ns]
    signs += [at_ns - timeline.started_unix_ns for at_ns in last_signs.get(lost.instance or "", ())]
    for visit in timeline.visits:
        if visit.instance != lost.instance or visit.attempt != lost.attempt:
            continue
        signs += [wait.at_ns for wait in visit.waits if wait.at_ns is not None]
        if visit.outcome is None and not visit.open:
            signs.append(visit.end_ns)
    return max(sign for sign in signs if sign <= lost.end_ns)


def _cells(
    names: Sequence[str],
    spans: Mapping[str, Sequence[tuple[int, int]]],
    total: int,
    cells: int,
    least: float = 0.0,
) -> list[str | None]:
    """Per cell the stage with most time in it; None where stages cover `least` of it or less."""
    owners = [name for name in names for _ in spans[name]]
    intervals = [span for name in names for span in spans[name]]
    row: list[str | None] = []
    filled: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for begin, end, index in paint(intervals, 0, total):
        if index is None:
            continue
        for cell in range(begin * cells // total, min(cells - 1, (end - 1) * cells // total) + 1):
            low, high = cell * total // cells, (cell + 1) * total // cells
            filled[cell][owners[index]] += max(0, min(end, high) - max(begin, low))
    for cell in range(cells):
        inside = filled.get(cell)
        if inside and sum(inside.values()) * cells > least * total:
            row.append(max(inside.items(), key=lambda item: item[1])[0])
        else:
            row.append(None)
    return row


def _runs(
    row: Sequence[str | None],
    going_on: Set[str] = frozenset(),
    gone: Set[int] = frozenset(),
    *,
    ascii_only: bool,
) -> tuple[Run, ...]:
    """`gone`: cells in which the stage's process may have been gone."""
    edges = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
    last_gone = {stage: cell for cell, stage in enumerate(row) if cell in gone}
    runs: list[Run] = []
    for begin, end in pairwise(edges):
        stage = row[begin]
        if stage is None:
            runs.append(Run(None, " " * (end - begin)))
        else:
            fill = fill_of(stage, ascii_only=ascii_only)
            unknown = "?" if ascii_only else "▒"
            bar = "".join(unknown if cell in gone else fill for cell in range(begin, end))
            if last_gone.get(stage) == end - 1:
                bar = bar[:-1] + ("x" if ascii_only else "✗")
            bar = LETTERS[stage] + bar[1:]
            if end == len(row) and stage in going_on:
                bar = bar[:-1] + (">" if ascii_only else "▶")
            runs.append(Run(stage, bar))
    return tuple(runs)


def _pointer(timeline: Timeline, stage: str, cells: int, *, ascii_only: bool) -> str:
    """Marks under a stage's time, its name and length beside them where there is room."""
    extents = _extents(timeline, stage)
    row = _cells([stage], {stage: extents}, timeline.total_ns, cells)
    mark = "^" if ascii_only else "▔"
    line = "".join(mark if cell else " " for cell in row).rstrip()
    first = len(line) - len(line.lstrip())
    label = f"{stage} {seconds_text(sum(end - begin for begin, end in extents))}"
    if line and len(line) + 1 + len(label) <= cells:
        return f"{line} {label}"
    if len(label) + 1 <= first:
        return f"{' ' * (first - len(label) - 1)}{label} {line[first:]}"
    return line


def _extents(timeline: Timeline, stage: str) -> list[tuple[int, int]]:
    if STAGE_BY_NAME[stage] in CHAINS[timeline.mode]:
        return [(s.begin_ns, s.end_ns) for s in timeline.segments if s.name == stage]
    return [(v.begin_ns, v.end_ns) for v in timeline.visits_of(stage)]


def _attempts(timeline: Timeline, cells: int) -> Lane:
    line = [" "] * cells
    begins: dict[int, int] = {}
    for segment in timeline.segments:
        if segment.attempt is not None:
            begins.setdefault(segment.attempt, segment.begin_ns)
    for number, begin in sorted(begins.items()):
        position = min(cells - 1, begin * cells // timeline.total_ns)
        for offset, digit in enumerate(str(number)[: cells - position]):
            line[position + offset] = digit
    return Lane("attempt", (Run(None, "".join(line)),))


def _ticks(total: int, cells: int, *, ascii_only: bool) -> tuple[str, str]:
    """Labels and marks at round times, at least twelve cells apart."""
    step = _round_step(total * 12 / cells)
    labels, marks = [" "] * (cells + 12), ["-" if ascii_only else "─"] * cells
    at = 0
    while at <= total:
        position = min(cells - 1, at * cells // total)
        label = _tick(at)
        if position + len(label) <= cells:
            labels[position : position + len(label)] = label
            marks[position] = "+" if ascii_only else "┼"
        at += step
    return "".join(labels[:cells]).rstrip(), "".join(marks)


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5 times a power of ten nanoseconds that is at least `least`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _tick(ns: int) -> str:
    for size, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if ns >= size:
            return f"{ns / size:g} {unit}"
    return f"{ns} ns" if ns else "0"
