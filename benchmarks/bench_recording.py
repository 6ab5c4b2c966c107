"""What does recording cost the thread that serves? A mark against an OpenTelemetry SDK span.

    python benchmarks/bench_recording.py [--json] [--repeats N] [--calls N]

Every case runs `calls` times per repeat; the cases take turns within each repeat, in an order drawn
anew, so that a busy machine slows all of them alike. Times are CPU time of the calling thread, so
neither waiting for a core nor the SDK's export thread counts; what the export thread costs the
process shows in the row that encodes for OTLP, which is CPU time of the whole process.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from pdtrace import Gauge, Mark, Recorder, RequestContext, Role, WaitReason

Case = Callable[[int], None]

FOUR_INTS = (3, 18, 829_440, 2)
FOUR_STRINGS_AND_INT = ("prefill-0", "decode-0", "least_loaded", 4, "fewest waiting tokens")
SEVEN_MIXED = ("transfer.queue", WaitReason.COPY_QUEUE, 18, 3, 64, 4, "req-0123456789abcdef")
FOUR_ATTRS = {"pd.chunk.index": 3, "pd.kv.pages": 18, "pd.kv.bytes": 829_440, "pd.batch.size": 2}
SEVEN_ATTRS = {
    "pd.wait.stage": "transfer.queue",
    "pd.wait.reason": "copy_queue",
    "pd.wait.needed": 18,
    "pd.wait.free": 3,
    "pd.wait.limit": 64,
    "pd.wait.position": 4,
    "pd.wait.blocker": "req-0123456789abcdef",
}


@dataclass(slots=True)
class Measured:
    """Nanoseconds per call, one for each repeat."""

    name: str
    case: Case
    clock: Callable[[], int] = time.thread_time_ns
    settle: Callable[[], object] = lambda: None
    ns: list[float] = field(default_factory=list[float])

    def run(self, calls: int) -> None:
        begin = self.clock()
        self.case(calls)
        self.settle()
        self.ns.append((self.clock() - begin) / calls)

    @property
    def median(self) -> float:
        return statistics.median(self.ns)


def recorder_cases(
    recorder: Recorder, gateway: Recorder, context: RequestContext
) -> list[Measured]:
    trace = recorder.begin(context)
    request = gateway.begin(context)

    def bare(calls: int) -> None:
        mark = trace.mark
        for _ in range(calls):
            mark(Mark.COPY_STARTED)

    def four(calls: int) -> None:
        mark = trace.mark
        for _ in range(calls):
            mark(Mark.COPY_QUEUED, *FOUR_INTS)

    def seven(calls: int) -> None:
        mark = trace.mark
        for _ in range(calls):
            mark(Mark.WAITING, *SEVEN_MIXED)

    def strings(calls: int) -> None:
        mark = request.mark
        for _ in range(calls):
            mark(Mark.ROUTED, *FOUR_STRINGS_AND_INT)

    def unchanged_wait(calls: int) -> None:
        wait = trace.wait
        for _ in range(calls):
            wait("transfer.queue", WaitReason.COPY_QUEUE, position=4, blocker="req-7")

    def gauge(calls: int) -> None:
        set_gauge = recorder.gauge
        for number in range(calls):
            set_gauge(Gauge.COPIED_BYTES, number)

    def begin_and_end(calls: int) -> None:
        begin = recorder.begin
        for _ in range(calls):
            begin(context).end()

    disabled = Recorder.disabled().begin(context)

    def off(calls: int) -> None:
        mark = disabled.mark
        for _ in range(calls):
            mark(Mark.COPY_QUEUED, *FOUR_INTS)

    return [
        Measured("mark", bare),
        Measured("mark, 4 attributes", four),
        Measured("mark, 5 attributes, 4 of them strings", strings),
        Measured("mark, 7 attributes", seven),
        Measured("wait, nothing changed", unchanged_wait),
        Measured("gauge", gauge),
        Measured("begin + end of a request", begin_and_end),
        Measured("mark, recording off", off),
    ]


class NullExporter(SpanExporter):
    """Takes spans and does nothing with them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


