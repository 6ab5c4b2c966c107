"""The public endpoints as a Starlette application.

Owns routes, authentication, what HTTP itself can get wrong, and the shape of every answer: errors
are `{"error": {…}}` for unknown paths and methods too, and each response names its request id
(`identity`). A generation goes on in `pipeline`.

Who may ask: with an API key set, `/v1/…` wants `Authorization: Bearer KEY`; `/health`, `/ready`,
`/metrics` and `/openapi.json` are for the operator's own tools and never ask.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdtrace.propagation import extract
from pdtrace.recorder import RequestContext
from server import faults
from server.errors import InvalidRequest, RequestError
from server.gateway.body import BodyTooSlow, check_headers, discard_body, read_body
from server.gateway.call import Call
from server.gateway.connections import Connections, End
from server.gateway.health import health_of
from server.gateway.identity import RequestIdentity, trace_headers
from server.gateway.openai_api import GenerationRequest, Operation, parse_request
from server.gateway.openai_bodies import error_body, json_bytes, model_body
from server.gateway.openapi import openapi_document
from server.gateway.pipeline import Gateway
from server.gateway.protocol import CONNECTIONS, RECEIVED_NS
from server.gateway.responder import error_headers

ROUTES: Mapping[str, Operation] = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/completions": Operation.TEXT_COMPLETION,
}
_IDENTITY = "request_identity"


def create_app(gateway: Gateway) -> ASGIApp:
    """The application of one gateway."""
    settings = gateway.settings

    async def list_models(request: Request) -> Response:
        _authenticate(request.headers, settings.api_key)
        return _json({"object": "list", "data": [_model(gateway)]})

    async def get_model(request: Request) -> Response:
        _authenticate(request.headers, settings.api_key)
        name = str(request.path_params["model"])
        if name != gateway.served_name:
            raise InvalidRequest(
                f"The model `{name[:200]}` does not exist: this server serves "
                f"`{gateway.served_name}`.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return _json(_model(gateway))

    async def health(_request: Request) -> Response:
        report = health_of(gateway)
        return _json(report.body(), 200 if report.healthy else 503)

    async def ready(_request: Request) -> Response:
        if gateway.is_ready():
            return _json({"status": "ready"})
        return _json({"status": "not_ready", "reason": gateway.unready_reason()}, 503)

    async def metrics(request: Request) -> Response:
        body, content_type = gateway.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    document = json_bytes(openapi_document(gateway))

    async def openapi(_request: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", get_model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        *(
            Route(path, _GenerationEndpoint(gateway, path, operation), methods=["POST"])
            for path, operation in ROUTES.items()
        ),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _http_error,
            RequestError: _request_error,
            Exception: _internal_error,
        },
    )
    app.router.redirect_slashes = False
    return _IdentityMiddleware(app)


@dataclass(frozen=True, slots=True)
class _IdentityMiddleware:
    """Gives every response its request id."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identity = RequestIdentity.of(scope["headers"])
        scope.setdefault("state", {})[_IDENTITY] = identity

        async def send_with_identity(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), *identity.response_headers()],
                }
            await send(message)

        await self.app(scope, receive, send_with_identity)


@dataclass(frozen=True, slots=True)
class _GenerationEndpoint:
    """POST to one of `ROUTES`."""

    gateway: Gateway
    path: str
    operation: Operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        identity: RequestIdentity = state[_IDENTITY]
        context = RequestContext.create(
            request_id=identity.request_id,
            parent=extract(scope["headers"]) if self.gateway.settings.caller_traces else None,
            mode=self.gateway.mode,
        )
        closing = _ClosingSend(send, receive)
        call = self.gateway.begin(
            self.operation,
            self.path,
            context=context,
            received_ns=state.get(RECEIVED_NS) or self.gateway.now.ns(),
            send=closing,
            headers=trace_headers(context),
        )
        await self.gateway.serve(call, partial(self._read, call, scope, receive, closing), receive)

    async def _read(
        self, call: Call, scope: Scope, receive: Receive, closing: _ClosingSend
    ) -> GenerationRequest:
        settings = self.gateway.settings
        headers = Headers(scope=scope)
        limit = settings.max_body_bytes
        closing.body_unread = True
        _authenticate(headers, settings.api_key)
        check_headers(headers, limit=limit)
        call.faults = _faults(headers, allowed=settings.allow_faults)
        try:
            body = await read_body(receive, limit=limit, timeout_s=settings.client_limits.body_s)
        except BodyTooSlow:
            table: Connections | None = scope["state"].get(CONNECTIONS)
            if table is not None:
                table.ended(End.BODY_TIMEOUT)
            raise
        closing.body_unread = False
        return parse_request(self.operation, body, served_name=self.gateway.served_name)


class _ClosingSend:
    """Sends a response; if the body was not read, says that the connection ends, and lets the
    client finish sending before it does.
    """

    def __init__(self, send: Send, receive: Receive) -> None:
        self.body_unread = False
        self._send = send
        self._receive = receive

    async def __call__(self, message: Message) -> None:
        if not self.body_unread:
            await self._send(message)
        elif message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            await self._send({**message, "headers": headers})
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            await discard_body(self._receive)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _authenticate(headers: Mapping[str, str], api_key: str | None) -> None:
    """Raises InvalidRequest (401). Compares in constant time."""
    if api_key is None:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not _same_key(given.strip(), api_key):
        raise InvalidRequest(
            "The API key is missing or wrong: send it as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            status=401,
        )


def _same_key(given: str, key: str) -> bool:
    """In a time that depends on neither: digests have one length, whatever they are made of."""
    digests = [hashlib.sha256(text).digest() for text in (given.encode("latin-1"), key.encode())]
    return hmac.compare_digest(*digests)


def _faults(headers: Mapping[str, str], *, allowed: bool) -> Mapping[str, int]:
    header = headers.get(faults.HEADER)
    if header is None:
        return {}
    if not allowed:
        # Ignoring it would let a test pass that injects nothing.
        raise InvalidRequest(
            f"{faults.HEADER} is refused: the server runs without --allow-faults.",
            param=faults.HEADER,
            code="faults_not_allowed",
        )
    return faults.parse_faults(header)


def _model(gateway: Gateway) -> dict[str, object]:
    return model_body(
        gateway.served_name,
        created_s=gateway.created_s,
        context_length=gateway.model.context_length,
    )


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json_bytes(body), status_code=status, headers=headers, media_type="application/json"
    )


async def _request_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return _json(error_body(error), error.http_status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router finds. Not by `request.url`: it trusts Host."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    found = InvalidRequest(
        f"{error.detail}: {request.method} {request.scope['path'][:200]}",
        code=codes.get(error.status_code, "invalid_request"),
        status=error.status_code,
    )
    return _json(error_body(found), error.status_code, error.headers)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    return _json(error_body(RequestError("The server failed to handle the request.")), 500)
