"""An engine-like loop: what recording does to the steps of the thread that serves.

A step is about 0.6 ms of Python and a wait of 1 ms that holds no interpreter lock, as an engine
that drives a GPU does. Marks with four attributes (or SDK spans with as many) are spread evenly
over the steps to reach a rate, and over the requests of a batch. Within a step they come together
before the wait, as when a batch is planned, or apart, with Python in between: then each of them
finds its code and data out of the caches, not the first one only.

Recording has no thread of its own, so its steps are mixed with steps that record nothing, in random
order within one process: both meet the same neighbours. They come in runs of `RUN`, since an engine
records in every step and finds its code in the caches. Steps that record nothing are drawn under
two names, `off` and `off again`; what these differ by is what the method cannot tell apart. The
SDK's exporting thread would disturb the other steps, so its turns run in processes of their own,
against turns of `off` right beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

PYTHON_S = 0.0006
WAIT_S = 0.001
BATCH = 32
RUN = 20
LEFT_OUT = 2  # of each run: they still feel the variant before
MIXED = ("off", "off again", "recorder")
OFF = ("off",)
SDK = ("SDK",)


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of one variant's steps in one turn: median, mean without the longest hundredth, 99th
    percentile, and the processor time of the thread, mean."""

    median_s: float
    mean_s: float
    p99_s: float
    cpu_s: float

    @classmethod
    def of(cls, lengths: Sequence[float], cpu_s: float) -> Steps:
        """The numbers of these steps, which took `cpu_s` of processor time together."""
        ordered = sorted(lengths)
        most = ordered[: max(1, int(len(ordered) * 0.99))]
        return cls(
            median_s=statistics.median(ordered),
            mean_s=statistics.fmean(most),
            p99_s=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
            cpu_s=cpu_s / len(ordered),
        )


def calibrate() -> int:
    """How many rounds of the Python part take `PYTHON_S` here."""
    rounds = 20_000
    fastest = min(_spin_seconds(rounds) for _ in range(9))
    return max(1, round(rounds * PYTHON_S / fastest))


def run_turn(
    variants: Sequence[str],
    *,
    rate: int,
    seconds: float,
    rounds: int,
    endpoint: str,
    apart: bool = False,
) -> Mapping[str, Steps]:
    """One turn in a fresh process, its steps drawn from `variants`.

    rounds    of the Python part, from `calibrate`: the same work in every process
    apart     marks have Python between them
    endpoint  takes the SDK's OTLP over HTTP
    """
    command = [sys.executable, "-m", "benchmarks.step_loop", *variants]
    command += ["--rate", str(rate), "--seconds", str(seconds), "--rounds", str(rounds)]
    command += ["--apart"] if apart else []
    finished = subprocess.run(
        [*command, "--endpoint", endpoint], check=True, capture_output=True, text=True
    )
    numbers = json.loads(finished.stdout.splitlines()[-1])
    return {name: Steps(**found) for name, found in numbers.items()}


def _spin_seconds(rounds: int) -> float:
    begin = time.perf_counter()
    _spin(rounds)
    return time.perf_counter() - begin


def _spin(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number & 7
    return total


def _measure(
    emits: Mapping[str, Callable[[], None]],
    *,
    rate: int,
    seconds: float,
    rounds: int,
    apart: bool,
) -> dict[str, Steps]:
    per_step = rate * (PYTHON_S + WAIT_S)
    owed = dict.fromkeys(emits, 0.0)
    lengths: dict[str, list[float]] = {name: [] for name in emits}
    cpu_s = dict.fromkeys(emits, 0.0)
    names = list(emits)
    clock, cpu_clock, sleep = time.perf_counter, time.thread_time, time.sleep
    end_s = clock() + seconds
    while clock() < end_s or not all(lengths.values()):
        name = random.choice(names)
        emit = emits[name]
        due = owed[name]
        begin_cpu_s = 0.0
        for number in range(RUN):
            due += per_step
            marks = int(due)
            due -= marks
            pieces = max(marks, 1) if apart else 1
            if number == LEFT_OUT:
                begin_cpu_s = cpu_clock()
            begin = clock()
            for _ in range(pieces - 1):
                _spin(rounds // pieces)
                emit()
            _spin(rounds // pieces)
            for _ in range(marks - pieces + 1):
                emit()
            sleep(WAIT_S)
            if number >= LEFT_OUT:
                lengths[name].append(clock() - begin)
        cpu_s[name] += cpu_clock() - begin_cpu_s
        owed[name] = due
    return {name: Steps.of(found, cpu_s[name]) for name, found in lengths.items()}


def _recorder_emit(directory: Path) -> Callable[[], None]:
    from pdtrace import Mark, Recorder, RequestContext, Role

    recorder = Recorder.open(directory, role=Role.TRANSFER, instance="bench", budget=None)
    batch = cycle([recorder.begin(RequestContext.create()) for _ in range(BATCH)])
    values = (3, 18, 829_440, 2)

    def emit() -> None:
        next(batch).mark(Mark.COPY_QUEUED, *values)

    return emit


def _sdk_emit(endpoint: str) -> Callable[[], None]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("bench")
    attributes = {"pd.chunk.index": 3, "pd.kv.pages": 18, "pd.kv.bytes": 829_440, "pd.batch": 2}

    def emit() -> None:
        tracer.start_span("transfer.queue", attributes=attributes).end()

    return emit


def _nothing() -> None:
    pass


def main() -> int:
    """One turn; prints one JSON object."""
    parser = argparse.ArgumentParser(description="One turn of the engine-like loop.")
    parser.add_argument("variants", nargs="+", choices=(*MIXED, *SDK))
    parser.add_argument("--rate", type=int, required=True, help="marks or spans per second")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=0, help="of the Python part; 0: calibrate")
    parser.add_argument("--apart", action="store_true", help="marks have Python between them")
    parser.add_argument("--endpoint", default="http://127.0.0.1:4318")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as folder:
        make: Mapping[str, Callable[[], Callable[[], None]]] = {
            "off": lambda: _nothing,
            "off again": lambda: _nothing,
            "recorder": lambda: _recorder_emit(Path(folder)),
            "SDK": lambda: _sdk_emit(given.endpoint),
        }
        steps = _measure(
            {name: make[name]() for name in given.variants},
            rate=given.rate,
            seconds=given.seconds,
            rounds=given.rounds or calibrate(),
            apart=given.apart,
        )
    print(json.dumps({name: asdict(found) for name, found in steps.items()}), flush=True)
    return 0


if __name__ == "__main__":
    import os

    status = main()
    sys.stdout.flush()
    os._exit(status)  # without the SDK's last flush: the turn is over
