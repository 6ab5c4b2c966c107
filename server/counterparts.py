"""The workers that hold the other legs: when each is asked, and when it counts as gone.

Owns the rhythm and the verdict; knows nothing of legs' states or sockets. Legs tell each other what
happens (`PagesReserved`, `Handoff`, `Abort`); any of that may be lost, and the gateway, which tells
of dead workers, may be dead itself. So workers ask each other what has become of the legs that wait
for one another: an answer repairs what was lost, and none says who is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from server.request import NS_PER_S
from server.silence import Silence
from server.wire.messages import AnyMessage, LegProbe, LegStatus, Peer

MAX_LEGS_PER_PROBE = 512


@dataclass(slots=True)
class _Contact:
    """`silence` since a question was left unanswered, `cut` since none could be sent."""

    silence: Silence = field(default_factory=Silence)
    cut: Silence = field(default_factory=Silence)
    asked: bool = False


class Counterparts:
    """Contacts by incarnation.

    every_s        how often each is asked
    dead_after_s   how long it may be unreachable
    silent_s       how long it may be reachable and not answer: it may be in a long step
    send           False when a message could not be sent
    """

    def __init__(
        self,
        me: Peer,
        *,
        every_s: float,
        dead_after_s: float,
        silent_s: float,
        send: Callable[[Peer, AnyMessage], bool],
    ) -> None:
        self._me = me
        self._every_ns = round(every_s * NS_PER_S)
        self._dead_after_ns = round(dead_after_s * NS_PER_S)
        self._silent_ns = round(silent_s * NS_PER_S)
        self._send = send
        self._contacts: dict[str, _Contact] = {}
        self._asked_ns: int | None = None

    def is_due(self, now_ns: int) -> bool:
        """Whether to ask; if so, not again before the next time."""
        if self._asked_ns is not None and now_ns - self._asked_ns < self._every_ns:
            return False
        self._asked_ns = now_ns
        return True

    def ask(self, peer: Peer, legs: Sequence[LegStatus], now_ns: int) -> str | None:
        """Ask `peer` for its side of `legs`. What makes it count as gone, None if nothing does.

        That is told once: counting begins anew with the legs that come after.
        """
        gone = self._ask(peer, legs, now_ns)
        if gone is not None:
            del self._contacts[peer.incarnation]
        return gone

    def _ask(self, peer: Peer, legs: Sequence[LegStatus], now_ns: int) -> str | None:
        contact = self._contacts.setdefault(peer.incarnation, _Contact())
        sent = True
        for first in range(0, len(legs), MAX_LEGS_PER_PROBE):
            part = tuple(legs[first : first + MAX_LEGS_PER_PROBE])
            sent = self._send(peer, LegProbe(asker=self._me, legs=part)) and sent
        if sent:
            contact.cut.end()
        elif contact.cut.look(now_ns) > self._dead_after_ns:
            return "cannot be reached"
        if contact.asked and contact.silence.look(now_ns) > self._silent_ns:
            return f"has not answered for {self._silent_ns / NS_PER_S:g} s"
        contact.asked = True
        return None

    def heard(self, peer: Peer) -> None:
        """`peer` wrote."""
        contact = self._contacts.get(peer.incarnation)
        if contact is not None:
            contact.asked = False
            contact.silence.end()

    def keep(self, incarnations: Set[str]) -> None:
        """Forget all but these: nothing waits for the others."""
        for incarnation in self._contacts.keys() - incarnations:
            del self._contacts[incarnation]
