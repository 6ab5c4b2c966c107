"""What every process of a server that allows faults has: an injector, and parts wrapped by it.

Owns the wrappers that roles share; each role's own are `server.injection.workers`, `transfers` and
`gateways`. Without an injector, as in every server that does not allow faults, all of them return
what they were given.
"""

from __future__ import annotations

import logging
from functools import partial

from pdtrace.clock import SYSTEM_CLOCK, Clock
from pdtrace.recorder import Recorder
from pdtrace.ring.writer import RingWriter
from server.clock_fault import SettableClock
from server.config import ProcessConfig
from server.heartbeat import MakeOutbox
from server.injection.fault import Place
from server.injection.injector import Injector
from server.injection.ports import FaultyOutbox
from server.wire.curve import CurveKeys
from server.wire.messages import AnyMessage, InjectFaults, Peer
from server.wire.sockets import Outbox

_logger = logging.getLogger(__name__)


def make_injector(config: ProcessConfig, clock: Clock = SYSTEM_CLOCK) -> Injector | None:
    """The process's injector, with nothing armed; None unless settings allow faults. It can set
    `clock` if that can be set."""
    if not config.settings.allow_faults:
        return None
    me = Peer(instance=config.instance, endpoint=config.endpoint, incarnation=config.incarnation)
    if isinstance(clock, SettableClock):
        return Injector(me, role=config.role, shift_clock=clock.shift)
    return Injector(me, role=config.role)


def recorder_class(injector: Injector | None) -> type[Recorder]:
    """The process's recorder, in which the writing of each record is the place "recorder"."""
    if injector is None:
        return Recorder

    class FaultyRing(RingWriter):
        __slots__ = ()

        def append(self, body: bytes) -> None:
            injector.call(Place.RECORDER)
            super().append(body)

    class FaultyRecorder(Recorder):
        def _attach_ring(self) -> RingWriter:
            ring = super()._attach_ring()
            ring.__class__ = FaultyRing  # its slots leave no other way to it
            return ring

    return FaultyRecorder


def heartbeat_outbox(injector: Injector | None, keys: CurveKeys | None) -> MakeOutbox:
    """What makes the outbox of the heartbeat's thread."""
    if injector is None:
        return partial(Outbox, keys=keys)

    def make() -> _ClosingOutbox:
        return _ClosingOutbox(Outbox(keys=keys), injector)

    return make


def refuse(message: AnyMessage, instance: str) -> None:
    """Say that `message`, if it is InjectFaults, came to a process that does not allow faults."""
    if isinstance(message, InjectFaults):
        _logger.warning("%s does not allow faults: InjectFaults is ignored", instance)


class _ClosingOutbox(FaultyOutbox):
    def __init__(self, outbox: Outbox, injector: Injector) -> None:
        super().__init__(outbox, injector)
        self._inner = outbox

    def close(self) -> None:
        self._inner.close()
