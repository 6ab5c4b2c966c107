"""The gateway over real HTTP and real sockets, with scripted workers (`gateway_doubles`)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, Outcome, Role, WaitReason
from server.config import Deadlines
from server.wire.messages import ColocatedRequest, DecodeRequest, PrefillRequest
from tests.support.gateway_doubles import (
    GatewayUnderTest,
    LegDouble,
    Script,
    endless,
    events_of,
    gateway_under_test,
    silent,
    speak,
    text_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SHORT = Deadlines(drain_s=1.0, gateway_queue_s=0.3, request_s=0.6)
MULTI_BYTE = "naïve 日本語 👩‍👩‍👧 e\u0301 🌍"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- answers ------------------------------------------------------------------------------------


async def test_whole_completion_has_text_reason_and_usage(tmp_path: Path) -> None:
    script = speak("Hello!", finish="length", cached=16)
    async with gateway_under_test(tmp_path, decode_script=script) as g:
        response = await g.complete(prompt="0123456789abcdef-tail", max_tokens=6)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"text": "Hello!", "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 6,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_chat_stream_names_the_role_then_text_then_reason_then_usage(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("Hi", gap_s=0.02)) as g:
        response = await g.chat(stream=True, stream_options={"include_usage": True})
    events = events_of(response.text)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "Hi"
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_stream_without_usage_option_has_no_usage_field(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        events = events_of((await g.complete(stream=True)).text)
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("stream", [True, False])
async def test_multi_byte_characters_stay_whole_across_tokens(tmp_path: Path, stream: bool) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak(MULTI_BYTE, gap_s=0.001)) as g:
        response = await g.complete(stream=stream)
    text = text_of(events_of(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == MULTI_BYTE


@pytest.mark.parametrize("stream", [True, False])
async def test_character_cut_off_at_the_end_becomes_one_replacement(
    tmp_path: Path, stream: bool
) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=speak("ok 🌍".encode()[:-1], finish="length")
    ) as g:
        response = await g.complete(stream=stream)
    text = text_of(events_of(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == "ok \ufffd"


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string_across_tokens_ends_the_text_and_stops_the_worker(
    tmp_path: Path, stream: bool
) -> None:
    async def overlooks_stop(leg: LegDouble) -> None:
        for byte in b"one ENDtwo":
            leg.say(bytes([byte]))
            await asyncio.sleep(0.002)
        await asyncio.sleep(30)

    async with gateway_under_test(tmp_path, decode_script=overlooks_stop) as g:
        response = await g.complete(stream=stream, stop=["END", "nothing"])
        await g.decode.until(lambda worker: bool(worker.cancels))
        assert g.decode.cancels[0].outcome == Outcome.COMPLETED
    if stream:
        events = events_of(response.text)
        assert text_of(events) == "one "
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        body = response.json()
        assert body["choices"][0]["text"] == "one "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 7


async def test_empty_output_is_a_valid_stream_without_a_first_token(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("")) as g:
        events = events_of((await g.chat(stream=True)).text)
        assert Mark.FIRST_TOKEN_SENT.name not in g.mark_names()
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, "stop"]


async def test_repeated_and_reordered_tokens_are_put_right(tmp_path: Path) -> None:
    async def jumbled(leg: LegDouble) -> None:
        leg.say(b"cd", index=2)
        leg.say(b"ab", index=0)
        leg.say(b"ab", index=0)
        leg.say(b"bcde", index=1)
        leg.say(b"f", index=5, finish="stop")
        leg.say(b"f", index=5, finish="stop")
        leg.close()

    async with gateway_under_test(tmp_path, decode_script=jumbled) as g:
        body = (await g.complete()).json()
    assert body["choices"][0]["text"] == "abcdef"
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("delay_s", [0.0, 0.1], ids=["in turn", "overtaken"])
async def test_prefill_forwards_the_first_token_in_early_mode(
    tmp_path: Path, delay_s: float
) -> None:
    async def forward(leg: LegDouble) -> None:
        await asyncio.sleep(delay_s)
        leg.say(b"A")
        leg.close()

    async def rest(leg: LegDouble) -> None:
        assert isinstance(leg.request, DecodeRequest)
        assert leg.request.early
        leg.say(b"BC", index=1, finish="length")
        leg.close()

    async with gateway_under_test(
        tmp_path, prefill_script=forward, decode_script=rest, first_token="prefill"
    ) as g:
        response = await g.complete()
        (tokenized,) = g.marks(Mark.TOKENIZED)
    assert response.json()["choices"][0]["text"] == "ABC"
    assert tokenized[-1] == "pd_early"


async def test_colocated_worker_gets_one_message(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, mode="colocated") as g:
        response = await g.complete(max_tokens=5, seed=3)
        (request,) = g.workers["worker-0"].requests
        (routed,) = g.marks(Mark.ROUTED)
    assert response.json()["choices"][0]["text"] == "Hello!"
    assert isinstance(request, ColocatedRequest)
    assert request.prompt_ids == tuple(b"hi")
    assert routed[:2] == ("worker-0", "worker-0")


async def test_both_legs_get_the_same_request(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        await g.complete(
            prompt=[104, 105], max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop="#"
        )
        (decode,), (prefill,) = g.decode.requests, g.prefill.requests
    assert isinstance(decode, DecodeRequest)
    assert isinstance(prefill, PrefillRequest)
    assert decode.context == prefill.context
    assert decode.sampling == prefill.sampling
    assert decode.prompt_digest == prefill.prompt_digest
    assert (decode.prompt_len, prefill.prompt_ids) == (2, (104, 105))
    assert (decode.max_tokens, decode.stop, decode.sampling.seed) == (5, ("#",), 11)
    assert decode.prefill == g.prefill.peer
    assert prefill.decode == g.decode.peer


async def test_without_max_tokens_the_output_may_fill_the_context(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        await g.complete(prompt=[65] * 8000)
        assert g.decode.requests[0].max_tokens == 192
        assert (await g.complete(prompt=[65] * 8191, max_tokens=1)).status_code == 200
        full = await g.complete(prompt=[65] * 8192)
        over = await g.complete(prompt=[65] * 8000, max_tokens=193)
        assert len(g.decode.requests) == 2
    for refused in (full, over):
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_prompt_that_no_pool_holds_is_refused(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        for worker in g.workers.values():
            worker.load = type(worker.load)(pages_total=4, pages_free=4)
            worker.beat()
        await asyncio.sleep(0.1)
        refused = await g.complete(prompt=[65] * 64)
        assert (await g.complete(prompt=[65] * 60, max_tokens=4)).status_code == 200
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_openai_client_reads_both_forms(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        client = AsyncOpenAI(base_url=f"{g.url}/v1", api_key="none", max_retries=0)
        async with client:
            whole = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}]
            )
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = await client.completions.create(model="fake", prompt="hi")
            models = await client.models.list()
            assert (await client.models.retrieve("fake")).id == "fake"
    assert whole.choices[0].message.content == text.choices[0].text == "Hello!"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert [model.id for model in models.data] == ["fake"]


# -- refusals -----------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[str, dict[str, Any] | bytes, dict[str, str], int, str]] = [
    ("not json", b"{", {}, 400, "invalid_request"),
    ("empty", b"", {}, 400, "invalid_request"),
    ("binary", bytes(range(256)), {}, 400, "invalid_request"),
    ("deep", b"[" * 200_000, {}, 400, "invalid_request"),
    ("unknown model", {"model": "gpt"}, {}, 404, "model_not_found"),
    ("n=0", {"n": 0, "stream": True}, {}, 400, "invalid_request"),
    ("n=2", {"n": 2}, {}, 400, "unsupported_parameter"),
    ("hot", {"temperature": -1, "stream": True}, {}, 400, "invalid_request"),
    ("no tokens", {"max_tokens": 0, "stream": True}, {}, 400, "invalid_request"),
    ("logprobs", {"logprobs": 1}, {}, 400, "unsupported_parameter"),
    ("token id", {"prompt": [260]}, {}, 400, "invalid_request"),
    ("form", b"a=b", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    ("gzip", b"\x1f\x8b", {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
    ("faults", {}, {"x-pd-faults": "transfer=5"}, 400, "faults_not_allowed"),
]


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [case[1:] for case in BAD_REQUESTS],
    ids=[case[0] for case in BAD_REQUESTS],
)
async def test_refusal_is_openai_shaped_and_a_trace_of_its_own(
    tmp_path: Path,
    content: dict[str, Any] | bytes,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    if isinstance(content, dict):
        content = json.dumps({"model": "fake", "prompt": "hi", **content}).encode()
    async with gateway_under_test(tmp_path) as g:
        response = await g.client.post(
            "/v1/completions",
            content=content,
            headers={"content-type": "application/json", **headers},
        )
        names, (completed,) = g.mark_names(), g.marks(Mark.COMPLETED)
        again = await g.complete()
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert {"message", "type", "param", "code"} == set(error)
    assert names == ["RECEIVED", "COMPLETED"]
    assert completed[:4] == (Outcome.REJECTED, code, "client", status)
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-trace-id"])
    assert again.status_code == 200


async def test_large_body_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, max_body_bytes=100_000) as g:
        declared = await g.client.post("/v1/completions", content=b"x" * 10_000_000)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b"x" * 10_000

        undeclared = await g.client.post("/v1/completions", content=chunks())
        assert (await g.complete()).status_code == 200
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
    ],
)
async def test_wrong_path_or_method_is_openai_shaped(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with gateway_under_test(tmp_path) as g:
        response = await g.client.request(method, path, headers={"x-request-id": "me"})
        assert g.mark_names() == []
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"] == "me"


async def test_bytes_that_are_no_http_get_a_json_400(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        reader, writer = await asyncio.open_connection(*g.address)
        writer.write(b"\x00\x01nonsense\r\n\r\n")
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_api_key_guards_the_api_and_not_the_probes(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, api_key="s3cret") as g:
        missing = await g.complete()
        wrong = await g.complete(headers={"authorization": "Bearer s3cret2"})
        right = await g.complete(headers={"authorization": "Bearer s3cret"})
        models = await g.client.get("/v1/models")
        metrics = await g.client.get("/metrics")
    assert [r.status_code for r in (missing, wrong, right)] == [401, 401, 200]
    assert missing.json()["error"]["code"] == "invalid_api_key"
    assert models.status_code == 401
    assert metrics.status_code == 200


# -- identity -----------------------------------------------------------------------------------


async def test_callers_id_is_in_every_message_mark_and_header(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        response = await g.complete(headers={"X-Request-Id": "abc 123"})
        contexts = [leg.context for w in (g.prefill, g.decode) for leg in w.requests]
    assert response.headers["x-request-id"] == "abc 123"
    assert "x-request-id-replaced" not in response.headers
    assert {context.request_id for context in contexts} == {"abc 123"}
    assert {context.trace_id for context in contexts} == {response.headers["x-trace-id"]}


@pytest.mark.parametrize("bad", ["", "x" * 129, "a\tb", "héllo"])
async def test_unusable_id_is_replaced_and_the_response_says_so(tmp_path: Path, bad: str) -> None:
    async with gateway_under_test(tmp_path) as g:
        response = await g.client.get("/v1/models", headers={b"X-Request-Id": bad.encode()})
    assert re.fullmatch(r"req-[0-9a-f]{24}", response.headers["x-request-id"])
    assert response.headers["x-request-id-replaced"] == "true"


async def test_two_requests_with_one_id_are_served_side_by_side(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("Hello!", gap_s=0.01)) as g:
        answers = await asyncio.gather(*[g.complete(headers={"X-Request-Id": "a"}) for _ in "12"])
        handoffs = {leg.context.handoff_id for leg in g.decode.requests}
    assert [a.json()["choices"][0]["text"] for a in answers] == ["Hello!"] * 2
    assert len(handoffs) == 2


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("name", "value", "continued", "flags"),
    [
        ("traceparent", f"00-{TRACE}-{SPAN}-01", True, "01"),
        ("TRACEPARENT", f"00-{TRACE}-{SPAN}-01", True, "01"),
        ("traceparent", f"00-{TRACE}-{SPAN}-00", True, "00"),
        ("traceparent", f"00-{'0' * 32}-{SPAN}-01", False, "01"),
        ("traceparent", f"00-{TRACE}-{'0' * 16}-01", False, "01"),
        ("traceparent", f"00-{TRACE[1:]}-{SPAN}-01", False, "01"),
        ("traceparent", "00_zz", False, "01"),
        ("tracestate", "a=b", False, "01"),
    ],
)
async def test_callers_trace_is_continued_or_a_new_one_begun(
    tmp_path: Path, name: str, value: str, continued: bool, flags: str
) -> None:
    async with gateway_under_test(tmp_path) as g:
        response = await g.complete(headers={name: value})
        context = g.decode.requests[0].context
    version, trace_id, span_id, sent_flags = response.headers["traceparent"].split("-")
    assert (version, sent_flags) == ("00", flags)
    assert (trace_id == TRACE) is continued
    assert span_id == context.root_span_id != SPAN
    assert context.client_parent_span_id == (SPAN if continued else None)
    assert context.sampled is (flags == "01")
    assert response.headers["x-trace-id"] == trace_id == context.trace_id


# -- marks --------------------------------------------------------------------------------------


async def test_completed_request_has_all_marks_in_order(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        await g.complete(stream=True, max_tokens=9)
        names = g.mark_names()
        (tokenized,), (completed,) = g.marks(Mark.TOKENIZED), g.marks(Mark.COMPLETED)
        (routed,), (received,) = g.marks(Mark.ROUTED), g.marks(Mark.RECEIVED)
    assert names == [
        "RECEIVED",
        "TOKENIZED",
        "ADMITTED",
        "ROUTED",
        "DISPATCHED",
        "FIRST_TOKEN_SENT",
        "COMPLETED",
    ]
    assert received == ("POST", "/v1/completions", "text_completion")
    assert tokenized == ("fake", 2, 9, True, "pd")
    assert routed[:4] == ("prefill-0", "decode-0", "least_loaded", 1)
    assert completed == ("completed", None, None, 200, 6, "stop", 0)


async def test_request_begins_at_its_first_byte_and_ends_at_its_last(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("abc", gap_s=0.1)) as g:
        host, port = g.address
        reader, writer = await asyncio.open_connection(host, port)
        body = b'{"model": "fake", "prompt": "hi", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        await asyncio.sleep(0.2)  # a client that is slow with its headers
        head = f"host: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.read()
        writer.close()
        await g.idle()
        times = dict(_mark_times(g))
    ingest_s = (times["TOKENIZED"] - times["RECEIVED"]) / 1e9
    stream_s = (times["COMPLETED"] - times["FIRST_TOKEN_SENT"]) / 1e9
    assert 0.19 < ingest_s < 2
    assert stream_s > 0.19


def _mark_times(g: GatewayUnderTest) -> list[tuple[str, int]]:
    return [(r.mark.name, r.t_ns) for r in g.records() if isinstance(r, MarkRecord)]


@pytest.mark.parametrize(
    ("stage", "begin", "end"),
    [
        ("gateway.ingest", "RECEIVED", "TOKENIZED"),
        ("gateway.queue", "TOKENIZED", "ADMITTED"),
        ("gateway.route", "ADMITTED", "ROUTED"),
        ("gateway.dispatch", "ROUTED", "DISPATCHED"),
        ("hop.token", "DISPATCHED", "FIRST_TOKEN_SENT"),
        ("gateway.finish", "FIRST_TOKEN_SENT", "COMPLETED"),
    ],
)
async def test_fault_delays_its_own_stage_and_says_it_was_injected(
    tmp_path: Path, stage: str, begin: str, end: str
) -> None:
    async with gateway_under_test(tmp_path, allow_faults=True) as g:
        response = await g.complete(headers={"X-PD-Faults": f"{stage}=150"}, stream=True)
        times = dict(_mark_times(g))
        waits = g.marks(Mark.WAITING)
    assert response.status_code == 200
    spent = {
        (a, b): (times[b] - times[a]) / 1e9
        for a, b in [
            ("RECEIVED", "TOKENIZED"),
            ("TOKENIZED", "ADMITTED"),
            ("ADMITTED", "ROUTED"),
            ("ROUTED", "DISPATCHED"),
            ("DISPATCHED", "FIRST_TOKEN_SENT"),
            ("FIRST_TOKEN_SENT", "COMPLETED"),
        ]
    }
    assert spent[begin, end] >= 0.149
    assert max(spent, key=lambda pair: spent[pair]) == (begin, end)
    assert [wait[:2] for wait in waits] == [(stage, WaitReason.INJECTED)]


async def test_other_faults_travel_to_both_legs(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, allow_faults=True) as g:
        await g.complete(headers={"X-PD-Faults": "transfer=7, decode.queue=9"})
        unknown = await g.complete(headers={"X-PD-Faults": "lunch=7"})
        (decode,), (prefill,) = g.decode.requests, g.prefill.requests
    assert decode.faults == prefill.faults == {"transfer": 7, "decode.queue": 9}
    assert unknown.json()["error"]["code"] == "invalid_faults"


# -- failures -----------------------------------------------------------------------------------


def fails(outcome: Outcome, reason: str, *, after: bytes = b"") -> Script:
    async def script(leg: LegDouble) -> None:
        if after:
            leg.say(after)
        leg.close(outcome, reason=reason, message=f"{leg.worker.instance}: it broke")

    return script


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("outcome", "reason", "status"),
    [
        (Outcome.FAILED, "handshake_mismatch", 502),
        (Outcome.FAILED, "transfer_failed", 502),
        (Outcome.TIMED_OUT, "deadline_exceeded", 504),
        (Outcome.REJECTED, "shutting_down", 503),
        (Outcome.FAILED, "engine_error", 502),
    ],
)
async def test_leg_that_fails_before_the_first_byte_is_an_http_error(
    tmp_path: Path, outcome: Outcome, reason: str, status: int, stream: bool
) -> None:
    async with gateway_under_test(
        tmp_path, prefill_script=fails(outcome, reason), decode_script=silent
    ) as g:
        response = await g.complete(stream=stream)
        await g.decode.until(lambda worker: bool(worker.cancels))
        (completed,) = g.marks(Mark.COMPLETED)
        (cancel,) = g.decode.cancels
    assert response.status_code == status
    assert response.json()["error"]["code"] == reason
    assert completed[:4] == (outcome, reason, "prefill-0", status)
    assert (cancel.outcome, cancel.reason, cancel.by) == (outcome, reason, "prefill-0")


async def test_leg_that_fails_after_the_first_byte_is_an_event_then_done(tmp_path: Path) -> None:
    script = fails(Outcome.FAILED, "engine_error", after=b"abc")
    async with gateway_under_test(tmp_path, decode_script=script) as g:
        response = await g.complete(stream=True)
        (completed,) = g.marks(Mark.COMPLETED)
    events = events_of(response.text)
    assert response.status_code == 200
    assert text_of(events[:-2]) == "abc"
    assert events[-2]["error"]["code"] == "engine_error"
    assert events[-2]["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"
    assert completed[:5] == (Outcome.FAILED, "engine_error", "decode-0", 200, 3)


async def test_decode_that_completes_without_a_last_token_is_a_failure(tmp_path: Path) -> None:
    async def forgetful(leg: LegDouble) -> None:
        leg.say(b"ab")
        leg.close()

    async with gateway_under_test(tmp_path, decode_script=forgetful) as g:
        response = await g.complete()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "stream_incomplete"


@pytest.mark.parametrize("how", ["silence", "restart"])
async def test_dead_worker_fails_its_requests_and_no_others(tmp_path: Path, how: str) -> None:
    async with gateway_under_test(
        tmp_path,
        decode=2,
        decode_script=endless(gap_s=0.02),
        dead_after_s=0.4,
        policy="round_robin",
    ) as g:
        tasks = [asyncio.create_task(g.complete(stream=True)) for _ in range(2)]
        for name in ("decode-0", "decode-1"):
            await g.workers[name].until(lambda worker: bool(worker.requests))
        dead = g.decode
        dead.answers_cancel = False
        if how == "silence":
            dead.beats = False
        else:
            dead.restart()
        victim = g.decode.requests[0].context.handoff_id
        done, running = await asyncio.wait(tasks, return_when="FIRST_COMPLETED", timeout=10)
        (failed,), (healthy,) = done, running
        events = events_of(failed.result().text)
        assert events[-2]["error"]["code"] == "worker_lost"
        assert events[-1] == "[DONE]"
        assert [c.handoff_id for c in g.prefill.cancels] in ([], [victim])
        healthy.cancel()


async def test_request_deadline_cancels_the_legs_and_answers_504(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=silent, deadlines=SHORT) as g:
        response = await g.complete()
        await g.decode.until(lambda worker: bool(worker.cancels))
        (completed,), (aborted,) = g.marks(Mark.COMPLETED), g.marks(Mark.ABORTED)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert completed[:3] == (Outcome.TIMED_OUT, "deadline_exceeded", "gateway")
    assert aborted == (Outcome.TIMED_OUT, "deadline_exceeded", "gateway")


async def test_place_of_a_leg_that_never_closes_comes_back_after_the_drain(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=silent, deadlines=SHORT, max_concurrency=1
    ) as g:
        g.decode.answers_cancel = False
        assert (await g.complete()).status_code == 504
        assert g.gateway.admission.in_flight == 1
        await g.idle()
        metrics = (await g.client.get("/metrics")).text
    assert 'pd_gateway_ignored_messages_total{type="leg_not_closed"} 1.0' in metrics


# -- clients that leave -------------------------------------------------------------------------


async def _until_waiting(g: GatewayUnderTest, count: int) -> None:
    while g.gateway.admission.waiting < count:  # noqa: ASYNC110 -- the gateway has no event for it
        await asyncio.sleep(0.005)


async def _dispatched(g: GatewayUnderTest) -> None:
    await g.decode.until(lambda worker: len(worker.requests) == 1)


PHASES: list[tuple[str, Script, dict[str, str], str]] = [
    ("ingest", silent, {"X-PD-Faults": "gateway.ingest=20000"}, "RECEIVED"),
    ("queue", silent, {"X-PD-Faults": "gateway.queue=20000"}, "TOKENIZED"),
    ("route", silent, {"X-PD-Faults": "gateway.route=20000"}, "ADMITTED"),
    ("dispatched", silent, {}, "DISPATCHED"),
    ("token", speak("abc"), {"X-PD-Faults": "hop.token=20000"}, "DISPATCHED"),
    ("generating", endless(), {}, "FIRST_TOKEN_SENT"),
    ("finish", speak("abc"), {"X-PD-Faults": "gateway.finish=20000"}, "FIRST_TOKEN_SENT"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "headers", "reached"), [p[1:] for p in PHASES], ids=[p[0] for p in PHASES]
)
async def test_client_that_leaves_cancels_its_request_wherever_it_is(
    tmp_path: Path, script: Script, headers: dict[str, str], reached: str, stream: bool
) -> None:
    if not stream and reached == "FIRST_TOKEN_SENT":
        reached = "DISPATCHED"
    async with gateway_under_test(
        tmp_path, decode_script=script, allow_faults=True, max_concurrency=1
    ) as g:
        task = asyncio.create_task(g.complete(headers=headers, stream=stream))
        async with asyncio.timeout(10):
            while reached not in g.mark_names():  # noqa: ASYNC110 -- marks have no event
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10):
            while not g.marks(Mark.COMPLETED):  # noqa: ASYNC110 -- marks have no event
                await asyncio.sleep(0.005)
        (completed,) = g.marks(Mark.COMPLETED)
        names = g.mark_names()
        await g.idle()
        # The one place is free again.
        g.decode.script = speak("next")
        assert (await g.complete()).json()["choices"][0]["text"] == "next"
    assert completed[:3] == (Outcome.CANCELLED, "client_disconnected", "client")
    assert names[names.index("COMPLETED") - 1] == "ABORTED"


async def test_client_that_leaves_the_queue_lets_the_next_one_in(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=endless(), max_concurrency=1) as g:
        running = asyncio.create_task(g.complete())
        await _dispatched(g)
        leaving = asyncio.create_task(g.complete())
        await _until_waiting(g, 1)
        staying = asyncio.create_task(g.complete())
        await _until_waiting(g, 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        g.decode.script = speak("served")
        running.cancel()
        assert (await staying).json()["choices"][0]["text"] == "served"
        outcomes = [values[0] for values in g.marks(Mark.COMPLETED)]
        waits = g.marks(Mark.WAITING)
    assert outcomes.count(Outcome.CANCELLED) == 2
    assert [w[1] for w in waits] == [WaitReason.CONCURRENCY] * 2
    assert waits[1][2:6] == (1, 0, 1, 1)


async def test_fifty_closed_streams_leave_no_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with gateway_under_test(tmp_path, decode_script=endless(gap_s=0.01)) as g:

        async def two_chunks() -> None:
            body = {"model": "fake", "prompt": "hi", "stream": True}
            async with g.client.stream("POST", "/v1/completions", json=body) as response:
                chunks = response.aiter_text()
                await anext(chunks)
                await anext(chunks)

        await asyncio.gather(*[two_chunks() for _ in range(50)])
        await g.idle()
        outcomes = [values[0] for values in g.marks(Mark.COMPLETED)]
        cancelled = {cancel.handoff_id for cancel in g.decode.cancels}
    assert outcomes == [Outcome.CANCELLED] * 50
    assert len(cancelled) == 50
    assert caplog.records == []


# -- admission and readiness --------------------------------------------------------------------


async def test_full_queue_is_429_with_retry_after(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=endless(), max_concurrency=1, max_queue=1
    ) as g:
        first = asyncio.create_task(g.complete(headers={"X-Request-Id": "first"}))
        await _dispatched(g)
        second = asyncio.create_task(g.complete())
        await _until_waiting(g, 1)
        refused = await g.complete()
        (wait,) = g.marks(Mark.WAITING)
        g.decode.script = speak("second")
        first.cancel()
        assert (await second).status_code == 200
        (rejected,) = [v for v in g.marks(Mark.COMPLETED) if v[0] == Outcome.REJECTED]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert rejected[:4] == (Outcome.REJECTED, "queue_full", "gateway", 429)
    assert wait == ("gateway.queue", WaitReason.CONCURRENCY, 1, 0, 1, 0, "first")


async def test_long_wait_for_a_place_is_503(tmp_path: Path) -> None:
    deadlines = Deadlines(drain_s=1.0, gateway_queue_s=0.2)
    async with gateway_under_test(
        tmp_path, decode_script=endless(), max_concurrency=1, deadlines=deadlines
    ) as g:
        first = asyncio.create_task(g.complete())
        await _dispatched(g)
        late = await g.complete()
        first.cancel()
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "queue_timeout"
    assert "retry-after" in late.headers


async def test_requests_before_the_workers_wait_and_are_served(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, wait_ready=False, max_concurrency=100) as g:
        for worker in g.workers.values():
            worker.beats = False
        burst = [asyncio.create_task(g.complete()) for _ in range(40)]
        async with asyncio.timeout(10):
            while len(g.marks(Mark.WAITING)) < 40 and not g.decode.requests:  # noqa: ASYNC110 -- marks have no event
                await asyncio.sleep(0.005)
        for worker in g.workers.values():
            worker.beats = True
        answers = await asyncio.gather(*burst)
        assert (await g.client.get("/ready")).status_code == 200
    assert {answer.status_code for answer in answers} == {200}


async def test_without_workers_a_request_is_503_and_the_server_not_ready(tmp_path: Path) -> None:
    deadlines = Deadlines(drain_s=1.0, gateway_queue_s=0.2)
    async with gateway_under_test(
        tmp_path, wait_ready=False, deadlines=deadlines, dead_after_s=0.2
    ) as g:
        for worker in g.workers.values():
            worker.beats = False
        await asyncio.sleep(0.4)
        ready, health = await g.client.get("/ready"), await g.client.get("/health")
        response = await g.complete()
        (wait,) = g.marks(Mark.WAITING)
        (completed,) = g.marks(Mark.COMPLETED)
    assert ready.status_code == health.status_code == 503
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    assert wait[:4] == ("gateway.queue", WaitReason.NO_WORKER, 1, 0)
    assert completed[:2] == (Outcome.TIMED_OUT, "no_worker")


async def test_health_is_about_progress(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, stalled_after_s=2.0) as g:
        fine = await g.client.get("/health")
        g.decode.beats = False
        g.decode.beat(progress_age_s=30.0, busy=True)
        await asyncio.sleep(0.1)
        stalled, ready = await g.client.get("/health"), await g.client.get("/ready")
        g.decode.beat(progress_age_s=0.1, busy=True)
        await asyncio.sleep(0.1)
        recovered = await g.client.get("/health")
    assert fine.status_code == recovered.status_code == 200
    assert {p["instance"] for p in fine.json()["processes"]} == {
        "gateway",
        "prefill-0",
        "decode-0",
        "transfer-0",
    }
    assert stalled.status_code == ready.status_code == 503
    (decode,) = [p for p in stalled.json()["processes"] if p["instance"] == "decode-0"]
    assert decode["state"] == "stalled"
    assert decode["last_progress_age_s"] >= 30
    assert "no progress" in decode["reason"]


async def test_missing_transfer_process_makes_the_server_not_ready(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, dead_after_s=0.3) as g:
        g.workers["transfer-0"].beats = False
        await asyncio.sleep(0.5)
        assert (await g.client.get("/ready")).status_code == 503
        g.workers["transfer-0"].beats = True
        await asyncio.sleep(0.2)
        assert (await g.client.get("/ready")).status_code == 200


async def test_draining_worker_gets_no_more_requests(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode=2, policy="round_robin") as g:
        g.decode.draining = True
        g.decode.beat()
        await asyncio.sleep(0.1)
        for _ in range(3):
            assert (await g.complete()).status_code == 200
        assert len(g.decode.requests) == 0
        assert len(g.workers["decode-1"].requests) == 3


# -- metrics, description, stopping -------------------------------------------------------------


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("Hello!", gap_s=0.02)) as g:
        await g.complete(stream=True, headers={"X-Request-Id": "not-a-label"})
        await g.chat()
        await g.complete(n=0)
        plain = await g.client.get("/metrics")
        open_metrics = await g.client.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")
    text = plain.text
    chat = 'gen_ai_operation_name="chat",gen_ai_request_model="fake"'
    stream = 'gen_ai_operation_name="text_completion",gen_ai_request_model="fake"'
    for line in (
        f"gen_ai_server_time_to_first_token_seconds_count{{{chat}}} 1.0",
        f"gen_ai_server_time_to_first_token_seconds_count{{{stream}}} 1.0",
        f"gen_ai_server_time_per_output_token_seconds_count{{{stream}}} 1.0",
        f"pd_inter_token_gap_seconds_count{{{stream}}} 5.0",
        'pd_requests_total{gen_ai_operation_name="chat",outcome="completed",reason=""} 1.0',
        'pd_requests_total{gen_ai_operation_name="text_completion",outcome="rejected",'
        'reason="invalid_request"} 1.0',
        'pd_tokens_total{type="output"} 12.0',
        'pd_gateway_stage_seconds_count{stage="gateway.dispatch"} 2.0',
        "pd_requests_in_flight 0.0",
        "pd_gateway_queue_depth 0.0",
        'pd_process_ready{instance="decode-0",role="decode"} 1.0',
    ):
        assert line in text
    assert "not-a-label" not in text


async def test_openapi_document_describes_every_route(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        document = (await g.client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/completions",
        "/v1/chat/completions",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
    }
    body = document["components"]["schemas"]["CompletionBody"]
    assert body["properties"]["echo"]["enum"] == [None, False]
    assert {"model", "prompt"} == set(body["required"])


async def test_shutdown_lets_short_requests_finish_and_ends_long_ones_cleanly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def short_or_endless(leg: LegDouble) -> None:
        request = leg.request
        assert isinstance(request, DecodeRequest)
        script = speak("ab", gap_s=0.2) if request.max_tokens == 2 else endless(gap_s=0.02)
        await script(leg)

    async with gateway_under_test(tmp_path, decode_script=short_or_endless) as g:
        finishing = asyncio.create_task(g.complete(stream=True, max_tokens=2))
        cut = asyncio.create_task(g.complete(stream=True, max_tokens=50))
        whole = asyncio.create_task(g.complete(max_tokens=51))
        await g.decode.until(lambda worker: len(worker.requests) == 3)
        stopping = asyncio.create_task(g.gateway.shutdown(0.8))
        await asyncio.sleep(0.05)
        ready, refused = await g.client.get("/ready"), await g.complete()
        await stopping
        answers = [events_of((await task).text) for task in (finishing, cut)]
    assert ready.status_code == 503
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert text_of(answers[0]) == "ab"
    assert answers[1][-2]["error"]["code"] == "shutting_down"
    assert answers[1][-1] == "[DONE]"
    assert whole.result().status_code == 503
    assert not any(record.exc_info for record in caplog.records)


async def test_finished_request_is_one_log_line_without_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="server.gateway")
    async with gateway_under_test(tmp_path, decode_script=speak("SECRET-OUT")) as g:
        response = await g.complete(prompt="SECRET-IN", headers={"X-Request-Id": "r-1"})
    (line,) = [r.getMessage() for r in caplog.records if "request_id=r-1" in r.getMessage()]
    assert f"trace_id={response.headers['x-trace-id']}" in line
    assert "outcome=completed" in line
    assert "gateway.queue=" in line
    assert "SECRET" not in line


async def test_slow_head_and_silent_connection_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.gateway.protocol import GatewayProtocol

    monkeypatch.setattr(GatewayProtocol, "head_timeout_s", 0.2)
    async with gateway_under_test(tmp_path) as g:
        for first in (b"", b"POST /v1/completions HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection(*g.address)
            writer.write(first)
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
        # A stream that is longer than that is none of its business.
        g.decode.script = speak("abcde", gap_s=0.1)
        assert (await g.complete(stream=True)).status_code == 200


async def test_roles_of_marks_are_the_gateways(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        await g.complete()
        assert g.rings.recorders[Role.GATEWAY].errors == 0
