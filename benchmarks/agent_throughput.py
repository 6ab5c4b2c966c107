"""How many spans a second does the agent make of marks on one core, and what costs what?

    python -m benchmarks.agent_throughput [--json] [--repeats N] [--requests N]

Requests are recorded into ring files by the ordinary recorders (prefill/decode, three chunks, two
waits, forward passes of eight members), a slice at a time; the agent then reads them and hands
their spans to a receiver in another process that takes them at once. Recording is not timed.

    agent             marks in, OTLP out: read, track, assemble, judge, encode, send
    agent, files      the same, and every request written to the run directory first
    agent, SDK's way  the same spans as ReadableSpans through the OpenTelemetry SDK's exporter
    SDK alone         the same spans made and exported by the OpenTelemetry SDK, without any marks

Cases take turns within each repeat, in an order drawn anew. Times are CPU time of the whole
process, export threads included: what one core has to give. The table of stages is CPU time of one
thread that calls them one after the other on the same requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from benchmarks.otlp_sink import running
from pdtrace import Mark, Recorder, RequestContext, Role, WaitReason
from pdtrace.agent.command import Agent, collect_garbage_rarely
from pdtrace.agent.judging import RollingJudge
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.assembly.request_spans import assemble, assemble_lazily
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.export.queue import MAX_BATCH_SPANS, Answer, QueueLimits, Sent, Target
from pdtrace.export.settings import ExportPlan
from pdtrace.export.targets import otlp_http_target, sdk_target
from pdtrace.native import hot_path
from pdtrace.otlp.json_lines import encode_line
from pdtrace.otlp.protobuf import serialize_request
from pdtrace.ring import RingReader, scan_rings
from pdtrace.ring.layout import RingCapacity
from pdtrace.ring.records import Record, Value
from pdtrace.spans import Span, SpanBatch
from pdtrace.stages import StepKind
from pdtrace.testing import Wait, open_recorders, record_request

ROLES = (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)
RINGS = RingCapacity(blocks=512, block_bytes=64 * 1024)
SLICE = 100
"""Requests between two looks of the agent: about 50 ms of 50,000 spans a second."""
SDK_BATCH = 512
"""The SDK's own default; the agent sends batches of its default."""
MEMBERS = 8
OUTPUT_TOKENS = 32
_NUMBERS = itertools.count(1)  # no request id comes twice: encoders remember what does


# -- recording -------------------------------------------------------------------------------


class _Passes:
    """Stands in for a recorder: holds attempts back until there are MEMBERS of them, records the
    forward passes that they share, and then lets them go."""

    def __init__(self, recorder: Recorder, kind: StepKind, count: int) -> None:
        self.clock = recorder.clock
        self.instance = recorder.instance
        self._recorder = recorder
        self._kind = kind
        self._count = count
        self._held: list[tuple[Any, int | None]] = []

    def begin(self, context: RequestContext, *, at_ns: int | None = None) -> _Attempt:
        return _Attempt(self, self._recorder.begin(context, at_ns=at_ns))

    def hold(self, trace: Any, at_ns: int | None) -> None:
        self._held.append((trace, at_ns))
        if len(self._held) == MEMBERS:
            self.release()

    def release(self) -> None:
        traces = [trace for trace, _ in self._held]
        for number in range(self._count if traces else 0):
            begin_ns = 10**9 + number * 12_000_000
            self._recorder.step(
                self._kind, traces, tokens=len(traces), begin_ns=begin_ns, end_ns=begin_ns + 10**7
            )
        for trace, at_ns in self._held:
            trace.end(at_ns=at_ns)
        self._held.clear()


class _Attempt:
    def __init__(self, passes: _Passes, trace: Any) -> None:
        self._passes = passes
        self._trace = trace

    def mark(self, mark: Mark, *values: Value, at_ns: int | None = None) -> None:
        self._trace.mark(mark, *values, at_ns=at_ns)

    def end(self, *, at_ns: int | None = None) -> None:
        self._passes.hold(self._trace, at_ns)


