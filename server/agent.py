"""The recording's agent as a child of the launcher: `pdtrace.agent` over this server's rings.

Owns the mapping from settings to the agent; what it does is `pdtrace.agent`'s.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from pdtrace.agent import run_agent
from pdtrace.errors import PdtraceError
from server.config import ProcessConfig
from server.errors import StartError


def run(config: ProcessConfig) -> None:
    """Write and export what this server's processes record, until SIGTERM.

    Raises StartError when the OTEL_* variables ask for what cannot be done.
    """
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    try:
        run_agent(config.settings.rings_path, out=config.settings.run_path, stop=stop)
    except PdtraceError as error:
        raise StartError(str(error)) from error
