"""The files of `collector/`: each is accepted by the program that reads it, and agrees with the
code about names, buckets and limits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import names
from dashboards.names import DIMENSIONS
from pdtrace import semconv as a
from pdtrace.agent.buckets import DURATION_EDGES_S, SLO_VARIABLE, edge_of
from pdtrace.agent.keeping import TOKEN_GAP_VARIABLE, TTFT_VARIABLE, Reason
from pdtrace.agent.slo_environment import sampling_environment, server_environment
from pdtrace.slo import DEFAULT_SLO
from pdtrace.stages import Outcome
from server.config import Settings
from server.stack.plan import AGENT_JOB, COLLECTOR_JOB, GATEWAY_JOB, SPANS_JOB, with_webhook
from server.stack.programs import COLLECTOR, jaeger_path
from tests.support.programs import otelcol
from tests.support.real_stack import need_programs

ONE_HOST = ("jaeger.yaml", "otel-collector.yaml")
INGESTERS = ("scale/3-ingester-clickhouse.yaml", "scale/3-ingester-elasticsearch.yaml")
SAMPLING = (*ONE_HOST, "scale/2-sampler.yaml")
BALANCER = "scale/1-loadbalancer.yaml"
OF_COLLECTORS = {
    str(path.relative_to(COLLECTOR)): path.read_text()
    for path in sorted(COLLECTOR.rglob("*.yaml"))
    if "receivers:" in path.read_text()
}
OF_JAEGER = [name for name in OF_COLLECTORS if name != BALANCER]
OF_OTELCOL = [name for name in OF_JAEGER if "jaeger_storage" not in OF_COLLECTORS[name]]
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_ENVIRONMENT = re.compile(r"\$\{env:\w+:-([^}]*)\}")


def read(name: str) -> dict[str, Any]:
    """A file with the environment's defaults filled in."""
    return yaml.safe_load(_ENVIRONMENT.sub(r"\1", (COLLECTOR / name).read_text()))


def seconds(duration: str) -> float:
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", duration)
    assert match, duration
    return round(float(match[1]) * _UNITS_S[match[2]], 9)


def run(*command: str | Path) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", OF_JAEGER)
def test_jaeger_accepts_its_files(name: str) -> None:
    need_programs()
    run(jaeger_path(), "validate", "--config", COLLECTOR / name)


def test_jaeger_refuses_a_file_with_a_wrong_key(tmp_path: Path) -> None:
    need_programs()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        (COLLECTOR / "jaeger.yaml").read_text().replace("decision_wait:", "decide_after:")
    )
    with pytest.raises(AssertionError, match="decide_after"):
        run(jaeger_path(), "validate", "--config", wrong)


@pytest.mark.parametrize("name", OF_OTELCOL)
def test_collector_accepts_its_files(name: str) -> None:
    run(otelcol(), "validate", "--config", COLLECTOR / name)


def test_each_program_is_asked_about_each_of_its_files() -> None:
    assert OF_OTELCOL == ["otel-collector.yaml", "scale/2-sampler.yaml"]
    assert {*OF_JAEGER, BALANCER} == {*OF_OTELCOL, BALANCER, "jaeger.yaml", *INGESTERS}


def test_collector_accepts_the_load_balancer_but_for_its_resolver(tmp_path: Path) -> None:
    """No program here has its exporter. `protocol.otlp` takes what the exporter `otlp` does, but
    for an endpoint: as such it is checked, and with it everything around. What is left are the
    routing key and the resolver, of which the exporter wants all values as text."""
    config = yaml.safe_load((COLLECTOR / BALANCER).read_text())
    balancing = config["exporters"].pop("loadbalancing")
    assert set(balancing) == {"routing_key", "protocol", "resolver"}
    config["exporters"]["otlp"] = {**balancing["protocol"]["otlp"], "endpoint": "127.0.0.1:4317"}
    config["service"]["pipelines"]["traces"]["exporters"] = ["otlp"]
    changed = tmp_path / "loadbalancer.json"  # JSON is YAML
    changed.write_text(json.dumps(config))
    run(otelcol(), "validate", "--config", changed)
    config["exporters"]["otlp"]["sending_queues"] = {}
    changed.write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="sending_queues"):
        run(otelcol(), "validate", "--config", changed)
    resolver = read(BALANCER)["exporters"]["loadbalancing"]["resolver"]
    assert set(resolver) == {"dns"}
    assert set(resolver["dns"]) == {"hostname", "port", "interval"}
    assert all(isinstance(value, str) for value in resolver["dns"].values())
    assert seconds(resolver["dns"]["interval"]) > 0