class Traffic:
    """Ring files in `directory`, and requests recorded into them."""

    def __init__(self, directory: Path) -> None:
        self._recorders = open_recorders(directory, roles=ROLES, capacity=RINGS)
        self._passes = [
            _Passes(self._recorders[Role.PREFILL], StepKind.PREFILL, 3),
            _Passes(self._recorders[Role.DECODE], StepKind.DECODE, OUTPUT_TOKENS),
        ]
        stand_ins = dict(zip((Role.PREFILL, Role.DECODE), self._passes, strict=True))
        self._through = cast("Mapping[Role, Recorder]", {**self._recorders, **stand_ins})
        self._rng = random.Random(0)
        self._started_ns = time.monotonic_ns()

    def record(self, count: int) -> None:
        """Records `count` healthy requests whose waits name their predecessors."""
        rng = self._rng
        for number in itertools.islice(_NUMBERS, count):
            before = f"req-{number - 1:08d}"
            waits: Mapping[str, Wait] = {
                "decode.reserve": {
                    "reason": WaitReason.KV_PAGES,
                    "needed": 18,
                    "free": rng.randrange(18),
                    "position": 1,
                    "blocker": before,
                },
                "prefill.queue": {
                    "reason": WaitReason.TOKEN_BUDGET,
                    "needed": 256,
                    "free": 0,
                    "position": 2,
                    "blocker": before,
                },
            }
            record_request(
                self._through,
                request_id=f"req-{number:08d}",
                start_ns=self._started_ns + number * 3_000_000,
                stage_ms={
                    "prefill.queue": rng.uniform(1, 60),
                    "prefill.compute": rng.uniform(90, 150),
                    "decode.generate": rng.uniform(350, 450),
                },
                waits=waits,
                output_tokens=OUTPUT_TOKENS,
                chunks=3,
            )
        for passes in self._passes:
            passes.release()

    def close(self) -> None:
        for recorder in self._recorders.values():
            recorder.close()


# -- cases -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Used:
    """What a case took for a number of spans. Seconds."""

    spans: int = 0
    cpu_s: float = 0.0
    thread_s: float = 0.0  # of the thread that polls
    wall_s: float = 0.0


class Counted:
    """A target that lets one wait for what it has handed over."""

    def __init__(self, target: Target) -> None:
        self.name, self.kind = target.name, target.kind
        self._target = target
        self._taken = 0
        self._changed = threading.Condition()

    def send(self, spans: Sequence[Span]) -> Answer:
        answer = self._target.send(spans)
        assert answer.sent is Sent.OK, answer
        with self._changed:
            self._taken += len(spans)
            self._changed.notify_all()
        return answer

    def shutdown(self) -> None:
        self._target.shutdown()

    def wait_for(self, spans: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._taken >= spans, timeout=120)


Case = Callable[[str, int], Used]
"""(endpoint, requests) -> used."""


