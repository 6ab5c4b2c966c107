"""OpenAI response bodies and server-sent events, as bytes ready to be written.

Owns shapes; knows nothing of tokens, sockets or when something is sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from server.errors import RequestError
from server.gateway.openai_api import Operation

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. `cached_tokens` of the prompt were in a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON has no raw line ends, so it is one `data:` line."""
    return b"data: " + _encode(body) + b"\n\n"


class ChatBodies:
    """Bodies of one POST /v1/chat/completions.

    include_usage   every chunk has a `usage` field, null but for the last one's
    usage_now       what it is in every chunk instead of null: the usage so far
    """

    def __init__(
        self,
        *,
        model: str,
        created_s: int,
        fingerprint: str,
        include_usage: bool,
        usage_now: Callable[[], Usage] | None = None,
    ) -> None:
        self._include_usage = include_usage
        self._usage_now = usage_now
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def opening(self) -> bytes:
        """The event that names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, text: str) -> bytes:
        return self._chunk({"content": text}, None)

    def finish(self, reason: str) -> bytes:
        return self._chunk({}, reason)

    def usage(self, usage: Usage) -> bytes:
        return event(
            {
                **self._head,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": usage.body(),
            }
        )

    def whole(self, text: str, reason: str, usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        return _encode(
            {
                **self._head,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text, "refusal": None},
                        "logprobs": None,
                        "finish_reason": reason,
                    }
                ],
                "usage": usage.body(),
            }
        )

    def _chunk(self, delta: dict[str, str], reason: str | None) -> bytes:
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }
        if self._usage_now is not None:
            body["usage"] = self._usage_now().body()
        elif self._include_usage:
            body["usage"] = None
        return event(body)


class CompletionBodies:
    """Bodies of one POST /v1/completions; see `ChatBodies`."""

    def __init__(
        self,
        *,
        model: str,
        created_s: int,
        fingerprint: str,
        include_usage: bool,
        usage_now: Callable[[], Usage] | None = None,
    ) -> None:
        self._include_usage = include_usage
        self._usage_now = usage_now
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def opening(self) -> bytes:
        """Text completions have no role to name."""
        return b""

    def delta(self, text: str) -> bytes:
        return self._chunk(text, None)

    def finish(self, reason: str) -> bytes:
        return self._chunk("", reason)

    def usage(self, usage: Usage) -> bytes:
        return event({**self._head, "choices": [], "usage": usage.body()})

    def whole(self, text: str, reason: str, usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        return _encode({**self._head, "choices": [_choice(text, reason)], "usage": usage.body()})

    def _chunk(self, text: str, reason: str | None) -> bytes:
        body: dict[str, Any] = {**self._head, "choices": [_choice(text, reason)]}
        if self._usage_now is not None:
            body["usage"] = self._usage_now().body()
        elif self._include_usage:
            body["usage"] = None
        return event(body)


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}


Bodies = ChatBodies | CompletionBodies
BODIES: Mapping[Operation, type[ChatBodies] | type[CompletionBodies]] = {
    Operation.CHAT: ChatBodies,
    Operation.TEXT_COMPLETION: CompletionBodies,
}


def error_type(status: int) -> str:
    """OpenAI's coarse class of an error; `code` is the precise one."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(error: RequestError) -> dict[str, Any]:
    """`{"error": …}` in OpenAI's shape."""
    return {
        "error": {
            "message": str(error),
            "type": error_type(error.http_status),
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    }


def model_body(name: str, *, created_s: int, context_length: int) -> dict[str, Any]:
    """One entry of GET /v1/models. `context_length` extends OpenAI's shape."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "pdtrace",
        "context_length": context_length,
    }


def json_bytes(body: object) -> bytes:
    return _encode(body)
