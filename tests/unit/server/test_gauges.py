"""Gauges are written when they change, and progress often enough to tell a stopped loop."""

from __future__ import annotations

from pdtrace.recorder import Recorder
from pdtrace.stages import Gauge
from server.gauges import PROGRESS_EVERY_NS, Gauges, ProgressGauge


class Written(Recorder):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Gauge, int]] = []

    def gauge(self, gauge: Gauge, value: int) -> None:
        self.calls.append((gauge, value))

    def close(self) -> None:
        pass


def test_only_gauges_that_changed_are_written() -> None:
    recorder = Written()
    gauges = Gauges(recorder, Gauge.RUNNING, Gauge.WAITING)
    gauges.show(0, 3)
    gauges.show(0, 3)
    gauges.show(1, 3)
    gauges.show(0, 2)
    assert recorder.calls == [
        (Gauge.RUNNING, 0),
        (Gauge.WAITING, 3),
        (Gauge.RUNNING, 1),
        (Gauge.RUNNING, 0),
        (Gauge.WAITING, 2),
    ]


def test_progress_is_late_by_no_more_than_its_step() -> None:
    recorder = Written()
    progress = ProgressGauge(recorder)
    worst_ns = 0
    for at_ns in range(5, 5 * PROGRESS_EVERY_NS, 700_000):
        progress.show(at_ns)
        worst_ns = max(worst_ns, at_ns - recorder.calls[-1][1])
    assert worst_ns < PROGRESS_EVERY_NS
    assert [gauge for gauge, _ in recorder.calls] == [Gauge.LAST_PROGRESS_NS] * 5


def test_progress_of_a_clock_that_was_set_back_is_written() -> None:
    recorder = Written()
    progress = ProgressGauge(recorder)
    for at_ns in (9_000_000_000, 1_000_000_000):
        progress.show(at_ns)
    assert [value for _, value in recorder.calls] == [9_000_000_000, 1_000_000_000]
