"""Which finished requests must not be sampled away, and why.

Owns the rule and its reasons; what asks for it is an attribute on each of the request's spans, so
that a collector keeps the request whole whatever it decided of its trace: a caller's trace may hold
many requests, minutes apart. The reasons are the policies of `collector/`, where the same is asked
of a whole trace (a test compares the two). Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.slo import DEFAULT_SLO, Slo
from pdtrace.spans import AttrValue, Span, StatusCode
from pdtrace.stages import Outcome

TTFT_VARIABLE, TOKEN_GAP_VARIABLE = "PD_SLO_TTFT_S", "PD_SLO_TOKEN_GAP_S"
"""Environment variables with the limits, seconds; the files of `collector/` read them too."""

_NOT_COMPLETED = frozenset(
    {Outcome.FAILED, Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.LOST}
)  # rejected requests are not: under overload they are most of the traffic, and alike

_log = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why a request is kept; the first that holds."""

    NOT_COMPLETED = "not-completed"  # the request or an attempt
    ERROR = "error"
    RETRIED = "retried"
    SLOW = "slow-for-its-stage"  # the verdict on it
    INCOMPLETE = "incomplete"  # known to lack something, or impossible
    SLO_MISSED = "slo-missed"


def why_keep(
    spans: Sequence[Span], verdict: Mapping[str, AttrValue], slo: Slo = DEFAULT_SLO
) -> Reason | None:
    """Why the request of `spans` is kept; None where nothing is wrong with it.

    verdict  attributes that its root gets beside its own
    """
    # What is in order completed, at once, without an error: its root alone can tell more.
    looked_at = (spans.root,) if isinstance(spans, OrderlySpans) else spans
    found = {reason for span in looked_at for reason in _reasons(span, slo)}
    if a.STALL_STAGE.key in verdict:
        found.add(Reason.SLOW)
    return next((reason for reason in Reason if reason in found), None)


def _reasons(span: Span, slo: Slo) -> Iterable[Reason]:
    attributes = span.attributes
    outcome = text(attributes, a.OUTCOME)
    if outcome in _NOT_COMPLETED:
        yield Reason.NOT_COMPLETED
    if span.status is StatusCode.ERROR and outcome != Outcome.REJECTED:
        yield Reason.ERROR
    if _exceeds(attributes, a.ATTEMPT, 1):
        yield Reason.RETRIED
    if a.INCOMPLETE.key in attributes or a.VIOLATION.key in attributes:
        yield Reason.INCOMPLETE
    if (
        attributes.get(a.STREAM.key) is True and _exceeds(attributes, a.TTFT_SECONDS, slo.ttft_s)
    ) or _exceeds(attributes, a.LONGEST_GAP_SECONDS, slo.token_gap_s):
        yield Reason.SLO_MISSED


def _exceeds(attributes: Mapping[str, AttrValue], attr: a.Attr, limit: float) -> bool:
    value = attributes.get(attr.key)
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