class EncodingExporter(NullExporter):
    """Encodes spans as the OTLP exporters do, and sends them nowhere."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def sdk_cases(context: RequestContext) -> tuple[list[Measured], list[TracerProvider]]:
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

    def spans(exporter: SpanExporter, attributes: dict[str, str | int] | None) -> Case:
        provider = TracerProvider(resource=Resource.create({"service.name": "bench"}))
        # A queue that holds a whole repeat: no span is dropped, so each one is paid for.
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1_000_000))
        providers.append(provider)
        tracer = provider.get_tracer("bench")

        def case(calls: int) -> None:
            start_span = tracer.start_span
            for _ in range(calls):
                start_span("transfer.copy", parent, attributes=attributes).end()

        return case

    def flushed(name: str, attributes: dict[str, str | int] | None) -> Measured:
        case = spans(EncodingExporter(), attributes)
        return Measured(name, case, time.process_time_ns, providers[-1].force_flush)

    measured = [
        Measured("SDK span", spans(NullExporter(), None)),
        Measured("SDK span, 4 attributes", spans(NullExporter(), dict(FOUR_ATTRS))),
        Measured("SDK span, 7 attributes", spans(NullExporter(), dict(SEVEN_ATTRS))),
        flushed("SDK span, 4 attributes, encoded (process)", dict(FOUR_ATTRS)),
    ]
    return measured, providers


def ratios(of: Measured, to: Measured) -> dict[str, float]:
    """`of` over `to`, repeat by repeat."""
    each = [a / b for a, b in zip(of.ns, to.ns, strict=True)]
    return {
        "median": round(statistics.median(each), 1),
        "min": round(min(each), 1),
        "max": round(max(each), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, last line")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000)
    args = parser.parse_args()

    context = RequestContext.create()
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder.open(
            directory, role=Role.TRANSFER, instance="transfer-0", raise_errors=True
        )
        gateway = Recorder.open(
            directory, role=Role.GATEWAY, instance="gateway-0", raise_errors=True
        )
        sdk, providers = sdk_cases(context)
        measured = [*recorder_cases(recorder, gateway, context), *sdk]
        order = random.Random(0)
        for one in measured:
            one.run(args.calls // 10)  # warm up
            one.ns.clear()
        for _ in range(args.repeats):
            for one in order.sample(measured, len(measured)):
                one.run(args.calls)
                for provider in providers:
                    provider.force_flush()  # the export thread is idle while others are measured
        recorder.close()
        gateway.close()
        for provider in providers:
            provider.shutdown()

    by_name = {one.name: one for one in measured}
    compared = {
        "ratio": (by_name["SDK span"], by_name["mark"]),
        "ratio_4_attrs": (by_name["SDK span, 4 attributes"], by_name["mark, 4 attributes"]),
        "ratio_7_attrs": (by_name["SDK span, 7 attributes"], by_name["mark, 7 attributes"]),
        "ratio_4_attrs_encoded": (
            by_name["SDK span, 4 attributes, encoded (process)"],
            by_name["mark, 4 attributes"],
        ),
    }
    print(f"CPython {platform.python_version()}, {args.repeats} repeats of {args.calls} calls")
    print(f"{'':<44}{'ns':>8}{'min':>8}{'max':>8}{'per s':>12}")
    for one in measured:
        rate = 1e9 / one.median
        print(
            f"{one.name:<44}{one.median:>8.0f}{min(one.ns):>8.0f}{max(one.ns):>8.0f}{rate:>12,.0f}"
        )
    for name, (of, to) in compared.items():
        ratio = ratios(of, to)
        print(
            f"{name}: {ratio['median']} ({ratio['min']} to {ratio['max']}): {of.name} / {to.name}"
        )
    if args.json:
        result: dict[str, object] = {
            "mark_ns": round(by_name["mark"].median),
            "mark_4_attrs_ns": round(by_name["mark, 4 attributes"].median),
            "mark_7_attrs_ns": round(by_name["mark, 7 attributes"].median),
            "sdk_span_ns": round(by_name["SDK span"].median),
            "sdk_span_4_attrs_ns": round(by_name["SDK span, 4 attributes"].median),
            "ratio": ratios(*compared["ratio"])["median"],
        }
        for name, pair in compared.items():
            result[f"{name}_spread"] = ratios(*pair)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
