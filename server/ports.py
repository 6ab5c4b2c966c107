"""What a scheduler is connected to: messages in and out, the recording, the clock, its heartbeat.

Owns the seams; a test puts doubles behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdtrace.recorder import Recorder
from server.heartbeat import Progress
from server.pauses import never_paused
from server.round_trips import RoundTrips
from server.taken import TakenRequests
from server.wire.messages import AnyMessage
from server.wire.sockets import Received


class MessageSource(Protocol):
    """Where messages come from; `server.wire.sockets.Inbox`."""

    def get(self, timeout_s: float) -> Received | None: ...

    def drain(self) -> list[Received]: ...


class MessageSink(Protocol):
    """Where messages go; `server.wire.sockets.Outbox`. False: dropped, the peer is unreachable."""

    def send(self, endpoint: str, message: AnyMessage) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Of one scheduler. `clock` reads CLOCK_MONOTONIC nanoseconds.

    taken    requests that the heartbeat names
    pauses   begin and end of the times, overlapping the given one, in which the process stood still
    """

    inbox: MessageSource
    outbox: MessageSink
    recorder: Recorder
    progress: Progress
    clock: Callable[[], int]
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    taken: TakenRequests = field(default_factory=TakenRequests)
    pauses: Callable[[int, int], Sequence[tuple[int, int]]] = never_paused
