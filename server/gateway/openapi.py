"""GET /openapi.json: the API as it is.

Owns the description; request schemas come from the structs that check requests (`openai_api`), so
they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from server.gateway.openai_api import (
    BODIES,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    ChatBody,
    CompletionBody,
    StreamOptions,
)

if TYPE_CHECKING:
    from server.gateway.pipeline import Gateway

_REF = "#/components/schemas/{name}"
_GENERATION_ERRORS: Mapping[int, str] = {
    400: "The request is malformed, asks for what is not supported, or exceeds the context.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON in UTF-8.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The gateway failed.",
    502: "A worker failed or vanished, or the KV did not arrive.",
    503: "No worker is ready, or the server is shutting down.",
    504: "A deadline passed.",
}


def openapi_document(gateway: Gateway) -> dict[str, Any]:
    """The document for this gateway: it names the served model and whether a key is needed."""
    secured = gateway.settings.api_key is not None
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "pdtrace server",
            "version": "1",
            "description": "OpenAI-compatible generation over prefill/decode disaggregation.",
        },
        "paths": {
            "/v1/models": {"get": _get("List the served model.", "ModelList", secured=secured)},
            "/v1/models/{model}": {
                "get": {
                    **_get("Describe the served model.", "Model", secured=secured),
                    "parameters": [
                        {
                            "name": "model",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string"},
                            "example": gateway.served_name,
                        }
                    ],
                }
            },
            "/v1/chat/completions": {
                "post": _post("Chat completion.", ChatBody, "ChatCompletion", secured=secured)
            },
            "/v1/completions": {
                "post": _post("Text completion.", CompletionBody, "Completion", secured=secured)
            },
            "/health": {"get": _probe("Whether every process makes progress.", "Health")},
            "/ready": {"get": _probe("Whether a generation is possible.", "Ready")},
            "/metrics": {"get": _text("Prometheus or OpenMetrics exposition.")},
            "/openapi.json": {"get": _get("This document.", None, secured=False)},
        },
        "components": {
            "schemas": _schemas(gateway.served_name, vocab_size=gateway.model.vocab_size)
        },
    }
    document["paths"]["/v1/models/{model}"]["get"]["responses"]["404"] = _error(
        "The model is not served here."
    )
    if secured:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


_STREAM_OPTIONS_ONLY_WITH_STREAM: Mapping[str, Any] = {
    "anyOf": [
        {"properties": {"stream": {"const": True}}, "required": ["stream"]},
        {"properties": {"stream_options": {"type": "null"}}},
    ]
}
_ONE_LIMIT: Mapping[str, Any] = {
    "anyOf": [
        {"properties": {name: {"type": "null"}}} for name in ("max_tokens", "max_completion_tokens")
    ]
}


def _schemas(served_name: str, *, vocab_size: int) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(list(BODIES.values()), ref_template=_REF)
    for operation, body in BODIES.items():
        properties = schemas[body.__name__]["properties"]
        properties["model"] = {"type": "string", "const": served_name}
        for name, harmless in UNSUPPORTED[operation].items():
            properties[name] = {
                "enum": list(harmless),
                "description": "Not supported: only values that change nothing are accepted.",
            }
        for name in sorted(WITHOUT_EFFECT):
            properties[name] = {"description": "Accepted; the answer is the same."}
    for name in (*(body.__name__ for body in BODIES.values()), StreamOptions.__name__):
        schemas[name]["additionalProperties"] = {"type": "null"}
    for body in BODIES.values():
        schemas[body.__name__]["allOf"] = [_STREAM_OPTIONS_ONLY_WITH_STREAM]
    schemas[ChatBody.__name__]["allOf"].append(_ONE_LIMIT)
    schemas[CompletionBody.__name__]["properties"]["prompt"] = _prompt_schema(vocab_size)
    return {**schemas, **_RESPONSE_SCHEMAS}


def _prompt_schema(vocab_size: int) -> dict[str, Any]:
    """One prompt, alone or as the only one of a list: text or token ids."""
    text = {"type": "string", "minLength": 1}
    token_ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
        "minItems": 1,
    }
    alone: list[dict[str, Any]] = [text, token_ids]
    listed = [{"type": "array", "items": one, "minItems": 1, "maxItems": 1} for one in alone]
    return {"anyOf": [*alone, *listed]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": _json_content(_ref("Error"))}


def _security(*, secured: bool) -> dict[str, Any]:
    return {"security": [{"key": []}]} if secured else {}


def _get(summary: str, schema: str | None, *, secured: bool) -> dict[str, Any]:
    content = _json_content({"type": "object"} if schema is None else _ref(schema))
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    if secured:
        responses["401"] = _error("The API key is missing or wrong.")
    return {"summary": summary, "responses": responses, **_security(secured=secured)}


def _probe(summary: str, schema: str) -> dict[str, Any]:
    content = _json_content(_ref(schema))
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "It is.", "content": content},
            "503": {"description": "It is not; the body says why.", "content": content},
        },
    }


def _text(summary: str) -> dict[str, Any]:
    content = {
        "text/plain": {"schema": {"type": "string"}},
        "application/openmetrics-text": {"schema": {"type": "string"}},
    }
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}},
    }


def _post(
    summary: str,
    body: type[ChatBody] | type[CompletionBody],
    response: str,
    *,
    secured: bool,
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {
            "description": "The answer: one JSON body, or server-sent events with stream=true. An "
            "error after the first event is an event with an `error` field, then [DONE].",
            "content": {
                **_json_content(_ref(response)),
                "text/event-stream": {},
            },
        },
        **{str(status): _error(text) for status, text in _GENERATION_ERRORS.items()},
    }
    if secured:
        responses["401"] = _error("The API key is missing or wrong.")
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json_content(_ref(body.__name__))},
        "responses": responses,
        **_security(secured=secured),
    }


def _object(properties: Mapping[str, Any], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
    }


def _const(value: str) -> dict[str, str]:
    return {"type": "string", "const": value}


_STRING = {"type": "string"}
_NULLABLE_STRING = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_FINISH_REASON = {"enum": ["stop", "length"]}
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)


def _answer(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "id": _STRING,
            "object": _const(kind),
            "created": _COUNT,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": {
                "type": "array",
                "items": _object(
                    {
                        "index": _COUNT,
                        **choice,
                        "logprobs": {"type": "null"},
                        "finish_reason": _FINISH_REASON,
                    }
                ),
                "minItems": 1,
                "maxItems": 1,
            },
            "usage": _USAGE,
        }
    )


_MODEL = _object(
    {
        "id": _STRING,
        "object": _const("model"),
        "created": _COUNT,
        "owned_by": _STRING,
        "context_length": {"type": "integer", "minimum": 1},
    }
)
_RESPONSE_SCHEMAS: Mapping[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": _NULLABLE_STRING,
                    "code": _STRING,
                }
            )
        }
    ),
    "Model": _MODEL,
    "ModelList": _object(
        {"object": _const("list"), "data": {"type": "array", "items": _ref("Model")}}
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        {
            "message": _object(
                {"role": _const("assistant"), "content": _STRING, "refusal": {"type": "null"}}
            )
        },
    ),
    "Completion": _answer("text_completion", {"text": _STRING}),
    "Health": _object(
        {
            "status": {"enum": ["ok", "unhealthy"]},
            "processes": {
                "type": "array",
                "items": _object(
                    {
                        "instance": _STRING,
                        "role": _STRING,
                        "state": _STRING,
                        "last_progress_age_s": {"type": ["number", "null"]},
                        "reason": _NULLABLE_STRING,
                        "recorded": {"type": ["boolean", "null"]},
                    }
                ),
            },
            "refused_pairs": {
                "type": "array",
                "items": _object({"prefill": _STRING, "decode": _STRING, "reason": _STRING}),
            },
        }
    ),
    "Ready": _object(
        {"status": {"enum": ["ready", "not_ready"]}, "reason": _STRING}, optional=("reason",)
    ),
}
