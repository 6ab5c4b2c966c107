"""Batches of streamed completions for a running server, and what their clients saw: token gaps.

A batch is a fixed amount of work: `streams` clients at once, each with one request after the other.
It is over when the last answer is. A plain HTTP/1.1 client on asyncio streams: it must not be what
saturates the machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much one batch asks for. Tokens per request."""

    streams: int = 8
    requests: int = 1
    prompt_tokens: int = 64
    max_tokens: int = 16

    @property
    def tokens(self) -> int:
        """Output tokens of a batch in which nothing fails: no answer ends before `max_tokens`."""
        return self.streams * self.requests * self.max_tokens


@dataclass(slots=True, kw_only=True)
class Seen:
    """How long a batch took, and the gaps between the events of one answer. Seconds."""

    wall_s: float = 0.0
    failed: int = 0
    gaps_s: list[float] = field(default_factory=list[float])


async def run_batch(url: str, model: str, load: Load, number: int) -> Seen:
    """Runs one batch. No two numbers share the beginning of a prompt, so that no prefix is cached
    unless thousands of batches ago."""
    seen = Seen()
    begin_s = time.perf_counter()
    await asyncio.gather(
        *(_client(url, model, load, number * load.streams + n, seen) for n in range(load.streams))
    )
    seen.wall_s = time.perf_counter() - begin_s
    return seen


async def _client(url: str, model: str, load: Load, number: int, seen: Seen) -> None:
    for count in range(load.requests):
        first = number * load.requests + count
        prompt = [10 + (first * 131 + i) % 4000 for i in range(load.prompt_tokens)]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        try:
            await _stream(url, json.dumps(body).encode(), seen)
        except OSError:
            seen.failed += 1


async def _stream(url: str, body: bytes, seen: Seen) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
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
        done = False
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                done = done or line.startswith(b"data: [DONE]")
                continue
            now_s = time.perf_counter()
            if last_s is not None:
                seen.gaps_s.append(now_s - last_s)
            last_s = now_s
        seen.failed += not done
    finally:
        writer.close()
