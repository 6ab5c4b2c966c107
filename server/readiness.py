"""How a process tells its launcher that it serves: one byte through a pipe, another before it if
nothing of that will be recorded.

Owns both ends; knows nothing of what serving means for a role, which calls `announce_ready` once it
takes requests. The pipe belongs to one process: what an earlier one said is not taken for its word.
"""

from __future__ import annotations

import contextlib
import os

from server.config import ProcessConfig

_READY = b"+"
_UNRECORDED = b"-"


class ReadyPipe:
    """The launcher's end.

    write_fd    what the process inherits
    unrecorded  whether the process has said that it cannot record
    """

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._ready = False
        self.unrecorded = False

    def close_writer(self) -> None:
        """The process has its own copy, or will never have one. Idempotent."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def is_ready(self) -> bool:
        """Whether the process has said so, now or before."""
        if not self._ready and self._read_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._read_fd, len(_UNRECORDED + _READY))
                self.unrecorded |= _UNRECORDED in said
                self._ready = _READY in said
        return self._ready

    def close(self) -> None:
        """Idempotent; what was said stays known."""
        self.close_writer()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1


def announce_ready(config: ProcessConfig) -> None:
    """Tell the launcher that this process serves. No effect in one that has no launcher."""
    if config.ready_fd is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, and this process soon with it
            os.write(config.ready_fd, _READY)
            os.close(config.ready_fd)


def announce_unrecorded(config: ProcessConfig) -> None:
    """Tell the launcher that this process, once it serves, does so without a recording: its own log
    may be on the disk that is full."""
    if config.ready_fd is not None:
        with contextlib.suppress(OSError):
            os.write(config.ready_fd, _UNRECORDED)
