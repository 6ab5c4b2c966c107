"""The files of collector/ that `make stack` does not run: a plain OpenTelemetry Collector, the
sampler of many hosts, and Prometheus's remote write, each run by its real program.

They get what a real server recorded. Kafka is not here: instead of it the sampler writes into a
receiver of OTLP, by a file laid over its own.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import yaml

from dashboards import names
from pdtrace import semconv as a
from pdtrace.agent.buckets import DURATION_EDGES_S
from pdtrace.slo import DEFAULT_SLO
from pdtrace.spans import Span
from pdtrace.stages import Role
from server.stack.plan import SPANS_JOB, target_list
from server.stack.programs import COLLECTOR
from tests.support.collectors import HOST, RunningCollector, running_collector, running_prometheus
from tests.support.notable import is_notable
from tests.support.otlp_receivers import Received, grpc_receiver
from tests.support.real_stack import complete, wait_for
from tests.support.recorded import spans_of
from tests.support.server import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(420)]

SERVICES = {role.service_name for role in (Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE)}
ROOT = {"service_name": Role.GATEWAY.service_name, "span_kind": "SPAN_KIND_SERVER"}
SAMPLING = {"PD_DECISION_WAIT": "1s", "PD_KEEP_PERCENT": "0"}
"""Nothing is kept but what has to be."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Two of the real server. Each has spans of four processes."""

    late: Sequence[Span]
    plain: Sequence[Span]

    @property
    def spans(self) -> list[Span]:
        return [*self.late, *self.plain]


@pytest.fixture(scope="module")
def requests(fake_pd_server: RunningServer) -> Requests:
    """One whose first token was late, and one that nothing is wrong with."""

    def ask(name: str, stalls: str | None = None) -> list[Span]:
        request_id = f"{name}-{uuid.uuid4()}"
        answer = complete(fake_pd_server, request_id, stalls=stalls, stream=True)
        assert answer.status_code == 200
        return spans_of(fake_pd_server, request_id)

    def ask_for_a_plain_one() -> list[Span] | None:
        """On a busy machine a request may be slow though nobody held it up."""
        spans = ask("plain")
        return None if is_notable(spans) else spans

    late = ask("late", f"prefill.queue={DEFAULT_SLO.ttft_s * 1000 + 200:.0f}")
    plain = wait_for(ask_for_a_plain_one, "a request that nothing is wrong with")
    for spans in (late, plain):
        assert {span.resource.service_name for span in spans} == SERVICES
    return Requests(late, plain)


def of_role(spans: Sequence[Span], role: Role) -> list[Span]:
    """What its agent would send, were each role on a host of its own: the gateway's alone knows
    that a request was late, and asks to keep its part."""
    mine = [span for span in spans if span.resource.service_name == role.service_name]
    if role is Role.GATEWAY:
        return mine
    return [
        msgspec.structs.replace(
            span,
            attributes={key: span.attributes[key] for key in span.attributes if key != a.KEEP.key},
        )
        for span in mine
    ]


def kept(store: Received, spans: Sequence[Span]) -> set[str]:
    """Of this trace, the spans that arrived."""
    arrived = [span for span in store.spans() if span.trace_id.hex() == spans[0].trace_id]
    return {span.span_id.hex() for span in arrived}


def ids_of(spans: Sequence[Span]) -> set[str]:
    return {span.span_id for span in spans}


def num_decided(collector: RunningCollector, *, sampled: bool) -> float:
    return collector.own_metric(
        "otelcol_processor_tail_sampling_global_count_traces_sampled_total",
        sampled=str(sampled).lower(),
    )


def queries_of_a_span(service: str) -> dict[str, str]:
    """Those that Grafana puts the span's service into, by name."""
    sources = yaml.safe_load((COLLECTOR / "grafana/datasources/pdtrace.yaml").read_text())
    [jaeger] = [one for one in sources["datasources"] if one["type"] == "jaeger"]
    return {
        one["name"]: one["query"].replace("$$__tags", f'service_name="{service}"')
        for one in jaeger["jsonData"]["tracesToMetrics"]["queries"]
        if "$$__tags" in one["query"]
    }


