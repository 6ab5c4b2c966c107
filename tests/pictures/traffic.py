"""Sends the requests of a scenario to a real server, and does harm to it.

Owns pacing, and when harm is done; what is asked stands in `tests.pictures.scenario`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncGenerator, Callable, Sequence

import httpx

from server.faults import HEADER
from server.injection.fault import Corrupt, Damage
from tests.pictures.scenario import HELD, HELD_MS, RATE, STALL_MS, Ask, Harm, Phase, next_ask
from tests.support.injection import clear, inject
from tests.support.server import RunningServer

_SEED = 11
_TIMEOUT_S = 90.0
_KILLED = "decode-1"
_RETRIED_EVERY_S = 6.0
_FAILING_S = 4.0


@contextlib.asynccontextmanager
async def _client(server: RunningServer) -> AsyncGenerator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        yield client


async def play(server: RunningServer, phases: Sequence[Phase], say: Callable[[str], None]) -> None:
    """All phases, one after the other, and every answer."""
    rng = random.Random(_SEED)
    left_s = sum(phase.seconds for phase in phases)
    async with _client(server) as client, asyncio.TaskGroup() as open_requests:
        for number, phase in enumerate(phases, 1):
            say(f"{number}/{len(phases)} {phase.says} ({left_s:.0f} s to go)")
            harm = asyncio.create_task(_harm(server, phase))
            loop = asyncio.get_running_loop()
            end_s = loop.time() + phase.seconds
            while loop.time() < end_s:
                open_requests.create_task(_send(client, server.model, next_ask(phase, rng)))
                await asyncio.sleep(min(rng.expovariate(RATE), 2.0))
            await harm
            left_s -= phase.seconds


@contextlib.asynccontextmanager
async def held(server: RunningServer) -> AsyncGenerator[None]:
    """With requests in flight, a while old, in a stage of each role."""
    async with _client(server) as client:
        held = [
            asyncio.create_task(
                _send(
                    client, server.model, Ask(prompt="one two", max_tokens=8, stage=stage), HELD_MS
                )
            )
            for stage in HELD
        ]
        await asyncio.sleep(HELD_MS / 2000)
        yield
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def _send(client: httpx.AsyncClient, model: str, ask: Ask, stall_ms: int = STALL_MS) -> None:
    """To the end of the answer, whatever it is: what became of it is for the boards to tell."""
    body = {"model": model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": True}
    headers = {HEADER: f"{ask.stage}={stall_ms}"} if ask.stage else {}
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with (
            asyncio.timeout(ask.leaves_s),
            client.stream(
                "POST", "/v1/completions", json={} if ask.is_wrong else body, headers=headers
            ) as answer,
        ):
            await answer.aread()


async def _harm(server: RunningServer, phase: Phase) -> None:
    match phase.harm:
        case Harm.NONE:
            pass
        case Harm.COPY_FAILS:
            for _ in range(int(phase.seconds / _RETRIED_EVERY_S)):
                await asyncio.to_thread(inject, server, Corrupt(copy=Damage.SHORT))
                await asyncio.sleep(_RETRIED_EVERY_S)
        case Harm.COPIES_FAIL:
            for _ in range(2):
                await asyncio.sleep(phase.seconds / 5)
                await asyncio.to_thread(inject, server, Corrupt(copy=Damage.SHORT, count=None))
                await asyncio.sleep(_FAILING_S)
                await asyncio.to_thread(clear, server)
        case Harm.WORKER_ENDS:
            await asyncio.sleep(phase.seconds / 4)
            pid = server.send_signal(_KILLED, signal.SIGKILL)
            await asyncio.to_thread(server.wait_for_successor, _KILLED, pid, timeout_s=_TIMEOUT_S)
