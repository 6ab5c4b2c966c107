"""Marks → spans: the tree, the alignment, where outcomes land, and that nothing breaks it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import semconv as a
from pdtrace.analysis.sources import Problems, Recording
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.assembly.collected import AttemptIds, CollectedRequest, Leg
from pdtrace.assembly.evidence import derived_span_id, span_id_base, span_id_salt
from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.wait_marks import MAX_WAIT_EVENTS
from pdtrace.check import check_recording
from pdtrace.clock import ClockAnchor
from pdtrace.ring.records import MarkRecord, Value
from pdtrace.semconv import AttrType
from pdtrace.spans import Resource, Span, SpanKind, StatusCode, Trace
from pdtrace.stages import CHAINS, MARKS, STAGE_BY_NAME, STAGES, Mark, Mode, Role
from tests.support.marked_requests import (
    DECODE,
    GATEWAY,
    MS,
    OPEN_AT_US,
    PREFILL,
    RECEIVED,
    ROOT_ID,
    START_NS,
    TRACE_ID,
    TRANSFER,
    US,
    WALL_NS,
    WORKER,
    Moment,
    aborted,
    colocated_moments,
    completed,
    drawn,
    pd_moments,
    process,
    record,
    request_of,
    until,
)

HEALTHY_PD = """\
chat SmolLM2-135M-Instruct SERVER 0-20000 pd-gateway
  gateway.ingest 0-399 pd-gateway
  gateway.queue 400-499 pd-gateway
  attempt 500-18999 pd-gateway
    gateway.route 500-519 pd-gateway
    gateway.dispatch 520-559 pd-gateway
    hop.dispatch 560-719 pd-decode
    prefill.bootstrap 700-1898 pd-prefill
    decode.reserve 720-1719 pd-decode
    hop.publish 1720-1899 pd-prefill
    prefill.queue 1900-1999 pd-prefill
    prefill.compute SERVER 2000-5999 pd-prefill
      prefill.chunk 2000-3998 pd-prefill
      prefill.chunk 4010-5998 pd-prefill
    transfer.queue 4020-4058 pd-transfer
    transfer.copy 4060-4498 pd-transfer
    transfer SERVER 6000-6509 pd-transfer
    prefill.hold 6000-6698 pd-prefill
    transfer.queue 6020-6058 pd-transfer
    transfer.copy 6060-6498 pd-transfer
    hop.notice 6510-6999 pd-decode
    decode.queue 7000-7299 pd-decode
    decode.first 7300-7349 pd-decode
    hop.token 7350-7599 pd-gateway
    decode.generate SERVER 7350-18999 pd-decode
      decode.gap 10000-11998 pd-decode
      decode.preempted 13000-13998 pd-decode
  gateway.finish 19000-19999 pd-gateway"""

HEALTHY_EARLY = HEALTHY_PD.replace("    hop.token 7350-7599 pd-gateway\n", "").replace(
    "    transfer.copy 6060-6498",
    "    hop.token 6050-6199 pd-gateway\n    transfer.copy 6060-6498",
)

HEALTHY_COLOCATED = """\
chat SmolLM2-135M-Instruct SERVER 0-20000 pd-gateway
  gateway.ingest 0-399 pd-gateway
  gateway.queue 400-499 pd-gateway
  attempt 500-18999 pd-gateway
    gateway.route 500-519 pd-gateway
    gateway.dispatch 520-559 pd-gateway
    hop.dispatch 560-719 pd-worker
    prefill.queue 720-1999 pd-worker
    prefill.compute SERVER 2000-5999 pd-worker
      prefill.chunk 2000-5998 pd-worker
    decode.first 6000-6049 pd-worker
    hop.token 6050-6299 pd-gateway
    decode.generate SERVER 6050-18999 pd-worker
  gateway.finish 19000-19999 pd-gateway"""


def named(spans: Sequence[Span], name: str) -> Span:
    [span] = [span for span in spans if span.name == name]
    return span


def timeline_of(spans: Sequence[Span]) -> Timeline:
    return build_timeline(Trace(trace_id=TRACE_ID, spans=spans))


def recording_of(spans: Sequence[Span]) -> Recording:
    return Recording(
        source="test",
        traces=(Trace(trace_id=TRACE_ID, spans=spans),),
        files=1,
        lines=1,
        spans=len(spans),
        problems=Problems(),
    )


def root_of(spans: Sequence[Span]) -> Span:
    [root] = [span for span in spans if span.attributes.get(a.SPAN.key) == "request"]
    return root


@pytest.mark.parametrize(
    ("moments", "tree"),
    [
        (pd_moments(), HEALTHY_PD),
        (pd_moments(Mode.PD_EARLY), HEALTHY_EARLY),
        (colocated_moments(), HEALTHY_COLOCATED),
    ],
    ids=["pd", "pd_early", "colocated"],
)
def test_healthy_request_becomes_one_tree(moments: list[Moment], tree: str) -> None:
    spans = assemble(request_of(moments))
    assert drawn(spans) == tree
    timeline = timeline_of(spans)
    assert (timeline.violations, timeline.unexplained_ns, timeline.exact) == ((), 0, True)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert a.INCOMPLETE.key not in root_of(spans).attributes


def test_order_of_legs_and_marks_does_not_matter() -> None:
    request = request_of(pd_moments())
    expected = assemble(request)
    request.legs = [
        Leg(process=leg.process, marks=leg.marks[::-1]) for leg in reversed(request.legs)
    ]
    by_id = {span.span_id: span for span in assemble(request)}
    assert by_id == {span.span_id: span for span in expected}


def test_root_carries_the_request_and_stages_do_not_carry_gen_ai() -> None:
    spans = assemble(request_of(pd_moments()))
    root = root_of(spans)
    assert root.attributes == {
        "pd.span": "request",
        "pd.request.id": "req-1",
        "pd.handoff.id": "ho-1",
        "pd.attempt": 1,
        "pd.mode": "pd",
        "pd.outcome": "completed",
        "pd.ttft": pytest.approx(0.0076),
        "pd.prefill.worker": "prefill-0",
        "pd.decode.worker": "decode-0",
        "pd.begin_ns": START_NS,
        "pd.end_ns": START_NS + 20 * MS,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdtrace",
        "gen_ai.request.model": "SmolLM2-135M-Instruct",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 96,
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    for span in spans:
        if span is not root:
            assert not [key for key in span.attributes if key.startswith(("gen_ai.", "http."))]


def test_every_span_names_the_request_and_its_exact_times() -> None:
    for span in assemble(request_of(pd_moments())):
        attributes = span.attributes
        assert attributes[a.REQUEST_ID.key] == "req-1"
        assert attributes[a.HANDOFF_ID.key] == "ho-1"
        assert attributes[a.ATTEMPT.key] == 1
        assert isinstance(attributes[a.BEGIN_NS.key], int)
        assert isinstance(attributes[a.END_NS.key], int)
        if a.SPAN.key in attributes:
            assert a.STAGE.key not in attributes
        else:
            stage = STAGE_BY_NAME[span.name]
            assert attributes[a.STAGE.key] == stage.name
            assert attributes[a.STAGE_KIND.key] == stage.kind.value
            assert span.kind is (SpanKind.SERVER if stage.server else SpanKind.INTERNAL)


def test_exact_times_of_the_chain_partition_the_request() -> None:
    spans = {span.name: span for span in assemble(request_of(pd_moments()))}
    end = START_NS
    for stage in CHAINS[Mode.PD]:
        if stage.name == "hop.token":  # runs beside decode.generate
            continue
        attributes = spans[stage.name].attributes
        assert attributes[a.BEGIN_NS.key] == end
        assert isinstance(attributes[a.END_NS.key], int)
        end = attributes[a.END_NS.key]
    assert end == START_NS + 20 * MS


def test_times_are_whole_microseconds_and_chain_neighbours_do_not_touch() -> None:
    moments = [(role, mark, at, values) for role, mark, at, values in pd_moments()]
    request = request_of(moments)
    for leg in request.legs:
        leg.marks = [
            MarkRecord(mark=m.mark, key=1, attempt=1, t_ns=m.t_ns + 737, values=m.values)
            for m in leg.marks
        ]
    spans = {span.name: span for span in assemble(request)}
    for span in spans.values():
        assert span.start_ns % US == span.end_ns % US == 0
    chain = [spans[stage.name] for stage in CHAINS[Mode.PD] if stage.name != "hop.token"]
    for before, after in itertools.pairwise(chain):
        assert before.end_ns == after.start_ns - US


def test_stage_shorter_than_a_microsecond_never_ends_before_it_starts() -> None:
    request = CollectedRequest(
        request_id="r",
        trace_id=TRACE_ID,
        root_span_id=ROOT_ID,
        legs=[
            Leg(
                process=process(GATEWAY),
                marks=[
                    record(Mark.RECEIVED, START_NS + 999),
                    record(Mark.TOKENIZED, START_NS + 1_001),
                    record(Mark.COMPLETED, START_NS + 1_002, {a.OUTCOME: "completed"}),
                ],
            )
        ],
    )
    ingest = named(assemble(request), "gateway.ingest")
    assert ingest.start_ns == ingest.end_ns == WALL_NS
    assert ingest.attributes[a.END_NS.key] == START_NS + 1_001


def test_mark_attributes_land_on_the_chain_stage_that_ends_there() -> None:
    spans = assemble(request_of(pd_moments()))
    assert named(spans, "hop.publish").attributes[a.KV_PAGES.key] == 7
    assert named(spans, "decode.reserve").attributes[a.KV_FREE_PAGES.key] == 1
    assert named(spans, "gateway.route").attributes[a.ROUTE_POLICY.key] == "round_robin"
    assert named(spans, "decode.generate").attributes[a.PREEMPTIONS.key] == 1
    assert named(spans, "transfer").attributes[a.KV_BYTES.key] == 8192
    chunks = [span for span in spans if span.name == "prefill.chunk"]
    assert [span.attributes[a.CHUNK_INDEX.key] for span in chunks] == [0, 1]
    assert [span.attributes[a.CHUNK_TOKENS.key] for span in chunks] == [32, 32]
    gap = named(spans, "decode.gap").attributes
    assert (gap[a.GAP_SECONDS.key], gap[a.GAP_CAUSE.key]) == (0.002, "scheduler_busy")
    assert named(spans, "attempt").attributes[a.KV_HELD_SECONDS.key] == pytest.approx(0.0173)


def test_copies_pair_by_chunk_even_when_they_overlap() -> None:
    moments = [
        *until(pd_moments(), 600),
        *[
            (TRANSFER, mark, at, {a.CHUNK_INDEX: index})
            for mark, at, index in [
                (Mark.COPY_STARTED, 1_000, 0),
                (Mark.COPY_STARTED, 1_100, 1),
                (Mark.COPY_FINISHED, 1_500, 1),
                (Mark.COPY_FINISHED, 2_000, 0),
            ]
        ],
    ]
    spans = [s for s in assemble(request_of(moments)) if s.name == "transfer.copy"]
    lengths = {
        s.attributes[a.CHUNK_INDEX.key]: (s.start_ns - WALL_NS, s.end_ns - WALL_NS) for s in spans
    }
    assert lengths == {
        0: (1_000 * US, 1_998 * US),
        1: (1_100 * US, 1_498 * US),
    }


def wait(at_us: int, reason: str, needed: int, blocker: str | None = None) -> Moment:
    values = {
        a.WAIT_STAGE: "decode.reserve",
        a.WAIT_REASON: reason,
        a.WAIT_NEEDED: needed,
        a.WAIT_BLOCKER: blocker,
    }
    return (DECODE, Mark.WAITING, at_us, values)


def test_wait_reason_in_force_longest_stands_on_the_span_and_changes_are_events() -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.WAITING]
    moments += [wait(720, "head_of_line", 1), wait(900, "kv_pages", 7), wait(1_700, "slots", 2)]
    span = named(assemble(request_of(moments)), "decode.reserve")
    assert span.attributes[a.WAIT_REASON.key] == "kv_pages"
    assert span.attributes[a.WAIT_NEEDED.key] == 7
    assert [
        (event.name, event.time_ns - WALL_NS, event.attributes[a.WAIT_REASON.key])
        for event in span.events
    ] == [
        ("pd.wait", 720 * US, "head_of_line"),
        ("pd.wait", 900 * US, "kv_pages"),
        ("pd.wait", 1_700 * US, "slots"),
    ]


def test_wait_events_are_bounded_and_counted() -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.WAITING]
    moments += [wait(720 + i, "kv_pages", i) for i in range(200)]
    span = named(assemble(request_of(moments)), "decode.reserve")
    assert len(span.events) == MAX_WAIT_EVENTS
    assert span.attributes[a.WAIT_CHANGES.key] == 200


def test_wait_for_a_stage_without_span_is_kept_on_the_attempt() -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.PAGES_RESERVED]
    spans = assemble(request_of(moments))
    assert [event.name for event in named(spans, "attempt").events] == ["pd.wait"]
    assert root_of(spans).attributes[a.INCOMPLETE.key] == "no decode.reserve; no hop.publish"


def test_wait_links_to_the_requests_that_were_in_the_way() -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.WAITING]
    moments += [wait(720, "kv_pages", 7, "req-0"), wait(900, "kv_pages", 6, "req-unknown")]
    request = request_of(moments)
    request.blockers = {"req-0": ("a" * 32, "b" * 16)}
    [link] = named(assemble(request), "decode.reserve").links
    assert (link.trace_id, link.span_id) == ("a" * 32, "b" * 16)


def test_rejected_request_has_only_what_it_reached() -> None:
    moments = [
        (GATEWAY, Mark.RECEIVED, 0, RECEIVED),
        completed(300, "rejected", "invalid_json", "gateway", 400),
    ]
    spans = assemble(request_of(moments))
    assert drawn(spans) == (
        "chat SERVER 0-300 pd-gateway ERROR [rejected]\n"
        "  gateway.ingest 0-299 pd-gateway ERROR [rejected]"
    )
    root, ingest = spans
    assert root.attributes[a.HTTP_STATUS.key] == 400
    assert root.attributes[a.OUTCOME_STAGE.key] == "gateway.ingest"
    assert ingest.attributes[a.ERROR_TYPE.key] == root.attributes[a.ERROR_TYPE.key]
    assert ingest.attributes[a.ERROR_TYPE.key] == ingest.status_message == "invalid_json"


PD_CHAIN = [stage.name for stage in CHAINS[Mode.PD]]


def ended(name: str, outcome: str, reason: str, by: str) -> list[Span]:
    """A request that ends while `name` is open: told by the gateway alone."""
    at_us = OPEN_AT_US[name]
    moments = [*until(pd_moments(), at_us), completed(at_us, outcome, reason, by, 499)]
    return assemble(request_of(moments))


@pytest.mark.parametrize("name", PD_CHAIN)
def test_cancelled_request_ends_in_the_stage_that_was_open_and_is_no_error(name: str) -> None:
    spans = ended(name, "cancelled", "client_disconnect", "client")
    root, stage = root_of(spans), named(spans, name)
    for span in (root, stage):
        assert span.attributes[a.OUTCOME.key] == "cancelled"
        assert span.attributes[a.OUTCOME_REASON.key] == "client_disconnect"
        assert span.attributes[a.OUTCOME_BY.key] == "client"
        assert span.attributes[a.END_NS.key] == START_NS + OPEN_AT_US[name] * US
    assert root.attributes[a.OUTCOME_STAGE.key] == name
    assert {span.status for span in spans} == {StatusCode.UNSET}
    assert not [span for span in spans if a.ERROR_TYPE.key in span.attributes]


@pytest.mark.parametrize("name", PD_CHAIN)
@pytest.mark.parametrize("outcome", ["failed", "timed_out", "lost", "rejected"])
def test_failure_marks_the_stage_that_was_open_and_invents_none(name: str, outcome: str) -> None:
    spans = ended(name, outcome, "kv_timeout", "decode-0")
    failed = {span.name for span in spans if span.status is StatusCode.ERROR}
    root = root_of(spans)
    attempt_failed = {"attempt"} if PD_CHAIN.index(name) in range(2, 15) else set[str]()
    assert failed == {root.name, name} | attempt_failed
    assert root.attributes[a.OUTCOME_STAGE.key] == name
    assert named(spans, name).attributes[a.ERROR_TYPE.key] == "kv_timeout"
    reached = PD_CHAIN[: PD_CHAIN.index(name) + 1]
    beside = {"decode.generate"} if name == "hop.token" else set[str]()
    stages = {span.name for span in spans if span.name in PD_CHAIN}
    assert stages == set(reached) | beside
    timeline = timeline_of(spans)
    assert (timeline.violations, timeline.unexplained_ns) == ((), 0)
    assert timeline.outcome_stage == name


@pytest.mark.parametrize("name", PD_CHAIN[5:15])
def test_early_forwarding_blames_the_open_stage_too(name: str) -> None:
    at_us = OPEN_AT_US[name] if name != "hop.token" else 6_100
    moments = [
        *until(pd_moments(Mode.PD_EARLY), at_us),
        completed(at_us, "failed", "engine_error", "prefill-0", 500),
    ]
    if name == "transfer":
        moments.insert(-1, (GATEWAY, Mark.FIRST_TOKEN_SENT, 6_099, {}))
    spans = assemble(request_of(moments))
    assert root_of(spans).attributes[a.OUTCOME_STAGE.key] == name
    assert named(spans, name).status is StatusCode.ERROR


def test_colocated_failure_invents_no_handshake() -> None:
    moments = [
        *until(colocated_moments(), 5_000),
        aborted(WORKER, 5_000, "failed", "engine_error", "worker-0"),
        completed(5_200, "failed", "engine_error", "worker-0", 500),
    ]
    spans = assemble(request_of(moments))
    assert {span.name for span in spans if span.status is StatusCode.ERROR} == {
        "chat SmolLM2-135M-Instruct",
        "attempt",
        "prefill.compute",
    }
    assert not [span for span in spans if span.name in ("prefill.bootstrap", "decode.first")]
    assert named(spans, "prefill.chunk").attributes[a.OUTCOME.key] == "failed"


def test_stage_ends_where_its_own_process_gave_up() -> None:
    moments = [
        *until(pd_moments(), 5_000),
        aborted(PREFILL, 5_000, "failed", "engine_error", "prefill-0"),
        aborted(DECODE, 5_300, "cancelled", "peer_failed", "gateway"),
        completed(5_500, "failed", "engine_error", "prefill-0", 500),
    ]
    spans = assemble(request_of(moments))
    compute = named(spans, "prefill.compute")
    assert compute.attributes[a.END_NS.key] == START_NS + 5_000 * US
    assert compute.status is StatusCode.ERROR
    assert root_of(spans).attributes[a.OUTCOME_STAGE.key] == "prefill.compute"


def test_answer_of_a_failed_request_is_the_gateways_finish() -> None:
    moments = [
        *until(pd_moments(), 5_000),
        aborted(GATEWAY, 5_000, "cancelled", "client_gone", "client"),
        aborted(PREFILL, 5_800, "cancelled", "client_gone", "client"),
        completed(7_000, "cancelled", "client_gone", "client", 499),
    ]
    spans = assemble(request_of(moments))
    finish = named(spans, "gateway.finish")
    assert finish.attributes[a.BEGIN_NS.key] == START_NS + 5_800 * US
    assert finish.attributes[a.END_NS.key] == START_NS + 7_000 * US
    assert a.OUTCOME.key not in finish.attributes
    assert root_of(spans).attributes[a.OUTCOME_STAGE.key] == "prefill.compute"
    timeline = timeline_of(spans)
    assert (timeline.unexplained_ns, timeline.violations) == (0, ())
    assert timeline.outcome_stage == "prefill.compute"


def test_stage_bears_the_cause_when_its_process_was_only_told_to_stop() -> None:
    moments = [
        *until(pd_moments(), 6_100),
        aborted(DECODE, 6_100, "timed_out", "kv_timeout", "decode-0"),
        aborted(TRANSFER, 6_300, "cancelled", "peer_failed", "decode-0"),
        completed(6_500, "timed_out", "kv_timeout", "decode-0", 504),
    ]
    transfer = named(assemble(request_of(moments)), "transfer")
    assert transfer.status is StatusCode.ERROR
    assert transfer.attributes[a.OUTCOME.key] == "timed_out"
    assert transfer.attributes[a.END_NS.key] == START_NS + 6_300 * US


def test_stage_begun_after_the_end_is_not_shown() -> None:
    moments = [
        *until(pd_moments(), 5_000),
        completed(5_000, "cancelled", "client_disconnect", "client", None),
        (PREFILL, Mark.CHUNK_FINISHED, 6_000, {a.CHUNK_INDEX: 1}),
        (PREFILL, Mark.PREFILL_FINISHED, 6_000, {}),
    ]
    spans = assemble(request_of(moments))
    assert not [span for span in spans if span.name in ("transfer", "prefill.hold")]
    assert root_of(spans).attributes[a.OUTCOME_STAGE.key] == "prefill.compute"


def test_unstreamed_answer_blames_generation_and_not_the_unsent_token() -> None:
    moments = [
        *[m for m in until(pd_moments(stream=False), 15_000) if m[1] is not Mark.FIRST_TOKEN_SENT],
        completed(15_000, "timed_out", "request_timeout", "gateway", 504),
    ]
    spans = assemble(request_of(moments))
    assert root_of(spans).attributes[a.OUTCOME_STAGE.key] == "decode.generate"
    assert not [span for span in spans if span.name == "hop.token"]


def test_lost_worker_closes_its_stage_as_lost_until_the_gateway_noticed() -> None:
    moments = [
        *until(pd_moments(), 15_000),
        completed(18_000, "failed", "worker_lost", "decode-0", 502),
    ]
    spans = assemble(request_of(moments, lost={DECODE: 15_500}))
    generate = named(spans, "decode.generate")
    assert generate.status is StatusCode.ERROR
    assert generate.attributes[a.OUTCOME.key] == "lost"
    assert generate.attributes[a.OUTCOME_BY.key] == "decode-0"
    assert generate.attributes[a.END_NS.key] == START_NS + 18_000 * US
    assert root_of(spans).attributes[a.OUTCOME.key] == "failed"


def test_lost_gateway_ends_the_request_as_lost() -> None:
    moments = until(pd_moments(), 450)
    spans = assemble(request_of(moments, lost={GATEWAY: 900}))
    assert drawn(spans) == (
        "chat SmolLM2-135M-Instruct SERVER 0-900 pd-gateway ERROR [lost]\n"
        "  gateway.ingest 0-399 pd-gateway\n"
        "  gateway.queue 400-899 pd-gateway ERROR [lost]"
    )


def test_gateway_that_died_before_it_marked_the_end_is_named_and_no_mark_is_missed() -> None:
    """The client may have had its whole answer; nobody can tell."""
    moments = [m for m in pd_moments() if m[1] is not Mark.COMPLETED]
    spans = assemble(request_of(moments, lost={GATEWAY: moments[-1][2] + 900}))
    assert a.INCOMPLETE.key not in root_of(spans).attributes
    finish = named(spans, "gateway.finish")
    assert (finish.attributes[a.OUTCOME.key], finish.attributes[a.OUTCOME_BY.key]) == (
        "lost",
        "gateway-0",
    )
    report = check_recording(recording_of(spans))
    broken = {rule.name: rule.examples for rule in report.rules if rule.broken}
    assert broken == {"lost": ("req-1: lost with gateway-0 in gateway.finish (process_lost)",)}
    assert report.outcomes == {"lost": 1}


@pytest.mark.parametrize("by", [GATEWAY, DECODE])
def test_gateway_that_dies_behind_its_requests_failure_had_still_to_tell_the_client(
    by: Role,
) -> None:
    """It had cancelled the request, or had not heard yet that decode gave it up."""
    instance = f"{by}-0"
    gives_up = aborted(by, 15_500, "cancelled", "client_disconnected", instance)
    stops = aborted(DECODE, 16_000, "cancelled", "client_disconnected", instance)
    moments = [*until(pd_moments(), 15_000), gives_up, *([stops] if by is GATEWAY else [])]
    spans = assemble(request_of(moments, lost={GATEWAY: 24_000}))
    finish = named(spans, "gateway.finish")
    assert (finish.attributes[a.OUTCOME.key], finish.attributes[a.OUTCOME_BY.key]) == (
        "lost",
        "gateway-0",
    )
    assert (
        finish.attributes[a.BEGIN_NS.key]
        == named(spans, "decode.generate").attributes[a.END_NS.key]
    )
    assert finish.attributes[a.END_NS.key] == START_NS + 24_000 * US
    assert build_timeline(Trace(trace_id=spans[0].trace_id, spans=tuple(spans))).unexplained_ns == 0
    report = check_recording(recording_of(spans))
    assert {rule.name for rule in report.rules if rule.broken} == {"lost"}


def test_retry_is_a_second_attempt_linked_to_the_first() -> None:
    first = request_of([*until(pd_moments(), 5_000)])
    second = request_of(
        [m for m in pd_moments() if m[2] >= 500 and m[1] is not Mark.COMPLETED], attempt=2
    )
    for leg in second.legs:
        leg.marks = [
            MarkRecord(mark=m.mark, key=2, attempt=2, t_ns=m.t_ns + 10 * MS, values=m.values)
            for m in leg.marks
        ]
        # Its successor, by the same name.
        another = Resource(attributes={**leg.process.resource.attributes, "process.pid": 4711})
        leg.process = dataclasses.replace(leg.process, resource=another)
    gateway = next(leg for leg in first.legs if leg.process.role is GATEWAY)
    abort = aborted(GATEWAY, 9_000, "failed", "worker_lost", "prefill-0")
    done = completed(31_000, "completed", "", "", 200)
    gateway.marks.append(record(abort[1], START_NS + 9_000 * US, abort[3]))
    gateway.marks.append(record(done[1], START_NS + 31_000 * US, done[3], attempt=2))
    first.legs = [*first.legs, *second.legs]
    spans = assemble(first)
    one, two = [span for span in spans if span.name == "attempt"]
    assert (one.attributes[a.ATTEMPT.key], two.attributes[a.ATTEMPT.key]) == (1, 2)
    assert one.status is StatusCode.ERROR
    assert one.attributes[a.OUTCOME_STAGE.key] == "prefill.compute"
    assert two.attributes[a.OUTCOME.key] == "completed"
    assert [link.span_id for link in two.links] == [one.span_id]
    root = root_of(spans)
    assert root.status is StatusCode.UNSET
    assert root.attributes[a.ATTEMPT.key] == 2
    assert root.attributes[a.HANDOFF_ID.key] == "ho-2"
    computes = [span for span in spans if span.name == "prefill.compute"]
    assert [(s.parent_id, s.status) for s in computes] == [
        (one.span_id, StatusCode.ERROR),
        (two.span_id, StatusCode.UNSET),
    ]
    assert [s.resource.attributes.get("process.pid") == 4711 for s in computes] == [False, True]
    assert len([s for s in spans if s.name in ("gateway.ingest", "gateway.queue")]) == 2


def test_time_in_which_a_failure_travelled_to_the_gateway_is_the_gateways() -> None:
    """The transfer process gave up at 6.3 ms, the gateway heard of it at 10.5 ms and began anew."""
    second = request_of(
        [m for m in pd_moments() if m[2] >= 500 and m[1] is not Mark.COMPLETED], attempt=2
    )
    for leg in second.legs:
        leg.marks = [
            MarkRecord(mark=m.mark, key=2, attempt=2, t_ns=m.t_ns + 10 * MS, values=m.values)
            for m in leg.marks
        ]
    gives_up = aborted(TRANSFER, 6_300, "failed", "transfer_failed", "transfer-0")
    first = request_of([*until(pd_moments(), 6_200), gives_up])
    gateway = next(leg for leg in first.legs if leg.process.role is GATEWAY)
    abort = aborted(GATEWAY, 10_500, "failed", "transfer_failed", "transfer-0")
    done = completed(31_000, "completed", "", "", 200)
    gateway.marks.append(record(abort[1], START_NS + 10_500 * US, abort[3]))
    gateway.marks.append(record(done[1], START_NS + 31_000 * US, done[3], attempt=2))
    first.legs = [*first.legs, *second.legs]
    spans = assemble(first)
    (news,) = [s for s in spans if s.name == "gateway.finish" and s.attributes[a.ATTEMPT.key] == 1]
    assert news.attributes[a.BEGIN_NS.key] == START_NS + 6_300 * US
    assert news.attributes[a.END_NS.key] == START_NS + 10_500 * US
    assert news.parent_id == root_of(spans).span_id
    assert build_timeline(Trace(trace_id=spans[0].trace_id, spans=tuple(spans))).unexplained_ns == 0


def two_attempts(first: CollectedRequest, until_us: int) -> CollectedRequest:
    """`first`, which failed when a worker was lost, and another attempt, on other workers, which
    came as far as `until_us` and failed then."""
    second = request_of([m for m in until(pd_moments(), until_us) if m[2] >= 500], attempt=2)
    for leg in second.legs:
        leg.marks = [
            MarkRecord(mark=m.mark, key=2, attempt=2, t_ns=m.t_ns + 10 * MS, values=m.values)
            for m in leg.marks
        ]
        another = Resource(attributes={**leg.process.resource.attributes, "process.pid": 4711})
        leg.process = dataclasses.replace(leg.process, resource=another)
    gateway = next(leg for leg in first.legs if leg.process.role is GATEWAY)
    [lost] = {leg.process.instance for leg in first.legs if leg.lost_at_ns is not None}
    abort = aborted(GATEWAY, 9_000, "failed", "worker_lost", lost)
    done = completed(31_000, "failed", "request_lost", "gateway", 502)
    gateway.marks += [m for leg in second.legs if leg.process.role is GATEWAY for m in leg.marks]
    gateway.marks.append(record(abort[1], START_NS + 9_000 * US, abort[3]))
    gateway.marks.append(record(done[1], START_NS + 31_000 * US, done[3], attempt=2))
    first.legs = [
        *first.legs,
        *(leg for leg in second.legs if leg.process.role is not GATEWAY),
    ]
    return first


def last_of(spans: Sequence[Span], stage: str) -> tuple[object, object, object]:
    """Outcome, reason and who ended it, of a stage in the second attempt."""
    (span,) = [s for s in spans if s.name == stage and s.attributes[a.ATTEMPT.key] == 2]
    keys = (a.OUTCOME.key, a.OUTCOME_REASON.key, a.OUTCOME_BY.key)
    first, second, third = (span.attributes.get(key) for key in keys)
    return first, second, third


@pytest.mark.parametrize(
    ("lost", "first_us", "second_us", "stage"),
    [
        (PREFILL, 5_000, 5_000, "prefill.compute"),  # its own role began it
        (DECODE, 800, 710, "hop.dispatch"),  # the gateway did
        (PREFILL, 5_000, 1_800, "hop.publish"),  # decode did
        (DECODE, 800, 6_600, "hop.notice"),  # the transfer process did
    ],
)
def test_process_lost_in_one_attempt_is_not_lost_in_the_next_one_too(
    lost: Role, first_us: int, second_us: int, stage: str
) -> None:
    first = request_of(until(pd_moments(), first_us), lost={lost: 8_000})
    spans = assemble(two_attempts(first, second_us))
    one, two = [span for span in spans if span.name == "attempt"]
    assert one.attributes[a.OUTCOME.key] == "failed"
    assert any(
        s.attributes.get(a.OUTCOME.key) == "lost" and s.attributes[a.ATTEMPT.key] == 1
        for s in spans
    )
    assert two.attributes[a.OUTCOME_STAGE.key] == stage
    assert last_of(spans, stage) == ("failed", "request_lost", "gateway")


@pytest.mark.parametrize("late_us", [15_000, 40_000], ids=["in the next one", "after the request"])
def test_what_a_process_that_stood_still_does_late_is_no_part_of_the_attempt(late_us: int) -> None:
    """It went on once the attempt had been given up, and others did its work."""
    first = request_of(
        [
            *until(pd_moments(), 710),
            (DECODE, Mark.RESERVE_RECEIVED, late_us, {}),
            (DECODE, Mark.PAGES_RESERVED, late_us + 100, {}),
            aborted(DECODE, late_us + 200, "lost", "worker_lost", "gateway"),
        ],
        lost={DECODE: 8_000},
    )
    spans = assemble(two_attempts(first, 6_600))
    one, _ = [span for span in spans if span.name == "attempt"]
    of_one = [span for span in spans if span.parent_id == one.span_id]
    assert {span.name for span in of_one} >= {"gateway.dispatch", "hop.dispatch"}
    end_ns = one.attributes[a.END_NS.key]
    assert end_ns == START_NS + 9_000 * US
    assert not [span.name for span in of_one if span.attributes[a.END_NS.key] > end_ns]  # pyright: ignore[reportOperatorIssue]
    (dispatch,) = [span for span in of_one if span.name == "hop.dispatch"]
    assert dispatch.attributes[a.OUTCOME.key] == "failed"
    assert dispatch.status is StatusCode.ERROR
    assert one.attributes[a.OUTCOME_STAGE.key] == "hop.dispatch"


def test_process_that_is_lost_with_the_second_attempt_was_not_with_the_first() -> None:
    """It had both, and had given up the first."""
    moments = [*until(pd_moments(), 5_000), aborted(PREFILL, 8_000, "failed", "internal", "p")]
    both = two_attempts(request_of(moments, lost={PREFILL: 25_000}), 5_000)
    prefill, successor = [leg for leg in both.legs if leg.process.role is PREFILL]
    prefill.marks += successor.marks
    both.legs = [leg for leg in both.legs if leg is not successor]
    prefill.lost_attempts = frozenset({2})
    spans = assemble(both)
    ends = [s.attributes.get(a.OUTCOME.key) for s in spans if s.name == "prefill.compute"]
    assert ends == ["failed", "lost"]


@pytest.mark.parametrize("told", ["finished", "told to stop"])
def test_decode_that_goes_on_after_the_answer_does_not_outlast_the_request(told: str) -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.DECODE_FINISHED]
    if told == "finished":
        moments.append((DECODE, Mark.DECODE_FINISHED, 23_000, {a.PREEMPTIONS: 1}))
    else:
        moments.append(aborted(DECODE, 23_000, "completed", "stop", "gateway"))
    spans = assemble(request_of(moments))
    root, generate = root_of(spans), named(spans, "decode.generate")
    assert root.attributes[a.OUTCOME.key] == "completed"
    assert generate.attributes[a.END_NS.key] == root.attributes[a.END_NS.key]
    assert generate.attributes[a.OVERRUN_SECONDS.key] == pytest.approx(0.003)
    assert named(spans, "attempt").attributes[a.OUTCOME.key] == "completed"
    assert not [s for s in spans if a.VIOLATION.key in s.attributes or s.status]
    assert a.INCOMPLETE.key not in root.attributes
    assert timeline_of(spans).violations == ()


def test_out_of_order_marks_are_clamped_and_flagged() -> None:
    moments = [m for m in pd_moments() if m[1] is not Mark.KV_NOTICED]
    moments.append((DECODE, Mark.KV_NOTICED, 6_400, {}))
    notice = named(assemble(request_of(moments)), "hop.notice")
    assert notice.attributes[a.VIOLATION.key] == "end mark 110 µs before begin mark"
    assert notice.attributes[a.END_NS.key] == notice.attributes[a.BEGIN_NS.key]
    assert notice.end_ns == notice.start_ns


def test_repeated_marks_are_flagged_and_the_first_counts() -> None:
    moments = [*pd_moments(), (TRANSFER, Mark.KV_LANDED, 9_000, {a.KV_BYTES: 1})]
    spans = assemble(request_of(moments))
    assert named(spans, "transfer").attributes[a.KV_BYTES.key] == 8192
    assert (
        named(spans, "attempt").attributes[a.VIOLATION.key] == "recorded more than once: kv_landed"
    )


def test_lost_records_make_the_trace_incomplete() -> None:
    request = request_of(pd_moments())
    request.legs[1].records_missed = 12
    instance = request.legs[1].process.instance
    root = root_of(assemble(request))
    assert root.attributes[a.INCOMPLETE.key] == f"{instance} lost 12 records"


@pytest.mark.parametrize(
    ("gave_up", "reason"),
    [(None, "no_end_recorded"), ("too many requests in flight",) * 2],
    ids=["overwritten", "given up"],
)
def test_end_that_nobody_recorded_is_no_outcome_and_blames_no_process(
    gave_up: str | None, reason: str
) -> None:
    """`lost` says that a process died with the request."""
    request = request_of([m for m in pd_moments() if m[1] is not Mark.COMPLETED])
    request.legs[0].records_missed = 12
    request.gave_up = gave_up
    spans = assemble(request)
    assert not [
        span for span in spans if a.OUTCOME.key in span.attributes if span.name != "attempt"
    ]
    assert not [span for span in spans if span.status is StatusCode.ERROR]
    root = root_of(spans).attributes
    assert root[a.OUTCOME_REASON.key] == reason
    assert "no completed mark; gateway-0 lost 12 records" in str(root[a.INCOMPLETE.key])
    timeline = timeline_of(spans)
    assert (timeline.outcome, timeline.open) == (None, False)
    assert "The outcome was not recorded." in timeline.unknowns
    report = check_recording(recording_of(spans))
    broken = {rule.name for rule in report.rules if rule.broken}
    assert "lost" not in broken
    assert "complete" in broken
    assert report.outcomes == {"unknown": 1}


def test_other_hosts_clock_is_mapped_through_its_anchor() -> None:
    request = request_of(pd_moments())
    shift = 3_600 * 1_000 * MS  # the other host was booted an hour earlier
    legs: list[Leg] = []
    for leg in request.legs:
        if leg.process.role is not DECODE:
            legs.append(leg)
            continue
        anchor = ClockAnchor(monotonic_ns=START_NS + shift, wall_ns=WALL_NS)
        other = dataclasses.replace(leg.process, clock_id="host-2", anchor=anchor)
        marks = [
            MarkRecord(mark=m.mark, key=1, attempt=1, t_ns=m.t_ns + shift, values=m.values)
            for m in leg.marks
        ]
        legs.append(Leg(process=other, marks=marks))
    request.legs = legs
    assert drawn(assemble(request)) == HEALTHY_PD


def test_host_without_the_gateway_makes_stages_only() -> None:
    request = request_of([m for m in pd_moments() if m[0] is not GATEWAY])
    spans = assemble(request)
    assert {span.parent_id for span in spans} <= {
        "00f067aa0ba902b7",
        *(span.span_id for span in spans),
    }
    assert not [span for span in spans if a.SPAN.key in span.attributes]
    assert "prefill.compute" in {span.name for span in spans}
    assert not [span for span in spans if a.OUTCOME.key in span.attributes]


def test_abort_on_a_host_without_the_gateway_still_closes_the_stage() -> None:
    moments = [m for m in until(pd_moments(), 5_000) if m[0] is not GATEWAY]
    moments.append(aborted(PREFILL, 5_000, "failed", "engine_error", "prefill-0"))
    compute = named(assemble(request_of(moments)), "prefill.compute")
    assert compute.status is StatusCode.ERROR


def test_span_ids_are_the_same_every_time_and_differ_between_stages() -> None:
    one, two = (assemble(request_of(pd_moments())) for _ in range(2))
    assert [span.span_id for span in one] == [span.span_id for span in two]
    assert len({span.span_id for span in one}) == len(one)


def test_no_two_spans_of_an_attempt_can_have_the_same_id() -> None:
    names = [stage.name for stage in STAGES]
    names += [f"{name}/{number}" for name in names for number in range(1, 2_000)]
    assert len({span_id_salt(name) for name in names}) == len(names)
    bases = [span_id_base(ROOT_ID, f"{attempt:016x}") for attempt in range(100)]
    ids = {derived_span_id(base, span_id_salt(name)) for base in bases for name in names[:50]}
    assert len(ids) == 100 * 50
    assert {len(span_id) for span_id in ids} == {16}
    assert derived_span_id(5, 5) == "0000000000000001"  # zero is no id


def test_request_without_marks_has_no_spans() -> None:
    empty = CollectedRequest(
        request_id="r",
        trace_id=TRACE_ID,
        root_span_id=ROOT_ID,
        legs=[Leg(process=process(GATEWAY))],
    )
    assert assemble(empty) == []


def test_caller_controlled_model_name_does_not_enter_the_span_name_of_a_rejection() -> None:
    moments = [
        (GATEWAY, Mark.RECEIVED, 0, RECEIVED),
        completed(300, "rejected", "model_not_found", "gateway", 404),
    ]
    assert root_of(assemble(request_of(moments))).name == "chat"


def test_mode_of_the_context_counts_when_the_gateways_mark_is_lost() -> None:
    moments = [m for m in pd_moments(Mode.PD_EARLY) if m[1] is not Mark.TOKENIZED]
    request = request_of(moments)
    request.mode = Mode.PD_EARLY
    spans = assemble(request)
    assert named(spans, "hop.token").attributes[a.BEGIN_NS.key] == START_NS + 6_050 * US


def value_of(attr_type: AttrType) -> st.SearchStrategy[Value]:
    some: dict[AttrType, st.SearchStrategy[Value]] = {
        AttrType.INT: st.integers(-3, 3),
        AttrType.FLOAT: st.floats(allow_nan=True),
        AttrType.STR: st.sampled_from(["", "x", "decode.reserve", "transfer.copy", "completed"]),
        AttrType.BOOL: st.booleans(),
    }
    return st.none() | some[attr_type]


@st.composite
def mark_records(draw: st.DrawFn) -> tuple[Role, MarkRecord]:
    mark = draw(st.sampled_from(list(Mark)))
    values = tuple(draw(value_of(attr.type)) for attr in MARKS[mark].attrs)
    role = draw(st.sampled_from(list(Role)))
    return role, MarkRecord(
        mark=mark,
        key=1,
        attempt=draw(st.integers(0, 3)),
        t_ns=START_NS + draw(st.integers(0, 40)) * 500,
        values=values[: draw(st.integers(0, len(values)))] if draw(st.booleans()) else values,
    )


def check_sound(request: CollectedRequest) -> None:
    spans = assemble(request)
    ids = [span.span_id for span in spans]
    assert len(ids) == len(set(ids))
    known = {*ids, request.root_span_id, request.client_parent_span_id, None}
    known |= {attempt.span_id for attempt in request.attempts.values()}
    gateway_here = any(leg.process.role is GATEWAY and leg.marks for leg in request.legs)
    for span in spans:
        assert span.start_ns <= span.end_ns
        begin, end = span.attributes[a.BEGIN_NS.key], span.attributes[a.END_NS.key]
        assert isinstance(begin, int)
        assert isinstance(end, int)
        assert begin <= end
        assert span.parent_id in known or not gateway_here
        assert span.span_id != span.parent_id
    if gateway_here:
        root_of(spans)


def test_worker_that_only_says_that_the_answer_was_whole_makes_sound_spans() -> None:
    done = aborted(DECODE, 500, "completed", "stop_string", "gateway")
    request = request_of([(GATEWAY, Mark.RECEIVED, 0, RECEIVED), done])
    check_sound(request)
    assert root_of(assemble(request)).attributes[a.OUTCOME.key] == "completed"


@given(
    records=st.lists(mark_records(), max_size=40),
    lost=st.dictionaries(st.sampled_from(list(Role)), st.integers(0, 30_000)),
    gave_up=st.sampled_from([None, "evicted"]),
)
@settings(max_examples=300, deadline=None)
def test_any_marks_in_any_order_make_sound_spans(
    records: list[tuple[Role, MarkRecord]], lost: dict[Role, int], gave_up: str | None
) -> None:
    legs: dict[Role, Leg] = {}
    for role, item in records:
        legs.setdefault(role, Leg(process=process(role))).marks.append(item)
    for role, at_ns in lost.items():
        if role in legs:
            legs[role].lost_at_ns = START_NS + at_ns
    check_sound(
        CollectedRequest(
            request_id="r",
            trace_id=TRACE_ID,
            root_span_id=ROOT_ID,
            client_parent_span_id="c" * 16,
            attempts={1: AttemptIds(span_id="a" * 16, handoff_id="h")},
            legs=list(legs.values()),
            gave_up=gave_up,
        )
    )


@given(
    mode=st.sampled_from([Mode.PD, Mode.PD_EARLY]),
    kept=st.sets(st.integers(0, len(pd_moments()) - 1)),
    stop_us=st.integers(0, 21_000),
    outcome=st.sampled_from(["failed", "cancelled", "timed_out", "lost", "completed"]),
)
@settings(max_examples=200, deadline=None)
def test_any_subset_of_a_real_request_makes_sound_spans(
    mode: Mode, kept: set[int], stop_us: int, outcome: str
) -> None:
    moments = [m for i, m in enumerate(pd_moments(mode)) if i in kept and m[2] < stop_us]
    moments.append(completed(stop_us, outcome, "x", "gateway", None))
    check_sound(request_of(moments))


@pytest.mark.parametrize(
    "here",
    [
        {GATEWAY},
        {GATEWAY, PREFILL},
        {GATEWAY, DECODE},
        {GATEWAY, PREFILL, TRANSFER},
        {GATEWAY, TRANSFER, DECODE},
    ],
)
def test_what_other_hosts_have_is_not_missing(here: set[Role]) -> None:
    """Where each host has an agent, none has all marks. A stage that could be told by the marks
    that are here, and is not, is missing."""
    moments = [moment for moment in pd_moments() if moment[0] in here]
    root = assemble(request_of(moments))[0]
    assert a.INCOMPLETE.key not in root.attributes
    assert root.attributes[a.OUTCOME.key] == "completed"
    without = [moment for moment in moments if moment[1] is not Mark.ROUTED]
    assert "no gateway.route" in str(assemble(request_of(without))[0].attributes[a.INCOMPLETE.key])
