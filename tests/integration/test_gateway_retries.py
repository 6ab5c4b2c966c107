"""An attempt fails before the client has a byte: one more, or one clear error, never a mixture."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdtrace.stages import Mark, Outcome, WaitReason
from server.config import Deadlines
from server.wire.messages import PrefillRequest
from tests.support.gateway_doubles import (
    GatewayUnderTest,
    LegDouble,
    endless,
    events_of,
    fails,
    gateway_under_test,
    silent,
    speak,
    text_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

TWO_PAIRS: dict[str, Any] = {"prefill": 2, "decode": 2, "policy": "round_robin"}
"""The first attempt goes to prefill-0 and decode-0."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def metric(g: GatewayUnderTest, line: str) -> bool:
    return line in (await g.client.get("/metrics")).text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.FAILED, "handshake_mismatch"),
        (Outcome.FAILED, "checksum_mismatch"),
        (Outcome.FAILED, "transfer_lost"),
        (Outcome.FAILED, "peer_unreachable"),
        (Outcome.REJECTED, "shutting_down"),
        (Outcome.REJECTED, "overloaded"),
    ],
)
async def test_failed_attempt_is_followed_by_one_on_other_workers(
    tmp_path: Path, outcome: Outcome, reason: str, stream: bool
) -> None:
    async with gateway_under_test(tmp_path, **TWO_PAIRS) as g:
        g.prefill.script = fails(outcome, reason)
        g.decode.script = silent
        response = await g.complete(stream=stream, headers={"X-Request-Id": "mine"})
        await g.decode.until(lambda worker: bool(worker.cancels))
        names = [name for name in g.mark_names() if name != "WAITING"]  # for a transfer's beat
        (aborted,), (completed,) = g.marks(Mark.ABORTED), g.marks(Mark.COMPLETED)
        first, second = g.decode.requests[0], g.workers["decode-1"].requests[0]
        line = f'pd_gateway_retries_total{{outcome="completed",reason="{reason}"}} 1.0'
        counted = await metric(g, line)
        (cancel,) = g.decode.cancels
    answer = text_of(events_of(response.text)) if stream else text(response)
    assert answer == "Hello!"
    assert names == [
        *("RECEIVED", "TOKENIZED", "ADMITTED", "ROUTED", "DISPATCHED", "ABORTED"),
        *("ADMITTED", "ROUTED", "DISPATCHED", "FIRST_TOKEN_SENT", "COMPLETED"),
    ]
    assert aborted == (outcome, reason, "prefill-0")
    assert completed[:4] == (Outcome.COMPLETED, None, None, 200)
    assert (cancel.handoff_id, cancel.reason) == (first.context.handoff_id, reason)
    assert (first.context.attempt, second.context.attempt) == (1, 2)
    assert first.context.handoff_id != second.context.handoff_id
    assert second.context.request_id == "mine"
    assert first.context.trace_id == second.context.trace_id == response.headers["x-trace-id"]
    assert counted


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_lost_before_the_first_byte_are_computed_once_more(
    tmp_path: Path, stream: bool
) -> None:
    """Both legs say that they completed, but what decode sent has not come."""

    async def lost_once(leg: LegDouble) -> None:
        if leg.request.context.attempt > 1:
            await speak("Hello!")(leg)
            return
        if not stream:
            leg.say(b"He")
        leg.close()

    async with gateway_under_test(tmp_path, decode_script=lost_once) as g:
        response = await g.complete(stream=stream)
        (aborted,), (completed,) = g.marks(Mark.ABORTED), g.marks(Mark.COMPLETED)
    answer = text_of(events_of(response.text)) if stream else text(response)
    assert answer == "Hello!"
    assert aborted == (Outcome.FAILED, "stream_incomplete", "decode-0")
    assert completed[:4] == (Outcome.COMPLETED, None, None, 200)


