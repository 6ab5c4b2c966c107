"""Where the agent of a run directory answers: the file that says so. Shapes and reading only."""

from __future__ import annotations

from pathlib import Path

import msgspec

ADDRESS_NAME = "agent.json"
"""File in a run directory that says where its agent answers."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in ADDRESS_NAME."""

    url: str
    pid: int


def read_address(run_dir: str | Path) -> Address | None:
    """Where the agent of a run directory answers; None without one, or if it cannot be read."""
    try:
        return msgspec.json.decode((Path(run_dir) / ADDRESS_NAME).read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return None
