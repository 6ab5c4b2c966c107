"""States of a request in each scheduler process, and the only way from one to the next.

Owns the transition tables, the deadline of each state and how a request ended; knows nothing of
messages, pages or engines. Every path ends in CLOSED; a state that holds pages which a transfer
may still touch leaves through DRAINING.

    prefill leg   ARRIVED ▶ BOOTSTRAP ▶ QUEUED ▶ RUNNING ▶ SENDING ▶ CLOSED

    decode leg    ARRIVED ▶ RESERVING ▶ AWAITING_KV ▶ LANDED ▶ COMMITTING ▶ RUNNING ▶ FINISHED
                  FINISHED ▶ CLOSED                                         RUNNING ⇄ PREEMPTED
                                              PREEMPTED ⇄ RECOMPUTING ▶ RUNNING

    colocated     ARRIVED ▶ QUEUED ▶ PREFILLING ▶ COMMITTING ▶ RUNNING ▶ FINISHED ▶ CLOSED
                                                               RUNNING ⇄ PREEMPTED
                                              PREEMPTED ⇄ RECOMPUTING ▶ RUNNING

    aborted       any state but FINISHED ▶ CLOSED, or, where a transfer may still read or write the
                  pages (prefill RUNNING and SENDING, decode AWAITING_KV), ▶ DRAINING ▶ CLOSED
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pdtrace.recorder import RequestContext, RequestTrace
from pdtrace.stages import Outcome
from server.config import Deadlines
from server.errors import IntegrityError
from server.faults import FaultHolds
from server.said import Said
from server.wire.messages import Peer

NS_PER_S = 1_000_000_000
MAX_ENDING_CHARS = 1000


class PrefillState(StrEnum):
    """Where a request is in a prefill worker."""

    ARRIVED = "arrived"  # in the inbox
    BOOTSTRAP = "bootstrap"  # waits for decode's pages
    QUEUED = "queued"  # waits for tokens of the budget and for source pages
    RUNNING = "running"  # chunks compute; copies of earlier chunks run beside them
    SENDING = "sending"  # prompt computed; source pages are held for the transfer
    DRAINING = "draining"  # aborted; the transfer may still read source pages
    CLOSED = "closed"


class DecodeState(StrEnum):
    """Where a request is in a decode worker."""

    ARRIVED = "arrived"  # in the inbox
    RESERVING = "reserving"  # waits for pages
    AWAITING_KV = "awaiting_kv"  # pages are published; the transfer may write them
    LANDED = "landed"  # KV is whole; waits for a slot in the batch
    COMMITTING = "committing"  # has a slot; the boundary token is not committed yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # without pages; KV is in host memory, or must be computed again
    RECOMPUTING = "recomputing"  # has pages; its KV is being computed again
    FINISHED = "finished"  # last token generated; pages not yet freed
    DRAINING = "draining"  # aborted; the transfer may still write its pages
    CLOSED = "closed"


class ColocatedState(StrEnum):
    """Where a request is in a colocated worker."""

    ARRIVED = "arrived"  # in the inbox
    QUEUED = "queued"  # waits for a slot, tokens of the budget and pages
    PREFILLING = "prefilling"
    COMMITTING = "committing"  # prompt computed; the boundary token is not committed yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # without pages; KV is in host memory, or must be computed again
    RECOMPUTING = "recomputing"  # has pages; its KV is being computed again
    FINISHED = "finished"  # last token generated; pages not yet freed
    CLOSED = "closed"


_P, _D, _C = PrefillState, DecodeState, ColocatedState

PREFILL_TRANSITIONS: Mapping[PrefillState, frozenset[PrefillState]] = MappingProxyType(
    {
        _P.ARRIVED: frozenset({_P.BOOTSTRAP, _P.CLOSED}),
        _P.BOOTSTRAP: frozenset({_P.QUEUED, _P.CLOSED}),
        _P.QUEUED: frozenset({_P.RUNNING, _P.CLOSED}),
        _P.RUNNING: frozenset({_P.SENDING, _P.DRAINING, _P.CLOSED}),
        _P.SENDING: frozenset({_P.DRAINING, _P.CLOSED}),
        _P.DRAINING: frozenset({_P.CLOSED}),
        _P.CLOSED: frozenset(),
    }
)
DECODE_TRANSITIONS: Mapping[DecodeState, frozenset[DecodeState]] = MappingProxyType(
    {
        _D.ARRIVED: frozenset({_D.RESERVING, _D.CLOSED}),
        _D.RESERVING: frozenset({_D.AWAITING_KV, _D.CLOSED}),
        _D.AWAITING_KV: frozenset({_D.LANDED, _D.DRAINING, _D.CLOSED}),
        _D.LANDED: frozenset({_D.COMMITTING, _D.CLOSED}),
        _D.COMMITTING: frozenset({_D.RUNNING, _D.CLOSED}),
        _D.RUNNING: frozenset({_D.PREEMPTED, _D.FINISHED, _D.CLOSED}),
        _D.PREEMPTED: frozenset({_D.RUNNING, _D.RECOMPUTING, _D.CLOSED}),
        _D.RECOMPUTING: frozenset({_D.RUNNING, _D.PREEMPTED, _D.CLOSED}),
        _D.FINISHED: frozenset({_D.CLOSED}),
        _D.DRAINING: frozenset({_D.CLOSED}),
        _D.CLOSED: frozenset(),
    }
)
COLOCATED_TRANSITIONS: Mapping[ColocatedState, frozenset[ColocatedState]] = MappingProxyType(
    {
        _C.ARRIVED: frozenset({_C.QUEUED, _C.CLOSED}),
        _C.QUEUED: frozenset({_C.PREFILLING, _C.CLOSED}),
        _C.PREFILLING: frozenset({_C.COMMITTING, _C.CLOSED}),
        _C.COMMITTING: frozenset({_C.RUNNING, _C.CLOSED}),
        _C.RUNNING: frozenset({_C.PREEMPTED, _C.FINISHED, _C.CLOSED}),
        _C.PREEMPTED: frozenset({_C.RUNNING, _C.RECOMPUTING, _C.CLOSED}),
        _C.RECOMPUTING: frozenset({_C.RUNNING, _C.PREEMPTED, _C.CLOSED}),
        _C.FINISHED: frozenset({_C.CLOSED}),
        _C.CLOSED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a request in a state is doing, for deadlines and messages.

    stage       stage that is open in this state
    deadline    field of `Deadlines` that bounds the stay; None: `request_s` alone bounds it
    """

    stage: str
    deadline: str | None = None


