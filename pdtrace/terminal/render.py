"""What the terminal shows: the `why` view, tables of checks and stages. Pure: data in, Rich out.

Owns layout and wording around the verdict; the verdict's sentences are
`pdtrace.analysis.verdict`'s. Every text that came from a file passes `clean`, so that no id can
steer the terminal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence, Set
from datetime import UTC, datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text as attribute_text
from pdtrace.analysis.baselines import NESTED_LEAVES
from pdtrace.analysis.intervals import paint
from pdtrace.analysis.timeline import UNEXPLAINED, Timeline, ViolationKind
from pdtrace.analysis.verdict import Assessment, Verdict, VerdictKind
from pdtrace.check import CheckReport
from pdtrace.duration import seconds_text
from pdtrace.stages import STAGE_BY_NAME, STAGES, TERMS, Outcome, WaitReason
from pdtrace.terminal.palette import COLOURS, LETTERS
from pdtrace.terminal.waterfall import LABEL_WIDTH, NO_SIGNS, LastSigns, Waterfall, draw
from pdtrace.terminal.why_lines import (
    attempt_lines,
    gap_lines,
    limited,
    shared_time,
    step_lines,
    stuck_lines,
    wait_lines,
)

MAX_WIDTH = 120
MAX_VIOLATIONS = 12
MAX_LACKS = 5
_WIDTH_FOR = {
    "bar": 72,
    "above": 62,
    "usual": 52,
    "pointer": 42,
    "share": 39,
    "outcome": 72,
    "why": 62,
    "title": 60,
}
"""Columns of tables that narrower terminals go without, so that names and numbers are never cut."""
_DETAIL_SHARE = 0.05  # nested stages of shorter stages are left out of the table
_MAX_ID = 128
_LACKING_STAGE = re.compile(r"The recording lacks something: no (\S+)\.")

_KIND_STYLES = {
    VerdictKind.HEALTHY: "green",
    VerdictKind.STALLED: "bold red",
    VerdictKind.ENDED: "bold yellow",
    VerdictKind.IN_FLIGHT: "bold yellow",
    VerdictKind.UNKNOWN: "bold",
}


def clean(value: object, limit: int = 1_000) -> str:
    """Text for a terminal: control, format and surrogate characters become visible escapes."""
    shown = "".join(
        char if char.isprintable() and unicodedata.category(char) != "Cf" else _escape(char)
        for char in str(value)[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else "\ufffd"


def why_view(
    timeline: Timeline,
    verdict: Verdict,
    *,
    width: int,
    ascii_only: bool = False,
    notes: Sequence[str] = (),
    standing: Sequence[str] = (),
    last_signs: LastSigns = NO_SIGNS,
) -> RenderableType:
    """The whole answer for one request, at most `width` columns.

    notes       doubts about the recording
    standing    what holds of its processes at this instant, for a request in flight
    last_signs  as for `pdtrace.terminal.waterfall.draw`
    """
    width = min(width, MAX_WIDTH)
    lacks, violations = _said_once(timeline)
    blocks: list[RenderableType] = [
        Text(clean(verdict.sentence, 2_000), style=_KIND_STYLES[verdict.kind]),
    ]
    blocks += [Text(clean(line), style="bold red") for line in standing]
    blocks += [Text(clean(line), style="yellow") for line in limited(lacks, MAX_LACKS)]
    injected = verdict.wait is not None and verdict.wait.reason == WaitReason.INJECTED
    slow = verdict.kind is VerdictKind.STALLED or (timeline.open and verdict.stalled)
    if slow and verdict.advice and not injected:
        blocks.append(Text(verdict.advice, style="italic"))
    blocks += [Text(), *_facts(timeline)]
    picture = draw(
        timeline,
        width=width,
        ascii_only=ascii_only,
        point_at=verdict.stage if verdict.kind is not VerdictKind.HEALTHY else None,
        last_signs=last_signs,
    )
    if picture.lanes:
        blocks += [Text(), *_picture(picture)]
    table = _StageTable(timeline, verdict, width=width, ascii_only=ascii_only)
    blocks += [Text(), table.build(picture.stages)]
    if verdict.peers:
        blocks.append(Text(_basis(verdict), style="dim"))
    blocks += [Text(line, style="dim") for line in shared_time(timeline)]
    blocks += section("Attempts", attempt_lines(timeline))
    blocks += section("Waits", wait_lines(timeline))
    blocks += section("Gaps between tokens", gap_lines(timeline))
    blocks += section("Steps", step_lines(timeline))
    blocks += section("Reported as stuck", stuck_lines(timeline))
    blocks += section("Violations", limited(violations, MAX_VIOLATIONS), style="red")
    doubts = [*verdict.notes, *timeline.unknowns, *notes]
    blocks += section("What this does not know", doubts)
    return Constrain(translated(blocks, ascii_only=ascii_only), width)


def _said_once(timeline: Timeline) -> tuple[list[str], list[str]]:
    """What is missing of the recording, and the violations. Stages that are missing make a sentence
    each in both: here one line names them all."""
    found = {line: _LACKING_STAGE.fullmatch(line) for line in timeline.lacks}
    lacking = {match[1] for match in found.values() if match and match[1] in STAGE_BY_NAME}
    of_stages = [v for v in timeline.violations if v.kind is ViolationKind.MISSING_STAGE]
    missing = lacking | {v.stage for v in of_stages}
    names = ", ".join(stage.name for stage in STAGES if stage.name in missing)
    lacks = [line for line, match in found.items() if not match or match[1] not in lacking]
    others = [f"{v.kind.value}: {v.message}" for v in timeline.violations if v not in of_stages]
    if lacking:
        lacks.insert(0, f"The recording lacks {_many_stages(len(missing))}: {names}.")
        return lacks, others
    lines = [f"{v.kind.value}: {v.message}" for v in of_stages]
    if len(lines) > 1:
        lines = [f"{ViolationKind.MISSING_STAGE.value}: a completed request lacks {names}"]
    return lacks, [*lines, *others]


def _many_stages(count: int) -> str:
    return "a stage" if count == 1 else f"{count} stages"


def summary_table(
    pairs: Sequence[tuple[Timeline, Verdict]], *, width: int = MAX_WIDTH, ascii_only: bool = False
) -> RenderableType:
    """One line per request: length, verdict, stage, what the excess explains, cause."""
    left_out = {name for name, needed in _WIDTH_FOR.items() if width < needed}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    if "outcome" not in left_out:
        table.add_column("outcome")
    table.add_column("stage", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if "why" not in left_out:
        table.add_column("why", ratio=1)
    for timeline, verdict in pairs:
        healthy = verdict.kind is VerdictKind.HEALTHY
        style = "dim" if healthy else _KIND_STYLES[verdict.kind]
        cells: dict[str, RenderableType] = {
            "request": clean(timeline.request_id or timeline.trace_id, 40),
            "took": seconds_text(timeline.total_ns),
            "outcome": _outcome_word(timeline),
            "stage": Text(verdict.stage or "", style=style),
            "share": "" if healthy else f"{verdict.share * 100:.0f} %",
            "why": clean("not stalled" if healthy else verdict.cause or ""),
        }
        table.add_row(*(cell for name, cell in cells.items() if name not in left_out))
    return translated([table], ascii_only=ascii_only)


def _facts(timeline: Timeline) -> Iterable[Text]:
    workers = [w for w in (timeline.prefill_worker, timeline.decode_worker) if w]
    outcome = _outcome_word(timeline)
    if timeline.outcome not in {None, Outcome.COMPLETED} and timeline.outcome_reason:
        outcome += f" ({timeline.outcome_reason})"
    status = attribute_text(timeline.attributes, a.HTTP_STATUS)
    tokens = None
    if timeline.prompt_tokens is not None:
        cached = f" ({timeline.cached_tokens} cached)" if timeline.cached_tokens else ""
        out = "?" if timeline.output_tokens is None else timeline.output_tokens
        tokens = f"{timeline.prompt_tokens} tokens in{cached}, {out} out"
    yield _joined(
        outcome + (f", HTTP {status}" if status else ""),
        timeline.mode.value,
        " → ".join(dict.fromkeys(workers)) or None,
        f"{timeline.attempts} attempts" if timeline.attempts > 1 else None,
    )
    yield _joined(
        f"{'so far' if timeline.open else 'took'} {seconds_text(timeline.total_ns)}",
        f"TTFT {seconds_text(timeline.ttft_ns)}" if timeline.ttft_ns is not None else None,
        f"TPOT {seconds_text(timeline.tpot_ns)}" if timeline.tpot_ns is not None else None,
        tokens,
    )
    yield _joined(f"trace {timeline.trace_id}", _moment(timeline.started_unix_ns))


def _outcome_word(timeline: Timeline) -> str:
    if timeline.open:
        return "in flight"
    return timeline.outcome.value if timeline.outcome else "outcome unknown"


def _joined(*facts: str | None) -> Text:
    return Text(" · ".join(clean(fact, _MAX_ID) for fact in facts if fact), style="dim")


def _moment(unix_ns: int) -> str | None:
    try:
        when = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when:%Y-%m-%d %H:%M:%S}.{unix_ns % 10**9 // 10**6:03d} UTC"


def _picture(picture: Waterfall) -> Iterable[Text]:
    indent = " " * LABEL_WIDTH
    labels, marks = picture.ticks
    yield Text(indent + labels, style="dim", no_wrap=True)
    yield Text(indent + marks, style="dim", no_wrap=True)
    for lane in picture.lanes:
        line = Text(f"{lane.label:<{LABEL_WIDTH}}", no_wrap=True)
        for run in lane.runs:
            line.append(run.text, style=COLOURS[run.stage] if run.stage else "dim")
        yield line
        if picture.pointer and picture.pointer[0] == lane.label:
            yield Text(indent + picture.pointer[1], style="bold red", no_wrap=True)


class _StageTable:
    """The partition as a table: chain stages, what they consist of, `unexplained`, the total."""

    def __init__(
        self, timeline: Timeline, verdict: Verdict, *, width: int, ascii_only: bool
    ) -> None:
        self.timeline = timeline
        self.verdict = verdict
        self.bar_mark = "#" if ascii_only else "━"
        self.left_out = {name for name, needed in _WIDTH_FOR.items() if width < needed}
        self.bar_width = max(4, min(24, width - 72))
        blames = verdict.kind not in {VerdictKind.HEALTHY, VerdictKind.UNKNOWN}
        self.blamed = verdict.stage if blames else None
        self.judged = {assessment.leaf.name: assessment for assessment in verdict.assessments}
        self.table = Table(box=None, pad_edge=False, header_style="dim")
        self.named: set[str] = set()
        self.lost = {v.name for v in timeline.visits if v.outcome is Outcome.LOST}

    def build(self, drawn: Set[str]) -> Table:
        """The table; every stage in `drawn` gets a row, so that its letter has a name."""
        add_column = self.table.add_column
        add_column("", width=1)
        add_column("stage", no_wrap=True, min_width=19)
        add_column("time", justify="right", no_wrap=True)
        if "share" not in self.left_out:
            add_column("share", justify="right", no_wrap=True)
        if "bar" not in self.left_out:
            add_column("", width=self.bar_width, no_wrap=True)
        if "usual" not in self.left_out:
            add_column("usual", justify="right", no_wrap=True)
        if "above" not in self.left_out:
            add_column("above", justify="right", no_wrap=True)
        if "pointer" not in self.left_out:
            add_column("", width=1)
        for part in self.timeline.parts:
            if part.name != UNEXPLAINED:
                self._add_stage(part.name, part.ns)
        rest = self.timeline.unexplained_ns
        self._add(UNEXPLAINED, rest, letter=rest > 0)
        total = Text("total", style="bold")
        took: list[RenderableType] = ["", total, seconds_text(self.timeline.total_ns)]
        self.table.add_row(*took, *(() if "share" in self.left_out else ("100 %",)))
        for stage in STAGES:
            if stage.name in drawn - self.named:
                self._add_beside(stage.name)
        return self.table

    def _add_beside(self, name: str) -> None:
        """A stage that shows the time of others from another side: it adds nothing to the sum."""
        visits = [(v.begin_ns, v.end_ns) for v in self.timeline.visits_of(name)]
        covered = sum(
            end - begin
            for begin, end, index in paint(visits, 0, self.timeline.total_ns)
            if index is not None
        )
        letter = Text(LETTERS[name], style=COLOURS[name])
        row = [letter, Text(name, "dim"), Text(seconds_text(covered), "dim")]
        self.table.add_row(*row, *(() if "share" in self.left_out else ("beside",)))

    def _add_stage(self, name: str, ns: int) -> None:
        pauses = any(self.timeline.detail_ns(name, n) for n in NESTED_LEAVES.get(name, ()))
        guilty = self.blamed == name
        self._add(
            name, ns, judged=None if pauses else self.judged.get(name), guilty=guilty and not pauses
        )
        for nested, nested_ns in self._nested(name):
            own = nested == name
            self._add(
                nested,
                nested_ns,
                label="  the rest" if own else f"  {nested}",
                letter=not own,
                judged=self.judged.get(nested) if pauses else None,
                guilty=pauses and self.blamed == nested,
            )

    def _nested(self, outer: str) -> list[tuple[str, int]]:
        """Nested stages worth a line, and the rest; together the outer stage's time."""
        parts = self.timeline.details.get(outer, ())
        found = {part.name: part.ns for part in parts if part.name != outer and part.ns > 0}
        nested = [(stage.name, found[stage.name]) for stage in STAGES if stage.name in found]
        whole = sum(part.ns for part in parts)
        short = whole < _DETAIL_SHARE * self.timeline.total_ns
        rest = self.timeline.detail_ns(outer, outer)
        if not nested or (short and self.verdict.chain_stage != outer):
            return []
        if len(nested) == 1 and rest == 0:
            return []
        return [*nested, (outer, rest)] if rest else nested

    def _add(
        self,
        name: str,
        ns: int,
        *,
        label: str | None = None,
        letter: bool = True,
        judged: Assessment | None = None,
        guilty: bool = False,
    ) -> None:
        if letter:
            self.named.add(name)
        share = ns / self.timeline.total_ns if self.timeline.total_ns else 0.0
        usual = judged.usual if judged else None
        lost = " (lost)" if letter and name in self.lost else ""
        above = judged.leaf.ns - round(usual.ns) if judged and usual else 0
        emphasis = "bold red" if guilty else ""
        cells = {
            "letter": Text(LETTERS[name] if letter else "", style=COLOURS[name]),
            "stage": Text((label or name) + lost, style=emphasis),
            "time": Text(seconds_text(ns), style=emphasis),
            "share": Text(_percent(share), style=emphasis),
            "bar": Text(self.bar_mark * round(share * self.bar_width), style=COLOURS[name]),
            "usual": Text(seconds_text(round(usual.ns)) if usual else "", style="dim"),
            "above": Text(f"+{seconds_text(above)}" if above > 0 else "", style=emphasis or "dim"),
            "pointer": Text("◀" if guilty else "", style=emphasis),
        }
        self.table.add_row(*(cell for key, cell in cells.items() if key not in self.left_out))


