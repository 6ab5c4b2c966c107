"""What the gateway counts and measures, for GET /metrics.

Owns metric names, labels and buckets. Names that OpenTelemetry's GenAI conventions define are used
in their Prometheus form. Seconds and tokens; request ids are never labels. A mistake in here is
counted, and never reaches a request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import pdtrace
from pdtrace.agent.buckets import duration_edges_from
from pdtrace.stages import Outcome, Role
from server.errors import WorkerLost
from server.gateway.errors import USUAL_ENDS
from server.gateway.openai_api import Operation
from server.gateway.registry import MemberReport, MemberState

BUCKETS_S = duration_edges_from(os.environ)

MEASURED_STAGES = ("gateway.ingest", "gateway.queue", "gateway.route", "gateway.dispatch")

_LEAVING = (MemberState.DRAINING, MemberState.LEFT)
_STREAMED = {True: "true", False: "false"}

_logger = logging.getLogger(__name__)


class _ToldByMembers(Collector):
    """What the processes' heartbeats say of messages that changed nothing, and of connections that
    were not let in; of these also the gateway's own."""

    def __init__(
        self, members: Callable[[], Iterable[MemberReport]], denied_here: Callable[[], int]
    ) -> None:
        self._members = members
        self._denied_here = denied_here

    def describe(self) -> Iterable[CounterMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[CounterMetricFamily]:
        ignored, denied = self._families()
        denied.add_metric((f"{Role.GATEWAY}-0", "control"), self._denied_here())
        for report in self._members():
            for key, count in sorted(report.ignored.items()):
                why, _, kind = key.partition(".")
                ignored.add_metric((report.instance, why, kind), count)
            for plane, count in sorted(report.denied.items()):
                denied.add_metric((report.instance, plane), count)
        return [ignored, denied]

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily]:
        return (
            CounterMetricFamily(
                "pd_messages_ignored",
                "Messages that changed nothing at a process: why, and of which type.",
                labels=("process", "why", "type"),
            ),
            CounterMetricFamily(
                "pd_connections_denied",
                "Connections of other processes that were not let in: keys or secrets differ.",
                labels=("process", "plane"),
            ),
        )


