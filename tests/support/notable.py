"""Which requests tail sampling has to keep, said once more and apart from collector/."""

from __future__ import annotations

from collections.abc import Sequence

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.slo import DEFAULT_SLO
from pdtrace.spans import Span, StatusCode


def is_notable(spans: Sequence[Span]) -> bool:
    """Whether a request has to be kept."""
    for span in spans:
        own = span.attributes
        odd = (a.STALL_STAGE, a.INCOMPLETE, a.VIOLATION)
        ttft_s, gap_s = own.get(a.TTFT_SECONDS.key, 0.0), own.get(a.LONGEST_GAP_SECONDS.key, 0.0)
        assert isinstance(ttft_s, float)
        assert isinstance(gap_s, float)
        if (
            text(own, a.OUTCOME) not in {None, "completed"}
            or span.status is StatusCode.ERROR
            or any(attr.key in own for attr in odd)
            or (own.get(a.STREAM.key) is True and ttft_s > DEFAULT_SLO.ttft_s)
            or gap_s > DEFAULT_SLO.token_gap_s
        ):
            return True
    return False
