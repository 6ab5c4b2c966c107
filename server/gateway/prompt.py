"""A request's prompt as token ids, and how many tokens may follow it.

Owns tokenization off the event loop and the fit into the context; knows nothing of HTTP.

What fits: prompt + max_tokens ≤ context, at equality too. A prompt that fills the context leaves
room for no token and is refused, like a longer one. Without max_tokens the output may fill the
context. The context is the model's, or less where no worker's KV pool holds as much.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from server.engine.base import ModelInfo
from server.errors import InvalidRequest
from server.gateway.openai_api import GenerationRequest, Message
from server.gateway.registry import KvCapacity
from server.tokenizer import Tokenizer

INLINE_CHARS = 4_000
"""Longer prompts are tokenized in a thread: below it, the hand-over costs more than the work."""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_DIGEST_BYTES = 16


class PromptEncoder:
    """Tokenizes prompts; `close` ends its thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # One thread: a second would only take the interpreter from the event loop more often.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    async def encode(self, request: GenerationRequest) -> tuple[int, ...]:
        """Token ids of the prompt. Raises InvalidRequest when the model cannot take it."""
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return self._checked_ids(prompt)
        if _num_chars(prompt) <= INLINE_CHARS:
            return self._encode(prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode, prompt)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: str | list[Message]) -> tuple[int, ...]:
        param = "prompt" if isinstance(prompt, str) else "messages"
        try:
            if isinstance(prompt, str):
                token_ids = self._tokenizer.encode(prompt)
            else:
                token_ids = self._tokenizer.encode_chat([_plain(message) for message in prompt])
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens.", param=param)
        return tuple(token_ids)

    def _checked_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        largest = max(token_ids)
        if largest >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"prompt has token id {largest}, the vocabulary ends at "
                f"{self._tokenizer.vocab_size - 1}.",
                param="prompt",
            )
        return tuple(token_ids)


def output_budget(
    prompt_len: int, max_tokens: int | None, *, model: ModelInfo, capacity: KvCapacity, param: str
) -> int:
    """How many tokens the request may generate, at least 1. Raises InvalidRequest."""
    limit = min(model.context_length, capacity.total_tokens or model.context_length)
    longest = min(limit - 1, capacity.prompt_tokens or limit)
    if prompt_len > longest:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens, of which a prompt may take "
            f"{longest}. However, your {param} resulted in {prompt_len} tokens.",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    if max_tokens is None:
        return limit - prompt_len
    if prompt_len + max_tokens > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_len + max_tokens} tokens ({prompt_len} in the {param}, {max_tokens} in the "
            "completion).",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return max_tokens


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Digest by which both legs check that they speak of the same prompt, hex."""
    return blake2b(array("Q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


def _num_chars(prompt: str | list[Message]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(_text(message)) for message in prompt)


def _plain(message: Message) -> dict[str, object]:
    """What chat templates know: `developer` is the newer name of `system`."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, object] = {"role": role, "content": _text(message)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)
