"""The real server with the real Jaeger, Prometheus and Alertmanager: what arrives, what is kept,
what is measured, and that an alert goes its way."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdtrace import semconv as a
from pdtrace.agent.keeping import Reason
from pdtrace.analysis.attributes import text
from pdtrace.analysis.jaeger import read_jaeger
from pdtrace.analysis.placement import is_root
from pdtrace.analysis.sources import read_source
from pdtrace.analysis.time_range import TraceQuery, instant_text
from pdtrace.otlp.jaeger_json import decode_jaeger
from pdtrace.otlp.protobuf import serialize_request
from pdtrace.slo import DEFAULT_SLO
from pdtrace.spans import Resource, Span, SpanKind, StatusCode
from pdtrace.stages import ATTEMPT_SPAN, CHAINS, ROOT_SPAN, STAGE_BY_NAME, Mode
from server.injection.fault import Corrupt, Damage
from tests.integration.conftest import FAST_FAKE
from tests.support.injection import clear, inject
from tests.support.jaeger_critical_path import critical_path
from tests.support.jaeger_doubles import one_api
from tests.support.notable import is_notable
from tests.support.real_stack import (
    RealStack,
    Webhook,
    complete,
    need_programs,
    pdtrace,
    real_stack,
    tags,
    wait_for,
    webhook_receiver,
)
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(420)]

HEALTHY = 12
GAP_MS = 300
STALL_MS = 1200
SERVICES = {"pd-gateway", "pd-prefill", "pd-transfer", "pd-decode"}
CHAIN = [stage.name for stage in CHAINS[Mode.PD]]
ALERT = "RequestHeld"
RULES = {
    "groups": [
        {
            "name": "test",
            "interval": "1s",
            "rules": [
                {
                    "alert": ALERT,
                    "expr": 'pd_open_request_oldest_age_seconds{stage="decode.reserve"} > 3',
                    "for": "3s",
                    "labels": {"severity": "page"},
                }
            ],
        }
    ]
}


@dataclass(slots=True)
class Traffic:
    """A stack, a server that joined it, and what was asked of the server."""

    stack: RealStack
    server: RunningServer
    webhook: Webhook
    asked: int


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traffic]:
    """Healthy requests, then one stalled in each of several stages. Of the healthy ones none is to
    be kept."""
    need_programs()
    folder = tmp_path_factory.mktemp("stack")
    rules = folder / "test.yml"
    rules.write_text(json.dumps(RULES))  # JSON is YAML
    with webhook_receiver() as webhook:
        options = ("--keep", "0", "--rules", str(rules), "--webhook", webhook.url)
        with real_stack(folder / "stack", *options) as stack:
            joined = ("--stack", str(stack.folder), "--allow-faults", "--decode", "2")
            with running_server(folder / "run", *joined, model=FAST_FAKE) as server:
                for number in range(HEALTHY):
                    answer = complete(server, f"healthy-{number}", stream=True)
                    assert answer.status_code == 200
                for stage in CHAIN:
                    stalls = f"{stage}={STALL_MS}"
                    answer = complete(server, f"in-{stage}", stalls=stalls, stream=True)
                    assert answer.status_code == 200
                every = ", ".join(
                    f"{stage}={STALL_MS * 2 if stage == 'decode.queue' else 20}" for stage in CHAIN
                )
                assert complete(server, "everywhere", stalls=every).status_code == 200
                yield Traffic(stack, server, webhook, HEALTHY + len(CHAIN) + 1)


def spans_of(trace: dict[str, Any]) -> list[Span]:
    return decode_jaeger(json.dumps({"data": [trace]}).encode()).spans


def request_id_of(spans: Sequence[Span]) -> str | None:
    return next((text(s.attributes, a.REQUEST_ID) for s in spans if is_root(s)), None)


def recorded_spans(server: RunningServer, request_id: str) -> list[Span]:
    """What the server's own files have of a request, also where its caller's trace has others."""
    return [
        span
        for trace in read_source(server.run_dir).traces
        for span in trace.spans
        if text(span.attributes, a.REQUEST_ID) == request_id
    ]


def place_of(span: Span) -> tuple[str, str, str, str, str]:
    """Which span, below which, of which process."""
    resource = span.resource
    return (
        *(span.span_id, span.parent_id or "", span.name),
        *(resource.service_name, resource.instance_id or ""),
    )


def assert_each_has_its_place(spans: Sequence[Span]) -> None:
    """Every stage below the request, its attempt or the stage that it details, in the service that
    owns it."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        stage = STAGE_BY_NAME.get(text(span.attributes, a.STAGE) or "")
        if is_root(span):
            assert (span.kind, span.resource.service_name) == (SpanKind.SERVER, "pd-gateway")
            continue
        parent = by_id[span.parent_id or ""]
        if stage is None:
            assert span.name == ATTEMPT_SPAN
            assert is_root(parent)
            continue
        assert span.name == stage.name
        assert span.resource.service_name in {role.service_name for role in stage.roles}
        assert (span.kind is SpanKind.SERVER) == stage.server
        if stage.parent == ROOT_SPAN:
            assert is_root(parent)
        else:
            assert parent.name in {ATTEMPT_SPAN, stage.within}
            assert parent.attributes[a.ATTEMPT.key] == span.attributes[a.ATTEMPT.key]


