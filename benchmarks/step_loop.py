"""An engine-like loop: what recording does to the steps of the thread that serves.

A step is about 0.6 ms of Python and a wait of 1 ms that holds no interpreter lock, as an engine
that drives a GPU does. Marks (or SDK spans) are spread evenly over the steps to reach a rate. Every
variant runs in a process of its own, so that no exporter's thread outlives its turn; its child
prints the length of each step. `off` runs twice under two names: what the two differ by is what
this method cannot tell apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PYTHON_S = 0.0006
WAIT_S = 0.001
WARM_UP = 100
VARIANTS = ("off", "off again", "recorder", "SDK")


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds: the mean and the 99th percentile of one turn's steps, and its processor time per
    step, of the thread that steps."""

    mean_s: float
    p99_s: float
    thread_s: float


def run_turn(variant: str, rate: int, seconds: float, endpoint: str) -> Steps:
    """One turn of one variant in a fresh process. `endpoint` takes the SDK's OTLP over HTTP."""
    command = [sys.executable, "-m", "benchmarks.step_loop", "--variant", variant]
    command += ["--rate", str(rate), "--seconds", str(seconds), "--endpoint", endpoint]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    numbers = json.loads(finished.stdout.splitlines()[-1])
    return Steps(mean_s=numbers["mean_s"], p99_s=numbers["p99_s"], thread_s=numbers["thread_s"])


def _spin_count() -> int:
    """How many turns of the Python part take `PYTHON_S` here."""
    turns = 20_000
    fastest = min(_spin_seconds(turns) for _ in range(5))
    return max(1, round(turns * PYTHON_S / fastest))


def _spin_seconds(turns: int) -> float:
    begin = time.perf_counter()
    _spin(turns)
    return time.perf_counter() - begin


def _spin(turns: int) -> int:
    total = 0
    for number in range(turns):
        total += number & 7
    return total


def _measure(emit: Callable[[], None], rate: int, seconds: float) -> Steps:
    turns = _spin_count()
    per_step = rate * (PYTHON_S + WAIT_S)
    owed = 0.0
    lengths: list[float] = []
    clock, sleep = time.perf_counter, time.sleep
    end_s = clock() + seconds
    used_s = time.thread_time()
    while True:
        begin = clock()
        _spin(turns)
        owed += per_step
        while owed >= 1:
            owed -= 1
            emit()
        sleep(WAIT_S)
        ended = clock()
        lengths.append(ended - begin)
        if len(lengths) == WARM_UP:
            used_s = time.thread_time()
        if ended >= end_s and len(lengths) > 2 * WARM_UP:
            break
    used_s = time.thread_time() - used_s
    measured = sorted(lengths[WARM_UP:])
    return Steps(
        mean_s=statistics.fmean(measured),
        p99_s=measured[int(len(measured) * 0.99)],
        thread_s=used_s / len(measured),
    )


def _recorder_emit(directory: Path) -> Callable[[], None]:
    from pdtrace import Mark, Recorder, RequestContext, Role

    recorder = Recorder.open(directory, role=Role.TRANSFER, instance="bench", budget=None)
    trace = recorder.begin(RequestContext.create())
    mark, values = trace.mark, (3, 18, 829_440, 2)

    def emit() -> None:
        mark(Mark.COPY_QUEUED, *values)

    return emit


def _sdk_emit(endpoint: str) -> Callable[[], None]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter,
    )
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


def main() -> int:
    """One turn of one variant; prints one JSON object."""
    parser = argparse.ArgumentParser(description="One turn of the engine-like loop.")
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--rate", type=int, required=True, help="marks or spans per second")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--endpoint", default="http://127.0.0.1:4318")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as folder:
        if given.variant == "recorder":
            emit = _recorder_emit(Path(folder))
        elif given.variant == "SDK":
            emit = _sdk_emit(given.endpoint)
        else:
            emit = _nothing
        steps = _measure(emit, given.rate, given.seconds)
    print(
        json.dumps({"mean_s": steps.mean_s, "p99_s": steps.p99_s, "thread_s": steps.thread_s}),
        flush=True,
    )
    return 0


def _nothing() -> None:
    pass


if __name__ == "__main__":
    import os

    status = main()
    sys.stdout.flush()
    os._exit(status)  # without the SDK's last flush: the turn is over
