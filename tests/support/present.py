"""The processes that a server has at the moment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of them, as `server.json` has it."""

    instance: str
    role: str
    pid: int
    state: str


def processes_of(run_dir: Path) -> list[Process]:
    """The present process of each instance of `python -m server up`."""
    state = json.loads((run_dir / "server.json").read_text())
    return [
        Process(instance=p["instance"], role=p["role"], pid=int(p["pid"]), state=p["state"])
        for p in state["processes"]
    ]
