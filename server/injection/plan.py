"""Which message, call, stage, copy or instant is hit by an armed fault. Pure.

Owns the counting; knows nothing of how a message is lost or a loop stopped. Every armed fault that
speaks of what happens counts it; of those that hit, the one armed first acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.injection.fault import (
    Corrupt,
    Delay,
    Direction,
    Drop,
    Fault,
    Freeze,
    MessageFault,
    Pause,
    Place,
    Raise,
    Reorder,
    Repeat,
    ShiftClock,
    Shrink,
    TimedFault,
    roles_of,
)

NS_PER_MS = 1_000_000

FaultT = TypeVar("FaultT", MessageFault, Raise, Freeze, Corrupt)


@dataclass(frozen=True, slots=True)
class Hit(Generic[FaultT]):
    """A fault that acts, and the number of what it acts on."""

    fault: FaultT
    number: int


@dataclass(slots=True)
class _Counted(Generic[FaultT]):
    """A fault that hits by number, and what it has seen so far."""

    fault: FaultT
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


class _Armed(Generic[FaultT]):
    """The faults of one sort, in the order in which they were armed."""

    def __init__(self) -> None:
        self._armed: list[_Counted[FaultT]] = []

    def __len__(self) -> int:
        return len(self._armed)

    def add(self, fault: FaultT) -> None:
        self._armed.append(_Counted(fault))

    def clear(self) -> None:
        self._armed.clear()

    def count(self, speaks: Callable[[FaultT], bool]) -> Hit[FaultT] | None:
        """Something has happened of which those faults speak for which `speaks` is true."""
        hit: Hit[FaultT] | None = None
        for armed in self._armed:
            if speaks(armed.fault) and armed.hits() and hit is None:
                hit = Hit(armed.fault, armed.seen)
        self._armed = [armed for armed in self._armed if not armed.spent]
        return hit


class FaultPlan:
    """The armed faults of one process."""

    def __init__(self, *, instance: str, role: str) -> None:
        self._names = ("", instance, role)
        self._role = role
        self._messages: _Armed[MessageFault] = _Armed()
        self._places: _Armed[Raise] = _Armed()
        self._stages: _Armed[Freeze] = _Armed()
        self._copies: _Armed[Corrupt] = _Armed()
        self._timed: list[tuple[int, TimedFault]] = []  # in order of their instants

    @property
    def num_armed(self) -> int:
        """Faults that will act yet, or may."""
        counted = (self._messages, self._places, self._stages, self._copies)
        return sum(map(len, counted)) + len(self._timed)

    @property
    def hits_messages(self) -> bool:
        """Whether `message` may say anything else than None."""
        return len(self._messages) > 0

    @property
    def hits_calls(self) -> bool:
        """Whether `call` may say anything else than None."""
        return len(self._places) > 0

    @property
    def hits_stages(self) -> bool:
        """Whether `stage` may say anything else than None."""
        return len(self._stages) > 0

    def arm(self, faults: Iterable[Fault], now_ns: int) -> None:
        """Arm those of `faults` that concern this process."""
        for fault in faults:
            if fault.at not in self._names or self._role not in roles_of(fault):
                continue
            match fault:
                case Drop() | Delay() | Repeat() | Reorder():
                    self._messages.add(fault)
                case Raise():
                    self._places.add(fault)
                case Freeze():
                    self._stages.add(fault)
                case Corrupt():
                    self._copies.add(fault)
                case Pause() | ShiftClock() | Shrink():
                    self._timed.append((now_ns + fault.after_ms * NS_PER_MS, fault))
        self._timed.sort(key=lambda entry: entry[0])

    def clear(self) -> None:
        """Disarm everything."""
        for armed in (self._messages, self._places, self._stages, self._copies, self._timed):
            armed.clear()

    def message(self, direction: Direction, name: str) -> Hit[MessageFault] | None:
        """What happens to one more message of the type `name`."""
        return self._messages.count(
            lambda fault: fault.message == name and fault.direction is direction
        )

    def call(self, place: Place, message: str = "") -> Hit[Raise] | None:
        """Whether one more call of `place` raises; `message` is the type it deals with."""
        return self._places.count(
            lambda fault: fault.place is place and fault.message in ("", message)
        )

    def stage(self, stage: str, request_id: str) -> Hit[Freeze] | None:
        """Whether one more request is held in `stage`."""
        return self._stages.count(
            lambda fault: fault.stage == stage and request_id.startswith(fault.request)
        )

    def copy(self) -> Hit[Corrupt] | None:
        """What happens to one more copy."""
        return self._copies.count(lambda _: True)

    def due(self, now_ns: int) -> list[TimedFault]:
        """Faults whose instant has come, each once, in order."""
        due = [fault for at_ns, fault in self._timed if at_ns <= now_ns]
        del self._timed[: len(due)]
        return due

    @property
    def next_due_ns(self) -> int | None:
        """The instant of the next timed fault."""
        return self._timed[0][0] if self._timed else None
