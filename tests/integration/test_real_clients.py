"""curl and the `openai` package against a whole server, as their users run them.

One server for the module: an API key, four places and no queue, so that a fifth request is refused.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from pydantic import BaseModel

from pdtrace import semconv as a
from server.engine.fake import expected_tokens
from tests.support.recorded import spans_of, wait_for
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

KEY = "sk-real-clients"
PLACES = 4
ENDLESS: dict[str, Any] = {"max_tokens": 6000, "ignore_eos": True}
"""As good as endless: two minutes, at 20 ms a token."""

EXPECT = {"Expect": "100-continue"}
PATIENT = ("--expect100-timeout", "60")
"""Left to itself curl sends the body after a second without an answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    run_dir = tmp_path_factory.mktemp("clients") / "run"
    options = ["--api-key", KEY, "--max-concurrency", str(PLACES), "--max-queue", "0"]
    with running_server(run_dir, *options, model="fake:step_ms=20") as server:
        yield server


def fake_text(prompt: str, count: int) -> str:
    return "".join(map(chr, expected_tokens(list(prompt.encode()), count)))


def in_flight(server: RunningServer) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("pd_requests_in_flight ")]
    return float(value)


@pytest.fixture(autouse=True)
def _all_places_free(server: RunningServer) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction] pytest calls it
    yield
    wait_for(lambda: in_flight(server) == 0, "places to come free")


def cancelled_by_client_in(server: RunningServer, request_id: str) -> str:
    """The stage in which the client cancelled a request; fails unless it did."""
    root = spans_of(server, request_id)[0]
    assert root.attributes[a.OUTCOME.key] == "cancelled"
    assert root.attributes[a.OUTCOME_BY.key] == "client"
    return str(root.attributes[a.OUTCOME_STAGE.key])


# -- curl ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Curled:
    """What one run of curl did. `said` is its verbose output: `> ` sent, `< ` received."""

    exit_code: int
    body: str
    said: list[str]

    @property
    def statuses(self) -> list[int]:
        return [int(line.split()[2]) for line in self.said if line.startswith("< HTTP/")]

    def header(self, name: str) -> str:
        """Of the last response that has it."""
        prefix = f"< {name}: "
        return [line for line in self.said if line.lower().startswith(prefix)][-1][len(prefix) :]

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def curl(
    server: RunningServer,
    path: str,
    *options: str,
    data: object = None,
    key: str | None = KEY,
    headers: dict[str, str] | None = None,
) -> Curled:
    """Run curl with `data` as JSON on standard input."""
    given = {} if key is None else {"Authorization": f"Bearer {key}"}
    if data is not None:
        given["Content-Type"] = "application/json"
        options = (*options, "--data-binary", "@-")
    given |= headers or {}
    arguments = [
        *("curl", "--silent", "--verbose", "--noproxy", "*", *options),
        *(part for name, value in given.items() for part in ("--header", f"{name}: {value}")),
        f"{server.url}{path}",
    ]
    body = data if isinstance(data, str) else json.dumps(data)
    done = subprocess.run(
        arguments, input=body, capture_output=True, text=True, timeout=100, check=False
    )
    said = [line.rstrip("\r") for line in done.stderr.splitlines()]
    return Curled(exit_code=done.returncode, body=done.stdout, said=said)


