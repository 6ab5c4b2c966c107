"""Chat messages to prompt text by the model's own Jinja template, in a sandbox.

Owns rendering; token ids and special tokens are `server.tokenizer`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.engine.errors import ChatTemplateError


def flatten_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Copies of `messages` in which content is one string.

    Content given as a list of OpenAI text parts is joined; None (an assistant turn that only
    calls tools) becomes "". Raises ValueError for no messages, a missing or non-string role, and
    parts that are not text.
    """
    if not messages:
        raise ValueError("messages is empty, expected at least one")
    flat: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            # Here and below: a client's bad value, not a programmer's bad type.
            raise ValueError(f"messages[{index}].role is missing or not a string")  # noqa: TRY004
        content = _content_text(message.get("content"), index)
        flat.append({**message, "content": content})
    return flat


def _content_text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(  # noqa: TRY004
            f"messages[{index}].content is not a string or a list of text parts"
        )
    texts: list[str] = []
    for part in cast("Sequence[object]", content):
        fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            raise ValueError(f"messages[{index}].content has a part that is not text")
        texts.append(text)
    return "".join(texts)


class ChatTemplate:
    """A compiled template. Templates come with model files, so they run sandboxed."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        environment.globals.update(names)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is invalid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Prompt text that ends where the assistant's answer begins.

        Raises ChatTemplateError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None
            )
        except (TemplateError, TypeError, KeyError, ArithmeticError, ValueError) as error:
            raise ChatTemplateError(
                f"the model's chat template refuses the messages: {error}"
            ) from error


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
