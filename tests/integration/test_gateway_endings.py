"""Requests that end otherwise than by their last token: failures and clients that leave."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from pdtrace.stages import Mark, Outcome, WaitReason
from server.config import Deadlines
from tests.support.gateway_doubles import (
    WAIT_S,
    LegDouble,
    Script,
    endless,
    events_of,
    fails,
    gateway_under_test,
    silent,
    speak,
    text_of,
)
from tests.support.slowness import is_of_the_machine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SHORT = Deadlines(drain_s=1.5, request_s=1.5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
        tmp_path, prefill_script=fails(outcome, reason), decode_script=silent, max_retries=0
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
    async with gateway_under_test(tmp_path) as g:

        async def breaks(leg: LegDouble) -> None:
            leg.say(b"abc")
            await g.marked(Mark.FIRST_TOKEN_SENT)
            leg.close(Outcome.FAILED, reason="engine_error", message="it broke")

        g.decode.script = breaks
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
        assert len(g.decode.requests) == 2, "one more attempt, before anything was written"
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "stream_incomplete"


@pytest.mark.parametrize("how", ["silence", "restart"])
async def test_dead_worker_fails_its_requests_and_no_others(tmp_path: Path, how: str) -> None:
    async with gateway_under_test(
        tmp_path,
        decode=2,
        decode_script=endless(gap_s=0.02),
        dead_after_s=1.0,
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
        done, running = await asyncio.wait(tasks, return_when="FIRST_COMPLETED", timeout=WAIT_S)
        (failed,), (healthy,) = done, running
        events = events_of(failed.result().text)
        assert events[-2]["error"]["code"] == "worker_lost"
        assert events[-1] == "[DONE]"
        assert [c.handoff_id for c in g.prefill.cancels] in ([], [victim])
        healthy.cancel()


async def test_worker_that_comes_back_is_told_to_stop_what_it_was_given_up_for(
    tmp_path: Path,
) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=endless(gap_s=0.02), dead_after_s=1.0, max_retries=0
    ) as g:
        request = asyncio.create_task(g.complete())
        await g.dispatched()
        g.decode.beats = False
        assert (await request).json()["error"]["code"] == "worker_lost"
        assert g.decode.cancels == []
        g.decode.beats = True
        await g.decode.until(lambda worker: bool(worker.cancels))
        (cancel,) = g.decode.cancels
    assert cancel.handoff_id == g.decode.requests[0].context.handoff_id
    assert (cancel.outcome, cancel.reason, cancel.by) == ("failed", "worker_lost", "gateway")


async def test_gateway_that_stood_still_does_not_take_its_workers_for_dead(tmp_path: Path) -> None:
    script = speak("abcdef", gap_s=0.02)
    async with gateway_under_test(tmp_path, decode_script=script, dead_after_s=0.3) as g:
        request = asyncio.create_task(g.complete())
        await g.dispatched()
        time.sleep(1.0)  # noqa: ASYNC251 -- the event loop is what stands still
        response = await request
    assert response.json()["choices"][0]["text"] == "abcdef"


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
        async with asyncio.timeout(WAIT_S):
            while reached not in g.mark_names():  # noqa: ASYNC110 -- marks have no event
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
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
        await g.dispatched()
        leaving = asyncio.create_task(g.complete())
        await g.waiting(1)
        staying = asyncio.create_task(g.complete())
        await g.waiting(2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        g.decode.script = speak("served")
        running.cancel()
        assert (await staying).json()["choices"][0]["text"] == "served"
        outcomes = [values[0] for values in g.marks(Mark.COMPLETED)]
        waits = g.marks(Mark.WAITING)
    assert outcomes.count(Outcome.CANCELLED) == 2
    assert {w[1] for w in waits} == {WaitReason.CONCURRENCY}
    assert waits[1][2:6] == (1, 0, 1, 1)  # the other one may follow, once it has moved up


@pytest.mark.case("CTX-12")
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
        async with asyncio.timeout(WAIT_S):
            # A request gives its place back before it says that it ended.
            while len(outcomes := [m[0] for m in g.marks(Mark.COMPLETED)]) < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await g.idle()
        cancelled = {cancel.handoff_id for cancel in g.decode.cancels}
    assert outcomes == [Outcome.CANCELLED] * 50
    assert len(cancelled) == 50
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if not is_of_the_machine(line)] == []