@pytest.mark.parametrize("reason", ["engine_error", "internal", "deadline_exceeded"])
async def test_attempt_that_may_break_the_next_worker_too_is_the_last(
    tmp_path: Path, reason: str
) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=fails(Outcome.FAILED, reason), **TWO_PAIRS
    ) as g:
        response = await g.complete()
        assert len(g.workers["decode-1"].requests) == 0
    assert response.json()["error"]["code"] == reason


async def test_second_failure_is_the_answer_and_both_are_counted(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=fails(Outcome.FAILED, "checksum_mismatch"), **TWO_PAIRS
    ) as g:
        response = await g.complete()
        assert sum(len(w.requests) for w in (g.decode, g.workers["decode-1"])) == 2
        assert await metric(
            g, 'pd_gateway_retries_total{outcome="failed",reason="checksum_mismatch"} 1.0'
        )
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "checksum_mismatch"


async def test_nothing_is_tried_again_behind_the_first_byte(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, **TWO_PAIRS) as g:

        async def breaks(leg: LegDouble) -> None:
            leg.say(b"abc")
            await g.marked(Mark.FIRST_TOKEN_SENT)
            leg.close(Outcome.FAILED, reason="checksum_mismatch")

        g.decode.script = breaks
        response = await g.complete(stream=True)
        assert len(g.workers["decode-1"].requests) == 0
        (completed,) = g.marks(Mark.COMPLETED)
    events = events_of(response.text)
    assert text_of(events[:-2]) == "abc"
    assert events[-2]["error"]["code"] == "checksum_mismatch"
    assert events[-1] == "[DONE]"
    assert sum("error" in event for event in events[:-1]) == 1
    assert completed[:5] == (Outcome.FAILED, "checksum_mismatch", "decode-0", 200, 3)


async def test_token_that_comes_with_the_failure_is_not_the_first_byte(tmp_path: Path) -> None:
    async def breaks(leg: LegDouble) -> None:
        leg.say(b"abc")
        leg.close(Outcome.FAILED, reason="checksum_mismatch")

    async with gateway_under_test(tmp_path, **TWO_PAIRS) as g:
        g.decode.script = breaks
        events = events_of((await g.complete(stream=True)).text)
    # Whether both arrived at once is the machine's affair: mixed they never are.
    assert text_of([event for event in events if "error" not in event]) in ("Hello!", "abc")
    assert ("error" in events[-2]) is (text_of(events[:-2]) == "abc")


async def test_whole_answer_holds_the_second_attempt_alone(tmp_path: Path) -> None:
    """Nothing is written before the last token, so it may fail late."""
    async with gateway_under_test(tmp_path, **TWO_PAIRS) as g:

        async def breaks(leg: LegDouble) -> None:
            leg.say(b"abc")
            await asyncio.sleep(0.1)
            leg.close(Outcome.FAILED, reason="shutting_down")

        g.decode.script = breaks
        body = (await g.complete()).json()
    assert body["choices"][0]["text"] == "Hello!"
    assert body["usage"]["completion_tokens"] == 6


async def test_late_tokens_of_the_first_attempt_are_nobodys(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, **TWO_PAIRS) as g:

        async def late(leg: LegDouble) -> None:
            await g.marked(Mark.ABORTED)
            await endless("x", gap_s=0.002)(leg)

        g.prefill.script = fails(Outcome.FAILED, "checksum_mismatch")
        g.decode.script = late
        g.decode.cancel_stops = False
        g.workers["decode-1"].script = speak("abcdef", gap_s=0.02)
        response = await g.complete(stream=True)
        await g.decode.until(lambda worker: bool(worker.cancels))
        g.decode.stop_legs()
    assert text_of(events_of(response.text)) == "abcdef"


