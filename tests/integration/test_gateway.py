"""The gateway over real HTTP and real sockets, with scripted workers: what a caller gets."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, Outcome
from server.wire.messages import ColocatedRequest, DecodeRequest, PrefillRequest
from tests.support.gateway_doubles import (
    LegDouble,
    events_of,
    gateway_under_test,
    speak,
    text_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

MULTI_BYTE = "naïve 日本語 👩‍👩‍👧 e\u0301 🌍"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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


@pytest.mark.parametrize("last", [True, False])
async def test_usage_so_far_is_in_every_chunk_when_asked_for(tmp_path: Path, last: bool) -> None:
    options = {"include_usage": last, "continuous_usage_stats": True}
    async with gateway_under_test(tmp_path, decode_script=speak("abc", gap_s=0.2)) as g:
        for ask in (g.chat, g.complete):
            events = events_of((await ask(stream=True, stream_options=options)).text)[:-1]
            usages = [event["usage"] for event in events]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts)
            assert counts[-1] == 3
            assert any(0 < count < 3 for count in counts), "they grow as tokens come"
            assert {usage["prompt_tokens"] for usage in usages} == {usages[0]["prompt_tokens"]}
            assert (events[-1]["choices"] == []) == last


async def test_stream_without_usage_option_has_no_usage_field(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        events = events_of((await g.complete(stream=True)).text)
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.case("API-06")
@pytest.mark.parametrize("stream", [True, False])
async def test_multi_byte_characters_stay_whole_across_tokens(tmp_path: Path, stream: bool) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak(MULTI_BYTE, gap_s=0.001)) as g:
        response = await g.complete(stream=stream)
    text = text_of(events_of(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == MULTI_BYTE


@pytest.mark.case("API-06")
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


@pytest.mark.parametrize(
    ("finish", "stop"), [("length", None), (None, "A")], ids=["length", "stop string"]
)
async def test_answer_that_ends_with_the_forwarded_token_waits_for_decode(
    tmp_path: Path, finish: str | None, stop: str | None
) -> None:
    finished_ns: list[int] = []

    async def forward(leg: LegDouble) -> None:
        leg.say(b"A", finish=finish)
        leg.close()

    async def land(leg: LegDouble) -> None:
        await asyncio.sleep(0.2)
        finished_ns.append(time.monotonic_ns())
        leg.close()

    async with gateway_under_test(
        tmp_path, prefill_script=forward, decode_script=land, first_token="prefill"
    ) as g:
        response = await g.complete(max_tokens=1, stop=stop)
        (completed,) = [
            record.t_ns
            for record in g.records()
            if isinstance(record, MarkRecord) and record.mark is Mark.COMPLETED
        ]
    (choice,) = response.json()["choices"]
    assert choice["text"] == ("" if stop else "A")
    assert choice["finish_reason"] == ("stop" if stop else finish)
    assert completed > finished_ns[0]


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
            await worker.tell()
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


@pytest.mark.case("ID-05")
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


@pytest.mark.case("ID-01")
async def test_two_requests_with_one_id_are_served_side_by_side(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("Hello!", gap_s=0.01)) as g:
        answers = await asyncio.gather(*[g.complete(headers={"X-Request-Id": "a"}) for _ in "12"])
        handoffs = {leg.context.handoff_id for leg in g.decode.requests}
    assert [a.json()["choices"][0]["text"] for a in answers] == ["Hello!"] * 2
    assert len(handoffs) == 2


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.case("CTX-10")
@pytest.mark.case("CTX-08")
@pytest.mark.parametrize(
    ("name", "value", "continued", "flags"),
    [
        ("traceparent", f"00-{TRACE}-{SPAN}-01", True, "01"),
        ("Traceparent", f"00-{TRACE}-{SPAN}-01", True, "01"),
        ("TRACEPARENT", f"00-{TRACE}-{SPAN}-01", True, "01"),
        ("traceparent", f"00-{TRACE}-{SPAN}-00", True, "00"),
        ("traceparent", f"00-{TRACE}-{SPAN}-03", True, "01"),
        ("traceparent", f"00-{'0' * 32}-{SPAN}-01", False, "01"),
        ("traceparent", f"00-{TRACE}-{'0' * 16}-01", False, "01"),
        ("traceparent", f"00-{TRACE[1:]}-{SPAN}-01", False, "01"),
        ("traceparent", f"00-{TRACE}0-{SPAN}-01", False, "01"),
        ("traceparent", f"00-{TRACE}-{SPAN[1:]}-01", False, "01"),
        ("traceparent", f"00-{TRACE[:-1]}g-{SPAN}-01", False, "01"),
        ("traceparent", f"00-{TRACE.upper()}-{SPAN}-01", False, "01"),
        ("traceparent", f"00_{TRACE}_{SPAN}_01", False, "01"),
        ("traceparent", f"ff-{TRACE}-{SPAN}-01", False, "01"),
        ("traceparent", f"00-{TRACE}-{SPAN}", False, "01"),
        ("traceparent", "00_zz", False, "01"),
        ("traceparent", "", False, "01"),
        ("tracestate", "a=b", False, "01"),
    ],
)
async def test_callers_trace_is_continued_or_a_new_one_begun(
    tmp_path: Path, name: str, value: str, continued: bool, flags: str
) -> None:
    async with gateway_under_test(tmp_path) as g:
        response = await g.complete(headers={"tracestate": "vendor=1", name: value})
        context, other = (worker.requests[0].context for worker in (g.decode, g.prefill))
    assert response.status_code == 200
    assert other == context
    assert context.tracestate == ("vendor=1" if continued else "")
    version, trace_id, span_id, sent_flags = response.headers["traceparent"].split("-")
    assert (version, sent_flags) == ("00", flags)
    assert (trace_id == TRACE) is continued
    assert span_id == context.root_span_id != SPAN
    assert context.client_parent_span_id == (SPAN if continued else None)
    assert context.sampled is (flags == "01")
    assert response.headers["x-trace-id"] == trace_id == context.trace_id


async def test_callers_trace_that_is_not_wanted_is_neither_continued_nor_obeyed(
    tmp_path: Path,
) -> None:
    async with gateway_under_test(tmp_path, caller_traces=False) as g:
        response = await g.complete(
            headers={"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "vendor=1"}
        )
        (context,) = [leg.context for leg in g.decode.requests]
    assert response.status_code == 200
    assert response.headers["x-trace-id"] == context.trace_id != TRACE
    assert response.headers["traceparent"] == f"00-{context.trace_id}-{context.root_span_id}-01"
    assert (context.client_parent_span_id, context.tracestate, context.sampled) == (None, "", True)
