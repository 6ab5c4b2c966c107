"""Reported faults of others: aborts without a trace, attributes that take the batch with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from pdtrace import semconv as a
from pdtrace.analysis.timeline import build_timeline
from pdtrace.assembly.evidence import BEGIN_MARKS
from pdtrace.assembly.request_spans import assemble
from pdtrace.otlp.json_lines import decode_line, encode_line
from pdtrace.otlp.protobuf import encode_request
from pdtrace.ring.records import MarkRecord, Value
from pdtrace.spans import Span, StatusCode, Trace
from pdtrace.stages import ATTEMPT_SPAN, CHAINS, MARKS, ROOT_SPAN, Mark, Mode, Role
from tests.support.marked_requests import (
    GATEWAY,
    START_NS,
    TRACE_ID,
    US,
    Moment,
    aborted,
    colocated_moments,
    completed,
    pd_moments,
    request_of,
    until,
)

HEALTHY = {
    Mode.PD: pd_moments(),
    Mode.PD_EARLY: pd_moments(Mode.PD_EARLY),
    Mode.COLOCATED: colocated_moments(),
}
EVERY_STAGE = [(mode, stage.name) for mode, chain in CHAINS.items() for stage in chain]


def middle_of(mode: Mode, name: str) -> int:
    """An instant at which `name` is the first in the chain that is open, µs."""
    times = {mark: at_us for _, mark, at_us, _ in reversed(HEALTHY[mode])}

    def interval(stage_name: str) -> tuple[int, int]:
        stage = next(stage for stage in CHAINS[mode] if stage.name == stage_name)
        begin = next(times[m] for m in BEGIN_MARKS[mode, stage_name] if m in times)
        return begin, times[stage.end]

    begin, end = interval(name)
    if name in ("decode.generate", "transfer"):  # the first token may be on its way beside it
        begin = max(begin, interval("hop.token")[1]) if end > interval("hop.token")[1] else begin
    return (begin + end) // 2 + 1


def cancelled_in(mode: Mode, name: str) -> tuple[int, list[Moment]]:
    """The client goes; the gateway gives up, then each process that has the request."""
    at_us = middle_of(mode, name)
    before = until(HEALTHY[mode], at_us)
    roles: list[Role] = sorted({role for role, *_ in before} - {GATEWAY})
    told = [aborted(role, at_us + 20, "cancelled", "client_gone", "client") for role in roles]
    return at_us, [
        *before,
        aborted(GATEWAY, at_us, "cancelled", "client_gone", "client"),
        *told,
        completed(at_us + 60, "cancelled", "client_gone", "client", 499),
    ]


@pytest.mark.case("CAN-10")
@pytest.mark.parametrize(("mode", "name"), EVERY_STAGE)
def test_aborted_request_has_a_whole_trace_up_to_the_stage_it_was_in(mode: Mode, name: str) -> None:
    at_us, moments = cancelled_in(mode, name)
    spans = assemble(request_of(moments))
    chain = [stage.name for stage in CHAINS[mode]]
    [root] = [span for span in spans if span.attributes.get(a.SPAN.key) == ROOT_SPAN]
    [stage] = [span for span in spans if span.name == name]
    assert root.attributes[a.OUTCOME_STAGE.key] == name
    for span in (root, stage):
        assert span.attributes[a.OUTCOME.key] == "cancelled"
        assert span.attributes[a.OUTCOME_BY.key] == "client"
    begun = {
        s.name
        for s in CHAINS[mode]
        if any(m[1] in BEGIN_MARKS[mode, s.name] for m in until(HEALTHY[mode], at_us))
    }
    assert {s.name for s in spans if s.name in chain} - {"gateway.finish"} == begun - {
        "gateway.finish"
    }
    ids = {span.span_id for span in spans}
    assert all(span.parent_id in ids for span in spans if span is not root)
    if chain.index(name) >= 2:
        assert ATTEMPT_SPAN in {span.name for span in spans}
    assert {span.status for span in spans} == {StatusCode.UNSET}
    assert a.INCOMPLETE.key not in root.attributes
    timeline = build_timeline(Trace(trace_id=TRACE_ID, spans=spans))
    assert (timeline.violations, timeline.outcome_stage) == ((), name)
    assert timeline.unexplained_ns == 0


@pytest.mark.case("CAN-10")
@pytest.mark.parametrize(("mode", "name"), EVERY_STAGE)
def test_abort_is_shown_while_the_processes_still_let_go(mode: Mode, name: str) -> None:
    _, moments = cancelled_in(mode, name)
    request = request_of(moments[:-1])  # the answer is not out yet
    request.open_at_ns = START_NS + 25_000 * US
    [root] = [s for s in assemble(request) if s.attributes.get(a.SPAN.key) == ROOT_SPAN]
    assert root.attributes[a.OPEN.key] is True


ODD: list[Any] = [
    None,
    Path("/dev/null"),
    b"\x00",
    {"a": 1},
    [Path("x")],
    object(),
    float("nan"),
    1j,
]


@pytest.mark.case("EXP-06")
@pytest.mark.parametrize("odd", ODD, ids=[type(odd).__name__ for odd in ODD])
@pytest.mark.parametrize("mark", [mark for mark in Mark if MARKS[mark].attrs])
def test_attribute_of_an_odd_type_is_dropped_and_every_span_arrives(mark: Mark, odd: Any) -> None:
    sound = assemble(request_of(pd_moments()))
    request = request_of(pd_moments())
    for leg in request.legs:
        leg.marks = [
            MarkRecord(mark=m.mark, key=1, attempt=1, t_ns=m.t_ns, values=_odd_values(odd, m))
            if m.mark is mark
            else m
            for m in leg.marks
        ]
    spans = assemble(request)
    assert _names(spans) >= _names(sound) - {"hop.token"}
    line = encode_line(spans)
    json.loads(line)
    assert sorted(span.span_id for span in decode_line(line)) == sorted(s.span_id for s in spans)
    message = encode_request(spans)
    sent = [
        span
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(sent) == len(spans)
    kept = {pair.key for span in sent for pair in span.attributes}
    others = {
        key
        for span in sound
        for key in span.attributes
        if key not in {attr.key for attr in MARKS[mark].attrs}
    }
    assert kept >= others


def _names(spans: list[Span]) -> set[str]:
    return {span.name for span in spans if a.STAGE.key in span.attributes}


def _odd_values(odd: Any, record: MarkRecord) -> tuple[Value, ...]:
    return cast("tuple[Value, ...]", (odd,) * len(record.values))
