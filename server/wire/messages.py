"""Every message between server processes, as frozen tagged structs.

Owns the shapes and their version; knows nothing of sockets (`server.wire.sockets`). Encoding is
MessagePack by msgspec behind a four-byte envelope `b"PDT" + version`; nothing is ever unpickled.
`tests/contract/test_wire_bytes.py` holds golden bytes: a change of any byte needs a version.

WIRE_VERSION history
  1  first version
  2  who answers: incarnations of gateway and transfer; CopyFailed.settled; the handoff's protocol
  3  copy jobs that were lost: CancelCopies.ask_jobs, CopiesDrained.jobs, CopyJob.again_to
  4  whether a process is recorded: Heartbeat.unrecorded
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdtrace.recorder import RequestContext
from server.engine.base import ModelInfo, SamplingParams
from server.injection.fault import Fault
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor

WIRE_VERSION = 4
ENVELOPE = b"PDT" + bytes([WIRE_VERSION])
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
HANDOFF_PROTOCOL = 1
"""What prefill and decode expect of each other in a handoff: compared by the handshake, so that
workers of two builds that speak the same wire version can still refuse each other."""


StopString = Annotated[str, Meta(min_length=1)]


class WireError(Exception):
    """A frame that is no message of this version. Its text says what was got and expected."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag is the class name."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a process. `incarnation` is random per start: a restarted process is another."""

    instance: str
    endpoint: str
    incarnation: str


class PoolRef(msgspec.Struct, frozen=True, kw_only=True):
    """A KV pool as a copy job names it; the transfer process knows it by registration."""

    owner: str
    incarnation: str


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What routing looks at. Pages and requests at the instant of the heartbeat."""

    pages_total: int = 0
    pages_free: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0


# -- membership -------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True, kw_only=True):
    """Any process → gateway, every `heartbeat_s` from its I/O thread. Also its registration.

    progress_age_s   seconds since the scheduler loop last went round (0 while it is idle)
    busy             whether it has work: an old `progress_age_s` with work is a hang
    ignored          messages without effect since its start, as "why.Type"
    heard            latest of the gateway's answers that the loop has taken in, by `seq`; 0: none
    taken            handoffs whose request has come and that the gateway may not know of yet
    denied           connections that were not let in since its start, by plane: control, transfer
    leaving          its last one: it was told to stop, and has let go of everything
    unrecorded       what it does is not recorded: settings say so, or no ring could be made
    """

    peer: Peer
    role: str
    seq: int
    sent_ns: int
    load: WorkerLoad
    progress_age_s: float
    busy: bool
    draining: bool = False
    info: ModelInfo | None = None
    layout: KvLayout | None = None
    ignored: dict[str, int] = {}
    heard: int = 0
    taken: tuple[str, ...] = ()
    denied: dict[str, int] = {}
    leaving: bool = False
    unrecorded: bool = False


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Gateway → sender of a heartbeat, at once: how far apart are their clocks?

    incarnation, seq, sent_ns   of the heartbeat, as it had them
    received_ns                 when it came out of the gateway's socket
    answered_ns                 when this left; both on the clock that `clock_id` names
    clock_id                    `<host id>/<boot id>`; "" from a gateway that does not record
    gateway                     who answers: another incarnation is another gateway
    """

    incarnation: str
    seq: int
    sent_ns: int
    received_ns: int
    answered_ns: int
    clock_id: str
    gateway: Peer


class RegisterPool(Message, frozen=True, kw_only=True):
    """Worker → its host's transfer process, at start and with every heartbeat (idempotent)."""

    peer: Peer
    pool: PoolDescriptor


# -- gateway → workers ------------------------------------------------------------------------


