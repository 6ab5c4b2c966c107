"""The server's agent has a process to itself, as `pdtrace agent` has, and uses it alike."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdtrace.agent import command
from server import agent
from server.config import NO_AGENT_HTTP, ProcessConfig, Settings
from server.process import AGENT

Found = tuple[tuple[int, int, int], int]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Found]]:
    """How the process stands when an agent begins to run in it: collector and open files."""
    threshold, files = gc.get_threshold(), resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.set_threshold(700, 10, 10)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1] - 1, files[1]))
    seen: list[Found] = []

    def run_agent(*_: object, **__: object) -> command.AgentSummary:
        seen.append((gc.get_threshold(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        return command.AgentSummary()

    monkeypatch.setattr(agent, "run_agent", run_agent)
    monkeypatch.setattr(command, "run_agent", run_agent)
    yield seen
    gc.set_threshold(*threshold)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


def test_servers_agent_prepares_its_process_as_the_command_does(
    tmp_path: Path, found: list[Found]
) -> None:
    threshold = gc.get_threshold()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    agent.run(
        ProcessConfig(
            settings=Settings(model="fake", run_dir=str(tmp_path), agent_port=NO_AGENT_HTTP),
            role=AGENT,
            instance=AGENT,
            incarnation="1",
            endpoint="ipc://agent",
            gateway_endpoint="ipc://gateway",
        )
    )
    gc.set_threshold(*threshold)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert command.agent_command(tmp_path) == 0
    servers, commands = found
    assert servers == commands
    assert servers[0] > threshold
    assert servers[1] == hard
