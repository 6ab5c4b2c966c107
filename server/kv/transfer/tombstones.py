"""Handoffs that are over, remembered so that what arrives late is recognised. Bounded."""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 4096


class Tombstones:
    """The latest `max_remembered` handoff ids that were added."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._max_remembered = max_remembered

    def __contains__(self, handoff_id: object) -> bool:
        return handoff_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, handoff_id: str) -> None:
        """Remember, as the latest; the oldest goes when there is no room."""
        self._ids[handoff_id] = None
        self._ids.move_to_end(handoff_id)
        while len(self._ids) > self._max_remembered:
            self._ids.popitem(last=False)
