"""The one seam from what a scheduler does to the marks that pdtrace records.

Owns which state change is which mark and the values it carries; knows nothing of rings or spans.
The loops call nothing of pdtrace but `TraceObserver` and, through it, `RequestTrace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from pdtrace.recorder import Recorder
from pdtrace.stages import Mark, Outcome, WaitReason
from server.request import ColocatedState, DecodeState, Leg, PrefillState

if TYPE_CHECKING:
    from server.admission import Wait
    from server.colocated.leg import ColocatedLeg
    from server.decode.leg import DecodeLeg
    from server.gaps import GapReason
    from server.prefill.leg import PrefillLeg

NS_PER_MS = 1_000_000
Value: TypeAlias = int | float | str | bool | None
Values: TypeAlias = tuple[Value, ...]

_P, _D, _C = PrefillState, DecodeState, ColocatedState


def _none(_leg: Leg[Any], _free: int) -> Values:
    return ()


def _reservation(leg: PrefillLeg, _free: int) -> Values:
    return (len(leg.destination_pages),)


def _prefill_start(leg: PrefillLeg | ColocatedLeg, _free: int) -> Values:
    return (leg.cached_tokens, leg.batch_size)


def _source(leg: PrefillLeg, _free: int) -> Values:
    return (leg.num_pages,)


def _pages(leg: DecodeLeg | ColocatedLeg, free: int) -> Values:
    return (leg.marked_pages, free)


def _batch(leg: DecodeLeg | ColocatedLeg, _free: int) -> Values:
    return (leg.batch_size,)


def _resumed(leg: DecodeLeg | ColocatedLeg, _free: int) -> Values:
    return (leg.marked_pages, leg.recomputed or None)


def _output(leg: DecodeLeg | ColocatedLeg, _free: int) -> Values:
    return (leg.generation.num_tokens, leg.generation.finish_reason, leg.preemptions)


_Changes: TypeAlias = Mapping[tuple[Any, Any], tuple[Mark, Callable[[Any, int], Values]] | None]

_PREFILL: _Changes = {
    (_P.ARRIVED, _P.BOOTSTRAP): (Mark.PREFILL_RECEIVED, _none),
    (_P.BOOTSTRAP, _P.QUEUED): (Mark.HANDSHAKE_DONE, _reservation),
    (_P.QUEUED, _P.RUNNING): (Mark.PREFILL_STARTED, _prefill_start),
    (_P.RUNNING, _P.SENDING): (Mark.PREFILL_FINISHED, _none),
    (_P.SENDING, _P.CLOSED): (Mark.SOURCE_RELEASED, _source),
}
_DECODE: _Changes = {
    (_D.ARRIVED, _D.RESERVING): (Mark.RESERVE_RECEIVED, _none),
    (_D.RESERVING, _D.AWAITING_KV): (Mark.PAGES_RESERVED, _pages),
    (_D.AWAITING_KV, _D.LANDED): (Mark.KV_NOTICED, _none),
    (_D.LANDED, _D.COMMITTING): (Mark.DECODE_ADMITTED, _batch),
    (_D.COMMITTING, _D.RUNNING): (Mark.FIRST_TOKEN_COMMITTED, _none),
    (_D.RUNNING, _D.PREEMPTED): (Mark.PREEMPTED, _pages),
    (_D.PREEMPTED, _D.RUNNING): (Mark.RESUMED, _resumed),
    (_D.PREEMPTED, _D.RECOMPUTING): None,  # until it runs again, it is preempted
    (_D.RECOMPUTING, _D.PREEMPTED): None,
    (_D.RECOMPUTING, _D.RUNNING): (Mark.RESUMED, _resumed),
    (_D.RUNNING, _D.FINISHED): (Mark.DECODE_FINISHED, _output),
    (_D.FINISHED, _D.CLOSED): (Mark.DECODE_RELEASED, _pages),
}
_COLOCATED: _Changes = {
    (_C.ARRIVED, _C.QUEUED): (Mark.RESERVE_RECEIVED, _none),
    (_C.QUEUED, _C.PREFILLING): (Mark.PREFILL_STARTED, _prefill_start),
    (_C.PREFILLING, _C.COMMITTING): (Mark.PREFILL_FINISHED, _none),
    (_C.COMMITTING, _C.RUNNING): (Mark.FIRST_TOKEN_COMMITTED, _none),
    (_C.RUNNING, _C.PREEMPTED): (Mark.PREEMPTED, _pages),
    (_C.PREEMPTED, _C.RUNNING): (Mark.RESUMED, _resumed),
    (_C.PREEMPTED, _C.RECOMPUTING): None,
    (_C.RECOMPUTING, _C.PREEMPTED): None,
    (_C.RECOMPUTING, _C.RUNNING): (Mark.RESUMED, _resumed),
    (_C.RUNNING, _C.FINISHED): (Mark.DECODE_FINISHED, _output),
    (_C.FINISHED, _C.CLOSED): (Mark.DECODE_RELEASED, _pages),
}
MARKS_OF_CHANGES: Mapping[type, _Changes] = MappingProxyType(
    {PrefillState: _PREFILL, DecodeState: _DECODE, ColocatedState: _COLOCATED}
)
"""Mark of each state change on the way to completion, None for one within a stage. A leg that ends
otherwise is aborted."""

_DRAINING = (_P.DRAINING, _D.DRAINING)
_CLOSED = (_P.CLOSED, _D.CLOSED, _C.CLOSED)


class TraceObserver:
    """Turns state changes, chunks, waits and gaps of legs into marks.

    A change that cannot be recorded is reported to the recorder, which guards: it counts and logs,
    or raises under test. `RequestTrace` guards its own calls in the same way.

    free_pages   pages free at the instant of the call
    """

    def __init__(self, recorder: Recorder, free_pages: Callable[[], int]) -> None:
        self._report = recorder.report
        self._free_pages = free_pages

    def changed(self, leg: Leg[Any], previous: Any, at_ns: int) -> None:
        """`leg` left state `previous` for its present one. Ends the trace when it is closed."""
        try:
            self._mark_change(leg, previous, at_ns)
        except Exception as error:  # telemetry never reaches the request
            self._report(error)

    def _mark_change(self, leg: Leg[Any], previous: Any, at_ns: int) -> None:
        state = leg.state
        ending = leg.ending
        changes = MARKS_OF_CHANGES[type(state)]
        if ending is None or (
            # The gateway may end a request as completed, at a stop string, wherever its legs are.
            ending.outcome is Outcome.COMPLETED and (previous, state) in changes
        ):
            told = changes[previous, state]
            if told is not None:
                mark, values = told
                leg.trace.mark(mark, *values(leg, self._free_pages()), at_ns=at_ns)
        elif previous not in _DRAINING:
            leg.trace.abort(ending.outcome, ending.reason, ending.by, at_ns=at_ns)
        if state in _CLOSED:
            leg.trace.end(at_ns=at_ns)

    def chunk_started(self, leg: Leg[Any], index: int, num_tokens: int, at_ns: int) -> None:
        leg.trace.mark(Mark.CHUNK_STARTED, index, num_tokens, at_ns=at_ns)

    def chunk_finished(self, leg: Leg[Any], index: int, at_ns: int) -> None:
        leg.trace.mark(Mark.CHUNK_FINISHED, index, at_ns=at_ns)

    def forwarded(self, leg: Leg[Any], at_ns: int) -> None:
        """Prefill sends the boundary token to the gateway itself."""
        leg.trace.mark(Mark.FIRST_TOKEN_FORWARDED, at_ns=at_ns)

    def waits(self, leg: Leg[Any], wait: Wait, blockers: tuple[str, ...], at_ns: int) -> None:
        """A plan left `leg` out because of `blockers`; recorded when the cause changes."""
        leg.trace.wait(
            leg.stage,
            wait.reason,
            needed=wait.needed,
            free=wait.free,
            limit=wait.limit,
            position=wait.position,
            blocker=blockers,
            at_ns=at_ns,
        )

    def cause(
        self,
        leg: Leg[Any],
        stage: str,
        reason: WaitReason,
        at_ns: int,
        *,
        needed: int | None = None,
        free: int | None = None,
        limit: int | None = None,
        blockers: tuple[str, ...] = (),
    ) -> None:
        """`stage` of `leg` takes long for a reason that no plan gave."""
        leg.trace.wait(
            stage,
            reason,
            needed=needed,
            free=free,
            limit=limit,
            blocker=blockers,
            at_ns=at_ns,
        )

    def paused(self, leg: Leg[Any], stage: str, begin_ns: int, end_ns: int) -> None:
        """This process stood still while `leg` was in `stage`, or on its way to it."""
        leg.trace.wait(
            stage,
            WaitReason.PROCESS_PAUSED,
            needed=(end_ns - begin_ns) // NS_PER_MS,
            at_ns=begin_ns,
        )

    def gap(
        self,
        leg: Leg[Any],
        index: int,
        gap_s: float,
        reason: GapReason,
        *,
        step: int,
        batch_size: int,
        at_ns: int,
    ) -> None:
        """Output token `index` came `gap_s` seconds after the one before, in step `step`."""
        leg.trace.mark(
            Mark.TOKEN_GAP,
            index,
            gap_s,
            reason.cause,
            reason.seconds,
            step,
            batch_size,
            reason.blocker,
            at_ns=at_ns,
        )
