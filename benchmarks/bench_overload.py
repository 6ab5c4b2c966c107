"""Does a server that is asked ten times what it can do still do what it can?

    python -m benchmarks.bench_overload [--json] [--mode pd|colocated] [--factor 10]
                                        [--rounds N] [--seconds S]

A server with the fake model, few places and a short queue. First its capacity: as many clients as
places, each with one request after the other. Then, in turns and in an order drawn anew in each
round, requests arrive at random (Poisson) at that rate, and at `--factor` times that rate, whether
or not earlier ones are answered. Goodput is whole answers per second, of the seconds behind the
first. What is to be near 1 is goodput at `--factor` over goodput at 1, within one round. A refusal
(429, 503) is timed from the connection's opening to its status line, and counted if it lacks
Retry-After. With --json the last line is an object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from server.config import COLOCATED, PD, Settings
from server.launch import Launcher

MODEL = "fake:step_ms=20,token_us=20"
PLACES = 8
QUEUE = 8
PROMPT_TOKENS = 32
MAX_TOKENS = 16
WARM_S = 1.0
START_S = 120.0
LAST_S = 30.0


@dataclass(slots=True)
class Seen:
    """What clients saw. Seconds; `ended_s` since the window's begin, of whole answers.

    broken   connections that ended without an answer
    """

    ended_s: list[float] = field(default_factory=list[float])
    served_s: list[float] = field(default_factory=list[float])
    refused_s: list[float] = field(default_factory=list[float])
    statuses: Counter[int] = field(default_factory=Counter[int])
    without_retry_after: int = 0
    broken: int = 0

    def goodput(self, seconds: float) -> float:
        """Whole answers per second of the window, without its first."""
        count = sum(WARM_S <= end_s < seconds for end_s in self.ended_s)
        return count / (seconds - WARM_S)


@dataclass(slots=True)
class Asker:
    """Asks one server; no two prompts begin alike."""

    url: str
    model: str
    asked: int = 0

    async def ask(self, seen: Seen, begin_s: float) -> None:
        """One request and its answer, on a connection of its own."""
        asked_s = time.perf_counter()
        try:
            status, retry_after, whole = await self._exchange()
        except OSError:
            seen.broken += 1
            return
        now_s = time.perf_counter()
        seen.statuses[status] += 1
        if status == 200 and whole:
            seen.ended_s.append(now_s - begin_s)
            seen.served_s.append(now_s - asked_s)
        elif status in (429, 503):
            seen.refused_s.append(now_s - asked_s)
            seen.without_retry_after += not retry_after
        else:
            seen.broken += 1

    async def _exchange(self) -> tuple[int, bool, bool]:
        self.asked += 1
        prompt = [10 + (self.asked * 131 + i) % 200 for i in range(PROMPT_TOKENS)]
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
            }
        ).encode()
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            await writer.drain()
            line = await reader.readline()
            if not line.startswith(b"HTTP/1.1 "):
                raise ConnectionError("no status line")
            status = int(line.split()[1])
            head = b""
            while (header := await reader.readline()) not in (b"\r\n", b""):
                head += header.lower()
            if status != 200:
                return status, b"\r\nretry-after:" in b"\r\n" + head, False
            return status, False, b'"finish_reason"' in await reader.read()
        finally:
            writer.close()


async def closed_loop(asker: Asker, clients: int, seconds: float) -> float:
    """Answers per second with so many clients, each with one request after the other."""
    seen = Seen()
    begin_s = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - begin_s < seconds:
            await asker.ask(seen, begin_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen.goodput(seconds)


async def open_loop(asker: Asker, per_s: float, seconds: float, draw: random.Random) -> Seen:
    """Requests that arrive at a rate for so long, however the server fares."""
    seen = Seen()
    tasks: list[asyncio.Task[None]] = []
    begin_s = time.perf_counter()
    due_s = draw.expovariate(per_s)
    while due_s < seconds:
        wait_s = due_s - (time.perf_counter() - begin_s)
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(asker.ask(seen, begin_s)))
        due_s += draw.expovariate(per_s)
    async with asyncio.timeout(LAST_S):
        await asyncio.gather(*tasks)
    return seen


async def measure(
    asker: Asker, *, factor: float, rounds: int, seconds: float, say: bool
) -> dict[str, object]:
    await closed_loop(asker, PLACES, 2.0)  # everything is loaded and warm
    capacity = await closed_loop(asker, PLACES, seconds)
    if say:
        print(f"capacity: {capacity:.1f} requests/s with {PLACES} places")
    draw = random.Random(4)
    ratios: list[float] = []
    by_factor: dict[float, list[Seen]] = {1.0: [], factor: []}
    for number in range(rounds):
        order = list(by_factor)
        draw.shuffle(order)
        for times in order:
            by_factor[times].append(await open_loop(asker, capacity * times, seconds, draw))
        at_one, at_many = (by_factor[times][-1].goodput(seconds) for times in (1.0, factor))
        ratios.append(at_many / at_one)
        if say:
            print(
                f"round {number + 1}: goodput {at_one:.1f}/s at 1x, {at_many:.1f}/s at "
                f"{factor:g}x, ratio {ratios[-1]:.2f}"
            )
    over = by_factor[factor]
    refused = sorted(s for seen in over for s in seen.refused_s)
    return {
        "capacity_per_s": round(capacity, 2),
        "goodput_ratio": _spread(ratios),
        "goodput_1x": _spread([seen.goodput(seconds) for seen in by_factor[1.0]]),
        "goodput_over": _spread([seen.goodput(seconds) for seen in over]),
        "refused_ms": _quantiles(refused),
        "served_ms_1x": _quantiles([s for seen in by_factor[1.0] for s in seen.served_s]),
        "served_ms_over": _quantiles([s for seen in over for s in seen.served_s]),
        "statuses_1x": _statuses(by_factor[1.0]),
        "statuses_over": _statuses(over),
        "without_retry_after": sum(seen.without_retry_after for seen in over),
        "broken": sum(seen.broken for seen in (*over, *by_factor[1.0])),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float | int]:
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0}
    return {
        "count": len(ordered),
        "p50": round(1000 * ordered[len(ordered) // 2], 1),
        "p99": round(1000 * ordered[len(ordered) * 99 // 100], 1),
    }


def _statuses(several: Sequence[Seen]) -> dict[str, int]:
    total: Counter[int] = sum((seen.statuses for seen in several), Counter())
    return {str(status): count for status, count in sorted(total.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mode", choices=(PD, COLOCATED), default=PD)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    if options.factor <= 1 or options.rounds < 1 or options.seconds <= 2 * WARM_S:
        parser.error("expected --factor above 1, --rounds at least 1, --seconds above 2")
    with tempfile.TemporaryDirectory(prefix="pdtrace-overload-") as folder:
        settings = Settings(
            run_dir=str(Path(folder) / "run"),
            port=0,
            mode=options.mode,
            model=MODEL,
            max_running=PLACES,
            max_concurrency=PLACES,
            max_queue=QUEUE,
        )
        launcher = Launcher.prepare(settings)
        try:
            launcher.start()
            launcher.wait_until_ready(timeout_s=START_S, progress=lambda _waited_s: None)
            result = asyncio.run(
                measure(
                    Asker(launcher.url, launcher.model_name),
                    factor=options.factor,
                    rounds=options.rounds,
                    seconds=options.seconds,
                    say=not options.json,
                )
            )
        finally:
            launcher.stop()
            launcher.close()
    result = {
        "benchmark": "overload",
        "mode": options.mode,
        "factor": options.factor,
        "rounds": options.rounds,
        "seconds": options.seconds,
        **result,
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
