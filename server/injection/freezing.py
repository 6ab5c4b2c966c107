"""Requests held in a stage of a worker because a fault says so.

Owns when such a hold begins and ends; knows nothing of legs or plans. A worker asks the same object
for what the request's own header holds.
"""

from __future__ import annotations

from server.faults import NS_PER_MS, FaultHolds
from server.injection.injector import Injector


class FrozenHolds(FaultHolds):
    """`own`, and the stages in which `injector` freezes the request: each once, from the first time
    that the worker asks about it while such a fault is armed. Clearing ends these holds."""

    __slots__ = ("_asked", "_frozen_until_ns", "_injector", "_own", "_request_id", "_times_cleared")

    def __init__(self, own: FaultHolds, injector: Injector, request_id: str) -> None:
        super().__init__({})
        self._own = own
        self._injector = injector
        self._request_id = request_id
        self._asked: set[str] = set()
        self._frozen_until_ns: dict[str, int] = {}
        self._times_cleared = injector.times_cleared

    def held(self, stage: str, now_ns: int) -> bool:
        frozen = self._is_frozen(stage, now_ns)
        return self._own.held(stage, now_ns) or frozen

    def release_due(self, now_ns: int) -> None:
        self._own.release_due(now_ns)
        for stage in [s for s, until_ns in self._frozen_until_ns.items() if until_ns <= now_ns]:
            del self._frozen_until_ns[stage]

    @property
    def next_release_ns(self) -> int | None:
        own_ns = self._own.next_release_ns
        if not self._frozen_until_ns:
            return own_ns
        frozen_ns = min(self._frozen_until_ns.values())
        return frozen_ns if own_ns is None else min(own_ns, frozen_ns)

    def _is_frozen(self, stage: str, now_ns: int) -> bool:
        injector = self._injector
        if self._times_cleared != injector.times_cleared:
            self._times_cleared = injector.times_cleared
            self._frozen_until_ns.clear()
            self._asked.clear()
        if injector.freezes and stage not in self._asked:
            self._asked.add(stage)
            ms = injector.stage(stage, self._request_id)
            if ms:
                self._frozen_until_ns[stage] = now_ns + ms * NS_PER_MS
        return now_ns < self._frozen_until_ns.get(stage, now_ns)
