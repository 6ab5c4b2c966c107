"""A load generator from elsewhere and the server report the same: aiperf against the default model.

Each of its requests carries an id of its own, under which the server recorded it, so the two are
compared request by request. Token counts are equal. Times are taken at the two ends of a loopback
connection: the client's begins before it connects and ends when its event loop has read the bytes,
the server's lies from the first byte it read to the last it wrote. So they differ by two hand-overs
between processes, a few milliseconds, plus what a busy machine lets a ready process wait.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdtrace import semconv as a
from pdtrace.spans import Span
from tests.support.load_generator import (
    ClientRecord,
    LoadReport,
    require_load_generator,
    run_aiperf,
)
from tests.support.recorded import is_root, spans_by_request, wait_for
from tests.support.server import ROOT, RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

REQUESTS, CONCURRENCY = 8, 2
RUN_S = 400.0
MEDIAN_ERROR_S, MEDIAN_ERROR = 0.05, 0.05
"""By how much half of the times differ at most: seconds, and parts of the time."""
WORST_ERROR_S, WORST_ERROR = 1.0, 0.10
"""The same of all times: one hand-over may meet a machine that is busy with other things."""

GAP_ERROR_S, GAP_ERROR = 0.02, 0.10
"""The same of the mean time between two tokens, where most delays cancel out."""
SAME_S = 0.02
"""By how much the server's metrics and its traces differ, which are taken apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both ends said. `roots` are the server's root spans by request id, `counters` the sums
    of its /metrics afterwards."""

    report: LoadReport
    roots: Mapping[str, Span]
    counters: Mapping[str, float]

    def pairs(self) -> list[tuple[ClientRecord, Span]]:
        return [(record, self.roots[record.request_id]) for record in self.report.records]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    require_load_generator()
    folder = tmp_path_factory.mktemp("load")
    tokenizer = folder / "tokenizer"
    subprocess.run(
        [sys.executable, "-m", "server", "tokenizer", tokenizer],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    with running_server(folder / "run", model=None) as server:
        report = run_aiperf(
            server,
            tokenizer,
            folder,
            *("--request-count", str(REQUESTS), "--concurrency", str(CONCURRENCY)),
            *("--isl", "80", "--isl-stddev", "30", "--osl", "5", "--osl-stddev", "2"),
            *("--random-seed", "7"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            timeout_s=RUN_S,
        )
        roots = recorded_roots(server, len(report.records))
        yield Load(report=report, roots=roots, counters=counters(server))


def recorded_roots(server: RunningServer, count: int) -> dict[str, Span]:
    """Root spans by request id, once there are `count`."""
    found: dict[str, Span] = {}

    def written() -> bool:
        spans = [span for spans in spans_by_request(server).values() for span in spans]
        found.update({str(s.attributes[a.REQUEST_ID.key]): s for s in spans if is_root(s)})
        return len(found) >= count

    wait_for(written, f"{count} recorded requests")
    return found


def counters(server: RunningServer) -> dict[str, float]:
    """Samples of the gateway's /metrics by name, or name and the value of `type`, summed."""
    with server.client() as client:
        text = client.get("/metrics").text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = " ".join(
                (sample.name, *([sample.labels["type"]] if family.name == "pd_tokens" else ()))
            )
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def assert_agree(client_s: Sequence[float], server_s: Sequence[float]) -> None:
    """Within the errors that this module states."""
    pairs = list(zip(client_s, server_s, strict=True))
    errors = [abs(ours - theirs) for ours, theirs in pairs]
    for (ours, theirs), error in zip(pairs, errors, strict=True):
        assert error <= WORST_ERROR_S + WORST_ERROR * theirs, (ours, theirs)
    assert median(errors) <= MEDIAN_ERROR_S + MEDIAN_ERROR * median(server_s), pairs