@pytest.mark.parametrize("name", ["jaeger.yaml", *INGESTERS])
def test_jaeger_neither_moves_spans_nor_adds_traces_of_its_own(name: str) -> None:
    query = read(name)["extensions"]["jaeger_query"]
    assert query["max_clock_skew_adjust"] == "0s"
    assert query["enable_tracing"] is False


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(COLLECTOR)) for p in COLLECTOR.rglob("prometheus*.yml"))
)
def test_prometheus_accepts_its_files(name: str) -> None:
    need_programs()
    promtool = shutil.which("promtool")
    assert promtool
    run(promtool, "check", "config", COLLECTOR / name)


def test_alertmanager_accepts_its_file_with_and_without_a_webhook(tmp_path: Path) -> None:
    need_programs()
    amtool = shutil.which("amtool")
    assert amtool
    run(amtool, "check-config", COLLECTOR / "alertmanager.yml")
    changed = tmp_path / "alertmanager.yml"
    text = (COLLECTOR / "alertmanager.yml").read_text()
    changed.write_text(with_webhook(text, "http://127.0.0.1:1/alerts"))
    run(amtool, "check-config", changed)
    [receiver] = yaml.safe_load(changed.read_text())["receivers"]
    assert receiver["webhook_configs"] == [
        {"url": "http://127.0.0.1:1/alerts", "send_resolved": True}
    ]


def test_compose_passes_on_what_a_file_of_objectives_sets() -> None:
    """To Jaeger and to the server, with the project's objectives where there is no such file."""
    services = yaml.safe_load((COLLECTOR / "compose.yaml").read_text())["services"]
    asked = dict(re.findall(r"\$\{env:(\w+):-([^}]*)\}", (COLLECTOR / "jaeger.yaml").read_text()))
    passed = services["jaeger"]["environment"]
    for name, value in sampling_environment(DEFAULT_SLO).items():
        assert passed[name] == f"${{{name}:-{float(value):g}}}"
        assert asked[name] == f"{float(value):g}"
    told = services["server"]["environment"]
    assert told[SLO_VARIABLE] == f"${{{SLO_VARIABLE}:-}}"
    assert {told[name] for name in sampling_environment(DEFAULT_SLO)} <= set(passed.values())
    assert set(server_environment(DEFAULT_SLO)) <= set(told)


@pytest.mark.parametrize("name", SAMPLING)
def test_span_metrics_have_the_projects_buckets_and_dimensions(name: str) -> None:
    metrics = read(name)["connectors"]["spanmetrics"]
    buckets = metrics["histogram"]["explicit"]["buckets"]
    assert tuple(map(seconds, buckets)) == tuple(round(edge, 9) for edge in DURATION_EDGES_S)
    assert metrics["histogram"]["unit"] == "s"
    assert metrics["namespace"] == "traces.span.metrics"
    assert metrics["exemplars"]["enabled"]
    assert [dimension["name"] for dimension in metrics["dimensions"]] == [
        attr.key for attr in DIMENSIONS
    ]
    for threshold_s in DEFAULT_SLO.thresholds_s:
        assert round(edge_of(threshold_s), 9) in map(seconds, buckets)


def test_the_longest_request_that_its_deadline_ends_is_on_the_ladder() -> None:
    """Else its quantiles are the last edge, whatever happened."""
    settings = Settings()
    noticed_s = settings.deadlines.request_s + settings.dead_after_s
    assert noticed_s < DURATION_EDGES_S[-1]
    # And a quantile between the last two edges is still worth something.
    assert settings.deadlines.request_s / 2 < DURATION_EDGES_S[-2]


