"""Which workers have not yet said that they took in what they were sent, and which never will.

Owns the verdict: a request that was sent is either named by one of its worker's heartbeats, or was
lost on the way. It is lost once a heartbeat says that the worker has taken in an answer of this
gateway which was sent behind the request, and does not name the request: messages of one sender
come in order. Nothing is lost in a worker that stands still or is in a long step: it takes in
neither. Knows nothing of what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.wire.messages import Heartbeat


@dataclass(frozen=True, slots=True)
class _Sent:
    """`beat`: of the worker's heartbeats, the latest that was answered before."""

    beat: int
    at_s: float


class Acceptance:
    """Requests on their way, by incarnation of a worker.

    accept_s   how long a request may be overtaken by what was sent behind it
    """

    def __init__(self, accept_s: float) -> None:
        self._accept_s = accept_s
        self._sent: dict[str, dict[str, _Sent]] = {}

    def sent(self, incarnation: str, handoff_id: str, *, beat: int, now_s: float) -> None:
        """A request left. `beat`: the worker's latest heartbeat, 0 if there was none."""
        self._sent.setdefault(incarnation, {})[handoff_id] = _Sent(beat, now_s)

    def over(self, incarnation: str, handoff_id: str) -> None:
        """Nobody asks about this one any more."""
        waiting = self._sent.get(incarnation)
        if waiting is not None:
            waiting.pop(handoff_id, None)
            if not waiting:
                del self._sent[incarnation]

    def heard(self, beat: Heartbeat, now_s: float) -> list[str]:
        """Handoffs that `beat` proves to be lost, each told once."""
        incarnation = beat.peer.incarnation
        for handoff_id in beat.taken:
            self.over(incarnation, handoff_id)
        lost = [
            handoff_id
            for handoff_id, sent in self._sent.get(incarnation, {}).items()
            if beat.heard > sent.beat and now_s - sent.at_s >= self._accept_s
        ]
        for handoff_id in lost:
            self.over(incarnation, handoff_id)
        return lost
