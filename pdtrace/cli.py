"""The `pdtrace` command.

Owns options, selection, exit codes and where output goes; what is shown is
`pdtrace.terminal.render`'s and `pdtrace.terminal.documents`'. No error reaches a user as a
traceback.

Exit codes: 0 done; 1 `check` found violations, or `slo` an objective that is not met; 2 bad input
or usage; 70 a fault of pdtrace itself (`PDTRACE_DEBUG=1` shows the traceback); 130 interrupted, but
for `pdtrace top`, which ends so: 0.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.text import Text

import pdtrace
from pdtrace.alert_links import PATHS, Places
from pdtrace.analysis.goodput import MAX_WORST, Choice, GapForm, measure, model_of
from pdtrace.analysis.jaeger import why_no_jaeger
from pdtrace.analysis.objectives import Aim, aims_of
from pdtrace.analysis.sampling import SamplingSign, sampling_warnings
from pdtrace.analysis.skew import MAX_SKEW_NS
from pdtrace.analysis.sources import (
    default_source,
    empty_recording,
    read_sources,
    run_directories,
)
from pdtrace.analysis.time_range import (
    DEFAULT_ANSWER_S,
    DEFAULT_TRACES,
    TraceQuery,
    parse_instant,
)
from pdtrace.analysis.timeline import Timeline
from pdtrace.analysis.verdict import Baselines, Verdict, judge
from pdtrace.check import check_recording
from pdtrace.duration import seconds_text
from pdtrace.errors import LiveError, PdtraceError, SourceError
from pdtrace.live.health import read_health
from pdtrace.live.looks import DEFAULT_TIMEOUT_S, AgentLooks, LookSource
from pdtrace.live.run_looks import open_looks, run_of_agent
from pdtrace.native import hot_path
from pdtrace.patience import Patience
from pdtrace.shipped import Shipped, write
from pdtrace.slo import DEFAULT_SLO, Slo, read_slo, with_target
from pdtrace.stages import STAGE_BY_NAME
from pdtrace.terminal.documents import stages_document, why_document
from pdtrace.terminal.following import DEFAULT_INTERVAL_S, follow
from pdtrace.terminal.render import (
    MAX_WIDTH,
    check_view,
    clean,
    stages_view,
    summary_table,
    why_view,
)
from pdtrace.terminal.selection import (
    Selection,
    SelectionError,
    SeveralRequestsError,
    count_in_flight,
    finished_requests,
    select_in_flight,
    select_request,
    select_slowest,
)
from pdtrace.terminal.slo_view import slo_view
from pdtrace.terminal.top import DEFAULT_LIMIT, top_document, top_view
from pdtrace.terminal.trimmed import trimmed
from pdtrace.terminal.usage import MAX_WAIT_S, OneLineUsage, path_fault
from pdtrace.terminal.whole_words import WholeWords
from pdtrace.web_answers import without_credentials

EXIT_VIOLATIONS = 1
EXIT_BAD_INPUT = 2
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130

_PIPE_WIDTH = 100
_LEAST_WIDTH = 31  # a stage and its time, whole
_MAX_CANDIDATES = 10
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_P = ParamSpec("_P")


class _Commands(OneLineUsage):
    complaint = "pdtrace"


app = typer.Typer(
    cls=_Commands,
    name="pdtrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut words to fit a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Shows in which stage a slow prefill/decode request stalled, why, and who was in its way.",
    epilog="Exit codes: 0 done, 1 `check` found violations or `slo` an objective that is not met, "
    "2 bad input or usage, 70 a fault of pdtrace itself, 130 interrupted.",
)

FromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="Run directory, file or folder of OTLP JSON lines or of what a Jaeger answered or its "
        "page saved (plain or gzip), - for standard input, the address of a Jaeger, or of an agent "
        "on this host; give it again to join the recordings of several hosts. Default: "
        "$PDTRACE_RUN, else ./run.",
        show_default=False,
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Of a Jaeger: requests begun since then; how long ago (15m, 2h, 1d) or a time "
        "(2026-11-30T12:00:00Z). Default: 1h, for an ID 30 days.",
        show_default=False,
    ),
]
UntilOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Of a Jaeger: until then. Default: now.", show_default=False),
]
LimitOption = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Of a Jaeger: the latest N traces of that time."),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        min=0.05, max=MAX_WAIT_S, metavar="S", help="How long each answer of a Jaeger may take."
    ),
]
MAX_SKEW_S = MAX_SKEW_NS / 1e9
MaxSkewOption = Annotated[
    float,
    typer.Option(
        "--max-skew",
        min=0.0,
        max=1e6,
        metavar="SECONDS",
        help="How far spans may be moved whose host's clock nobody measured and the order of "
        "stages contradicts; 0: not at all.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead (keys: docs/cli.md).")
]


def main() -> None:
    """Entry point of the `pdtrace` command."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] - closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    try:
        app(prog_name="pdtrace")
    except OSError as error:  # what typer prints itself: help pages and messages on usage
        sys.exit(_fault(error))