async def test_attempt_after_a_death_waits_for_the_successor(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=silent, dead_after_s=1.0) as g:
        request = asyncio.create_task(g.complete(stream=True))
        await g.dispatched()
        g.decode.beats = False
        await g.marked(Mark.WAITING)
        g.decode.restart()
        g.decode.script = speak("after")
        g.decode.beats = True
        response = await request
        (wait,), (aborted,) = g.marks(Mark.WAITING), g.marks(Mark.ABORTED)
    assert text_of(events_of(response.text)) == "after"
    assert wait[:4] == ("gateway.route", WaitReason.NO_WORKER, 1, 0)
    assert aborted == (Outcome.FAILED, "worker_lost", "decode-0")


async def test_restart_is_noticed_and_tried_again_at_once(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=silent, dead_after_s=30.0) as g:
        request = asyncio.create_task(g.complete())
        await g.dispatched()
        g.decode.script = speak("after")
        g.decode.restart()
        began_s = time.monotonic()
        assert text(await request) == "after"
        assert time.monotonic() - began_s < 20


async def test_waits_of_all_attempts_share_one_deadline(tmp_path: Path) -> None:
    deadlines = Deadlines(drain_s=1.0, gateway_queue_s=8.0)
    async with gateway_under_test(
        tmp_path, decode_script=silent, dead_after_s=1.0, max_concurrency=1, deadlines=deadlines
    ) as g:
        first = asyncio.create_task(g.complete())
        await g.dispatched()
        second = asyncio.create_task(g.complete())
        await g.waiting(1)
        await asyncio.sleep(0.5)  # a part of its time is gone before it has a place
        first.cancel()
        await g.decode.until(lambda worker: len(worker.requests) == 2)
        g.decode.beats = False
        response = await second
        seconds = {w[0] for w in g.marks(Mark.WAITING)}
        ends = g.marks(Mark.COMPLETED)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    assert "retry-after" in response.headers
    assert seconds == {"gateway.queue", "gateway.route"}
    assert ends[-1][:3] == (Outcome.TIMED_OUT, "no_worker", "gateway")


async def test_request_deadline_holds_for_all_attempts_together(tmp_path: Path) -> None:
    async def breaks_late(leg: LegDouble) -> None:
        await asyncio.sleep(3.2)
        leg.close(Outcome.FAILED, reason="checksum_mismatch")

    deadlines = Deadlines(drain_s=0.5, request_s=6.0)
    async with gateway_under_test(
        tmp_path, decode_script=breaks_late, deadlines=deadlines, max_retries=5
    ) as g:
        response = await g.complete()
        assert len(g.decode.requests) == 2
        (completed,) = g.marks(Mark.COMPLETED)
    assert response.status_code == 504
    assert completed[:2] == (Outcome.TIMED_OUT, "deadline_exceeded")


@pytest.mark.parametrize("decode", [1, 2])
async def test_worker_whose_queue_is_full_is_passed_or_the_answer_is_503(
    tmp_path: Path, decode: int
) -> None:
    async with gateway_under_test(
        tmp_path, decode=decode, decode_script=fails(Outcome.REJECTED, "overloaded")
    ) as g:
        began_s = time.monotonic()
        response = await g.complete()
        seconds = time.monotonic() - began_s
        attempts = [len(g.workers[f"decode-{i}"].requests) for i in range(decode)]
        (completed,) = g.marks(Mark.COMPLETED)
        assert (await g.client.get("/ready")).status_code == 200
    assert attempts == [1] * decode
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert int(response.headers["retry-after"]) >= 1
    assert completed[:2] == (Outcome.REJECTED, "overloaded")
    assert seconds < 20


async def test_leg_that_says_it_can_never_fit_is_400(tmp_path: Path) -> None:
    script = fails(Outcome.REJECTED, "kv_capacity", message="needs 9 KV pages, has 4")
    async with gateway_under_test(tmp_path, decode_script=script, decode=2) as g:
        response = await g.complete()
        assert sum(len(g.workers[f"decode-{i}"].requests) for i in range(2)) == 1
    assert response.status_code == 400
    assert "needs 9 KV pages" in response.json()["error"]["message"]


MISMATCH = "protocol: prefill has 2, decode has 1"


