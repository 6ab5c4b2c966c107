"""Commands as all here are: help pages whose sentences and option names are whole, and no empty
paths (`pdtrace.terminal.usage`). Knows nothing of what they say and do.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from pdtrace.terminal.usage import refuse_empty_paths

_OPTION = re.compile(r"--[a-z][a-z-]*")
_UNBROKEN = "\N{NON-BREAKING HYPHEN}"


class WholeWords(TyperCommand):
    """A command, for `typer.Typer.command(cls=)`.

    Lines of a help page are broken at spaces and at hyphens: `--prefill-` at the end of one line is
    no option that exists.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for part in (self, *self.params):
            help_text = getattr(part, "help", None)
            if isinstance(help_text, str):
                setattr(part, "help", _OPTION.sub(_unbroken, help_text))  # noqa: B010 - any kind
        if self.epilog:
            self.epilog = _OPTION.sub(_unbroken, self.epilog)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As any command does, but for paths that are empty."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        refuse_empty_paths(ctx, self.params, given)
        return rest

    def get_short_help_str(self, limit: int = 45) -> str:
        """Its line in the list of commands."""
        return _first_sentence(self)

    def get_help(self, ctx: Any) -> str:
        """The page, with the hyphens that users type."""
        return super().get_help(ctx).replace(_UNBROKEN, "-")


class WholeWordsGroup(TyperGroup):
    """A group of commands within another, for `typer.Typer(cls=)`."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Its line in the list of commands."""
        return _first_sentence(self)


def _first_sentence(command: TyperCommand | TyperGroup) -> str:
    """The whole of it, over as many lines as it takes: a sentence that is cut helps nobody."""
    paragraph = " ".join((command.short_help or command.help or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0].replace(_UNBROKEN, "-")


def _unbroken(match: re.Match[str]) -> str:
    return match[0].replace("-", _UNBROKEN)