def _guarded(command: Callable[_P, int]) -> Callable[_P, None]:
    """Turn a command's result and its errors into exit codes."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except PdtraceError as error:
            _complain(str(error))
            code = EXIT_BAD_INPUT
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except typer.Exit:
            raise
        except Exception as error:
            told = path_fault(error) if isinstance(error, OSError) else None
            if told is not None:
                _complain(told)
                raise typer.Exit(EXIT_BAD_INPUT) from error
            code = _fault(error)
        raise typer.Exit(code)

    return run


def _fault(error: Exception) -> int:
    """The process's outermost boundary: a fault of ours is one line, with a way to see more."""
    if os.environ.get("PDTRACE_DEBUG"):
        traceback.print_exc()
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        _complain(f"cannot write the output: {error.strerror}")
        _reader_left()
        return EXIT_BAD_INPUT
    _complain(
        f"internal error: {type(error).__name__}: {error} "
        "(a fault of pdtrace; PDTRACE_DEBUG=1 shows where)"
    )
    return EXIT_FAULT


def _complain(message: str) -> None:
    print(f"pdtrace: {clean(message)}", file=sys.stderr)


class UsageError(PdtraceError):
    """The command line asks for something that cannot be done."""


def _version(value: bool) -> None:
    if value:
        print(f"pdtrace {pdtrace.__version__} (hot paths in {hot_path()})")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction] - typer calls it
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the version, and what its hot paths are written in.",
        ),
    ] = False,
) -> None:
    pass


@app.command(
    cls=WholeWords,
    epilog="Examples: pdtrace why (the slowest) · pdtrace why req-17 · "
    "pdtrace why --slowest 5 · pdtrace why --in-flight · "
    "pdtrace why 5eed --from traces.jsonl.gz --json",
)
@_guarded
def why(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Request id, trace id or root span id; a beginning is enough if it is unique. The "
            "request may be in flight. Default: the slowest request.",
            show_default=False,
        ),
    ] = None,
    slowest: Annotated[
        int | None,
        typer.Option("--slowest", min=1, metavar="N", help="The N slowest requests."),
    ] = None,
    in_flight: Annotated[
        bool,
        typer.Option(
            "--in-flight",
            help="The request in flight that exceeds its stage's usual time by most; with "
            "--slowest N so many of them.",
        ),
    ] = False,
    source: FromOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = DEFAULT_TRACES,
    timeout: TimeoutOption = DEFAULT_ANSWER_S,
    max_skew: MaxSkewOption = MAX_SKEW_S,
    as_json: JsonOption = False,
) -> int:
    """Say in which stage a request stalled, or is held up now, why, and draw it."""
    if request is not None and (slowest is not None or in_flight):
        option = "--in-flight" if in_flight else "--slowest N"
        raise UsageError(f"give an ID or {option}, not both")
    progress = Patience(sys.stderr)
    query = _query(since, until, limit, timeout)
    sources = [_source(one, query) for one in source or [default_source()]]
    max_skew_ns = round(max_skew * 1e9)
    try:
        if in_flight:
            selection = select_in_flight(sources, slowest or 1, progress=progress)
        elif request is not None:
            selection = select_request(
                sources, request, max_skew_ns=max_skew_ns, progress=progress, query=query
            )
        else:
            selection = select_slowest(
                sources, slowest or 1, max_skew_ns=max_skew_ns, progress=progress, query=query
            )
    except SeveralRequestsError as error:
        progress.clear()
        _complain_of_several(error)
        return EXIT_BAD_INPUT
    finally:
        progress.clear()
    baselines = Baselines(selection.peers)
    pairs = [(timeline, judge(timeline, baselines)) for timeline in selection.chosen]
    if as_json:
        requests = len(selection.peers)
        _print_json(why_document(selection.recording, pairs, requests, selection.standing))
    elif pairs:
        _print_why(selection, pairs)
    else:
        print(f"No request is in flight in {clean(selection.recording.source)}.")
        for note in selection.notes:
            print(clean(note))
    return 0


