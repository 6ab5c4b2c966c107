"""The vocabulary: marks, stages, outcomes and wait reasons. The single source of truth.

A *mark* is an instant that one process records. A *stage* is the time between two marks, with an
owner, a kind, a sentence of meaning and a sentence of advice. Spans, checks, the glossary, CLI
order and colours derive from the tables below; adding a stage is one row. Standard library only.

The *chain* of a request is the sequence of stages whose parts sum to the whole request; its order
depends on the mode (`CHAINS`). Stages beside the chain (`prefill.hold`, `transfer.copy`, …) overlap
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.semconv import Attr


class Role(StrEnum):
    """Kind of process that records marks; `service.name` is `pd-<role>`."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    WORKER = "worker"  # colocated: one engine does both phases

    @property
    def service_name(self) -> str:
        return f"pd-{self.value}"


class Kind(StrEnum):
    """What a stage's time is spent on."""

    WORK = "work"
    WAIT = "wait"
    HOP = "hop"  # a message or a notification on its way between two processes


class Mode(StrEnum):
    """How a request crosses the processes; decides its chain."""

    PD = "pd"
    PD_EARLY = "pd_early"  # prefill forwards the first token before the KV has landed
    COLOCATED = "colocated"


class Outcome(StrEnum):
    """Terminal outcome of a request or of one attempt. DESIGN section 3."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    LOST = "lost"


class WaitReason(StrEnum):
    """What a waiting request waits for. `needed`, `free` and `limit` are in the unit named here."""

    KV_PAGES = "kv_pages"  # pages
    SLOTS = "slots"  # running requests
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - tokens per step
    CONCURRENCY = "concurrency"  # admitted requests
    NO_WORKER = "no_worker"  # ready workers
    PEER_NOT_READY = "peer_not_ready"  # the other leg has not answered
    WORKER_BUSY = "worker_busy"  # a step of other requests is running
    HEAD_OF_LINE = "head_of_line"  # an earlier request in the same queue
    PREEMPTED = "preempted"  # pages taken away during decode
    COPY_QUEUE = "copy_queue"  # copy jobs ahead
    BANDWIDTH = "bandwidth"  # copies that share the path
    PROCESS_PAUSED = "process_paused"  # its process stood still; `needed`: milliseconds that it did
    INJECTED = "injected"  # a fault hook (--allow-faults)
    UNKNOWN = "unknown"


class GapCause(StrEnum):
    """What made an output token late."""

    INTERFERING_PREFILL = "interfering_prefill"  # a prompt ran in the same worker
    BATCH_GROWTH = "batch_growth"  # the step itself took longer: more or longer sequences
    PREEMPTION = "preemption"  # its pages were taken away
    TRANSFER_LANDING = "transfer_landing"  # the loop took in KV that landed for others
    SCHEDULER_BUSY = "scheduler_busy"  # the loop did something else between two steps
    PROCESS_PAUSED = "process_paused"  # the whole process stood still: stopped or frozen
    INJECTED = "injected"  # a fault hook (--allow-faults)
    UNKNOWN = "unknown"


class StepKind(StrEnum):
    """What a forward pass computes. A ring holds the position in this list: append only."""

    PREFILL = "prefill"
    DECODE = "decode"


class Mark(IntEnum):
    """An instant in a request's life. Values are written to ring files: never reuse one."""

    # gateway
    RECEIVED = 1
    TOKENIZED = 2
    ADMITTED = 3
    ROUTED = 4
    DISPATCHED = 5
    FIRST_TOKEN_SENT = 6
    COMPLETED = 7
    # decode, or the colocated worker
    RESERVE_RECEIVED = 20
    PAGES_RESERVED = 21
    KV_NOTICED = 22
    DECODE_ADMITTED = 23
    FIRST_TOKEN_COMMITTED = 24
    DECODE_FINISHED = 25
    PREEMPTED = 26
    RESUMED = 27
    TOKEN_GAP = 28
    DECODE_RELEASED = 29
    # prefill, or the colocated worker
    PREFILL_RECEIVED = 40
    HANDSHAKE_DONE = 41
    PREFILL_STARTED = 42
    CHUNK_STARTED = 43
    CHUNK_FINISHED = 44
    PREFILL_FINISHED = 45
    FIRST_TOKEN_FORWARDED = 46
    SOURCE_RELEASED = 47
    # transfer
    COPY_QUEUED = 60
    COPY_STARTED = 61
    COPY_FINISHED = 62
    KV_LANDED = 63
    # any process
    WAITING = 80
    ABORTED = 81