PREFILL_INFO: Mapping[PrefillState, StateInfo] = MappingProxyType(
    {
        _P.ARRIVED: StateInfo("hop.dispatch"),
        # Decode's queue for pages is decode's to bound; `handshake_s` counts once they are known.
        _P.BOOTSTRAP: StateInfo("prefill.bootstrap"),
        _P.QUEUED: StateInfo("prefill.queue", "prefill_queue_s"),
        _P.RUNNING: StateInfo("prefill.compute", "prefill_compute_s"),
        _P.SENDING: StateInfo("transfer", "transfer_s"),
        _P.DRAINING: StateInfo("prefill.hold", "drain_s"),
    }
)
DECODE_INFO: Mapping[DecodeState, StateInfo] = MappingProxyType(
    {
        _D.ARRIVED: StateInfo("hop.dispatch"),
        _D.RESERVING: StateInfo("decode.reserve", "reserve_s"),
        _D.AWAITING_KV: StateInfo("transfer", "await_kv_s"),
        _D.LANDED: StateInfo("decode.queue", "decode_queue_s"),
        _D.COMMITTING: StateInfo("decode.first", "decode_queue_s"),
        _D.RUNNING: StateInfo("decode.generate"),
        _D.PREEMPTED: StateInfo("decode.preempted", "preempted_s"),
        _D.RECOMPUTING: StateInfo("decode.preempted", "preempted_s"),
        _D.FINISHED: StateInfo("decode.generate"),
        _D.DRAINING: StateInfo("transfer", "drain_s"),
    }
)
COLOCATED_INFO: Mapping[ColocatedState, StateInfo] = MappingProxyType(
    {
        _C.ARRIVED: StateInfo("hop.dispatch"),
        _C.QUEUED: StateInfo("prefill.queue", "prefill_queue_s"),
        _C.PREFILLING: StateInfo("prefill.compute", "prefill_compute_s"),
        _C.COMMITTING: StateInfo("decode.first", "decode_queue_s"),
        _C.RUNNING: StateInfo("decode.generate"),
        _C.PREEMPTED: StateInfo("decode.preempted", "preempted_s"),
        _C.RECOMPUTING: StateInfo("decode.preempted", "preempted_s"),
        _C.FINISHED: StateInfo("decode.generate"),
    }
)