def _query(since: str | None, until: str | None, limit: int, timeout_s: float) -> TraceQuery:
    """Raises TimeRangeError."""
    now_ns = time.time_ns()
    return TraceQuery(
        since_ns=None if since is None else parse_instant(since, now_ns),
        until_ns=None if until is None else parse_instant(until, now_ns),
        limit=limit,
        timeout_s=timeout_s,
    )


def _source(given: str, query: TraceQuery) -> str | Path:
    """An agent's address stands for its run directory; a Jaeger's, and all else, for itself."""
    if "://" not in given:
        return _named(given)
    no_jaeger = why_no_jaeger(given, timeout_s=query.timeout_s)
    if no_jaeger is None:
        return given
    shown = without_credentials(given)
    if shown.lower().startswith("https:"):  # no agent speaks it
        raise SourceError(
            f"{shown}: no Jaeger answers there ({no_jaeger}); see that it runs and that this is "
            "its page's address"
        )
    agent = AgentLooks(given, timeout_s=min(query.timeout_s, DEFAULT_TIMEOUT_S), advise=False)
    try:
        look = agent.look()
    except LiveError as error:
        no_agent = str(error).removeprefix(agent.name).removeprefix(":").strip()
        tried = f"neither a Jaeger nor an agent answers there ({no_jaeger})"
        if no_agent != no_jaeger:
            tried = f"no Jaeger ({no_jaeger}) and no agent ({no_agent}) answers there"
        raise SourceError(
            f"{shown}: {tried}; see that it runs, or give another: a Jaeger's address is its "
            "page's, an agent's the one that it prints, and a run directory needs neither"
        ) from error
    return run_of_agent(look, agent.name)


def _named(given: str) -> str:
    """What `--from` gives. Raises UsageError if that is nothing: it would be the directory that
    this runs in."""
    if not given:
        raise UsageError("--from is empty: leave it out, or give a run directory or an address")
    return given


def _complain_of_several(error: SeveralRequestsError) -> None:
    found = error.found
    share_a_trace = len({t.trace_id for t in found}) < len(found)
    lines = [
        f"  {t.request_id or '(no request id)'}  trace {t.trace_id}"
        + (f"  root span {t.root_id}" if share_a_trace else "")
        + f"  {seconds_text(t.total_ns)}"
        + (" so far" if t.open else f"  {t.outcome.value}" if t.outcome else "")
        for t in found[:_MAX_CANDIDATES]
    ]
    if len(found) > _MAX_CANDIDATES:
        lines.append(f"  and {len(found) - _MAX_CANDIDATES} more")
    other = "the id of a root span" if share_a_trace else "a trace id"
    if len({t.request_id for t in found}) > 1:
        other = f"a longer id or {other}"
    _complain(f"{error}; give {other}:")
    for line in lines:
        print(clean(line), file=sys.stderr)


def _print_why(selection: Selection, pairs: Sequence[tuple[Timeline, Verdict]]) -> None:
    console, ascii_only = _console()
    notes = [*selection.recording.problems.sentences(), *selection.notes]
    if len(pairs) > 1:
        console.print(summary_table(pairs, width=console.width, ascii_only=ascii_only))
        console.print(Text())
    for position, (timeline, verdict) in enumerate(pairs):
        if position:
            rule = ("=" if ascii_only else "━") * min(console.width, MAX_WIDTH)
            console.print(Text(f"\n{rule}\n", "dim"))
        view = why_view(
            timeline,
            verdict,
            width=console.width,
            ascii_only=ascii_only,
            notes=notes,
            standing=selection.standing.get(timeline.root_id or "", ()),
            last_signs=selection.last_signs,
        )
        console.print(view)
    requests = len(selection.peers)
    if len(pairs) == 1 and requests > 1 and not pairs[0][0].open:
        where = selection.recording.source
        hint = f"1 of {requests} requests in {where}; --slowest 5 shows the worst five."
        console.print(Text(f"\n{clean(hint)}", style="dim"))


