"""Whether one request kept the objectives, as far as its spans tell. Pure.

Owns which requests an objective counts, and what is known of gaps between tokens; shares over many
requests are `pdtrace.analysis.goodput`'s.

No span stands for a token. The gateway records how many gaps a stream had, the longest of them, and
how many by length (`pdtrace.gaps`). Where it did not (other engines, older recordings) the decode
worker's view bounds it: gaps above its threshold are spans, and all others together take no longer
than the rest of generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from pdtrace import semconv as a
from pdtrace.analysis.attributes import integer, text
from pdtrace.analysis.facts import nanoseconds
from pdtrace.analysis.timeline import Timeline
from pdtrace.gaps import GapCount, read_gap_counts
from pdtrace.slo import Slo
from pdtrace.stages import Outcome

GAP, PREEMPTED, GENERATE = "decode.gap", "decode.preempted", "decode.generate"
BAD_OUTCOMES = frozenset({Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST})
_NS_PER_S = 1_000_000_000


class Aim(StrEnum):
    """What an objective is about."""

    TTFT = "ttft"
    TOKEN_GAP = "token_gap"  # noqa: S105 - output tokens
    ERRORS = "errors"
    E2E = "e2e"


class Held(StrEnum):
    """Whether a request kept an objective that counts it."""

    KEPT = "kept"
    MISSED = "missed"
    UNKNOWN = "unknown"  # the recording does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What is known of the gaps between the writes of one stream. Nanoseconds.

    count     None: nobody counted them
    least_ns  the longest gap is at least this long
    most_ns   and at most this long; None: without a bound
    within_ns time in which all of them lie
    exact     whether the gateway measured them; else they are seen from the decode worker
    counts    all of them by length, where the gateway recorded that
    """

    count: int | None
    least_ns: int
    most_ns: int | None
    within_ns: int
    exact: bool
    counts: tuple[GapCount, ...] = ()

    def held(self, limit_ns: int) -> Held:
        """Whether every gap is at most the limit."""
        if self.least_ns > limit_ns:
            return Held.MISSED
        if self.most_ns is not None and self.most_ns <= limit_ns:
            return Held.KEPT
        return Held.UNKNOWN

    def longer(self, limit_ns: int) -> tuple[int, int]:
        """How many gaps are longer than the limit: at least, at most. 0 and 0 where nobody counted
        them."""
        held = self.held(limit_ns)
        if not self.count or held is Held.KEPT:
            return 0, 0
        least = 1 if held is Held.MISSED else 0
        if self.counts:
            # The edge for a whole number of seconds stands a microsecond above it.
            edge_ns = limit_ns if limit_ns % _NS_PER_S else limit_ns + 1_000
            over = sum(one.count for one in self.counts if one.over_ns >= limit_ns)
            most = sum(o.count for o in self.counts if o.upto_ns is None or o.upto_ns > edge_ns)
            return max(least, over), max(least, most)
        # They follow each other: the others above the limit fit into what the longest leaves.
        others = max(0, self.within_ns - self.least_ns) // (limit_ns + 1)
        return least, max(least, min(self.count, least + others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One finished request, held to the objectives.

    held  by objective; one that does not count the request is not in it
    good  whether it completed and kept every limit
    """

    timeline: Timeline
    gaps: Gaps | None
    held: Mapping[Aim, Held]
    good: Held

    @property
    def missed(self) -> tuple[Aim, ...]:
        return tuple(aim for aim, held in self.held.items() if held is Held.MISSED)


def limit_ns(slo: Slo, aim: Aim) -> int | None:
    """None for what has no limit."""
    seconds = {Aim.TTFT: slo.ttft_s, Aim.TOKEN_GAP: slo.token_gap_s, Aim.E2E: slo.e2e_s}.get(aim)
    return None if seconds is None else round(seconds * _NS_PER_S)


def target_of(slo: Slo, aim: Aim) -> float:
    """The share that has to keep it."""
    return {
        Aim.TTFT: slo.ttft_objective,
        Aim.TOKEN_GAP: slo.token_gap_objective,
        Aim.ERRORS: slo.error_objective,
        Aim.E2E: slo.e2e_objective,
    }[aim]


def aims_of(slo: Slo) -> tuple[Aim, ...]:
    """Those that something is promised of."""
    return tuple(aim for aim in Aim if aim is Aim.ERRORS or limit_ns(slo, aim) is not None)


def grade(timeline: Timeline, slo: Slo, aims: tuple[Aim, ...]) -> Graded:
    """Hold one finished request to the objectives.

    `errors` counts requests that were admitted and not cancelled; `ttft` streams that had a first
    token; `token_gap` streams with two writes or more; `e2e` requests that completed.
    """
    gaps = gaps_of(timeline)
    found = {
        Aim.TTFT: _ttft(timeline, limit_ns(slo, Aim.TTFT)),
        Aim.TOKEN_GAP: gaps and gaps.held(limit_ns(slo, Aim.TOKEN_GAP) or 0),
        Aim.ERRORS: _ended_well(timeline),
        Aim.E2E: _e2e(timeline, limit_ns(slo, Aim.E2E)),
    }
    held = {aim: one for aim in aims if (one := found[aim]) is not None}
    return Graded(
        timeline=timeline, gaps=gaps, held=MappingProxyType(held), good=_good(timeline, held)
    )


def _good(timeline: Timeline, held: Mapping[Aim, Held]) -> Held:
    if timeline.outcome not in {None, Outcome.COMPLETED} or Held.MISSED in held.values():
        return Held.MISSED
    if timeline.outcome is None or Held.UNKNOWN in held.values():
        return Held.UNKNOWN
    return Held.KEPT


def _ended_well(timeline: Timeline) -> Held | None:
    if timeline.outcome is None:
        return Held.UNKNOWN
    if timeline.outcome in BAD_OUTCOMES:
        return Held.MISSED
    return Held.KEPT if timeline.outcome is Outcome.COMPLETED else None


def _ttft(timeline: Timeline, limit: int | None) -> Held | None:
    if limit is None or not timeline.streamed:
        return None
    if timeline.ttft_ns is None:
        wrote = timeline.outcome is Outcome.COMPLETED and timeline.output_tokens != 0
        return Held.UNKNOWN if wrote else None
    return _at_most(timeline.ttft_ns, limit)


def _e2e(timeline: Timeline, limit: int | None) -> Held | None:
    if limit is None or timeline.outcome is not Outcome.COMPLETED:
        return None
    return _at_most(timeline.total_ns, limit)


def _at_most(value: int, limit: int) -> Held:
    return Held.KEPT if value <= limit else Held.MISSED


def gaps_of(timeline: Timeline) -> Gaps | None:
    """None for a request that has none: it does not stream, or wrote less than twice."""
    if not timeline.streamed:
        return None
    count = integer(timeline.attributes, a.CONTENT_GAPS)
    longest = nanoseconds(timeline.attributes, a.LONGEST_GAP_SECONDS)
    if count is not None and count <= 0:
        return None
    if count is not None and longest is not None:
        within = max(longest, timeline.total_ns - (timeline.ttft_ns or 0))
        return Gaps(
            count=count,
            least_ns=longest,
            most_ns=longest,
            within_ns=within,
            exact=True,
            counts=_gap_counts(timeline, count),
        )
    return _gaps_seen_by_worker(timeline)


def _gap_counts(timeline: Timeline, count: int) -> tuple[GapCount, ...]:
    """Nothing where they were not recorded, or not whole."""
    try:
        counts = read_gap_counts(text(timeline.attributes, a.GAP_COUNTS) or "")
    except ValueError:
        return ()
    return counts if sum(one.count for one in counts) == count else ()


def _gaps_seen_by_worker(timeline: Timeline) -> Gaps | None:
    last = timeline.attempts
    spans = [v.duration_ns for v in timeline.visits if v.name == GAP and v.attempt == last]
    generated = [v for v in timeline.visits if v.name == GENERATE and v.attempt == last]
    tokens = timeline.output_tokens
    if not spans and (timeline.ttft_ns is None or (tokens is not None and tokens < 2)):
        return None
    longest, whole = max(spans, default=0), sum(v.duration_ns for v in generated)
    return Gaps(
        count=tokens - 1 if tokens is not None and tokens > 1 else None,
        least_ns=longest,
        most_ns=max(longest, whole - sum(spans)) if generated else None,
        within_ns=max(whole, sum(spans)),
        exact=False,
    )
