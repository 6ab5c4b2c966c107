"""What `pdtrace slo` shows: objectives against targets, how values lie, what misses go back to.

Owns layout; the numbers and their words are `pdtrace.analysis.goodput`'s. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pdtrace.analysis.goodput import Attainment, Goodput, SloReport, Spread
from pdtrace.analysis.objectives import Aim
from pdtrace.duration import seconds_text
from pdtrace.terminal.render import MAX_WIDTH, clean, section, translated

_WIDTH_FOR_PROMISE = 92
_WIDTH_FOR_COUNTED = 64
_WIDTH_FOR_TABLES = 52
_STEPS, _ASCII_STEPS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
_MIN_BINS, _MAX_BINS = 12, 48


def slo_view(report: SloReport, *, width: int, ascii_only: bool = False) -> RenderableType:
    """The whole answer, at most `width` columns."""
    width = min(width, MAX_WIDTH)
    blocks: list[RenderableType] = [
        Text(clean(report.sentence), style="green" if report.total.ok else "bold red"),
        Text(report.goods, style="dim"),
    ]
    blocks += [Text(clean(line, 2_000), style="bold yellow") for line in report.warnings]
    attainments = report.total.attainments
    if width >= _WIDTH_FOR_TABLES:
        blocks += [Text(), _objectives(attainments, width)]
    else:
        blocks.append(Text())
        blocks += [
            Text.assemble(f"{one.aim.value} {share_text(one.least, one.most)} ", _result(one))
            for one in attainments
        ]
    if width < _WIDTH_FOR_PROMISE:
        blocks += [Text(f"{one.aim.value}: {one.promise}") for one in attainments]
    for one in report.total.attainments:
        if one.spread is not None and one.limit_s is not None:
            blocks += [Text(), *_drawn(one, one.spread, width, ascii_only=ascii_only)]
    if report.models:
        blocks += [Text(), _models(report, width)]
    blocks += section("What counts", list(_counting(report)))
    if report.blamed and width >= _WIDTH_FOR_TABLES:
        blocks += [Text(), Text("Missed, by stage", style="bold"), _blamed(report)]
    else:
        lines = [
            f"{one.aim.value} in {one.stage or '(no stage)'}: {one.count}" for one in report.blamed
        ]
        blocks += section("Missed, by stage", lines)
    blocks += section("The worst", [miss.sentence for miss in report.worst])
    blocks += section("What this does not know", [*_unknown(report), *report.notes])
    return Constrain(translated(blocks, ascii_only=ascii_only), width)


def share_text(least: float | None, most: float | None) -> str:
    """`98.12 %`, or `97.00 to 99.12 %`; cut, not rounded: 98.999 is not yet 99."""
    if least is None or most is None:
        return ""
    low, high = (f"{math.floor(share * 10_000 + 1e-9) / 100:.2f}" for share in (least, most))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _number(number: int, plural: str) -> str:
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def _result(one: Attainment) -> Text:
    if one.met is not None:
        return Text("met", "green") if one.met else Text("missed", "bold red")
    if one.counted or one.uncounted:
        return Text("not known", "bold yellow")
    return Text("nothing to count", "dim")


def _objectives(attainments: Sequence[Attainment], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("objective", no_wrap=True)
    if width >= _WIDTH_FOR_PROMISE:
        table.add_column("promise", ratio=1)
    if width >= _WIDTH_FOR_COUNTED:
        table.add_column("counted", justify="right", no_wrap=True)
    table.add_column("kept", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in attainments:
        cells: list[RenderableType] = [one.aim.value]
        if width >= _WIDTH_FOR_PROMISE:
            cells.append(one.promise)
        if width >= _WIDTH_FOR_COUNTED:
            cells.append(_number(one.counted, one.unit))
        kept = share_text(one.least, one.most)
        table.add_row(*cells, kept, f"{one.target * 100:.6g} %", _result(one))
    return table


def _drawn(
    one: Attainment, spread: Spread, width: int, *, ascii_only: bool
) -> Iterable[RenderableType]:
    """How values lie, from the smallest to the largest, on a logarithmic scale, and the limit."""
    name, limit_ns = f"{one.aim.value:<10} ", round((one.limit_s or 0) * 1e9)
    low = min(spread.values[0], limit_ns)
    bins = max(_MIN_BINS, min(_MAX_BINS, width - 52))
    steps, bar = (_ASCII_STEPS, "|") if ascii_only else (_STEPS, "┃")
    strip, kept = strip_of(spread.values, limit_ns, bins, steps)
    line = Text(name, no_wrap=True)
    line.append(strip[:kept], "green")
    line.append(bar, "bold")
    line.append(strip[kept:], "red")
    yield line
    known = _number(spread.known, one.unit)
    if one.aim is Aim.TOKEN_GAP:
        known = f"{_number(spread.known, 'longest gaps')}, one of each stream"
    values = f"{seconds_text(low)} to {seconds_text(max(spread.most_ns, limit_ns))}"
    told = Text(
        f"{values}; {bar} {seconds_text(limit_ns)} · median {seconds_text(spread.p50_ns)}, "
        f"p90 {seconds_text(spread.p90_ns)}, p99 {seconds_text(spread.p99_ns)} · {known}",
        style="dim",
    )
    yield Padding(told, (0, 0, 0, len(name)), expand=False)


def strip_of(values: Sequence[int], limit_ns: int, bins: int, steps: str) -> tuple[str, int]:
    """One character for each bin, and how many bins lie below the limit. No bin has values on both
    sides of the limit."""
    low = max(1, min(values[0], limit_ns))
    high = max(values[-1], limit_ns, low + 1)
    reach = math.log(high / low)
    below = max(1, min(bins - 1, round(bins * math.log(limit_ns / low) / reach)))
    counts = [0] * bins
    for value in values:
        if value <= limit_ns:
            share = math.log(max(value, low) / low) / max(math.log(limit_ns / low), 1e-9)
            counts[min(below - 1, int(below * share))] += 1
        else:
            share = math.log(value / limit_ns) / max(math.log(high / limit_ns), 1e-9)
            counts[min(bins - 1, below + int((bins - below) * share))] += 1
    most = max(counts)
    drawn = "".join(
        steps[min(len(steps) - 1, (len(steps) * count - 1) // most)] if count else " "
        for count in counts
    )
    return drawn, below


def _models(report: SloReport, width: int) -> Table:
    """By model; in a narrow terminal without the objectives."""
    wide = width >= _WIDTH_FOR_PROMISE
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("model", overflow="fold")
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("good", justify="right", no_wrap=True)
    for one in report.total.attainments if wide else ():
        table.add_column(one.aim.value, justify="right", no_wrap=True)
    for name, goodput in report.models.items():
        table.add_row(
            clean(name, 60),
            f"{goodput.requests:,}",
            _good(goodput),
            *(_model_cell(one) for one in goodput.attainments if wide),
        )
    return table


def _good(goodput: Goodput) -> str:
    if not goodput.requests:
        return ""
    return share_text(goodput.good_least / goodput.requests, goodput.good_most / goodput.requests)


def _model_cell(one: Attainment) -> Text:
    style = {True: "green", False: "bold red", None: "yellow"}[one.met]
    return Text(share_text(one.least, one.most) or "-", style)


def _counting(report: SloReport) -> Iterable[str]:
    ended = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in report.outcomes.items()
    )
    line = f"goodput: all that ended, {_number(report.total.requests, 'requests')} ({ended})"
    if report.retried:
        line += f"; {report.retried} were tried again, and count once, as the last try went"
    yield line
    for one in report.total.attainments:
        match one.aim:
            case Aim.ERRORS:
                yield "errors: completed, failed, timed out and lost; not rejected, not cancelled"
            case Aim.TTFT:
                line = "ttft: streams that had a first token"
                if report.cut_off[0]:
                    count, late = report.cut_off
                    line += (
                        f"; not the {count} that ended before it, {late} of them later than that"
                    )
                yield line
            case Aim.TOKEN_GAP:
                yield "token_gap: streams with two writes of content or more, however they ended"
            case Aim.E2E:
                yield "e2e: requests that completed"
    left_out = [
        f"{count} {what}"
        for count, what in (
            (report.open, "in flight"),
            (report.rootless, "whose root span is missing"),
        )
        if count
    ]
    if left_out:
        yield f"not counted: {', '.join(left_out)}"


def _blamed(report: SloReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("objective", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("missed", justify="right", no_wrap=True)
    table.add_column("had met it with that stage at its median")
    for one in report.blamed:
        met = f"{one.met_at_median} of {one.judged}" if one.judged else "cannot be said"
        table.add_row(one.aim.value, clean(one.stage or "(no stage)"), f"{one.count}", met)
    return table


def _unknown(report: SloReport) -> Iterable[str]:
    if report.seen_late:
        streams = f"{report.seen_late} stream{'' if report.seen_late == 1 else 's'}"
        yield (
            f"No gateway recorded the longest gap of {streams}: what the decode worker recorded, "
            "gaps above its threshold and how long generation took, tells it or leaves a range."
        )
    for one in report.total.attainments:
        if one.uncounted:
            yield f"Nobody counted the gaps of {one.uncounted} streams: no pooled share holds them."
        if one.kept_least != one.kept_most:
            unknown = one.kept_most - one.kept_least
            yield f"{one.aim.value}: whether {unknown} of {one.counted} {one.unit} kept it."
    if report.total.tokens_unknown:
        yield f"{report.total.tokens_unknown} good requests did not record their output tokens."