@app.command(
    cls=WholeWords,
    epilog="Examples: pdtrace top · pdtrace top --once --json · "
    "pdtrace top --from http://127.0.0.1:9464 --stage decode.reserve. Interrupt it to end "
    "it (exit code 0).",
)
@_guarded
def top(
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN|URL",
            help="Run directory: its agent is asked, or its rings are read where that is silent "
            "(give it again for those of further hosts). Or an agent's address. Default: "
            "$PDTRACE_RUN, else ./run.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once instead of following.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            metavar="N",
            help=f"Requests shown, the worst first. Default: {DEFAULT_LIMIT}; all with --json.",
            show_default=False,
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="STAGE", help="Only requests in this stage."),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=0.05, max=MAX_WAIT_S, metavar="S", help="Seconds between looks."
        ),
    ] = DEFAULT_INTERVAL_S,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.05,
            max=MAX_WAIT_S,
            metavar="S",
            help="How long an agent may take.",
        ),
    ] = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> int:
    """Show the requests in flight and their processes, also while some are stopped or dead."""
    if stage is not None and stage not in STAGE_BY_NAME:
        raise UsageError(f"{stage!r} is no stage; `pdtrace stages` lists them")
    try:
        looks = open_looks(*map(_named, source or [default_source()]), timeout_s=timeout)
    except KeyboardInterrupt:
        return 0
    try:
        _show_top(looks, once=once, limit=limit, stage=stage, interval_s=interval, as_json=as_json)
    except KeyboardInterrupt:
        if once:
            raise
    finally:
        looks.close()
    return 0


def _show_top(
    looks: LookSource,
    *,
    once: bool,
    limit: int | None,
    stage: str | None,
    interval_s: float,
    as_json: bool,
) -> None:
    console, ascii_only = _console()
    if not once:
        try:
            follow(
                looks,
                console,
                stage=stage,
                limit=limit,
                interval_s=interval_s,
                as_json=as_json,
                ascii_only=ascii_only,
            )
        except BrokenPipeError:
            _reader_left()
        return
    look = looks.look()
    if as_json:
        _print_json(top_document(look, source=looks.name, stage=stage, limit=limit))
    else:
        console.print(
            top_view(
                look,
                source=looks.name,
                width=console.width,
                stage=stage,
                limit=limit or DEFAULT_LIMIT,
                ascii_only=ascii_only,
            )
        )


@app.command(
    cls=WholeWords,
    epilog="Examples: pdtrace check · pdtrace check --from traces/ --json. "
    "Exit code 1 if a rule is broken.",
)
@_guarded
def check(
    source: FromOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = DEFAULT_TRACES,
    timeout: TimeoutOption = DEFAULT_ANSWER_S,
    max_skew: MaxSkewOption = MAX_SKEW_S,
    as_json: JsonOption = False,
) -> int:
    """Check a recording: time adds up, ids agree, parents exist, nothing is missing."""
    query = _query(since, until, limit, timeout)
    sources = [_source(one, query) for one in source or [default_source()]]
    progress = Patience(sys.stderr)
    runs = [read_health(run) for run in run_directories(sources)]
    try:
        recording = read_sources(sources, progress=progress, query=query)
        report = check_recording(
            recording, runs, max_skew_ns=round(max_skew * 1e9), progress=progress
        )
    except SourceError as error:
        if isinstance(error.__cause__, OSError) or not any(run.is_ill for run in runs):
            raise
        # What happened to the processes is known all the same.
        report = check_recording(empty_recording(sources), runs)
    finally:
        progress.clear()
    if as_json:
        _print_json(report.document())
    else:
        console, ascii_only = _console()
        console.print(check_view(report, width=console.width, ascii_only=ascii_only))
    return 0 if report.ok else EXIT_VIOLATIONS