async def refuse_decode_0(leg: LegDouble) -> None:
    """A prefill worker that speaks another protocol than decode-0."""
    assert isinstance(leg.request, PrefillRequest)
    if leg.request.decode.instance == "decode-0":
        leg.close(Outcome.FAILED, reason="handshake_mismatch", message=MISMATCH)
    else:
        leg.close()


async def test_refused_pairing_is_remembered_named_and_not_chosen_again(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, **TWO_PAIRS) as g:
        g.prefill.script = refuse_decode_0
        for _ in range(9):
            assert text(await g.complete()) == "Hello!"
        health = await g.client.get("/health")
        refused = [r for r in g.marks(Mark.ROUTED) if r[:2] == ("prefill-0", "decode-0")]
        shown = await metric(g, "pd_gateway_refused_pairs 1.0")
        # Either of the two started again is another pairing.
        g.prefill.restart()
        async with asyncio.timeout(30):
            while (await g.client.get("/health")).json()["refused_pairs"]:  # noqa: ASYNC110 -- asked over HTTP
                await asyncio.sleep(0.02)
    assert len(refused) == 1
    assert health.status_code == 200  # each of the two still has a partner
    assert health.json()["refused_pairs"] == [
        {"prefill": "prefill-0", "decode": "decode-0", "reason": MISMATCH}
    ]
    assert shown


async def test_without_a_pair_that_fits_requests_are_503_with_the_reason(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, prefill_script=refuse_decode_0, decode_script=silent
    ) as g:
        answers = [await g.complete() for _ in range(3)]
        ready, health = await g.client.get("/ready"), await g.client.get("/health")
        assert len(g.decode.requests) == 1
        ends = g.marks(Mark.COMPLETED)
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "handshake_mismatch"
        assert f"prefill-0 with decode-0: {MISMATCH}" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    assert ready.status_code == health.status_code == 503
    assert MISMATCH in ready.json()["reason"]
    states = {p["instance"]: p["state"] for p in health.json()["processes"]}
    assert states["prefill-0"] == states["decode-0"] == "incompatible"
    assert [end[0] for end in ends] == [Outcome.FAILED, Outcome.REJECTED, Outcome.REJECTED]


async def test_workers_that_say_different_things_are_not_paired_and_named(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, prefill=2) as g:
        g.prefill.page_size = 32
        async with asyncio.timeout(30):
            while not (await g.client.get("/health")).json()["refused_pairs"]:  # noqa: ASYNC110 -- asked over HTTP
                await asyncio.sleep(0.02)
        for _ in range(4):
            assert (await g.complete()).status_code == 200
        health, ready = await g.client.get("/health"), await g.client.get("/ready")
        assert len(g.prefill.requests) == 0
    (refused,) = health.json()["refused_pairs"]
    assert refused["reason"] == "KV layout: page_size 32 against 16"
    (alone,) = [p for p in health.json()["processes"] if p["state"] != "ready"]
    assert (alone["instance"], alone["state"]) == ("prefill-0", "incompatible")
    assert "page_size 32 against 16" in alone["reason"]
    assert ready.status_code == 200


async def test_client_that_leaves_while_an_attempt_waits_for_workers_is_let_go(
    tmp_path: Path,
) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=silent, dead_after_s=1.0, max_concurrency=1
    ) as g:
        request = asyncio.create_task(g.complete(headers={"X-Request-Id": "again"}))
        await g.dispatched()
        g.decode.beats = False
        await g.marked(Mark.WAITING)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await g.marked(Mark.COMPLETED)
        (completed,) = g.marks(Mark.COMPLETED)
        await g.idle()
        g.decode.script = speak("next")
        g.decode.beats = True
        assert text(await g.complete(headers={"X-Request-Id": "again"})) == "next"
    assert completed[:3] == (Outcome.CANCELLED, "client_disconnected", "client")


