"""What does recording cost a process that serves, a server at saturation, and the agent?

Three parts. Each has its variants interleaved in an order drawn anew for every round or block;
ratios are taken within it.

loop    an engine-like step loop (`benchmarks.step_loop`) with 1k, 5k and 20k marks a second, and
        with as many SDK spans; marks come together in a step, and in other turns apart
server  the real server and the default model at saturation: one server, whose recording is off, on,
        and on with OTLP export by turns (`benchmarks.switched_server`). A window is a batch of
        requests (`benchmarks.server_load`); a switch comes when none is in flight
agent   marks in, OTLP out (`benchmarks.agent_throughput`), and memory with 100,000 requests in
        flight (`benchmarks.tracker_memory`)

Loop and server measure their own noise floor: `off` runs under two names. A difference below what
those two differ by says nothing. Neighbours on the machine disturb elapsed time most, and CPU time
too, as the model waits for memory that they use as well; what Python does outside the model's
forward passes, recording among it, they hardly disturb. The server's part says all three, and
beside differences what recording's own calls took, timed one by one in windows of their own.
The loop's `CPU time` is what a step takes of the recording thread's processor time beyond `off`, as
a share of a step's length: neighbours who take the core do not lengthen it.

    python -m benchmarks.bench_overhead [--part loop|server|agent ...] [--rounds 5] [--blocks 30]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks import otlp_sink, server_load, step_loop, switched_server
from benchmarks.paired import Estimate, adjusted, centre, estimate, quantile
from benchmarks.switched_process import Arm
from pdtrace.native import hot_path

RATES = (1_000, 5_000, 20_000)
VARIANTS: Mapping[str, Arm] = {
    "off": Arm.OFF,
    "off again": Arm.OFF,
    "on": Arm.ON,
    "on, OTLP": Arm.EXPORT,
}
LOOP_KINDS = ("median", "mean", "p99", "cpu")
LIMIT = 0.01
"""What recording may cost a server, of throughput and of the 99th percentile of token gaps."""
_TIMED_EVERY = 3  # blocks

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One batch of requests under one arm. Seconds; CPU seconds.

    gaps_s    between tokens, of all its answers
    serving   CPU of the serving processes, `engine` the part in the model's forward passes
    agent     CPU of the agents
    calls     recording calls that were timed, `calls_s` what they took
    others    processors kept busy by anybody else, the client among them
    records   written in it
    """

    wall_s: float
    gaps_s: Sequence[float]
    failed: int
    serving: float
    engine: float
    agent: float
    calls: int
    calls_s: float
    others: float
    records: int


Block = Mapping[str, Window]
"""A window of each variant, run close together in an order of their own."""


def bench_server(
    blocks: int, minutes: float, load: server_load.Load, endpoint: str
) -> dict[str, Any]:
    """What recording costs one running server, from `blocks` of a window of each variant, or as
    many as fit into `minutes`; Ctrl-C ends it with those that are complete."""
    found: list[Block] = []
    timed: list[Window] = []
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as folder:
        _progress.print("server: starting")
        with switched_server.running(Path(folder), endpoint=endpoint) as server:
            numbers = itertools.count()

            def window(arm: Arm) -> Window:
                return _window(server, arm, load, next(numbers))

            try:
                for arm in (Arm.OFF, Arm.ON, Arm.EXPORT):
                    window(arm)  # warm-up
                timed.append(window(Arm.TIMED))
                until_s = time.monotonic() + minutes * 60
                while len(found) < blocks and time.monotonic() < until_s:
                    _progress.print(f"server: block {len(found) + 1} of {blocks}")
                    order = in_random_order([*VARIANTS])
                    found.append({name: window(VARIANTS[name]) for name in order})
                    if len(found) % _TIMED_EVERY == 0:
                        timed.append(window(Arm.TIMED))
            except KeyboardInterrupt:
                if not found:
                    raise
    return summarise(found, timed, load)