@app.command(
    cls=WholeWords,
    epilog="Examples: pdtrace slo · pdtrace slo --ttft 0.8 --target ttft=95% --since 10m · "
    "pdtrace slo --gap-form requests --from http://127.0.0.1:16686. Exit code 0 if every objective "
    "is met, 1 if one is not, or it cannot be told.",
)
@_guarded
def slo(
    source: FromOption = None,
    ttft: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help=f"Limit of the time to a stream's first token, seconds ({DEFAULT_SLO.ttft_s:g}).",
            show_default=False,
        ),
    ] = None,
    token_gap: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Limit of the time between two writes of content to a stream "
            f"({DEFAULT_SLO.token_gap_s:g}).",
            show_default=False,
        ),
    ] = None,
    e2e: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Limit of the whole length of a completed request (none).",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SHARE",
            help="Share that has to keep an objective (ttft, token_gap, errors, e2e), such as "
            "ttft=0.95 or 99%; without a name, of all but errors.",
            show_default=False,
        ),
    ] = None,
    gap_form: Annotated[
        GapForm,
        typer.Option(
            help="What token_gap promises: a percentile of all gaps together, or every gap in a "
            "share of the streams."
        ),
    ] = GapForm.POOLED,
    only: Annotated[
        list[Aim] | None,
        typer.Option(
            metavar="NAME",
            help="Judge this objective alone (ttft, token_gap, errors, e2e); give it again for "
            "more.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--slo",
            metavar="FILE",
            help="Limits and targets in TOML, the file that boards and rules are built with; "
            "options come before it.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Only requests for this model.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only requests begun since then; how long ago (15m, 2h, 1d) or a time "
            "(2026-11-30T12:00:00Z). Default: all, of a Jaeger 1h.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only requests begun until then.", show_default=False),
    ] = None,
    all_kept: Annotated[
        bool,
        typer.Option(
            "--all-kept", help="Of a Jaeger: it keeps every trace, so its shares are those of all."
        ),
    ] = False,
    worst: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Requests named of each objective, the worst."),
    ] = MAX_WORST,
    limit: LimitOption = DEFAULT_TRACES,
    timeout: TimeoutOption = DEFAULT_ANSWER_S,
    max_skew: MaxSkewOption = MAX_SKEW_S,
    as_json: JsonOption = False,
) -> int:
    """Say how many requests kept the limits, which stages made the others miss, and goodput."""
    limits = _limits(settings, ttft=ttft, token_gap=token_gap, e2e=e2e, targets=target or ())
    if only and (unlimited := set(only) - set(aims_of(limits))):
        raise UsageError(f"{min(unlimited)} has no limit: give --{min(unlimited)} S")
    query = _query(since, until, limit, timeout)
    choice = Choice(model=model, since_ns=query.since_ns, until_ns=query.until_ns)
    sources = [_source(one, query) for one in source or [default_source()]]
    progress = Patience(sys.stderr)
    sign = SamplingSign()
    try:
        recording, requests = finished_requests(
            sources,
            max_skew_ns=round(max_skew * 1e9),
            progress=progress,
            query=query,
            watch=sign.see,
        )
        report = measure(
            requests,
            limits,
            source=recording.source,
            aims=only,
            gap_form=gap_form,
            choice=choice,
            in_flight=count_in_flight(sources),
            notes=recording.problems.sentences(),
            worst=worst,
            progress=progress,
        )
        warnings = sampling_warnings(recording, sign, all_kept=all_kept)
        unseen = (line for run in run_directories(sources) for line in read_health(run).unseen)
        report = replace(report, warnings=(*warnings, *unseen))
    finally:
        progress.clear()
    if not report.total.requests:
        wanted = f" for model {model!r}" if model is not None else ""
        wanted += " begun in that time" if since or until else ""
        if model is not None:
            wanted += f"; there are {', '.join(sorted({model_of(one) for one in requests}))}"
        raise SelectionError(f"{recording.source}: holds no finished request{wanted}")
    if as_json:
        _print_json(report.document())
    else:
        console, ascii_only = _console()
        console.print(slo_view(report, width=console.width, ascii_only=ascii_only))
    return 0 if report.total.ok else EXIT_VIOLATIONS


def _limits(
    settings: Path | None,
    *,
    ttft: float | None,
    token_gap: float | None,
    e2e: float | None,
    targets: Sequence[str],
) -> Slo:
    """Raises SloError, UsageError."""
    base = DEFAULT_SLO if settings is None else read_slo(settings)
    given = {"ttft_s": ttft, "token_gap_s": token_gap, "e2e_s": e2e}
    try:
        changed = msgspec.structs.replace(
            base, **{name: value for name, value in given.items() if value is not None}
        )
        for text in targets:
            changed = with_target(changed, text)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return changed


@app.command(cls=WholeWords)
@_guarded
def stages(as_json: JsonOption = False) -> int:
    """List every stage: what it means and what to do when it is long."""
    if as_json:
        _print_json(stages_document())
    else:
        console, ascii_only = _console()
        console.print(stages_view(ascii_only=ascii_only))
    return 0


