"""Which message, which call and which instant is hit by an armed fault. Pure.

Owns the counting; knows nothing of how a message is lost or a loop stopped. Every armed fault that
speaks of a message or a call counts it; of those that hit, the one armed first acts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.injection.fault import (
    Delay,
    Direction,
    Drop,
    Fault,
    MessageFault,
    Pause,
    Place,
    Raise,
    Reorder,
    Repeat,
    TimedFault,
)

NS_PER_MS = 1_000_000


@dataclass(slots=True)
class _Counted:
    """A fault that hits by number, and what it has seen so far."""

    fault: MessageFault | Raise
    seen: int = 0

    def hits(self) -> bool:
        """Count one more; whether it is hit."""
        self.seen += 1
        if self.seen < self.fault.nth:
            return False
        return self.fault.count is None or self.seen < self.fault.nth + self.fault.count

    @property
    def spent(self) -> bool:
        count = self.fault.count
        return count is not None and self.seen >= self.fault.nth + count - 1


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that acts, and the number of the message or call it acts on."""

    fault: MessageFault | Raise
    number: int


class FaultPlan:
    """The armed faults of one process."""

    def __init__(self, *, instance: str, role: str) -> None:
        self._names = ("", instance, role)
        self._messages: list[_Counted] = []
        self._places: list[_Counted] = []
        self._timed: list[tuple[int, TimedFault]] = []  # in order of their instants

    @property
    def num_armed(self) -> int:
        """Faults that will act yet, or may."""
        return len(self._messages) + len(self._places) + len(self._timed)

    @property
    def hits_messages(self) -> bool:
        """Whether `message` may say anything else than None."""
        return bool(self._messages)

    @property
    def hits_calls(self) -> bool:
        """Whether `call` may say anything else than None."""
        return bool(self._places)

    def arm(self, faults: Iterable[Fault], now_ns: int) -> None:
        """Arm those of `faults` that concern this process."""
        for fault in faults:
            if fault.at not in self._names:
                continue
            match fault:
                case Drop() | Delay() | Repeat() | Reorder():
                    self._messages.append(_Counted(fault))
                case Raise():
                    self._places.append(_Counted(fault))
                case Pause():
                    self._timed.append((now_ns + fault.after_ms * NS_PER_MS, fault))
        self._timed.sort(key=lambda entry: entry[0])

    def clear(self) -> None:
        """Disarm everything."""
        self._messages.clear()
        self._places.clear()
        self._timed.clear()

    def message(self, direction: Direction, name: str) -> Hit | None:
        """What happens to one more message of the type `name`."""
        hit: Hit | None = None
        for armed in self._messages:
            fault = armed.fault
            assert not isinstance(fault, Raise)
            if fault.message == name and fault.direction is direction and armed.hits():
                hit = hit or Hit(fault, armed.seen)
        self._messages = [armed for armed in self._messages if not armed.spent]
        return hit

    def call(self, place: Place, message: str = "") -> Hit | None:
        """Whether one more call of `place` raises; `message` is the type it deals with."""
        hit: Hit | None = None
        for armed in self._places:
            fault = armed.fault
            assert isinstance(fault, Raise)
            if fault.place is place and fault.message in ("", message) and armed.hits():
                hit = hit or Hit(fault, armed.seen)
        self._places = [armed for armed in self._places if not armed.spent]
        return hit

    def due(self, now_ns: int) -> list[TimedFault]:
        """Faults whose instant has come, each once, in order."""
        due = [fault for at_ns, fault in self._timed if at_ns <= now_ns]
        del self._timed[: len(due)]
        return due

    @property
    def next_due_ns(self) -> int | None:
        """The instant of the next timed fault."""
        return self._timed[0][0] if self._timed else None
