"""What does recording cost the thread that serves? A mark against an OpenTelemetry SDK span.

    python -m benchmarks.bench_recording [--json] [--repeats N] [--calls N]

Every case runs `calls` times per repeat (SDK spans a quarter of that); the cases take turns within
each repeat, in an order drawn anew, so that a busy machine slows all of them alike. Times are CPU
time of the calling thread: neither waiting for a core nor the SDK's export thread counts. What that
thread costs the process shows in the row "exported", which is CPU time of the whole process until
the receiver has all spans. SDK spans go through a BatchSpanProcessor and the OTLP/HTTP exporter to
a receiver in a process of its own.

One chain stage costs one mark (a mark ends one stage and begins the next) or one span.
With --json the last line is an object: medians in nanoseconds, ratios with their spread.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from benchmarks import otlp_sink
from pdtrace import Gauge, Mark, Recorder, RequestContext, Role, WaitReason
from pdtrace.budget import Costs
from pdtrace.native import hot_path
from pdtrace.recorder import recording_costs
from pdtrace.stages import StepKind

Case = Callable[[int], None]

SDK_PART = 4  # an SDK span takes so much longer that fewer of them do
BETWEEN_PART = 20
FOUR_INTS = (3, 18, 829_440, 2)
FIVE_WITH_STRINGS = ("prefill-0", "decode-0", "least_loaded", 4, "fewest waiting tokens")
BLOCKERS = ("req-0123456789abcdef", "req-fedcba9876543210")
EIGHT_MIXED = (
    "transfer.queue",
    WaitReason.COPY_QUEUE,
    *(18, 3, 64, 4),
    BLOCKERS[0],
    "\x1f".join(BLOCKERS),
)
FOUR_ATTRS = {"pd.chunk.index": 3, "pd.kv.pages": 18, "pd.kv.bytes": 829_440, "pd.batch.size": 2}
EIGHT_ATTRS = {
    "pd.wait.stage": "transfer.queue",
    "pd.wait.reason": "copy_queue",
    "pd.wait.needed": 18,
    "pd.wait.free": 3,
    "pd.wait.limit": 64,
    "pd.wait.position": 4,
    "pd.wait.blocker": BLOCKERS[0],
    "pd.wait.blockers": BLOCKERS,
}


@dataclass(slots=True)
class Measured:
    """Nanoseconds per call, one for each repeat. `key` is the name in the JSON."""

    key: str
    name: str
    case: Case
    clock: Callable[[], int] = time.thread_time_ns
    settle: Callable[[], object] = lambda: None
    part: int = 1
    ns: list[float] = field(default_factory=list[float])

    def run(self, calls: int) -> None:
        calls = max(1, calls // self.part)
        begin = self.clock()
        self.case(calls)
        self.settle()
        self.ns.append((self.clock() - begin) / calls)

    @property
    def median(self) -> float:
        return statistics.median(self.ns)


def do_nothing(_mark: Mark) -> None:
    """What any call costs."""


class BetweenOtherWork:
    """Calls in bursts, each after a millisecond's sleep and a megabyte of other memory: as in a
    program that serves. The clock is the time of the bursts alone."""

    BURST = 20

    def __init__(self, case: Case) -> None:
        self._case = case
        self._other = bytearray(1 << 20)
        self._spent_ns = 0

    def run(self, calls: int) -> None:
        for _ in range(calls // self.BURST):
            time.sleep(0.001)
            self._other = bytearray(self._other)
            begin = time.thread_time_ns()
            self._case(self.BURST)
            self._spent_ns += time.thread_time_ns() - begin

    def clock(self) -> int:
        return self._spent_ns


def recorder_cases(
    recorder: Recorder, gateway: Recorder, context: RequestContext
) -> list[Measured]:
    trace = recorder.begin(context)
    request = gateway.begin(context)
    traces = [recorder.begin(context) for _ in range(256)]

    def no_op(calls: int) -> None:
        mark = do_nothing
        for _ in range(calls):
            mark(Mark.COPY_STARTED)

    def bare(calls: int) -> None:
        mark = trace.mark
        for _ in range(calls):
            mark(Mark.COPY_STARTED)

    def four(calls: int) -> None:
        mark = trace.mark
        for _ in range(calls):
            mark(Mark.COPY_QUEUED, *FOUR_INTS)

    def eight(calls: int) -> None:
        mark = trace.mark
        for _ in range(calls):
            mark(Mark.WAITING, *EIGHT_MIXED)

    def strings(calls: int) -> None:
        mark = request.mark
        for _ in range(calls):
            mark(Mark.ROUTED, *FIVE_WITH_STRINGS)

    def changed_wait(calls: int) -> None:
        wait = trace.wait
        for number in range(calls):
            wait("transfer.queue", WaitReason.COPY_QUEUE, position=4, blocker=BLOCKERS[number & 1])

    def unchanged_wait(calls: int) -> None:
        wait = trace.wait
        for _ in range(calls):
            wait("transfer.queue", WaitReason.COPY_QUEUE, position=4, blocker=BLOCKERS[0])

    def several_blockers(calls: int) -> None:
        wait = trace.wait
        for _ in range(calls):
            wait("transfer.queue", WaitReason.COPY_QUEUE, position=4, blocker=BLOCKERS)

    def steps_of(members: int) -> Case:
        batch = traces[:members]

        def steps(calls: int) -> None:
            step = recorder.step
            for number in range(calls):
                step(StepKind.DECODE, batch, tokens=members, begin_ns=number, end_ns=number)

        return steps

    def gauge(calls: int) -> None:
        set_gauge = recorder.gauge
        for number in range(calls):
            set_gauge(Gauge.COPIED_BYTES, number)

    def begin_and_end(calls: int) -> None:
        begin = recorder.begin
        for _ in range(calls):
            begin(context).end()

    between = BetweenOtherWork(four)
    disabled = Recorder.disabled().begin(context)

    def off(calls: int) -> None:
        mark = disabled.mark
        for _ in range(calls):
            mark(Mark.COPY_QUEUED, *FOUR_INTS)

    return [
        Measured("no_op_ns", "call of a function that does nothing", no_op),
        Measured("mark_ns", "mark", bare),
        Measured("mark_4_attrs_ns", "mark, 4 attributes", four),
        Measured(
            "mark_4_attrs_between_ns",
            "mark, 4 attributes, between other work",
            between.run,
            between.clock,
            part=BETWEEN_PART,
        ),
        Measured("mark_8_attrs_ns", "mark, 8 attributes", eight),
        Measured("mark_5_strings_ns", "mark, 5 attributes, 4 of them strings", strings),
        Measured("step_16_members_ns", "step, 16 members", steps_of(16)),
        Measured("step_256_members_ns", "step, 256 members", steps_of(256), part=10),
        Measured("wait_changed_ns", "wait, another blocker", changed_wait),
        Measured("wait_unchanged_ns", "wait, nothing changed", unchanged_wait),
        Measured("wait_unchanged_2_ns", "wait, the same two blockers", several_blockers),
        Measured("gauge_ns", "gauge", gauge),
        Measured("begin_end_ns", "begin + end of a request", begin_and_end),
        Measured("mark_off_ns", "mark, recording off", off),
    ]


def sdk_cases(
    context: RequestContext, endpoint: str
) -> tuple[list[Measured], list[TracerProvider]]:
    parent = set_span_in_context(
        NonRecordingSpan(
            SpanContext(
                int(context.trace_id, 16),
                int(context.attempt_span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )
        )
    )
    providers: list[TracerProvider] = []

    def spans(attributes: Mapping[str, str | int | tuple[str, ...]] | None) -> Case:
        provider = TracerProvider(resource=Resource.create({"service.name": "bench"}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")
        # A queue that holds a whole repeat: no span is dropped, so each one is paid for.
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1_000_000))
        providers.append(provider)
        tracer = provider.get_tracer("bench")

        def case(calls: int) -> None:
            start_span = tracer.start_span
            for _ in range(calls):
                start_span("transfer.copy", parent, attributes=attributes).end()

        return case

    measured = [
        Measured("sdk_span_ns", "SDK span", spans(None), part=SDK_PART),
        Measured("sdk_span_4_attrs_ns", "SDK span, 4 attributes", spans(FOUR_ATTRS), part=SDK_PART),
        Measured(
            "sdk_span_8_attrs_ns", "SDK span, 8 attributes", spans(EIGHT_ATTRS), part=SDK_PART
        ),
    ]
    exported = spans(FOUR_ATTRS)
    measured.append(
        Measured(
            "sdk_span_4_attrs_exported_ns",
            "SDK span, 4 attributes, exported (process)",
            exported,
            time.process_time_ns,
            providers[-1].force_flush,
            part=SDK_PART,
        )
    )
    return measured, providers


def ratios(of: Measured, to: Measured) -> dict[str, float]:
    """`of` over `to`, repeat by repeat."""
    each = [a / b for a, b in zip(of.ns, to.ns, strict=True)]
    return {
        "median": round(statistics.median(each), 1),
        "min": round(min(each), 1),
        "max": round(max(each), 1),
    }


def estimates(costs: Costs, by_key: Mapping[str, Measured]) -> dict[str, float]:
    """What the budget guard believes a record costs, over what it was measured to cost in a tight
    loop: about BETWEEN_OTHER_WORK."""
    believed = {
        "mark_ns": costs.record,
        "mark_4_attrs_ns": costs.record + 4 * 8 * costs.byte,
        "wait_changed_ns": costs.wait,
        "step_16_members_ns": costs.step + 16 * costs.member,
    }
    return {key: round(ns / by_key[key].median, 2) for key, ns in believed.items()}


def measure(calls: int, repeats: int) -> list[Measured]:
    """All cases, interleaved."""
    context = RequestContext.create()
    with tempfile.TemporaryDirectory() as directory, otlp_sink.running() as endpoint:
        recorder, gateway = (
            Recorder.open(
                directory, role=role, instance=f"{role}-0", raise_errors=True, budget=None
            )
            for role in (Role.TRANSFER, Role.GATEWAY)
        )
        sdk, providers = sdk_cases(context, endpoint)
        measured = [*recorder_cases(recorder, gateway, context), *sdk]
        order = random.Random(0)
        for one in measured:
            one.run(calls // 10)  # warm up
            one.ns.clear()
        for _ in range(repeats):
            for one in order.sample(measured, len(measured)):
                one.run(calls)
                for provider in providers:
                    provider.force_flush()  # the export thread is idle while others are measured
        recorder.close()
        gateway.close()
        for provider in providers:
            provider.shutdown()
    return measured


COMPARED = {
    "ratio": ("sdk_span_ns", "mark_ns"),
    "ratio_4_attrs": ("sdk_span_4_attrs_ns", "mark_4_attrs_ns"),
    "ratio_8_attrs": ("sdk_span_8_attrs_ns", "mark_8_attrs_ns"),
    "ratio_4_attrs_exported": ("sdk_span_4_attrs_exported_ns", "mark_4_attrs_ns"),
    "ratio_no_op": ("mark_ns", "no_op_ns"),
    "ratio_between": ("mark_4_attrs_between_ns", "mark_4_attrs_ns"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, last line")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000)
    args = parser.parse_args()
    least = BETWEEN_PART * BetweenOtherWork.BURST
    if args.repeats < 1 or args.calls < least:
        parser.error(f"--repeats takes 1 or more, --calls {least} or more")

    costs = recording_costs()
    measured = measure(args.calls, args.repeats)
    by_key = {one.key: one for one in measured}
    print(
        f"CPython {platform.python_version()}, marks in {hot_path()}, "
        f"{args.repeats} repeats of {args.calls} calls"
    )
    print(f"{'':<44}{'ns':>8}{'min':>8}{'max':>8}{'per s':>12}")
    for one in measured:
        rate = 1e9 / one.median
        print(
            f"{one.name:<44}{one.median:>8.0f}{min(one.ns):>8.0f}{max(one.ns):>8.0f}{rate:>12,.0f}"
        )
    compared = {name: ratios(by_key[of], by_key[to]) for name, (of, to) in COMPARED.items()}
    for name, ratio in compared.items():
        of, to = (by_key[key].name for key in COMPARED[name])
        print(f"{name}: {ratio['median']} ({ratio['min']} to {ratio['max']}): {of} / {to}")
    believed = estimates(costs, by_key)
    print(f"the budget guard's idea of a cost over the cost: {believed}")
    if args.json:
        result: dict[str, object] = {one.key: round(one.median) for one in measured}
        result["ratio"] = compared["ratio"]["median"]
        result |= {f"{name}_spread": ratio for name, ratio in compared.items()}
        result["budget_estimates"] = believed
        result["hot_path"] = hot_path()
        result["repeats"] = args.repeats
        print(json.dumps(result))


if __name__ == "__main__":
    main()
