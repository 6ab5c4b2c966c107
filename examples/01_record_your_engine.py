"""Record an engine of your own in about ten lines, then see where each request's time went.

    python examples/01_record_your_engine.py [DIRECTORY]

The engine stands in for yours: it pairs the words of a prompt (prefill), then looks at all pairs to
choose each next word (decode), two requests at a time. Its lines that record end in `# ←`. Ring
files are left in DIRECTORY, without it in a temporary one; the commands to look further are
printed. More on recording: docs/recording.md.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pdtrace import (
    MarkRecord,
    Mode,
    OpenRecord,
    Outcome,
    Recorder,
    RequestContext,
    RequestTrace,
    RingReader,
    Role,
    StepKind,
    WaitReason,
    scan_rings,
)
from pdtrace.stages import CHAINS, Mark

SLOTS = 2


@dataclass
class Job:
    """A request inside the engine."""

    trace: RequestTrace
    prompt: list[str]
    max_tokens: int
    output: list[str] = field(default_factory=list[str])
    pairs: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


class Engine:
    """Both phases in one process, `SLOTS` requests at a time: a worker, in pdtrace's words."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    def submit(self, context: RequestContext, prompt: list[str], max_tokens: int) -> None:
        trace = self._recorder.begin(context)  # ←
        trace.mark(Mark.RESERVE_RECEIVED)  # ←
        self._waiting.append(Job(trace, prompt, max_tokens))

    def step(self) -> tuple[list[Job], list[Job]]:
        """Admit, prefill, decode a word of each; returns the jobs that started and finished."""
        started: list[Job] = []
        while self._waiting and len(self._running) < SLOTS:
            job = self._waiting.popleft()
            started.append(job)
            self._running.append(job)
            job.trace.mark(Mark.PREFILL_STARTED, 0, len(self._running))  # ←
            job.pairs = list(zip(job.prompt, job.prompt[1:], strict=False))
            job.output.append(job.prompt[0])
            job.trace.mark(Mark.PREFILL_FINISHED)  # ←
            job.trace.mark(Mark.FIRST_TOKEN_COMMITTED)  # ←
        for position, job in enumerate(self._waiting):
            blocker = self._running[-1].trace.context.request_id
            job.trace.wait(  # ←
                "prefill.queue",
                WaitReason.SLOTS,
                needed=1,
                free=0,
                position=position,
                blocker=blocker,
            )
        begin_ns = time.monotonic_ns()
        for job in self._running:
            candidates = [follower for word, follower in job.pairs if word == job.output[-1]]
            job.output.append(random.choice(candidates or job.prompt))
        self._recorder.step(  # ←
            StepKind.DECODE,
            [job.trace for job in self._running],
            tokens=len(self._running),
            begin_ns=begin_ns,
            end_ns=time.monotonic_ns(),
        )
        finished = [job for job in self._running if len(job.output) >= job.max_tokens]
        self._running = [job for job in self._running if job not in finished]
        for job in finished:
            job.trace.mark(Mark.DECODE_FINISHED, len(job.output), "length", 0)  # ←
            job.trace.end()  # ←
        return started, finished


def serve(recorder: Recorder, engine: Engine, prompts: dict[str, str]) -> None:
    """The HTTP side: takes up one request between two steps, and closes those that finished."""
    arriving = deque(prompts.items())
    open_requests: dict[str, RequestTrace] = {}
    while arriving or open_requests:
        if arriving:
            request_id, prompt = arriving.popleft()
            # A real server passes parent=extract(request.headers) to continue the caller's trace.
            context = RequestContext.create(request_id=request_id, mode=Mode.COLOCATED)
            trace = recorder.begin(context)
            trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
            words = prompt.split()
            trace.mark(Mark.TOKENIZED, "words", len(words), 200, True, Mode.COLOCATED)
            trace.mark(Mark.ADMITTED)
            trace.mark(Mark.ROUTED, "worker-0", "worker-0", "round_robin", 1, "only worker")
            trace.mark(Mark.DISPATCHED)
            open_requests[request_id] = trace
            engine.submit(context, words, max_tokens=200)
        started, finished = engine.step()
        for job in started:
            open_requests[job.trace.context.request_id].mark(Mark.FIRST_TOKEN_SENT)
        for job in finished:
            trace = open_requests.pop(job.trace.context.request_id)
            trace.mark(
                Mark.COMPLETED, Outcome.COMPLETED, None, None, 200, len(job.output), "length"
            )
            trace.end()


def read_marks(directory: Path) -> dict[str, list[MarkRecord]]:
    """Marks of every request, from the rings of all processes, in order of time."""
    marks: dict[str, list[MarkRecord]] = {}
    for path in scan_rings(directory):
        request_ids: dict[int, str] = {}  # keys are local to a ring
        with RingReader(path) as reader:
            for record in reader.read():
                if isinstance(record, OpenRecord):
                    request_ids[record.key] = record.context.request_id
                elif isinstance(record, MarkRecord):
                    marks.setdefault(request_ids[record.key], []).append(record)
    for records in marks.values():
        records.sort(key=lambda record: record.t_ns)
    return marks


def stage_times(records: list[MarkRecord]) -> Iterator[tuple[str, float]]:
    """Each stage of the chain and its milliseconds; they sum to the whole request."""
    times_ns = {record.mark: record.t_ns for record in records}
    begin_ns = times_ns[Mark.RECEIVED]
    for stage in CHAINS[Mode.COLOCATED]:
        yield stage.name, (times_ns[stage.end] - begin_ns) / 1e6
        begin_ns = times_ns[stage.end]


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="pdtrace-"))
    with (
        Recorder.open(directory, role=Role.GATEWAY, instance="gateway-0") as gateway_recorder,
        Recorder.open(directory, role=Role.WORKER, instance="worker-0") as worker_recorder,
    ):
        text = "the first token exists before the pages of that token exist and the rest follow "
        prompts = {"short": text, "long": text * 1_000, "third": text, "fourth": text * 100}
        serve(gateway_recorder, Engine(worker_recorder), prompts)

    for request_id, records in read_marks(directory).items():
        stages = list(stage_times(records))
        stage, most_ms = max(stages, key=lambda one: one[1])
        total_ms = sum(ms for _, ms in stages)
        print(f"{request_id:>8}: {total_ms:8.2f} ms, of which {most_ms:8.2f} ms in {stage}")
        for record in records:
            if record.mark is Mark.WAITING:
                print(f"          waited for {record.values[1]}, behind {record.values[6]!r}")
    print(
        f"\nThe same with causes, drawn:\n  pdtrace agent --rings {directory} --out {directory} ",
        end="",
    )
    print(f"--until-closed\n  pdtrace why --from {directory}")


if __name__ == "__main__":
    main()