async def test_place_is_kept_through_all_attempts_and_given_back_once(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, max_concurrency=1, deadlines=Deadlines(drain_s=5.0), **TWO_PAIRS
    ) as g:
        g.prefill.script = fails(Outcome.FAILED, "checksum_mismatch")
        g.decode.script = silent
        g.decode.answers_cancel = False
        assert text(await g.complete()) == "Hello!"
        assert g.gateway.admission.in_flight == 1  # the first attempt's leg is not closed
        g.decode.answers_cancel = True
        await g.idle()
        g.gateway.admission.check_integrity()


async def test_cancel_that_is_lost_is_said_again(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=endless(), deadlines=Deadlines(drain_s=30.0)
    ) as g:
        g.decode.loses_cancels = 2
        request = asyncio.create_task(g.complete())
        await g.dispatched()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await g.idle()
        assert len(g.decode.cancels) == 3
        assert not await metric(g, "leg_not_closed")


async def test_closing_that_is_lost_behind_the_answer_is_asked_for(tmp_path: Path) -> None:
    async def never_says_closed(leg: LegDouble) -> None:
        leg.say(b"done", finish="stop")

    async with gateway_under_test(
        tmp_path, decode_script=never_says_closed, deadlines=Deadlines(drain_s=30.0)
    ) as g:
        assert text(await g.complete()) == "done"
        await g.idle()
        (cancel,) = g.decode.cancels
    assert (cancel.outcome, cancel.reason) == (Outcome.COMPLETED, "stop")


async def test_worker_whose_connection_is_lost_gets_nothing_and_is_soon_dead(
    tmp_path: Path,
) -> None:
    async with gateway_under_test(tmp_path, decode=2, policy="round_robin", dead_after_s=30.0) as g:
        async with asyncio.timeout(30):
            while not (g.decode.acks and g.workers["decode-1"].acks):  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0.01)
        g.decode.script = silent
        held = asyncio.create_task(g.complete())
        await g.dispatched()
        await g.decode.die()
        assert text(await held) == "Hello!"  # long before `dead_after_s`
        for _ in range(4):
            assert text(await g.complete()) == "Hello!"
        health = await g.client.get("/health")
    (dead,) = [p for p in health.json()["processes"] if p["state"] != "ready"]
    assert (dead["instance"], dead["state"]) == ("decode-0", "dead")


async def test_burst_beyond_the_queue_is_refused_fast_and_the_rest_is_served(
    tmp_path: Path,
) -> None:
    async with gateway_under_test(
        tmp_path,
        decode_script=speak("ab", gap_s=0.05),
        max_concurrency=4,
        max_queue=16,
        allow_faults=True,
    ) as g:
        headers = {"X-PD-Faults": "gateway.ingest=300"}  # all are on their way before one enters
        answers = await asyncio.gather(*[g.complete(headers=headers) for _ in range(150)])
        assert text(await g.complete()) == "ab"
        tokenized = len(g.marks(Mark.TOKENIZED))
    refused = [a for a in answers if a.status_code == 429]
    served = [a for a in answers if a.status_code == 200]
    assert len(served) + len(refused) == 150
    assert len(served) >= 20
    assert all(int(a.headers["retry-after"]) >= 1 for a in refused)
    assert tokenized == len(served) + 1  # what is refused costs no work


async def test_prefill_that_forwarded_its_token_leaves_nothing_to_try_again(
    tmp_path: Path,
) -> None:
    async with gateway_under_test(tmp_path, first_token="prefill", **TWO_PAIRS) as g:

        async def forward(leg: LegDouble) -> None:
            leg.say(b"A")
            leg.close()

        async def breaks(leg: LegDouble) -> None:
            await g.marked(Mark.FIRST_TOKEN_SENT)
            leg.close(Outcome.FAILED, reason="transfer_lost")

        g.prefill.script, g.decode.script = forward, breaks
        events = events_of((await g.complete(stream=True)).text)
        assert len(g.workers["decode-1"].requests) == 0
    assert text_of(events[:-2]) == "A"
    assert events[-2]["error"]["code"] == "transfer_lost"
    assert events[-1] == "[DONE]"