@pytest.fixture(scope="module")
def store() -> Iterator[Received]:
    with grpc_receiver() as received:
        yield received


@pytest.fixture(scope="module")
def collector(
    requests: Requests, store: Received, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCollector]:
    """`otel-collector.yaml`, to which both requests were sent."""
    environment = {**SAMPLING, "PD_STORE": f"{HOST}:{store.port}"}
    folder = tmp_path_factory.mktemp("collector")
    with running_collector(folder, "otel-collector.yaml", environment) as running:
        running.send(requests.spans)
        yield running


def test_collector_keeps_the_late_request_whole_and_nothing_of_the_plain_one(
    collector: RunningCollector, requests: Requests, store: Received
) -> None:
    wait_for(lambda: num_decided(collector, sampled=False) == 1, "a decision about the plain one")
    wait_for(lambda: kept(store, requests.late) == ids_of(requests.late), "the late one, whole")
    assert num_decided(collector, sampled=True) == 1
    assert not kept(store, requests.plain)
    assert {resource["service.name"] for resource in store.resources()} == SERVICES
    own = collector.own_metric
    sampled = "otelcol_processor_tail_sampling_count_traces_sampled_total"
    assert own(sampled, policy="slo-missed", sampled="true") == 1
    assert own("otelcol_receiver_accepted_spans_total") == len(requests.spans)
    sent_spans = "otelcol_exporter_sent_spans_total"
    wait_for(lambda: own(sent_spans) == len(requests.late), "the collector's count of what it sent")
    # As it was sent, but for the order.
    late = {span.span_id: span for span in requests.late}
    for span in store.spans():
        sent = late[span.span_id.hex()]
        assert (span.name, span.parent_span_id.hex()) == (sent.name, sent.parent_id or "")
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (sent.start_ns, sent.end_ns)
        assert {one.key for one in span.attributes} >= set(sent.attributes)


def test_span_metrics_count_both_under_the_names_that_boards_ask_for(
    collector: RunningCollector, requests: Requests
) -> None:
    def calls_of_roots() -> float:
        return sum(
            sample.value
            for sample in collector.span_metrics()
            if sample.name == names.SPAN_CALLS and sample.labels.items() >= ROOT.items()
        )

    wait_for(lambda: calls_of_roots() == 2, "both requests in span metrics")
    samples = collector.span_metrics()
    calls = [sample for sample in samples if sample.name == names.SPAN_CALLS]
    assert sum(sample.value for sample in calls) == len(requests.spans)
    labels = {"service_name", "span_name", "span_kind", "status_code"}
    assert all(labels <= set(sample.labels) for sample in calls)
    assert {sample.labels["service_name"] for sample in calls} == SERVICES
    # A span without the attribute has no such dimension; a root has all, but for the stalled stage.
    for spans in (requests.late, requests.plain):
        root = spans[0].attributes
        has = [attr for attr in names.DIMENSIONS if attr.key in root]
        assert set(names.DIMENSIONS) - set(has) <= {a.STALL_STAGE}
        wanted = ROOT | {names.label_of(attr): str(root[attr.key]) for attr in has}
        assert any(wanted.items() <= sample.labels.items() for sample in calls), wanted
    buckets = [
        sample
        for sample in samples
        if sample.name == f"{names.SPAN_DURATION}_bucket" and sample.labels.items() >= ROOT.items()
    ]
    edges = {float(sample.labels["le"]) for sample in buckets}
    assert edges == {*(round(edge, 9) for edge in DURATION_EDGES_S), float("inf")}
    counts = [sample for sample in samples if sample.name == f"{names.SPAN_DURATION}_count"]
    assert sum(sample.value for sample in counts) == len(requests.spans)