def stage_deadlines(deadlines: Deadlines) -> dict[str, float]:
    """Seconds after which a request in a stage is given up, for those who watch from outside.

    The shortest where several states are in a stage; the whole request's where none is bounded.
    """
    queue_s = deadlines.gateway_queue_s
    stages: dict[str, float] = {"gateway.queue": queue_s, "gateway.route": queue_s}
    for table in (PREFILL_INFO, DECODE_INFO, COLOCATED_INFO):
        for info in table.values():
            if info.deadline == "drain_s":  # the request has ended already
                continue
            seconds: float = getattr(deadlines, info.deadline or "request_s")
            stages[info.stage] = min(seconds, stages.get(info.stage, seconds))
    return stages


class IllegalTransition(IntegrityError):  # noqa: N818 -- the name is the field's word for it
    """A state change that the tables do not allow: a bug of ours."""

    code = "illegal_transition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a leg ended. `reason` is a stable code, `message` a sentence without request content.

    Its texts may be another process's and are sent on with more: they are cut when long.
    """

    outcome: Outcome
    reason: str
    message: str
    by: str

    def __post_init__(self) -> None:
        for name in ("reason", "message", "by"):
            text: str = getattr(self, name)
            if len(text) > MAX_ENDING_CHARS:
                object.__setattr__(self, name, f"{text[:MAX_ENDING_CHARS]}…")


StateT = TypeVar("StateT", PrefillState, DecodeState, ColocatedState)


class Observer(Protocol):
    """Told of every state change; `server.tracing` turns changes into marks."""

    def changed(self, leg: Leg[StateT], previous: StateT, at_ns: int) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Leg(Generic[StateT]):
    """One request in one process.

    created_ns    arrival of its request; entered_ns: of its present state
    deadline_ns   when it times out, CLOCK_MONOTONIC: the earlier of its state's deadline and the
                  request's; None once closed
    ending        how it ended, or is about to once drained; None while it is on its way
    said          what the trace was last told of why a plan left it out
    other         state of the leg that it waits for, as that one's worker last said; "": unknown
    misses        how often that worker said that all was sent, while this leg lacked some of it
    """

    transitions: ClassVar[Mapping[Any, frozenset[Any]]]
    infos: ClassVar[Mapping[Any, StateInfo]]

    context: RequestContext
    trace: RequestTrace
    gateway: Peer
    observer: Observer
    deadlines: Deadlines
    holds: FaultHolds
    created_ns: int
    state: StateT
    entered_ns: int = field(init=False)
    deadline_ns: int | None = field(init=False)
    ending: Ending | None = None
    said: Said | None = None
    other: str = ""
    misses: int = 0

    def __post_init__(self) -> None:
        self.entered_ns = self.created_ns
        self.deadline_ns = self._deadline(self.created_ns)

    @property
    def handoff_id(self) -> str:
        return self.context.handoff_id

    @property
    def request_id(self) -> str:
        return self.context.request_id

    @property
    def stage(self) -> str:
        """Stage that is open; the last one once closed."""
        info = self.infos.get(self.state)
        return "" if info is None else info.stage

    @property
    def waits_in(self) -> str:
        """Stage that keeps the leg waiting; not its own while the other leg's is known."""
        return self.stage

    @property
    def wake_ns(self) -> int | None:
        """When the scheduler must look at this leg again without being told to."""
        release_ns = self.holds.next_release_ns
        if release_ns is None or self.deadline_ns is None:
            return self.deadline_ns
        return min(self.deadline_ns, release_ns)

    def advance(self, to: StateT, at_ns: int) -> None:
        """Go to state `to` and tell the observer. Raises IllegalTransition."""
        if to not in self.transitions[self.state]:
            allowed = ", ".join(sorted(self.transitions[self.state])) or "nothing"
            raise IllegalTransition(
                f"{self.handoff_id}: {self.state} to {to}, expected one of {allowed}"
            )
        previous, self.state = self.state, to
        self.said = None
        self.entered_ns = at_ns
        self.deadline_ns = self._deadline(at_ns)
        self.observer.changed(self, previous, at_ns)

    def limit(self, deadline: str, from_ns: int) -> None:
        """The rest of the stay in the present state is bounded by this field of `Deadlines`."""
        self.deadline_ns = self._until(deadline, from_ns)

    def _deadline(self, entered_ns: int) -> int | None:
        info = self.infos.get(self.state)
        return None if info is None else self._until(info.deadline, entered_ns)

    def _until(self, deadline: str | None, from_ns: int) -> int:
        whole_ns = self.created_ns + round(self.deadlines.request_s * NS_PER_S)
        if deadline is None:
            return whole_ns
        stay_ns = from_ns + round(getattr(self.deadlines, deadline) * NS_PER_S)
        # A drain has its own time: the request's may have passed already.
        return stay_ns if deadline == "drain_s" else min(whole_ns, stay_ns)
