from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers as StarletteHeaders

from pdtrace.propagation import (
    RemoteParent,
    RequestContext,
    extract,
    format_traceparent,
    inject,
    parse_traceparent,
    parse_tracestate,
)
from pdtrace.stages import Mode
from pdtrace.testing import SequentialIds

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"

_HEX = "0123456789abcdef"
_trace_ids = st.text(_HEX, min_size=32, max_size=32).filter(lambda text: text.strip("0"))
_span_ids = st.text(_HEX, min_size=16, max_size=16).filter(lambda text: text.strip("0"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "empty"),
        (f"00-{'0' * 32}-{SPAN}-01", "all-zero trace id"),
        (f"00-{TRACE}-{'0' * 16}-01", "all-zero span id"),
        (f"00-{TRACE[:-1]}-{SPAN}-01", "31 hex digits"),
        (f"00-{TRACE}0-{SPAN}-01", "33 hex digits"),
        (f"00-{TRACE}-{SPAN[:-1]}-01", "15 hex digits"),
        (f"00-{TRACE[:-1]}g-{SPAN}-01", "not hex"),
        (f"00-{TRACE.upper()}-{SPAN}-01", "upper case"),
        (f"00_{TRACE}_{SPAN}_01", "wrong separators"),
        (f"00-{TRACE}-{SPAN}", "no flags"),
        (f"00-{TRACE}-{SPAN}-1", "one-digit flags"),
        (f"00-{TRACE}-{SPAN}-0g", "flags not hex"),
        (f"ff-{TRACE}-{SPAN}-01", "forbidden version"),
        (f"0-{TRACE}-{SPAN}-01", "short version"),
        (f"00-{TRACE}-{SPAN}-01-extra", "version 00 with more fields"),
        (f"01-{TRACE}-{SPAN}-01extra", "later version without separator"),
        (f"{VALID}\n", "trailing newline"),
        (f"{VALID},{VALID}", "two values in one"),
        ("００-" + VALID[3:], "full-width digits"),
    ],
)
def test_bad_traceparent_begins_a_new_trace_and_drops_tracestate(value: str, why: str):
    assert parse_traceparent(value) is None, why
    assert extract({"traceparent": value, "tracestate": "a=1"}) is None, why


@pytest.mark.parametrize(
    ("flags", "sampled"),
    [("00", False), ("01", True), ("02", False), ("03", True), ("fe", False), ("ff", True)],
)
def test_only_bit_0_of_the_flags_decides_sampling(flags: str, sampled: bool):
    parent = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert parent == RemoteParent(TRACE, SPAN, sampled)


@pytest.mark.parametrize("value", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-ever"])
def test_later_versions_are_read_as_version_00(value: str):
    assert parse_traceparent(value) == RemoteParent(TRACE, SPAN, sampled=True)


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT", "TraceParent"])
def test_header_names_match_in_any_case(name: str):
    expected = RemoteParent(TRACE, SPAN, sampled=True, tracestate="vendor=1")
    assert extract({name: VALID, "TraceState": "vendor=1"}) == expected
    assert extract([(name, VALID), ("TRACESTATE", "vendor=1")]) == expected
    assert extract([(name.encode(), VALID.encode()), (b"tracestate", b"vendor=1")]) == expected
    assert extract(StarletteHeaders({name: f" {VALID}\t", "tracestate": "vendor=1"})) == expected


def test_no_headers_or_tracestate_alone_begin_a_new_trace():
    assert extract({}) is None
    assert extract({"tracestate": "vendor=1"}) is None


def test_two_traceparent_headers_are_not_trusted():
    assert extract([("traceparent", VALID), ("Traceparent", VALID)]) is None


def test_several_tracestate_headers_are_one_list():
    parent = extract([("traceparent", VALID), ("tracestate", "a=1,b=2"), ("tracestate", "c=3")])
    assert parent is not None
    assert parent.tracestate == "a=1,b=2,c=3"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ""),
        ("a=1", "a=1"),
        (" a=1 ,\tb=2,, ", "a=1,b=2"),
        ("tenant@vendor=x y", "tenant@vendor=x y"),
        ("0a-_*/=~!", "0a-_*/=~!"),
        ("a=1,a=2", ""),  # repeated key
        ("A=1", ""),  # upper-case key
        ("a=", ""),
        ("a", ""),
        ("a=b=c", ""),
        ("a=\u00e9", ""),
        ("a" * 257 + "=1", ""),
        ("a=" + "v" * 257, ""),
        (",".join(f"k{i}=v" for i in range(32)), ",".join(f"k{i}=v" for i in range(32))),
        (",".join(f"k{i}=v" for i in range(33)), ""),
    ],
)
def test_tracestate_grammar(value: str, expected: str):
    assert parse_tracestate(value) == expected


