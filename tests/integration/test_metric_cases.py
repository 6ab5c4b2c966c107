"""What metrics say of a running server, against what its clients and its traces say.

One server with few places, so that requests queue; stages are held by the fault hooks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dashboards import names, promql, targets
from dashboards.build import boards
from dashboards.rules.alerts import alerts
from dashboards.rules.recordings import recordings
from pdtrace import semconv as a
from pdtrace.agent.endpoint import read_address
from pdtrace.analysis.sources import read_source
from pdtrace.slo import DEFAULT_SLO
from pdtrace.stages import ROOT_SPAN
from server.engine.fake import expected_tokens
from server.injection.fault import Corrupt, Damage, Shrink
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Ask, ask, ask_all
from tests.support.injection import clear, inject
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

PLACES = 4
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run_dir = tmp_path_factory.mktemp("metric-cases") / "run"
    options = ("--allow-faults", "--max-concurrency", str(PLACES), "--reserve-output-tokens", "16")
    with running_server(run_dir, *options, model=FAST_FAKE) as server:
        yield server


def scraped(url: str) -> list[Sample]:
    body = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).raise_for_status().text
    return [s for family in text_string_to_metric_families(body) for s in family.samples]


def agent_url(server: RunningServer) -> str:
    """Of its agent, which may be ready a little later than the server."""
    wait_for(lambda: read_address(server.run_dir) is not None)
    address = read_address(server.run_dir)
    assert address is not None
    return address.url


def total(samples: list[Sample], name: str) -> float:
    return sum(sample.value for sample in samples if sample.name == name)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_until_idle(server: RunningServer) -> None:
    """Until the agent has counted what the gateway has."""

    def counted() -> bool:
        ended = total(scraped(server.url), names.GATEWAY_REQUESTS)
        return total(scraped(agent_url(server)), names.FINISHED) >= ended

    wait_for(counted)


def measured_ttft_s(server: RunningServer, *request_ids: str) -> list[float]:
    """What the root spans say; waits for them to be written."""
    found: dict[str, float] = {}

    def written() -> bool:
        for trace in read_source(server.run_dir).traces:
            for span in trace.spans:
                facts = span.attributes
                if facts.get(a.SPAN.key) == ROOT_SPAN:
                    ttft_s = facts.get(a.TTFT_SECONDS.key)
                    if isinstance(ttft_s, int | float):
                        found[str(facts[a.REQUEST_ID.key])] = float(ttft_s)
        return set(request_ids) <= set(found)

    wait_for(written)
    return [found[request_id] for request_id in request_ids]


@pytest.mark.case("MET-01")
def test_no_count_shrinks_when_requests_are_preempted_and_tried_again(
    server: RunningServer,
) -> None:
    """Requests that outgrow the pool together give pages back; a damaged copy is made again."""
    agent = agent_url(server)
    wait_until_idle(server)
    before = {url: scraped(url) for url in (agent, server.url)}
    [capacity] = [
        sample.value
        for sample in before[agent]
        if sample.name == names.KV_CAPACITY and sample.labels["role"] == "decode"
    ]
    output, left = 90, 24  # of 16 tokens each: four requests need 36 pages
    inject(server, Shrink(at="decode-0", pages=int(capacity) - left), Corrupt(copy=Damage.SHORT))
    asks = [
        Ask(prompt=[33 + (i * 13 + k * 5) % 90 for k in range(40)], max_tokens=output)
        for i in range(PLACES)
    ]

    def stage_count(samples: list[Sample], stage: str) -> float:
        name = f"{names.STAGE_DURATION}_count"
        return sum(s.value for s in samples if s.name == name and s.labels["stage"] == stage)

    def preempted() -> bool:
        answers = ask_all(server, asks, at_once=PLACES)
        for request, answer in zip(asks, answers, strict=True):
            assert not isinstance(request.prompt, str)
            assert answer.text == "".join(map(chr, expected_tokens(request.prompt, output)))
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == output
        rounds.append(len(answers))
        wait_until_idle(server)
        return stage_count(scraped(agent), "decode.preempted") > stage_count(
            before[agent], "decode.preempted"
        )

    rounds: list[int] = []
    wait_for(preempted)
    clear(server)
    after = {url: scraped(url) for url in (agent, server.url)}
    assert total(after[server.url], "pd_gateway_retries_total") > 0
    for url, samples in after.items():
        was = {(s.name, frozenset(s.labels.items())): s.value for s in before[url]}
        for sample in samples:
            if sample.name.endswith(("_total", "_count", "_bucket", "_sum")):
                earlier = was.get((sample.name, frozenset(sample.labels.items())), 0.0)
                assert sample.value >= earlier, sample
    tokens = [
        {s.labels["type"]: s.value for s in scrape if s.name == "pd_tokens_total"}
        for scrape in (before[server.url], after[server.url])
    ]
    assert tokens[1]["output"] - tokens[0]["output"] == sum(rounds) * output
    for name in ("pd_agent_metrics_errors_total", "pd_gateway_metrics_errors_total"):
        assert total(after[agent], name) + total(after[server.url], name) == 0, name


@pytest.mark.case("MET-05")
def test_time_to_first_token_has_the_transfer_in_it(server: RunningServer) -> None:
    """In the agent's metric, the gateway's and the trace: all have what the transfer is held."""
    held_s, count = 0.5, 4
    metrics = ((names.TTFT, agent_url(server)), (names.GATEWAY_TTFT, server.url))

    def grown_by(faults: Mapping[str, int], name: str) -> dict[str, float]:
        wait_until_idle(server)
        before = {m: total(scraped(url), f"{m}_sum") for m, url in metrics}
        for number in range(count):
            request = Ask(
                prompt=f"met {name} {number}",
                max_tokens=4,
                stream=True,
                request_id=f"met-{name}-{number}",
                faults=faults,
            )
            assert ask(server, request).status == 200
        wait_until_idle(server)
        return {m: (total(scraped(url), f"{m}_sum") - before[m]) / count for m, url in metrics}

    usual = grown_by({}, "usual")
    slow_ids = [f"met-slow-{number}" for number in range(count)]
    slow = grown_by({"transfer": round(held_s * 1000)}, "slow")
    for metric in usual:  # the least that it can be, whatever a busy machine adds to both
        assert slow[metric] >= held_s, metric
        assert slow[metric] > usual[metric], metric
    assert all(ttft_s >= held_s for ttft_s in measured_ttft_s(server, *slow_ids))
    assert slow[names.TTFT] == pytest.approx(slow[names.GATEWAY_TTFT], rel=0.1)


@dataclass(frozen=True, slots=True)
class Timed:
    request_id: str
    ttft_s: float


HELD_MS = 800
"""How long each request of the overload keeps its place: waiting, it costs no CPU, so that neither
side's clock is late because the machine is busy."""