class DecodeRequest(Message, frozen=True, kw_only=True):
    """Gateway → decode: reserve room for this request and generate once its KV has landed.

    prompt_digest   digest of the token ids: both legs must speak of the same history
    prompt_ids      from which KV that is lost to preemption is computed again; none: it cannot be
    stop            stop strings; stop_token_ids come from the model unless ignore_eos
    early           prefill forwards the boundary token itself
    faults          stage name → delay in milliseconds; empty unless the server allows faults
    """

    context: RequestContext
    prompt_len: int
    prompt_digest: str
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[StopString, ...]
    ignore_eos: bool
    early: bool
    prefill: Peer
    gateway: Peer
    faults: dict[str, int] = {}
    prompt_ids: tuple[int, ...] = ()


class PrefillRequest(Message, frozen=True, kw_only=True):
    """Gateway → prefill: compute this prompt once decode has published its pages.

    ignore_eos   with `early`: a boundary token that ends the sequence does not finish the request
    """

    context: RequestContext
    prompt_ids: tuple[int, ...]
    prompt_digest: str
    max_tokens: int
    sampling: SamplingParams
    early: bool
    decode: Peer
    gateway: Peer
    ignore_eos: bool = False
    faults: dict[str, int] = {}


class ColocatedRequest(Message, frozen=True, kw_only=True):
    """Gateway → colocated worker: both phases."""

    context: RequestContext
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[StopString, ...]
    ignore_eos: bool
    gateway: Peer
    faults: dict[str, int] = {}


class Cancel(Message, frozen=True, kw_only=True):
    """Gateway → a leg: stop, drain, free, answer with LegClosed, also when it is unknown."""

    handoff_id: str
    outcome: str
    reason: str
    by: str
    gateway: Peer


# -- between the legs -------------------------------------------------------------------------


class PagesReserved(Message, frozen=True, kw_only=True):
    """Decode → prefill: destination pages and everything the handshake compares."""

    handoff_id: str
    decode: Peer
    fingerprint: str
    layout: KvLayout
    pool: PoolRef
    pages: tuple[int, ...]
    transfer_address: str | None  # where the destination host receives KV; None: same host
    protocol: int = HANDOFF_PROTOCOL


class Handoff(Message, frozen=True, kw_only=True):
    """Prefill → decode: the boundary token and what belongs to it. Bytes travel separately."""

    handoff_id: str
    token_id: int
    prompt_len: int
    prompt_digest: str
    cached_tokens: int


class Abort(Message, frozen=True, kw_only=True):
    """Leg → other leg: this handoff is over on my side."""

    handoff_id: str
    outcome: str
    reason: str
    message: str
    by: str


class LegStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker knows of its leg of a handoff.

    state     of the leg; "closed" once it has ended, "" when the handoff was never heard of
    lacks     what it waits for that the other leg's worker sends: "pages", "handoff", "copies", ""
    whole     all of the KV has landed
    outcome, reason, message, by   of its end
    """

    handoff_id: str
    state: str = ""
    lacks: str = ""
    whole: bool = False
    outcome: str = ""
    reason: str = ""
    message: str = ""
    by: str = ""


class LegProbe(Message, frozen=True, kw_only=True):
    """Leg's worker → other leg's worker, every `heartbeat_s` while legs wait for each other: mine
    are like this, how are yours?"""

    asker: Peer
    legs: tuple[LegStatus, ...]


class LegReport(Message, frozen=True, kw_only=True):
    """Answer to LegProbe, behind what is sent again of what the asker lacks."""

    peer: Peer
    legs: tuple[LegStatus, ...]


# -- transfer ---------------------------------------------------------------------------------


class CopyJob(Message, frozen=True, kw_only=True):
    """Prefill → transfer: copy these pages. Jobs of one handoff run in order of `index`.

    again_to   of one that is sent again: the incarnation that has not got it. Another one may not
               know that the handoff is over, and its pages another request's
    """

    context: RequestContext
    index: int
    last: bool
    source: PoolRef
    source_pages: tuple[int, ...]
    destination: PoolRef
    destination_pages: tuple[int, ...]
    transfer_address: str | None
    prefill: Peer
    decode: Peer
    faults: dict[str, int] = {}
    again_to: str = ""


class CopyDone(Message, frozen=True, kw_only=True):
    """Transfer → prefill and decode: the bytes of job `index` are visible at the destination."""

    handoff_id: str
    index: int
    last: bool
    num_bytes: int


class CopyFailed(Message, frozen=True, kw_only=True):
    """Transfer → prefill and decode: neither job `index` nor a later one of it will run.

    settled   the destination pages are certain not to be written from here on
    """

    handoff_id: str
    index: int
    reason: str
    message: str
    settled: bool


class CancelCopies(Message, frozen=True, kw_only=True):
    """Prefill or decode → transfer: run no more jobs of this handoff; answer CopiesDrained.

    ask_jobs   the answer is to say which jobs of the asker have come
    """

    handoff_id: str
    reply_to: Peer
    ask_jobs: bool = False


class CopiesDrained(Message, frozen=True, kw_only=True):
    """Transfer → asker: no job of this handoff is running or will run; its pages may be reused.

    transfer     who answers: another incarnation knows nothing of what the one before it was told
    started_ns   when it started, on its clock: answers may overtake each other, so what comes last
                 need not be from the latest
    jobs         what was asked for: by handoff that is open there, how many of its jobs have come
    """

    handoff_id: str
    transfer: Peer
    started_ns: int = 0
    jobs: dict[str, int] = {}


# -- workers → gateway ------------------------------------------------------------------------


class TokenItem(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request from one step.

    index           output index of the first of them
    token_ids       empty only with a finish_reason that is known later than the last token
    finish_reason   "stop" or "length" with the last token, else None
    """

    handoff_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    cached_tokens: int | None = None


