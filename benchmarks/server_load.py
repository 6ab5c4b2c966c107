"""Closed-loop load on a running server, and what its clients saw: tokens per second, token gaps.

`streams` clients send one streamed completion after the other. A plain HTTP/1.1 client on asyncio
streams: it must not be what saturates the machine.

    python -m benchmarks.server_load --url http://127.0.0.1:8000 --model NAME --seconds 10 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit


@dataclass(slots=True, kw_only=True)
class Load:
    """How much is asked for. Tokens per request."""

    streams: int = 8
    seconds: float = 10.0
    prompt_tokens: int = 64
    max_tokens: int = 48


@dataclass(slots=True, kw_only=True)
class Seen:
    """Events that came within the time, and the gaps between those of one answer, in seconds."""

    tokens: int = 0
    requests: int = 0
    failed: int = 0
    gaps_s: list[float] = field(default_factory=list[float])

    def p99_gap_s(self) -> float:
        """99th percentile of the pooled gaps; nan without any."""
        gaps = sorted(self.gaps_s)
        return gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] if gaps else float("nan")


async def _stream(host: str, port: int, body: bytes, seen: Seen, until_s: float) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await writer.drain()
        if b" 200 " not in await reader.readline():
            seen.failed += 1
            return
        last_s: float | None = None
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            if now_s > until_s:
                return
            seen.tokens += 1
            if last_s is not None:
                seen.gaps_s.append(now_s - last_s)
            last_s = now_s
        seen.requests += 1
    finally:
        writer.close()


async def _client(
    number: int, server: tuple[str, str], load: Load, seen: Seen, until: float
) -> None:
    url, model = server
    parts = urlsplit(url)
    count = 0
    while time.perf_counter() < until:
        prompt = [10 + (number * 131 + count * 17 + i) % 4000 for i in range(load.prompt_tokens)]
        count += 1
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        encoded = json.dumps(body).encode()
        await _stream(parts.hostname or "127.0.0.1", parts.port or 80, encoded, seen, until)


async def _run(url: str, model: str, load: Load) -> Seen:
    seen = Seen()
    until_s = time.perf_counter() + load.seconds
    await asyncio.gather(
        *(_client(n, (url, model), load, seen, until_s) for n in range(load.streams))
    )
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What one turn came to."""

    tokens: int
    tokens_per_s: float
    p99_gap_s: float
    requests: int
    failed: int


def run_load(url: str, model: str, load: Load) -> Numbers:
    """Loads a server from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.server_load", "--url", url, "--model", model]
    command += ["--streams", str(load.streams), "--seconds", str(load.seconds), "--json"]
    command += ["--prompt-tokens", str(load.prompt_tokens), "--max-tokens", str(load.max_tokens)]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    return Numbers(**json.loads(finished.stdout.splitlines()[-1]))


def main() -> int:
    """Loads one server once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    load = Load(
        streams=given.streams,
        seconds=given.seconds,
        prompt_tokens=given.prompt_tokens,
        max_tokens=given.max_tokens,
    )
    seen = asyncio.run(_run(given.url, given.model, load))
    numbers = Numbers(
        tokens=seen.tokens,
        tokens_per_s=seen.tokens / load.seconds,
        p99_gap_s=seen.p99_gap_s(),
        requests=seen.requests,
        failed=seen.failed,
    )
    if given.json:
        print(json.dumps(asdict(numbers)))
    else:
        print(
            f"{numbers.tokens_per_s:.1f} tokens/s, 99 % of token gaps below "
            f"{numbers.p99_gap_s * 1e3:.1f} ms, {seen.requests} requests, {seen.failed} failed"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
