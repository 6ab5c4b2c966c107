"""What does recording cost a process that serves, a server at saturation, and the agent?

Three parts, each with its variants interleaved in an order drawn anew for every round; ratios are
taken within a round, and their medians are printed with the lowest and the highest.

loop    an engine-like step loop (`benchmarks.step_loop`) with 1k, 5k and 20k marks a second, and
        with as many SDK spans
server  the real server and the default model at saturation (`benchmarks.server_load`): recording
        off, on, and on with OTLP export; the servers stand side by side and are loaded in turn
agent   marks in, OTLP out (`benchmarks.agent_throughput`), and memory with 100,000 requests in
        flight (`benchmarks.tracker_memory`)

Every part measures its own noise floor: the same variant under two names. A difference below what
those two differ by says nothing.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import agent_throughput, otlp_sink, server_load, step_loop, tracker_memory

RATES = (1_000, 5_000, 20_000)
SERVERS: Mapping[str, tuple[bool, bool]] = {  # name → recording, exporting
    "off": (False, False),
    "off again": (False, False),
    "on": (True, False),
    "on, OTLP": (True, True),
}
_START_S = 180.0
_STOP_S = 30.0

Spread = tuple[float, float, float]
"""Median, lowest, highest."""

_progress = Console(stderr=True)


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of a round's ratios."""
    return statistics.median(values), min(values), max(values)


def in_random_order(names: Sequence[str]) -> list[str]:
    """The order of one round."""
    return random.sample(list(names), len(names))


def bench_loop(rounds: int, seconds: float, endpoint: str) -> dict[str, Any]:
    """Slow-down of a step per rate and variant, against `off` of the same round."""
    result: dict[str, Any] = {}
    for rate in RATES:
        ratios: dict[str, dict[str, list[float]]] = {
            name: {"mean": [], "p99": [], "thread": []} for name in step_loop.VARIANTS[1:]
        }
        for number in range(rounds):
            _progress.print(f"loop: {rate} marks/s, round {number + 1} of {rounds}")
            turns = {
                name: step_loop.run_turn(name, rate, seconds, endpoint)
                for name in in_random_order(step_loop.VARIANTS)
            }
            base = turns["off"]
            for name, found in ratios.items():
                found["mean"].append(turns[name].mean_s / base.mean_s)
                found["p99"].append(turns[name].p99_s / base.p99_s)
                found["thread"].append(turns[name].thread_s / base.thread_s)
        result[str(rate)] = {
            name: {kind: spread(values) for kind, values in found.items()}
            for name, found in ratios.items()
        }
    return result


def bench_server(rounds: int, load: server_load.Load, endpoint: str) -> dict[str, Any]:
    """Throughput and 99th percentile of token gaps against `off` of the same round."""
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as folder, contextlib.ExitStack() as s:
        urls: dict[str, tuple[str, str]] = {}
        for name, (records, exports) in SERVERS.items():
            _progress.print(f"server: starting the one with recording {name}")
            run_dir = Path(folder) / name.replace(" ", "-").replace(",", "")
            urls[name] = s.enter_context(
                _server(run_dir, records=records, endpoint=endpoint if exports else None)
            )
        warm_up = server_load.Load(
            streams=load.streams,
            seconds=3.0,
            prompt_tokens=load.prompt_tokens,
            max_tokens=load.max_tokens,
        )
        for url, model in urls.values():
            server_load.run_load(url, model, warm_up)
        tokens: dict[str, list[float]] = {name: [] for name in SERVERS if name != "off"}
        gaps: dict[str, list[float]] = {name: [] for name in tokens}
        base_tokens: list[float] = []
        failed = 0
        for number in range(rounds):
            _progress.print(f"server: round {number + 1} of {rounds}")
            seen = {
                name: server_load.run_load(*urls[name], load) for name in in_random_order([*SERVERS])
            }
            failed += sum(turn[2] for turn in seen.values())
            base_tokens.append(seen["off"][0])
            for name in tokens:
                tokens[name].append(seen[name][0] / seen["off"][0])
                gaps[name].append(seen[name][1] / seen["off"][1])
    return {
        "tokens_per_s_off": spread(base_tokens),
        "throughput": {name: spread(values) for name, values in tokens.items()},
        "p99_gap": {name: spread(values) for name, values in gaps.items()},
        "failed": failed,
    }


@contextlib.contextmanager
def _server(run_dir: Path, *, records: bool, endpoint: str | None) -> Iterator[tuple[str, str]]:
    """A server of its own, ready; its URL and model name."""
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
        yield str(state["url"]), str(state["model"])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)


def bench_agent(rounds: int) -> dict[str, Any]:
    """Spans per second of one core on each path, and bytes per request in flight."""
    _progress.print("agent: throughput")
    throughput = agent_throughput.measure(rounds=rounds)
    _progress.print("agent: memory")
    return {"throughput": throughput, "memory": tracker_memory.measure()}


def _percent(values: Spread) -> str:
    median, low, high = ((value - 1) * 100 for value in values)
    return f"{median:+.2f} % [{low:+.2f} to {high:+.2f}]"


def _show(result: Mapping[str, Any], console: Console) -> None:
    if "loop" in result:
        table = Table("marks/s", "variant", "step, mean", "step, p99", "its CPU", title="step loop")
        for rate, variants in result["loop"].items():
            for name, found in variants.items():
                table.add_row(
                    rate,
                    name,
                    _percent(found["mean"]),
                    _percent(found["p99"]),
                    _percent(found["thread"]),
                )
        console.print(table)
    if "server" in result:
        found = result["server"]
        table = Table("recording", "tokens/s", "p99 token gap", title="server at saturation")
        for name, values in found["throughput"].items():
            table.add_row(name, _percent(values), _percent(found["p99_gap"][name]))
        console.print(table)
    if "agent" in result:
        console.print(result["agent"])


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
