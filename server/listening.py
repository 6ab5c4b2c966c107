"""The TCP ports of a server: opened, probed, asked whether a generation is possible."""

from __future__ import annotations

import http.client
import socket

from server.config import NO_AGENT_HTTP, Settings
from server.errors import StartError

BACKLOG = 512
"""Connections that wait for the gateway: also while it is being replaced."""


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A socket that listens. Raises StartError, naming `option`, when it cannot."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"host {host!r} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_use(port, host, option, error) from error
    return listener


def free_loopback_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reserve_agent_port(settings: Settings) -> socket.socket | None:
    """A socket that keeps the port where the agent is to answer, a restarted one too; None for
    nowhere. It does not listen, so the agent can; who asks for any free port does not get it.

    Raises StartError when the port that was asked for is taken.
    """
    if not settings.record or settings.agent_port == NO_AGENT_HTTP:
        return None
    keeper = socket.socket()
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", settings.agent_port))
    except OSError as error:
        keeper.close()
        raise _cannot_use(settings.agent_port, "127.0.0.1", "--agent-port", error) from error
    return keeper


def is_ready(host: str, port: int) -> bool:
    """Whether GET /ready answers 200. False while the gateway is not up."""
    connection = http.client.HTTPConnection(host, port, timeout=2.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def reachable_host(host: str) -> str:
    """The address under which this machine reaches a socket bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104


def _cannot_use(port: int, host: str, option: str, error: OSError) -> StartError:
    return StartError(
        f"port {port} on {host} cannot be used ({error.strerror}): choose another with {option}"
    )
