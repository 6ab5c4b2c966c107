"""The gateway before real processes, and when these die: what callers get, and what is recorded.

One server for all of it, in this order: it begins with the gateway alone; many small requests come
at once; a prefill worker and a decode worker are killed while they hold requests of which nothing
was sent, then one behind the first byte; one comes back that fits nobody, then one that takes long
to load; at last the gateway itself is replaced.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import Timeline
from pdtrace.analysis.verdict import judge_all
from pdtrace.spans import Span, StatusCode
from pdtrace.stages import Outcome
from server.engine.fake import expected_tokens
from tests.support.aftermath import assert_recorded, assert_recovered
from tests.support.completions import Answer, Ask, ask, ask_all
from tests.support.own_server import OwnServer, own_server
from tests.support.recorded import is_root

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

BURST = 200
PLACES = 4
SMALL = 64
SMALL_TOKENS = 32
STREAMED = 3000
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
    small_s: dict[str, float] = field(default_factory=dict[str, float])
    sockets: tuple[int, int] = (0, 0)
    retried: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    retries_counted: bool = False
    streams: list[str] = field(default_factory=list[str])
    failures_counted: bool = False
    misfit: dict[str, Any] = field(default_factory=dict[str, Any])
    beside: list[Answer] = field(default_factory=list[Answer])
    loading: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ready_while_loading: int = 0
    meanwhile: list[Answer] = field(default_factory=list[Answer])
    loaded: list[Answer] = field(default_factory=list[Answer])
    after: list[Answer] = field(default_factory=list[Answer])
    timelines: dict[str, Timeline] = field(default_factory=dict[str, Timeline])
    roots: dict[str, Span] = field(default_factory=dict[str, Span])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir: Path = tmp_path_factory.mktemp("deaths") / "run"
    told = Story()
    with own_server(run_dir, start=False, max_concurrency=PLACES) as server:
        begin_with_the_gateway(server, told)
        many_small_ones(server, told)
        for victim in ("prefill-0", "decode-0"):
            told.retried[victim] = kill_before_the_first_byte(server, victim)
        told.retries_counted = server.metric(
            'pd_gateway_retries_total{outcome="completed",reason="worker_lost"} 4.0'
        )
        kill_behind_the_first_byte(server, told)
        server.wait_until(server.idle, "places to be given back")
        server.start("decode-1", page_size=32)
        server.wait_until(lambda: bool(server.health()["refused_pairs"]), "a refused pair")
        told.misfit = server.health()
        told.beside = ask_all(server, [Ask(prompt=prompt_of(i)) for i in range(4)])
        start_slowly(server, "decode-1", told)
        # An answer reaches its client a moment before the gateway has marked the request's end.
        server.wait_until(server.idle, "places to be given back")
        server.kill("gateway-0")
        server.start("gateway-0")
        server.wait_until(lambda: server.status("/ready") == 200, "the second gateway")
        told.after = [
            ask(server, Ask(prompt=prompt_of(i), request_id=f"after-{i}")) for i in (1, 2)
        ]
        assert_recovered(server, recording=False)  # which is not written yet
        told.timelines = {t.request_id or "": t for t in server.timelines()}
    assert_recorded(run_dir)
    told.roots = {
        str(span.attributes[a.REQUEST_ID.key]): span
        for trace in read_source(run_dir).traces
        for span in trace.spans
        if is_root(span)
    }
    yield told


def begin_with_the_gateway(server: OwnServer, told: Story) -> None:
    server.start("gateway-0")
    server.wait_until(lambda: server.status("/ready") != 0, "the gateway")
    told.before = server.status("/ready"), server.status("/health")
    names = [f"burst-{i}" for i in range(BURST)]
    sent = threading.Thread(target=lambda: told.burst.extend(at_once(server, names, 4)[0]))
    sent.start()
    queued = f"pd_gateway_queue_depth {BURST - PLACES}.0"
    server.wait_until(lambda: server.metric(queued), "the burst to wait")
    server.start(*server.workers)
    sent.join()
    server.wait_ready()


def many_small_ones(server: OwnServer, told: Story) -> None:
    """First one after the other, which shows what is usual, then all at once."""
    for number in range(8):
        ask(
            server,
            Ask(prompt=prompt_of(number), max_tokens=SMALL_TOKENS, request_id=f"usual-{number}"),
        )
    sockets = server.sockets("gateway-0")
    names = [f"small-{i}" for i in range(SMALL)]
    _, seconds = at_once(server, names, SMALL_TOKENS)
    told.small_s = dict(zip(names, seconds, strict=True))
    server.wait_until(lambda: server.sockets("gateway-0") <= sockets, "connections to close")
    told.sockets = sockets, server.sockets("gateway-0")


def at_once(
    server: OwnServer, names: list[str], max_tokens: int
) -> tuple[list[httpx.Response], list[float]]:
    """Responses of as many requests as there are ids, sent at once, and what each took."""

    async def one(client: httpx.AsyncClient, number: int) -> tuple[httpx.Response, float]:
        body = {"model": "fake", "prompt": prompt_of(number), "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "temperature": 0}
        headers = {"X-Request-Id": names[number]}
        began_s = time.monotonic()
        response = await client.post("/v1/completions", json=body, headers=headers)
        return response, time.monotonic() - began_s

    async def every() -> list[tuple[httpx.Response, float]]:
        limits = httpx.Limits(max_connections=len(names))
        async with httpx.AsyncClient(
            base_url=server.url, timeout=120.0, trust_env=False, limits=limits
        ) as client:
            return await asyncio.gather(*[one(client, number) for number in range(len(names))])

    answers = asyncio.run(every())
    return [response for response, _ in answers], [seconds for _, seconds in answers]


def kill_before_the_first_byte(server: OwnServer, victim: str) -> list[Answer]:
    """Four requests, of which round robin gives two to the victim, which cannot have begun them."""
    served = (
        'pd_requests_total{gen_ai_operation_name="text_completion",gen_ai_request_model="fake",'
        'outcome="completed",'
    )
    before = sum(server.values(served))
    server.signal(victim, signal.SIGSTOP)
    asks = [
        Ask(prompt=prompt_of(i), max_tokens=12, stream=i % 2 == 0, request_id=f"{victim}-{i}")
        for i in range(4)
    ]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, server, asks, at_once=4)
        # More, if all that took so long that the victim has been taken for dead.
        server.wait_until(lambda: sum(server.values(served)) >= before + 2, "the other two")
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
        'pd_requests_total{gen_ai_operation_name="text_completion",gen_ai_request_model="fake",'
        'outcome="failed",reason="worker_lost"} 1.0'
    )


def start_slowly(server: OwnServer, instance: str, told: Story) -> None:
    """A worker dies, and the one after it is not loaded before requests were served by others."""

    def state() -> str:
        return next(p["state"] for p in server.health()["processes"] if p["instance"] == instance)

    gate = server.run_dir / "gate"
    server.kill(instance)
    server.start(instance, gate=gate)
    server.wait_until(lambda: state() == "loading", f"{instance} to be on its way")
    asks = [Ask(prompt=prompt_of(i), request_id=f"meanwhile-{i}") for i in range(4)]
    told.meanwhile = ask_all(server, asks)
    told.ready_while_loading = server.status("/ready")
    told.loading = [p for p in server.health()["processes"] if p["state"] != "ready"]
    gate.touch()
    server.wait_ready()
    asks = [Ask(prompt=prompt_of(i), request_id=f"loaded-{i}") for i in range(4)]
    told.loaded = ask_all(server, asks)


@pytest.mark.case("FAIL-10")
def test_requests_that_come_before_the_workers_are_all_served(story: Story) -> None:
    assert story.before == (503, 503)
    assert [response.status_code for response in story.burst] == [200] * BURST
    texts = [response.json()["choices"][0]["text"] for response in story.burst]
    assert texts == [text_of(i, 4) for i in range(BURST)]
    waited = [story.timelines[f"burst-{i}"] for i in range(BURST)]
    assert {timeline.outcome for timeline in waited} == {Outcome.COMPLETED}
    assert {timeline.attempts for timeline in waited} == {1}
    for timeline in waited:  # they waited where they were, and for nothing else
        longest = max(timeline.parts, key=lambda part: part.ns)
        assert longest.name in {"gateway.queue", "gateway.route"}, timeline.request_id


@pytest.mark.case("SCH-04")
def test_many_small_requests_show_what_the_gateway_took(story: Story) -> None:
    small = {name: story.timelines[name] for name in story.small_s}
    for name, timeline in small.items():
        assert timeline.outcome is Outcome.COMPLETED
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns, name
        # The answer is written in the last stage; its end is marked when the client may have it.
        (finish,) = timeline.visits_of("gateway.finish")
        assert finish.begin_ns / 1e9 <= story.small_s[name], name
        for stage in ("gateway.ingest", "gateway.queue", "gateway.route", "gateway.dispatch"):
            assert timeline.visits_of(stage), name
    # Four places for 64 requests: the gateway's queue is where the last of them spent most.
    slowest = max(small.values(), key=lambda timeline: timeline.total_ns)
    usual = [t for name, t in story.timelines.items() if name.startswith("usual-")]
    verdict = judge_all([*usual, slowest])[-1]
    assert (verdict.stalled, verdict.stage) == (True, "gateway.queue")
    before, after = story.sockets
    assert after <= before  # one connection to each worker, not one for each request


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
    assert story.roots[f"stream-{1 - number}"].status is StatusCode.ERROR
    assert story.timelines[f"stream-{number}"].outcome is Outcome.COMPLETED


def test_worker_that_comes_back_and_fits_nobody_is_named_and_passed(story: Story) -> None:
    reason = "KV layout: page_size 16 against 32"
    assert story.misfit["refused_pairs"] == [
        {"prefill": prefill, "decode": "decode-1", "reason": reason}
        for prefill in ("prefill-0", "prefill-1")
    ]
    states = {p["instance"]: p["state"] for p in story.misfit["processes"]}
    assert states.pop("decode-1") == "incompatible"
    assert set(states.values()) == {"ready"}
    assert [answer.status for answer in story.beside] == [200] * 4


def test_worker_that_loads_slowly_gets_no_work_before_it_is_ready(story: Story) -> None:
    found = [(p["instance"], p["state"], p["reason"]) for p in story.loading]
    assert found == [("decode-1", "loading", "has not loaded its model")]
    assert story.ready_while_loading == 200, "the others serve"
    for answers, name, workers in (
        (story.meanwhile, "meanwhile", {"decode-0"}),
        (story.loaded, "loaded", {"decode-0", "decode-1"}),
    ):
        assert [answer.status for answer in answers] == [200] * 4
        assert [answer.text for answer in answers] == [text_of(i, 8) for i in range(4)]
        timelines = [story.timelines[f"{name}-{i}"] for i in range(4)]
        assert {timeline.attempts for timeline in timelines} == {1}
        assert {timeline.decode_worker for timeline in timelines} == workers


def test_gateway_that_takes_over_learns_of_the_workers_and_serves(story: Story) -> None:
    assert [answer.status for answer in story.after] == [200, 200]


def test_every_request_is_recorded_whole_and_every_instant_explained(story: Story) -> None:
    assert len(story.timelines) >= 4 + 4 + 2 + 2
    for name, timeline in story.timelines.items():
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns, name
        assert timeline.unexplained_ns <= 0.01 * timeline.total_ns, name
        assert timeline.violations == (), name