def agent_case(make_target: Callable[[str], Target], *, files: bool) -> Case:
    def case(endpoint: str, requests: int) -> Used:
        used = Used()
        with tempfile.TemporaryDirectory() as directory:
            rings, out = Path(directory) / "rings", Path(directory) / "out"
            traffic = Traffic(rings)
            limits = QueueLimits(delay_s=0.01)
            target = Counted(make_target(endpoint))
            plan = ExportPlan(targets=[target], limits=limits)
            agent = Agent(rings, out=out if files else None, export=plan, judge=RollingJudge())
            agent.poll()
            for _ in range(requests // SLICE):
                traffic.record(SLICE)
                wall_s, cpu_s, thread_s = time.monotonic(), time.process_time(), time.thread_time()
                agent.poll()
                used.thread_s += time.thread_time() - thread_s
                target.wait_for(agent.summary().spans)
                used.cpu_s += time.process_time() - cpu_s
                used.wall_s += time.monotonic() - wall_s
            used.spans = agent.summary().spans
            traffic.close()
            summary = agent.close()
        lost = {name: n for name, n in summary.export.items() if n and name != "spans_exported"}
        assert summary.requests == requests // SLICE * SLICE, summary.line()
        assert not (lost or summary.missed or summary.errors or summary.lines_lost), summary.line()
        return used

    return case


def fast_target(endpoint: str) -> Target:
    return otlp_http_target(endpoint)


def compatible_target(endpoint: str) -> Target:
    return sdk_target("otlp", OTLPSpanExporter(endpoint=endpoint))


def sdk_case(endpoint: str, requests: int) -> Used:
    """Makes and exports, with the SDK alone, the spans that the agent makes of these requests."""
    used = Used()
    built = [assemble(request) for request in collected(SLICE).requests]
    exporter = OTLPSpanExporter(endpoint=endpoint)
    provider = TracerProvider(resource=SdkResource.create({"service.name": "bench"}))
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=10**6,
            max_export_batch_size=SDK_BATCH,
            schedule_delay_millis=10,
        )
    )
    tracer = provider.get_tracer("bench")
    for _ in range(requests // SLICE):
        wall_s, cpu_s, thread_s = time.monotonic(), time.process_time(), time.thread_time()
        for spans in built:
            context = _parent(spans[0].trace_id, spans[0].span_id)
            for span in spans:
                made = tracer.start_span(
                    span.name,
                    context,
                    kind=SpanKind.INTERNAL,
                    attributes=span.attributes,
                    links=[Link(_span_context(k.trace_id, k.span_id)) for k in span.links],
                    start_time=span.start_ns,
                )
                for event in span.events:
                    made.add_event(event.name, event.attributes, event.time_ns)
                made.end(span.end_ns)
        used.thread_s += time.thread_time() - thread_s
        provider.force_flush()
        used.cpu_s += time.process_time() - cpu_s
        used.wall_s += time.monotonic() - wall_s
        used.spans += sum(len(spans) for spans in built)
    provider.shutdown()
    return used


def _span_context(trace_id: str, span_id: str) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=flags)


def _parent(trace_id: str, span_id: str) -> Any:
    return set_span_in_context(NonRecordingSpan(_span_context(trace_id, span_id)))


# -- stages ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Collected:
    """Requests as the tracker hands them on, and the CPU seconds that it took to come there."""

    requests: list[CollectedRequest]
    records: int
    read_s: float
    track_s: float


def collected(count: int) -> Collected:
    with tempfile.TemporaryDirectory() as directory:
        traffic = Traffic(Path(directory))
        traffic.record(count)
        readers = {path.name: RingReader(path) for path in scan_rings(directory)}
        begin_s = time.thread_time()
        records: dict[str, list[Record]] = {name: r.read() for name, r in readers.items()}
        read_s = time.thread_time()
        tracker = RequestTracker()
        for name, reader in readers.items():
            tracker.add_ring(name, process_of(reader.identity, {}))
        for name, found in records.items():
            tracker.feed(name, found, 0)
        requests = tracker.finished(0)
        track_s = time.thread_time()
        for reader in readers.values():
            reader.close()
        traffic.close()
    return Collected(requests, sum(map(len, records.values())), read_s - begin_s, track_s - read_s)