@app.command(
    cls=WholeWords,
    epilog="Example: pdtrace export dashboards grafana/dashboards. What is in them: "
    "docs/dashboards.md.",
)
@_guarded
def export(
    what: Annotated[
        Shipped, typer.Argument(metavar="WHAT", help=f"What to write: {', '.join(Shipped)}.")
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; it is made.", show_default=False)
    ],
    grafana: Annotated[
        str,
        typer.Option(
            metavar="URL", help="With rules: where alerts find Grafana.", show_default=False
        ),
    ] = PATHS.grafana,
    runbooks: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="With rules: where alerts find their pages. Without it, in DIR/runbooks.",
            show_default=False,
        ),
    ] = PATHS.runbooks,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")] = False,
) -> int:
    """Write the Grafana boards, alert rules with their pages, or collector files that come with
    pdtrace."""
    try:
        places = Places(grafana=grafana, runbooks=runbooks)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for path in write(what, directory, replace=force, places=places):
        print(path)
    return 0


@app.command(
    cls=WholeWords,
    epilog="Example: pdtrace agent --rings run/rings --out run. With "
    "OTEL_EXPORTER_OTLP_ENDPOINT set, spans are exported there as well.",
)
@_guarded
def agent(
    rings: Annotated[
        Path, typer.Option("--rings", metavar="DIR", help="Directory of ring files to tail.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Run directory to write traces/ and the agent's state to.",
            show_default=False,
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Answer /inflight, /metrics and /health there; 127.0.0.1:0 takes a free port.",
            show_default=False,
        ),
    ] = None,
    http_any: Annotated[
        bool, typer.Option("--http-any", help="Allow an address that is not loopback.")
    ] = False,
    deadline: Annotated[
        list[str] | None,
        typer.Option(
            "--deadline",
            metavar="STAGE=SECONDS",
            help="When the server itself gives a stage up; once for each stage.",
            show_default=False,
        ),
    ] = None,
    stuck_share: Annotated[
        float | None,
        typer.Option(
            "--stuck-share",
            metavar="PART",
            help="Part of its deadline above which a stage is stuck (default 0.5).",
            show_default=False,
        ),
    ] = None,
    stuck_factor: Annotated[
        float | None,
        typer.Option(
            "--stuck-factor",
            metavar="TIMES",
            help="Times its p99 above which a stage is stuck (default 3).",
            show_default=False,
        ),
    ] = None,
    stuck_floor: Annotated[
        float | None,
        typer.Option(
            "--stuck-floor",
            metavar="SECONDS",
            help="No stage is stuck before (default 1).",
            show_default=False,
        ),
    ] = None,
    keep_rings: Annotated[
        int | None,
        typer.Option(
            "--keep-rings",
            metavar="N",
            help="Finished rings to keep, the newest; older ones are deleted once their requests "
            "are delivered (default 16).",
            show_default=False,
        ),
    ] = None,
    until_closed: Annotated[
        bool, typer.Option("--until-closed", help="Exit when every ring is finished.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Tail the rings of this host; write and export the spans of finished requests."""
    # It brings the exporters with it, which no other command needs.
    from pdtrace.agent.command import agent_command, agent_config, http_config  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return agent_command(
        rings,
        out=out,
        until_closed=until_closed,
        as_json=as_json,
        config=agent_config(
            stuck_factor=stuck_factor,
            stuck_share=stuck_share,
            stuck_floor_s=stuck_floor,
            deadlines=deadline or (),
            keep_rings=keep_rings,
        ),
        http=http_config(http, any_host=http_any),
    )


def _console() -> tuple[Console, bool]:
    """Standard output, and whether it takes ASCII only. Pipes get a width of 100 columns."""
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isascii() and columns.isdigit() else 0
    if not asked:
        os.environ.pop("COLUMNS", None)  # rich would take 0 at its word
    width = max(asked, _LEAST_WIDTH) if asked else None
    if not asked and not sys.stdout.isatty():
        width = _PIPE_WIDTH
    console = _Console(
        file=trimmed(sys.stdout), width=width, highlight=False, markup=False, emoji=False
    )
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return console, not encoding.startswith("utf")


class _Console(Console):
    """A console whose reader may leave: `pdtrace why | head` is no error."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _reader_left()


def _print_json(document: dict[str, Any]) -> None:
    try:
        print(json.dumps(document, indent=2, allow_nan=False), flush=True)
    except BrokenPipeError:
        _reader_left()


def _reader_left() -> None:
    """The reader of a pipe has seen enough, or is full: what is still written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
