"""What a log says of a machine that is slow, and of nothing else: no noise of a request."""

from __future__ import annotations

import re

_TOLD = re.compile(r"this gateway stood still for|recording of \S+ takes more than its budget")


def is_of_the_machine(line: str) -> bool:
    """Whether a line of a log tells that a process did not get the time that it needs."""
    return _TOLD.search(line) is not None
