"""Metrics from finished spans and from what is in flight, read back as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pdtrace import semconv as a
from pdtrace.agent.buckets import COUNT_EDGES, DURATION_EDGES_S, duration_edges
from pdtrace.agent.judging import RollingJudge
from pdtrace.agent.metrics import AgentMetrics, AgentNumbers, Exposition
from pdtrace.agent.summary import AgentSummary
from pdtrace.agent.tallies import MAX_SERIES, MAX_VALUES, OTHER, Counts, Errors, Histogram
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.assembly.request_spans import assemble
from pdtrace.inflight import InFlight, Look, ProcessNow, ProcessState
from pdtrace.ring.losses import Losses, RingLosses
from pdtrace.ring.records import StepRecord
from pdtrace.spans import Span
from pdtrace.stages import CHAINS, Mark, Mode, Role, StepKind
from tests.support.copies import replace
from tests.support.marked_requests import (
    DECODE,
    TRACE_ID,
    TRANSFER,
    Moment,
    aborted,
    colocated_moments,
    completed,
    pd_moments,
    request_of,
    until,
)

STAGE_DURATION = "pd_stage_duration_seconds"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def metrics_of(*requests: CollectedRequest) -> AgentMetrics:
    metrics = AgentMetrics()
    for request in requests:
        metrics.request(request, assemble(request))
    return metrics


def scraped(
    metrics: AgentMetrics,
    look: Look | None = None,
    numbers: AgentNumbers | None = None,
    accept: str = OPENMETRICS,
) -> list[Any]:
    at = Look(at_ns=1) if look is None else look
    known = AgentNumbers() if numbers is None else numbers
    body, content_type = Exposition(metrics, lambda: at, lambda: known).render(accept)
    text = body.decode()
    if "openmetrics" in content_type:
        return [s for family in parse_openmetrics(text) for s in family.samples]
    return [s for family in parse_text(text) for s in family.samples]


def value(samples: Sequence[Any], name: str, **labels: str) -> float:
    found = [s for s in samples if s.name == name and s.labels == labels]
    assert len(found) == 1, [s for s in samples if s.name == name]
    return found[0].value


def request_with(**changes: Any) -> tuple[CollectedRequest, list[Span]]:
    """A healthy request whose root has other attributes, by their names here."""
    request = request_of(pd_moments())
    root, *stages = assemble(request)
    attributes = dict(root.attributes)
    attributes.update({getattr(a, name.upper()).key: v for name, v in changes.items()})
    return request, [replace(root, attributes=attributes), *stages]


def test_finished_request_is_measured_stage_by_stage() -> None:
    samples = scraped(metrics_of(request_of(pd_moments())))
    reserve = {"stage": "decode.reserve", "role": "decode", "instance": "decode-0"}
    assert value(samples, "pd_stage_duration_seconds_count", **reserve) == 1
    assert value(samples, "pd_stage_duration_seconds_sum", **reserve) == pytest.approx(0.001)
    for stage in CHAINS[Mode.PD]:
        counted = [
            s.value
            for s in samples
            if s.name == "pd_stage_duration_seconds_count" and s.labels["stage"] == stage.name
        ]
        assert sum(counted) == 1, stage.name
    assert value(samples, "pd_request_duration_seconds_sum", outcome="completed") == 0.02
    assert value(samples, "pd_time_to_first_token_seconds_sum", streamed="true") == 0.0076
    assert (
        value(samples, "pd_finished_requests_total", outcome="completed", reason="", stage="") == 1
    )
    pair = {"prefill": "prefill-0", "decode": "decode-0"}
    assert value(samples, "pd_requests_by_pair_total", **pair, outcome="completed") == 1
    path = {"source": "prefill-0", "destination": "decode-0"}
    assert value(samples, "pd_transfer_bytes_total", **path) == 8192
    assert value(samples, "pd_transfer_seconds_count", **path) == 2
    assert value(samples, "pd_transfer_seconds_sum", **path) == pytest.approx(0.00088)


def test_stages_of_a_hand_over_are_measured_by_pair() -> None:
    samples = scraped(metrics_of(request_of(pd_moments())))
    pair = {"source": "prefill-0", "destination": "decode-0"}
    counted = {
        s.labels["stage"]: s.value
        for s in samples
        if s.name == "pd_pair_stage_duration_seconds_count" and pair.items() <= s.labels.items()
    }
    assert counted == {
        "hop.publish": 1,
        "transfer": 1,
        "transfer.queue": 2,
        "transfer.copy": 2,
        "hop.notice": 1,
    }


def test_attempt_that_ends_in_its_hand_over_is_a_failure_of_the_pair() -> None:
    landed = next(us for _, mark, us, _ in pd_moments() if mark is Mark.KV_LANDED)
    failed = [
        *until(pd_moments(), landed - 1),
        aborted(TRANSFER, landed - 1, "failed", "checksum_mismatch", "transfer-0"),
        completed(landed + 900, "failed", "checksum_mismatch", "transfer-0", 502),
    ]
    samples = scraped(metrics_of(request_of(pd_moments()), request_of(failed)))
    pair = {"source": "prefill-0", "destination": "decode-0"}
    assert value(samples, "pd_transfer_failures_total", **pair) == 1


def test_attempt_that_fails_elsewhere_is_no_failure_of_the_pair() -> None:
    failed = [
        *until(pd_moments(), 1_700),
        aborted(DECODE, 1_700, "timed_out", "kv_timeout", "decode-0"),
        completed(1_900, "timed_out", "kv_timeout", "decode-0", 504),
    ]
    samples = scraped(metrics_of(request_of(failed)))
    pair = {"source": "prefill-0", "destination": "decode-0"}
    assert value(samples, "pd_transfer_failures_total", **pair) == 0


def test_pairs_of_the_processes_present_have_failures_to_count() -> None:
    look = Look(at_ns=1, processes=tuple(map(process_now, ("decode-0", "prefill-0", "decode-1"))))
    samples = scraped(AgentMetrics(), look)
    pairs = {
        (s.labels["source"], s.labels["destination"]): s.value
        for s in samples
        if s.name == "pd_transfer_failures_total"
    }
    assert pairs == {("prefill-0", "decode-0"): 0, ("prefill-0", "decode-1"): 0}


@pytest.mark.parametrize("moments", [pd_moments(), colocated_moments()])
def test_parts_of_a_requests_time_sum_to_the_whole(moments: Sequence[Moment]) -> None:
    metrics, judge = AgentMetrics(), RollingJudge()
    judge.told = metrics.owned
    for request in (request_of(moments), request_of(until(moments, 1_000))):
        spans = assemble(request)
        judge(spans)
        metrics.request(request, spans)
    samples = scraped(metrics)
    parts = {
        s.labels["stage"]: s.value for s in samples if s.name == "pd_request_stage_seconds_total"
    }
    whole = sum(s.value for s in samples if s.name == "pd_request_duration_seconds_sum")
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-9)
    assert min(parts.values()) >= 0
    assert parts["prefill.compute"] > 0


@pytest.mark.case("CLK-04")
@pytest.mark.parametrize("mode", [Mode.PD, Mode.PD_EARLY])
def test_admission_before_the_handshake_ends_is_no_negative_sample(mode: Mode) -> None:
    moments = [
        (role, mark, 3_500 if mark is Mark.HANDSHAKE_DONE else at_us, values)
        for role, mark, at_us, values in pd_moments(mode)
    ]
    samples = scraped(metrics_of(request_of(moments)))
    sums = {s.labels["stage"]: s.value for s in samples if s.name == f"{STAGE_DURATION}_sum"}
    counts = {s.labels["stage"]: s.value for s in samples if s.name == f"{STAGE_DURATION}_count"}
    assert {stage.name for stage in CHAINS[mode]} <= {name for name, n in counts.items() if n == 1}
    assert min(sums.values()) >= 0
    assert sums["prefill.queue"] == 0, "it ended before it had begun"
    assert sums["hop.publish"] == pytest.approx(0.00178, abs=2e-6)


def test_waits_are_measured_by_reason_and_gaps_by_cause() -> None:
    samples = scraped(metrics_of(request_of(pd_moments())))
    wait = {"stage": "decode.reserve", "reason": "kv_pages"}
    assert value(samples, "pd_stage_wait_seconds_count", **wait) == 1
    assert value(samples, "pd_stage_wait_seconds_sum", **wait) == pytest.approx(0.00099, abs=2e-6)
    assert value(samples, "pd_token_gap_seconds_sum", cause="scheduler_busy") == 0.002


def test_each_reason_of_a_wait_gets_its_own_time() -> None:
    moments = pd_moments()
    index = next(i for i, m in enumerate(moments) if m[1].name == "WAITING")
    role, mark, _, values = moments[index]
    moments.insert(index + 1, (role, mark, 1_330, {**values, a.WAIT_REASON: "slots"}))
    samples = scraped(metrics_of(request_of(moments)))
    by_reason = {
        reason: value(samples, "pd_stage_wait_seconds_sum", stage="decode.reserve", reason=reason)
        for reason in ("kv_pages", "slots")
    }
    assert by_reason == pytest.approx({"kv_pages": 0.0006, "slots": 0.00039}, abs=2e-6)


def test_failed_request_counts_by_outcome_reason_and_stage() -> None:
    moments = [
        *until(pd_moments(), 1_700),
        aborted(DECODE, 1_700, "timed_out", "kv_timeout", "decode-0"),
        completed(1_900, "timed_out", "kv_timeout", "decode-0", 504),
    ]
    samples = scraped(metrics_of(request_of(moments)))
    labels = {"outcome": "timed_out", "reason": "kv_timeout", "stage": "decode.reserve"}
    assert value(samples, "pd_finished_requests_total", **labels) == 1
    assert value(samples, "pd_request_duration_seconds_count", outcome="timed_out") == 1


def test_verdicts_and_stuck_reports_are_counted() -> None:
    metrics = AgentMetrics()
    metrics.request(*request_with(stall_stage="transfer"))
    metrics.stuck("transfer", "transfer-0")
    metrics.stuck("transfer", None)
    samples = scraped(metrics)
    assert value(samples, "pd_stall_total", stage="transfer") == 1
    assert value(samples, "pd_stall_total", stage="decode.reserve") == 0
    assert value(samples, "pd_stuck_total", stage="transfer", instance="transfer-0") == 1
    assert value(samples, "pd_stuck_total", stage="transfer", instance="unknown") == 1


def test_retries_are_counted_by_why_the_attempt_before_ended() -> None:
    request = request_of(pd_moments())
    spans = assemble(request)
    attempt = next(s for s in spans if s.attributes.get(a.SPAN.key) == "attempt")
    reason = {**attempt.attributes, a.OUTCOME_REASON.key: "worker_lost"}
    metrics = AgentMetrics()
    metrics.request(request, [*spans, replace(attempt, attributes=reason)])
    metrics.request(request, [replace(attempt, attributes=reason), *spans])
    samples = scraped(metrics)
    assert value(samples, "pd_retries_total", reason="worker_lost") == 1
    assert value(samples, "pd_retries_total", reason="unknown") == 1


def test_colocated_worker_is_measured_under_its_own_role() -> None:
    samples = scraped(metrics_of(request_of(colocated_moments())))
    labels = {"stage": "prefill.compute", "role": "worker", "instance": "worker-0"}
    assert value(samples, "pd_stage_duration_seconds_count", **labels) == 1


def test_steps_are_measured_all_of_them() -> None:
    metrics = AgentMetrics()
    for size in (1, 2, 40):
        metrics.step(
            "decode-0",
            StepRecord(
                number=1, kind=StepKind.DECODE, begin_ns=0, end_ns=30_000_000, tokens=1, size=size
            ),
        )
    samples = scraped(metrics)
    labels = {"kind": "decode", "instance": "decode-0"}
    assert value(samples, "pd_step_duration_seconds_sum", **labels) == pytest.approx(0.09)
    assert value(samples, "pd_step_batch_size_bucket", **labels, le="2.5") == 2
    assert value(samples, "pd_step_batch_size_sum", **labels) == 43


def test_exemplars_lead_to_the_span_and_only_where_a_trace_is_kept() -> None:
    metrics = metrics_of(request_of(pd_moments()))
    exemplars = [s for s in scraped(metrics) if getattr(s, "exemplar", None)]
    by_stage = {s.labels.get("stage"): s.exemplar for s in exemplars}
    reserve = by_stage["decode.reserve"]
    spans = {s.span_id: s for s in assemble(request_of(pd_moments()))}
    assert reserve.labels["trace_id"] == TRACE_ID
    assert spans[reserve.labels["span_id"]].name == "decode.reserve"
    assert reserve.value == pytest.approx(0.001, abs=2e-5)

    unsampled = request_of(pd_moments())
    unsampled.sampled = False
    assert not [s for s in scraped(metrics_of(unsampled)) if getattr(s, "exemplar", None)]


def test_text_format_is_given_to_those_who_ask_for_nothing_else() -> None:
    metrics = metrics_of(request_of(pd_moments()))
    samples = scraped(metrics, accept="text/plain")
    assert (
        value(samples, "pd_finished_requests_total", outcome="completed", reason="", stage="") == 1
    )


@pytest.mark.parametrize("version", ["abc", "1.x", "2.a", "", ".", "9" * 5000])
@pytest.mark.parametrize("media_type", ["text/plain", "application/openmetrics-text"])
def test_versions_that_nobody_has_are_answered(media_type: str, version: str) -> None:
    samples = scraped(AgentMetrics(), accept=f"{media_type};version={version}")
    assert samples


def in_flight(stage: str | None, age_s: float, *, worker: str | None = None) -> InFlight:
    return InFlight(
        request_id="secret-id",
        trace_id="c" * 32,
        root_span_id="d" * 16,
        attempt=1,
        mode="pd",
        age_s=age_s,
        stage=stage,
        stage_age_s=age_s,
        worker=worker,
        stuck=age_s > 10,
    )


def process_now(
    instance: str, *, state: ProcessState = ProcessState.ALIVE, **gauges: int
) -> ProcessNow:
    return ProcessNow(
        role=instance.partition("-")[0],
        instance=instance,
        pid=1,
        host_id="h",
        state=state,
        progress_age_s=7.5,
        gauges=gauges,
    )


def test_open_requests_are_counted_by_stage_and_worker_with_the_oldest_age() -> None:
    look = Look(
        at_ns=1,
        requests=(
            in_flight("decode.reserve", 3.0, worker="decode-0"),
            in_flight("decode.reserve", 11.0, worker="decode-1"),
            in_flight(None, 1.0),
        ),
    )
    samples = scraped(AgentMetrics(), look)
    assert value(samples, "pd_open_requests", stage="decode.reserve") == 2
    assert value(samples, "pd_open_request_oldest_age_seconds", stage="decode.reserve") == 11.0
    assert value(samples, "pd_open_requests", stage="unknown") == 1
    assert value(samples, "pd_open_requests", stage="transfer") == 0
    on_decode = {"stage": "decode.reserve", "instance": "decode-1"}
    assert value(samples, "pd_open_requests_by_worker", **on_decode) == 1
    assert value(samples, "pd_open_request_oldest_age_by_worker_seconds", **on_decode) == 11.0
    assert value(samples, "pd_open_requests_stuck") == 1


def test_gauges_of_the_rings_are_shown_by_role_and_instance() -> None:
    look = Look(
        at_ns=1,
        processes=(
            process_now(
                "decode-0",
                state=ProcessState.STALLED,
                kv_pages_total=64,
                kv_pages_free=3,
                kv_pages_reserved=4,
                kv_pages_used=57,
                running=8,
                waiting=2,
                in_flight=11,
                steps=900,
                recording_detail=2,
                recording_share_ppm=15_000,
            ),
            process_now("transfer-0", copy_jobs_waiting=5, copied_bytes=4096),
            process_now("prefill-0", state=ProcessState.LOST, running=1),
        ),
    )
    samples = scraped(AgentMetrics(), look)
    decode = {"role": "decode", "instance": "decode-0"}
    assert value(samples, "pd_kv_pages", **decode, state="free") == 3
    assert value(samples, "pd_kv_pages", **decode, state="used") == 57
    assert value(samples, "pd_kv_pages_capacity", **decode) == 64
    assert value(samples, "pd_worker_running", **decode) == 8
    assert value(samples, "pd_worker_waiting", **decode) == 2
    assert value(samples, "pd_worker_in_flight", **decode) == 11
    assert value(samples, "pd_steps_total", **decode) == 900
    assert value(samples, "pd_recording_detail", **decode) == 2
    assert value(samples, "pd_recording_share_ratio", **decode) == 0.015
    assert value(samples, "pd_process_progress_age_seconds", **decode) == 7.5
    assert value(samples, "pd_process_state", **decode, state="stalled") == 1
    assert value(samples, "pd_process_state", **decode, state="alive") == 0
    transfer = {"role": "transfer", "instance": "transfer-0"}
    assert value(samples, "pd_copy_jobs_waiting", **transfer) == 5
    assert value(samples, "pd_copied_bytes_total", **transfer) == 4096
    prefill = {"role": "prefill", "instance": "prefill-0"}
    assert value(samples, "pd_process_state", **prefill, state="lost") == 1
    assert not [s for s in samples if s.name == "pd_worker_running" and s.labels == prefill], (
        "a dead process's last gauges are no longer true"
    )


def test_series_of_the_processes_present_exist_before_they_move() -> None:
    look = Look(at_ns=1, processes=(process_now("decode-0"),))
    samples = scraped(AgentMetrics(), look)
    labels = {"stage": "decode.reserve", "role": "decode", "instance": "decode-0"}
    assert value(samples, "pd_stage_duration_seconds_count", **labels) == 0
    step = {"kind": "decode", "instance": "decode-0"}
    assert value(samples, "pd_step_duration_seconds_count", **step) == 0


def test_agents_own_numbers() -> None:
    ring = RingLosses(role="decode", instance="decode-0", missed=12, shed_waits=3)
    numbers = AgentNumbers(
        summary=AgentSummary(
            requests=5,
            incomplete=1,
            spans=120,
            records=400,
            late=2,
            export={"spans_exported": 100, "spans_waiting": 7, "spans_dropped": 13},
        ),
        losses=Losses(rings={"x.ring": ring}),
        dropped={"queue full": 13},
        lag_s=0.25,
        poll_age_s=0.05,
    )
    samples = scraped(AgentMetrics(), numbers=numbers)
    assert value(samples, "pd_agent_requests_total") == 5
    assert value(samples, "pd_agent_incomplete_requests_total") == 1
    assert value(samples, "pd_agent_spans_recorded_total") == 120
    assert value(samples, "pd_agent_spans_exported_total") == 100
    assert value(samples, "pd_agent_spans_waiting") == 7
    assert value(samples, "pd_agent_spans_dropped_total", reason="queue_full") == 13
    assert value(samples, "pd_agent_records_total", what="late") == 2
    decode = {"role": "decode", "instance": "decode-0"}
    assert value(samples, "pd_recorder_losses_total", **decode, kind="missed") == 12
    assert value(samples, "pd_recorder_losses_total", **decode, kind="shed_waits") == 3
    assert value(samples, "pd_agent_lag_seconds") == 0.25
    assert value(samples, "pd_agent_last_poll_age_seconds") == 0.05


def test_request_ids_are_never_labels() -> None:
    metrics = metrics_of(request_of(pd_moments()))
    look = Look(at_ns=1, requests=(in_flight("transfer", 1.0, worker="transfer-0"),))
    labels = {v for s in scraped(metrics, look) for v in s.labels.values()}
    assert not labels & {"req-1", "secret-id", "ho-1", TRACE_ID, "req-0"}


def test_thresholds_appear_as_edges() -> None:
    metrics = AgentMetrics(duration_edges([0.21]))
    request = request_of(pd_moments())
    metrics.request(request, assemble(request))
    samples = scraped(metrics)
    edges = {s.labels["le"] for s in samples if s.name == "pd_request_duration_seconds_bucket"}
    assert "0.21" in edges
    assert len(edges) == len(DURATION_EDGES_S) + 2


def test_fault_in_a_measurement_is_counted_said_once_and_raises_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise ZeroDivisionError

        def __iter__(self) -> Any:
            raise ZeroDivisionError

        def __len__(self) -> int:
            return 1

    request = request_of(pd_moments())
    root, *_ = assemble(request)
    broken = replace(root, attributes=Broken())
    metrics = AgentMetrics()
    metrics.request(request, [broken])
    metrics.request(request, [broken])
    assert metrics.errors.count == 2
    assert caplog.text.count("a metric could not be recorded") == 1
    metrics.request(request, assemble(request))
    samples = scraped(metrics)
    assert (
        value(samples, "pd_finished_requests_total", outcome="completed", reason="", stage="") == 1
    )
    assert value(samples, "pd_agent_metrics_errors_total") == 2


@pytest.mark.case("MET-01")
def test_impossible_values_are_clamped_and_counted() -> None:
    errors = Errors()
    histogram = Histogram("h", "d", ("x",), COUNT_EDGES, errors)
    histogram.of(("a",)).observe(-1.0)
    histogram.of(("a",)).observe(float("nan"))
    counts = Counts("c", "d", ("x",), errors)
    counts.add(("a",), -5)
    counts.add(("a",), 2)
    assert errors.count == 3
    assert counts.family().samples[0].value == 2
    assert [s.value for s in histogram.family().samples if s.name == "h_sum"] == [0.0]


def test_label_values_are_bounded_and_the_rest_is_other() -> None:
    counts = Counts("c", "d", ("x", "y"), Errors())
    for number in range(MAX_VALUES * 3):
        counts.add((f"value-{number}", "same"))
    samples = [s for s in counts.family().samples if s.name == "c_total"]
    assert len(samples) == MAX_VALUES + 1
    other = [s for s in samples if s.labels["x"] == OTHER]
    assert [s.value for s in other] == [MAX_VALUES * 2]

    many = Counts("c", "d", ("x", "y"), Errors())
    for number in range(MAX_SERIES * 3):
        many.add((f"x-{number % 90}", f"y-{number // 90}"))
    samples = [s for s in many.family().samples if s.name == "c_total"]
    assert len(samples) <= MAX_SERIES + 1
    assert sum(s.value for s in samples) == MAX_SERIES * 3


def test_stages_that_nothing_was_stuck_in_are_there_with_zero() -> None:
    """A series that appears with its first event hides that event from rate()."""
    process = ProcessNow(
        role="decode",
        instance="decode-7",
        pid=1,
        host_id="h",
        state=ProcessState.ALIVE,
        progress_age_s=1.0,
    )
    metrics = AgentMetrics()
    metrics.stuck("decode.reserve", "decode-7")
    samples = scraped(metrics, Look(at_ns=1, processes=(process,)))
    stuck = {
        (s.labels["stage"], s.labels["instance"]): s.value
        for s in samples
        if s.name == "pd_stuck_total"
    }
    chains = {stage for mode in Mode for stage in CHAINS[mode]}
    assert {stage for stage, instance in stuck if instance == "unknown"} == {
        stage.name for stage in chains
    }
    assert {stage for stage, instance in stuck if instance == "decode-7"} == {
        stage.name for stage in chains if Role.DECODE in stage.roles
    }
    assert {key for key, value in stuck.items() if value} == {("decode.reserve", "decode-7")}
