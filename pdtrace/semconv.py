"""Attribute names that spans, marks and metrics use, each defined once.

Owns names, value types and their meaning; knows nothing of which mark carries which attribute
(`pdtrace.stages`). `gen_ai.*` names follow the OpenTelemetry GenAI conventions (development
status, `SEMCONV_VERSION`); everything they do not cover lives under `pd.*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SEMCONV_VERSION = "1.39.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{SEMCONV_VERSION}"


class AttrType(StrEnum):
    """Type of a recorded attribute value; fixes its encoding in a ring record."""

    INT = "int"
    FLOAT = "float"
    STR = "str"
    BOOL = "bool"


@dataclass(frozen=True, slots=True)
class Attr:
    """One attribute: OpenTelemetry key, value type and a sentence of meaning.

    `on_root` copies the value to the request's root span, so that one search finds it.
    """

    key: str
    type: AttrType
    doc: str
    on_root: bool = False


def _int(key: str, doc: str, *, on_root: bool = False) -> Attr:
    return Attr(key, AttrType.INT, doc, on_root)


def _float(key: str, doc: str, *, on_root: bool = False) -> Attr:
    return Attr(key, AttrType.FLOAT, doc, on_root)


def _str(key: str, doc: str, *, on_root: bool = False) -> Attr:
    return Attr(key, AttrType.STR, doc, on_root)


def _bool(key: str, doc: str, *, on_root: bool = False) -> Attr:
    return Attr(key, AttrType.BOOL, doc, on_root)


# Identity: set on spans by the assembler, from the recorder's identity records.
REQUEST_ID = _str("pd.request.id", "Caller's request id; the same in every process.")
HANDOFF_ID = _str("pd.handoff.id", "Id of one attempt's prefill-to-decode handoff.")
ATTEMPT = _int("pd.attempt", "Attempt number, from 1.")
SPAN = _str("pd.span", "request (the root) or attempt; absent on stages, which have pd.stage.")
ROLE = _str("pd.role", "Role of the recording process, on its resource: names are the user's.")
STAGE = _str("pd.stage", "Stage name as in `pdtrace stages`.")
STAGE_KIND = _str("pd.stage.kind", "work, wait or hop.")
MODE = _str(
    "pd.mode", "pd, pd_early (first token forwarded by prefill) or colocated.", on_root=True
)
BEGIN_NS = _int("pd.begin_ns", "Exact begin, CLOCK_MONOTONIC nanoseconds of the gateway's host.")
END_NS = _int("pd.end_ns", "Exact end, CLOCK_MONOTONIC nanoseconds of the gateway's host.")
VIOLATION = _str("pd.violation", "What is impossible about this span's marks; absent when sound.")
INCOMPLETE = _str("pd.incomplete", "Why the trace is known to lack something; absent when whole.")
OPEN = _bool("pd.open", "True while in flight: the end is the instant of the look, not an end.")
STUCK_SECONDS = _float("pd.stuck.age", "Age at which a stage was reported as stuck, seconds.")
STUCK_AFTER_SECONDS = _float("pd.stuck.threshold", "Age above which it counts as stuck, seconds.")

# Clocks of other hosts.
CLOCK_OFFSET_NS = _int(
    "pd.clock.offset_ns",
    "What was added to this process's monotonic times to reach the gateway host's, nanoseconds.",
)
CLOCK_ERROR_NS = _int(
    "pd.clock.error_ns", "Bound on the error of that offset, nanoseconds; absent on one host."
)

# Outcome.
OUTCOME = _str(
    "pd.outcome", "completed, failed, cancelled, timed_out, rejected or lost.", on_root=True
)
OUTCOME_REASON = _str("pd.outcome.reason", "Stable code of the reason.", on_root=True)
OUTCOME_STAGE = _str("pd.outcome.stage", "Stage that was active when the request ended.")
OUTCOME_BY = _str("pd.outcome.by", "Who ended it: client, gateway, a worker id.", on_root=True)
ERROR_TYPE = _str("error.type", "Stable error code (OpenTelemetry general convention).")

# Verdict.
STALL_STAGE = _str("pd.stall.stage", "Stage that exceeded its own baseline by most.")
STALL_SECONDS = _float("pd.stall.duration", "Seconds above that stage's baseline.")
STALL_REASON = _str("pd.stall.reason", "Wait reason of that stage, where one was recorded.")
KEEP = _str(
    "pd.keep",
    "Why this request must not be sampled away (`pdtrace.agent.keeping.Reason`); on each of its "
    "spans, absent where nothing is wrong.",
)

# Routing.
PREFILL_WORKER = _str("pd.prefill.worker", "Instance id of the prefill worker.", on_root=True)
DECODE_WORKER = _str("pd.decode.worker", "Instance id of the decode worker.", on_root=True)
ROUTE_POLICY = _str("pd.route.policy", "round_robin, least_loaded or prefix_aware.")
ROUTE_CANDIDATES = _int("pd.route.candidates", "Pairs that could have served the request.")
ROUTE_REASON = _str("pd.route.reason", "Why this pair, in one phrase.")

# Waits.
WAIT_REASON = _str("pd.wait.reason", "What the request waited for (`pdtrace.stages.WaitReason`).")
WAIT_NEEDED = _int("pd.wait.needed", "Units needed (pages, slots, tokens: see the reason).")
WAIT_FREE = _int("pd.wait.free", "Units free when the reason was recorded.")
WAIT_LIMIT = _int("pd.wait.limit", "Limit in force, same units.")
WAIT_POSITION = _int("pd.wait.position", "Requests ahead in the queue.")
WAIT_BLOCKER = _str("pd.wait.blocker", "Request id that was in the way, where known.")
WAIT_BLOCKERS = _str(
    "pd.wait.blockers",
    "Request ids in the way, the first of them `pd.wait.blocker`; string[] on spans.",
)
WAIT_CHANGES = _int(
    "pd.wait.changes", "Wait records of this stage, when more than the events shown."
)
WAIT_STAGE = _str("pd.wait.stage", "Stage whose wait this describes.")

# Sizes.
PROMPT_TOKENS = _int("gen_ai.usage.input_tokens", "Prompt tokens.", on_root=True)
OUTPUT_TOKENS = _int("gen_ai.usage.output_tokens", "Tokens generated.", on_root=True)
CACHED_TOKENS = _int(
    "gen_ai.usage.cache_read.input_tokens", "Prompt tokens found in the prefix cache.", on_root=True
)
CHUNK_INDEX = _int("pd.chunk.index", "Prefill chunk or copy job number, from 0.")
CHUNK_TOKENS = _int("pd.chunk.tokens", "Prompt tokens computed in this chunk.")
KV_PAGES = _int("pd.kv.pages", "KV pages concerned.")
KV_FREE_PAGES = _int("pd.kv.free_pages", "KV pages free after the event.")
KV_BYTES = _int("pd.kv.bytes", "Bytes of KV moved.")
KV_HELD_SECONDS = _float("pd.kv.held", "Seconds from reserving to freeing the destination pages.")
BATCH_SIZE = _int("pd.batch.size", "Requests in the batch or queue at this instant.")
TOKEN_INDEX = _int("pd.token.index", "Index of an output token, from 0.")
GAP_SECONDS = _float("pd.gap.duration", "Length of the gap between two output tokens, seconds.")
GAP_CAUSE = _str("pd.gap.cause", "Cause of the gap (`pdtrace.stages.GapCause`).")
GAP_CAUSE_SECONDS = _float("pd.gap.cause.duration", "Part of the gap that its cause took, seconds.")
OVERRUN_SECONDS = _float("pd.overrun", "Seconds that decode went on after the answer was complete.")
RECOMPUTED_TOKENS = _int(
    "pd.kv.recomputed_tokens", "Positions whose KV was lost with its pages and computed again."
)
PREEMPTIONS = _int("pd.preemptions", "Times this request lost its pages during decode.")

# Steps: forward passes.
STEP_NUMBER = _int("pd.step.number", "Forward pass of this process, from 1.")
STEP_KIND = _str("pd.step.kind", "prefill or decode.")
STEP_TOKENS = _int("pd.step.tokens", "Tokens computed in the step.")
STEP_MEMBERS = _str("pd.step.members", "Request ids of the step's members; string[] on spans.")
STEPS = _int("pd.steps", "Forward passes that this stage took part in.")
STEP_SLOWEST_NUMBER = _int("pd.step.slowest.number", "The slowest of them.")
STEP_SLOWEST_SECONDS = _float("pd.step.slowest.duration", "How long that one took, seconds.")

# Request, on the root (OpenTelemetry GenAI and HTTP conventions).
OPERATION = _str("gen_ai.operation.name", "chat or text_completion.", on_root=True)
PROVIDER = _str("gen_ai.provider.name", "Always `pdtrace`.", on_root=True)
REQUEST_MODEL = _str("gen_ai.request.model", "Model the caller asked for.", on_root=True)
MAX_TOKENS = _int("gen_ai.request.max_tokens", "Upper bound on output tokens.", on_root=True)
STREAM = _bool("gen_ai.request.stream", "Whether the caller asked for a stream.", on_root=True)
FINISH_REASON = _str("gen_ai.response.finish_reasons", "stop or length.", on_root=True)
HTTP_METHOD = _str("http.request.method", "HTTP method.", on_root=True)
HTTP_ROUTE = _str("http.route", "Route template.", on_root=True)
HTTP_STATUS = _int("http.response.status_code", "HTTP status sent.", on_root=True)
TTFT_SECONDS = _float(
    "pd.ttft", "Seconds from first request byte to first content byte written.", on_root=True
)

CONTENT_GAPS = _int(
    "pd.content.gaps", "Times between two writes of content to the client's socket.", on_root=True
)
LONGEST_GAP_SECONDS = _float(
    "pd.content.longest_gap", "The longest of them, seconds; absent without one.", on_root=True
)
GAP_COUNTS = _str(
    "pd.content.gap_counts",
    "How many of them by length, such as `0.15-0.2:12 0.3-0.5:1` (seconds).",
    on_root=True,
)


def all_attrs() -> tuple[Attr, ...]:
    """Every attribute defined here, in order of definition."""
    return tuple(value for value in globals().values() if isinstance(value, Attr))
