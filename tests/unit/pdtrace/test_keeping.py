"""Which requests an agent asks collectors to keep, and that all their spans say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pdtrace import semconv as a
from pdtrace.agent.command import Agent, AgentConfig, agent_config
from pdtrace.agent.keeping import (
    TOKEN_GAP_VARIABLE,
    TTFT_VARIABLE,
    Reason,
    limits_from,
    why_keep,
    with_reason,
)
from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.assembly.request_spans import assemble_by_rule, assemble_lazily
from pdtrace.export.delivery import TRACES_NAME
from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import decode_line
from pdtrace.otlp.protobuf import serialize_request
from pdtrace.slo import DEFAULT_SLO, Slo
from pdtrace.spans import Span, SpanBatch
from pdtrace.stages import Mark, Outcome
from pdtrace.testing import open_recorders, record_request
from tests.support.marked_requests import (
    DECODE,
    Moment,
    Values,
    aborted,
    completed,
    pd_moments,
    request_of,
    until,
)

GAP_S, TTFT_S = DEFAULT_SLO.token_gap_s, DEFAULT_SLO.ttft_s
LATE_MS = round(TTFT_S * 1e3)


def with_values(moments: Sequence[Moment], wanted: Mark, values: Values) -> list[Moment]:
    return [
        (role, mark, at_us, {**own, **values} if mark is wanted else own)
        for role, mark, at_us, own in moments
    ]


def later(moments: Sequence[Moment], by_us: int) -> list[Moment]:
    """Everything after the first mark."""
    return [(role, mark, at and at + by_us, values) for role, mark, at, values in moments]


def gap(seconds: float) -> list[Moment]:
    return with_values(
        pd_moments(), Mark.COMPLETED, {a.CONTENT_GAPS: 15, a.LONGEST_GAP_SECONDS: seconds}
    )


def lost() -> Sequence[Span]:
    return assemble_by_rule(request_of(until(pd_moments(), 8_000), lost={DECODE: 9_000}))


CASES: Mapping[str, tuple[Sequence[Moment], Reason | None]] = {
    "healthy": (pd_moments(), None),
    "gap-at-the-limit": (gap(GAP_S), None),
    "gap-above": (gap(GAP_S + 0.001), Reason.SLO_MISSED),
    "late-first-token": (later(pd_moments(), LATE_MS * 1_000), Reason.SLO_MISSED),
    "late-in-one-piece": (later(pd_moments(stream=False), LATE_MS * 1_000), None),
    "failed": (
        [
            *until(pd_moments(), 2_500),
            aborted(DECODE, 2_600, "failed", "kv_timeout", "decode-0"),
            completed(3_000, "failed", "kv_timeout", "decode-0", 500),
        ],
        Reason.NOT_COMPLETED,
    ),
    "cancelled": (
        [*until(pd_moments(), 9_000), completed(9_500, "cancelled", "client", "client", None)],
        Reason.NOT_COMPLETED,
    ),
    "rejected": (
        [*until(pd_moments(), 450), completed(460, "rejected", "queue_full", "gateway", 429)],
        None,
    ),
    "no-decode-marks": (
        [moment for moment in pd_moments() if moment[1] is not Mark.KV_NOTICED],
        Reason.INCOMPLETE,
    ),
    "impossible": (
        [m if m[1] is not Mark.TOKENIZED else (m[0], m[1], 510, m[3]) for m in pd_moments()],
        Reason.INCOMPLETE,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_request_is_kept_for_its_reason(name: str) -> None:
    moments, reason = CASES[name]
    assert why_keep(assemble_by_rule(request_of(moments)), {}) == reason


def test_second_attempt_is_a_reason_though_the_request_completed() -> None:
    request = request_of(pd_moments(), attempt=2)
    assert why_keep(assemble_by_rule(request), {}) is Reason.RETRIED


def test_lost_worker_is_a_reason() -> None:
    assert why_keep(lost(), {}) is Reason.NOT_COMPLETED


def test_verdict_is_a_reason_but_what_went_wrong_comes_first() -> None:
    stalled = {a.STALL_STAGE.key: "decode.reserve"}
    assert why_keep(assemble_by_rule(request_of(pd_moments())), stalled) is Reason.SLOW
    assert why_keep(lost(), stalled) is Reason.NOT_COMPLETED


def test_limits_are_those_that_are_set() -> None:
    spans = assemble_by_rule(request_of(gap(0.5)))
    assert why_keep(spans, {}, Slo(token_gap_s=0.5)) is None
    assert why_keep(spans, {}, Slo(token_gap_s=0.5, ttft_s=0.001)) is Reason.SLO_MISSED


def in_order() -> OrderlySpans:
    """What a shape that came before is built by."""
    paused = {Mark.TOKEN_GAP, Mark.PREEMPTED, Mark.RESUMED}
    request = request_of([moment for moment in gap(GAP_S * 2) if moment[1] not in paused])
    assemble_lazily(request)
    spans = assemble_lazily(request)
    assert isinstance(spans, OrderlySpans)
    return spans


@pytest.mark.parametrize("looked_at", [False, True])
def test_every_span_says_why_whether_made_or_not(looked_at: bool) -> None:
    expected = with_reason(list(in_order()), Reason.SLO_MISSED)
    spans = in_order()
    assert why_keep(spans, {}) is Reason.SLO_MISSED
    if looked_at:
        assert len(list(spans)) == len(expected)
    marked = with_reason(spans, Reason.SLO_MISSED)
    sent = serialize_request(SpanBatch([marked]))  # before a span is made, where none is
    assert {span.attributes.get(a.KEEP.key) for span in marked} == {"slo-missed"}
    assert [(s.span_id, dict(s.attributes)) for s in marked] == [
        (s.span_id, dict(s.attributes)) for s in expected
    ]
    assert sent.count(b"slo-missed") == len(expected)


def test_agent_asks_for_the_whole_of_what_went_wrong_and_for_nothing_else(tmp_path: Path) -> None:
    """Also with a verdict that fails."""

    def broken(spans: Sequence[Span]) -> Mapping[str, str]:
        raise ZeroDivisionError

    recorders = open_recorders(tmp_path / "rings")
    for number in range(3):
        record_request(recorders, request_id=f"healthy-{number}")
    record_request(recorders, request_id="late", stage_ms={"decode.reserve": LATE_MS})
    record_request(
        recorders, request_id="failed", outcome=Outcome.FAILED, stop_in="transfer", reason="broken"
    )
    for recorder in recorders.values():
        recorder.close()
    agent = Agent(tmp_path / "rings", out=tmp_path, judge=broken, config=AgentConfig(grace_s=0.1))
    agent.poll()
    agent.close()
    asked = {
        str(spans[0].attributes[a.REQUEST_ID.key]): {s.attributes.get(a.KEEP.key) for s in spans}
        for spans in map(decode_line, lines_since(tmp_path / TRACES_NAME))
    }
    assert asked == {
        **{f"healthy-{number}": {None} for number in range(3)},
        "late": {"slo-missed"},
        "failed": {"not-completed"},
    }


def test_environment_sets_the_limits_of_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TTFT_VARIABLE, "2")
    monkeypatch.delenv(TOKEN_GAP_VARIABLE, raising=False)
    slo = agent_config().slo
    assert (slo.ttft_s, slo.token_gap_s) == (2.0, GAP_S)


@pytest.mark.parametrize("text", ["fast", "-1", "0", "nan", "inf"])
def test_limit_that_is_none_is_said_and_left_out(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    slo = limits_from({TTFT_VARIABLE: text, TOKEN_GAP_VARIABLE: "0.5"})
    assert (slo.ttft_s, slo.token_gap_s) == (TTFT_S, 0.5)
    assert f"PD_SLO_TTFT_S={text!r} is left out" in caplog.text
