"""What every server process does when it begins and ends, whatever it serves.

Owns opening its recorder and turning SIGTERM and SIGINT into a stop; knows nothing of loops.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

from pdtrace.errors import PdtraceError
from pdtrace.recorder import Recorder
from pdtrace.stages import Role
from server.config import ProcessConfig
from server.errors import StartError

_logger = logging.getLogger(__name__)


def open_recorder(config: ProcessConfig, role: Role) -> Recorder:
    """The process's recorder, disabled where settings say so. Raises StartError."""
    if not config.settings.record:
        return Recorder.disabled()
    rings = config.settings.rings_path
    try:
        return Recorder.open(rings, role=role, instance=config.instance)
    except PdtraceError as error:
        raise StartError(f"{config.instance} cannot record in {rings}: {error}") from error


@contextlib.contextmanager
def stop_on_signals(
    stop: threading.Event, wake: Callable[[], None] | None = None
) -> Generator[None]:
    """Set `stop` on SIGTERM or SIGINT and call `wake`, for loops that wait for something else."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a worker in a thread is stopped by `stop`
        return

    def request_stop(number: int, _frame: FrameType | None) -> None:
        _logger.info("received %s", signal.Signals(number).name)
        stop.set()
        if wake is not None:
            wake()

    previous = {
        number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