def test_sampler_decides_once_about_what_agents_of_four_hosts_send_apart(
    requests: Requests, tmp_path: Path
) -> None:
    """The gateway's agent sends first. What the others send after the decision follows it."""
    later = (Role.TRANSFER, Role.DECODE)
    with grpc_receiver() as store:
        over = tmp_path / "without-kafka.yaml"
        to_store = {"endpoint": f"{HOST}:{store.port}", "tls": {"insecure": True}}
        over.write_text(
            yaml.safe_dump(
                {
                    "exporters": {"otlp": to_store},
                    "service": {
                        "pipelines": {
                            name: {"exporters": ["otlp"]}
                            for name in ("traces/kept", "traces/asked")
                        }
                    },
                }
            )
        )
        with running_collector(tmp_path, "scale/2-sampler.yaml", SAMPLING, over) as sampler:
            for spans in (requests.late, requests.plain):
                for role in (Role.GATEWAY, Role.PREFILL):
                    sampler.send(of_role(spans, role))
            wait_for(lambda: num_decided(sampler, sampled=False) == 1, "the plain one's decision")
            wait_for(lambda: num_decided(sampler, sampled=True) == 1, "the late one's decision")
            for spans in (requests.plain, requests.late):
                for role in later:
                    sampler.send(of_role(spans, role))
            wait_for(
                lambda: kept(store, requests.late) == ids_of(requests.late), "the late one, whole"
            )
            followed = "otelcol_processor_tail_sampling_early_releases_from_cache_decision_total"
            wait_for(
                lambda: (
                    sampler.own_metric(followed, sampled="false")
                    == sum(len(of_role(requests.plain, role)) for role in later)
                ),
                "the plain one's late spans, dropped",
            )
            assert not kept(store, requests.plain)
            assert num_decided(sampler, sampled=True) == 1
            assert num_decided(sampler, sampled=False) == 1


def test_remote_write_carries_series_and_exemplars_from_one_prometheus_to_another(
    collector: RunningCollector, requests: Requests, tmp_path: Path
) -> None:
    begun_s = time.time()
    empty = tmp_path / "central.yml"
    empty.write_text("{}")
    receiver = "--web.enable-remote-write-receiver"
    with running_prometheus(tmp_path / "central", empty, receiver) as central:
        config = yaml.safe_load((COLLECTOR / "scale/prometheus-remote-write.yml").read_text())
        config["remote_write"][0]["url"] = f"{central.url}/api/v1/write"
        (tmp_path / "scale").mkdir()
        changed = tmp_path / "scale/prometheus.yml"
        changed.write_text(json.dumps(config))  # JSON is YAML
        (tmp_path / "targets").mkdir()
        targets = tmp_path / f"targets/{SPANS_JOB}-test.json"
        targets.write_text(target_list(HOST, collector.spans_port))
        with running_prometheus(tmp_path / "host", changed):
            roots = ",".join(names.ROOT)
            calls = f"sum by (cluster, sampler) ({names.SPAN_CALLS}{{{roots}}})"
            labels = {"cluster": "serving-1", "sampler": f"{HOST}:{collector.spans_port}"}

            def both_arrived() -> bool:
                series = central.query(calls)
                return [one["metric"] for one in series] == [labels] and (
                    float(series[0]["value"][1]) >= 2
                )

            wait_for(both_arrived, "both requests at the other Prometheus")
            bucket = f"{names.SPAN_DURATION}_bucket{{{roots}}}"

            def exemplars() -> set[str]:
                """Trace ids. An exemplar stands on the page for one flush only."""
                collector.send(requests.plain)
                found = central.exemplars(bucket, begun_s - 3600, time.time() + 60)
                return {one["trace_id"] for one in found}

            found = wait_for(exemplars, "an exemplar at the other Prometheus")
            assert found <= {span.trace_id for span in requests.spans}
            # What Grafana asks there on the way from a span to the metrics of its service.
            queries = queries_of_a_span("pd-decode")
            assert queries
            for name, query in queries.items():
                series = wait_for(lambda query=query: central.query(query), f"series of {name}")
                assert {one["metric"]["span_name"] for one in series} >= {"decode.generate"}
