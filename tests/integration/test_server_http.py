"""The public endpoint of a whole server: answers, streams, ids, refusals, health."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdtrace import semconv as a
from pdtrace.analysis.timeline import build_timelines
from pdtrace.spans import Trace
from pdtrace.stages import Gauge, Outcome
from server.engine.fake import expected_tokens
from tests.support.aftermath import gauges_of
from tests.support.completions import Ask, ask, ask_all
from tests.support.recorded import spans_of
from tests.support.server import RunningServer

pytestmark = pytest.mark.server

BUDGET = 256
"""Prompt tokens of a step, as the server has it unless told otherwise."""


def fake_text(prompt: list[int], count: int) -> str:
    return "".join(map(chr, expected_tokens(prompt, count)))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [32 + (salt * 31 + i * 7) % 95 for i in range(length)]


@pytest.mark.case("XFER-02")
def test_output_is_what_intact_kv_pages_give(fake_pd_server: RunningServer) -> None:
    # Lengths around page (16) and budget (256) edges, so that copies have odd ends.
    prompts = [prompt_of(n, n) for n in (1, 15, 16, 17, 255, 256, 257, 600)]
    answers = ask_all(fake_pd_server, [Ask(prompt=p, max_tokens=20) for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.text == fake_text(prompt, 20), f"prompt of {len(prompt)}"
        assert answer.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage["prompt_tokens"] == len(prompt)
        assert answer.usage["completion_tokens"] == 20


def test_shared_prefix_is_reused_and_changes_nothing(fake_pd_server: RunningServer) -> None:
    shared = prompt_of(320, 99)
    prompts = [[*shared, *prompt_of(5, salt)] for salt in range(4)]
    first = ask(fake_pd_server, Ask(prompt=prompts[0], max_tokens=6))
    rest = ask_all(fake_pd_server, [Ask(prompt=p, max_tokens=6) for p in prompts[1:]])
    assert first.text == fake_text(prompts[0], 6)
    for prompt, answer in zip(prompts[1:], rest, strict=True):
        assert answer.text == fake_text(prompt, 6)
        assert answer.usage is not None
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= 256


def test_stream_gives_the_same_text_in_pieces_and_the_usage(fake_pd_server: RunningServer) -> None:
    # Some tokens come behind a pause: they share no event with those before it.
    request = Ask(prompt=prompt_of(40, 3), max_tokens=12, stream=True, faults={"decode.gap": 500})
    answer = ask(fake_pd_server, request)
    assert answer.text == fake_text(prompt_of(40, 3), 12)
    assert len(answer.pieces) > 1
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 12


def test_caller_gets_its_request_id_and_a_trace_id_back(fake_pd_server: RunningServer) -> None:
    answer = ask(fake_pd_server, Ask(request_id="ticket-4711"))
    assert answer.headers["x-request-id"] == "ticket-4711"
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", answer.headers["traceparent"])


def test_models_lists_the_served_model(fake_pd_server: RunningServer) -> None:
    with fake_pd_server.client() as client:
        models = client.get("/v1/models").json()
    assert [entry["id"] for entry in models["data"]] == [fake_pd_server.model]


BAD_BODIES: list[tuple[str, bytes | dict[str, Any]]] = [
    ("not json", b"{"),
    ("binary", bytes(range(256))),
    ("not an object", b"[1, 2]"),
    ("no prompt", {"model": "MODEL"}),
    ("empty prompt", {"model": "MODEL", "prompt": ""}),
    ("empty ids", {"model": "MODEL", "prompt": []}),
    ("unknown model", {"model": "gpt-17", "prompt": "hi"}),
    ("prompt too long", {"model": "MODEL", "prompt": [65] * 9000}),
    ("token out of range", {"model": "MODEL", "prompt": [10**9]}),
    ("n=0", {"model": "MODEL", "prompt": "hi", "n": 0}),
    ("negative temperature", {"model": "MODEL", "prompt": "hi", "temperature": -1}),
    ("max_tokens=0", {"model": "MODEL", "prompt": "hi", "max_tokens": 0}),
    ("wrong type", {"model": "MODEL", "prompt": "hi", "max_tokens": "many"}),
    ("huge", b'{"model": "MODEL", "prompt": "' + b"x" * 10_000_000 + b'"}'),
]


@pytest.mark.parametrize(("name", "body"), BAD_BODIES, ids=[name for name, _ in BAD_BODIES])
def test_bad_input_gets_a_4xx_in_openais_shape(
    fake_pd_server: RunningServer, name: str, body: bytes | dict[str, Any]
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    content = content.replace(b"MODEL", fake_pd_server.model.encode())
    with fake_pd_server.client() as client:
        response = client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
    assert 400 <= response.status_code < 500, name
    error = response.json()["error"]
    assert error["message"]
    assert {"message", "type", "param", "code"} <= set(error)


@pytest.mark.case("API-02")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", [{"n": 0}, {"temperature": -1}, {"max_tokens": 0}], ids=str)
def test_bad_stream_is_refused_before_it_begins_and_the_response_ends(
    fake_pd_server: RunningServer, path: str, field: dict[str, Any]
) -> None:
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    name = f"bad {path} {field}"
    with fake_pd_server.client(timeout_s=30) as client:
        response = client.post(
            path,
            json={"model": fake_pd_server.model, "stream": True, **prompt, **field},
            headers={"X-Request-Id": name},
        )
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == next(iter(field))
    check_rejected(fake_pd_server, name, "invalid_request")


def check_rejected(server: RunningServer, request_id: str, reason: str) -> None:
    """Its trace is a root that says why, and nothing of workers: none had heard of it."""
    root, *others = spans_of(server, request_id)
    assert root.attributes[a.OUTCOME.key] == Outcome.REJECTED
    assert root.attributes[a.OUTCOME_REASON.key] == reason
    assert root.attributes["http.response.status_code"] == 400
    assert {span.name for span in others} <= {"gateway.ingest"}


@pytest.mark.case("API-04")
def test_stream_is_whole_events_however_it_is_cut(fake_pd_server: RunningServer) -> None:
    """Nothing but `data:` lines with JSON, and the end; read byte by byte as from tiny segments."""
    body = {
        "model": fake_pd_server.model,
        "prompt": prompt_of(40, 4),
        "max_tokens": 9,
        "temperature": 0,
    }
    with (
        fake_pd_server.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        data = b"".join(response.iter_bytes(chunk_size=1))
    assert b"\r" not in data
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
    pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(p["choices"][0]["text"] for p in pieces) == fake_text(prompt_of(40, 4), 9)
    root, *_ = spans_of(fake_pd_server, response.headers["x-request-id"])
    assert root.attributes[a.OUTCOME.key] == Outcome.COMPLETED


@pytest.mark.case("API-08")
def test_prompt_beyond_the_context_is_named_as_such_and_an_exact_fit_is_defined(
    fake_pd_server: RunningServer,
) -> None:
    with fake_pd_server.client() as client:
        context = client.get("/v1/models").json()["data"][0]["context_length"]
        refused = {
            name: client.post(
                "/v1/completions",
                json={"model": fake_pd_server.model, "prompt": [65] * length},
                headers={"X-Request-Id": name},
            )
            for name, length in (("beyond", context + 1), ("no-room-for-output", context))
        }
    for name, response in refused.items():
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "-" not in response.json()["error"]["message"]
        check_rejected(fake_pd_server, name, "context_length_exceeded")
    prompt = [65] * (context - 1)
    fits = ask(fake_pd_server, Ask(prompt=prompt, max_tokens=1, request_id="just-fits"))
    assert (fits.status, fits.finish_reason, fits.text) == (200, "length", fake_text(prompt, 1))
    root, *others = spans_of(fake_pd_server, "just-fits")
    assert root.attributes[a.OUTCOME.key] == Outcome.COMPLETED
    assert "prefill.compute" in {span.name for span in others}


@pytest.mark.case("API-13")
@pytest.mark.parametrize("stream", [True, False])
def test_one_token_is_an_answer(fake_pd_server: RunningServer, stream: bool) -> None:
    name, steps = f"one-token-{stream}", decode_steps(fake_pd_server)
    answer = ask(
        fake_pd_server,
        Ask(prompt=prompt_of(30, 6), max_tokens=1, stream=stream, request_id=name),
    )
    assert answer.text == fake_text(prompt_of(30, 6), 1)
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 1
    spans = spans_of(fake_pd_server, name)
    assert decode_steps(fake_pd_server) == steps, "the boundary token was prefill's"
    (timeline,) = build_timelines([Trace(trace_id=spans[0].trace_id, spans=spans)])
    assert (timeline.outcome, timeline.violations) == (Outcome.COMPLETED, ())
    assert timeline.unexplained_ns == 0


def decode_steps(server: RunningServer) -> int:
    """Forward passes of decode so far."""
    return gauges_of(server)["decode-0"][Gauge.STEPS]


@pytest.mark.case("API-14")
@pytest.mark.parametrize("length", [BUDGET - 1, BUDGET, BUDGET + 1, 10 * BUDGET])
def test_prompt_about_the_budget_of_a_step_is_served_in_chunks(
    fake_pd_server: RunningServer, length: int
) -> None:
    name, pids = f"budget-{length}", fake_pd_server.pids
    prompt = prompt_of(length, salt=length)  # of which nothing is cached
    answer = ask(fake_pd_server, Ask(prompt=prompt, max_tokens=3, request_id=name))
    assert answer.text == fake_text(prompt, 3)
    assert fake_pd_server.pids == pids
    spans = spans_of(fake_pd_server, name)
    assert spans[0].attributes[a.OUTCOME.key] == Outcome.COMPLETED
    chunks = [span for span in spans if span.name == "prefill.chunk"]
    assert len(chunks) == -(-length // BUDGET)


def test_server_is_healthy_after_bad_input(fake_pd_server: RunningServer) -> None:
    with fake_pd_server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
    assert ask(fake_pd_server, Ask()).status == 200


def test_unknown_fault_is_refused(fake_pd_server: RunningServer) -> None:
    answer = ask(fake_pd_server, Ask(faults={"decode.lunch": 10}))
    assert answer.status == 400


def test_client_that_leaves_frees_what_its_request_held(fake_pd_server: RunningServer) -> None:
    body = {
        "model": fake_pd_server.model,
        "prompt": prompt_of(100, 5),
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with fake_pd_server.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        # The whole pool is free again: a request that needs most of it is served.
        assert ask(fake_pd_server, Ask(prompt=prompt_of(7600, 8), max_tokens=4)).status == 200


def test_metrics_are_valid_exposition(fake_pd_server: RunningServer) -> None:
    with fake_pd_server.client() as client:
        response = client.get("/metrics")
    assert response.status_code == 200
    assert "# TYPE" in response.text


def test_openai_client_reads_a_chat_stream(fake_pd_server: RunningServer) -> None:
    from openai import OpenAI

    url = f"{fake_pd_server.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=fake_pd_server.model,
            messages=[{"role": "user", "content": "héllo 🌍"}],
            max_tokens=6,
            stream=True,
        )
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text
