"""One clause per wait reason and gap cause: what a request waited for, in numbers.

Owns wording only; reasons and their units are `pdtrace.stages.WaitReason` and `GapCause`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pdtrace.analysis.facts import NS_PER_MS, Wait
from pdtrace.duration import seconds_text
from pdtrace.inflight import WaitNow
from pdtrace.stages import STAGE_BY_NAME, GapCause, Mark, WaitReason


def describe_wait(wait: Wait) -> str:
    """A clause without a full stop: `needed 12 KV pages, 3 free; behind req-17`."""
    if wait.reason in _GAP_CLAUSES and _is_gap(wait):
        return _describe_gap(wait)
    try:
        reason = WaitReason(wait.reason)
    except ValueError:
        amounts = f":{_amounts(wait, 'units')}" if wait.needed is not None else ""
        clause = f"waited for {wait.reason}{amounts}"
    else:
        clause = _CLAUSES[reason](wait)
    if wait.position:
        clause += f"; {wait.position} ahead in the queue"
    blockers = wait.blockers or ((wait.blocker,) if wait.blocker else ())
    if blockers and not (len(blockers) == 1 and wait.reason in _NAMES_ITS_BLOCKER):
        clause += f"; behind {listed(blockers)}"
    return clause


_NAMES_ITS_BLOCKER = frozenset({WaitReason.HEAD_OF_LINE, WaitReason.WORKER_BUSY})


def describe_wait_now(stage: str | None, wait: WaitNow) -> str:
    """The same clause for a request that is looked at while it waits."""
    return describe_wait(
        Wait(
            stage=stage or "",
            reason=wait.reason,
            needed=wait.needed,
            free=wait.free,
            limit=wait.limit,
            position=wait.position,
            blocker=wait.blockers[0] if wait.blockers else None,
            blockers=wait.blockers,
        )
    )


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _is_gap(wait: Wait) -> bool:
    stage = STAGE_BY_NAME.get(wait.stage)
    return stage is not None and stage.end is Mark.TOKEN_GAP


def _describe_gap(wait: Wait) -> str:
    """`a prompt ran in the same worker: req-17, in step 42: that is 830 ms of the 910 ms gap`."""
    clause = _GAP_CLAUSES[wait.reason]
    if wait.reason == GapCause.BATCH_GROWTH and wait.batch is not None:
        clause += f", with {wait.batch} request{'' if wait.batch == 1 else 's'} in the batch"
    if wait.blockers:
        clause += f": {listed(wait.blockers)}"
    if wait.step is not None and wait.reason != GapCause.PROCESS_PAUSED:
        clause += f" (step {wait.step})"
    if wait.explained_ns is not None and wait.for_ns:
        share = min(1.0, wait.explained_ns / wait.for_ns)
        clause += (
            f"; that is {seconds_text(wait.explained_ns)} of the {seconds_text(wait.for_ns)} gap, "
            f"{share * 100:.0f} %"
        )
    return clause


def _capacity(one: str, many: str) -> Callable[[Wait], str]:
    def clause(wait: Wait) -> str:
        verb = "waited for" if wait.needed is None else "needed"
        return f"{verb}{_amounts(wait, one if wait.needed == 1 else many)}"

    return clause


def _amounts(wait: Wait, unit: str) -> str:
    """` 12 KV pages, 3 free, limit 64`, as far as known."""
    amounts = f" {unit}" if wait.needed is None else f" {wait.needed} {unit}"
    if wait.free is not None:
        amounts += f", {wait.free} free"
    if wait.limit is not None:
        amounts += f", limit {wait.limit}"
    return amounts


def _head_of_line(wait: Wait) -> str:
    return f"an earlier request in the same queue came first{_by(wait)}"


def _worker_busy(wait: Wait) -> str:
    return f"the worker was running a step of other requests{_by(wait)}"


def _by(wait: Wait) -> str:
    blockers = wait.blockers or ((wait.blocker,) if wait.blocker else ())
    return f": {blockers[0]}" if len(blockers) == 1 else ""


def _concurrency(wait: Wait) -> str:
    if wait.limit is not None:
        return f"the concurrency limit of {wait.limit} was reached"
    return "the concurrency limit was reached"


def _no_worker(wait: Wait) -> str:
    if wait.free is not None and wait.needed is not None:
        return f"needed {wait.needed} ready workers, had {wait.free}"
    return "no worker was ready"


def _copy_queue(wait: Wait) -> str:
    return "copy jobs of other transfers were ahead"


def _bandwidth(wait: Wait) -> str:
    if wait.limit is not None:
        return f"all {wait.limit} copies that the path carries at once were running"
    return "other copies shared its path"


def _preempted(wait: Wait) -> str:
    return "its pages went to running requests" + (
        f"; needed{_amounts(wait, 'KV pages')}" if wait.needed is not None else ""
    )


_STOOD_STILL = "its process stood still{}: it was stopped, frozen or had no processor"


def _process_paused(wait: Wait) -> str:
    length = "" if wait.needed is None else f" for {seconds_text(wait.needed * NS_PER_MS)}"
    return _STOOD_STILL.format(length)


_CLAUSES: Mapping[WaitReason, Callable[[Wait], str]] = MappingProxyType(
    {
        WaitReason.KV_PAGES: _capacity("KV page", "KV pages"),
        WaitReason.SLOTS: _capacity("slot in the running batch", "slots in the running batch"),
        WaitReason.TOKEN_BUDGET: _capacity(
            "token of the step's budget", "tokens of the step's budget"
        ),
        WaitReason.CONCURRENCY: _concurrency,
        WaitReason.NO_WORKER: _no_worker,
        WaitReason.PEER_NOT_READY: lambda _: "the other leg had not answered",
        WaitReason.WORKER_BUSY: _worker_busy,
        WaitReason.HEAD_OF_LINE: _head_of_line,
        WaitReason.PREEMPTED: _preempted,
        WaitReason.COPY_QUEUE: _copy_queue,
        WaitReason.BANDWIDTH: _bandwidth,
        WaitReason.PROCESS_PAUSED: _process_paused,
        WaitReason.INJECTED: lambda _: "delayed by a fault hook",
        WaitReason.UNKNOWN: lambda _: "the reason was not recorded",
    }
)

_GAP_CLAUSES: Mapping[str, str] = MappingProxyType(
    {
        GapCause.INTERFERING_PREFILL: "a prompt ran in the same worker",
        GapCause.BATCH_GROWTH: "the step itself took longer",
        GapCause.PREEMPTION: "its pages were taken away for others",
        GapCause.TRANSFER_LANDING: "the loop took in KV that had landed for others",
        GapCause.SCHEDULER_BUSY: "the loop did something else between two steps",
        GapCause.PROCESS_PAUSED: _STOOD_STILL.format(""),
        GapCause.INJECTED: "delayed by a fault hook",
        GapCause.UNKNOWN: "nothing that was recorded explains it",
    }
)
