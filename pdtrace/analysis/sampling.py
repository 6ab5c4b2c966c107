"""Whether a recording may hold a choice of the requests only: shares of it are none of all then.
Pure."""

from __future__ import annotations

import re

from pdtrace.analysis.sources import Recording
from pdtrace.spans import Span, Trace

_THRESHOLD = re.compile(r"(?:^|[,;=])th:([0-9a-f]+)")
"""In the trace state: traces below it were dropped; zeros drop none (OpenTelemetry, `ot=th:…`)."""
_POLICY = "tailsampling.policy"
_SAMPLER = "sampler.type"
_ALL = frozenset({"const", "remote"})


class SamplingSign:
    """The first sign of sampling on the spans of traces that come one by one. `text` says which."""

    def __init__(self) -> None:
        self.text: str | None = None

    def see(self, trace: Trace) -> None:
        if self.text is None:
            self.text = next((sign for span in trace.spans if (sign := _sign_of(span))), None)


def sampling_warnings(
    recording: Recording, sign: SamplingSign, *, all_kept: bool = False
) -> tuple[str, ...]:
    """Sentences on why the requests of a recording may be a choice.

    sign      has seen its traces
    all_kept  the user says that the Jaeger keeps every trace
    """
    found: list[str] = []
    if recording.from_jaeger and not all_kept:
        names = ", ".join(recording.from_jaeger)
        found.append(
            f"{names}: a Jaeger holds what sampling kept, as a rule everything that failed or was "
            "slow and few of the rest. These are shares and rates of what was kept, NOT of all "
            "requests, and usual times are those of the kept. Where every trace is kept, say "
            "--all-kept."
        )
    if sign.text is not None:
        found.append(
            f"Spans tell of sampling ({sign.text}): these are shares and rates of what was kept, "
            "NOT of all requests."
        )
    return tuple(found)


def _sign_of(span: Span) -> str | None:
    if span.trace_state and (threshold := _THRESHOLD.search(span.trace_state)):
        return f"tracestate {threshold[0].lstrip(',;=')}" if threshold[1].strip("0") else None
    attributes = span.attributes
    if _POLICY in attributes:
        return f"{_POLICY} {attributes[_POLICY]}"
    if _SAMPLER in attributes and attributes[_SAMPLER] not in _ALL:
        return f"{_SAMPLER} {attributes[_SAMPLER]}"
    return None
