"""One clause per wait reason: what a request waited for, in numbers.

Owns wording only; reasons and their units are `pdtrace.stages.WaitReason`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdtrace.stages import WaitReason
from pdtrace.timeline import Wait


def describe_wait(wait: Wait) -> str:
    """A clause without a full stop: `needed 12 KV pages, 3 free; behind req-17`."""
    try:
        reason = WaitReason(wait.reason)
    except ValueError:
        amounts = f":{_amounts(wait, 'units')}" if wait.needed is not None else ""
        clause = f"waited for {wait.reason}{amounts}"
    else:
        clause = _CLAUSES[reason](wait)
    if wait.position:
        clause += f"; {wait.position} ahead in the queue"
    if wait.blocker and wait.blocker not in clause:
        clause += f"; behind {wait.blocker}"
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
    return f": {wait.blocker}" if wait.blocker else ""


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
        WaitReason.INJECTED: lambda _: "delayed by a fault hook",
        WaitReason.UNKNOWN: lambda _: "the reason was not recorded",
    }
)
