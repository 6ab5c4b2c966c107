"""When a request is stuck, that it is said once, and how long stages usually take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pdtrace import semconv as a
from pdtrace.inflight import InFlight, WaitNow
from pdtrace.live.stuck import (
    RollingStageTimes,
    StuckPolicy,
    StuckReport,
    StuckWatch,
    parse_deadlines,
    rest_of,
)
from pdtrace.spans import Resource, Span, SpanKind

REQUEST = InFlight(
    request_id="req-1",
    trace_id="a" * 32,
    root_span_id="b" * 16,
    attempt=1,
    mode="pd",
    age_s=20.0,
    stage="decode.reserve",
    stage_age_s=12.0,
    worker="decode-0",
)


def aged(stage_age_s: float, **more: object) -> InFlight:
    return msgspec.structs.replace(REQUEST, stage_age_s=stage_age_s, **more)


@pytest.mark.parametrize(
    ("deadline_s", "p99_s", "threshold_s"),
    [
        (None, None, 10.0),
        (30.0, None, 15.0),
        (None, 2.0, 6.0),
        (30.0, 2.0, 15.0),
        (30.0, 8.0, 24.0),
        (0.5, None, 1.0),
        (None, 0.001, 1.0),
    ],
)
def test_threshold_is_the_larger_of_deadline_share_and_p99_factor(
    deadline_s: float | None, p99_s: float | None, threshold_s: float
) -> None:
    deadlines = {} if deadline_s is None else {"decode.reserve": deadline_s}
    policy = StuckPolicy(deadlines=deadlines)
    assert policy.threshold_s("decode.reserve", p99_s) == threshold_s


def test_long_answer_is_not_stuck_because_the_others_were_short() -> None:
    policy = StuckPolicy()
    assert policy.threshold_s("decode.generate", 0.2) == 10.0
    assert policy.threshold_s("decode.generate", 8.0) == 24.0
    assert (
        StuckPolicy(deadlines={"decode.generate": 4.0}).threshold_s("decode.generate", 0.2) == 2.0
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": 0.0}, "stuck share is 0.0"),
        ({"share": 1.5}, "stuck share is 1.5"),
        ({"factor": 0.5}, "stuck factor is 0.5"),
        ({"floor_s": 0.0}, "stuck floor is 0.0"),
        ({"default_s": float("nan")}, "stuck default is nan"),
        ({"deadlines": {"decode.sleep": 1.0}}, "no stage"),
        ({"deadlines": {"transfer": -1.0}}, "deadline of transfer is -1.0"),
    ],
)
def test_policy_out_of_range_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StuckPolicy(**fields)  # pyright: ignore[reportArgumentType]


def test_request_is_reported_once_however_long_it_stays() -> None:
    watch = StuckWatch(StuckPolicy())
    assert watch.check([aged(9.9)]) == []
    [report] = watch.check([aged(10.1)])
    assert (report.request.request_id, report.stage) == ("req-1", "decode.reserve")
    assert report.threshold_s == 10.0
    assert watch.check([aged(500.0)]) == []
    # Nor in a later stage: one report per request.
    assert watch.check([aged(500.0, stage="decode.generate")]) == []


def test_finished_request_is_forgotten() -> None:
    watch = StuckWatch(StuckPolicy())
    watch.check([aged(11.0)])
    watch.check([])
    assert len(watch.check([aged(11.0)])) == 1


def test_answered_requests_and_unknown_stages_are_not_stuck() -> None:
    watch = StuckWatch(StuckPolicy())
    assert watch.check([aged(99.0, ended="completed"), aged(99.0, stage=None)]) == []


def test_own_p99_counts() -> None:
    watch = StuckWatch(StuckPolicy())
    assert watch.check([aged(12.0, p99_s=5.0)]) == []
    assert len(watch.check([aged(12.0, p99_s=3.0)])) == 1


def test_line_says_who_where_how_long_and_who_is_in_the_way() -> None:
    wait = WaitNow(reason="kv_pages", needed=9, free=1, blockers=("req-7", "req-8"))
    [report] = StuckWatch(StuckPolicy()).check([aged(12.34, wait=wait)])
    assert report.line() == (
        f"request req-1 (trace {'a' * 32}, attempt 1) is stuck in decode.reserve on decode-0: "
        "12.3 s old, above 10.0 s; waits for kv_pages (needed 9, free 1), blocked by req-7, req-8"
    )
    [bare] = StuckWatch(StuckPolicy()).check([aged(12.0, worker=None)])
    assert bare.line().endswith("is stuck in decode.reserve: 12.0 s old, above 10.0 s")


def test_deadlines_are_read_from_options() -> None:
    assert parse_deadlines(["transfer=5", "decode.reserve = 30"]) == {
        "transfer": 5.0,
        "decode.reserve": 30.0,
    }
    for text in ("transfer", "transfer=", "transfer=soon", "=5s"):
        with pytest.raises(ValueError, match="must be STAGE=SECONDS"):
            parse_deadlines([text])


def spans(
    stage_ms: dict[str, float], *, outcome: str = "completed", mode: str = "pd"
) -> list[Span]:
    def span(**attributes: object) -> Span:
        return Span(
            trace_id="a" * 32,
            span_id="b" * 16,
            parent_id=None,
            name="x",
            kind=SpanKind.INTERNAL,
            start_ns=0,
            end_ns=1,
            resource=Resource(attributes={}),
            attributes=attributes,  # pyright: ignore[reportArgumentType]
        )

    root = span(**{a.SPAN.key: "request", a.OUTCOME.key: outcome, a.MODE.key: "pd"})
    stages: Sequence[Span] = [
        span(**{a.STAGE.key: name, a.BEGIN_NS.key: 1_000, a.END_NS.key: 1_000 + round(ms * 1e6)})
        for name, ms in stage_ms.items()
    ]
    return [root, *stages]


def test_median_and_p99_per_mode_and_stage() -> None:
    times = RollingStageTimes()
    for number in range(1, 101):
        times.add(spans({"transfer": number, "transfer.copy": 5.0}))
    usual = times.of("pd", "transfer")
    assert usual is not None
    assert (usual.usual_s, usual.p99_s) == (0.05, 0.099)
    assert times.of("colocated", "transfer") is None
    assert times.of("pd", "transfer.copy") is None, "it is beside the chain"


def test_few_requests_give_no_p99() -> None:
    times = RollingStageTimes()
    for _ in range(19):
        times.add(spans({"transfer": 2.0}))
    few = times.of("pd", "transfer")
    assert few is not None
    assert (few.usual_s, few.p99_s) == (0.002, None)
    for _ in range(10):
        times.add(spans({"transfer": 2.0}))
    enough = times.of("pd", "transfer")
    assert enough is not None
    assert enough.p99_s == 0.002


def test_only_completed_requests_teach_and_old_ones_are_forgotten() -> None:
    times = RollingStageTimes(window=32)
    times.add(spans({"transfer": 9_000.0}, outcome="timed_out"))
    assert times.of("pd", "transfer") is None
    for _ in range(32):
        times.add(spans({"transfer": 900.0}))
    for _ in range(32):
        times.add(spans({"transfer": 1.0}))
    usual = times.of("pd", "transfer")
    assert usual is not None
    assert (usual.usual_s, usual.p99_s) == (0.001, 0.001)


def test_report_is_one_line_whatever_ids_hold() -> None:
    wait = WaitNow(reason="kv_pages", blockers=("a\nb", "c\x1b[2J"), age_s=1.0)
    request = msgspec.structs.replace(
        REQUEST, request_id="evil\n2026-01-01 ERROR forged\r", worker="d\u2028", wait=wait
    )
    line = StuckReport(request=request, stage="decode.reserve", threshold_s=1.0).line()
    assert line.isprintable()
    assert "request evil 2026-01-01 ERROR forged (trace" in line
    assert line.endswith("blocked by a b, c [2J")


def test_many_reports_are_one_line_with_places() -> None:
    reports = [
        StuckReport(
            request=msgspec.structs.replace(REQUEST, worker=worker),
            stage=stage,
            threshold_s=1.0,
        )
        for stage, worker in [("decode.reserve", "decode-0")] * 3 + [("hop.dispatch", None)]
    ]
    assert rest_of(reports) == (
        "4 further requests are stuck: 3 in decode.reserve on decode-0, 1 in hop.dispatch"
    )


def test_request_reported_by_a_former_watch_is_not_reported_again() -> None:
    watch = StuckWatch(StuckPolicy())
    watch.restore([REQUEST.root_span_id])
    assert [watch.check([aged(seconds)]) for seconds in (11.0, 500.0)] == [[], []]
