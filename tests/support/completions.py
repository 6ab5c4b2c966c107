"""Requests to a running server, and what came back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx


class Served(Protocol):
    """A server that can be asked; `RunningServer`, `OwnServer`."""

    @property
    def model(self) -> str: ...

    def client(self, *, timeout_s: float = 60.0) -> httpx.Client: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One completion request. `prompt` is text or token ids."""

    prompt: str | Sequence[int] = "hello"
    max_tokens: int = 8
    request_id: str | None = None
    faults: Mapping[str, int] = field(default_factory=dict[str, int])
    stream: bool = False
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`text` is the whole completion; `pieces` the content of each event when streaming.

    A stream that ended in an error event has no finish_reason; the event is the last of `body`.
    """

    status: int
    headers: httpx.Headers
    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    pieces: tuple[str, ...] = ()
    body: Any = None


def ask(server: Served, request: Ask, *, timeout_s: float = 60.0) -> Answer:
    """Send one request to /v1/completions. `faults` becomes the fault header."""
    headers = dict(request.headers)
    if request.request_id is not None:
        headers["X-Request-Id"] = request.request_id
    if request.faults:
        headers["X-PD-Faults"] = ", ".join(f"{k}={v}" for k, v in request.faults.items())
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": request.stream,
        **({"stream_options": {"include_usage": True}} if request.stream else {}),
        **request.more,
    }
    with server.client(timeout_s=timeout_s) as client:
        response = client.post("/v1/completions", json=body, headers=headers)
    if response.status_code != 200:
        return Answer(
            status=response.status_code,
            headers=response.headers,
            text="",
            finish_reason=None,
            usage=None,
            body=response.json(),
        )
    if request.stream:
        return _streamed(response)
    data = response.json()
    choice = data["choices"][0]
    return Answer(
        status=200,
        headers=response.headers,
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        usage=data["usage"],
        body=data,
    )


def _streamed(response: httpx.Response) -> Answer:
    events = [
        line.removeprefix("data: ")
        for line in response.text.split("\n\n")
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    pieces = tuple(choice["text"] for choice in choices if choice["text"])
    return Answer(
        status=response.status_code,
        headers=response.headers,
        text="".join(pieces),
        finish_reason=choices[-1]["finish_reason"] if choices else None,
        usage=next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None),
        pieces=pieces,
        body=chunks,
    )


def ask_all(
    server: Served, requests: Sequence[Ask], *, at_once: int = 8, timeout_s: float = 60.0
) -> list[Answer]:
    """Send `requests` with `at_once` in flight; answers in the same order."""

    def one(request: Ask) -> Answer:
        return ask(server, request, timeout_s=timeout_s)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, requests))