def _window(
    server: switched_server.SwitchedServer, arm: Arm, load: server_load.Load, number: int
) -> Window:
    server.switch(arm)
    before = server.used()
    seen = asyncio.run(server_load.run_batch(server.url, server.model, load, number))
    written = server.settle()
    after = server.used()
    expected = {switched_server.RINGS_OF[arm]} - {None}
    if {of for of, count in written.items() if count} != expected:
        raise SystemExit(f"recording was not {arm} in a window: it wrote {written}")
    serving, agent = after.serving - before.serving, after.agents - before.agents
    wall_s = after.wall_s - before.wall_s
    busy_s = after.busy_s - before.busy_s - (serving + agent) / 1e9
    return Window(
        wall_s=seen.wall_s,
        gaps_s=seen.gaps_s,
        failed=seen.failed,
        serving=serving / 1e9,
        engine=(after.engine - before.engine) / 1e9,
        agent=agent / 1e9,
        calls=after.calls - before.calls,
        calls_s=(after.calls_ns - before.calls_ns) / 1e9,
        others=busy_s / wall_s,
        records=sum(written.values()),
    )


def summarise(
    blocks: Sequence[Block], timed: Sequence[Window], load: server_load.Load
) -> dict[str, Any]:
    """Differences from recording off, as parts of it, with 95 % intervals.

    Both windows of a block without recording are what the others are compared with; `off again`,
    compared with `off` alone, is the noise floor. Windows are given without their gaps.
    """
    windows = [window for block in blocks for window in block.values()]
    return {
        "blocks": len(blocks),
        "variants": {
            name: {
                kind: asdict(estimate(blocks, partial(measure.of, name)))
                for kind, measure in _MEASURES.items()
            }
            for name in VARIANTS
            if name != "off"
        },
        "agent": {
            name: {
                "share": asdict(estimate(blocks, partial(_agent_share, name))),
                "cores": sum(b[name].agent for b in blocks) / sum(b[name].wall_s for b in blocks),
            }
            for name in ("on", "on, OTLP")
        },
        "calls": {
            "share": asdict(estimate(timed, _calls_share)),
            "ns": sum(w.calls_s for w in timed) / sum(w.calls for w in timed) * 1e9,
            "per_request": sum(w.calls for w in timed)
            / (len(timed) * load.streams * load.requests),
        },
        "tokens_per_s_off": spread([load.tokens / block["off"].wall_s for block in blocks]),
        "cpu_s_per_token_off": spread([block["off"].serving / load.tokens for block in blocks]),
        "outside_model_off": spread(
            [1 - block["off"].engine / block["off"].serving for block in blocks]
        ),
        "records_per_request": statistics.mean(block["on"].records for block in blocks)
        / (load.streams * load.requests),
        "others_busy": spread([window.others for window in windows]),
        "failed": sum(window.failed for window in windows),
        "windows": [
            {name: asdict(replace(window, gaps_s=())) for name, window in block.items()}
            for block in blocks
        ],
    }


@dataclass(frozen=True, slots=True)
class Measure:
    """A cost of a variant, relative to windows without recording; above 0 is worse.

    value    of a window and its block
    beside   what disturbs it and recording does not change: taken out by regression
    """

    title: str
    value: Callable[[Window, Block], float]
    beside: tuple[Callable[[Window, Block], float], ...] = ()

    def of(self, name: str, blocks: Sequence[Block]) -> float:
        """Centre of a variant's differences from the windows without recording of its block."""
        values = [{n: self.value(w, block) for n, w in block.items()} for block in blocks]
        if self.beside:
            causes = [
                {n: [cause(w, block) for cause in self.beside] for n, w in block.items()}
                for block in blocks
            ]
            values = adjusted(values, causes)
        bases = ("off",) if name == "off again" else ("off", "off again")
        return centre([v[name] - statistics.mean(v[base] for base in bases) for v in values])


def _log_time(window: Window, _: Block) -> float:
    return math.log(window.wall_s)


def _log_p99_gap(window: Window, _: Block) -> float:
    return math.log(quantile(window.gaps_s, 0.99))


def _log_serving(window: Window, _: Block) -> float:
    return math.log(window.serving)


def _log_all(window: Window, _: Block) -> float:
    return math.log(window.serving + window.agent)


def _outside(window: Window, block: Block) -> float:
    """CPU time outside the forward passes, as a part of all that a window of the block takes."""
    return (window.serving - window.engine) / _usual_serving(block)


def _engine(window: Window, block: Block) -> float:
    """How slow the machine is at the model's work in this window."""
    return window.engine / _usual_serving(block)


