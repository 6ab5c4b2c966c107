"""The gateway as its operator sees it: queue, readiness, metrics, stopping, the process."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from pdtrace.stages import Mark, Outcome, Role, WaitReason
from server.config import Deadlines, ProcessConfig, Settings
from server.gateway.openai_api import Operation
from server.wire.messages import DecodeRequest
from tests.support.gateway_doubles import (
    WAIT_S,
    LegDouble,
    endless,
    events_of,
    gateway_under_test,
    speak,
    text_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_full_queue_is_429_with_retry_after(tmp_path: Path) -> None:
    async with gateway_under_test(
        tmp_path, decode_script=endless(), max_concurrency=1, max_queue=1
    ) as g:
        first = asyncio.create_task(g.complete(headers={"X-Request-Id": "first"}))
        await g.dispatched()
        second = asyncio.create_task(g.complete())
        await g.waiting(1)
        refused = await g.complete()
        (wait,) = g.marks(Mark.WAITING)
        g.decode.script = speak("second")
        first.cancel()
        assert (await second).status_code == 200
        (rejected,) = [v for v in g.marks(Mark.COMPLETED) if v[0] == Outcome.REJECTED]
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "5", "one waits, and nothing has come free yet"
    assert refused.json()["error"]["code"] == "queue_full"
    assert rejected[:4] == (Outcome.REJECTED, "queue_full", "gateway", 429)
    assert wait == ("gateway.queue", WaitReason.CONCURRENCY, 1, 0, 1, 0, "first", None)


async def test_long_wait_for_a_place_is_503(tmp_path: Path) -> None:
    deadlines = Deadlines(drain_s=1.0, gateway_queue_s=0.2)
    async with gateway_under_test(
        tmp_path, decode_script=endless(), max_concurrency=1, deadlines=deadlines
    ) as g:
        first = asyncio.create_task(g.complete())
        await g.dispatched()
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
        async with asyncio.timeout(WAIT_S):
            while len(g.marks(Mark.WAITING)) < 40 and not g.decode.requests:  # noqa: ASYNC110 -- marks have no event
                await asyncio.sleep(0.005)
        for worker in g.workers.values():
            worker.beats = True
        answers = await asyncio.gather(*burst)
        assert (await g.client.get("/ready")).status_code == 200
    assert {answer.status_code for answer in answers} == {200}


async def test_without_workers_a_request_is_503_and_the_server_not_ready(tmp_path: Path) -> None:
    deadlines = Deadlines(drain_s=1.0, gateway_queue_s=0.2)
    async with gateway_under_test(tmp_path, wait_ready=False, deadlines=deadlines) as g:
        for worker in g.workers.values():
            worker.beats = False
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
    async with gateway_under_test(tmp_path, stalled_after_s=20.0, dead_after_s=20.0) as g:
        fine = await g.client.get("/health")
        g.decode.beats = False
        await g.decode.tell(progress_age_s=30.0, busy=True)
        stalled, ready = await g.client.get("/health"), await g.client.get("/ready")
        await g.decode.tell(progress_age_s=0.1, busy=True)
        recovered = await g.client.get("/health")
    assert fine.status_code == recovered.status_code == 200
    assert {p["instance"] for p in fine.json()["processes"]} == {
        "gateway-0",
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
    async with gateway_under_test(tmp_path, dead_after_s=0.5) as g:

        async def dead() -> set[str]:
            health = (await g.client.get("/health")).json()
            return {p["instance"] for p in health["processes"] if p["state"] != "ready"}

        g.workers["transfer-0"].beats = False
        async with asyncio.timeout(WAIT_S):
            while await dead() != {"transfer-0"}:  # noqa: ASYNC110 -- asked over HTTP
                await asyncio.sleep(0.02)
        assert (await g.client.get("/ready")).status_code == 503
        g.workers["transfer-0"].beats = True
        async with asyncio.timeout(WAIT_S):
            while (await g.client.get("/ready")).status_code != 200:  # noqa: ASYNC110 -- asked over HTTP
                await asyncio.sleep(0.02)


async def test_draining_worker_gets_no_more_requests(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode=2, policy="round_robin") as g:
        g.decode.draining = True
        await g.decode.tell()
        for _ in range(3):
            assert (await g.complete()).status_code == 200
        assert len(g.decode.requests) == 0
        assert len(g.workers["decode-1"].requests) == 3


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    read = asyncio.Semaphore(0)

    async def in_turn(leg: LegDouble) -> None:
        """Each token once the client has the one before it: none shares a write with another."""
        for count, byte in enumerate(b"Hello!", 1):
            leg.say(bytes([byte]), finish="stop" if count == 6 else None)
            await read.acquire()
        leg.close()

    body = {"model": "fake", "prompt": "hi", "stream": True}
    headers = {"X-Request-Id": "not-a-label"}
    async with gateway_under_test(tmp_path, decode_script=in_turn) as g:
        async with g.client.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            async for line in response.aiter_lines():
                if line:
                    read.release()
        g.decode.script = speak("Hello!")
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
        f'gen_ai_server_time_to_first_token_seconds_count{{{chat},streamed="false"}} 1.0',
        f'gen_ai_server_time_to_first_token_seconds_count{{{stream},streamed="true"}} 1.0',
        f"gen_ai_server_time_per_output_token_seconds_count{{{stream}}} 1.0",
        f"pd_inter_token_gap_seconds_count{{{stream}}} 5.0",
        f'pd_requests_total{{{chat},outcome="completed",reason=""}} 1.0',
        f'pd_requests_total{{{stream},outcome="rejected",reason="invalid_request"}} 1.0',
        'pd_tokens_total{type="output"} 12.0',
        'pd_gateway_stage_seconds_count{stage="gateway.dispatch"} 2.0',
        "pd_requests_in_flight 0.0",
        "pd_gateway_queue_depth 0.0",
        'pd_process_ready{instance="decode-0",role="decode"} 1.0',
    ):
        assert line in text
    assert "not-a-label" not in text


@pytest.mark.case("MET-01")
async def test_measurements_that_shrink_or_fail_reach_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts below 0, a negative gap and a metric that raises: each is counted as an error."""
    async with gateway_under_test(tmp_path, decode_script=speak("Hello!", gap_s=0.02)) as g:
        metrics = g.gateway.metrics
        tokens, gap = metrics.tokens, metrics.gap

        def shrunk(_: object) -> None:
            tokens({"output": -3, "input": 5})

        def backwards(operation: Operation, _: float) -> None:
            gap(operation, -1.0)

        def raises(_: str, seconds: float) -> None:
            metrics.guard(lambda: seconds / 0)

        monkeypatch.setattr(metrics, "tokens", shrunk)
        monkeypatch.setattr(metrics, "gap", backwards)
        monkeypatch.setattr(metrics, "stage", raises)
        answer = await g.complete(stream=True)
        text = (await g.client.get("/metrics")).text
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    stream = 'gen_ai_operation_name="text_completion",gen_ai_request_model="fake"'
    assert 'pd_tokens_total{type="output"} 0.0' in text
    assert 'pd_tokens_total{type="input"} 5.0' in text
    assert f"pd_inter_token_gap_seconds_sum{{{stream}}} 0.0" in text
    assert f'pd_requests_total{{{stream},outcome="completed",reason=""}} 1.0' in text
    errors = float(re.findall(r"^pd_gateway_metrics_errors_total (\S+)", text, re.MULTILINE)[0])
    assert errors > 5


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
    schemas = set(document["components"]["schemas"])
    refs = re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', json.dumps(document))
    assert refs
    assert set(refs) <= schemas


