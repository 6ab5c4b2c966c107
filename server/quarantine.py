"""Pages of requests that are over but that a transfer may still touch: kept out of use.

Owns which handoffs keep pages, how to free them and when to ask for them again; knows nothing of
why. Pages stay until the transfer process says that it is done with them. It is asked again now
and then: a message may be lost, and a transfer process that was started anew cannot touch them.
"""

from __future__ import annotations

from collections.abc import Callable, Set


class Quarantine:
    """Handoffs whose pages are kept, by owner tag."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Callable[[], None]]] = {}
        self._asked_ns: int | None = 0
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

    def to_ask(self, now_ns: int, every_ns: int) -> tuple[str, ...]:
        """Handoffs to ask the transfer about, at most once in `every_ns`."""
        if not self._kept:
            return ()
        if self._asked_ns is not None and now_ns - self._asked_ns < every_ns:
            return ()
        self._asked_ns = now_ns
        return tuple(self._kept)

    def ask_now(self) -> None:
        """Ask again at the next occasion: another transfer process answers from here on."""
        self._asked_ns = None

    def release(self, handoff_id: str) -> bool:
        """Free the pages of `handoff_id`; False when it keeps none."""
        kept = self._kept.pop(handoff_id, None)
        if kept is None:
            return False
        kept[1]()
        return True