@dataclass(frozen=True, slots=True)
class MarkSpec:
    """Who records a mark and which attribute values follow it, in this order."""

    roles: frozenset[Role]
    doc: str
    attrs: tuple[Attr, ...] = ()


def _roles(*roles: Role) -> frozenset[Role]:
    return frozenset(roles)


_GATEWAY = _roles(Role.GATEWAY)
_DECODE = _roles(Role.DECODE, Role.WORKER)
_PREFILL = _roles(Role.PREFILL, Role.WORKER)
_TRANSFER = _roles(Role.TRANSFER)
_ANY = frozenset(Role)

MARKS: Mapping[Mark, MarkSpec] = MappingProxyType(
    {
        Mark.RECEIVED: MarkSpec(
            _GATEWAY,
            "First byte of the request read.",
            (a.HTTP_METHOD, a.HTTP_ROUTE, a.OPERATION),
        ),
        Mark.TOKENIZED: MarkSpec(
            _GATEWAY,
            "Request parsed, validated and tokenized.",
            (a.REQUEST_MODEL, a.PROMPT_TOKENS, a.MAX_TOKENS, a.STREAM, a.MODE),
        ),
        Mark.ADMITTED: MarkSpec(
            _GATEWAY, "Concurrency limit passed and a worker pair is ready.", (a.BATCH_SIZE,)
        ),
        Mark.ROUTED: MarkSpec(
            _GATEWAY,
            "Worker pair chosen.",
            (
                a.PREFILL_WORKER,
                a.DECODE_WORKER,
                a.ROUTE_POLICY,
                a.ROUTE_CANDIDATES,
                a.ROUTE_REASON,
            ),
        ),
        Mark.DISPATCHED: MarkSpec(_GATEWAY, "Both legs are about to be sent."),
        Mark.FIRST_TOKEN_SENT: MarkSpec(
            _GATEWAY, "First content bytes written to the client's socket. TTFT ends here."
        ),
        Mark.COMPLETED: MarkSpec(
            _GATEWAY,
            "Last byte written, or the error answered: the request is over.",
            (
                a.OUTCOME,
                a.OUTCOME_REASON,
                a.OUTCOME_BY,
                a.HTTP_STATUS,
                a.OUTPUT_TOKENS,
                a.FINISH_REASON,
                a.CACHED_TOKENS,
                a.CONTENT_GAPS,
                a.LONGEST_GAP_SECONDS,
                a.GAP_COUNTS,
            ),
        ),
        Mark.RESERVE_RECEIVED: MarkSpec(_DECODE, "The request reached the decode worker's inbox."),
        Mark.PAGES_RESERVED: MarkSpec(
            _DECODE, "Destination KV pages reserved.", (a.KV_PAGES, a.KV_FREE_PAGES)
        ),
        Mark.KV_NOTICED: MarkSpec(_DECODE, "The decode scheduler saw that all KV has landed."),
        Mark.DECODE_ADMITTED: MarkSpec(_DECODE, "Joined the running batch.", (a.BATCH_SIZE,)),
        Mark.FIRST_TOKEN_COMMITTED: MarkSpec(
            _DECODE,
            "Boundary token committed, and sent on unless prefill already forwarded it.",
        ),
        Mark.DECODE_FINISHED: MarkSpec(
            _DECODE, "Last token generated.", (a.OUTPUT_TOKENS, a.FINISH_REASON, a.PREEMPTIONS)
        ),
        Mark.PREEMPTED: MarkSpec(
            _DECODE, "Lost its pages to running requests.", (a.KV_PAGES, a.KV_FREE_PAGES)
        ),
        Mark.RESUMED: MarkSpec(
            _DECODE,
            "Got pages back and rejoined the batch.",
            (a.KV_PAGES, a.RECOMPUTED_TOKENS),
        ),
        Mark.TOKEN_GAP: MarkSpec(
            _DECODE,
            "A token came late; the mark stands at its arrival.",
            (
                a.TOKEN_INDEX,
                a.GAP_SECONDS,
                a.GAP_CAUSE,
                a.GAP_CAUSE_SECONDS,
                a.STEP_NUMBER,
                a.BATCH_SIZE,
                a.WAIT_BLOCKER,
            ),
        ),
        Mark.DECODE_RELEASED: MarkSpec(
            _DECODE, "Destination pages freed.", (a.KV_PAGES, a.KV_FREE_PAGES)
        ),
        Mark.PREFILL_RECEIVED: MarkSpec(
            _PREFILL, "The request reached the prefill worker's inbox."
        ),
        Mark.HANDSHAKE_DONE: MarkSpec(
            _PREFILL, "Destination pages are known to prefill and compatible.", (a.KV_PAGES,)
        ),
        Mark.PREFILL_STARTED: MarkSpec(
            _PREFILL, "First forward pass of the prompt begins.", (a.CACHED_TOKENS, a.BATCH_SIZE)
        ),
        Mark.CHUNK_STARTED: MarkSpec(
            _PREFILL, "One chunk's forward pass begins.", (a.CHUNK_INDEX, a.CHUNK_TOKENS)
        ),
        Mark.CHUNK_FINISHED: MarkSpec(
            _PREFILL, "One chunk's forward pass ended.", (a.CHUNK_INDEX,)
        ),
        Mark.PREFILL_FINISHED: MarkSpec(
            _PREFILL, "Prompt computed; the boundary token is sampled. Its own KV is not."
        ),
        Mark.FIRST_TOKEN_FORWARDED: MarkSpec(
            _PREFILL, "Prefill sent the boundary token to the gateway itself."
        ),
        Mark.SOURCE_RELEASED: MarkSpec(
            _PREFILL, "Source pages released after the last read of them.", (a.KV_PAGES,)
        ),
        Mark.COPY_QUEUED: MarkSpec(
            _TRANSFER, "Copy job received.", (a.CHUNK_INDEX, a.KV_PAGES, a.KV_BYTES, a.BATCH_SIZE)
        ),
        Mark.COPY_STARTED: MarkSpec(_TRANSFER, "Bytes start to move.", (a.CHUNK_INDEX,)),
        Mark.COPY_FINISHED: MarkSpec(
            _TRANSFER,
            "Bytes of this job are visible at the destination.",
            (a.CHUNK_INDEX, a.KV_BYTES),
        ),
        Mark.KV_LANDED: MarkSpec(
            _TRANSFER, "All KV of the prompt is visible at the destination.", (a.KV_BYTES,)
        ),
        Mark.WAITING: MarkSpec(
            _ANY,
            "A scheduling decision left the request waiting; recorded when the reason changes.",
            (
                a.WAIT_STAGE,
                a.WAIT_REASON,
                a.WAIT_NEEDED,
                a.WAIT_FREE,
                a.WAIT_LIMIT,
                a.WAIT_POSITION,
                a.WAIT_BLOCKER,
                a.WAIT_BLOCKERS,
            ),
        ),
        Mark.ABORTED: MarkSpec(
            _ANY,
            "This process gave the request up; its open stage ends here.",
            (a.OUTCOME, a.OUTCOME_REASON, a.OUTCOME_BY),
        ),
    }
)


