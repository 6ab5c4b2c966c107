"""What the overload benchmark makes of answers, against a server that says what it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from benchmarks.bench_overload import Asker, Seen, open_loop

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n{"finish_reason": "length"}  '
CUT = b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"choices": ['
FULL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n"
MUTE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


def asked(answers: Sequence[bytes]) -> Seen:
    """What is seen of a server that gives these answers, in order."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    async def run() -> Seen:
        seen = Seen()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            asker = Asker(f"http://{host}:{port}", "fake")
            for _ in answers:
                await asker.ask(seen, 0.0)
        return seen

    return asyncio.run(run())


def test_answers_are_told_apart() -> None:
    seen = asked([OK, FULL, MUTE, CUT, b""])
    assert seen.statuses == {200: 2, 429: 1, 503: 1}
    assert (len(seen.served_s), len(seen.refused_s)) == (1, 2)
    assert seen.without_retry_after == 1
    assert seen.broken == 2, "an answer that was cut off, and none at all"


def test_goodput_is_of_the_window_behind_its_first_second() -> None:
    seen = Seen(ended_s=[0.5, 1.0, 2.0, 4.9, 5.0, 7.0])
    assert seen.goodput(5.0) == pytest.approx(3 / 4)


def test_requests_arrive_at_the_rate_whether_or_not_they_are_answered() -> None:
    class Counting(Asker):
        async def ask(self, seen: Seen, begin_s: float) -> None:
            del begin_s
            seen.statuses[200] += 1

    seen = asyncio.run(open_loop(Counting("http://x", "m"), 400.0, 0.5, random.Random(1)))
    assert 150 <= seen.statuses[200] <= 250
