"""The clients of a soak, in a process of their own: `python -m tests.soak.load < PLAN`.

The first line of standard input is the plan; each later one a word: `drop` lets every client that
waits go away at once, `burst N` adds N clients, `stop` begins no more. Each request that is over is
one JSON line on standard output. It ends when all are.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from urllib.parse import urlsplit

import msgspec

from tests.soak.answers import End, Ended, Reading, read_response, what_is_wrong
from tests.soak.traffic import Habits, Question, Sending, next_sending


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """stuck_s   a client waits no longer for anything to come"""

    url: str
    model: str
    seed: int
    stuck_s: float
    habits: Habits
    questions: tuple[Question, ...]


class Clients:
    """All clients of one server."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chance = random.Random(plan.seed)
        self._open: set[asyncio.Task[None]] = set()
        self._go_away = asyncio.Event()
        self._stopping = False

    async def run(self, words: asyncio.StreamReader) -> None:
        """Until told to stop, and every client has left."""
        listener = asyncio.create_task(self._listen(words))
        while not self._stopping:
            if len(self._open) < self._plan.habits.at_once:
                self._begin()
            await asyncio.sleep(self._chance.expovariate(self._plan.habits.rate))
        while self._open:
            await asyncio.wait(self._open)
        await listener

    async def _listen(self, words: asyncio.StreamReader) -> None:
        while line := (await words.readline()).decode().split():
            match line:
                case ["drop"]:
                    self._go_away.set()
                    self._go_away = asyncio.Event()
                case ["burst", number]:
                    for _ in range(int(number)):
                        self._begin()
                case _:
                    break
        self._stopping = True

    def _begin(self) -> None:
        sending = next_sending(self._chance, self._plan.habits, len(self._plan.questions))
        task = asyncio.create_task(self._ask(sending))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _ask(self, sending: Sending) -> None:
        question = self._plan.questions[sending.question]
        begun_s = time.monotonic()
        data = bytearray()
        exchange = asyncio.create_task(self._exchange(sending, question, data))
        leaving = asyncio.create_task(self._go_away.wait())
        wait_s = self._plan.stuck_s if sending.drop_s is None else sending.drop_s
        done, _ = await asyncio.wait(
            {exchange, leaving}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (exchange, leaving):
            task.cancel()
        await asyncio.gather(exchange, leaving, return_exceptions=True)
        if exchange in done:
            reading = read_response(bytes(data), stream=sending.stream)
        elif leaving in done or sending.drop_s is not None:
            reading = Reading(end=End.DROPPED)
        else:
            reading = Reading(end=End.STUCK)
        ended = Ended(
            request_id=sending.request_id,
            question=sending.question,
            stream=sending.stream,
            begun_s=begun_s,
            ended_s=time.monotonic(),
            end=reading.end,
            status=reading.status,
            code=reading.code,
            wrong=what_is_wrong(reading, question.text),
        )
        sys.stdout.write(msgspec.json.encode(ended).decode() + "\n")
        sys.stdout.flush()

    async def _exchange(self, sending: Sending, question: Question, data: bytearray) -> None:
        """Fill `data` until the connection ends, in whatever way."""
        url = urlsplit(self._plan.url)
        body = json.dumps(
            {
                "model": self._plan.model,
                "prompt": question.prompt,
                "max_tokens": question.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": sending.stream,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"X-Request-Id: {sending.request_id}\r\n\r\n"
        )
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head.encode() + body)
            while received := await reader.read(65536):
                data += received
        except OSError:
            return  # what came before says how it ended
        finally:
            if writer is not None:
                writer.close()


async def _main() -> None:
    words = asyncio.StreamReader(limit=1 << 24)  # the plan is one long line
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    plan = msgspec.json.decode(await words.readline(), type=Plan)
    await Clients(plan).run(words)


if __name__ == "__main__":
    asyncio.run(_main())
