"""Whether the gateway that sent the requests in flight is still there: from its answers to beats.

Owns the verdict; knows nothing of legs or sockets. A gateway is gone when another incarnation
answers in its place, or when nobody answers for `dead_after_s`. One that never answered a beat is
not watched: the deadlines bound what it left behind.

Beats are answered in their order, whoever does it: what answers an earlier beat than has been
answered is late, and says nothing of who is there now.
"""

from __future__ import annotations

from collections import deque

from server.request import NS_PER_S
from server.silence import Silence
from server.wire.messages import Peer

_REMEMBERED = 64


class GatewayWatch:
    """Watches the one gateway that this worker's beats go to."""

    def __init__(self, *, dead_after_s: float) -> None:
        self._dead_after_ns = round(dead_after_s * NS_PER_S)
        self._present: Peer | None = None
        self._silence = Silence()
        self._retired: deque[str] = deque(maxlen=_REMEMBERED)
        self._latest_beat = -1

    def answered(self, gateway: Peer, beat: int) -> Peer | None:
        """Beat number `beat` was answered by `gateway`; the one whose place it took, if it did.

        One that was replaced and answers while its successor is silent was called so wrongly.
        """
        before = self._present
        if before is not None and before.incarnation == gateway.incarnation:
            self._latest_beat = max(self._latest_beat, beat)
            self._silence.end()
            return None
        if beat <= self._latest_beat:
            return None
        if gateway.incarnation in self._retired:
            if before is not None:
                return None  # sent before it died
            self._retired.remove(gateway.incarnation)
        self._present, self._latest_beat = gateway, beat
        self._silence.end()
        if before is None:
            return None
        self._retired.append(before.incarnation)
        return before

    def wrote(self, gateway: Peer) -> None:
        """A message of `gateway` came: it lives, whatever became of its answers."""
        if self._present is not None and gateway.incarnation == self._present.incarnation:
            self._silence.end()

    def is_retired(self, gateway: Peer) -> bool:
        """Whether another one took the place of `gateway`."""
        return gateway.incarnation in self._retired

    def silent(self, now_ns: int) -> Peer | None:
        """The gateway, if it has not answered for too long; told once. To be called every turn."""
        if self._present is None or self._silence.look(now_ns) <= self._dead_after_ns:
            return None
        silent, self._present = self._present, None
        self._silence.end()
        return silent
