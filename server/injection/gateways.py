"""Faults of the gateway.

Owns which of its parts is wrapped for which place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdtrace.stages import WaitReason
from server.gateway.call import Call
from server.gateway.cluster import Mail
from server.gateway.now import Now
from server.gateway.pipeline import Gateway
from server.injection.fault import Fault, Place
from server.injection.injector import Injector
from server.injection.ports import AsyncFaultyInbox, AsyncSource, FaultyOutbox
from server.wire.messages import AnyMessage

LOOK_S = 0.05
"""How often a request that is held looks whether faults were cleared."""


class FaultyMail(FaultyOutbox):
    """The gateway's outbox with faults behind it."""

    def __init__(self, mail: Mail, injector: Injector) -> None:
        super().__init__(mail, injector)
        self._mail = mail

    def forget(self, endpoint: str) -> None:
        self._mail.forget(endpoint)

    def is_lost(self, endpoint: str) -> bool:
        return self._mail.is_lost(endpoint)


def faulty_mail(mail: Mail, injector: Injector | None) -> Mail:
    """`mail` with faults behind it."""
    if injector is None:
        return mail
    faulty = FaultyMail(mail, injector)
    injector.watch(faulty)
    return faulty


def faulty_inbox(inbox: AsyncSource, injector: Injector | None) -> AsyncSource:
    """`inbox` with faults behind it."""
    return inbox if injector is None else AsyncFaultyInbox(inbox, injector)


def disturb(gateway: Gateway, injector: Injector | None, faults: Iterable[Fault]) -> None:
    """Wrap the parts of `gateway`, whose ports are faulty already, and arm `faults`."""
    if injector is None:
        return
    deliver, metrics = gateway.cluster.deliver, gateway.metrics
    guard = metrics.guard

    def faulty_deliver(message: AnyMessage) -> None:
        injector.call(Place.MESSAGE, type(message).__name__)
        deliver(message)

    def faulty_guard(record: Callable[[], object]) -> None:
        guard(injector.around(Place.METRICS, record))

    hold = gateway.hold

    async def hold_frozen(call: Call, stage: str) -> None:
        await hold(call, stage)
        ms = injector.stage(stage, call.context.request_id)
        if ms:
            call.trace.wait(stage, WaitReason.INJECTED)
            await _pause(call, injector, ms / 1000, gateway.now)

    gateway.hold = hold_frozen
    gateway.tick = injector.around(Place.STEP, gateway.tick)
    gateway.cluster.deliver = faulty_deliver
    metrics.guard = faulty_guard
    injector.arm(faults)


async def _pause(call: Call, injector: Injector, seconds: float, now: Now) -> None:
    """Keep the request where it is for so long, or until faults are cleared."""
    times_cleared, end_s = injector.times_cleared, now.s() + seconds
    while injector.times_cleared == times_cleared and (left_s := end_s - now.s()) > 0:
        await call.mailbox.pause(min(left_s, LOOK_S))
