"""What one process does with the faults armed in it: it counts, says what it does, and answers.

Owns the process's plan, its counters and the time it stands still; knows nothing of the sockets
that faults lie behind (`server.injection.ports`), nor of which part of a process is which place.
Everything that is injected is one line in the log, beginning with "injected", and one more in
`injected`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol, TypeVar, assert_never

from server.errors import ServerError
from server.injection.fault import (
    Damage,
    Delay,
    Direction,
    Drop,
    Fault,
    MessageFault,
    Pause,
    Place,
    Reorder,
    Repeat,
    ShiftClock,
    Shrink,
    TimedFault,
    name_of,
)
from server.injection.plan import FaultPlan
from server.wire.messages import AnyMessage, FaultReport, InjectFaults, Peer
from server.wire.sockets import Outbox

P = ParamSpec("P")
R = TypeVar("R")

NS_PER_S = 1_000_000_000

_logger = logging.getLogger(__name__)


def send_once(endpoint: str, message: AnyMessage) -> None:
    """Send `message` through a socket of its own: askers come and go, their sockets must not stay.

    Takes a millisecond, up to LINGER_S where nobody is at `endpoint` any more.
    """
    outbox = Outbox()
    try:
        outbox.send(endpoint, message)
    finally:
        outbox.close()


def _nothing(_: float) -> None:
    """For what a process does not have."""


class InjectedError(ServerError):
    """Raised on purpose, by a fault."""

    code = "injected"


class Watched(Protocol):
    """Who holds something back, in the loop's thread."""

    @property
    def next_due_ns(self) -> int | None:
        """When `turn` has something to do."""
        ...

    def turn(self) -> None:
        """Let go of what has been held for long enough."""
        ...

    def clear(self) -> None:
        """Let go of everything with the next `turn`."""
        ...


class Handle(Protocol):
    """Takes in a message and the instant of its arrival."""

    def __call__(self, message: AnyMessage, arrived_ns: int) -> None: ...


