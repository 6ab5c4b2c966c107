"""What the gateway refuses over HTTP, and how it says so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdtrace.stages import Mark, Outcome
from tests.support.gateway_doubles import (
    gateway_under_test,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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


@pytest.mark.case("API-09")
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
