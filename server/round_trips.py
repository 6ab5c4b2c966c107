"""Round trips of heartbeats: which answer belongs to which beat, and what it says of two clocks.

Owns the beats that are under way and the arithmetic; knows nothing of sockets, threads or rings.
One thread sends, another takes in answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from server.wire.messages import HeartbeatAck

MAX_UNDER_WAY = 256
"""Beats whose answer is waited for; the oldest are given up beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """What one heartbeat told of the gateway's clock.

    at_ns       own time half-way between sending and arrival
    offset_ns   the gateway's CLOCK_MONOTONIC less the own one
    error_ns    half of the time on the way: the true offset is within
    """

    peer: str
    peer_clock_id: str
    at_ns: int
    offset_ns: int
    error_ns: int


class RoundTrips:
    """The beats of one process.

    ignored   answers without effect, by why: unknown (late, repeated or of no beat of ours),
              foreign (to another life of the process), absurd (times that cannot be)
    """

    def __init__(self, incarnation: str = "") -> None:
        self.ignored: Counter[str] = Counter()
        self._incarnation = incarnation
        self._sent: dict[int, int] = {}

    def sending(self, seq: int, sent_ns: int) -> None:
        """Beat `seq` is about to leave; `sent_ns` as it says itself."""
        self._sent[seq] = sent_ns
        # Numbers only rise, so what is this old is the oldest.
        self._sent.pop(seq - MAX_UNDER_WAY, None)

    def is_mine(self, ack: HeartbeatAck) -> bool:
        """Whether `ack` speaks to this process: any other says nothing of who its gateway is."""
        return ack.incarnation == self._incarnation

    def answered(self, ack: HeartbeatAck, arrived_ns: int) -> RoundTrip | None:
        """The round trip that `ack` ends, once for each beat; None, and counted, if it ends none.

        arrived_ns   own time at which it came out of the socket
        """
        if not self.is_mine(ack):
            self.ignored["foreign"] += 1
            return None
        sent_ns = self._sent.get(ack.seq)
        if sent_ns is None:
            self.ignored["unknown"] += 1
            return None
        at_gateway = ack.answered_ns - ack.received_ns
        on_the_way = arrived_ns - sent_ns - at_gateway
        if ack.sent_ns != sent_ns or at_gateway < 0 or on_the_way < 0:
            self.ignored["absurd"] += 1
            return None
        self._sent.pop(ack.seq, None)  # the other thread may have given it up just now
        return RoundTrip(
            peer=ack.gateway.instance,
            peer_clock_id=ack.clock_id,
            at_ns=(sent_ns + arrived_ns) // 2,
            offset_ns=(ack.received_ns + ack.answered_ns - sent_ns - arrived_ns) // 2,
            error_ns=on_the_way // 2 + 1,
        )
