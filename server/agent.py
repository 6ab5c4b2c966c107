"""The recording's agent as a child of the launcher: `pdtrace.agent` over this server's rings.

Owns the mapping from settings to the agent; what it does is `pdtrace.agent`'s.
"""

from __future__ import annotations

from pdtrace.agent import run_agent
from pdtrace.errors import PdtraceError
from pdtrace.stopping import StopFlag, stop_on_signals
from server.config import ProcessConfig
from server.errors import StartError


def run(config: ProcessConfig) -> None:
    """Write and export what this server's processes record, until SIGTERM.

    Raises StartError when the OTEL_* variables ask for what cannot be done.
    """
    stop = StopFlag()
    try:
        with stop_on_signals(stop):
            run_agent(config.settings.rings_path, out=config.settings.run_path, stop=stop)
    except PdtraceError as error:
        raise StartError(str(error)) from error
