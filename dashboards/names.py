"""Names of metrics and labels that boards and rules query, each once.

`tests/contract/test_dashboard_metrics.py` holds them against what agent and gateway expose; span
metrics follow from the attributes in `pdtrace.semconv`.
"""

from __future__ import annotations

from pdtrace import semconv as a
from pdtrace.semconv import Attr
from pdtrace.stages import Role

# Scrape jobs (`collector/prometheus.yml`).
AGENT_JOB = "pdtrace-agent"
GATEWAY_JOB = "pdtrace-gateway"
SPANS_JOB = "span-metrics"
COLLECTOR_JOB = "collector"

# Agent, live.
OPEN = "pd_open_requests"
OPEN_OLDEST = "pd_open_request_oldest_age_seconds"
OPEN_OLDEST_BY_WORKER = "pd_open_request_oldest_age_by_worker_seconds"
OPEN_STUCK = "pd_open_requests_stuck"
KV_PAGES = "pd_kv_pages"
KV_CAPACITY = "pd_kv_pages_capacity"
KV_HELD = "pd_kv_pages_held"
RUNNING = "pd_worker_running"
WAITING = "pd_worker_waiting"
RESERVING = "pd_worker_reserving"
TRANSFERRING = "pd_worker_transferring"
IN_FLIGHT = "pd_worker_in_flight"
COPY_JOBS = "pd_copy_jobs_waiting"
STEPS = "pd_steps_total"
PROGRESS_AGE = "pd_process_progress_age_seconds"
PROCESS_STATE = "pd_process_state"
RECORDING_SHARE = "pd_recording_share_ratio"

# Agent, of finished requests. Histograms without their _bucket, _sum and _count.
STAGE_DURATION = "pd_stage_duration_seconds"
PAIR_STAGE_DURATION = "pd_pair_stage_duration_seconds"
STAGE_PARTS = "pd_request_stage_seconds_total"
STAGE_WAIT = "pd_stage_wait_seconds"
TOKEN_GAP = "pd_token_gap_seconds"  # noqa: S105
REQUEST_DURATION = "pd_request_duration_seconds"
TTFT = "pd_time_to_first_token_seconds"
COPY_DURATION = "pd_transfer_seconds"
COPY_BYTES = "pd_transfer_bytes_total"
COPY_FAILURES = "pd_transfer_failures_total"
STEP_DURATION = "pd_step_duration_seconds"
STEP_BATCH = "pd_step_batch_size"
FINISHED = "pd_finished_requests_total"
BY_PAIR = "pd_requests_by_pair_total"
STALLS = "pd_stall_total"
STUCK = "pd_stuck_total"

# Of the agent itself.
AGENT_REQUESTS = "pd_agent_requests_total"
AGENT_INCOMPLETE = "pd_agent_incomplete_requests_total"
AGENT_DROPPED = "pd_agent_spans_dropped_total"
AGENT_LINES_LOST = "pd_agent_lines_lost_total"
AGENT_RECORDS = "pd_agent_records_total"
AGENT_LAG = "pd_agent_lag_seconds"
AGENT_POLL_AGE = "pd_agent_last_poll_age_seconds"
AGENT_ERRORS = "pd_agent_errors_total"

# Gateway.
MODEL = "gen_ai_request_model"
GATEWAY_TTFT = "gen_ai_server_time_to_first_token_seconds"
STREAMED = 'streamed="true"'
"""Matcher: an answer in one piece has its first token with its last, which is no delay of it."""
GATEWAY_TPOT = "gen_ai_server_time_per_output_token_seconds"
GATEWAY_DURATION = "gen_ai_server_request_duration_seconds"
GATEWAY_GAP = "pd_inter_token_gap_seconds"
GATEWAY_REQUESTS = "pd_requests_total"
GATEWAY_TOKENS = "pd_tokens_total"
PROCESS_READY = "pd_process_ready"
PROCESS_RECORDED = "pd_process_recorded"

# Span metrics of Jaeger or the collector (namespace `traces.span.metrics`, unit s).
SPAN_DURATION = "traces_span_metrics_duration_seconds"
SPAN_CALLS = "traces_span_metrics_calls_total"
SPAN_OVERFLOW = 'otel_metric_overflow="true"'
"""Matcher: spans of more combinations than the limit, counted together without their labels."""

# Of Jaeger or the collector itself.
COLLECTOR_REFUSED = "otelcol_receiver_refused_spans_total"
COLLECTOR_FAILED = "otelcol_receiver_failed_spans_total"
COLLECTOR_UNQUEUED = "otelcol_exporter_enqueue_failed_spans_total"
COLLECTOR_UNSENT = "otelcol_exporter_send_failed_spans_total"
COLLECTOR_UNDECIDED = "otelcol_processor_tail_sampling_sampling_trace_dropped_too_early_total"

ALERTS = "ALERTS"
UP = "up"


def label_of(attr: Attr) -> str:
    """An attribute as Prometheus names the dimension."""
    return attr.key.replace(".", "_")


SPAN_MODEL = label_of(a.REQUEST_MODEL)
SPAN_STALL_STAGE = label_of(a.STALL_STAGE)
SPAN_OUTCOME = label_of(a.OUTCOME)
SPAN_PREFILL = label_of(a.PREFILL_WORKER)
SPAN_DECODE = label_of(a.DECODE_WORKER)

DIMENSIONS = (a.REQUEST_MODEL, a.STALL_STAGE, a.OUTCOME, a.PREFILL_WORKER, a.DECODE_WORKER)
"""Attributes that span metrics need as dimensions for these boards."""

ROOT_SERVICE = Role.GATEWAY.service_name
ROOT = (f'service_name="{ROOT_SERVICE}"', 'span_kind="SPAN_KIND_SERVER"')
"""Matchers of the span that stands for the whole request, in span metrics."""
