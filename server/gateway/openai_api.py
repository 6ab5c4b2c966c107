"""OpenAI request bodies: bytes in, a checked `GenerationRequest` out.

Owns field names, ranges and what is refused; knows nothing of tokens, HTTP headers or workers. One
source for validation and for the API description (`server.gateway.openapi`).

A parameter that would change the output and is not implemented is refused unless it has a value
that changes nothing (`UNSUPPORTED`); so is one that nobody knows, unless it is null. What cannot
change the output is accepted (`WITHOUT_EFFECT`). Unknown fields of messages are ignored: clients
send back answers as they got them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from server.engine.base import SamplingParams
from server.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 100
"""Of an unknown parameter's name in the answer."""
UNSUPPORTED_PARAMETER = "unsupported_parameter"
_SEED_BITS = 63
_PromptT = TypeVar("_PromptT", str, list[int])


class Operation(StrEnum):
    """`gen_ai.operation.name` of the endpoint."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


class _Body(msgspec.Struct, kw_only=True):
    """Base of request bodies. Unknown fields are ignored."""


class StreamOptions(_Body):
    """`continuous_usage_stats`, which extends OpenAI's API: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class Message(_Body):
    """One turn of a chat. `developer` means `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class GenerationBody(_Body):
    """Fields that both endpoints share. `top_k` and `ignore_eos` extend OpenAI's API."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions. One prompt: text, a list of one text, or token ids."""

    # Which of these shapes are one prompt, `parse_request` decides.
    prompt: str | list[str | TokenId | list[TokenId]]


BODIES: Mapping[Operation, type[ChatBody] | type[CompletionBody]] = {
    Operation.CHAT: ChatBody,
    Operation.TEXT_COMPLETION: CompletionBody,
}
_COMMON_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
}
UNSUPPORTED: Mapping[Operation, Mapping[str, tuple[object, ...]]] = {
    Operation.CHAT: {
        **_COMMON_UNSUPPORTED,
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "web_search_options": (None,),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
    },
    Operation.TEXT_COMPLETION: {
        **_COMMON_UNSUPPORTED,
        "logprobs": (None,),
        "echo": (None, False),
        "suffix": (None, ""),
        "response_format": (None, {"type": "text"}),
    },
}
"""Parameters that are refused, and the values with which they change nothing."""
WITHOUT_EFFECT = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("metadata", "store", "service_tier", "parallel_tool_calls"),
    }
)
"""Parameters of OpenAI's API with which the answer is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that is well-formed; whether it fits the model's context is checked later.

    prompt          chat messages, text, or token ids
    max_tokens      None: as many as the context holds
    stop            distinct, in the caller's order
    include_usage   a last chunk with the usage, when streaming
    usage_so_far    the usage so far in every chunk, when streaming
    """

    operation: Operation
    model: str
    prompt: list[Message] | str | tuple[int, ...]
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    usage_so_far: bool


def parse_request(
    operation: Operation, body: bytes | bytearray, *, served_name: str
) -> GenerationRequest:
    """The request in `body`. Raises InvalidRequest naming the offending field."""
    raw = _decode_json(body)
    # First what the caller asked for and cannot get: it explains more than a type error would.
    _check_count(raw)
    _refuse_unsupported(operation, raw)
    _refuse_unknown(operation, raw)
    raw = {name: _whole(value) for name, value in raw.items()}
    try:
        fields = msgspec.convert(raw, BODIES[operation])
    except msgspec.ValidationError as error:
        raise _as_invalid(error) from error
    if fields.model != served_name:
        raise InvalidRequest(
            f"The model `{fields.model[:200]}` does not exist: this server serves `{served_name}`.",
            param="model",
            code="model_not_found",
            status=404,
        )
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise InvalidRequest(
            "stream_options is allowed only when stream is true.", param="stream_options"
        )
    options = fields.stream_options or StreamOptions()
    if isinstance(fields, ChatBody):
        prompt: list[Message] | str | tuple[int, ...] = fields.messages
        max_tokens = _max_tokens(fields.max_tokens, fields.max_completion_tokens)
    else:
        prompt = _completion_prompt(fields.prompt)
        max_tokens = fields.max_tokens
    return GenerationRequest(
        operation=operation,
        model=fields.model,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(fields),
        stop=_stop(fields.stop),
        ignore_eos=bool(fields.ignore_eos),
        stream=stream,
        include_usage=bool(options.include_usage),
        usage_so_far=bool(options.continuous_usage_stats),
    )


