"""The gaps between the writes of one stream: counted by length, and written as one short text.

Owns the tally and its text form (`pd.content.gap_counts`); knows nothing of who writes or judges.
There is no span for each token: this is what a trace can say of all of them. With the ladder of
histograms as edges, how many gaps exceed a limit on an edge is exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHARS = 200
"""Of the text; it fits a ring's record."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class GapCount:
    """Gaps longer than `over_ns` and at most `upto_ns` (None: without an end)."""

    over_ns: int
    upto_ns: int | None
    count: int


class GapTally:
    """Counts the gaps of one stream. `edges_s`: upper edges in seconds, ascending."""

    __slots__ = ("_counts", "_edges_s", "count", "longest_ns")

    def __init__(self, edges_s: Sequence[float]) -> None:
        self.count = 0
        self.longest_ns = 0
        self._edges_s = edges_s
        self._counts: dict[int, int] = {}

    def add(self, gap_ns: int) -> None:
        place = bisect_left(self._edges_s, gap_ns / _NS_PER_S)
        self._counts[place] = self._counts.get(place, 0) + 1
        self.count += 1
        self.longest_ns = max(self.longest_ns, gap_ns)

    def text(self) -> str | None:
        """`0.15-0.2:12 0.3-0.5:1`: seconds and how many; None without a gap. Where it would be too
        long the shortest gaps share one entry."""
        edges = self._edges_s
        found = [
            (edges[place - 1] if place else 0, edges[place] if place < len(edges) else None, count)
            for place, count in sorted(self._counts.items())
        ]
        while found:
            text = " ".join(
                f"{_plain(low)}-{'' if high is None else _plain(high)}:{count}"
                for low, high, count in found
            )
            if len(text) <= MAX_CHARS:
                return text
            (low, _, count), (_, high, more) = found[:2]
            found[:2] = [(low, high, count + more)]
        return None


def _plain(seconds: float) -> str:
    """Without an exponent, whose sign would look like a range."""
    return f"{seconds:.9f}".rstrip("0").rstrip(".")


def read_gap_counts(text: str) -> tuple[GapCount, ...]:
    """The entries of such a text. Raises ValueError for any other."""
    found: list[GapCount] = []
    for entry in text.split():
        span, _, count = entry.rpartition(":")
        low, _, high = span.partition("-")
        over, upto = float(low), float(high) if high else None
        if not 0 <= over < 1e9 or (upto is not None and not over < upto < 1e9) or int(count) < 0:
            raise ValueError(f"{entry!r} is no count of gaps")
        found.append(
            GapCount(
                round(over * _NS_PER_S),
                None if upto is None else round(upto * _NS_PER_S),
                int(count),
            )
        )
    return tuple(found)
