"""Which requests a worker has taken in that its gateway may not know of yet.

Owns the list and when a request leaves it; knows nothing of legs or sockets. A request may be lost
on its way while both processes are well. So heartbeats name the requests that have come (`ids`),
each until the gateway has answered a beat that named it, and the latest answer that the loop has
taken in (`heard`). Messages of one sender come in order: a request that was sent before an answer
that is heard, and that no beat names, has not come.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_IDS = 4096
"""Requests named at most. One that is dropped counts as lost at the gateway, and is tried again."""
MAX_UNDER_WAY = 256
"""Beats whose answer is waited for."""


class TakenState(NamedTuple):
    """At one instant. `last`: number of the latest of `ids`, counted from the process's start."""

    heard: int = 0
    last: int = 0
    ids: tuple[str, ...] = ()


class TakenRequests:
    """The loop takes and hears, the heartbeat thread tells."""

    def __init__(self) -> None:
        self.state = TakenState()
        """Replaced as a whole: the other thread never sees half of it."""
        self._ids: deque[tuple[int, str]] = deque(maxlen=MAX_IDS)
        self._count = 0
        self._told: dict[int, int] = {}

    def take(self, handoff_id: str) -> None:
        """A request has come, whatever becomes of it."""
        self._count += 1
        self._ids.append((self._count, handoff_id))
        self._replace(self.state.heard)

    def telling(self, seq: int, state: TakenState) -> None:
        """Beat `seq` is about to leave with `state`."""
        self._told[seq] = state.last
        # Numbers only rise, so what is this old is the oldest.
        self._told.pop(seq - MAX_UNDER_WAY, None)

    def heard(self, seq: int) -> None:
        """The gateway's answer to beat `seq` was taken in."""
        told = self._told.pop(seq, 0)  # the other thread may have given it up just now
        while self._ids and self._ids[0][0] <= told:
            self._ids.popleft()
        self._replace(max(self.state.heard, seq))

    def _replace(self, heard: int) -> None:
        ids = tuple(handoff_id for _, handoff_id in self._ids)
        self.state = TakenState(heard, self._count, ids)
