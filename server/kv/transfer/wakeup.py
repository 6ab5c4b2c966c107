"""A wake-up that a selector can wait for. Knows nothing of what there is to do after it."""

from __future__ import annotations

import os
import select


class Wakeup:
    """An eventfd. `set` is thread-safe; all else belongs to the thread that waits."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """Readable while set."""
        return self._fd

    def set(self) -> None:
        """Wake the waiter, or keep the next wait from waiting."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget earlier `set` calls."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass  # it was not set

    def wait(self, timeout_s: float) -> None:
        """Return when set, at the latest after `timeout_s`; clears it."""
        if self._poll.poll(max(0.0, timeout_s) * 1000):
            self.clear()

    def close(self) -> None:
        """Idempotent. `set` must not be called afterwards."""
        if self._fd >= 0:
            self._poll.unregister(self._fd)
            os.close(self._fd)
            self._fd = -1