@pytest.mark.parametrize("name", SAMPLING)
def test_every_span_is_measured_before_any_is_sampled_away(name: str) -> None:
    pipelines = read(name)["service"]["pipelines"]
    assert "spanmetrics" in pipelines["traces/in"]["exporters"]
    assert "tail_sampling" not in pipelines["traces/in"]["processors"]
    behind = [one for one in pipelines.values() if one["receivers"] == ["forward"]]
    assert ["tail_sampling" in one["processors"] for one in behind] == [True]


@pytest.mark.parametrize("name", SAMPLING)
def test_tail_sampling_waits_longer_than_a_request_may_take_and_names_what_exists(
    name: str,
) -> None:
    sampling = read(name)["processors"]["tail_sampling"]
    assert seconds(sampling["decision_wait"]) > Settings().deadlines.request_s
    text = OF_COLLECTORS[name]
    known = {attr.key for attr in a.all_attrs()}
    named = {p[p["type"]]["key"] for p in sampling["policies"] if "key" in p[p["type"]]}
    named |= set(re.findall(r'attributes\["([^"]+)"\]', text))
    assert {a.OUTCOME.key, a.ATTEMPT.key, a.STALL_STAGE.key} <= named <= known
    for variable, attr, threshold_s in (
        (TTFT_VARIABLE, a.TTFT_SECONDS, DEFAULT_SLO.ttft_s),
        (TOKEN_GAP_VARIABLE, a.LONGEST_GAP_SECONDS, DEFAULT_SLO.token_gap_s),
    ):
        assert f'attributes["{attr.key}"] > ${{env:{variable}:-{threshold_s:g}}}' in text
    outcomes = next(p for p in sampling["policies"] if p["name"] == "not-completed")
    assert set(outcomes["string_attribute"]["values"]) == {outcome.value for outcome in Outcome} - {
        Outcome.COMPLETED.value,
        Outcome.REJECTED.value,
    }


@pytest.mark.parametrize("name", SAMPLING)
def test_a_trace_is_kept_for_what_an_agent_asks_for_and_for_its_reasons(name: str) -> None:
    asked, *reasons, rest = read(name)["processors"]["tail_sampling"]["policies"]
    assert asked["string_attribute"]["key"] == a.KEEP.key
    assert [policy["name"] for policy in reasons] == list(Reason)
    assert rest["type"] == "probabilistic"


@pytest.mark.parametrize("name", SAMPLING)
def test_each_span_is_stored_by_one_pipeline_and_once(name: str) -> None:
    """What is asked for past the sampling, the others behind it."""
    config = read(name)
    ways = [
        pipeline
        for pipeline in config["service"]["pipelines"].values()
        if set(pipeline["receivers"]) & {"forward", "forward/asked"}
    ]
    into = config["service"]["pipelines"]["traces/in"]["exporters"]
    assert {"forward", "forward/asked"} <= set(into)
    asked, others = sorted(ways, key=lambda way: "tail_sampling" in way["processors"])
    assert asked["exporters"] == others["exporters"]
    dropped = [
        condition
        for way in (asked, others)
        for processor in way["processors"]
        if processor.startswith("filter/")
        for condition in config["processors"][processor]["traces"]["span"]
    ]
    key = f'attributes["{a.KEEP.key}"]'
    assert dropped == [f"{key} == nil", f"{key} != nil"]


def test_collector_and_jaeger_measure_and_sample_alike() -> None:
    jaeger, collector = (read(name) for name in ONE_HOST)
    for part in ("receivers", "connectors", "processors"):
        assert jaeger[part] == collector[part], part


def test_sampler_of_many_hosts_measures_and_samples_as_one_host_does() -> None:
    """But for its memory."""
    one, many = read("jaeger.yaml"), read("scale/2-sampler.yaml")
    for part in ("receivers", "connectors"):
        assert one[part] == many[part], part
    for name in ("tail_sampling", "filter/asked", "filter/others", "batch"):
        assert one["processors"][name] == many["processors"][name]
    memory = [config["processors"]["memory_limiter"]["limit_mib"] for config in (one, many)]
    assert memory[0] < memory[1]


