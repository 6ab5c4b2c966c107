"""How a process tells its launcher that it serves: one byte through a pipe.

Owns both ends; knows nothing of what serving means for a role, which calls `announce_ready` once it
takes requests. The pipe belongs to one process: what an earlier one said is not taken for its word.
"""

from __future__ import annotations

import contextlib
import os

from server.config import ProcessConfig


class ReadyPipe:
    """The launcher's end. `write_fd` is what the process inherits."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._ready = False

    def close_writer(self) -> None:
        """The process has its own copy, or will never have one. Idempotent."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def is_ready(self) -> bool:
        """Whether the process has said so, now or before."""
        if not self._ready and self._read_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                self._ready = len(os.read(self._read_fd, 1)) == 1
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
            os.write(config.ready_fd, b"+")
            os.close(config.ready_fd)
