"""A server joins a stack: its agent exports there, and Prometheus learns whom to scrape.

Owns which variable is set and which lists of targets are written; a server that joins nothing runs
without any of this.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server.errors import StartError
from server.stack.plan import AGENT_JOB, GATEWAY_JOB, run_dir_of, target_list
from server.stack.programs import JAEGER
from server.stack.state import StackState, read_state

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SERVER_STATE = "server.json"


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that is up, seen from a server."""

    folder: Path
    state: StackState

    @property
    def jaeger_url(self) -> str:
        return self.state.url(JAEGER)

    def export_here(self, environment: MutableMapping[str, str]) -> bool:
        """Let the agent export to this stack; False if the user said otherwise."""
        said = (*_ENDPOINTS, "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED")
        if any(environment.get(name) for name in said):
            return False
        environment[_ENDPOINTS[0]] = self.state.otlp
        return True

    def measure_alike(self, environment: MutableMapping[str, str]) -> None:
        """Let histograms have the edges that the stack's rules ask for, unless the user said
        otherwise."""
        for name, value in self.state.environment.items():
            environment.setdefault(name, value)

    def add(self, run_dir: Path, *, url: str, agent_url: str | None) -> None:
        """Have a server scraped, and those no more that were killed. Raises StartError when that
        cannot be written."""
        try:
            self._forget_the_dead()
            for job, where in ((GATEWAY_JOB, url), (AGENT_JOB, agent_url)):
                if where is None:
                    continue
                parts = urlsplit(where)
                text = target_list(parts.hostname or "", parts.port or 80, run_dir=run_dir)
                path = self._list(job, run_dir)
                temporary = path.with_suffix(".new")
                temporary.write_text(text)
                temporary.replace(path)
        except OSError as error:
            raise StartError(f"cannot write {error.filename}: {error.strerror}") from error

    def remove(self, run_dir: Path) -> None:
        """Nobody is there to be scraped any more."""
        for job in (GATEWAY_JOB, AGENT_JOB):
            self._list(job, run_dir).unlink(missing_ok=True)

    def _forget_the_dead(self) -> None:
        for path in (self.folder / "targets").glob("pdtrace-*.json"):
            run_dir = run_dir_of(path.read_text())
            if run_dir is None or _running_server(run_dir / _SERVER_STATE) is None:
                path.unlink(missing_ok=True)

    def _list(self, job: str, run_dir: Path) -> Path:
        name = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
        return self.folder / "targets" / f"{job}-{name}.json"


def find_stack(folder: Path) -> Stack | None:
    """The stack of a folder if it is up."""
    state = read_state(folder)
    return Stack(folder, state) if state is not None and state.is_up else None


def add_running_servers(stack: Stack, runs: Path) -> list[str]:
    """Have the servers scraped that run already; their addresses. Their agents export where they
    were told to when they were started."""
    found: list[str] = []
    for path in sorted(runs.glob(f"*/{_SERVER_STATE}")):
        if path.parent.is_symlink():
            continue
        server = _running_server(path)
        if server is not None:
            stack.add(path.parent, url=server["url"], agent_url=server["agent_url"])
            found.append(server["url"])
    return found


def _running_server(path: Path) -> Mapping[str, Any] | None:
    try:
        server: Mapping[str, Any] = json.loads(path.read_text())
        if not server["ready"]:
            return None
        os.kill(server["pid"], 0)
    except (OSError, ValueError, KeyError):
        return None
    return server
