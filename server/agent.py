"""The recording's agent as a child of the launcher: `pdtrace.agent` over this server's rings.

Owns the mapping from settings to the agent; what it does is `pdtrace.agent.command`'s.
"""

from __future__ import annotations

import os

from pdtrace.agent.command import AgentConfig, HttpConfig, prepare_process, run_agent
from pdtrace.agent.keeping import limits_from
from pdtrace.errors import PdtraceError
from pdtrace.live.stuck import StuckPolicy
from pdtrace.stopping import StopFlag, stop_on_signals
from server.config import NO_AGENT_HTTP, ProcessConfig
from server.errors import StartError
from server.readiness import announce_ready
from server.request import stage_deadlines


def run(config: ProcessConfig) -> None:
    """Write and export what this server's processes record, and tell what is in flight, until
    SIGTERM; with `until_closed` only what those have recorded that are gone.

    Raises StartError when the OTEL_* variables ask for what cannot be done, or the port is taken.
    """
    settings = config.settings
    port = NO_AGENT_HTTP if config.until_closed else settings.agent_port
    prepare_process()
    stop = StopFlag()
    try:
        with stop_on_signals(stop):
            announce_ready(config)
            run_agent(
                settings.rings_path,
                out=settings.run_path,
                stop=stop,
                until_closed=config.until_closed,
                config=AgentConfig(
                    stuck=StuckPolicy(deadlines=stage_deadlines(settings.deadlines)),
                    slo=limits_from(os.environ),
                ),
                http=None if port == NO_AGENT_HTTP else HttpConfig(bind=f"127.0.0.1:{port}"),
            )
    except PdtraceError as error:
        raise StartError(str(error)) from error
