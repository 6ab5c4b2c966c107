"""What does recording cost a process that serves, a server at saturation, and the agent?

Three parts, each with its variants interleaved in an order drawn anew for every round; ratios are
taken within a round, and their medians are printed with the lowest and the highest.

loop    an engine-like step loop (`benchmarks.step_loop`) with 1k, 5k and 20k marks a second, and
        with as many SDK spans; marks come together in a step, and in other turns apart
server  the real server and the default model at saturation (`benchmarks.server_load`): recording
        off, on, and on with OTLP export; the servers stand side by side and are loaded in turn
agent   marks in, OTLP out (`benchmarks.agent_throughput`), and memory with 100,000 requests in
        flight (`benchmarks.tracker_memory`)

Loop and server measure their own noise floor: `off` runs under two names. A difference below what
those two differ by says nothing. The loop's `CPU time` is what a step takes of the recording
thread's processor time beyond `off`, as a share of a step's length: neighbours who take the core do
not lengthen it. `CPU per token` is the processor time of the processes that serve (not the
agent's), which neighbours on the machine disturb less than they disturb elapsed time.

    python -m benchmarks.bench_overhead [--part loop|server|agent ...] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks import otlp_sink, server_load, step_loop

RATES = (1_000, 5_000, 20_000)
SERVERS: Mapping[str, tuple[bool, bool]] = {  # name → recording, exporting
    "off": (False, False),
    "off again": (False, False),
    "on": (True, False),
    "on, OTLP": (True, True),
}
LOOP_KINDS = ("median", "mean", "p99", "cpu")
_START_S = 180.0
_STOP_S = 30.0

T = TypeVar("T")
Spread = tuple[float, float, float]
"""Median, lowest, highest."""

_progress = Console(stderr=True)


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of a round's ratios."""
    return statistics.median(values), min(values), max(values)


def in_random_order(names: Sequence[T]) -> list[T]:
    """The order of one round."""
    return random.sample(list(names), len(names))


def bench_loop(turns: int, seconds: float, endpoint: str) -> dict[str, Any]:
    """Slow-down of a step per rate and variant, against `off` of the same turn."""
    rounds = step_loop.calibrate()
    return {str(rate): _loop_at(rate, turns, seconds, rounds, endpoint) for rate in RATES}


def _loop_at(
    rate: int, turns: int, seconds: float, rounds: int, endpoint: str
) -> dict[str, dict[str, Spread]]:
    ratios: dict[str, dict[str, list[float]]] = {}

    def compare(name: str, found: step_loop.Steps, base: step_loop.Steps) -> None:
        kinds = ratios.setdefault(name, {kind: [] for kind in LOOP_KINDS})
        kinds["median"].append(found.median_s / base.median_s)
        kinds["mean"].append(found.mean_s / base.mean_s)
        kinds["p99"].append(found.p99_s / base.p99_s)
        kinds["cpu"].append(1 + (found.cpu_s - base.cpu_s) / base.median_s)

    def turn(
        variants: Sequence[str], length_s: float, *, apart: bool = False
    ) -> Mapping[str, step_loop.Steps]:
        return step_loop.run_turn(
            variants, rate=rate, seconds=length_s, rounds=rounds, endpoint=endpoint, apart=apart
        )

    for number in range(turns):
        _progress.print(f"loop: {rate} marks/s, round {number + 1} of {turns}")
        for apart in in_random_order((False, True)):
            mixed = turn(step_loop.MIXED, len(step_loop.MIXED) * seconds, apart=apart)
            for name in step_loop.MIXED[1:]:
                compare(f"{name}, apart" if apart else name, mixed[name], mixed["off"])
        beside = {
            variants: turn(variants, seconds)
            for variants in in_random_order((step_loop.OFF, step_loop.SDK))
        }
        compare("SDK", beside[step_loop.SDK]["SDK"], beside[step_loop.OFF]["off"])
    return {
        name: {kind: spread(values) for kind, values in found.items()}
        for name, found in sorted(ratios.items())
    }


