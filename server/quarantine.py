"""Pages of requests that are over but that a transfer may still touch: kept out of use.

Owns which handoffs keep pages and how to free them; knows nothing of why. Pages stay until the
transfer process says that it is done with them, or for as long as this process lives.
"""

from __future__ import annotations

from collections.abc import Callable, Set


class Quarantine:
    """Handoffs whose pages are kept, by owner tag."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Callable[[], None]]] = {}
        self.num_handoffs_ever = 0

    @property
    def num_pages(self) -> int:
        """Pages kept at this instant."""
        return sum(num_pages for num_pages, _ in self._kept.values())

    @property
    def owners(self) -> Set[str]:
        """Owner tags of the pages kept."""
        return self._kept.keys()

    def keep(self, handoff_id: str, num_pages: int, free: Callable[[], None]) -> None:
        """Keep `num_pages` pages of `handoff_id` until `release`, which calls `free`."""
        self._kept[handoff_id] = (num_pages, free)
        self.num_handoffs_ever += 1

    def release(self, handoff_id: str) -> bool:
        """Free the pages of `handoff_id`; False when it keeps none."""
        kept = self._kept.pop(handoff_id, None)
        if kept is None:
            return False
        kept[1]()
        return True