class Scale(StrEnum):
    """What a stage's healthy duration is proportional to; waits and hops are `CONSTANT`."""

    CONSTANT = "constant"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The time between two marks.

    begin     marks that may open it; the first one present in the attempt counts
    end       mark that closes it
    roles     processes that may own it: the one that records `end`
    parent    span it hangs below: `request` (the root) or `attempt`
    within    stage it details, for reading (`prefill.chunk` details `prefill.compute`)
    repeats   whether it may occur several times in an attempt
    server    exported with kind SERVER: the one span per role that request-rate views count
    scale     what its healthy duration grows with
    """

    name: str
    begin: tuple[Mark, ...]
    end: Mark
    roles: frozenset[Role]
    kind: Kind
    parent: str
    meaning: str
    advice: str
    within: str | None = None
    repeats: bool = False
    server: bool = False
    scale: Scale = Scale.CONSTANT


ROOT_SPAN = "request"
ATTEMPT_SPAN = "attempt"

STAGES: tuple[Stage, ...] = (
    Stage(
        name="gateway.ingest",
        begin=(Mark.RECEIVED,),
        end=Mark.TOKENIZED,
        roles=_GATEWAY,
        kind=Kind.WORK,
        parent=ROOT_SPAN,
        scale=Scale.PROMPT_TOKENS,
        meaning="The gateway reads, parses, validates and tokenizes the request.",
        advice="Look at the gateway's CPU and at prompt sizes; add gateways if it is saturated.",
    ),
    Stage(
        name="gateway.queue",
        begin=(Mark.TOKENIZED,),
        end=Mark.ADMITTED,
        roles=_GATEWAY,
        kind=Kind.WAIT,
        parent=ROOT_SPAN,
        meaning="Waits for the gateway's concurrency limit or for a ready worker pair.",
        advice="Raise --max-concurrency if workers are idle; otherwise add workers.",
    ),
    Stage(
        name="gateway.route",
        begin=(Mark.ADMITTED,),
        end=Mark.ROUTED,
        roles=_GATEWAY,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        meaning="The gateway picks a prefill and a decode worker.",
        advice="Should take microseconds; look for a busy event loop in the gateway.",
    ),
    Stage(
        name="gateway.dispatch",
        begin=(Mark.ROUTED,),
        end=Mark.DISPATCHED,
        roles=_GATEWAY,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        meaning="The gateway sends the request to both workers.",
        advice="Should take microseconds; look for full send queues to a worker.",
    ),
    Stage(
        name="hop.dispatch",
        begin=(Mark.DISPATCHED,),
        end=Mark.RESERVE_RECEIVED,
        roles=_DECODE,
        kind=Kind.HOP,
        parent=ATTEMPT_SPAN,
        meaning="The message is on its way from the gateway to the decode worker.",
        advice="Look for a worker that is stopped, swapping or starved of CPU.",
    ),
    Stage(
        name="decode.reserve",
        begin=(Mark.RESERVE_RECEIVED,),
        end=Mark.PAGES_RESERVED,
        roles=_DECODE,
        kind=Kind.WAIT,
        parent=ATTEMPT_SPAN,
        meaning="Waits for KV pages on the decode worker: admission control by capacity.",
        advice="Decode KV is full: add decode workers or pages, or cap max_tokens.",
    ),
    Stage(
        name="hop.publish",
        begin=(Mark.PAGES_RESERVED,),
        end=Mark.HANDSHAKE_DONE,
        roles=_PREFILL,
        kind=Kind.HOP,
        parent=ATTEMPT_SPAN,
        meaning="The destination pages are on their way from decode to prefill.",
        advice="Look for a prefill worker that is stopped or starved of CPU.",
    ),
    Stage(
        name="prefill.queue",
        begin=(Mark.HANDSHAKE_DONE, Mark.RESERVE_RECEIVED),
        end=Mark.PREFILL_STARTED,
        roles=_PREFILL,
        kind=Kind.WAIT,
        parent=ATTEMPT_SPAN,
        meaning="Waits for the prefill worker's token budget and for pages.",
        advice="Prefill is the bottleneck: add prefill workers; see the blocker's prompt length.",
    ),
    Stage(
        name="prefill.compute",
        begin=(Mark.PREFILL_STARTED,),
        end=Mark.PREFILL_FINISHED,
        roles=_PREFILL,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        server=True,
        scale=Scale.PROMPT_TOKENS,
        meaning="The prompt's forward passes, chunk by chunk, up to the boundary token.",
        advice="Compare per-token time with other workers; long prompts are long by nature.",
    ),
    Stage(
        name="transfer",
        begin=(Mark.PREFILL_FINISHED,),
        end=Mark.KV_LANDED,
        roles=_TRANSFER,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        server=True,
        meaning="What was left of the KV transfer when the prompt's compute had ended.",
        advice="See transfer.queue against transfer.copy: jobs ahead, or slow bytes.",
    ),
    Stage(
        name="hop.notice",
        begin=(Mark.KV_LANDED,),
        end=Mark.KV_NOTICED,
        roles=_DECODE,
        kind=Kind.HOP,
        parent=ATTEMPT_SPAN,
        meaning="The KV has landed but the decode scheduler has not looked yet.",
        advice="Bounded by one decode step; look at step time and batch size.",
    ),
    Stage(
        name="decode.queue",
        begin=(Mark.KV_NOTICED,),
        end=Mark.DECODE_ADMITTED,
        roles=_DECODE,
        kind=Kind.WAIT,
        parent=ATTEMPT_SPAN,
        meaning="Waits for a slot in the running batch.",
        advice="The decode batch is full: raise --max-running or add decode workers.",
    ),
    Stage(
        name="decode.first",
        begin=(Mark.DECODE_ADMITTED, Mark.PREFILL_FINISHED),
        end=Mark.FIRST_TOKEN_COMMITTED,
        roles=_DECODE,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        meaning="Commits the boundary token that prefill sampled; the prompt is not run again.",
        advice="Should take microseconds; a long one means a busy scheduler loop.",
    ),
    Stage(
        name="hop.token",
        begin=(Mark.FIRST_TOKEN_FORWARDED, Mark.FIRST_TOKEN_COMMITTED),
        end=Mark.FIRST_TOKEN_SENT,
        roles=_GATEWAY,
        kind=Kind.HOP,
        parent=ATTEMPT_SPAN,
        meaning="The first token is on its way through the gateway to the client's socket; in an "
        "answer sent in one piece it leaves with the last one.",
        advice="Look at the gateway's event loop and at slow clients.",
    ),
    Stage(
        name="decode.generate",
        begin=(Mark.FIRST_TOKEN_COMMITTED,),
        end=Mark.DECODE_FINISHED,
        roles=_DECODE,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        server=True,
        scale=Scale.OUTPUT_TOKENS,
        meaning="Generates the remaining tokens in the running batch.",
        advice="Compare per-token time with the batch size; see decode.gap and decode.preempted.",
    ),
    Stage(
        name="gateway.finish",
        begin=(Mark.DECODE_FINISHED,),
        end=Mark.COMPLETED,
        roles=_GATEWAY,
        kind=Kind.WORK,
        parent=ROOT_SPAN,
        meaning="The last tokens, or the error, travel to the client; the response is closed. Of "
        "an attempt that is tried again: its failure travels to the gateway.",
        advice="Look at slow clients and at the gateway's event loop.",
    ),
    # Beside the chain.
    Stage(
        name="prefill.bootstrap",
        begin=(Mark.PREFILL_RECEIVED,),
        end=Mark.HANDSHAKE_DONE,
        roles=_PREFILL,
        kind=Kind.WAIT,
        parent=ATTEMPT_SPAN,
        meaning="Prefill's view of the handshake: it waits for decode's reservation.",
        advice="Almost always decode.reserve seen from the other side.",
    ),
    Stage(
        name="prefill.chunk",
        begin=(Mark.CHUNK_STARTED,),
        end=Mark.CHUNK_FINISHED,
        roles=_PREFILL,
        kind=Kind.WORK,
        parent="prefill.compute",
        within="prefill.compute",
        repeats=True,
        scale=Scale.PROMPT_TOKENS,
        meaning="One forward pass over a part of the prompt.",
        advice="Tune --prefill-budget: small chunks interleave, large ones compute faster.",
    ),
    Stage(
        name="prefill.hold",
        begin=(Mark.PREFILL_FINISHED,),
        end=Mark.SOURCE_RELEASED,
        roles=_PREFILL,
        kind=Kind.WAIT,
        parent=ATTEMPT_SPAN,
        meaning="Source pages are held until the transfer has read them for the last time.",
        advice="Long holds shrink prefill's pool: look at transfer.",
    ),
    Stage(
        name="transfer.queue",
        begin=(Mark.COPY_QUEUED,),
        end=Mark.COPY_STARTED,
        roles=_TRANSFER,
        kind=Kind.WAIT,
        parent=ATTEMPT_SPAN,
        within="transfer",
        repeats=True,
        meaning="A copy job waits for the jobs ahead of it.",
        advice="The transfer process is the bottleneck: see its bytes per second.",
    ),
    Stage(
        name="transfer.copy",
        begin=(Mark.COPY_STARTED,),
        end=Mark.COPY_FINISHED,
        roles=_TRANSFER,
        kind=Kind.WORK,
        parent=ATTEMPT_SPAN,
        within="transfer",
        repeats=True,
        meaning="Bytes of one chunk move from source pages to destination pages.",
        advice="Compare bytes per second with the path's bandwidth.",
    ),
    Stage(
        name="decode.preempted",
        begin=(Mark.PREEMPTED,),
        end=Mark.RESUMED,
        roles=_DECODE,
        kind=Kind.WAIT,
        parent="decode.generate",
        within="decode.generate",
        repeats=True,
        meaning="The request lost its pages to others and waits to get them back.",
        advice="Decode KV is overcommitted: add pages or lower --max-running.",
    ),
    Stage(
        name="decode.gap",
        begin=(),  # opened by the length that TOKEN_GAP carries
        end=Mark.TOKEN_GAP,
        roles=_DECODE,
        kind=Kind.WAIT,
        parent="decode.generate",
        within="decode.generate",
        repeats=True,
        meaning="The time between two output tokens exceeded the gap threshold.",
        advice="See its cause: preemption, a long step, or a prefill in the same worker.",
    ),
)

STAGE_BY_NAME: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in STAGES})

_PD_CHAIN = (
    "gateway.ingest",
    "gateway.queue",
    "gateway.route",
    "gateway.dispatch",
    "hop.dispatch",
    "decode.reserve",
    "hop.publish",
    "prefill.queue",
    "prefill.compute",
    "transfer",
    "hop.notice",
    "decode.queue",
    "decode.first",
    "hop.token",
    "decode.generate",
    "gateway.finish",
)
# With early forwarding the client has the first token while the KV is still on its way.
_EARLY_CHAIN = (
    *_PD_CHAIN[: _PD_CHAIN.index("transfer")],
    "hop.token",
    "transfer",
    "hop.notice",
    "decode.queue",
    "decode.first",
    "decode.generate",
    "gateway.finish",
)
_COLOCATED_CHAIN = tuple(
    name
    for name in _PD_CHAIN
    if name not in {"decode.reserve", "hop.publish", "transfer", "hop.notice", "decode.queue"}
)

CHAINS: Mapping[Mode, tuple[Stage, ...]] = MappingProxyType(
    {
        Mode.PD: tuple(STAGE_BY_NAME[name] for name in _PD_CHAIN),
        Mode.PD_EARLY: tuple(STAGE_BY_NAME[name] for name in _EARLY_CHAIN),
        Mode.COLOCATED: tuple(STAGE_BY_NAME[name] for name in _COLOCATED_CHAIN),
    }
)
"""Stages in causal order per mode. The partition of a request's interval follows this order."""

