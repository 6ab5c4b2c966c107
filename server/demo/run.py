"""Runs the demo: start the server, play the scenes, stop it, judge the recording, print.

Owns order and output.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from pdtrace.errors import PdtraceError
from pdtrace.terminal.render import why_view
from pdtrace.terminal.trimmed import trimmed
from server.children import PROJECT_ROOT
from server.demo import scenario
from server.demo.drive import ClientView, play
from server.demo.report import Judged, Report, read_report
from server.demo.scenario import DemoRequest
from server.errors import ServerError
from server.rundir import point_latest, timestamped
from server.shown_commands import pdtrace

RUNS = Path("run")
_STOP_S = 60.0
_APART_S = 0.3
_PIPE_WIDTH = 100


class DemoError(ServerError):
    """The demo could not be played; the message says what happened."""

    code = "demo_failed"


def run_demo(*, as_json: bool = False, options: Sequence[str] = ()) -> int:
    """Play the demo and print its outcome; exit code 0 only if every verdict is right.

    options   further options of `python -m server up`
    """
    console = _console(stderr=as_json)
    run_dir = timestamped(RUNS, "demo-")
    try:
        requests, views = _play_all(run_dir, console, options)
        report = read_report(run_dir, requests, views)
    except (DemoError, PdtraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(to_json(report, run_dir)))
    else:
        print_report(report, run_dir, console)
    return 0 if report.passed else 1


def _console(*, stderr: bool) -> Console:
    """A console of the terminal's width; pipes and files get 100 columns."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else _PIPE_WIDTH
    return Console(file=trimmed(stream), width=width, highlight=False)


def _play_all(
    run_dir: Path, console: Console, options: Sequence[str]
) -> tuple[list[DemoRequest], list[ClientView]]:
    requests = list(scenario.warm_up())
    total = sum(map(len, (requests, scenario.traffic(0), scenario.full_pool(0))))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryFile("w+") as errors, Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total)
        _begin(progress, bar, "starting the server")
        server, state = _start(run_dir, errors, options)
        point_latest(run_dir.absolute())  # as `up` does once it serves: one may look meanwhile
        try:
            url, model = str(state["url"]), str(state["model"])
            progress.console.print(
                f"{model} at {url}: {', '.join(p['instance'] for p in state['processes'])}"
            )

            def scene(name: str, sent: Sequence[DemoRequest], at_once: int) -> list[ClientView]:
                _begin(progress, bar, name, len(sent))
                return asyncio.run(
                    play(
                        url,
                        model,
                        sent,
                        at_once=at_once,
                        apart_s=_APART_S,
                        on_done=lambda _: progress.advance(bar),
                    )
                )

            views = scene("warming up", requests, 1)
            stall_ms = scenario.stall_ms(max(view.total_s for view in views[1:]))
            traffic, full_pool = scenario.traffic(stall_ms), scenario.full_pool(stall_ms)
            views += scene(f"traffic, stalls of {stall_ms / 1000:.1f} s", traffic, scenario.AT_ONCE)
            views += scene("a full KV pool", full_pool, len(full_pool))
            requests += [*traffic, *full_pool]
            _begin(progress, bar, "stopping the server")
            server.send_signal(signal.SIGTERM)
            if server.wait(timeout=_STOP_S) != 0:
                raise DemoError(f"the server did not stop cleanly: {_tail(errors)}")
        finally:
            if server.poll() is None:
                server.kill()  # its processes die with it
                server.wait()
        progress.update(bar, description="done")
    return requests, views


def _begin(progress: Progress, bar: TaskID, name: str, num_requests: int = 0) -> None:
    """Say what comes now: where there is no bar, in a line of its own."""
    progress.update(bar, description=name)
    if not progress.console.is_terminal:
        progress.console.print(f"{name}: {num_requests} requests" if num_requests else name)