def _usual_serving(block: Block) -> float:
    return statistics.mean(window.serving for window in block.values())


def _others(window: Window, _: Block) -> float:
    return window.others


_MEASURES: Mapping[str, Measure] = {
    "time_per_token": Measure("time a token", _log_time),
    "time_per_token_adjusted": Measure("time a token, adjusted", _log_time, (_others, _engine)),
    "p99_gap": Measure("p99 gap", _log_p99_gap),
    "p99_gap_adjusted": Measure("p99 gap, adjusted", _log_p99_gap, (_others, _engine)),
    "cpu": Measure("CPU a token", _log_serving),
    "cpu_outside_model": Measure("CPU outside the model", _outside, (_engine,)),
    "cpu_with_agent": Measure("CPU with agent", _log_all),
}


def _agent_share(name: str, blocks: Sequence[Block]) -> float:
    return sum(b[name].agent for b in blocks) / sum(b[name].serving for b in blocks)


def _calls_share(windows: Sequence[Window]) -> float:
    return sum(w.calls_s for w in windows) / sum(w.serving for w in windows)


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
    *words, last = finished.stdout.splitlines() or [""]
    for line in words:
        _progress.print(line, markup=False, highlight=False)
    try:
        return json.loads(last)
    except ValueError:
        raise SystemExit(
            f"benchmarks.{name} ended with {finished.returncode} and printed no result"
        ) from None


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
        _show_server(result["server"], console)


def _show_server(found: Mapping[str, Any], console: Console) -> None:
    title = f"cost at saturation, {found['blocks']} blocks, with 95 % intervals"
    table = Table("cost", "off again", "on", "on, OTLP", f"limit of {LIMIT:.0%}", title=title)
    for kind, measure in _MEASURES.items():
        costs = {name: Estimate(**kinds[kind]) for name, kinds in found["variants"].items()}
        floor = costs["off again"].reach
        verdicts = [costs[name].verdict(LIMIT, floor) for name in ("on", "on, OTLP")]
        table.add_row(measure.title, *map(_interval, costs.values()), ", ".join(verdicts))
    console.print(table)
    calls = found["calls"]
    console.print(
        f"recording's own calls, timed: {_interval(Estimate(**calls['share']))} of the CPU time of "
        f"serving ({calls['per_request']:.0f} calls a request, {calls['ns']:.0f} ns each)"
    )
    for name, agent in found["agent"].items():
        console.print(
            f"agent, {name}: {_interval(Estimate(**agent['share']))} of the CPU time of serving, "
            f"{agent['cores']:.1%} of a core"
        )
    console.print(
        f"off: {found['tokens_per_s_off'][0]:.1f} tokens/s, "
        f"{found['cpu_s_per_token_off'][0] * 1e3:.2f} ms of CPU a token, "
        f"{found['outside_model_off'][0]:.1%} of it outside the model; others kept "
        f"{found['others_busy'][0]:.2f} [{found['others_busy'][1]:.2f} to "
        f"{found['others_busy'][2]:.2f}] processors busy; {found['failed']} requests failed"
    )


def _interval(found: Estimate) -> str:
    value, low, high = (part * 100 for part in (found.value, found.low, found.high))
    return f"{value:+.2f} % [{low:+.2f} to {high:+.2f}]"


def main() -> int:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=("loop", "server", "agent"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5, help="of one turn of the loop")
    parser.add_argument("--blocks", type=int, default=30, help="of windows of the server")
    parser.add_argument("--minutes", type=float, default=10.0, help="for them, at most")
    parser.add_argument("--streams", type=int, default=8, help="requests in flight at a server")
    parser.add_argument("--tokens", type=int, default=16, help="that each of them asks for")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()
    parts = given.part or ["loop", "server", "agent"]
    result: dict[str, Any] = {"hot_path": hot_path()}
    with otlp_sink.running() as endpoint:
        if "loop" in parts:
            result["loop"] = bench_loop(given.rounds, given.seconds, endpoint)
        if "server" in parts:
            load = server_load.Load(streams=given.streams, max_tokens=given.tokens)
            result["server"] = bench_server(given.blocks, given.minutes, load, endpoint)
    if "agent" in parts:
        result["agent"] = bench_agent(given.rounds)
    _show(result, Console(stderr=given.json))
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