class GatewayMetrics:
    """The gateway's metrics in a registry of their own.

    `members`, `in_flight`, `waiting` and `refused_pairs` are asked when somebody scrapes;
    `recorded` is the gateway's own.
    """

    def __init__(
        self,
        *,
        model: str,
        in_flight: Callable[[], int],
        waiting: Callable[[], int],
        members: Callable[[], Iterable[MemberReport]],
        refused_pairs: Callable[[], int] = lambda: 0,
        recorded: bool = True,
    ) -> None:
        disable_created_metrics()  # twice as many series, which nobody asks for
        self.registry = CollectorRegistry(auto_describe=True)
        self._model = model
        self._members = members
        self._logged = False
        labels = ("gen_ai_operation_name", "gen_ai_request_model")

        def seconds(name: str, doc: str, labelnames: Iterable[str] = labels) -> Histogram:
            return Histogram(
                name, doc, labelnames=labelnames, buckets=BUCKETS_S, registry=self.registry
            )

        self._ttft = seconds(
            "gen_ai_server_time_to_first_token_seconds",
            "First request byte received to first content bytes written; of an answer in one piece "
            "to its end.",
            (*labels, "streamed"),
        )
        self._tpot = seconds(
            "gen_ai_server_time_per_output_token_seconds",
            "(Last minus first content write) / (tokens - 1), of streams with two writes or more.",
        )
        self._duration = seconds(
            "gen_ai_server_request_duration_seconds",
            "First request byte received to the end of the request.",
            (*labels, "error_type"),
        )
        self._gap = seconds(
            "pd_inter_token_gap_seconds", "Time between two writes of content to a stream."
        )
        self._stage = seconds(
            "pd_gateway_stage_seconds", "Time in the stages that the gateway owns alone.", ["stage"]
        )
        self._requests = Counter(
            "pd_requests",
            "Requests that ended, by terminal outcome and its reason.",
            (*labels, "outcome", "reason"),
            registry=self.registry,
        )
        self._retries = Counter(
            "pd_gateway_retries",
            "Attempts after the first, by why the one before ended and how this one did.",
            ("reason", "outcome"),
            registry=self.registry,
        )
        self._tokens = Counter(
            "pd_tokens",
            "Tokens of requests that were served: input, output, and input found in a cache.",
            ["type"],
            registry=self.registry,
        )
        self._ignored = Counter(
            "pd_gateway_ignored_messages",
            "Messages that came too late, twice or for nobody.",
            ["type"],
            registry=self.registry,
        )
        self._forgotten = Counter(
            "pd_gateway_forgotten_processes",
            "Processes that the server did not start, dropped after they were silent for long.",
            registry=self.registry,
        )
        self._errors = Counter(
            "pd_gateway_metrics_errors",
            "Measurements that were wrong and left out.",
            registry=self.registry,
        )
        Gauge(
            "pd_requests_in_flight", "Requests admitted and not over.", registry=self.registry
        ).set_function(in_flight)
        Gauge(
            "pd_gateway_queue_depth", "Requests that wait to be admitted.", registry=self.registry
        ).set_function(waiting)
        Gauge(
            "pd_gateway_refused_pairs",
            "Pairs of workers that are ready and do not fit together.",
            registry=self.registry,
        ).set_function(refused_pairs)
        Gauge(
            "pd_gateway_build_info",
            "1; the version of the server is a label.",
            ["version"],
            registry=self.registry,
        ).labels(pdtrace.__version__).set(1)
        self._up = Gauge(
            "pd_process_ready",
            "1 when a process can take part in a generation; none of one that was told to stop.",
            ("role", "instance"),
            registry=self.registry,
        )
        self._progress = Gauge(
            "pd_process_last_progress_age_seconds",
            "Time since a process's loop last went round, as its heartbeats tell; 0 while idle.",
            ("role", "instance"),
            registry=self.registry,
        )
        self._recorded = Gauge(
            "pd_process_recorded",
            "0 when what a process does is not recorded: switched off, or no ring could be made.",
            ("role", "instance"),
            registry=self.registry,
        )
        self._recorded.labels(Role.GATEWAY, f"{Role.GATEWAY}-0").set(recorded)
        self.denied = 0
        """Connections that this process did not let in."""
        self.registry.register(_ToldByMembers(members, lambda: self.denied))
        # A series that appears with its first event hides that event from rate().
        self._retries.labels(WorkerLost.code, Outcome.COMPLETED)
        for operation in Operation:
            for outcome, reason in USUAL_ENDS:
                self._requests.labels(operation, model, outcome, reason)
            for streamed in _STREAMED.values():
                self._ttft.labels(operation, model, streamed)
            self._tpot.labels(operation, model)
            self._gap.labels(operation, model)
            self._duration.labels(operation, model, "")
        for stage in MEASURED_STAGES:
            self._stage.labels(stage)
        for kind in ("input", "output", "cached"):
            self._tokens.labels(kind)
        self._instances: set[tuple[str, str]] = set()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Exposition in the format that `accept` prefers, and its content type."""
        self.guard(self._refresh_members)
        try:
            return self._encoded(accept)
        except (TypeError, ValueError):  # it asks for a version that is no number
            return self._encoded("")

    def _encoded(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def first_token(self, operation: Operation, seconds: float, *, streamed: bool) -> None:
        self._observe(self._ttft.labels(operation, self._model, _STREAMED[streamed]), seconds)

    def gap(self, operation: Operation, seconds: float) -> None:
        self._observe(self._gap.labels(operation, self._model), seconds)

    def time_per_token(self, operation: Operation, seconds: float) -> None:
        self._observe(self._tpot.labels(operation, self._model), seconds)

    def stage(self, name: str, seconds: float) -> None:
        self._observe(self._stage.labels(name), seconds)

    def ended(self, operation: Operation, outcome: Outcome, reason: str, seconds: float) -> None:
        """A request is over. `reason` is "" when it completed."""
        self.guard(lambda: self._requests.labels(operation, self._model, outcome, reason).inc())
        self._observe(self._duration.labels(operation, self._model, reason), seconds)

    def retried(self, reason: str, outcome: Outcome) -> None:
        """An attempt after the first is over. `reason`: why the one before it ended."""
        self.guard(lambda: self._retries.labels(reason, outcome).inc())

    def tokens(self, counts: Mapping[str, int]) -> None:
        """Tokens of a served request by type: input, output, cached."""
        for kind, count in counts.items():
            self.guard(lambda kind=kind, count=count: self._tokens.labels(kind).inc(count))

    def forgotten(self) -> None:
        """A process is no member any more."""
        self.guard(self._forgotten.inc)

    def ignored(self, kind: str) -> None:
        self.guard(lambda: self._ignored.labels(kind).inc())

    def _observe(self, histogram: Histogram, seconds: float) -> None:
        if seconds < 0:
            self._errors.inc()
        self.guard(lambda: histogram.observe(max(0.0, seconds)))

    def guard(self, record: Callable[[], object]) -> None:
        """Call `record`; what it raises is counted and goes no further."""
        try:
            record()
        except Exception:  # a measurement must never fail a request
            self._errors.inc()
            if not self._logged:
                self._logged = True
                _logger.exception("a metric could not be recorded; further ones are only counted")

    def _refresh_members(self) -> None:
        # Who was told to stop is not missed: it is not there, rather than not ready.
        reports = [report for report in self._members() if report.state not in _LEAVING]
        current = {(report.role, report.instance) for report in reports}
        for gone in self._instances - current:
            self._up.remove(*gone)
            self._progress.remove(*gone)
            self._recorded.remove(*gone)
        self._instances = current
        for report in reports:
            self._up.labels(report.role, report.instance).set(report.state is MemberState.READY)
            self._progress.labels(report.role, report.instance).set(report.progress_age_s)
            self._recorded.labels(report.role, report.instance).set(report.recorded)
