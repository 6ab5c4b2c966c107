"""Commands that are shown to people: each does what it says when it is copied into their shell.

They are for the folder in which the program was started, which need not be a checkout.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_HERE = Path(".venv/bin")


def python(*words: object) -> str:
    """This Python with arguments."""
    return _command(_own("python") or sys.executable, *words)


def pdtrace(*words: object) -> str:
    """`pdtrace` with arguments."""
    own = _own("pdtrace")
    return python("-m", "pdtrace", *words) if own is None else _command(own, *words)


def _own(name: str) -> str | None:
    """As pages write it, where that is what runs."""
    path = _HERE / name
    ours = path.is_file() and _HERE.resolve() == Path(sys.executable).parent.resolve()
    return str(path) if ours else None


def _command(*words: object) -> str:
    return shlex.join(map(str, words))
