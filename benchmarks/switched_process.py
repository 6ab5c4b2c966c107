"""A serving process whose recording is switched while it runs: for the benchmark alone.

`python -m benchmarks.switched_process CONFIG --parent PID` is `server.process` with recorders of
its own for each `Arm`. SIGUSR1 makes it take up the one that `<run>/arms/arm` names. `off` is what
`--no-record` gives: `Recorder.disabled()`. Nothing is asked on a call's way: a switch puts the
recorder's own methods in place. Switch while no request is in flight, so that no trace is cut.

Each process counts in `<run>/arms/<instance>.words` (`Word`), which the benchmark reads.
"""

from __future__ import annotations

import mmap
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

from pdtrace.clock import Clock
from pdtrace.recorder import Recorder, RequestContext, RequestTrace
from pdtrace.stages import Role
from server import process, recording
from server.config import ProcessConfig
from server.engine import loader
from server.engine.base import Engine

_CALLS = ("begin", "step", "gauge", "gauges", "clock_sample")
_TRACE_CALLS = ("mark", "wait", "abort", "end")
_ENGINE_CALLS = ("prefill", "decode")


class Arm(StrEnum):
    """What a window is run with. `TIMED` records as `ON` does and takes the time of each call."""

    OFF = "off"
    ON = "on"
    EXPORT = "export"
    TIMED = "timed"


ARMS = tuple(Arm)


class Word(IntEnum):
    """Counters of a process, u64 each."""

    ARM = 0  # 1 + index of the arm in force
    ENGINE_NS = 1  # CPU time in the model's forward passes
    CALLS = 2  # recording calls, in TIMED
    CALLS_NS = 3  # CPU time in them


def arms_path(config: ProcessConfig) -> Path:
    """Where the benchmark and its processes meet; made by the benchmark."""
    return config.settings.run_path / "arms"


def rings_path(arms: Path, arm: Arm) -> Path:
    return arms / arm / "rings"


def words_of(path: Path, *, create: bool = False) -> memoryview:
    """The counters of one process, shared with whoever maps them."""
    with path.open("w+b" if create else "r+b") as file:
        if create:
            file.truncate(len(Word) * 8)
        return memoryview(mmap.mmap(file.fileno(), len(Word) * 8)).cast("Q")


class Meter:
    """Sums the CPU time of calls, those within calls not counted twice. One thread."""

    def __init__(self, words: memoryview, time_word: Word, count_word: Word | None = None) -> None:
        self._words = words
        self._time = time_word
        self._count = count_word
        self._inside = False
        self._overhead_ns = round(statistics.median(self._nothing() for _ in range(1000)))

    @staticmethod
    def _nothing() -> int:
        begin_ns = time.thread_time_ns()
        return time.thread_time_ns() - begin_ns

    def measure(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._inside:
            return call(*given, **named)
        self._inside = True
        time.thread_time_ns()  # so that the next reading does not find its own code cold
        begin_ns = time.thread_time_ns()
        try:
            return call(*given, **named)
        finally:
            took_ns = time.thread_time_ns() - begin_ns - self._overhead_ns
            self._inside = False
            self._words[self._time] += max(0, took_ns)
            if self._count is not None:
                self._words[self._count] += 1

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: self.measure(call, *given, **named)


class SwitchedRecorder(Recorder):
    """The recorder of an arm, under one name. Not `Recorder.__init__`: it has no ring."""

    def __init__(self, recorders: Mapping[Arm, Recorder], used: Callable[[Arm], None]) -> None:
        self._recorders = recorders
        self._used = used
        usual = recorders[Arm.ON]
        self.role = usual.role
        self.instance = usual.instance
        self.clock = usual.clock
        self.path = usual.path
        self.clock_id = usual.clock_id
        self.errors = 0
        self.dropped = 0
        self.use(Arm.OFF)

    def use(self, arm: Arm) -> None:
        """Every call from here on is `arm`'s own."""
        recorder = self._recorders[arm]
        self._report = recorder.report
        self.enabled = recorder.enabled
        for name in _CALLS:
            setattr(self, name, getattr(recorder, name))
        self._used(arm)

    def report(self, error: Exception) -> None:
        self._report(error)

    def close(self) -> None:
        for recorder in self._recorders.values():
            recorder.close()


class TimedRecorder(Recorder):
    """`recorder`, with the CPU time of its calls and of its traces' taken."""

    def __init__(self, recorder: Recorder, meter: Meter) -> None:
        self._recorder = recorder
        self._begin = meter.over(recorder.begin)
        self._trace_type = type(
            "TimedTrace",
            (RequestTrace,),
            {"__slots__": ()}
            | {name: _metered(getattr(RequestTrace, name), meter) for name in _TRACE_CALLS},
        )
        self.step = meter.over(recorder.step)
        self.gauge = meter.over(recorder.gauge)
        self.gauges = meter.over(recorder.gauges)
        self.clock_sample = meter.over(recorder.clock_sample)

    def begin(self, context: RequestContext, *, at_ns: int | None = None) -> RequestTrace:
        trace: RequestTrace = self._begin(context, at_ns=at_ns)
        trace.__class__ = self._trace_type
        return trace

    def report(self, error: Exception) -> None:
        self._recorder.report(error)

    def close(self) -> None:
        pass  # the other's


def _metered(call: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """As `Meter.over`, for a class: a lambda binds its instance, an object would not."""
    return lambda *given, **named: meter.measure(call, *given, **named)


class _Process:
    """What the hooks of this process share."""

    def __init__(self) -> None:
        self._words: memoryview | None = None

    def words(self, config: ProcessConfig) -> memoryview:
        if self._words is None:
            self._words = words_of(arms_path(config) / f"{config.instance}.words", create=True)
        return self._words


def main(arguments: list[str]) -> int:
    """As `server.process`; exit codes too."""
    own = _Process()
    load_engine = loader.load_engine
    config = process.load_config(Path(arguments[0]))

    def load_metered(engine_config: loader.EngineConfig) -> Engine:
        engine = load_engine(engine_config)
        meter = Meter(own.words(config), Word.ENGINE_NS)
        for name in _ENGINE_CALLS:
            setattr(engine, name, meter.over(getattr(engine, name)))
        return engine

    def open_switched(
        config: ProcessConfig, role: Role, clock: Clock, recorder: type[Recorder] = Recorder
    ) -> Recorder:
        arms = arms_path(config)
        words = own.words(config)
        on, export = (
            recorder.open(rings_path(arms, arm), role=role, instance=config.instance, clock=clock)
            for arm in (Arm.ON, Arm.EXPORT)
        )

        def used(arm: Arm) -> None:
            words[Word.ARM] = 1 + ARMS.index(arm)

        switched = SwitchedRecorder(
            {
                Arm.OFF: Recorder.disabled(),
                Arm.ON: on,
                Arm.EXPORT: export,
                Arm.TIMED: TimedRecorder(on, Meter(words, Word.CALLS_NS, Word.CALLS)),
            },
            used,
        )

        def switch(_number: int, _frame: FrameType | None) -> None:
            switched.use(Arm((arms / "arm").read_text()))

        signal.signal(signal.SIGUSR1, switch)
        return switched

    # The roles' modules import these names when they are loaded, which is later.
    loader.load_engine = load_metered
    recording.open_recorder = open_switched
    return process.main(arguments)


if __name__ == "__main__":
    process.leave(main(sys.argv[1:]))
