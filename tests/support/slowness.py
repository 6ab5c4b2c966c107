"""What logs and a launcher say of a machine that is slow, and of nothing else: no noise."""

from __future__ import annotations

import re

_TOLD = re.compile(
    r"this gateway stood still for|recording of \S+ takes more than its budget|^starting: .* s$"
)


def is_of_the_machine(line: str) -> bool:
    """Whether a line tells that a process did not get the time that it needs."""
    return _TOLD.search(line) is not None