def timed(client: httpx.Client, model: str, number: int) -> Timed:
    """Time to the first content of a stream, as its client has it."""
    request_id = f"overload-{number}"
    headers = {"X-Request-Id": request_id, "X-PD-Faults": f"decode.queue={HELD_MS}"}
    body = {"model": model, "prompt": f"overload {number}", "max_tokens": 4, "stream": True}
    begin = time.monotonic()
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        first_s = 0.0
        for line in response.iter_lines():
            if first_s or not line.startswith("data: {"):
                continue
            if json.loads(line[6:])["choices"][0]["text"]:
                first_s = time.monotonic() - begin
    return Timed(request_id, first_s)


@pytest.mark.case("MET-06")
def test_time_to_first_token_has_the_queue_in_it(server: RunningServer) -> None:
    """Under overload the server's median is the client's, in its traces and in its buckets."""
    count = 6 * PLACES + 1  # odd: the median is one of them
    before = scraped(server.url)
    with server.client(timeout_s=120) as client, ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(timed, [client] * count, [server.model] * count, range(count)))
    after = scraped(server.url)
    clients_s = statistics.median(answer.ttft_s for answer in answers)
    ids = [answer.request_id for answer in answers]
    servers_s = statistics.median(measured_ttft_s(server, *ids))
    # Three others had the median's place before it, and some clients begin later than others.
    assert clients_s > 3 * HELD_MS / 1000, "they did not queue"
    assert servers_s == pytest.approx(clients_s, rel=0.1)

    def below(samples: list[Sample]) -> dict[float, float]:
        found: dict[float, float] = defaultdict(float)
        for sample in samples:
            if sample.name == f"{names.GATEWAY_TTFT}_bucket":
                found[float(sample.labels["le"])] += sample.value
        return found

    was = below(before)
    edges = sorted((edge, value - was[edge]) for edge, value in below(after).items())
    at = next(index for index, (_, value) in enumerate(edges) if value >= count / 2)
    lower = edges[at - 1][0] if at else 0.0
    assert lower * 0.9 <= clients_s <= edges[at][0] * 1.1


