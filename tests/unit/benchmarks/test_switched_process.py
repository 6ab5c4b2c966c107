"""A switched recorder does in each arm what that arm's own recorder does, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.switched_process import (
    ARMS,
    Arm,
    Meter,
    SwitchedRecorder,
    TimedRecorder,
    Word,
    rings_path,
    words_of,
)
from pdtrace.recorder import Recorder, RequestContext, RequestTrace
from pdtrace.ring.reader import RingReader
from pdtrace.stages import Gauge, Mark, Outcome, Role, StepKind, WaitReason


class Switched:
    def __init__(self, folder: Path) -> None:
        self.words = words_of(folder / "decode-0.words", create=True)
        on, export = (
            Recorder.open(
                rings_path(folder, arm), role=Role.DECODE, instance="decode-0", raise_errors=True
            )
            for arm in (Arm.ON, Arm.EXPORT)
        )

        def used(arm: Arm) -> None:
            self.words[Word.ARM] = 1 + ARMS.index(arm)

        self.recorder = SwitchedRecorder(
            {
                Arm.OFF: Recorder.disabled(),
                Arm.ON: on,
                Arm.EXPORT: export,
                Arm.TIMED: TimedRecorder(on, Meter(self.words, Word.CALLS_NS, Word.CALLS)),
            },
            used,
        )
        self._readers: dict[Arm, RingReader] = {}
        for arm in (Arm.ON, Arm.EXPORT):
            (path,) = rings_path(folder, arm).iterdir()
            self._readers[arm] = RingReader(path)

    def written(self) -> tuple[int, int]:
        """Records since the last call: of on, of export."""
        return (
            len(self._readers[Arm.ON].read()),
            len(self._readers[Arm.EXPORT].read()),
        )

    def serve(self, arm: Arm) -> RequestTrace:
        """A request from begin to end, with a step: 7 calls, 6 records."""
        self.recorder.use(arm)
        trace = self.recorder.begin(RequestContext.create())
        trace.mark(Mark.RESERVE_RECEIVED)
        trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=2, free=1)
        self.recorder.step(StepKind.DECODE, [trace], tokens=1, begin_ns=1, end_ns=2)
        self.recorder.gauge(Gauge.RUNNING, 1)
        trace.abort(Outcome.CANCELLED, "test")
        trace.end()
        return trace

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self.recorder.close()


@pytest.fixture
def switched(tmp_path: Path) -> Iterator[Switched]:
    made = Switched(tmp_path)
    yield made
    made.close()


def test_each_arm_writes_to_its_own_rings_and_off_to_none(switched: Switched) -> None:
    found: list[tuple[Arm, tuple[int, int]]] = []
    for arm in (Arm.OFF, Arm.ON, Arm.OFF, Arm.EXPORT, Arm.TIMED, Arm.OFF):
        switched.serve(arm)
        found.append((arm, switched.written()))
        assert switched.words[Word.ARM] == 1 + ARMS.index(arm)
    assert found == [
        (Arm.OFF, (0, 0)),
        (Arm.ON, (6, 0)),
        (Arm.OFF, (0, 0)),
        (Arm.EXPORT, (0, 6)),
        (Arm.TIMED, (6, 0)),
        (Arm.OFF, (0, 0)),
    ]


def test_off_is_what_a_server_without_recording_has(switched: Switched) -> None:
    switched.recorder.use(Arm.OFF)
    disabled = Recorder.disabled()
    for name in ("begin", "step", "gauge", "clock_sample"):
        assert getattr(switched.recorder, name) == getattr(disabled, name)
    assert switched.recorder.enabled is disabled.enabled is False
    switched.recorder.use(Arm.ON)
    assert switched.recorder.enabled


def test_calls_are_timed_in_their_own_arm_alone(switched: Switched) -> None:
    switched.serve(Arm.ON)
    assert (switched.words[Word.CALLS], switched.words[Word.CALLS_NS]) == (0, 0)
    begin_ns = time.thread_time_ns()
    switched.serve(Arm.TIMED)
    took_ns = time.thread_time_ns() - begin_ns
    assert switched.words[Word.CALLS] == 7  # the mark within a wait is part of it
    assert 0 < switched.words[Word.CALLS_NS] < took_ns
