"""Requests as their processes would have marked them: the input of assembly, with round times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdtrace import semconv as a
from pdtrace.assembly.collected import AttemptIds, CollectedRequest, Leg, Process
from pdtrace.clock import ClockAnchor
from pdtrace.ring.records import MarkRecord, Value
from pdtrace.semconv import Attr
from pdtrace.spans import Resource, Span
from pdtrace.stages import MARKS, Mark, Mode, Role

US = 1_000
MS = 1_000_000
START_NS = 5_000_000_000
WALL_NS = 1_800_000_000_000_000_000
ANCHOR = ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
ROOT_ID = "b7ad6b7169203331"

Values = Mapping[Attr, Value]
Moment = tuple[Role, Mark, int, Values]
"""Who recorded what, when (µs since the request began), and its attributes."""

GATEWAY, PREFILL, TRANSFER, DECODE, WORKER = (
    Role.GATEWAY,
    Role.PREFILL,
    Role.TRANSFER,
    Role.DECODE,
    Role.WORKER,
)


def process(role: Role, *, instance: str | None = None, clock_id: str = "host-1") -> Process:
    name = instance or f"{role.value}-0"
    return Process(
        role=role,
        instance=name,
        clock_id=clock_id,
        anchor=ANCHOR,
        resource=Resource(
            attributes={
                "service.name": role.service_name,
                "service.instance.id": name,
                "host.id": "host-1",
            }
        ),
    )


def record(mark: Mark, t_ns: int, values: Values | None = None, *, attempt: int = 1) -> MarkRecord:
    given = values or {}
    unknown = set(given) - set(MARKS[mark].attrs)
    assert not unknown, f"{mark.name} does not carry {unknown}"
    aligned = tuple(given.get(attr) for attr in MARKS[mark].attrs)
    return MarkRecord(mark=mark, key=1, attempt=attempt, t_ns=t_ns, values=aligned)


def request_of(
    moments: Iterable[Moment], *, attempt: int = 1, lost: Mapping[Role, int] | None = None
) -> CollectedRequest:
    """One leg per role. `lost`: processes found dead, with the µs when they were."""
    legs: dict[Role, Leg] = {}
    for role, mark, at_us, values in moments:
        leg = legs.setdefault(role, Leg(process=process(role)))
        leg.marks.append(record(mark, START_NS + at_us * US, values, attempt=attempt))
    for role, at_us in (lost or {}).items():
        legs[role].lost_at_ns = START_NS + at_us * US
    return CollectedRequest(
        request_id="req-1",
        trace_id=TRACE_ID,
        root_span_id=ROOT_ID,
        attempts={
            1: AttemptIds(span_id="00f067aa0ba902b7", handoff_id="ho-1"),
            2: AttemptIds(span_id="00f067aa0ba902b8", handoff_id="ho-2"),
        },
        legs=list(legs.values()),
    )


def tokenized(mode: Mode, *, stream: bool = True) -> Values:
    return {
        a.REQUEST_MODEL: "SmolLM2-135M-Instruct",
        a.PROMPT_TOKENS: 96,
        a.MAX_TOKENS: 16,
        a.STREAM: stream,
        a.MODE: mode.value,
    }


RECEIVED: Values = {
    a.HTTP_METHOD: "POST",
    a.HTTP_ROUTE: "/v1/chat/completions",
    a.OPERATION: "chat",
}
ROUTED: Values = {
    a.PREFILL_WORKER: "prefill-0",
    a.DECODE_WORKER: "decode-0",
    a.ROUTE_POLICY: "round_robin",
    a.ROUTE_CANDIDATES: 1,
    a.ROUTE_REASON: "next in turn",
}
COMPLETED: Values = {
    a.OUTCOME: "completed",
    a.HTTP_STATUS: 200,
    a.OUTPUT_TOKENS: 16,
    a.FINISH_REASON: "length",
    a.CACHED_TOKENS: 32,
}


def pd_moments(mode: Mode = Mode.PD, *, stream: bool = True) -> list[Moment]:
    """A healthy request of 20 ms through prefill and decode, two chunks."""
    early = mode is Mode.PD_EARLY
    forwarded: list[Moment] = [(PREFILL, Mark.FIRST_TOKEN_FORWARDED, 6_050, {})] if early else []
    sent: Moment = (GATEWAY, Mark.FIRST_TOKEN_SENT, 6_200 if early else 7_600, {})
    moments: Sequence[Moment] = [
        (GATEWAY, Mark.RECEIVED, 0, RECEIVED),
        (GATEWAY, Mark.TOKENIZED, 400, tokenized(mode, stream=stream)),
        (GATEWAY, Mark.ADMITTED, 500, {a.BATCH_SIZE: 1}),
        (GATEWAY, Mark.ROUTED, 520, ROUTED),
        (GATEWAY, Mark.DISPATCHED, 560, {}),
        (PREFILL, Mark.PREFILL_RECEIVED, 700, {}),
        (DECODE, Mark.RESERVE_RECEIVED, 720, {}),
        (
            DECODE,
            Mark.WAITING,
            730,
            {
                a.WAIT_STAGE: "decode.reserve",
                a.WAIT_REASON: "kv_pages",
                a.WAIT_NEEDED: 7,
                a.WAIT_FREE: 2,
                a.WAIT_LIMIT: 64,
                a.WAIT_POSITION: 0,
                a.WAIT_BLOCKER: "req-0",
            },
        ),
        (DECODE, Mark.PAGES_RESERVED, 1_720, {a.KV_PAGES: 7, a.KV_FREE_PAGES: 1}),
        (PREFILL, Mark.HANDSHAKE_DONE, 1_900, {a.KV_PAGES: 7}),
        (PREFILL, Mark.PREFILL_STARTED, 2_000, {a.CACHED_TOKENS: 32, a.BATCH_SIZE: 2}),
        (PREFILL, Mark.CHUNK_STARTED, 2_000, {a.CHUNK_INDEX: 0, a.CHUNK_TOKENS: 32}),
        (PREFILL, Mark.CHUNK_FINISHED, 4_000, {a.CHUNK_INDEX: 0}),
        (PREFILL, Mark.CHUNK_STARTED, 4_010, {a.CHUNK_INDEX: 1, a.CHUNK_TOKENS: 32}),
        (
            TRANSFER,
            Mark.COPY_QUEUED,
            4_020,
            {a.CHUNK_INDEX: 0, a.KV_PAGES: 2, a.KV_BYTES: 4096, a.BATCH_SIZE: 1},
        ),
        (TRANSFER, Mark.COPY_STARTED, 4_060, {a.CHUNK_INDEX: 0}),
        (TRANSFER, Mark.COPY_FINISHED, 4_500, {a.CHUNK_INDEX: 0, a.KV_BYTES: 4096}),
        (PREFILL, Mark.CHUNK_FINISHED, 6_000, {a.CHUNK_INDEX: 1}),
        (PREFILL, Mark.PREFILL_FINISHED, 6_000, {}),
        *forwarded,
        *([sent] if early else []),
        (
            TRANSFER,
            Mark.COPY_QUEUED,
            6_020,
            {a.CHUNK_INDEX: 1, a.KV_PAGES: 2, a.KV_BYTES: 4096, a.BATCH_SIZE: 1},
        ),
        (TRANSFER, Mark.COPY_STARTED, 6_060, {a.CHUNK_INDEX: 1}),
        (TRANSFER, Mark.COPY_FINISHED, 6_500, {a.CHUNK_INDEX: 1, a.KV_BYTES: 4096}),
        (TRANSFER, Mark.KV_LANDED, 6_510, {a.KV_BYTES: 8192}),
        (PREFILL, Mark.SOURCE_RELEASED, 6_700, {a.KV_PAGES: 6}),
        (DECODE, Mark.KV_NOTICED, 7_000, {}),
        (DECODE, Mark.DECODE_ADMITTED, 7_300, {a.BATCH_SIZE: 3}),
        (DECODE, Mark.FIRST_TOKEN_COMMITTED, 7_350, {}),
        *([] if early else [sent]),
        (
            DECODE,
            Mark.TOKEN_GAP,
            12_000,
            {a.TOKEN_INDEX: 4, a.GAP_SECONDS: 0.002, a.GAP_CAUSE: "scheduler_busy"},
        ),
        (DECODE, Mark.PREEMPTED, 13_000, {a.KV_PAGES: 7, a.KV_FREE_PAGES: 7}),
        (DECODE, Mark.RESUMED, 14_000, {a.KV_PAGES: 8}),
        (
            DECODE,
            Mark.DECODE_FINISHED,
            19_000,
            {a.OUTPUT_TOKENS: 16, a.FINISH_REASON: "length", a.PREEMPTIONS: 1},
        ),
        (DECODE, Mark.DECODE_RELEASED, 19_020, {a.KV_PAGES: 8, a.KV_FREE_PAGES: 9}),
        (GATEWAY, Mark.COMPLETED, 20_000, COMPLETED),
    ]
    return list(moments)


def colocated_moments() -> list[Moment]:
    """A healthy request through one engine."""
    routed = {**ROUTED, a.PREFILL_WORKER: "worker-0", a.DECODE_WORKER: "worker-0"}
    return [
        (GATEWAY, Mark.RECEIVED, 0, RECEIVED),
        (GATEWAY, Mark.TOKENIZED, 400, tokenized(Mode.COLOCATED)),
        (GATEWAY, Mark.ADMITTED, 500, {a.BATCH_SIZE: 1}),
        (GATEWAY, Mark.ROUTED, 520, routed),
        (GATEWAY, Mark.DISPATCHED, 560, {}),
        (WORKER, Mark.PREFILL_RECEIVED, 700, {}),
        (WORKER, Mark.RESERVE_RECEIVED, 720, {}),
        (WORKER, Mark.PREFILL_STARTED, 2_000, {a.CACHED_TOKENS: 0, a.BATCH_SIZE: 2}),
        (WORKER, Mark.CHUNK_STARTED, 2_000, {a.CHUNK_INDEX: 0, a.CHUNK_TOKENS: 96}),
        (WORKER, Mark.CHUNK_FINISHED, 6_000, {a.CHUNK_INDEX: 0}),
        (WORKER, Mark.PREFILL_FINISHED, 6_000, {}),
        (WORKER, Mark.FIRST_TOKEN_COMMITTED, 6_050, {}),
        (GATEWAY, Mark.FIRST_TOKEN_SENT, 6_300, {}),
        (WORKER, Mark.DECODE_FINISHED, 19_000, {a.OUTPUT_TOKENS: 16, a.PREEMPTIONS: 0}),
        (GATEWAY, Mark.COMPLETED, 20_000, COMPLETED),
    ]


OPEN_AT_US = {
    "gateway.ingest": 200,
    "gateway.queue": 450,
    "gateway.route": 510,
    "gateway.dispatch": 540,
    "hop.dispatch": 600,
    "decode.reserve": 1_000,
    "hop.publish": 1_800,
    "prefill.queue": 1_950,
    "prefill.compute": 5_000,
    "transfer": 6_100,
    "hop.notice": 6_800,
    "decode.queue": 7_100,
    "decode.first": 7_320,
    "hop.token": 7_400,
    "decode.generate": 15_000,
    "gateway.finish": 19_500,
}
"""An instant in each chain stage of `pd_moments()`, µs since the request began."""


def until(moments: Iterable[Moment], at_us: int) -> list[Moment]:
    """What had been marked before `at_us`."""
    return [moment for moment in moments if moment[2] < at_us]


def aborted(role: Role, at_us: int, outcome: str, reason: str, by: str) -> Moment:
    values: Values = {a.OUTCOME: outcome, a.OUTCOME_REASON: reason, a.OUTCOME_BY: by}
    return (role, Mark.ABORTED, at_us, values)


def completed(at_us: int, outcome: str, reason: str, by: str, status: int | None) -> Moment:
    values: Values = {
        a.OUTCOME: outcome,
        a.OUTCOME_REASON: reason,
        a.OUTCOME_BY: by,
        a.HTTP_STATUS: status,
    }
    return (GATEWAY, Mark.COMPLETED, at_us, values)


def drawn(spans: Sequence[Span]) -> str:
    """The tree as text: name, kind unless internal, begin and end in µs, status, service."""
    children: dict[str | None, list[Span]] = {}
    ids = {span.span_id for span in spans}
    for span in spans:
        children.setdefault(span.parent_id if span.parent_id in ids else None, []).append(span)
    lines: list[str] = []

    def draw(span: Span, depth: int) -> None:
        begin, end = ((t - WALL_NS) // US for t in (span.start_ns, span.end_ns))
        kind = "" if span.kind.name == "INTERNAL" else f" {span.kind.name}"
        status = "" if span.status.name == "UNSET" else f" {span.status.name}"
        outcome = span.attributes.get(a.OUTCOME.key)
        ended = "" if outcome in (None, "completed") else f" [{outcome}]"
        service = span.resource.service_name
        lines.append(f"{'  ' * depth}{span.name}{kind} {begin}-{end} {service}{status}{ended}")
        for child in sorted(children.get(span.span_id, ()), key=lambda s: (s.start_ns, s.end_ns)):
            draw(child, depth + 1)

    for top in children.get(None, ()):
        draw(top, 0)
    return "\n".join(lines)