def _start(
    run_dir: Path, errors: IO[str], options: Sequence[str]
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "server", "up", "--json", "--port", "0"),
            *("--run-dir", str(run_dir.absolute()), *scenario.SERVER_OPTIONS, *options),
        ],
        cwd=PROJECT_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        process_group=0,
    )
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
    except BaseException:  # interrupted, or told to end
        server.kill()  # its processes die with it
        server.wait()
        raise
    if not line:
        server.wait(timeout=_STOP_S)
        raise DemoError(f"the server did not start: {_tail(errors)}")
    return server, json.loads(line)


def _tail(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()[-2000:]


def print_report(report: Report, run_dir: Path, console: Console) -> None:
    """The verdict on every slow request, the waterfall of the worst, and where to look further."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "request", "took", "blamed", "share", "cause"):
        table.add_column(name, justify="right" if name in {"took", "share"} else "left")
    for item in report.slow:
        table.add_row(*_row(item))
    held = sum(item.request.expected is not None for item in report.judged)
    stages = {item.request.expected for item in report.judged} - {None}
    healthy = [item for item in report.judged if item.request.expected is None]
    console.print(
        f"\n{len(report.judged)} requests, {held} of them held up on purpose in {len(stages)} "
        "stages. What the recording says of the slow ones:\n"
    )
    console.print(table)
    right = sum(not item.problems for item in report.judged if item.request.expected)
    wrongly = sum(bool(item.problems) for item in healthy)
    console.print(
        f"\n{right} of {held} stalls blamed on their own stage; {wrongly} of {len(healthy)} "
        f"healthy requests blamed; {report.unexplained * 100:.3f} % of the time unexplained."
    )
    worst = next((item for item in report.slow if item.blamed), None)
    if worst is not None and worst.timeline is not None and worst.verdict is not None:
        console.print("\nThe worst of them:\n")
        console.print(why_view(worst.timeline, worst.verdict, width=console.width))
    problems = [
        *report.problems,
        *(f"{x.request.request_id}: {problem}" for x in report.judged for problem in x.problems),
    ]
    for problem in problems:
        console.print(f"[red]✗[/] {problem}", soft_wrap=True)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if problems and load > 1.5:
        console.print(
            f"This machine was busy (load {load:.1f} per core): stalls of its own may be among "
            "these.",
            soft_wrap=True,
        )
    shown = run_dir if run_dir.is_absolute() else run_dir.as_posix()
    console.print(
        f"\nThe recording lies in {shown}. Look further:\n"
        f"  {pdtrace('why', '--slowest', 3, '--from', shown)}\n"
        f"  {pdtrace('why', 'demo-full-pool', '--from', shown)}\n"
        f"  {pdtrace('check', '--from', shown)}\n"
        f"  {pdtrace('stages')}",
        soft_wrap=True,
    )


def _row(item: Judged) -> tuple[str, ...]:
    cause = item.verdict.cause if item.verdict is not None else None
    return (
        "[red]✗[/]" if item.problems else "[green]✓[/]",
        item.request.request_id,
        f"{item.total_ns / 1e9:.2f} s",
        item.blamed or "-",
        f"{item.share * 100:.0f} %",
        cause or "",
    )


def to_json(report: Report, run_dir: Path) -> dict[str, Any]:
    """The report for programs; times in seconds."""
    return {
        "passed": report.passed,
        "run_dir": str(run_dir.absolute()),
        "problems": list(report.problems),
        "unexplained": report.unexplained,
        "requests": [
            {
                "request_id": item.request.request_id,
                "expected": item.request.expected,
                "injected_s": item.request.stall_ms / 1000,
                "blamed": item.blamed,
                "share": item.share,
                "stage_s": item.verdict.stage_ns / 1e9 if item.verdict else None,
                "total_s": item.total_ns / 1e9,
                "cause": item.verdict.cause if item.verdict else None,
                "sentence": item.verdict.sentence if item.verdict else None,
                "problems": list(item.problems),
            }
            for item in report.judged
        ],
    }