class Injector:
    """Faults of one process. Thread-safe, apart from `turn`, which belongs to the loop's thread.

    injected      how often each fault has acted, by its name
    now_ns        CLOCK_MONOTONIC, which no clock fault shifts
    times_cleared how often everything was disarmed: what is held longer than that goes on
    shift_clock   sets the process's clock, by seconds
    shrink        takes so many pages of the process's KV pool out of use; does nothing where there
                  is none
    """

    def __init__(
        self,
        peer: Peer,
        *,
        role: str,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        reply: Callable[[str, AnyMessage], object] = send_once,
        shift_clock: Callable[[float], object] = _nothing,
    ) -> None:
        self.now_ns = now_ns
        self.injected: Counter[str] = Counter()
        self.times_cleared = 0
        self.shrink: Callable[[int], object] = _nothing
        self._shift_clock = shift_clock
        self._peer = peer
        self._plan = FaultPlan(instance=peer.instance, role=role)
        self._sleep = sleep
        self._reply = reply
        self._lock = threading.Lock()
        self._watched: list[Watched] = []

    def arm(self, faults: Iterable[Fault]) -> None:
        """Arm those of `faults` that concern this process."""
        with self._lock:
            before = self._plan.num_armed
            self._plan.arm(faults, self.now_ns())
            num_armed = self._plan.num_armed
        if num_armed != before:
            _logger.info("%d faults armed, %d in all", num_armed - before, num_armed)

    def obey(self, order: InjectFaults) -> None:
        """Do what a test asks for, and say where things stand then."""
        if order.clear:
            with self._lock:
                self._plan.clear()
                self.times_cleared += 1
            for watched in self._watched:
                watched.clear()
            _logger.info("faults cleared")
        self.arm(order.faults)
        with self._lock:
            report = FaultReport(
                peer=self._peer, armed=self._plan.num_armed, injected=dict(self.injected)
            )
        if order.reply_to is not None:
            self._reply(order.reply_to.endpoint, report)

    def watch(self, watched: Watched) -> None:
        """Let `turn`, `bound_s` and `obey` see to one more owner of things held back."""
        self._watched.append(watched)

    @property
    def next_due_ns(self) -> int | None:
        """When `turn` has something to do."""
        with self._lock:
            instants = [self._plan.next_due_ns]
        instants += [watched.next_due_ns for watched in self._watched]
        return min((at_ns for at_ns in instants if at_ns is not None), default=None)

    def bound_s(self, wait_s: float) -> float:
        """`wait_s`, or less where something is due before."""
        due_ns = self.next_due_ns
        if due_ns is None:
            return wait_s
        return max(0.0, min(wait_s, (due_ns - self.now_ns()) / NS_PER_S))

    def message(self, direction: Direction, message: AnyMessage) -> MessageFault | None:
        """What happens to `message`; counted and logged."""
        if not self._plan.hits_messages:  # the usual case, without a lock
            return None
        name = type(message).__name__
        with self._lock:
            hit = self._plan.message(direction, name)
            if hit is None:
                return None
            fault = hit.fault
            self._count(fault)
        _logger.warning("injected: %s %s number %d %s", name, direction, hit.number, _fate(fault))
        return fault

    def call(self, place: Place, message: str = "") -> None:
        """To be called where `place` is. Raises InjectedError where a fault says so."""
        if not self._plan.hits_calls:
            return
        with self._lock:
            hit = self._plan.call(place, message)
            if hit is None:
                return
            self._count(hit.fault)
        _logger.warning("injected: call number %d of %s raises", hit.number, place)
        raise InjectedError(f"injected in {place}")

    @property
    def freezes(self) -> bool:
        """Whether `stage` may say anything else than 0."""
        return self._plan.hits_stages

    def stage(self, stage: str, request_id: str) -> int:
        """For how many milliseconds a request that is in `stage` is held there; counted, logged."""
        if not self.freezes:
            return 0
        with self._lock:
            hit = self._plan.stage(stage, request_id)
            if hit is None:
                return 0
            self._count(hit.fault)
        _logger.warning("injected: %s holds %s for %d ms", stage, request_id, hit.fault.ms)
        return hit.fault.ms

    def copy(self, handoff_id: str, index: int) -> Damage | None:
        """What becomes of a copy that is about to start; counted and logged."""
        with self._lock:
            hit = self._plan.copy()
            if hit is None:
                return None
            self._count(hit.fault)
        damage = hit.fault.copy
        _logger.warning("injected: copy %d of %s: %s", index, handoff_id, damage)
        return damage

    def around(self, place: Place, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, which raises before it does anything where a fault says so."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            self.call(place)
            return function(*args, **kwargs)

        return guarded

    def loop(self, step: Callable[P, R]) -> Callable[P, R]:
        """`step`, a turn of the process's loop, with what is due before it."""
        guarded = self.around(Place.STEP, step)

        def turn(*args: P.args, **kwargs: P.kwargs) -> R:
            self.turn()
            return guarded(*args, **kwargs)

        return turn

    def handling(self, handle: Handle) -> Handle:
        """`handle`, which raises instead where a fault says so."""

        def guarded(message: AnyMessage, arrived_ns: int) -> None:
            self.call(Place.MESSAGE, type(message).__name__)
            handle(message, arrived_ns)

        return guarded

    def turn(self) -> None:
        """Do what is due at this instant. The loop calls it every time it goes round."""
        with self._lock:
            due = self._plan.due(self.now_ns())
            for fault in due:
                self._count(fault)
        for fault in due:
            self._act(fault)
        for watched in self._watched:
            watched.turn()

    def _act(self, fault: TimedFault) -> None:
        match fault:
            case Pause():
                _logger.warning("injected: the loop stands still for %d ms", fault.ms)
                self._sleep(fault.ms / 1000)
            case ShiftClock():
                _logger.warning("injected: the clock is set by %+g s", fault.seconds)
                self._shift_clock(fault.seconds)
            case Shrink():
                _logger.warning("injected: %d pages are taken out of use", fault.pages)
                self.shrink(fault.pages)

    def _count(self, fault: Fault) -> None:
        self.injected[name_of(fault)] += 1


def _fate(fault: MessageFault) -> str:
    match fault:
        case Drop():
            return "is lost"
        case Delay():
            return f"comes {fault.ms} ms late"
        case Repeat():
            return f"comes again, {fault.ms} ms later"
        case Reorder():
            return "lets the next one pass"
        case _:
            assert_never(fault)