OPTIONAL_STAGES: frozenset[str] = frozenset({"hop.token"})
"""Chain stages that a completed request may lack: a stream without content has no first token."""


class Gauge(IntEnum):
    """In-place gauges of a ring header; readable while the process hangs. Values are slots."""

    KV_PAGES_TOTAL = 0
    KV_PAGES_FREE = 1
    KV_PAGES_RESERVED = 2
    KV_PAGES_USED = 3
    KV_PAGES_CACHED = 4
    RUNNING = 5
    WAITING = 6
    RESERVING = 7
    TRANSFERRING = 8
    STEPS = 9
    LAST_PROGRESS_NS = 10
    COPY_JOBS_WAITING = 11
    COPIED_BYTES = 12
    IN_FLIGHT = 13
    HELD_PAGES = 14
    RECORDING_DETAIL = 15
    RECORDING_SHARE_PPM = 16


TERMS: Mapping[str, str] = MappingProxyType(
    {
        "attempt": "One try at a request by one pair of workers, counted from 1. There is a second "
        "one only if the first failed before anything of the answer was sent.",
        "leg": "One worker's part in an attempt: the prefill leg computes the prompt, the decode "
        "leg generates. A colocated worker has one leg for both.",
        "pair": "The prefill worker and the decode worker of an attempt. Two workers fit together "
        "if model, tokenizer, data type, page size and protocol agree.",
        "handoff": "What passes a prompt's KV from the prefill leg to the decode leg. Its id "
        "(`pd.handoff.id`) stands for the attempt in messages and logs.",
        "handshake": "Decode tells prefill which of its pages the KV is for, and both that they "
        "fit together.",
        "boundary token": "The first output token: prefill samples it where prompt and answer "
        "meet, decode commits it. Its own KV is computed by decode's first step.",
        "beside": "Of a stage: it shows time that the chain has already, from another process "
        "(`prefill.bootstrap`), in detail (`transfer.copy`), or past the answer (`prefill.hold`). "
        "It adds nothing to the sum.",
        "step": "One forward pass of a worker, over the requests of its batch.",
        "blocker": "A request that is in the way of another: it holds the pages, the slot or the "
        "worker that the other one waits for.",
        "usual": "The median of the same stage in the other completed requests, for as many tokens "
        "where the stage grows with tokens.",
        "excess": "What a stage took above its usual time. The percentage in a verdict is the "
        "excess as a part of the whole request.",
    }
)
"""Words of the pages, messages and views that are no stage, mark, reason or outcome."""