async def test_shutdown_lets_short_requests_finish_and_ends_long_ones_cleanly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def short_or_endless(leg: LegDouble) -> None:
        request = leg.request
        assert isinstance(request, DecodeRequest)
        script = speak("ab", gap_s=0.3) if request.max_tokens == 2 else endless(gap_s=0.02)
        await script(leg)

    async with gateway_under_test(tmp_path, decode_script=short_or_endless) as g:
        finishing = asyncio.create_task(g.complete(stream=True, max_tokens=2))
        cut = asyncio.create_task(g.complete(stream=True, max_tokens=50))
        whole = asyncio.create_task(g.complete(max_tokens=51))
        await g.decode.until(lambda worker: len(worker.requests) == 3)
        stopping = asyncio.create_task(g.gateway.shutdown(3.0))
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


async def test_roles_of_marks_are_the_gateways(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        await g.complete()
        assert g.rings.recorders[Role.GATEWAY].errors == 0


def _process_config(tmp_path: Path, *, port: int, fd: int | None = None) -> Path:
    deadlines = Deadlines(drain_s=0.5)
    settings = Settings(model="fake", port=port, run_dir=str(tmp_path / "run"), deadlines=deadlines)
    settings.rings_path.mkdir(parents=True)
    endpoint = f"ipc://{tmp_path / 'gateway-0'}"
    config = ProcessConfig(
        settings=settings,
        role="gateway",
        instance="gateway-0",
        incarnation="1",
        endpoint=endpoint,
        gateway_endpoint=endpoint,
        http_fd=fd,
    )
    path = tmp_path / "gateway-0.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def _spawn(config: Path, *fds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "server.process", str(config)],
        pass_fds=fds,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_process_answers_what_is_open_and_exits_with_0(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = _spawn(
            _process_config(tmp_path, port=port, fd=listener.fileno()), listener.fileno()
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert (await client.get("/ready")).status_code == 503
            body = {"model": "fake", "prompt": "hi", "stream": True}
            waiting = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(WAIT_S):
                while "pd_requests_in_flight 1.0" not in (await client.get("/metrics")).text:  # noqa: ASYNC110 -- another process
                    await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            answer = await waiting
        _, log = await asyncio.to_thread(process.communicate, None, 20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert "Traceback" not in log
    assert len(list((tmp_path / "run" / "rings").iterdir())) == 1


async def test_busy_port_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = _spawn(_process_config(tmp_path, port=port))
        _, log = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 2
    assert log.strip().splitlines() == [
        f"error: port {port} on 127.0.0.1 cannot be used (Address already in use): "
        "choose another with --port"
    ]