def test_every_request_of_the_client_is_one_of_the_servers(load: Load) -> None:
    assert len(load.report.records) == REQUESTS
    assert {record.request_id for record in load.report.records} == set(load.roots)
    assert load.report.summary["request_count"]["avg"] == REQUESTS
    assert load.report.summary["error_summary"] == []
    assert load.counters["pd_requests_total"] == REQUESTS
    assert {root.attributes[a.OUTCOME.key] for root in load.roots.values()} == {"completed"}


def test_token_counts_are_equal(load: Load) -> None:
    for client, root in load.pairs():
        counted = (root.attributes[a.PROMPT_TOKENS.key], root.attributes[a.OUTPUT_TOKENS.key])
        assert client.usage == counted
        # Counted by the client itself, with its own library, template included.
        assert client.prompt_tokens == counted[0]
    prompts, outputs = (
        sum(client.usage[kind] for client in load.report.records) for kind in (0, 1)
    )
    assert load.counters["pd_tokens_total input"] == prompts
    assert load.counters["pd_tokens_total output"] == outputs
    assert load.report.summary["total_usage_prompt_tokens"]["avg"] == prompts
    assert load.report.summary["total_usage_completion_tokens"]["avg"] == outputs


def test_client_gets_a_piece_of_text_for_each_write_of_the_server(load: Load) -> None:
    """At most one per token: bytes of a character that is not whole yet wait for the next one."""
    for client, _root in load.pairs():
        assert client.chunks <= client.usage[1]
    gaps = sum(client.chunks - 1 for client in load.report.records)
    assert load.counters["pd_inter_token_gap_seconds_count"] == gaps


def test_time_to_first_token_agrees(load: Load) -> None:
    recorded_s = [float(str(root.attributes[a.TTFT_SECONDS.key])) for _, root in load.pairs()]
    assert_agree([client.ttft_s for client in load.report.records], recorded_s)
    counted_s = load.counters["gen_ai_server_time_to_first_token_seconds_sum"]
    assert counted_s == pytest.approx(sum(recorded_s), abs=SAME_S * REQUESTS)


def test_latency_agrees(load: Load) -> None:
    """The client's ends with the last text, the server's with `[DONE]`, directly behind it."""
    recorded_s = [(root.end_ns - root.start_ns) / 1e9 for _, root in load.pairs()]
    assert_agree([client.latency_s for client in load.report.records], recorded_s)
    counted_s = load.counters["gen_ai_server_request_duration_seconds_sum"]
    assert counted_s == pytest.approx(sum(recorded_s), abs=SAME_S * REQUESTS)


def test_time_between_tokens_agrees(load: Load) -> None:
    streams = [client for client in load.report.records if client.chunks > 1]
    assert load.counters["gen_ai_server_time_per_output_token_seconds_count"] == len(streams)
    per_token_s = [(client.latency_s - client.ttft_s) / (client.usage[1] - 1) for client in streams]
    counted_s = load.counters["gen_ai_server_time_per_output_token_seconds_sum"]
    assert sum(per_token_s) == pytest.approx(
        counted_s, rel=GAP_ERROR, abs=GAP_ERROR_S * len(streams)
    )
    for client, mine_s in zip(streams, per_token_s, strict=True):
        # aiperf divides by the tokens that its own tokenizer finds in the text.
        assert client.itl_s == pytest.approx(
            mine_s * (client.usage[1] - 1) / (client.text_tokens - 1), rel=1e-6
        )
    gaps_s = [gap for client in streams for gap in client.chunk_gaps_s]
    counted_s = load.counters["pd_inter_token_gap_seconds_sum"]
    assert sum(gaps_s) == pytest.approx(counted_s, rel=GAP_ERROR, abs=GAP_ERROR_S * len(gaps_s))


def test_client_reads_the_servers_metrics(load: Load) -> None:
    scraped = load.report.scraped
    assert scraped["summary"]["endpoints_successful"]
    assert scraped["summary"]["endpoints_successful"] == scraped["summary"]["endpoints_configured"]
    series = scraped["metrics"]["gen_ai_server_time_to_first_token_seconds"]["series"]
    assert sum(one["stats"]["count"] for one in series) == REQUESTS