class Tokens(Message, frozen=True, kw_only=True):
    """Decode, prefill (early) or worker → gateway: one message per step, not per token."""

    instance: str
    items: tuple[TokenItem, ...]


class LegClosed(Message, frozen=True, kw_only=True):
    """Leg → gateway: this leg is over and holds nothing any more."""

    handoff_id: str
    instance: str
    outcome: str
    reason: str
    message: str
    by: str


# -- faults -----------------------------------------------------------------------------------


class InjectFaults(Message, frozen=True, kw_only=True):
    """Test → any process: from here on these go wrong. Obeyed only where settings allow faults.

    clear      disarm what is armed first; what is held back goes on
    reply_to   who gets a FaultReport; without faults and `clear` that is all that happens
    """

    faults: tuple[Fault, ...] = ()
    clear: bool = False
    reply_to: Peer | None = None


class FaultReport(Message, frozen=True, kw_only=True):
    """Answer to InjectFaults.

    armed      faults that will act yet, or may
    injected   how often each has acted since the process started, by name: "drop.CopyDone"
    """

    peer: Peer
    armed: int
    injected: dict[str, int]


AnyMessage = (
    Heartbeat
    | HeartbeatAck
    | RegisterPool
    | DecodeRequest
    | PrefillRequest
    | ColocatedRequest
    | Cancel
    | PagesReserved
    | Handoff
    | Abort
    | LegProbe
    | LegReport
    | CopyJob
    | CopyDone
    | CopyFailed
    | CancelCopies
    | CopiesDrained
    | Tokens
    | LegClosed
    | InjectFaults
    | FaultReport
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One frame. Raises WireError when it exceeds MAX_MESSAGE_BYTES."""
    frame = ENVELOPE + _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{type(message).__name__} has {len(frame)} bytes, the limit is {MAX_MESSAGE_BYTES}"
        )
    return frame


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in `frame`. Raises WireError for anything else; never runs foreign code."""
    head = bytes(frame[: len(ENVELOPE)])
    if head != ENVELOPE:
        if head[:3] == ENVELOPE[:3]:
            raise WireError(f"wire version {head[3:].hex()}, this process speaks {WIRE_VERSION}")
        raise WireError(f"frame of {len(frame)} bytes does not start with {ENVELOPE!r}")
    try:
        return _decoder.decode(frame[len(ENVELOPE) :])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"malformed message: {error}") from error
