"""The `pdtrace` command.

Owns options, selection, exit codes and where output goes; what is shown is `pdtrace.render`'s and
`pdtrace.documents`'. No error reaches a user as a traceback.

Exit codes: 0 done; 1 `check` found violations; 2 bad input or usage; 70 a fault of pdtrace itself
(`PDTRACE_DEBUG=1` shows the traceback); 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

import pdtrace
from pdtrace.check import check_recording
from pdtrace.documents import stages_document, why_document
from pdtrace.duration import seconds_text
from pdtrace.errors import PdtraceError
from pdtrace.render import MAX_WIDTH, check_view, clean, stages_view, summary_table, why_view
from pdtrace.sources import Recording, read_source
from pdtrace.timeline import Timeline, build_timelines
from pdtrace.verdict import Baselines, Verdict, judge

EXIT_VIOLATIONS = 1
EXIT_BAD_INPUT = 2
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130

_PIPE_WIDTH = 100
_MAX_CANDIDATES = 10
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_P = ParamSpec("_P")

app = typer.Typer(
    name="pdtrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Shows in which stage a slow prefill/decode request stalled, why, and who was in its way.",
    epilog="Exit codes: 0 done, 1 `check` found violations, 2 bad input or usage, 70 a fault of "
    "pdtrace itself.",
)

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="Run directory, file or folder of OTLP JSON lines (plain or gzip), or - for standard "
        "input. Default: $PDTRACE_RUN, else ./run.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead (keys: docs/cli.md).")
]


def main() -> None:
    """Entry point of the `pdtrace` command."""
    app(prog_name="pdtrace")


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
        print(f"pdtrace {pdtrace.__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction] - typer calls it
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples: [bold]pdtrace why[/] (the slowest) · [bold]pdtrace why req-17[/] · "
    "[bold]pdtrace why --slowest 5[/] · [bold]pdtrace why 5eed --from traces.jsonl.gz --json[/]"
)
@_guarded
def why(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Request id, trace id or root span id; a beginning is enough if it is unique. "
            "Default: the slowest request.",
            show_default=False,
        ),
    ] = None,
    slowest: Annotated[
        int | None,
        typer.Option("--slowest", min=1, metavar="N", help="The N slowest requests."),
    ] = None,
    source: FromOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say in which stage a request stalled, why, and draw it."""
    if request is not None and slowest is not None:
        raise UsageError("give an ID or --slowest N, not both")
    recording = read_source(source)
    timelines = build_timelines(recording.traces)
    if not timelines:
        raise UsageError(f"{recording.source}: holds no request")
    chosen = _slowest(timelines, slowest or 1) if request is None else [_find(timelines, request)]
    baselines = Baselines(timelines)
    pairs = [(timeline, judge(timeline, baselines)) for timeline in chosen]
    if as_json:
        _print_json(why_document(recording, pairs, len(timelines)))
    else:
        _print_why(recording, pairs, len(timelines))
    return 0


def _slowest(timelines: Sequence[Timeline], count: int) -> list[Timeline]:
    return sorted(timelines, key=lambda t: (-t.total_ns, t.request_id or "", t.trace_id))[:count]


def _find(timelines: Sequence[Timeline], wanted: str) -> Timeline:
    """The one request that an id, or the beginning of one, names. Raises if none or several."""
    padded = wanted.lower().removeprefix("0x").zfill(32)
    tests: tuple[Callable[[Timeline], bool], ...] = (
        lambda t: t.request_id == wanted,
        lambda t: t.root_id == wanted.lower(),
        lambda t: t.trace_id == padded,
        lambda t: (
            (t.request_id or "").startswith(wanted)
            or t.trace_id.startswith(wanted.lower())
            or t.trace_id.lstrip("0").startswith(wanted.lower())
        ),
    )
    for test in tests if wanted else ():
        found = [timeline for timeline in timelines if test(timeline)]
        if len(found) == 1:
            return found[0]
        if found:
            _ambiguous(wanted, found)
    raise UsageError(
        f"none of {len(timelines)} requests has an id that begins with {wanted!r} "
        "(a request in flight has no trace before it ends)"
    )


def _ambiguous(wanted: str, found: Sequence[Timeline]) -> NoReturn:
    share_a_trace = len({t.trace_id for t in found}) < len(found)
    lines = [
        f"  {t.request_id or '(no request id)'}  trace {t.trace_id}"
        + (f"  root span {t.root_id}" if share_a_trace else "")
        + f"  {seconds_text(t.total_ns)}"
        for t in found[:_MAX_CANDIDATES]
    ]
    if len(found) > _MAX_CANDIDATES:
        lines.append(f"  and {len(found) - _MAX_CANDIDATES} more")
    other = "the id of a root span" if share_a_trace else "a trace id"
    _complain(f"{wanted!r} names {len(found)} requests; give a longer id or {other}:")
    for line in lines:
        print(clean(line), file=sys.stderr)
    raise typer.Exit(EXIT_BAD_INPUT)


def _print_why(
    recording: Recording, pairs: Sequence[tuple[Timeline, Verdict]], requests: int
) -> None:
    console, ascii_only = _console()
    notes = recording.problems.sentences()
    if len(pairs) > 1:
        console.print(summary_table(pairs, width=console.width, ascii_only=ascii_only))
        console.print(Text())
    for position, (timeline, verdict) in enumerate(pairs):
        if position:
            rule = ("=" if ascii_only else "━") * min(console.width, MAX_WIDTH)
            console.print(Text(f"\n{rule}\n", "dim"))
        view = why_view(timeline, verdict, width=console.width, ascii_only=ascii_only, notes=notes)
        console.print(view)
    if len(pairs) == 1 and requests > 1:
        hint = f"1 of {requests} requests in {recording.source}; --slowest 5 shows the worst five."
        console.print(Text(f"\n{clean(hint)}", style="dim"))


@app.command(
    epilog="Examples: [bold]pdtrace check[/] · [bold]pdtrace check --from traces/ --json[/]. "
    "Exit code 1 if a rule is broken."
)
@_guarded
def check(source: FromOption = None, as_json: JsonOption = False) -> int:
    """Check a recording: time adds up, ids agree, parents exist, nothing is missing."""
    report = check_recording(read_source(source))
    if as_json:
        _print_json(report.document())
    else:
        console, ascii_only = _console()
        console.print(check_view(report, ascii_only=ascii_only))
    return 0 if report.ok else EXIT_VIOLATIONS


@app.command()
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
    epilog="Example: [bold]pdtrace agent --rings run/rings --out run[/]. With "
    "OTEL_EXPORTER_OTLP_ENDPOINT set, spans are exported there as well."
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
    until_closed: Annotated[
        bool, typer.Option("--until-closed", help="Exit when every ring is finished.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Tail the rings of this host; write and export the spans of finished requests."""
    # It brings the exporters with it, which no other command needs.
    from pdtrace.agent import agent_command  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return agent_command(rings, out=out, until_closed=until_closed, as_json=as_json)


def _console() -> tuple[Console, bool]:
    """Standard output, and whether it takes ASCII only. Pipes get a width of 100 columns."""
    width = None
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        width = _PIPE_WIDTH
    console = _Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
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
