"""Each rule passes on whole recordings and breaks on the fault it is for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from pdtrace import semconv as a
from pdtrace.analysis.sources import BadLine, Problems, Recording
from pdtrace.analysis.trace_store import join_spans
from pdtrace.check import CheckReport, check_recording
from pdtrace.live.health import ProcessHealth, RunHealth
from pdtrace.ring.losses import Losses, WriterEnd
from pdtrace.spans import Span, Trace
from pdtrace.stages import Mode, Outcome
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, Story, noisy


def recording_of(*traces: Trace, problems: Problems | None = None) -> Recording:
    joined = join_spans(span for trace in traces for span in trace.spans)
    return Recording(
        source="test",
        traces=joined,
        files=1,
        lines=len(traces),
        spans=sum(len(trace.spans) for trace in joined),
        problems=problems or Problems(),
    )


def healthy(count: int = 8) -> list[Trace]:
    rng = random.Random(5)
    return [noisy(f"req-{i}", rng, list(Mode)[i % 3]).trace() for i in range(count)]


def broken_rules(report: CheckReport) -> set[str]:
    return {rule.name for rule in report.rules if rule.broken}


def edited(edit: Callable[[Span], Span | None], story: Story | None = None) -> Trace:
    trace = (story or Story()).trace()
    spans = [changed for span in trace.spans if (changed := edit(span)) is not None]
    return replace(trace, spans=tuple(spans))


def test_whole_recording_keeps_all_rules() -> None:
    ended = [
        Story(request_id=o.value, outcome=o, ends_in="decode.reserve", start_s=i).trace()
        for i, o in enumerate(Outcome)
        if o not in {Outcome.COMPLETED, Outcome.LOST}
    ]
    report = check_recording(recording_of(*healthy(), *ended))
    assert report.ok, broken_rules(report)
    assert (report.requests, report.traces, report.orphans) == (12, 12, 0)
    assert report.outcomes == {
        "cancelled": 1,
        "completed": 8,
        "failed": 1,
        "rejected": 1,
        "timed_out": 1,
    }
    assert report.unexplained_share == 0.0
    assert "12 requests keep all" in report.sentence


def drop(name: str) -> Callable[[Span], Span | None]:
    return lambda span: None if span.name == name else span


def attribute(name: str, key: str, value: str) -> Callable[[Span], Span | None]:
    def edit(span: Span) -> Span:
        if span.name != name:
            return span
        return replace(span, attributes={**span.attributes, key: value})

    return edit


def silent_transfer(span: Span) -> Span:
    if span.resource.service_name != "pd-transfer":
        return span
    kept = {k: v for k, v in span.attributes.items() if k != a.REQUEST_ID.key}
    return replace(span, attributes=kept)


def no_transfer_process(span: Span) -> Span | None:
    return None if span.resource.service_name == "pd-transfer" else span


def reversed_transfer(span: Span) -> Span:
    if span.name != "transfer":
        return span
    return replace(span, end_ns=span.start_ns - 5_000)


def no_outcome(span: Span) -> Span:
    return replace(
        span, attributes={k: v for k, v in span.attributes.items() if k != a.OUTCOME.key}
    )


@pytest.mark.parametrize(
    ("edit", "rules"),
    [
        (drop("chat smol"), {"root"}),
        (drop("hop.publish"), {"stages"}),
        (drop("attempt"), {"parents"}),
        (reversed_transfer, {"durations"}),
        (silent_transfer, {"identified"}),
        (no_transfer_process, {"roles", "stages"}),
        (no_outcome, {"complete"}),
        (attribute("transfer", a.REQUEST_ID.key, "other"), {"request_id"}),
        (attribute("chat smol", a.INCOMPLETE.key, "3 marks lost"), {"complete"}),
        (attribute("transfer", a.INCOMPLETE.key, "gateway-0 lost 7 records"), {"complete"}),
        (attribute("transfer", a.VIOLATION.key, "twice"), {"marks"}),
    ],
)
def test_fault_breaks_its_own_rule(edit: Callable[[Span], Span | None], rules: set[str]) -> None:
    # Its own time is short, so that the time left unexplained is not a fault as well.
    lengths = {**HEALTHY_S, "transfer": 0.0005, "hop.publish": 0.0005}
    odd = edited(edit, Story(request_id="odd", lengths_s=lengths))
    report = check_recording(recording_of(*healthy(), odd))
    assert broken_rules(report) == rules
    assert not report.ok
    for rule in report.rules:
        assert bool(rule.examples) is bool(rule.broken)


def test_unexplained_time_breaks_its_rule_above_one_percent() -> None:
    trace = edited(drop("prefill.compute"), Story(request_id="odd"))
    assert "unexplained" in broken_rules(check_recording(recording_of(trace)))
    report = check_recording(recording_of(trace, *healthy(40)))
    assert "unexplained" not in broken_rules(report)
    assert 0 < report.unexplained_share < 0.01


def with_handoff(handoff_id: str, story: Story) -> Trace:
    return edited(
        lambda span: replace(span, attributes={**span.attributes, a.HANDOFF_ID.key: handoff_id}),
        story,
    )


def test_request_id_used_again_by_the_caller_is_another_request() -> None:
    first, again = with_handoff("h-1", Story()), with_handoff("h-2", Story(start_s=10))
    assert check_recording(recording_of(first, again)).ok


def test_one_handoff_in_two_traces_breaks_a_rule() -> None:
    first, again = with_handoff("h-1", Story()), with_handoff("h-1", Story(start_s=10))
    assert broken_rules(check_recording(recording_of(first, again))) == {"one_trace"}


def test_spans_of_a_request_in_a_trace_without_a_root_break_a_rule() -> None:
    """A process that lost the context on the way starts a trace of its own."""
    whole = with_handoff("h-1", Story())
    lost = edited(lambda span: span if span.name == "prefill.compute" else None, Story(start_s=10))
    assert "one_trace" in broken_rules(check_recording(recording_of(whole, lost)))


def test_one_token_requests_need_no_decode() -> None:
    lengths = {k: v for k, v in HEALTHY_S.items() if k in list(HEALTHY_S)[:9]}
    report = check_recording(recording_of(Story(lengths_s=lengths, output_tokens=1).trace()))
    assert report.ok, broken_rules(report)


def test_unreadable_lines_break_a_rule() -> None:
    problems = Problems(bad_line_count=2, bad_lines=[BadLine("f", 3, "not JSON")])
    report = check_recording(recording_of(*healthy(), problems=problems))
    assert broken_rules(report) == {"readable"}
    assert any("f:3" in note for note in report.notes)


def test_duplicates_alone_break_nothing() -> None:
    assert check_recording(recording_of(*healthy(), problems=Problems(duplicates=4))).ok


def test_recording_without_requests_is_not_ok() -> None:
    assert broken_rules(check_recording(recording_of())) == {"requests"}


def test_request_that_lost_a_process_breaks_the_rule_though_the_gateway_says_failed() -> None:
    """By the outcome of its stage, or as one of those that a process had open when it vanished."""

    def failed(request_id: str, ends_in: str) -> Story:
        return Story(
            request_id=request_id, outcome=Outcome.FAILED, reason="worker_lost", ends_in=ends_in
        )

    def lost(span: Span) -> Span:
        if span.attributes.get(a.STAGE.key) != "decode.generate":
            return span
        gone = {a.OUTCOME.key: "lost", a.OUTCOME_BY.key: "decode-0"}
        return replace(span, attributes={**span.attributes, **gone})

    traces = [
        edited(lost, failed("in-stage", "decode.generate")),
        failed("between", "prefill.compute").trace(),
        failed("stalled", "prefill.compute").trace(),
        *healthy(),
    ]
    process = ProcessHealth(
        role="decode",
        instance="decode-0",
        pid=7,
        ended=WriterEnd.LOST,
        open_requests=3,
        open_ids=("in-stage", "between", "req-0"),
    )
    run = RunHealth(run="r", processes=(process,), unreadable={}, losses=Losses())
    report = check_recording(recording_of(*traces), [run])
    [rule] = [rule for rule in report.rules if rule.name == "lost"]
    assert rule.examples == (
        "in-stage: decode.generate was lost with decode-0",
        "between: decode-0 was lost with it",
    )
    assert rule.broken == 2


def test_traces_of_forward_passes_are_counted_apart() -> None:
    trace = healthy(1)[0]
    span = trace.spans[0]
    step = replace(
        span,
        name="step.decode",
        trace_id="5" * 32,
        parent_id=None,
        attributes={a.STEP_KIND.key: "decode"},
    )
    report = check_recording(recording_of(trace, Trace(trace_id="5" * 32, spans=(step,))))
    assert (report.requests, report.traces, report.step_traces) == (1, 2, 1)
    assert report.facts[0].startswith("1 request in 1 trace and 1 trace of forward passes, ")
    assert report.document()["step_traces"] == 1


def test_document_is_json_and_says_what_the_report_says() -> None:
    report = check_recording(
        recording_of(*healthy(), edited(drop("hop.publish"), Story(request_id="odd")))
    )
    document = json.loads(json.dumps(report.document()))
    assert document["schema"] == "pdtrace.check/1"
    assert document["ok"] is False
    assert document["requests"] == 9
    stages = next(rule for rule in document["rules"] if rule["name"] == "stages")
    assert stages["broken"] == 1
    assert stages["examples"] == ["odd: a completed request lacks hop.publish"]
