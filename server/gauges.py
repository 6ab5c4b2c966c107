"""What a loop shows of itself in its ring: gauges, written when they change.

Owns what was written last, so that a turn of the loop that changes nothing records nothing. Knows
nothing of what the numbers mean.
"""

from __future__ import annotations

from pdtrace.recorder import Recorder
from pdtrace.stages import Gauge

PROGRESS_EVERY_NS = 10_000_000
"""A loop that goes round faster says so no more often. Who looks counts in tenths of a second
(`pdtrace top`), or in seconds (STALLED)."""


class Gauges:
    """Gauges that one loop sets together. Nothing else sets them."""

    __slots__ = ("_gauges", "_recorder", "_values")

    def __init__(self, recorder: Recorder, *gauges: Gauge) -> None:
        self._recorder = recorder
        self._gauges = gauges
        self._values: tuple[int | None, ...] = (None,) * len(gauges)

    def show(self, *values: int) -> None:
        """One value for each gauge, in their order."""
        before = self._values
        if values == before:
            return
        self._values = values
        for gauge, value, last in zip(self._gauges, values, before, strict=True):
            if value != last:
                self._recorder.gauge(gauge, value)


class ProgressGauge:
    """When a loop went round last; early by up to PROGRESS_EVERY_NS."""

    __slots__ = ("_recorder", "_shown_ns")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._shown_ns: int | None = None

    def show(self, at_ns: int) -> None:
        shown_ns = self._shown_ns
        if shown_ns is None or not 0 <= at_ns - shown_ns < PROGRESS_EVERY_NS:
            self._shown_ns = at_ns
            self._recorder.gauge(Gauge.LAST_PROGRESS_NS, at_ns)
