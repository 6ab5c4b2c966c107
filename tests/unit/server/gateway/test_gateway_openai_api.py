"""Request bodies: what is accepted, what is refused and how it is named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import InvalidRequest
from server.gateway.openai_api import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    GenerationRequest,
    Operation,
    parse_request,
)

TEXT = Operation.TEXT_COMPLETION


def completion(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return parse_request(TEXT, json.dumps(body).encode(), served_name="m")


def chat(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_request(Operation.CHAT, json.dumps(body).encode(), served_name="m")


def refused(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return caught.value


def test_defaults_are_openais() -> None:
    request = completion()
    assert request.sampling.temperature == 1.0
    assert request.sampling.top_p == 1.0
    assert request.sampling.top_k == 0
    assert request.max_tokens is None
    assert request.stop == ()
    assert not request.stream
    assert not request.ignore_eos
    assert not request.include_usage


def test_absent_seeds_differ_and_given_ones_are_kept() -> None:
    assert completion().sampling.seed != completion().sampling.seed
    assert completion(seed=7).sampling.seed == 7
    assert completion(seed=-1).sampling.seed >= 0


def test_null_means_absent() -> None:
    nothing = dict.fromkeys(
        ("stream", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs")
    )
    assert completion(**nothing).max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", "hi"),
        (["hi"], "hi"),
        ([1, 2], (1, 2)),
        ([[1, 2]], (1, 2)),
    ],
)
def test_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, 3, [1.5], [-1], {"a": 1}])
def test_prompt_that_is_empty_or_of_a_wrong_type_is_refused(prompt: Any) -> None:
    error = refused(completion, prompt=prompt)
    assert error.http_status == 400
    assert error.param is not None
    assert error.param.startswith("prompt")


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], ["a", [1]]])
def test_several_prompts_are_not_supported(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).code == "unsupported_parameter"


def test_stop_is_one_string_or_up_to_four() -> None:
    assert completion(stop="a").stop == ("a",)
    assert completion(stop=["b", "a", "b"]).stop == ("b", "a")
    assert completion(stop=[]).stop == ()
    for bad in ("", [""], ["a"] * 5, 3, "x" * 257):
        assert refused(completion, stop=bad).http_status == 400


def test_top_p_of_zero_is_greedy_and_top_k_of_minus_one_is_off() -> None:
    sampling = completion(top_p=0, top_k=-1, temperature=1).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_p", -1),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("seed", 2**70),
        ("seed", "x"),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", -1),
        ("n", "1"),
        ("n", True),
        ("model", ""),
        ("model", 3),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_bad_value_is_a_400_that_names_the_field(field: str, value: Any) -> None:
    for make in (completion, chat):
        error = refused(make, **{field: value})
        assert error.http_status == 400
        assert error.code == "invalid_request"
        assert error.param == field


def test_unknown_model_is_a_404() -> None:
    error = refused(completion, model="gpt-4")
    assert (error.http_status, error.code, error.param) == (404, "model_not_found", "model")


def test_missing_fields_are_named() -> None:
    for body, param in ((b'{"prompt": "a"}', "model"), (b'{"model": "m"}', "prompt")):
        with pytest.raises(InvalidRequest) as caught:
            parse_request(TEXT, body, served_name="m")
        assert caught.value.param == param


def test_both_names_of_max_tokens_work_but_not_together() -> None:
    assert chat(max_tokens=3).max_tokens == chat(max_completion_tokens=3).max_tokens == 3
    assert refused(chat, max_tokens=3, max_completion_tokens=3).http_status == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
    ],
)
def test_bad_messages_are_refused_by_place(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


def test_usage_needs_a_stream() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={}).include_usage


@pytest.mark.parametrize("operation", list(Operation))
def test_unsupported_parameter_is_refused_unless_it_changes_nothing(operation: Operation) -> None:
    make = chat if operation is Operation.CHAT else completion
    for name, harmless in UNSUPPORTED[operation].items():
        for value in harmless:
            make(**{name: value})
        error = refused(make, **{name: 3})
        assert (error.code, error.param) == ("unsupported_parameter", name)


def test_true_is_not_one() -> None:
    assert refused(completion, best_of=True).code == "unsupported_parameter"


@pytest.mark.parametrize("make", [completion, chat])
def test_unknown_parameter_is_refused_by_name_unless_it_is_null(make: Any) -> None:
    error = refused(make, frobnicate=[1])
    assert (error.http_status, error.code) == (400, "unsupported_parameter")
    assert error.param == "frobnicate"
    assert len(str(refused(make, **{"x" * 10_000: 1}))) < 300
    assert make(frobnicate=None).max_tokens is None
    options = {"include_usage": True, "frobnicate": 1}
    error = refused(make, stream=True, stream_options=options)
    assert error.param == "stream_options.frobnicate"
    assert make(stream=True, stream_options={**options, "frobnicate": None}).include_usage


@pytest.mark.parametrize("make", [completion, chat])
def test_parameter_with_which_the_answer_is_the_same_is_accepted(make: Any) -> None:
    assert make(**dict.fromkeys(WITHOUT_EFFECT, "x")).max_tokens is None
    assert make(metadata={"a": 1}, store=False).max_tokens is None


def test_unknown_fields_of_a_message_are_ignored() -> None:
    """An answer as the API gave it, sent back as a part of the history."""
    answer = {"role": "assistant", "content": "ho", "refusal": None, "annotations": []}
    request = chat(messages=[{"role": "user", "content": "hi"}, answer])
    assert len(request.prompt) == 2


def test_usage_so_far_is_asked_for_on_its_own() -> None:
    request = completion(stream=True, stream_options={"continuous_usage_stats": True})
    assert (request.usage_so_far, request.include_usage) == (True, False)
    assert not completion(stream=True, stream_options={"include_usage": True}).usage_so_far


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": NaN}',
        b'{"temperature": 1e999}',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(TEXT, body, served_name="m")
    assert caught.value.http_status == 400


DEEP = "[" * 500 + "]" * 500
"""Valid JSON, which is decoded, and too deep for who follows it level by level in Python."""


def test_value_that_is_nested_deeply_is_a_value_like_any_other() -> None:
    body = '{"model": "m", "prompt": "hi", "%s": %s}'
    assert parse_request(TEXT, (body % ("metadata", DEEP)).encode(), served_name="m").prompt == "hi"
    for name in ("prompt", "stop", "logit_bias", "unknown"):
        with pytest.raises(InvalidRequest) as caught:
            parse_request(TEXT, (body % (name, DEEP)).encode(), served_name="m")
        assert str(caught.value.param).startswith(name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["model", "prompt", "messages", "stop", "n", "temperature", "max_tokens", "tools", "echo"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values), st.sampled_from(list(Operation)))
@settings(max_examples=300, deadline=None)
def test_any_json_object_is_parsed_or_refused(body: dict[str, Any], operation: Operation) -> None:
    try:
        data = msgspec.json.encode(body)
    except (UnicodeEncodeError, msgspec.MsgspecError):
        return
    try:
        parse_request(operation, data, served_name="m")
    except InvalidRequest as error:
        assert 400 <= error.http_status < 500


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(TEXT, data, served_name="m")
