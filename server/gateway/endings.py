"""What an attempt and a request leave behind when they are over: marks, metrics, a line in the log.

Owns the record; how it ended is decided in `pipeline`.
"""

from __future__ import annotations

import logging

from pdtrace.stages import Mark, Outcome
from server.gateway.call import Call
from server.gateway.metrics import GatewayMetrics
from server.gateway.now import NS_PER_S
from server.log_fields import logged

_logger = logging.getLogger(__name__)


def end_attempt(
    call: Call, outcome: Outcome, reason: str, by: str, metrics: GatewayMetrics, *, at_ns: int
) -> None:
    """An attempt failed, and another one follows."""
    call.trace.abort(outcome, reason, by, at_ns=at_ns)
    call.trace.end(at_ns=at_ns)
    _count_attempt(call, outcome, metrics)
    _logger.warning(
        "request_id=%s trace_id=%s attempt=%d outcome=%s reason=%s by=%s: tries again",
        logged(call.context.request_id),
        call.context.trace_id,
        call.context.attempt,
        outcome.value,
        reason,
        by,
    )


def end_request(
    call: Call,
    outcome: Outcome,
    reason: str | None,
    by: str | None,
    metrics: GatewayMetrics,
    *,
    at_ns: int,
) -> None:
    """The request is over, with the attempt that it was in."""
    output = call.output
    call.trace.mark(
        Mark.COMPLETED,
        outcome,
        reason,
        by,
        call.responder.status,
        None if output is None else output.num_tokens,
        None if output is None else output.finish_reason,
        None if output is None else output.cached_tokens,
        None if call.first_write_ns is None else call.gaps.count,
        call.gaps.longest_ns / NS_PER_S if call.gaps.count else None,
        call.gaps.text(),
        at_ns=at_ns,
    )
    _count_attempt(call, outcome, metrics)
    seconds = (at_ns - call.received_ns) / NS_PER_S
    metrics.ended(call.operation, outcome, reason or "", seconds)
    for stage, spent_s in call.stages.items():
        metrics.stage(stage, spent_s)
    _log_end(call, outcome, reason, seconds)


def _count_attempt(call: Call, outcome: Outcome, metrics: GatewayMetrics) -> None:
    if call.retried is not None:
        metrics.retried(call.retried, outcome)


def _log_end(call: Call, outcome: Outcome, reason: str | None, seconds: float) -> None:
    first = call.first_write_ns
    _logger.info(
        "request_id=%s trace_id=%s outcome=%s reason=%s status=%s prompt_tokens=%d "
        "output_tokens=%d attempts=%d seconds=%.4f first_token=%s %s",
        logged(call.context.request_id),
        call.context.trace_id,
        outcome.value,
        reason or "-",
        call.responder.status or "-",
        len(call.prompt_ids),
        call.output.num_tokens if call.output is not None else 0,
        call.context.attempt,
        seconds,
        "-" if first is None else f"{(first - call.received_ns) / NS_PER_S:.4f}",
        " ".join(f"{stage}={spent_s:.4f}" for stage, spent_s in call.stages.items()),
    )