@pytest.mark.parametrize("stage", CHAIN)
def test_whole_trace_of_a_stalled_request_is_in_jaeger(traffic: Traffic, stage: str) -> None:
    trace = traffic.stack.wait_for_trace(f"in-{stage}")
    assert {process["serviceName"] for process in trace["processes"].values()} == SERVICES
    assert [span["warnings"] for span in trace["spans"] if span["warnings"]] == []
    ids = {span["spanID"] for span in trace["spans"]}
    roots = [span for span in trace["spans"] if not span["references"]]
    assert len(roots) == 1
    spans = spans_of(trace)
    assert set(CHAIN) <= {span.name for span in spans}
    assert_each_has_its_place(spans)
    recorded = recorded_spans(traffic.server, f"in-{stage}")
    assert sorted(map(place_of, spans)) == sorted(map(place_of, recorded))
    blamed = STAGE_BY_NAME[tags(roots[0])["pd.stall.stage"]]
    assert stage in {blamed.name, blamed.within}

    # By trace id, both APIs tell the same.
    trace_id = trace["traceID"]
    [again] = traffic.stack.get("jaeger", f"/api/traces/{trace_id}")["data"]
    assert {span["spanID"] for span in again["spans"]} == ids
    newer = traffic.stack.get("jaeger", f"/api/v3/traces/{trace_id}")["result"]["resourceSpans"]
    found = {
        span["spanId"]
        for resource in newer
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    assert found == ids


def test_critical_path_by_jaegers_rule_visits_every_stage(traffic: Traffic) -> None:
    """Jaeger works it out in its pages, no API of this version tells it: a port does here, on the
    spans as Jaeger stored them."""
    trace = traffic.stack.wait_for_trace("everywhere")
    visited = {name for name, _, _ in critical_path(spans_of(trace))}
    # The first token travels beside generation: the longer of the two is on the path.
    beside = {"hop.token", "decode.generate"}
    assert set(CHAIN) - visited <= beside
    assert beside & visited


def test_what_is_normal_is_measured_though_not_kept(traffic: Traffic) -> None:
    stack = traffic.stack
    stack.wait_for_trace("everywhere")  # decided after the others
    recorded = {
        timeline_id: trace.spans
        for trace in read_source(traffic.server.run_dir).traces
        if (timeline_id := request_id_of(trace.spans)) is not None
    }
    # On a busy machine a request may be slow though nobody held it up.
    healthy = [f"healthy-{number}" for number in range(HEALTHY)]
    normal = [name for name in healthy if not is_notable(recorded[name])]
    assert normal
    for name in healthy:
        assert bool(stack.jaeger_traces(name)) == (name not in normal), name
    gateway = 'service_name="pd-gateway",span_kind="SPAN_KIND_SERVER"'
    calls = f"sum(traces_span_metrics_calls_total{{{gateway}}})"
    wait_for(lambda: (stack.value(calls) or 0) >= traffic.asked, "every request in span metrics")
    for stage in CHAIN:
        within = [name for name, one in STAGE_BY_NAME.items() if stage in {name, one.within}]
        blamed = "|".join(name.replace(".", "[.]") for name in within)
        assert stack.query(f'traces_span_metrics_calls_total{{pd_stall_stage=~"{blamed}"}}'), stage


def test_exemplars_lead_to_traces_that_are_there(traffic: Traffic) -> None:
    stack = traffic.stack
    stack.wait_for_trace("everywhere")
    stalled = 'traces_span_metrics_duration_seconds_bucket{pd_stall_stage!=""}'
    agents = "pd_stage_duration_seconds_bucket"

    def led_to(promql: str) -> dict[str, bool]:
        """Trace ids of exemplars, and whether Jaeger has them."""
        found = stack.exemplars(promql)
        ids = {e["labels"]["trace_id"] for series in found for e in series["exemplars"]}
        url = f"{stack.urls['jaeger']}/api/v3/traces"
        return {one: stack.client.get(f"{url}/{one}").status_code == 200 for one in ids}

    def are_all_there() -> bool:
        led = led_to(stalled)
        return bool(led) and all(led.values())

    wait_for(are_all_there, "a trace behind each exemplar of a stalled request")
    wait_for(lambda: any(led_to(agents).values()), "a trace behind an exemplar of the agent")


def test_gap_that_the_client_saw_is_kept_without_a_verdict(traffic: Traffic) -> None:
    """Shorter than what a worker records as a gap of its own, above the limit all the same. There
    is no verdict on a generation that is over twice as long as any other."""

    def gaps_alone() -> list[Span] | None:
        request_id = f"gaps-{secrets.token_hex(4)}"
        gaps = f"decode.gap={GAP_MS}"
        answer = complete(traffic.server, request_id, stalls=gaps, stream=True, max_tokens=16)
        assert answer.status_code == 200
        spans = spans_of(traffic.stack.wait_for_trace(request_id))
        recorded = recorded_spans(traffic.server, request_id)
        assert sorted(map(place_of, spans)) == sorted(map(place_of, recorded))
        # On a busy machine another stage may be slow.
        [root] = [span for span in spans if is_root(span)]
        return None if a.STALL_STAGE.key in root.attributes else spans

    spans = wait_for(gaps_alone, "a request with gaps and without a verdict")
    [root] = [span for span in spans if is_root(span)]
    longest_s = root.attributes[a.LONGEST_GAP_SECONDS.key]
    assert isinstance(longest_s, float)
    assert longest_s > DEFAULT_SLO.token_gap_s
    assert {span.attributes[a.KEEP.key] for span in spans} == {Reason.SLO_MISSED}


def test_sampler_keeps_what_nobody_asks_for_by_each_of_its_policies(traffic: Traffic) -> None:
    """Spans of others, and parts of requests whose agents know less."""
    ttft_s, gap_s = DEFAULT_SLO.ttft_s, DEFAULT_SLO.token_gap_s
    outcomes = ("failed", "cancelled", "timed_out", "lost")
    status = "error, by its status"
    kept: dict[str, dict[str, Any]] = {
        **{outcome: {a.OUTCOME.key: outcome} for outcome in outcomes},
        "error": {status: True},
        "error of another": {status: True, a.OUTCOME.key: "completed"},
        "retried": {a.ATTEMPT.key: 2},
        "stalled": {a.STALL_STAGE.key: "transfer"},
        "incomplete": {a.INCOMPLETE.key: "no completed mark"},
        "impossible": {a.VIOLATION.key: "ends 1 ms before it begins"},
        "late": {a.STREAM.key: True, a.TTFT_SECONDS.key: ttft_s + 0.01},
        "gaps": {a.LONGEST_GAP_SECONDS.key: gap_s + 0.01},
    }
    dropped: dict[str, dict[str, Any]] = {
        "normal": {
            a.OUTCOME.key: "completed", a.ATTEMPT.key: 1, a.STREAM.key: True,
            a.TTFT_SECONDS.key: ttft_s, a.LONGEST_GAP_SECONDS.key: gap_s,
        },
        "late in one piece": {a.STREAM.key: False, a.TTFT_SECONDS.key: ttft_s + 0.01},
        "rejected": {status: True, a.OUTCOME.key: "rejected"},
    }  # fmt: skip
    asked = {"asked": {a.KEEP.key: Reason.SLO_MISSED.value}}
    ids = {name: secrets.token_hex(16) for name in (*kept, *dropped, *asked)}
    resource = Resource(attributes={"service.name": "of-others"})
    spans = [
        Span(
            ids[name], secrets.token_hex(8), None, name, SpanKind.INTERNAL,
            time.time_ns() - 1_000_000, time.time_ns(), resource,
            {key: value for key, value in own.items() if key != status},
            status=StatusCode.ERROR if status in own else StatusCode.UNSET,
        )
        for name, own in {**asked, **kept, **dropped}.items()
    ]  # fmt: skip
    # The rest of a trace whose request is kept: what its caller recorded.
    caller = Span(
        ids["asked"], secrets.token_hex(8), None, "caller", SpanKind.CLIENT,
        spans[0].start_ns, spans[0].end_ns, resource,
    )  # fmt: skip
    sent = httpx.post(
        f"{traffic.stack.otlp}/v1/traces",
        content=serialize_request([*spans, caller]),
        headers={"Content-Type": "application/x-protobuf"},
        timeout=60.0,
        trust_env=False,
    )
    assert sent.status_code == 200, sent.text

    def stored() -> dict[str, list[str]]:
        return {name: traffic.stack.span_names(trace_id) for name, trace_id in ids.items()}

    # They came together, and so they are decided together.
    wait_for(lambda: all(stored()[name] for name in kept), "all that is kept")
    wait_for(lambda: len(stored()["asked"]) == 2, "the span of its caller")
    assert sorted(stored()["asked"]) == ["asked", "caller"]
    assert {name for name, names in stored().items() if names} == {*kept, *asked}


def points(stack: RealStack, service: str, kind: str, **more: str) -> list[float]:
    """What Jaeger's Monitor draws above 0."""
    answer = stack.get(
        *("jaeger", f"/api/metrics/{kind}"), service=service, endTs=int(time.time() * 1000),
        lookback=3_600_000, step=5_000, ratePer=60_000, **more,
    )  # fmt: skip
    return [
        value
        for metric in answer["metrics"]
        for point in metric["metricPoints"]
        if (value := point["gaugeValue"]["doubleValue"]) not in {"NaN", None} and value > 0
    ]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_monitor_answers_for_each_service(traffic: Traffic, service: str) -> None:
    def points_while_asked(kind: str, **more: str) -> list[float]:
        """A rate needs a counter that grows while Prometheus looks."""
        assert complete(traffic.server, "more").status_code == 200
        return points(traffic.stack, service, kind, **more)

    wait_for(lambda: points_while_asked("calls"), f"request rate of {service}")
    latencies = wait_for(
        lambda: points_while_asked("latencies", quantile="0.95"), f"latency of {service}"
    )
    assert all(0 < value < 60_000 for value in latencies)
    # Nothing failed: an answer without a point above 0. Where something does, there is one:
    # test_monitor_counts_what_failed.
    assert points(traffic.stack, service, "errors") == []


def test_pdtrace_reads_jaeger(traffic: Traffic) -> None:
    stack = traffic.stack
    url = stack.urls["jaeger"]
    trace_id = stack.wait_for_trace("everywhere")["traceID"]
    for wanted in ("in-transfer", stack.wait_for_trace("in-transfer")["traceID"]):
        shown = pdtrace("why", wanted, "--from", url, "--json")
        assert shown.returncode == 0, shown.stderr
        [request] = json.loads(shown.stdout)["requests"]
        assert request["request_id"] == "in-transfer"
        assert request["verdict"]["stage"].startswith("transfer")
    slowest = json.loads(pdtrace("why", "--slowest", "3", "--from", url, "--json").stdout)
    assert len(slowest["requests"]) == 3
    checked = pdtrace("check", "--from", url, "--since", "1h")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    nothing = pdtrace("why", "nobody-asked-this", "--from", url)
    assert (nothing.returncode, "looked through" in nothing.stderr) == (2, True)
    # As much as the recording on this host holds, to the nanosecond.
    ours = read_jaeger(url, TraceQuery(wanted=trace_id)).traces[trace_id]
    here, there = (parts_of("everywhere", source) for source in (traffic.server.run_dir, url))
    assert here == there
    assert {span.resource.service_name for span in ours} == SERVICES


BEFORE_THE_FIRST_TOKEN = CHAIN[: CHAIN.index("decode.generate")]
LIMITS = ("--ttft", f"{STALL_MS / 1000 - 0.1}", "--token-gap", "30", "--worst", "100")


def slo_of(source: Path | str, *arguments: str) -> dict[str, Any]:
    judged = pdtrace("slo", "--from", str(source), "--json", *LIMITS, *arguments)
    assert judged.returncode in {0, 1}, judged.stderr
    return json.loads(judged.stdout)


def test_slo_of_a_recording_and_of_what_jaeger_kept_of_it(traffic: Traffic, tmp_path: Path) -> None:
    """The recording has all requests; the Jaeger those that something was wrong with, in either
    API and in files that were saved from it."""
    stack, url = traffic.stack, traffic.stack.urls["jaeger"]
    everywhere = stack.wait_for_trace("everywhere")  # decided after the others
    until_us = min(span["startTime"] for span in everywhere["spans"]) + 1
    until = instant_text(1_000 * until_us)
    whole = slo_of(traffic.server.run_dir, "--until", until)
    assert (whole["requests"], whole["warnings"]) == (traffic.asked, [])
    assert whole["gaps_seen_by_worker"] == 0  # the gateway recorded them
    by_name = {one["name"]: one for one in whole["objectives"]}
    assert by_name["errors"]["attainment"] == {"least": 1.0, "most": 1.0}
    assert by_name["ttft"]["counted"] == HEALTHY + len(CHAIN)  # "everywhere" does not stream
    assert by_name["token_gap"]["met"] is True
    late = {one["request_id"]: one for one in whole["worst"] if one["objective"] == "ttft"}
    for stage in BEFORE_THE_FIRST_TOKEN:
        assert late[f"in-{stage}"]["stage"] == stage
        assert late[f"in-{stage}"]["met_at_median"] is not None
    assert "in-gateway.finish" not in late

    kept = {}
    for v3 in (True, False):
        with one_api(url, v3=v3) as jaeger:
            kept[v3] = slo_of(jaeger.url, "--until", until)
            assert "NOT of all requests" in " ".join(kept[v3].pop("warnings"))
            assert slo_of(jaeger.url, "--until", until, "--all-kept")["warnings"] == []
            checked = pdtrace("check", "--from", jaeger.url, "--json")
            assert checked.returncode == 0, checked.stdout
            shown = parts_of("in-transfer", jaeger.url)
            assert shown == parts_of("in-transfer", traffic.server.run_dir)
        kept[v3].pop("source")
    assert kept[True] == kept[False]
    assert kept[True]["requests"] < whole["requests"]
    # On a busy machine a request may be late though nothing kept it for Jaeger.
    held = {f"in-{stage}" for stage in BEFORE_THE_FIRST_TOKEN}
    assert held <= {one["request_id"] for one in kept[True]["worst"]} <= set(late)

    for name, path in {
        "older.json": f"/api/traces/{everywhere['traceID']}",
        "v3.json": f"/api/v3/traces/{everywhere['traceID']}",
    }.items():
        (tmp_path / name).write_bytes(stack.client.get(f"{url}{path}").content)
        ours = parts_of("everywhere", traffic.server.run_dir)
        assert parts_of("everywhere", tmp_path / name) == ours
    wanted = {"service": "pd-gateway", "limit": 500, "start": 0, "end": until_us}
    search = stack.client.get(f"{url}/api/traces", params=wanted)
    (tmp_path / "search.json").write_bytes(search.content)
    from_file = slo_of(tmp_path / "search.json", "--until", until)
    assert "NOT of all requests" in " ".join(from_file.pop("warnings"))
    del from_file["source"]
    assert from_file == kept[True]


def parts_of(request_id: str, source: Path | str) -> list[tuple[str, int]]:
    """Stages and nanoseconds, as `pdtrace why` tells them."""
    shown = pdtrace("why", request_id, "--from", str(source), "--json")
    assert shown.returncode == 0, shown.stderr
    [request] = json.loads(shown.stdout)["requests"]
    return [(part["stage"], part["ns"]) for part in request["parts"]]


def test_monitor_counts_what_failed(traffic: Traffic) -> None:
    inject(traffic.server, Corrupt(copy=Damage.SHORT, count=None))

    def errors_while_failing() -> list[float]:
        assert complete(traffic.server, "fails").status_code >= 500
        return points(traffic.stack, "pd-gateway", "errors")

    shares = wait_for(errors_while_failing, "errors of pd-gateway")
    clear(traffic.server)
    assert all(0 < share <= 1 for share in shares)


def test_what_goes_wrong_late_in_a_callers_trace_is_kept_whole(traffic: Traffic) -> None:
    """Requests of one trace, one after the other: when the last ones come, "no" was decided."""
    server, stack = traffic.server, traffic.stack
    early = "otelcol_processor_tail_sampling_early_releases_from_cache_decision_total"
    dropped_late = f'sum({early}{{sampled="false"}})'

    def undisturbed() -> str:
        """A trace that dropped what came after its decision. On a busy machine a request may be
        slow though nobody held it up: then its trace is kept, and another one is tried."""
        before = stack.value(dropped_late) or 0
        trace_id = secrets.token_hex(16)
        while not stack.span_names(trace_id):
            assert complete(server, "fine", parent=parent(trace_id)).status_code == 200
            if (stack.value(dropped_late) or 0) > before:
                return trace_id
        return ""

    def parent(trace_id: str) -> str:
        return f"00-{trace_id}-{secrets.token_hex(8)}-01"

    trace_id = wait_for(undisturbed, "a trace of which nothing is kept", timeout_s=180.0)
    gaps = f"decode.gap={GAP_MS}"
    with_gaps = complete(server, "late-gaps", parent=parent(trace_id), stalls=gaps, stream=True)
    assert with_gaps.status_code == 200
    inject(server, Corrupt(copy=Damage.SHORT, count=None))
    failed = complete(server, "late-failed", parent=parent(trace_id))
    clear(server)
    assert failed.status_code >= 500

    for request_id in ("late-gaps", "late-failed"):
        spans = spans_of(stack.wait_for_trace(request_id))
        mine = [s for s in spans if text(s.attributes, a.REQUEST_ID) == request_id]
        assert {span.trace_id for span in spans} == {trace_id}
        assert {span.resource.service_name for span in mine} == SERVICES
        recorded = recorded_spans(server, request_id)
        assert sorted(map(place_of, mine)) == sorted(map(place_of, recorded))
        assert "fine" not in {text(span.attributes, a.REQUEST_ID) for span in spans}


def test_failed_cancelled_retried_and_lost_requests_are_kept(traffic: Traffic) -> None:
    server, stack = traffic.server, traffic.stack
    inject(server, Corrupt(copy=Damage.SHORT))
    assert complete(server, "retried").status_code == 200
    clear(server)
    with pytest.raises(httpx.ReadTimeout):
        complete(server, "left", stalls="decode.queue=30000", timeout_s=1.0)
    inject(server, Corrupt(copy=Damage.SHORT, count=None))
    failed = complete(server, "failed")
    assert failed.status_code >= 500
    clear(server)
    late = complete(server, "late", stalls="prefill.queue=2000", stream=True)
    assert late.status_code == 200

    def root(request_id: str) -> dict[str, Any]:
        trace = stack.wait_for_trace(request_id)
        return next(tags(span) for span in trace["spans"] if not span["references"])

    assert root("retried")["pd.attempt"] == 2
    assert root("left")["pd.outcome"] == "cancelled"
    assert root("failed")["pd.outcome"] == "failed"
    assert root("late")["pd.ttft"] > DEFAULT_SLO.ttft_s

    # A worker is killed with a request that streams: nobody can answer for it.
    endless = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream(
        "POST", "/v1/completions",
        json={"model": server.model, "prompt": "one two", **endless},
        headers={"X-Request-Id": "lost", "X-PD-Faults": "decode.gap=300"},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        for instance in ("decode-0", "decode-1"):
            server.send_signal(instance, signal.SIGKILL)
        try:
            list(lines)
        except httpx.HTTPError:
            pass
    trace = stack.wait_for_trace("lost")
    outcomes = {tags(span).get("pd.outcome") for span in trace["spans"]}
    assert "lost" in outcomes, outcomes

    # Each for its own reason.
    sampled = "otelcol_processor_tail_sampling_count_traces_sampled_total"
    for policy in ("not-completed", "retried", "slow-for-its-stage", "slo-missed"):
        count = f'sum({sampled}{{policy="{policy}",sampled="true"}})'
        wait_for(lambda promql=count: (stack.value(promql) or 0) >= 1, f"kept as {policy}")


def test_alert_goes_from_pending_to_the_webhook_and_is_resolved(traffic: Traffic) -> None:
    server, stack = traffic.server, traffic.stack
    wait_for(lambda: complete(server, "again").status_code == 200 or None, "a server that serves")

    def states() -> set[str]:
        alerts = stack.get("prometheus", "/api/v1/alerts")["data"]["alerts"]
        return {one["state"] for one in alerts if one["labels"]["alertname"] == ALERT}

    seen: list[str] = []

    def note(until: str) -> bool:
        seen.extend(state for state in states() if state not in seen)
        return until in seen

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(complete, server, "held", stalls="decode.reserve=25000")
        wait_for(lambda: note("firing") or None, "the alert fires")
        wait_for(lambda: traffic.webhook.alerts(ALERT), "the alert reaches its receiver")
        assert held.result().status_code == 200
    assert seen == ["pending", "firing"]
    first = traffic.webhook.alerts(ALERT)[0]
    assert (first["status"], first["labels"]["stage"]) == ("firing", "decode.reserve")
    wait_for(
        lambda: any(one["status"] == "resolved" for one in traffic.webhook.alerts(ALERT)),
        "the alert is resolved",
        timeout_s=180.0,
    )