def _decode_json(body: bytes | bytearray) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("The request body is empty, expected a JSON object.")
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The request body is nested too deeply.") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("The request body is not a JSON object.")
    return cast("dict[str, Any]", raw)


def _check_count(raw: Mapping[str, Any]) -> None:
    n = raw.get("n")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise InvalidRequest("n is out of range, expected 1.", param="n")


def _refuse_unsupported(operation: Operation, raw: Mapping[str, Any]) -> None:
    for name, harmless in UNSUPPORTED[operation].items():
        if name in raw and not any(_same(raw[name], value) for value in harmless):
            allowed = ", ".join(msgspec.json.encode(value).decode() for value in harmless)
            raise InvalidRequest(
                f"{name} is not supported by this server: leave it out (allowed: {allowed}).",
                param=name,
                code=UNSUPPORTED_PARAMETER,
            )


def _refuse_unknown(operation: Operation, raw: Mapping[str, Any]) -> None:
    known = {*BODIES[operation].__struct_fields__, *UNSUPPORTED[operation], *WITHOUT_EFFECT}
    unknown = [name for name, value in raw.items() if name not in known and value is not None]
    options = raw.get("stream_options")
    if isinstance(options, dict):
        unknown += [
            f"stream_options.{name}"
            for name, value in cast("dict[str, Any]", options).items()
            if name not in StreamOptions.__struct_fields__ and value is not None
        ]
    if unknown:
        name = unknown[0][:MAX_NAME_CHARS]
        raise InvalidRequest(
            f"{name} is no parameter that this server knows: leave it out.",
            param=name,
            code=UNSUPPORTED_PARAMETER,
        )


def _same(value: object, harmless: object) -> bool:
    """Equality as JSON has it: true is not 1."""
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless


_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


def _as_invalid(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec names the place as a JSON path; OpenAI's errors name it as `param`."""
    text = str(error)
    place = _PATH.search(text)
    param = place["path"] if place else ""
    message = _PATH.sub("", text)
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidRequest(f"Missing required parameter: {param}.", param=param)
    where = f"Invalid value for {param}" if param else "Invalid request"
    return InvalidRequest(f"{where}: {message}.", param=param or None)


def _max_tokens(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    if max_tokens is not None and max_completion_tokens is not None:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens cannot be given together.",
            param="max_completion_tokens",
        )
    return max_tokens if max_completion_tokens is None else max_completion_tokens


def _whole(value: Any, *, lists: int = 2) -> Any:
    """Numbers without a fraction as integers, alone or in lists: to JSON, 1.0 is one.

    lists   how many of them, one inside the other; no parameter has more
    """
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_whole(item, lists=lists - 1) for item in items] if lists else items
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _completion_prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return _nonempty(prompt)
    if not prompt:
        raise InvalidRequest("prompt is empty, expected text or token ids.", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return tuple(cast("list[int]", prompt))
    if len(prompt) > 1:
        raise InvalidRequest(
            "prompt holds several prompts, or mixes text and token ids: send one per request.",
            param="prompt",
            code=UNSUPPORTED_PARAMETER,
        )
    (only,) = prompt
    if isinstance(only, list):
        return tuple(_nonempty(only))
    return _nonempty(cast("str", only))


def _nonempty(prompt: _PromptT) -> _PromptT:
    if not prompt:
        raise InvalidRequest("prompt is empty, expected text or token ids.", param="prompt")
    return prompt


def _sampling(fields: GenerationBody) -> SamplingParams:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    if top_p == 0:
        # Only the likeliest token is left: greedy, which the engine has a word for.
        temperature, top_p = 0.0, 1.0
    seed = secrets.randbits(_SEED_BITS) if fields.seed is None else fields.seed
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, fields.top_k or 0),  # -1 is another common way to say off
        seed=seed & ((1 << _SEED_BITS) - 1),
    )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
