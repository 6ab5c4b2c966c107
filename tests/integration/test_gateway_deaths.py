"""Processes of a real server die under its requests: what their callers get, and what is recorded.

One server for all of it, in this order: it begins with the gateway alone; a prefill worker and a
decode worker are killed while they hold requests of which nothing was sent, then one behind the
first byte; at last the gateway itself is replaced.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from pdtrace.analysis.timeline import Timeline
from pdtrace.stages import Outcome
from server.engine.fake import expected_tokens
from tests.support.completions import Answer, Ask, ask, ask_all
from tests.support.own_server import OwnServer, own_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

BURST = 200
STREAMED = 1500
"""Tokens of a stream that is cut off: seconds of work at 2 ms a step."""


def prompt_of(salt: int) -> list[int]:
    return [33 + (salt * 13 + k * 5) % 90 for k in range(40)]


def text_of(salt: int, count: int) -> str:
    return "".join(map(chr, expected_tokens(prompt_of(salt), count)))


@dataclass
class Story:
    """What happened, for the tests to look at."""

    before: tuple[int, int] = (0, 0)
    burst: list[httpx.Response] = field(default_factory=list[httpx.Response])
    retried: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    retries_counted: bool = False
    streams: list[str] = field(default_factory=list[str])
    failures_counted: bool = False
    after: list[Answer] = field(default_factory=list[Answer])
    timelines: dict[str, Timeline] = field(default_factory=dict[str, Timeline])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir: Path = tmp_path_factory.mktemp("deaths") / "run"
    told = Story()
    with own_server(run_dir, start=False) as server:
        begin_with_the_gateway(server, told)
        for victim in ("prefill-0", "decode-0"):
            told.retried[victim] = kill_before_the_first_byte(server, victim)
        told.retries_counted = server.metric(
            'pd_gateway_retries_total{outcome="completed",reason="worker_lost"} 4.0'
        )
        kill_behind_the_first_byte(server, told)
        server.wait_until(server.idle, "places to be given back")
        server.kill("gateway-0")
        server.start("gateway-0")
        server.wait_until(lambda: server.status("/ready") == 200, "the second gateway")
        told.after = [
            ask(server, Ask(prompt=prompt_of(i), request_id=f"after-{i}")) for i in (1, 2)
        ]
        told.timelines = {t.request_id or "": t for t in server.timelines()}
    yield told


def begin_with_the_gateway(server: OwnServer, told: Story) -> None:
    server.start("gateway-0")
    server.wait_until(lambda: server.status("/ready") != 0, "the gateway")
    told.before = server.status("/ready"), server.status("/health")
    sent = threading.Thread(target=lambda: told.burst.extend(asyncio.run(burst(server.url))))
    sent.start()
    queued = f"pd_gateway_queue_depth {BURST - server.settings.max_concurrency}.0"
    server.wait_until(lambda: server.metric(queued), "the burst to wait")
    server.start(*server.workers)
    sent.join()
    server.wait_ready()


async def burst(url: str) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=BURST)
    async with httpx.AsyncClient(
        base_url=url, timeout=120.0, trust_env=False, limits=limits
    ) as client:
        bodies = [
            {"model": "fake", "prompt": prompt_of(i), "max_tokens": 4, "ignore_eos": True}
            | {"temperature": 0}
            for i in range(BURST)
        ]
        return await asyncio.gather(*[client.post("/v1/completions", json=b) for b in bodies])


def kill_before_the_first_byte(server: OwnServer, victim: str) -> list[Answer]:
    """Four requests, of which round robin gives two to the victim, which cannot have begun them."""
    served = 'pd_requests_total{gen_ai_operation_name="text_completion",outcome="completed",'
    before = sum(server.values(served))
    server.signal(victim, signal.SIGSTOP)
    asks = [
        Ask(prompt=prompt_of(i), max_tokens=12, stream=i % 2 == 0, request_id=f"{victim}-{i}")
        for i in range(4)
    ]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, server, asks, at_once=4)
        server.wait_until(lambda: sum(server.values(served)) == before + 2, "the other two")
        server.kill(victim)
        found = answers.result()
    server.start(victim)
    server.wait_ready()
    return found


def kill_behind_the_first_byte(server: OwnServer, told: Story) -> None:
    """Two streams, one on each decode worker, of which one is killed after some chunks of both."""
    chunks = threading.Barrier(3)

    def stream(number: int) -> str:
        body = {"model": "fake", "prompt": prompt_of(number), "max_tokens": STREAMED}
        body |= {"ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"X-Request-Id": f"stream-{number}"}
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            text = ""
            for count, piece in enumerate(response.iter_text()):
                text += piece
                if count == 3:
                    chunks.wait(60)
            return text

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, number) for number in range(2)]
        chunks.wait(60)
        server.kill("decode-1")
        told.streams = [one.result() for one in streams]
    told.failures_counted = server.metric(
        'pd_requests_total{gen_ai_operation_name="text_completion",outcome="failed",'
        'reason="worker_lost"} 1.0'
    )


@pytest.mark.case("FAIL-10")
def test_requests_that_come_before_the_workers_are_all_served(story: Story) -> None:
    assert story.before == (503, 503)
    assert [response.status_code for response in story.burst] == [200] * BURST
    texts = [response.json()["choices"][0]["text"] for response in story.burst]
    assert texts == [text_of(i, 4) for i in range(BURST)]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_requests_of_a_killed_worker_are_answered_by_another(story: Story, victim: str) -> None:
    answers = story.retried[victim]
    assert [answer.status for answer in answers] == [200] * 4
    assert [answer.text for answer in answers] == [text_of(i, 12) for i in range(4)]
    timelines = [story.timelines[f"{victim}-{i}"] for i in range(4)]
    assert sorted(timeline.attempts for timeline in timelines) == [1, 1, 2, 2]
    for timeline in timelines:
        assert timeline.outcome is Outcome.COMPLETED
        if timeline.attempts == 2:
            first, second = timeline.tries
            assert victim in (first.prefill_worker, first.decode_worker)
            assert victim not in (second.prefill_worker, second.decode_worker)
            assert (first.outcome, first.reason) == (Outcome.FAILED, "worker_lost")
            assert second.outcome is Outcome.COMPLETED
    assert story.retries_counted


@pytest.mark.case("API-01")
def test_stream_that_had_begun_ends_with_one_error_and_the_other_is_untouched(
    story: Story,
) -> None:
    cut = [text for text in story.streams if '"error"' in text]
    whole = [text for text in story.streams if '"error"' not in text]
    assert (len(cut), len(whole)) == (1, 1)
    *_, error, done, nothing = cut[0].split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_lost"
    assert (done, nothing) == ("data: [DONE]", "")
    assert cut[0].count('"error"') == cut[0].count("[DONE]") == 1
    assert whole[0].endswith("data: [DONE]\n\n")
    number = story.streams.index(whole[0])
    events = [e.removeprefix("data: ") for e in whole[0].split("\n\n")[:-2]]
    texts = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(texts) == text_of(number, STREAMED)
    assert story.failures_counted
    failed = story.timelines[f"stream-{1 - number}"]
    assert (failed.outcome, failed.outcome_reason) == (Outcome.FAILED, "worker_lost")
    assert failed.outcome_stage == "decode.generate"
    assert failed.attempts == 1
    assert story.timelines[f"stream-{number}"].outcome is Outcome.COMPLETED


def test_gateway_that_takes_over_learns_of_the_workers_and_serves(story: Story) -> None:
    assert [answer.status for answer in story.after] == [200, 200]


def test_every_request_is_recorded_whole_and_every_instant_explained(story: Story) -> None:
    assert len(story.timelines) >= 4 + 4 + 2 + 2
    for name, timeline in story.timelines.items():
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns, name
        assert timeline.unexplained_ns <= 0.01 * timeline.total_ns, name
        assert timeline.violations == (), name
