"""What a schemathesis run does to the requests that it makes up; named by SCHEMATHESIS_HOOKS.

Generations are kept short: how long an answer may get depends on the room that the workers have,
which no schema tells, and thousands of tokens prove no more about its shape than a few.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MOST_TOKENS = 8
_LIMITS = ("max_tokens", "max_completion_tokens")


@schemathesis.hook
def before_call(
    _context: schemathesis.HookContext, case: schemathesis.Case[Any], _options: dict[str, Any]
) -> None:
    """Bound a generation that may be asked for."""
    body: Any = case.body
    if not isinstance(body, dict) or "model" not in body:
        return
    given = [name for name in _LIMITS if body.get(name) is not None]
    for name in given:
        if isinstance(body[name], int) and MOST_TOKENS < body[name] < 2**31:
            body[name] = MOST_TOKENS
    if not given:
        body["max_tokens"] = MOST_TOKENS