def test_bad_tracestate_is_dropped_without_its_traceparent():
    assert extract({"traceparent": VALID, "tracestate": "not valid"}) == RemoteParent(
        TRACE, SPAN, sampled=True
    )


def test_long_tracestate_loses_long_members_first_then_the_oldest():
    long = "long=" + "x" * 200
    kept = [f"k{i}=" + "v" * 40 for i in range(9)]
    assert parse_tracestate(",".join([long, *kept])) == ",".join(kept)
    many = [f"k{i}=" + "v" * 100 for i in range(9)]
    assert parse_tracestate(",".join(many)) == ",".join(many[:4])


@given(value=st.text())
def test_any_text_is_parsed_or_refused(value: str):
    parent = extract({"traceparent": value, "tracestate": value})
    assert parent is None
    assert len(parse_tracestate(value)) <= 512


@given(trace_id=_trace_ids, span_id=_span_ids, sampled=st.booleans())
def test_traceparent_round_trips(trace_id: str, span_id: str, sampled: bool):
    header = format_traceparent(trace_id, span_id, sampled=sampled)
    assert parse_traceparent(header) == RemoteParent(trace_id, span_id, sampled)


def test_new_context_begins_a_sampled_trace():
    context = RequestContext.create(ids=SequentialIds())
    assert context == RequestContext(
        request_id="req-1",
        trace_id=f"{1:032x}",
        root_span_id=f"{1:016x}",
        attempt_span_id=f"{2:016x}",
        client_parent_span_id=None,
        sampled=True,
        tracestate="",
        attempt=1,
        handoff_id="ho-1",
        mode=Mode.PD,
    )


@pytest.mark.parametrize("flags", ["00", "01"])
def test_context_continues_the_callers_trace_and_decision(flags: str):
    parent = extract({"Traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "vendor=1"})
    context = RequestContext.create(request_id="r", parent=parent, mode=Mode.PD_EARLY)
    assert (context.trace_id, context.client_parent_span_id) == (TRACE, SPAN)
    assert context.sampled is (flags == "01")
    assert context.root_span_id != SPAN
    assert inject(context) == {
        "traceparent": f"00-{TRACE}-{context.attempt_span_id}-{flags}",
        "tracestate": "vendor=1",
    }


def test_next_attempt_keeps_the_request_and_gets_its_own_ids():
    first = RequestContext.create(request_id="r", mode=Mode.PD_EARLY)
    second = first.next_attempt()
    assert second.attempt == 2
    kept = ("request_id", "trace_id", "root_span_id", "client_parent_span_id", "mode")
    assert all(getattr(first, name) == getattr(second, name) for name in kept)
    assert second.attempt_span_id != first.attempt_span_id
    assert second.handoff_id != first.handoff_id


class _Message(msgspec.Struct, frozen=True, tag="dispatch"):
    context: RequestContext
    token_ids: list[int]


@given(request_id=st.text(st.characters(exclude_categories=["Cs"])), attempt=st.integers(1, 9))
def test_context_embeds_in_wire_messages(request_id: str, attempt: int):
    context = msgspec.structs.replace(
        RequestContext.create(request_id=request_id), attempt=attempt, tracestate="a=1"
    )
    message = _Message(context, [1, 2])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=_Message) == message
    assert msgspec.json.decode(msgspec.json.encode(message), type=_Message) == message


def test_context_reads_messages_of_older_and_newer_versions():
    context = RequestContext.create(request_id="r")
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(context))
    older = msgspec.msgpack.encode(fields[:4])
    newer = msgspec.msgpack.encode([*fields, "a field to come"])
    assert msgspec.msgpack.decode(newer, type=RequestContext) == context
    assert msgspec.msgpack.decode(older, type=RequestContext).request_id == "r"
