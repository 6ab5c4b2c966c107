"""`python -m server stack up|down|status`: options, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pdtrace.slo import DEFAULT_SLO, SloError, read_slo
from pdtrace.terminal.trimmed import trimmed
from pdtrace.terminal.usage import MAX_WAIT_S
from pdtrace.terminal.whole_words import WholeWords, WholeWordsGroup
from server.errors import StartError
from server.listening import free_loopback_port
from server.process import EXIT_START_ERROR
from server.shown_commands import pdtrace, python
from server.stack.joining import Stack, add_running_servers, find_stack
from server.stack.lifecycle import StackSettings, start_stack, stop_stack
from server.stack.plan import ONE_AGENT_WAIT, Ports, Sampling, free_ports
from server.stack.programs import JAEGER, find_programs
from server.stack.state import FOLDER_NAME, StackState, read_state

RUNS = Path("run")
_PAGES = {
    "jaeger": "traces: search, timeline, Monitor",
    "prometheus": "metrics: PromQL, alert rules, targets",
    "alertmanager": "alerts that fire",
}

stack_app = typer.Typer(
    cls=WholeWordsGroup,
    name="stack",
    help="Jaeger, Prometheus and Alertmanager beside the server, on loopback (docs/stack.md).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DirOption = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Folder of the stack: data, logs, settings.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON line.")]


@stack_app.command(cls=WholeWords)
def up(
    folder: DirOption = RUNS / FOLDER_NAME,
    keep: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100.0,
            metavar="PERCENT",
            help="Share of the requests that nothing is wrong with whose traces are kept. The "
            "others always are.",
        ),
    ] = 100.0,
    decision_wait: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="How long a trace is collected before that is decided; with agents on several "
            "hosts more than the longest generation, such as 660s.",
        ),
    ] = ONE_AGENT_WAIT,
    rules: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Further Prometheus rules; may be given again. A file called pdtrace.rules.yml "
            "takes the place of the shipped one.",
        ),
    ] = None,
    slo: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your objectives as TOML (docs/dashboards.md): for alerts, boards, what is kept, "
            "and the histograms of servers that join.",
            show_default=False,
        ),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Where Alertmanager sends alerts.")
    ] = None,
    any_ports: Annotated[
        bool,
        typer.Option("--free-ports", help="Take free ports in place of 16686, 4318, 9090, 9093."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.0, max=MAX_WAIT_S, help="Seconds until all of it answers.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Start the stack, or tell where it is. Servers started later join it.

    Exit code 0: it is up; 2: it cannot be started, and nothing of it runs.
    """
    console = Console(stderr=True, highlight=False)
    with _errors(), console.status("starting the stack") as status:
        settings = StackSettings(
            folder=folder,
            ports=free_ports(free_loopback_port) if any_ports else Ports(),
            sampling=Sampling(
                keep_percent=keep,
                decision_wait=decision_wait,
                slo=DEFAULT_SLO if slo is None else read_slo(slo),
            ),
            rules=rules or (),
            webhook=webhook,
        )
        was_up = find_stack(folder) is not None
        state = start_stack(
            settings,
            find_programs(),
            timeout_s=timeout,
            progress=lambda name: status.update(f"starting {name}"),
        )
        servers = add_running_servers(Stack(folder, state), folder.parent)
    if was_up and settings != StackSettings(folder=folder):
        stop = python("-m", "server", "stack", "down", *_folder_options("--dir", folder))
        print(
            f"it was up already and keeps its options; for others stop it: {stop}", file=sys.stderr
        )
    _show(folder, state, as_json=as_json)
    if servers and not as_json:
        print(f"scraped from now on: {', '.join(servers)}; start them anew to export traces")


@stack_app.command(cls=WholeWords)
def down(folder: DirOption = RUNS / FOLDER_NAME, as_json: JsonOption = False) -> None:
    """Stop what `up` started, by its process ids and times of start. Metrics and logs stay,
    Jaeger's traces were in its memory."""
    with _errors():
        stopped = stop_stack(folder)
    names = [program.name for program in stopped]
    if as_json:
        print(json.dumps({"stopped": names}))
    else:
        print(f"stopped: {', '.join(names)}" if names else f"nothing of {folder} runs")


@stack_app.command(cls=WholeWords)
def status(folder: DirOption = RUNS / FOLDER_NAME, as_json: JsonOption = False) -> None:
    """Tell what runs and where. Exit code 0: all of it; 1: not all, or nothing."""
    with _errors():
        state = read_state(folder)
    if state is None:
        print(json.dumps({"up": False, "programs": []}) if as_json else f"{folder}: not started")
        raise typer.Exit(1)
    _show(folder, state, as_json=as_json)
    raise typer.Exit(0 if state.is_up else 1)


def _show(folder: Path, state: StackState, *, as_json: bool) -> None:
    running = {program.name for program in state.running}
    if as_json:
        programs = [
            {
                "name": program.name,
                "pid": program.process.pid,
                "running": program.name in running,
                "url": program.url,
                "log": program.log,
            }
            for program in state.programs
        ]
        document = {"up": state.is_up, "dir": str(folder), "otlp": state.otlp, "programs": programs}
        print(json.dumps(document))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("program", "pid", "address", ""):
        table.add_column(name)
    for program in state.programs:
        shown = str(program.process.pid) if program.name in running else "ended"
        table.add_row(program.name, shown, program.url, _PAGES.get(program.name, program.log))
    console = Console(file=trimmed(sys.stdout), highlight=False)
    console.print(table)
    console.print(
        f"\nOTLP at {state.otlp}; data and logs in {folder}\nnow:",
        *(f"  {command}" for command in next_commands(folder, state)),
        sep="\n",
        soft_wrap=True,
        markup=False,
    )


def next_commands(folder: Path, state: StackState) -> tuple[str, ...]:
    """What to do with a stack, as a shell takes it: comments are comments there too."""
    join, stop = _folder_options("--stack", folder), _folder_options("--dir", folder)
    return (
        f"{python('-m', 'server', 'up', *join)}  # joins it; others: OTEL_EXPORTER_OTLP_ENDPOINT",
        pdtrace("why", "--slowest", 3, "--from", state.url(JAEGER)),
        python("-m", "server", "stack", "down", *stop),
    )


def _folder_options(option: str, folder: Path) -> tuple[str | Path, ...]:
    is_usual = folder.absolute() == (RUNS / FOLDER_NAME).absolute()
    return () if is_usual else (option, folder)


@contextmanager
def _errors() -> Generator[None]:
    try:
        yield
    except (StartError, SloError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR) from error