def mixed_load(server: RunningServer) -> None:
    """Short and long prompts and answers, alone and many at a time, some held for long."""
    quick = [
        Ask(prompt="q" * (10 + 7 * i), max_tokens=6, stream=i % 2 == 0, request_id=f"quick-{i}")
        for i in range(30)
    ]
    slow = [
        Ask(
            prompt="s" * (200 + 50 * i),
            max_tokens=40,
            stream=True,
            request_id=f"slow-{i}",
            faults={stage: 300},
        )
        for i, stage in enumerate(
            ("gateway.queue", "decode.reserve", "prefill.queue", "transfer", "decode.queue") * 2
        )
    ]
    answers = [*ask_all(server, quick, at_once=6), *ask_all(server, slow, at_once=4)]
    assert {answer.status for answer in answers} == {200}
    refused = ask(server, Ask(prompt="too long", max_tokens=10_000_000, request_id="refused"))
    assert refused.status == 400
    wait_until_idle(server)


@pytest.fixture(scope="module")
def after_mixed_load(server: RunningServer) -> list[Sample]:
    """Samples of agent and gateway."""
    mixed_load(server)
    return [*scraped(agent_url(server)), *scraped(server.url)]


@pytest.mark.case("MET-07")
def test_ladder_fits_what_is_measured(after_mixed_load: list[Sample]) -> None:
    """Of each histogram, by stage, neither nearly all is below the first edge nor much above the
    last. A quantile would be a constant."""
    histograms: dict[tuple[str, str], dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for sample in after_mixed_load:
        if sample.name.endswith("_bucket"):
            of = (sample.name, sample.labels.get("stage", ""))
            histograms[of][float(sample.labels["le"])] += sample.value
    judged = 0
    for of, buckets in histograms.items():
        *_, (last, most), (_, count) = sorted(buckets.items())
        if count < 20:
            continue
        judged += 1
        assert buckets[min(buckets)] < 0.9 * count, f"{of}: nearly all in the first bucket"
        assert count - most < 0.1 * count, f"{of}: much above {last:g}"
    assert judged > 20


OPTIONAL = frozenset(
    {
        names.OPEN_OLDEST_BY_WORKER,  # while something is in flight
        names.AGENT_DROPPED,  # with an exporter
    }
)
ELSEWHERE = ("traces_span_metrics_", "otelcol_", "pdtrace:", "up", "ALERTS")
"""What neither agent nor gateway exposes: a collector's, recorded series, Prometheus's own."""


@pytest.mark.case("DSH-02")
def test_everything_that_boards_and_rules_query_is_there_after_a_mixed_load(
    after_mixed_load: list[Sample],
) -> None:
    values = {
        **targets.ALL,
        **targets.windows(range_s=600, step_s=5, scrape_s=5),
        "stage": "transfer",
    }
    exprs = [t.filled(values)["expr"] for t in targets.targets(boards()) if t.kind == "prometheus"]
    exprs += [alert.expr for alert in alerts(DEFAULT_SLO)]
    exprs += [rec.expr for group in recordings(DEFAULT_SLO).values() for rec in group]
    exprs += [targets.fill(q.selector, values) for q in targets.values_queries(boards())]
    exprs += [targets.fill(e, values) for _, _, e in targets.annotation_queries(boards())]
    queried = {s.name for expr in exprs for s in promql.selectors(promql.parse(expr))}
    wanted = {name for name in queried if not name.startswith(ELSEWHERE)}
    assert len(wanted) > 30
    exposed = {sample.name for sample in after_mixed_load}
    assert wanted - exposed <= OPTIONAL
