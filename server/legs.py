"""The legs a scheduler process works on, when each must be looked at, and a memory of past ones.

Owns the table and its bounds; knows nothing of what a leg does.

Messages of different senders overtake each other, so an end may arrive before its request, and
anything may arrive after the end. The memory tells these cases apart; it holds the latest
`max_remembered` handoffs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from server.errors import IntegrityError
from server.request import Ending, Leg

MAX_REMEMBERED = 4096

LegT = TypeVar("LegT", bound=Leg[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLeg:
    """A handoff that is over here. `arrived` is False when its end came before its request."""

    ending: Ending
    arrived: bool


class LegTable(Generic[LegT]):
    """Legs in order of arrival. Not thread-safe: it belongs to one scheduler."""

    def __init__(self, *, max_remembered: int = MAX_REMEMBERED) -> None:
        self._legs: dict[str, LegT] = {}
        self._past: OrderedDict[str, PastLeg] = OrderedDict()
        self._max_remembered = max_remembered

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[LegT]:
        """Legs in order of arrival; the table may change while the caller goes through them."""
        return iter(list(self._legs.values()))

    @property
    def handoff_ids(self) -> Set[str]:
        """Of the legs in the table, as it changes."""
        return self._legs.keys()

    def __getitem__(self, handoff_id: str) -> LegT:
        return self._legs[handoff_id]

    def get(self, handoff_id: str) -> LegT | None:
        return self._legs.get(handoff_id)

    def past(self, handoff_id: str) -> PastLeg | None:
        """What is remembered of a handoff that is over."""
        return self._past.get(handoff_id)

    def add(self, leg: LegT) -> None:
        """Raises IntegrityError when the handoff is in the table already."""
        if leg.handoff_id in self._legs:
            raise IntegrityError(f"handoff {leg.handoff_id} is in the table already")
        self._legs[leg.handoff_id] = leg

    def close(self, leg: LegT) -> None:
        """Take a leg that is over out of the table, and remember how it ended."""
        del self._legs[leg.handoff_id]
        assert leg.ending is not None
        self.remember(leg.handoff_id, leg.ending, arrived=True)

    def remember(self, handoff_id: str, ending: Ending, *, arrived: bool) -> None:
        """Note the end of a handoff that is not in the table."""
        self._past[handoff_id] = PastLeg(ending=ending, arrived=arrived)
        self._past.move_to_end(handoff_id)
        while len(self._past) > self._max_remembered:
            self._past.popitem(last=False)

    def next_wake_ns(self) -> int | None:
        """The earliest instant at which a leg must be looked at."""
        return min(
            (wake_ns for leg in self._legs.values() if (wake_ns := leg.wake_ns) is not None),
            default=None,
        )

    def due(self, now_ns: int) -> list[LegT]:
        """Legs whose instant has come."""
        return [
            leg
            for leg in self._legs.values()
            if (wake_ns := leg.wake_ns) is not None and wake_ns <= now_ns
        ]
