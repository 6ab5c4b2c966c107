"""Messages on their way through a fault: passed on, lost, doubled, or held for a while. Pure.

Owns what is held and in which order it goes on; knows nothing of sockets, or of which fault hits
(`server.injection.plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from server.injection.fault import Delay, Drop, MessageFault, Reorder, Repeat
from server.injection.plan import NS_PER_MS

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, eq=False)
class _Held(Generic[ItemT]):
    """Goes on at `due_ns`, or behind the next item with the same key where `behind` is set."""

    item: ItemT
    key: str
    due_ns: int
    behind: bool


class Lane(Generic[ItemT]):
    """One direction of one process's messages. `key` says who may pass whom: the receiver."""

    def __init__(self) -> None:
        self._held: list[_Held[ItemT]] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def next_due_ns(self) -> int | None:
        """When `release` has something to give at the latest."""
        return min((held.due_ns for held in self._held), default=None)

    def route(self, item: ItemT, key: str, fault: MessageFault | None, now_ns: int) -> list[ItemT]:
        """What goes on now that `item` has come, in order."""
        match fault:
            case None:
                on = [item]
            case Drop():
                return []
            case Delay() | Reorder():
                self._hold(item, key, fault, now_ns)
                return []
            case Repeat():
                on = [item, item] if fault.ms == 0 else [item]
                if fault.ms:
                    self._hold(item, key, fault, now_ns)
        passed = [held for held in self._held if held.behind and held.key == key]
        self._held = [held for held in self._held if held not in passed]
        return on + [held.item for held in passed]

    def release(self, now_ns: int) -> list[ItemT]:
        """What was held until `now_ns` or earlier, in the order of those instants."""
        due = sorted(
            (held for held in self._held if held.due_ns <= now_ns), key=lambda held: held.due_ns
        )
        self._held = [held for held in self._held if held.due_ns > now_ns]
        return [held.item for held in due]

    def release_all(self) -> None:
        """Let everything that is held go on with the next `release`."""
        self._held = [
            _Held(held.item, held.key, min(held.due_ns, 0), held.behind) for held in self._held
        ]

    def _hold(self, item: ItemT, key: str, fault: Delay | Reorder | Repeat, now_ns: int) -> None:
        due_ns = now_ns + fault.ms * NS_PER_MS
        self._held.append(_Held(item, key, due_ns, isinstance(fault, Reorder)))