def test_what_is_common_to_all_files_is_alike() -> None:
    """Variables and their defaults too: one that is set in one place means the same elsewhere."""
    first = yaml.safe_load((COLLECTOR / "jaeger.yaml").read_text())
    for name in (*SAMPLING, BALANCER):
        config = yaml.safe_load((COLLECTOR / name).read_text())
        assert config["receivers"] == first["receivers"], name
        if name in SAMPLING:
            assert config["exporters"]["prometheus"] == first["exporters"]["prometheus"], name
            sampling, firsts = (one["processors"]["tail_sampling"] for one in (config, first))
            assert sampling == firsts, name
    ingesters = [yaml.safe_load((COLLECTOR / name).read_text()) for name in INGESTERS]
    for part in ("receivers", "processors", "exporters", "service"):
        assert ingesters[0][part] == ingesters[1][part], part
    monitors = {
        json.dumps(config["extensions"]["jaeger_storage"]["metric_backends"])
        for config in (first, *ingesters)
    }
    assert len(monitors) == 1
    assert first["connectors"]["spanmetrics"]["namespace"].replace(".", "_") in monitors.pop()


def test_load_balancer_sends_each_trace_to_one_sampler_and_uses_what_it_defines() -> None:
    balancer = read(BALANCER)
    exporter = balancer["exporters"]["loadbalancing"]
    assert exporter["routing_key"] == "traceID"
    port = exporter["resolver"]["dns"]["port"]
    sampler = read("scale/2-sampler.yaml")["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert sampler.endswith(f":{port}")
    assert set(balancer["service"]["extensions"]) == set(balancer["extensions"])
    for pipeline in balancer["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) == set(balancer[part]), part


def test_what_goes_into_kafka_comes_out() -> None:
    sent = read("scale/2-sampler.yaml")["exporters"]["kafka"]
    for name in INGESTERS:
        received = read(name)["receivers"]["kafka"]
        for key in ("brokers", "traces", "protocol_version"):
            assert sent[key] == received[key], key


@pytest.mark.parametrize("name", ["prometheus.yml", "scale/prometheus-remote-write.yml"])
def test_prometheus_comes_before_an_exemplar_has_gone(name: str) -> None:
    """Span metrics show an exemplar for one flush."""
    prometheus = yaml.safe_load((COLLECTOR / name).read_text())
    [job] = [one for one in prometheus["scrape_configs"] if one["job_name"] == SPANS_JOB]
    for collector in SAMPLING:
        flush = read(collector)["connectors"]["spanmetrics"]["metrics_flush_interval"]
        assert seconds(job["scrape_interval"]) <= seconds(flush)
    assert prometheus["storage"]["exemplars"]["max_exemplars"] > 0


def test_each_sampler_has_series_of_its_own() -> None:
    """By a label of the target: when metrics are relabelled its address is no longer known."""
    prometheus = yaml.safe_load((COLLECTOR / "scale/prometheus-remote-write.yml").read_text())
    [job] = [one for one in prometheus["scrape_configs"] if one["job_name"] == SPANS_JOB]
    assert job["relabel_configs"] == [{"source_labels": ["__address__"], "target_label": "sampler"}]
    assert "metric_relabel_configs" not in job


def test_prometheus_scrapes_what_servers_and_stack_name() -> None:
    prometheus = yaml.safe_load((COLLECTOR / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert set(jobs) == {AGENT_JOB, GATEWAY_JOB, SPANS_JOB, COLLECTOR_JOB}
    assert set(jobs) == {names.AGENT_JOB, names.GATEWAY_JOB, names.SPANS_JOB, names.COLLECTOR_JOB}
    for name in (AGENT_JOB, GATEWAY_JOB, SPANS_JOB):
        assert jobs[name]["honor_labels"], name
