"""Which finished requests must not be sampled away, and why.

Owns the rule and its reasons; what asks for it is an attribute on each of the request's spans, so
that a collector keeps the request whole whatever it decided of its trace: a caller's trace may hold
many requests, minutes apart. The reasons are the policies of `collector/`, where the same is asked
of a whole trace (a test compares the two). Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from pdtrace import semconv as a
from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.slo import DEFAULT_SLO, Slo
from pdtrace.spans import AttrValue, Span, StatusCode
from pdtrace.stages import Outcome

TTFT_VARIABLE, TOKEN_GAP_VARIABLE = "PD_SLO_TTFT_S", "PD_SLO_TOKEN_GAP_S"
"""Environment variables with the limits, seconds; the files of `collector/` read them too."""

# Rejected requests are not among them: under overload they are most of the traffic, and alike.
_NOT_COMPLETED = (Outcome.FAILED, Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.LOST)

_OUTCOME, _ATTEMPT, _STREAM = a.OUTCOME.key, a.ATTEMPT.key, a.STREAM.key
_INCOMPLETE, _VIOLATION = a.INCOMPLETE.key, a.VIOLATION.key
_TTFT, _LONGEST_GAP = a.TTFT_SECONDS.key, a.LONGEST_GAP_SECONDS.key
_STALL_STAGE = a.STALL_STAGE.key
_COMPLETED = Outcome.COMPLETED.value

_log = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why a request is kept; the first that holds."""

    NOT_COMPLETED = "not-completed"  # the request or an attempt
    ERROR = "error"
    RETRIED = "retried"
    SLOW = "slow-for-its-stage"  # the verdict on it
    INCOMPLETE = "incomplete"  # known to lack something, or impossible
    SLO_MISSED = "slo-missed"


_RANKS = {reason: rank for rank, reason in enumerate(Reason)}


def why_keep(
    spans: Sequence[Span], verdict: Mapping[str, AttrValue], slo: Slo = DEFAULT_SLO
) -> Reason | None:
    """Why the request of `spans` is kept; None where nothing is wrong with it.

    verdict  attributes that its root gets beside its own
    """
    # What is in order completed, at once, without an error: its root alone can tell more.
    looked_at = (spans.root,) if isinstance(spans, OrderlySpans) else spans
    found = [reason for span in looked_at if (reason := _reason(span, slo)) is not None]
    if _STALL_STAGE in verdict:
        found.append(Reason.SLOW)
    return min(found, key=_RANKS.__getitem__) if found else None


def _reason(span: Span, slo: Slo) -> Reason | None:
    """The first that this span tells. Runs for each request."""
    attributes = span.attributes
    outcome = attributes.get(_OUTCOME)
    if outcome != _COMPLETED and outcome in _NOT_COMPLETED:
        return Reason.NOT_COMPLETED
    if span.status is StatusCode.ERROR and outcome != Outcome.REJECTED:
        return Reason.ERROR
    if _exceeds(attributes.get(_ATTEMPT), 1):
        return Reason.RETRIED
    if _INCOMPLETE in attributes or _VIOLATION in attributes:
        return Reason.INCOMPLETE
    if _exceeds(attributes.get(_LONGEST_GAP), slo.token_gap_s) or (
        attributes.get(_STREAM) is True and _exceeds(attributes.get(_TTFT), slo.ttft_s)
    ):
        return Reason.SLO_MISSED
    return None


def _exceeds(value: AttrValue | None, limit: float) -> bool:
    return isinstance(value, int | float) and value > limit


def with_reason(spans: Sequence[Span], reason: Reason) -> Sequence[Span]:
    """The same spans, each of which says so."""
    if isinstance(spans, OrderlySpans):
        spans.share(a.KEEP.key, reason.value)
        return spans
    return [
        msgspec.structs.replace(span, attributes={**span.attributes, a.KEEP.key: reason.value})
        for span in spans
    ]


def limits_from(environ: Mapping[str, str]) -> Slo:
    """The limits that the environment names. One that cannot be used is said in one line and left
    out: what is kept is not worth a start."""
    slo = DEFAULT_SLO
    for variable, name in ((TTFT_VARIABLE, "ttft_s"), (TOKEN_GAP_VARIABLE, "token_gap_s")):
        given = environ.get(variable, "").strip()
        if not given:
            continue
        try:
            slo = Slo(**{**msgspec.structs.asdict(slo), name: float(given)})
        except ValueError as error:
            _log.warning(
                "%s=%r is left out: %s. Give seconds above 0, such as 0.5", variable, given, error
            )
    return slo
