"""How SIGTERM and SIGINT end a loop.

Owns the flag and the handlers. `threading.Event` is no flag for handlers: they run in the main
thread between two bytecodes, which may hold the event's lock already. A bare lock, let go of once,
has nothing that could be half done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Protocol


class Stop(Protocol):
    """A request to stop; `threading.Event` is one, for loops that no signal ends."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


class StopFlag:
    """A request to stop that a signal handler may set at any instant."""

    def __init__(self) -> None:
        self._set = False
        self._unset = threading.Lock()
        """Held until the flag is set: who waits for it sleeps until then, and in no slices."""
        self._unset.acquire()

    def set(self) -> None:
        self._set = True
        self._let_go()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        """Sleep `timeout` seconds or until it is set."""
        if not self._set and self._unset.acquire(timeout=max(0.0, timeout)):
            self._let_go()  # for whoever else waits
        return self._set

    def _let_go(self) -> None:
        with contextlib.suppress(RuntimeError):  # who came in between has let go of it
            self._unset.release()


@contextlib.contextmanager
def stop_on_signals(stop: Stop, wake: Callable[[], None] | None = None) -> Generator[None]:
    """Set `stop` on SIGTERM or SIGINT and call `wake` once, for loops that wait for something else.

    No effect outside the main thread, where handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:  # a burst of signals interrupts this very handler
            return
        asked = True
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