def stage_times(count: int) -> Mapping[str, float]:
    """Microseconds of CPU time per span, stage by stage."""
    found = collected(count)
    times = {"read": found.read_s, "track": found.track_s}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin_s = time.thread_time()
        result = work()
        times[name] = time.thread_time() - begin_s
        return result

    def built() -> list[Sequence[Span]]:
        return [assemble_lazily(request) for request in found.requests]

    built()  # plans of the shapes
    requests: list[Sequence[Span]] = timed("assemble", built)
    judge = RollingJudge()
    timed("judge", lambda: [judge(spans) for spans in requests])
    size = MAX_BATCH_SPANS // len(requests[0])
    batches = [SpanBatch(requests[at : at + size]) for at in range(0, len(requests), size)]
    timed("protobuf", lambda: [serialize_request(batch) for batch in batches])
    timed("make spans (files, metrics)", lambda: [list(spans) for spans in requests])
    timed("JSON (files only)", lambda: [encode_line(spans) for spans in requests])
    num_spans = sum(map(len, requests))
    return {name: seconds / num_spans * 1e6 for name, seconds in times.items()}


# -- the run ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """One case, one `Used` for each repeat."""

    name: str
    case: Case
    used: list[Used] = field(default_factory=list[Used])

    @property
    def rates(self) -> list[float]:
        """Spans a second and core."""
        return [used.spans / used.cpu_s for used in self.used]


def cases() -> list[Measured]:
    return [
        Measured("agent", agent_case(fast_target, files=False)),
        Measured("agent, files", agent_case(fast_target, files=True)),
        Measured("agent, SDK's way", agent_case(compatible_target, files=False)),
        Measured("SDK alone", sdk_case),
    ]


def spread(values: Sequence[float], digits: int = 0) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def measure(repeats: int, requests: int) -> tuple[list[Measured], Mapping[str, list[float]]]:
    """All cases and the stages, in turns."""
    order = random.Random(0)
    measured = cases()
    stages: dict[str, list[float]] = {}
    with running() as url:
        endpoint = f"{url}/v1/traces"
        for one in measured:
            one.case(endpoint, SLICE)  # warm up
        for _ in range(repeats):
            for one in order.sample(measured, len(measured)):
                one.used.append(one.case(endpoint, requests))
            for name, micros in stage_times(SLICE * 5).items():
                stages.setdefault(name, []).append(micros)
    return measured, stages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, last line")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1_000, help=f"a multiple of {SLICE}")
    args = parser.parse_args()
    if args.repeats < 1 or args.requests < SLICE or args.requests % SLICE:
        parser.error(f"--repeats takes 1 or more, --requests a multiple of {SLICE}")

    collect_garbage_rarely()  # as the agent's process does; the SDK gains by it too
    measured, stages = measure(args.repeats, args.requests)
    spans = measured[0].used[0].spans
    print(
        f"CPython {platform.python_version()}, reads and encodes in {hot_path()}, "
        f"{args.repeats} repeats of {args.requests} requests, {spans} spans"
    )
    print(
        f"{'spans a second and core':<28}"
        f"{'median':>9}{'min':>9}{'max':>9}{'to SDK':>9}{'wall/s':>9}"
    )
    alone = measured[-1].rates
    result: dict[str, object] = {
        "spans": spans,
        "repeats": args.repeats,
        "hot_path": hot_path(),
    }
    for one in measured:
        rate = spread(one.rates)
        ratio = spread([a / b for a, b in zip(one.rates, alone, strict=True)], 2)
        wall = statistics.median(used.spans / used.wall_s for used in one.used)
        print(
            f"{one.name:<28}{rate['median']:>9,.0f}{rate['min']:>9,.0f}{rate['max']:>9,.0f}"
            f"{ratio['median']:>9}{wall:>9,.0f}"
        )
        result[one.name] = {
            "spans_per_s_core": rate,
            "ratio_to_sdk": ratio,
            "spans_per_s_wall": round(wall),
            "thread_us_per_span": spread([u.thread_s / u.spans * 1e6 for u in one.used], 2),
        }
    print(f"{'µs of CPU per span':<28}{'median':>9}{'min':>9}{'max':>9}")
    for name, micros in stages.items():
        each = spread(micros, 2)
        print(f"{name:<28}{each['median']:>9}{each['min']:>9}{each['max']:>9}")
    result["us_per_span"] = {name: spread(micros, 2) for name, micros in stages.items()}
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
