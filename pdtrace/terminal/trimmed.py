"""Output without blanks at the ends of lines, for pipes and files. Knows nothing of what is shown.

Tables are padded to their width: on a terminal nobody sees that, in a ticket or a diff everybody.
"""

from __future__ import annotations

import re
from typing import IO, Any, cast

_BLANKS = re.compile(r" +(?=\n)")


def trimmed(stream: IO[str]) -> IO[str]:
    """The stream itself if it is a terminal, else one that leaves out blanks at the ends of lines.

    Lines have to be written whole, as a `rich.console.Console` does.
    """
    return stream if stream.isatty() else cast("IO[str]", _Trimmed(stream))


class _Trimmed:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_BLANKS.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
