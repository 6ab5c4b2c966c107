"""Leaves detail out of what one recorder writes while its budget says so, and counts what.

Owns the level in force, the table of encoders that follows from it and the totals of the recorder's
ring; when to change the level is `pdtrace.budget`'s. Reads no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdtrace.budget import ESSENTIAL_MARKS, Budget, Costs, Detail, Work
from pdtrace.ring.codec import Encode, build_bare_encoders
from pdtrace.ring.layout import (
    BARE_BYTES,
    MAX_STEP_MEMBERS,
    RECORD_HEADER,
    STEP_HEAD,
    Counter,
)
from pdtrace.ring.writer import RingWriter
from pdtrace.stages import Gauge

LOOK_NS = 1_000_000_000
"""Between two looks, where no block of the ring has filled up meanwhile."""
_STEP_BYTES = RECORD_HEADER.size + STEP_HEAD.size
_NEVER = 2**63

_logger = logging.getLogger(__name__)


class Shedding:
    """What one recorder leaves out.

    detail    level in force, a `Detail` as a plain int: it is read for every wait and step
    encoders  in force, by mark; the same list at every level, so that traces may hold on to it
    due_ns    when it is time for a look
    """

    __slots__ = (
        "_budget",
        "_costs",
        "_full",
        "_instance",
        "_ring",
        "_share",
        "_warned",
        "_work",
        "detail",
        "due_ns",
        "encoders",
    )

    def __init__(
        self,
        instance: str,
        encoders: Sequence[Encode | None],
        *,
        share: float | None = None,
        costs: Callable[[], Costs] | None = None,
    ) -> None:
        """share: the budget, of one core; None: nothing is ever left out."""
        self.detail = int(Detail.FULL)
        self.encoders = list(encoders)
        self.due_ns = _NEVER
        self._instance = instance
        self._full = encoders
        self._share = share
        self._costs = costs
        self._ring: RingWriter | None = None
        self._budget: Budget | None = None
        self._work = Work()
        self._warned = False

    def attach(self, ring: RingWriter, now_ns: int) -> None:
        """The recorder writes to `ring` from `now_ns` on, at full detail."""
        self._ring = ring
        self._work = Work()
        if self._share is not None and self._costs is not None:
            self._budget = Budget(self._share, self._costs(), now_ns=now_ns)
            self.due_ns = now_ns + LOOK_NS
            self._keep(Detail.FULL)
            ring.gauges[Gauge.RECORDING_SHARE_PPM] = 0

    def detach(self) -> None:
        """The ring belongs to another process."""
        self._ring = None
        self._warned = False

    def look(self, now_ns: int) -> None:
        """Let the budget say how much detail there is from here on."""
        budget, ring, work = self._budget, self._ring, self._work
        if budget is None or ring is None:
            return
        self.due_ns = now_ns + LOOK_NS
        work.records = ring.written
        step_bytes = work.steps * _STEP_BYTES + work.members * 8
        work.bytes = ring.reach - step_bytes - (work.records - work.steps) * BARE_BYTES
        if budget.look(now_ns, work):
            self._keep(budget.detail)
            if not self._warned:
                self._warned = True
                _logger.warning(
                    "recording of %s takes more than its budget of %g of a core: detail goes down "
                    "to %s; what is left out is counted in the ring (gauge RECORDING_DETAIL)",
                    self._instance,
                    self._share,
                    budget.detail.name,
                )
        ring.gauges[Gauge.RECORDING_SHARE_PPM] = round(budget.share * 1e6)

    def recorded_wait(self) -> None:
        self._work.waits += 1

    def recorded_step(self, members: int) -> None:
        self._work.steps += 1
        self._work.members += members

    def shed_wait(self) -> None:
        """A wait is left out."""
        self._work.shed_waits += 1
        self._count(Counter.SHED_WAITS)

    def shed_step(self, size: int) -> None:
        """A step of `size` members is left out."""
        self._work.shed_steps += 1
        self._work.shed_members += min(size, MAX_STEP_MEMBERS)
        self._count(Counter.SHED_STEPS)

    def _shed_attributes(self) -> None:
        self._work.shed_attributes += 1
        self._count(Counter.SHED_ATTRIBUTES)

    def _count(self, counter: Counter) -> None:
        if self._ring is not None:
            self._ring.count(counter)

    def _keep(self, detail: Detail) -> None:
        if detail is Detail.ESSENTIAL:
            self.encoders[:] = build_bare_encoders(
                self._full, ESSENTIAL_MARKS, self._shed_attributes
            )
        else:
            self.encoders[:] = self._full
        self.detail = int(detail)
        if self._ring is not None:
            self._ring.gauges[Gauge.RECORDING_DETAIL] = self.detail
