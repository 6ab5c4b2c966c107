"""Ports that a server keeps."""

from __future__ import annotations

import socket

import pytest

from server.config import NO_AGENT_HTTP, Settings
from server.errors import StartError
from server.listening import reserve_agent_port


def listening_on(port: int) -> socket.socket:
    """As the agent does."""
    agent = socket.socket()
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    agent.bind(("127.0.0.1", port))
    agent.listen()
    return agent


def test_kept_port_is_the_agents_and_its_successors_and_nobody_elses() -> None:
    keeper = reserve_agent_port(Settings())
    assert keeper is not None
    with keeper:
        port = keeper.getsockname()[1]
        for _ in range(2):
            with listening_on(port), socket.create_connection(("127.0.0.1", port), timeout=30):
                pass
        # Who does not share it, as a socket that takes any free port, does not get it.
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_port_of_somebody_who_listens_is_refused() -> None:
    with listening_on(0) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 cannot be used .*--agent-"):
            reserve_agent_port(Settings(agent_port=port))


@pytest.mark.parametrize(
    "settings", [Settings(record=False), Settings(agent_port=NO_AGENT_HTTP)], ids=["off", "none"]
)
def test_nothing_is_kept_for_an_agent_that_does_not_answer(settings: Settings) -> None:
    assert reserve_agent_port(settings) is None