def completion(server: RunningServer, prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def test_curl_gets_an_answer_in_one_piece(server: RunningServer) -> None:
    done = curl(server, "/v1/completions", data=completion(server))
    assert (done.exit_code, done.statuses) == (0, [200])
    assert json.loads(done.body)["choices"][0]["text"] == fake_text("hello", 5)
    assert done.header("content-type") == "application/json"
    assert int(done.header("content-length")) == len(done.body.encode())
    assert re.fullmatch(r"req-[0-9a-f]{24}", done.header("x-request-id"))


def test_curl_shows_a_stream_as_it_comes(server: RunningServer) -> None:
    done = curl(server, "/v1/completions", "--no-buffer", data=completion(server, stream=True))
    assert done.exit_code == 0
    assert done.header("content-type") == "text/event-stream; charset=utf-8"
    *events, end, rest = done.body.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(pieces) == fake_text("hello", 5)


def test_curls_request_id_and_trace_are_continued(server: RunningServer) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    sent = {"X-Request-Id": "curl-1", "traceparent": f"00-{trace_id}-{span_id}-01"}
    done = curl(server, "/v1/completions", data=completion(server), headers=sent)
    assert done.header("x-request-id") == "curl-1"
    assert done.header("x-trace-id") == trace_id
    root = spans_of(server, "curl-1")[0]
    assert (root.trace_id, root.parent_id) == (trace_id, span_id)
    assert done.header("traceparent") == f"00-{trace_id}-{root.span_id}-01"


@pytest.mark.parametrize(
    ("path", "data", "key", "status", "code"),
    [
        ("/v1/completions", "{", KEY, 400, "invalid_request"),
        ("/v1/completions", {"model": "gpt", "prompt": "x"}, KEY, 404, "model_not_found"),
        ("/v1/completions", {"model": "gpt", "prompt": "x"}, "wrong", 401, "invalid_api_key"),
        ("/v1/completions", {"model": "gpt", "prompt": "x"}, None, 401, "invalid_api_key"),
        ("/v1/models", None, None, 401, "invalid_api_key"),
        ("/v1/completions", None, KEY, 405, "method_not_allowed"),
        ("/v1/embeddings", {"input": "x"}, KEY, 404, "not_found"),
    ],
)
def test_curl_gets_errors_with_a_body_that_says_why(
    server: RunningServer, *, path: str, data: object, key: str | None, status: int, code: str
) -> None:
    done = curl(server, path, "--fail-with-body", data=data, key=key)
    assert done.exit_code == 22  # curl's word for an HTTP error
    assert done.statuses == [status]
    assert done.error["code"] == code
    assert done.header("x-request-id")


def test_connection_of_curl_is_used_again_also_behind_errors_and_streams(
    server: RunningServer,
) -> None:
    body = json.dumps(completion(server, stream=True))
    one = ["-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
    one += ["--http1.1", "--silent", "--noproxy", "*", "--output", "/dev/null"]
    one += ["--write-out", "%{http_code} %{num_connects}\n"]
    urls = ["/v1/completions", "/v1/nothing", "/v1/completions", "/v1/completions"]
    bodies = [body, body, "{", body]
    commands = [[*one, "--data", b, f"{server.url}{u}"] for u, b in zip(urls, bodies, strict=True)]
    arguments = ["curl", *commands[0]]
    for command in commands[1:]:
        arguments += ["--next", *command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["200 1", "404 0", "400 0", "200 0"]


def test_curl_sends_a_large_body_once_it_is_told_to_go_on(server: RunningServer) -> None:
    large = completion(server, "x" * 7000)
    done = curl(server, "/v1/completions", *PATIENT, data=large, headers=EXPECT)
    assert done.statuses == [100, 200]
    assert json.loads(done.body)["usage"]["prompt_tokens"] == 7000


@pytest.mark.parametrize(
    ("key", "size", "status"), [("wrong", 2_000_000, 401), (KEY, 20_000_000, 413)]
)
def test_curl_keeps_a_large_body_to_itself_that_is_refused_unread(
    server: RunningServer, key: str, size: int, status: int
) -> None:
    done = curl(
        server,
        "/v1/completions",
        *(*PATIENT, "--write-out", "%{stderr}uploaded %{size_upload}"),
        data=completion(server, "x" * size),
        headers=EXPECT,
        key=key,
    )
    assert (done.exit_code, done.statuses) == (0, [status])
    assert done.error["message"]
    assert "uploaded 0" in done.said


def test_curl_may_send_chunks_and_ask_for_another_protocol(server: RunningServer) -> None:
    chunked = {"Transfer-Encoding": "chunked"}
    done = curl(server, "/v1/completions", data=completion(server), headers=chunked)
    assert done.statuses == [200]
    # What `--http2` sends over plain HTTP; not every curl has it.
    upgrade = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA",
    }
    done = curl(server, "/v1/completions", data=completion(server), headers=upgrade)
    assert done.statuses == [200]
    assert json.loads(done.body)["choices"][0]["text"] == fake_text("hello", 5)


@pytest.mark.parametrize(("stream", "seconds"), [(True, 4), (False, 2)])
def test_curl_that_gives_up_is_recorded_as_its_clients_cancellation(
    server: RunningServer, stream: bool, seconds: int
) -> None:
    request_id = f"curl-gave-up-{stream}"
    done = curl(
        server,
        "/v1/completions",
        *("--no-buffer", "--max-time", str(seconds)),
        data=completion(server, stream=stream, **ENDLESS),
        headers={"X-Request-Id": request_id},
    )
    assert done.exit_code == 28  # curl's word for a timeout
    assert ("data: " in done.body) is stream
    stage = cancelled_by_client_in(server, request_id)
    assert stage == "decode.generate" or not stream


# -- openai --------------------------------------------------------------------------------------


@contextmanager
def openai_client(
    server: RunningServer,
    *,
    key: str = KEY,
    retries: int = 0,
    timeout_s: float = 60.0,
    hooks: dict[str, list[Callable[[Any], None]]] | None = None,
) -> Generator[OpenAI]:
    with (
        DefaultHttpxClient(trust_env=False, event_hooks=hooks or {}) as http,
        OpenAI(
            base_url=f"{server.url}/v1",
            api_key=key,
            max_retries=retries,
            timeout=timeout_s,
            http_client=http,
        ) as client,
    ):
        yield client


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def asynchronous(server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


def assert_valid(answer: BaseModel) -> None:
    """The client takes what comes; its own types say what should have come."""
    type(answer).model_validate(answer.to_dict() if hasattr(answer, "to_dict") else answer)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType] a method of openai's models
    assert not (answer.model_extra or {}).keys() - {"context_length"}


def test_openai_client_reads_every_answer_as_its_own_types(server: RunningServer) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    with openai_client(server) as client:
        chat = client.chat.completions.create(
            model=server.model, messages=hello, max_completion_tokens=5
        )
        text = client.completions.create(
            model=server.model,
            prompt="hello",
            max_tokens=5,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "openai-1"},
        )
        chunks = list(
            client.chat.completions.create(
                model=server.model,
                messages=hello,
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        models = client.models.list()
        for answer in (chat, text, *chunks, *models.data, client.models.retrieve(server.model)):
            assert_valid(answer)
    assert text.choices[0].text == fake_text("hello", 5)
    assert text.choices[0].finish_reason == "length"
    assert text._request_id == "openai-1"  # pyright: ignore[reportPrivateUsage] documented
    *head, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert chat.usage is not None
    assert last.usage.prompt_tokens == chat.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in head)
    assert head[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in head if c.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.anyio
async def test_asynchronous_openai_client_reads_streams_side_by_side(
    server: RunningServer, asynchronous: AsyncOpenAI
) -> None:
    async def ask(prompt: str) -> tuple[str, int]:
        text, tokens = "", 0
        stream = await asynchronous.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    prompts = ["one", "two", "three"]
    answers = await asyncio.gather(*map(ask, prompts))
    assert answers == [(fake_text(prompt, 9), 9) for prompt in prompts]


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "fields"),
    [
        (openai.NotFoundError, 404, "model_not_found", "model", {"model": "gpt-4"}),
        (openai.BadRequestError, 400, "invalid_request", "temperature", {"temperature": -1}),
        (openai.BadRequestError, 400, "unsupported_parameter", "n", {"n": 2}),
        (
            openai.BadRequestError,
            400,
            "context_length_exceeded",
            "prompt",
            {"prompt": "x" * 9000},
        ),
        (openai.APIStatusError, 413, "body_too_large", None, {"prompt": "x" * 9_000_000}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_openai_client_raises_the_exception_of_its_kind(
    server: RunningServer,
    *,
    error: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
    fields: dict[str, Any],
) -> None:
    asked: dict[str, Any] = {"model": server.model, "prompt": "x", **fields}
    with openai_client(server) as client, pytest.raises(error) as caught:
        client.completions.create(**asked)
    assert caught.value.status_code == status
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_openai_client_with_a_wrong_key_is_told_so(server: RunningServer) -> None:
    with (
        openai_client(server, key="wrong") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


@contextmanager
def all_places_taken(server: RunningServer) -> Generator[Callable[[], None]]:
    """Streams in every place; call what comes to end them."""
    with openai_client(server) as client, ExitStack() as stack:
        for _ in range(PLACES):
            stream = client.completions.create(
                model=server.model,
                prompt="long",
                max_tokens=6000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            stack.callback(stream.close)
            next(iter(stream))
        yield stack.close


def test_openai_client_without_retries_gets_a_rate_limit_error(server: RunningServer) -> None:
    with (
        all_places_taken(server),
        openai_client(server) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model=server.model, prompt="x", max_tokens=2)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_openai_client_tries_again_no_sooner_than_the_server_says(server: RunningServer) -> None:
    asked_s: list[float] = []
    answers: list[tuple[float, Any]] = []
    refused = threading.Event()

    def on_request(_request: object) -> None:
        asked_s.append(time.monotonic())

    def on_response(response: Any) -> None:
        answers.append((time.monotonic(), response))
        refused.set()

    hooks: dict[str, list[Callable[[Any], None]]] = {
        "request": [on_request],
        "response": [on_response],
    }
    with all_places_taken(server) as let_go:

        def free_places() -> None:
            refused.wait(60)
            let_go()

        helper = threading.Thread(target=free_places)
        helper.start()
        with openai_client(server, retries=10, hooks=hooks) as client:
            done = client.completions.create(
                model=server.model,
                prompt="hello",
                max_tokens=5,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        helper.join(60)
    assert done.choices[0].text == fake_text("hello", 5)
    *refusals, (_, last) = answers
    assert {response.status_code for _, response in refusals} == {429}
    assert last.status_code == 200
    for (answered_s, response), next_s in zip(refusals, asked_s[1:], strict=True):
        # Left to itself the client would have waited half a second at most.
        assert next_s - answered_s >= int(response.headers["retry-after"])


def test_openai_client_that_closes_a_stream_cancels_its_request(server: RunningServer) -> None:
    with (
        openai_client(server) as client,
        client.completions.create(
            model=server.model,
            prompt="long",
            max_tokens=6000,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "openai-closed"},
        ) as stream,
    ):
        pieces = iter(stream)
        next(pieces)
        next(pieces)
    assert cancelled_by_client_in(server, "openai-closed") == "decode.generate"


@pytest.mark.anyio
async def test_asynchronous_openai_client_whose_task_is_cancelled_cancels_its_request(
    server: RunningServer, asynchronous: AsyncOpenAI
) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        stream = await asynchronous.completions.create(
            model=server.model,
            prompt="long",
            max_tokens=6000,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "openai-task"},
        )
        async with stream:
            async for _chunk in stream:
                begun.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage = await asyncio.to_thread(cancelled_by_client_in, server, "openai-task")
    assert stage == "decode.generate"


def test_openai_client_that_times_out_cancels_its_request(server: RunningServer) -> None:
    with openai_client(server, timeout_s=2) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=server.model,
            prompt="long",
            max_tokens=6000,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "openai-timeout"},
        )
    cancelled_by_client_in(server, "openai-timeout")


def test_openai_client_raises_what_a_stream_ends_with(server: RunningServer) -> None:
    """Last in the module: a worker is killed."""
    pid = server.pid("decode-0")
    with openai_client(server) as client:
        stream = client.completions.create(
            model=server.model,
            prompt="long",
            max_tokens=6000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = iter(stream)
        next(pieces)
        server.send_signal("decode-0", 9)
        with pytest.raises(openai.APIError) as caught:
            list(pieces)
    assert caught.value.code == "worker_lost"
    assert caught.value.type == "server_error"
    server.wait_for_successor("decode-0", pid)
