"""A command line that cannot be understood, told in one line. Knows nothing of what commands do.

Owns the words: what is checked, and by whom, is the options' own.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import typer
from typer.core import TyperGroup

from pdtrace.logtext import one_line

MAX_WAIT_S = 86400.0
"""The longest that options let anything wait: beyond some days clocks of sockets overflow."""
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Not exported by name, and from one library or another as typer's version has it.
_UsageError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)
_NO_PLACE = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP})
_MAX_PATH = 200
_MAX_CHARS = 500
_MAX_VALUE = 100
_INVALID = re.compile(r"^Invalid value for ((?:'[^']*'(?: / )?)+): (?=\S)")
_WORDS = (
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"^Input should be a valid integer\b.*"), "is no whole number"),
    (re.compile(r"^Input should be a valid number\b.*"), "is no number"),
    (re.compile(r" is not a valid integer\b.*"), " is no whole number"),
    (re.compile(r" is not a valid float\b.*"), " is no number"),
    (re.compile(r"^Input should be greater than or equal to (\S+)$"), r"must be \1 or more"),
    (re.compile(r"^Input should be less than or equal to (\S+)$"), r"must be \1 or less"),
)
"""What the library says of a value, by version, and what users read."""


class OneLineUsage(TyperGroup):
    """The commands of a program, for `typer.Typer(cls=)`. `complaint`: what its errors begin with.

    Exit codes: 2 for what cannot be understood, 130 if interrupted before a command began.
    """

    complaint: ClassVar[str] = "error"

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command, and ends the process."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            self._complain(error)
        except typer.Abort:
            code = EXIT_INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)

    def _complain(self, error: Any) -> NoReturn:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # a help page, in place of a command
        else:
            print(f"{self.complaint}: {usage_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def refuse_empty_paths(context: Any, parameters: Iterable[Any], given: Sequence[str]) -> None:
    """Raises a usage error for a path that is empty, which would be the working directory."""
    if any(word and Path(word) == Path() for word in given):
        return  # somebody wrote `.`, and means it
    for parameter in parameters:
        if "" not in given and not any(f"{name}=" in given for name in parameter.opts):
            continue
        value: Any = context.params.get(parameter.name)
        values: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
        is_path = getattr(getattr(parameter, "type", None), "name", None) == "path"  # older typer
        if any(one == Path() or (is_path and one == "") for one in values):
            raise typer.BadParameter("is empty: give a path", ctx=context, param=parameter)


def path_fault(error: OSError) -> str | None:
    """What the system says of a path that a user gave; None for all else."""
    if error.errno not in _NO_PLACE:
        return None
    if not error.filename:
        return str(error)
    return f"{one_line(str(error.filename), _MAX_PATH)}: {error.strerror}"


def usage_line(error: Any) -> str:
    """What is wrong with a command line, and where its help is."""
    message = " ".join(error.format_message().split())
    if match := _INVALID.match(message):
        bare = message[match.end() :]
        for pattern, words in _WORDS:
            bare = pattern.sub(words, bare)
        name = match[1].replace("'", "")
        value = _value(error)
        # The library's own words begin with the value, where they hold it.
        shown = f" {value!r} " if value is not None and not bare.startswith("'") else " "
        message = f"{name}{shown}{bare}".removesuffix(".")
    else:
        message = message[:1].lower() + message[1:].removesuffix(".")
    help_of = "" if error.ctx is None else f"; see {error.ctx.command_path} --help"
    return f"{one_line(message, _MAX_CHARS)}{help_of}"


def _value(error: Any) -> str | None:
    """The value that was given; None where the library does not tell."""
    errors: Any = getattr(error.__cause__, "errors", None)
    found: Any = errors() if callable(errors) else [{}]
    value = found[0].get("input")
    return value[:_MAX_VALUE] if isinstance(value, str) else None