def _basis(verdict: Verdict) -> str:
    s = "" if verdict.peers == 1 else "s"
    return (
        f"usual: median of {verdict.peers} other completed request{s}, scaled to its tokens; "
        f"confidence {verdict.confidence.value}"
    )


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share * 100:.1f} %"


def section(title: str, lines: Sequence[str], *, style: str = "") -> list[RenderableType]:
    """A headline with indented lines below it; nothing where there are none."""
    if not lines:
        return []
    return [
        Text(),
        Text(title, style="bold"),
        *(Padding(Text(clean(line), style=style), (0, 0, 0, 2), expand=False) for line in lines),
    ]


def check_view(
    report: CheckReport, *, width: int = MAX_WIDTH, ascii_only: bool = False
) -> RenderableType:
    """The rules of a check with their counts, examples of breaches, and the result; in a narrow
    terminal the rules by name alone."""
    with_titles = width >= _WIDTH_FOR["title"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("rule", no_wrap=True)
    if with_titles:
        table.add_column("")
    table.add_column("checked", justify="right")
    table.add_column("broken", justify="right")
    for rule in report.rules:
        ok = rule.broken == 0
        table.add_row(
            Text("✓" if ok else "✗", style="green" if ok else "bold red"),
            Text(rule.name, style="" if ok else "bold red"),
            *([Text(rule.title, style="" if ok else "bold red")] if with_titles else []),
            f"{rule.checked}",
            Text(f"{rule.broken}", style="" if ok else "bold red"),
        )
    examples = [f"{rule.name}: {line}" for rule in report.rules for line in rule.examples]
    blocks: list[RenderableType] = [
        Text(clean(report.sentence), style="green" if report.ok else "bold red"),
        Text(),
        table,
        *section("Examples", examples),
        *section("Recording", [*report.facts, *report.notes]),
    ]
    return translated(blocks, ascii_only=ascii_only)


def stages_view(*, ascii_only: bool = False) -> RenderableType:
    """The glossary: every stage with its letter, kind and meaning, the chain first; then terms."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("stage", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("meaning, and what to do", ratio=1)
    for stage in STAGES:
        meaning = Text(stage.meaning)
        meaning.append(f" {stage.advice}", style="dim italic")
        table.add_row(
            Text(LETTERS[stage.name], style=COLOURS[stage.name]),
            Text(stage.name, style=COLOURS[stage.name]),
            stage.kind.value,
            meaning,
        )
    terms = [
        Padding(Text.assemble((f"{term}: ", "bold"), meaning), (0, 0, 0, 2), expand=False)
        for term, meaning in TERMS.items()
    ]
    blocks: list[RenderableType] = [table, Text(), Text("Terms", style="bold"), *terms]
    return translated(blocks, ascii_only=ascii_only)


# One character each, so that columns stay aligned.
_ASCII = str.maketrans("·→µ…◀▶✓✗–×", "|>u~<>+x-x")


class _Ascii:
    """Renders its content with ASCII characters only."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            shown = segment.text.translate(_ASCII).encode("ascii", "replace").decode()
            yield Segment(shown, segment.style, segment.control)


def translated(blocks: Sequence[RenderableType], *, ascii_only: bool) -> RenderableType:
    """Blocks below each other; with ASCII characters alone where the output takes no more."""
    content = Group(*blocks)
    return _Ascii(content) if ascii_only else content
