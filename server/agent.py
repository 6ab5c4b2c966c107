"""The recording's agent as a child of the launcher: `pdtrace.agent` over this server's rings.

Owns the mapping from settings to the agent; what it does is `pdtrace.agent`'s.
"""

from __future__ import annotations

import signal
import threading

from pdtrace.agent import Agent, RollingJudge
from server.config import ProcessConfig


def run(config: ProcessConfig) -> None:
    """Export what this server's processes record until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    agent = Agent(config.settings.rings_path, out=config.settings.run_path, judge=RollingJudge())
    try:
        agent.run(stop)
    finally:
        agent.close()
