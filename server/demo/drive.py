"""Sends the demo's requests with the `openai` client, as any application would.

Owns pacing and what the client saw; knows nothing of verdicts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI, OpenAIError

from server.demo.scenario import DemoRequest
from server.faults import HEADER

REQUEST_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientView:
    """What the client measured. Times are seconds; `error` is None for a complete answer."""

    request_id: str
    first_token_s: float | None
    total_s: float
    num_chunks: int
    error: str | None = None


async def send(client: AsyncOpenAI, model: str, request: DemoRequest) -> ClientView:
    """Send one request and read its stream to the end. Errors are part of the answer."""
    headers = {"X-Request-Id": request.request_id}
    if request.faults:
        headers[HEADER] = request.fault_header
    begin = time.monotonic()
    first: float | None = None
    num_chunks = 0
    error: str | None = None
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": request.prompt}],
            max_tokens=request.max_tokens,
            temperature=0,
            stream=True,
            extra_headers=headers,
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic()
                num_chunks += 1
    except OpenAIError as failure:
        error = str(failure) or type(failure).__name__
    return ClientView(
        request_id=request.request_id,
        first_token_s=None if first is None else first - begin,
        total_s=time.monotonic() - begin,
        num_chunks=num_chunks,
        error=error,
    )


async def play(
    url: str,
    model: str,
    requests: Sequence[DemoRequest],
    *,
    at_once: int,
    apart_s: float,
    on_done: Callable[[ClientView], None],
) -> list[ClientView]:
    """Send `requests` in order, at least `apart_s` seconds apart and at most `at_once` in flight;
    wait for all answers."""
    # A retry by the client would be a request of its own in the recording.
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
    ) as client:
        places = asyncio.Semaphore(at_once)

        async def one(request: DemoRequest) -> ClientView:
            try:
                view = await send(client, model, request)
            finally:
                places.release()
            on_done(view)
            return view

        tasks: list[asyncio.Task[ClientView]] = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await places.acquire()
                tasks.append(group.create_task(one(request)))
                await asyncio.sleep(apart_s)
        return [task.result() for task in tasks]