def bench_server(rounds: int, load: server_load.Load, endpoint: str) -> dict[str, Any]:
    """Throughput and 99th percentile of token gaps against `off` of the same round."""
    with (
        tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as folder,
        contextlib.ExitStack() as s,
    ):
        servers: dict[str, _Running] = {}
        for name, (records, exports) in SERVERS.items():
            _progress.print(f"server: starting the one with recording {name}")
            run_dir = Path(folder) / name.replace(" ", "-").replace(",", "")
            servers[name] = s.enter_context(
                _server(run_dir, records=records, endpoint=endpoint if exports else None)
            )
        warm_up = server_load.Load(
            streams=load.streams,
            seconds=3.0,
            prompt_tokens=load.prompt_tokens,
            max_tokens=load.max_tokens,
        )
        for server in servers.values():
            server.turn(warm_up)
        tokens: dict[str, list[float]] = {name: [] for name in SERVERS if name != "off"}
        gaps: dict[str, list[float]] = {name: [] for name in tokens}
        cpu: dict[str, list[float]] = {name: [] for name in tokens}
        base_tokens: list[float] = []
        failed = 0
        for number in range(rounds):
            _progress.print(f"server: round {number + 1} of {rounds}")
            seen = {name: servers[name].turn(load) for name in in_random_order([*SERVERS])}
            failed += sum(turn.failed for turn in seen.values())
            base = seen["off"]
            base_tokens.append(base.tokens_per_s)
            for name, ratios in tokens.items():
                ratios.append(seen[name].tokens_per_s / base.tokens_per_s)
                gaps[name].append(seen[name].p99_gap_s / base.p99_gap_s)
                cpu[name].append(seen[name].cpu_s_per_token / base.cpu_s_per_token)
    return {
        "tokens_per_s_off": spread(base_tokens),
        "throughput": {name: spread(values) for name, values in tokens.items()},
        "p99_gap": {name: spread(values) for name, values in gaps.items()},
        "cpu_per_token": {name: spread(values) for name, values in cpu.items()},
        "failed": failed,
    }


@dataclass(frozen=True, slots=True)
class _Turn:
    tokens_per_s: float
    p99_gap_s: float
    failed: int
    cpu_s_per_token: float


@dataclass(frozen=True, slots=True)
class _Running:
    """A server that is ready. `pids` are those of the processes that serve, not the agent's."""

    url: str
    model: str
    pids: Sequence[int]

    def turn(self, load: server_load.Load) -> _Turn:
        before_s = self._cpu_s()
        seen = server_load.run_load(self.url, self.model, load)
        used_s = self._cpu_s() - before_s
        return _Turn(seen.tokens_per_s, seen.p99_gap_s, seen.failed, used_s / max(seen.tokens, 1))

    def _cpu_s(self) -> float:
        """Processor time that the serving processes have used."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _server(run_dir: Path, *, records: bool, endpoint: str | None) -> Generator[_Running]:
    """A server of its own, ready."""
    command = [sys.executable, "-m", "server", "up", "--json", "--port", "0", "--run-dir"]
    command += [str(run_dir), *(() if records else ("--no-record",))]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    if endpoint is not None:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start: {' '.join(command)}")
        state = json.loads(line)
        pids = [int(p["pid"]) for p in state["processes"] if p["role"] != "agent"]
        yield _Running(str(state["url"]), str(state["model"]), pids)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)


def bench_agent(rounds: int) -> dict[str, Any]:
    """Spans per second of one core on each path, and bytes per request in flight."""
    return {
        "throughput": _module("agent_throughput", "--repeats", str(rounds)),
        "memory": _module("tracker_memory"),
    }


def _module(name: str, *arguments: str) -> Any:
    """What a benchmark module of its own prints as its last line; the rest goes to stderr."""
    _progress.print(f"agent: {name}")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *arguments]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *words, last = finished.stdout.splitlines()
    for line in words:
        _progress.print(line, markup=False, highlight=False)
    return json.loads(last)


def _percent(values: Spread) -> str:
    median, low, high = ((value - 1) * 100 for value in values)
    return f"{median:+.2f} % [{low:+.2f} to {high:+.2f}]"


def _show(result: Mapping[str, Any], console: Console) -> None:
    if "loop" in result:
        table = Table(
            *("marks/s", "variant", "step, median", "step, mean", "step, p99"),
            "CPU time, of a step",
            title="step loop",
        )
        for rate, variants in result["loop"].items():
            for name, found in variants.items():
                table.add_row(rate, name, *(_percent(found[kind]) for kind in LOOP_KINDS))
        console.print(table)
    if "server" in result:
        found = result["server"]
        table = Table(
            "recording", "tokens/s", "p99 token gap", "CPU per token", title="server at saturation"
        )
        for name, values in found["throughput"].items():
            table.add_row(
                name,
                _percent(values),
                _percent(found["p99_gap"][name]),
                _percent(found["cpu_per_token"][name]),
            )
        console.print(table)


def main() -> int:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=("loop", "server", "agent"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5, help="of one turn of the loop")
    parser.add_argument("--load-seconds", type=float, default=10.0, help="of one turn of a server")
    parser.add_argument("--streams", type=int, default=8, help="requests in flight at a server")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()
    parts = given.part or ["loop", "server", "agent"]
    result: dict[str, Any] = {}
    with otlp_sink.running() as endpoint:
        if "loop" in parts:
            result["loop"] = bench_loop(given.rounds, given.seconds, endpoint)
        if "server" in parts:
            load = server_load.Load(streams=given.streams, seconds=given.load_seconds)
            result["server"] = bench_server(given.rounds, load, endpoint)
    if "agent" in parts:
        result["agent"] = bench_agent(given.rounds)
    _show(result, Console(stderr=given.json))
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
